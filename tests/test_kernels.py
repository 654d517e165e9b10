"""The worker team: every chunk once, any thread count, and alive after whatever happens."""
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from processes import printed, python

from fucina import kernels
from fucina.errors import DTypeError, InvalidConfigError
from fucina.kernels import (CHUNK, LEAST, f32, f64, get_num_threads, inline, kernel, num_workers,
                            parallel_for, set_num_threads, set_workers, sum_squares)
from fucina.rng import gaussian_fill_at_fast, uniform_fill

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def workers():
    "Sets this thread's number of workers; undone afterwards."
    old = set_workers(None)
    yield set_workers
    set_workers(old)


def chunks(size, **options):
    "The chunks a job ran, sorted."
    done = []
    parallel_for(size, lambda start, stop: done.append((start, stop)), **options)
    return sorted(done)


# --- numbers of threads ---

def test_the_number_of_threads(workers):
    default = get_num_threads()
    try:
        set_num_threads(np.int64(37))  # more than any machine of ours has
        assert get_num_threads() == num_workers() == 37
        assert workers(3) is None and num_workers() == 3 and get_num_threads() == 37
        assert workers(None) == 3 and num_workers() == 37
    finally: set_num_threads(default)


@pytest.mark.parametrize('bad', [0, -1])
def test_no_threads_is_refused(bad):
    default = get_num_threads()
    for f in set_num_threads, set_workers:
        with pytest.raises(InvalidConfigError, match=str(bad)): f(bad)
        with pytest.raises(TypeError): f(1.5)
    assert get_num_threads() == default == num_workers()


def test_the_override_belongs_to_one_thread(workers):
    workers(5)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(num_workers()))
    thread.start()
    thread.join()
    assert seen == [get_num_threads()]


@pytest.mark.parametrize('value, limit', [('1', 1), ('0', 8), ('junk', 8), ('-2', 8), ('', 8),
                                          ('1.5', 8), ('999', 8)])
def test_the_environment_can_only_lower(value, limit):
    assert 1 <= kernels._default_threads(value) <= limit
    if limit == 8: assert kernels._default_threads(value) == kernels._default_threads('')


def test_the_environment_is_read_and_a_team_exits_cleanly():
    code = ('import numpy as np; from fucina.kernels import *; print(get_num_threads())\n'
            'set_num_threads(6); print(sum_squares(np.ones(2**18, f32)))')
    assert python(code, FUCINA_MAX_THREADS='1') == '1\n262144.0\n'


# --- the team ---

@pytest.mark.parametrize('n', [1, 2, 3, 7, 16])
def test_every_chunk_once(workers, n):
    workers(n)
    for size, chunk in ((0, 4), (1, 4), (4, 4), (5, 4), (1001, 10), (1000, 1000)):
        grid = [(i, min(i + chunk, size)) for i in range(0, size, chunk)]
        assert chunks(size, chunk=chunk, least=0) == grid
    for size in (LEAST - 1, LEAST, LEAST + 1):
        assert chunks(size) == [(i, min(i + CHUNK, size)) for i in range(0, size, CHUNK)]


def test_several_threads_take_part(workers):
    workers(4)
    names, gate = set(), threading.Barrier(4)

    def meet(start, stop):
        names.add(threading.get_ident())
        gate.wait(10)

    parallel_for(4, meet, chunk=1, least=0)
    assert len(names) == 4 and threading.get_ident() in names


def test_small_jobs_stay_with_the_caller(workers):
    workers(4)
    idents = set()
    parallel_for(LEAST - 1, lambda *_: idents.add(threading.get_ident()))
    assert idents == {threading.get_ident()}


def test_nested_jobs_run_on_the_spot(workers):
    workers(3)
    inner = []

    def outer(start, stop):
        me = threading.get_ident()
        def note(a, b): inner.append((start, a, me == threading.get_ident()))
        parallel_for(5, note, chunk=1, least=0)

    parallel_for(6, outer, chunk=1, least=0)
    assert sorted(inner) == [(i, j, True) for i in range(6) for j in range(5)]


@pytest.mark.parametrize('n', [1, 4])
def test_an_exception_arrives_after_the_running_chunks(workers, n):
    workers(n)
    running, lock = [0], threading.Lock()

    def task(start, stop):
        with lock: running[0] += 1
        try:
            time.sleep(0.001)
            if start == 20: raise LookupError('chunk 20')
            if start % 3 == 0: raise IndexError('several fail')
        finally:
            with lock: running[0] -= 1

    for _ in range(20):
        with pytest.raises(LookupError): parallel_for(40, task, chunk=1, least=0)
        assert running == [0]
    assert chunks(40, chunk=1, least=0) == [(i, i + 1) for i in range(40)]


def test_a_job_leaves_nothing_behind(workers):
    workers(4)
    data = np.zeros(100)
    for fail in (False, True):
        def task(start, stop, data=data):
            time.sleep(0.0005)
            data[start] += 1
            if fail: raise ValueError

        try: parallel_for(100, task, chunk=1, least=0)
        except ValueError: pass
        import weakref
        gone = weakref.ref(task)
        del task
        assert gone() is None  # neither the team nor a frame of a helper holds it


def test_resizing_at_any_time(workers):
    for n in (1, 5, 2, 8, 1, 3, 12, 2):
        workers(n)
        assert len(chunks(50, chunk=1, least=0)) == 50


def test_eight_python_threads_at_once():
    x = np.random.default_rng(0).standard_normal(2**18 + 77).astype(f32)
    expected = sum_squares(x)
    wrong, stop = [], time.monotonic() + 0.5

    def member(k):
        set_workers(1 + k % 4)
        y = np.empty(LEAST + k, f32)
        gaussian_fill_at_fast(k, 0, y, 1)
        first = y.tobytes()
        while time.monotonic() < stop:
            if sum_squares(x) != expected: wrong.append(k)
            gaussian_fill_at_fast(k, 0, y, 1)
            if y.tobytes() != first: wrong.append(k)

    members = [threading.Thread(target=member, args=(k,)) for k in range(8)]
    for m in members: m.start()
    for m in members: m.join(30)
    assert not wrong and not any(m.is_alive() for m in members)


@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='needs interval timers')
@pytest.mark.parametrize('n', [1, 3])
def test_fifty_interrupts(workers, n):
    workers(n)
    running, lock, rng = [0], threading.Lock(), np.random.default_rng(n)

    def task(start, stop):
        with lock: running[0] += 1
        time.sleep(0.0002)
        with lock: running[0] -= 1

    def strike(signum, frame):
        if lock.locked(): signal.setitimer(signal.ITIMER_REAL, 1e-4)  # it is our own lock
        else: raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, strike)
    hits = 0
    try:
        for _ in range(50):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 6e-3))
                while True: parallel_for(20, task, chunk=1, least=0)
            except KeyboardInterrupt: hits += 1
            if n > 1: assert running[0] <= 1  # at most the caller's own chunk was cut short
            running[0] = 0
            assert not kernels._local.inside
            assert len(chunks(30, chunk=1, least=0)) == 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert hits == 50


def test_an_interrupt_of_real_kernels(workers):
    "The array a kernel writes is quiet once the interrupt has arrived."
    workers(3)
    x = np.empty(2**21, f32)
    gaussian_fill_at_fast(1, 0, x, 1)
    for k in range(20):
        timer = threading.Timer(0.001 * (k % 5), lambda: signal.raise_signal(signal.SIGINT))
        try:
            timer.start()
            while True: gaussian_fill_at_fast(1, 0, x, 1)
        except KeyboardInterrupt: pass
        timer.join()
        before = x.copy()
        time.sleep(0.002)
        assert np.array_equal(before, x)
    assert sum_squares(gaussian_fill_at_fast(1, 0, x, 1)) > 0


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_fork_with_a_live_team(workers):
    workers(4)
    x = np.ones(LEAST + 5, f32)
    expected = sum_squares(x)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # fork beside threads, 3.12
        pid = os.fork()
    if pid == 0:
        try:
            ok = kernels._team.bells == [] and sum_squares(x) == expected
            ok = ok and len(chunks(100, chunk=1, least=0)) == 100
            os._exit(0 if ok and len(kernels._team.bells) == 3 else 1)
        finally: os._exit(2)
    end = time.monotonic() + 20
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if done == (0, 0): os.kill(pid, signal.SIGKILL)
    assert done == (pid, 0)
    assert sum_squares(x) == expected


def test_without_more_threads(workers, monkeypatch):
    "Where the system gives no threads, the caller does everything."
    def refuse(self): raise RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, 'start', refuse)
    monkeypatch.setattr(kernels, '_team', kernels._Team())
    workers(4)
    assert len(chunks(50, chunk=1, least=0)) == 50


# --- sum of squares ---

ANCHORS = {3: '0x1.9ffd6b08bd531p+0', 16: '0x1.7756e60a65a75p+2', 21: '0x1.c0557e71a7aadp+2',
           37: '0x1.abdfa7002072fp+3', 32768: '0x1.537f4e0139f80p+13',
           32769: '0x1.537f5b1f74d15p+13', 70001: '0x1.6b3122bd4fb16p+14'}


@pytest.mark.parametrize('n', [1, 2, 3, 7])
def test_sum_squares_anchors(workers, n):
    workers(n)
    for size, expected in ANCHORS.items():
        total = sum_squares(uniform_fill(7, np.empty(size, f32), -1, 1))
        assert isinstance(total, f64) and float(total).hex() == expected


@pytest.mark.parametrize('n', [1, 2, 3, 7])
def test_sum_squares_golden(workers, n):
    workers(n)
    with np.load(Path(__file__).parent / 'goldens' / 'optim_misc.npz') as d:
        sizes, seed, out = d['sum_squares/len'], d['sum_squares/seed0'], d['sum_squares/out']
    for k, size in enumerate(sizes):
        x = uniform_fill(int(seed.reshape(-1)[0]) + k, np.empty(int(size), f32), -1, 1)
        assert float(sum_squares(x)).hex() == float(out[k]).hex()


def by_the_book(v):
    "The pinned order, one number at a time."
    total = 0.0
    for start in range(0, len(v), CHUNK):
        c = [float(x)**2 for x in v[start:start + CHUNK]]
        lanes, i = [0.0] * 16, 0
        while i + 16 <= len(c):
            for k in range(16): lanes[k] += c[i + k]
            i += 16
        while i + 4 <= len(c):
            for k in range(4): lanes[k] += c[i + k]
            i += 4
        four = [(lanes[k] + lanes[k + 4]) + (lanes[k + 8] + lanes[k + 12]) for k in range(4)]
        part = ((four[0] + four[1]) + four[2]) + four[3]
        for x in c[i:]: part += x
        total += part
    return total


@pytest.mark.parametrize('n', [1, 2, 3, 5, 7])
def test_sum_squares_by_the_book(workers, n):
    workers(n)
    rng = np.random.default_rng(n)
    for size in [*range(40), CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 19, LEAST - 1, LEAST + 1]:
        v = rng.standard_normal(size).astype(f32)
        assert float(sum_squares(v)) == by_the_book(v)


def test_sum_squares_of_a_large_vector(workers):
    v = np.random.default_rng(0).standard_normal(2**18 + 12347).astype(f32)
    totals = set()
    for n in (1, 2, 3, 5, None):
        workers(n)
        totals.add(float(sum_squares(v)))
    assert len(totals) == 1
    plain = np.add.accumulate(v.astype(f64)**2)[-1]
    assert abs(totals.pop() - plain) <= 1e-12 * plain


def test_sum_squares_arguments():
    x = np.arange(6, dtype=f32).reshape(2, 3)
    assert sum_squares(x) == sum_squares(x.T) == 55 and sum_squares(x[:, ::2]) == 38
    assert sum_squares(np.empty(0, f32)) == 0
    assert np.isnan(sum_squares(np.array([1, np.nan], f32)))
    assert sum_squares(np.array([1, np.inf], f32)) == np.inf
    for bad in (x.astype(f64), x.astype('>f4'), [1.0]):
        with pytest.raises(DTypeError): sum_squares(bad)


# --- compiled code ---

X86 = pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='x86 names')


@X86
def test_the_sum_is_vector_code_and_not_fused():
    loop = njit(error_model='numpy')(kernels._squares.py_func)
    loop(np.ones(99, f32), np.empty(16))
    asm = ''.join(loop.inspect_asm().values())
    assert re.search(r'\sv?addpd\s', asm) and re.search(r'\sv?mulpd\s', asm)
    assert not re.search(r'\sv?f(n?m(add|sub)|ml[as])', asm)


def test_a_formula_keeps_both_roundings():
    @inline
    def affine(a, x, b): return a * x + b

    def loop(a, x, b, out):
        for i in range(out.size): out[i] = affine(a, x[i], b)

    x, out = np.random.default_rng(0).standard_normal(100_000).astype(f32), np.empty(100_000, f32)
    kernel(loop)(f32(1.1), x, f32(0.3), out)
    assert np.array_equal(out, f32(1.1) * x + f32(0.3))


def test_no_parallel_and_no_fastmath_in_the_package():
    for source in (ROOT / 'fucina').rglob('*.py'):
        text = source.read_text(encoding='utf-8')
        assert not re.search(r'\bprange\b|parallel\s*=\s*True|fastmath\s*=\s*True', text), source


def test_no_folder_for_machine_code(monkeypatch):
    "Where nothing can be cached, kernels compile on every start."
    real = kernels._compile

    def compile(f, **options):
        if options.get('cache'): raise RuntimeError('cannot cache function: no locator available')
        return real(f, **options)

    monkeypatch.setattr(kernels, '_compile', compile)
    from fucina import rng
    assert kernels.kernel(rng._words.py_func)(np.uint64(1), *2 * [np.empty(0, np.uint64)]) is None


SMALL = """
import zlib
import numpy as np
from fucina.dtypes import narrow_bf16, narrow_f16, widen_f16
from fucina.kernels import *
from fucina.rng import *
x = gaussian_fill_at_fast(42, 3, np.empty(50, f32), 1.0)
y = gaussian_fill(42, np.empty(50, f32), 1.0)
n = randint_fill(1, np.empty(50, i64), -9, 9)
p = randperm_fill(1, np.empty(50, i64))
u = gumbel_fill(2, uniform_fill(1, np.empty(50, f32), -1, 1))
h = widen_f16(narrow_f16(x))
team = []
old = set_workers(2)
parallel_for(50, lambda a, b: team.append(a), chunk=1, least=0)
set_workers(old)
print([zlib.crc32(a) for a in (x, y, n, p, u, h, narrow_bf16(x))], sum_squares(x).hex(),
      at_array(5, [1, 2]).tolist(), sorted(team))
"""


def test_without_the_compiler():
    assert python(SMALL, NUMBA_DISABLE_JIT='1') == printed(SMALL)


COLD = 'import numpy as np; from fucina.kernels import *; print(sum_squares(np.ones(99999, f32)))'


def test_two_processes_on_a_cold_cache(tmp_path):
    env = {**os.environ, 'NUMBA_CACHE_DIR': str(tmp_path)}
    both = [subprocess.Popen([sys.executable, '-W', 'error', '-c', COLD], env=env, cwd=ROOT,
                             text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(2)]
    results = [p.communicate(timeout=60) for p in both]
    assert results == [('99999.0\n', '')] * 2 and [p.returncode for p in both] == [0, 0]
    assert any(tmp_path.rglob('*.nbi'))
