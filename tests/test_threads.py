"""Threads: one context each, the same bits for any number, and no crash when they crowd."""
import os
import threading
import time

import fucina
import numpy as np
import pytest
from processes import python
from fucina import (ContextThreadError, ExecContext, constant, current_context, exec_scope,
                    no_grad, optim, variable)
from fucina.exec import thread_state
from fucina.kernels import LEAST, get_num_threads, num_workers, set_num_threads
from fucina.nn import MLP

f32 = np.float32


def digest(*arrays):
    return [np.ascontiguousarray(a).tobytes() for a in arrays]


@pytest.fixture(autouse=True)
def threads_are_put_back():
    old = get_num_threads()
    yield
    set_num_threads(old)


def in_thread(f):
    "The result of `f` in a new thread, or its exception."
    box = []
    def run():
        try: box.append(f())
        except BaseException as e: box.append(e)
    t = threading.Thread(target=run)
    t.start()
    t.join(30)
    assert not t.is_alive()
    return box[0]


def training(seed, steps=12):
    net = MLP((3, 16, 16, 4), seed=seed)
    opt = optim.AdamW(lr=0.01)
    for p in net.parameters(): opt.add_param(p)
    x = fucina.randn((32, 3), 'batch in', seed=seed)
    losses = []
    for k in range(steps):
        with exec_scope():
            loss = net(x.dropout(0.1, seed=k)).cross_entropy('out', [i % 4 for i in range(32)])
            loss.backward()
            opt.clip_grad_norm(1.0)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses, digest(*net.parameters())


# --- contexts

def test_every_thread_has_its_own_default():
    mine = current_context()
    theirs = in_thread(current_context)
    assert isinstance(theirs, ExecContext) and theirs is not mine
    with ExecContext(gemm='pinned', debug=True, workers=3) as c, no_grad(), exec_scope():
        assert current_context() is c and num_workers() == 3
        def look():
            s = thread_state()
            return (current_context() is c, fucina.get_gemm(), s.debug, s.no_grad, s.scope,
                    num_workers())
        assert in_thread(look) == (False, 'blas', False, 0, None, get_num_threads())


def test_a_scope_adopts_nothing_of_another_thread():
    x = constant([1.0, 2], 'd')
    with ExecContext(), exec_scope() as s:
        y = in_thread(lambda: x.scale(2))
        assert s.stats['results'] == 0
    assert y.tolist() == [2, 4]


def test_a_context_is_active_in_one_thread_at_a_time():
    c = ExecContext()
    with c:
        for use in (c.__enter__, c.open_exec_scope, lambda: c.exec_scope().__enter__()):
            assert isinstance(in_thread(use), ContextThreadError)
        with c: pass                             # the same thread may
        assert isinstance(in_thread(c.__enter__), ContextThreadError)
        s = c.open_exec_scope()
        assert isinstance(in_thread(lambda: c.close_exec_scope(s)), ContextThreadError)
        assert c.stats()['open_scopes'] == 1
        c.close_exec_scope(s)

    def borrow():
        with c: return current_context() is c
    assert in_thread(borrow) is True
    with c: pass


def test_the_default_context_belongs_to_its_thread():
    c = current_context()
    assert isinstance(in_thread(c.__enter__), ContextThreadError)
    with c: assert current_context() is c
    assert isinstance(in_thread(c.__enter__), ContextThreadError)


def test_a_handle_dropped_in_another_thread_closes_the_scope_at_home():
    c = ExecContext()
    with c:
        handles = [c.open_exec_scope()]
        y = variable([1], 'd').scale(2)
        in_thread(handles.clear)
        assert thread_state().scope is None and c.stats()['open_scopes'] == 0
        assert 'released' in repr(y)


def test_workers_of_a_context():
    set_num_threads(4)
    with ExecContext(workers=2):
        assert num_workers() == 2
        with ExecContext(): assert num_workers() == 4
        with ExecContext(workers=1): assert num_workers() == 1
        assert num_workers() == 2 and get_num_threads() == 4
    assert num_workers() == 4


# --- the same bits

OPS = {
    'tanh': lambda x: x.tanh(), 'add': lambda x: x + x, 'gelu': lambda x: x.gelu(),
    'scale': lambda x: x.scale(1.1), 'clamp': lambda x: x.clamp(-1, 1), 'exp': lambda x: x.exp(),
    'dropout': lambda x: x.dropout(0.3, 5), 'sum_all': lambda x: x.sum_all(),
    'mean': lambda x: (x * x).mean_all(), 'maximum': lambda x: x.maximum(x.neg()),
    'reciprocal': lambda x: x.reciprocal()}


@pytest.mark.parametrize('name', OPS)
def test_pointwise_bits_do_not_depend_on_workers(name):
    for n in (LEAST - 1, LEAST, LEAST + 1):
        seen = []
        for workers in (1, 2, 3, 7):
            x = fucina.randn((n,), 'd', seed=n, requires_grad=True)
            with ExecContext(workers=workers), exec_scope():
                y = OPS[name](x)
                y.backward(np.linspace(-1, 1, n, dtype=f32) if y.ndim else None)
                seen.append(digest(y, x.grad))
        assert all(s == seen[0] for s in seen)


ROWS = {
    'softmax': lambda x, w: x.softmax('in'), 'log_softmax': lambda x, w: x.log_softmax('in'),
    'logsumexp': lambda x, w: x.logsumexp('in'), 'sum': lambda x, w: x.sum('in'),
    'sum over rows': lambda x, w: x.sum('batch'), 'add': lambda x, w: x + w,
    'mul': lambda x, w: x * w, 'rms_norm': lambda x, w: x.rms_norm('in', 1e-5, w),
    'layer_norm': lambda x, w: x.layer_norm('in', 1e-5, w, w),
    'cross_entropy': lambda x, w: x.cross_entropy(
        'in', np.arange(x.shape[0]) % x.shape[1], label_smoothing=0.1),
    'variance': lambda x, w: x.variance('in'), 'max': lambda x, w: x.max('in'),
    'gather': lambda x, w: x.gather('batch', np.arange(x.shape[0]) // 3)}


@pytest.mark.parametrize('name', ROWS)
def test_row_bits_do_not_depend_on_workers(name):
    for rows, n in ((1031, 127), (1031, 128), (3, 43_691), (130_001, 1)):
        seen = []
        for workers in (1, 2, 3, 7):
            x = fucina.randn((rows, n), 'batch in', seed=1, requires_grad=True)
            w = fucina.randn((n,), 'in', seed=2, requires_grad=True)
            with ExecContext(workers=workers), exec_scope():
                y = ROWS[name](x, w)
                seed = np.cos(np.arange(y.size, dtype=f32)).reshape(y.shape)
                y.backward(seed)
                seen.append(digest(y, x.grad, *([w.grad] if w.grad is not None else [])))
        assert all(s == seen[0] for s in seen)


def test_pinned_products_do_not_depend_on_workers():
    for m, k, n in ((512, 64, 512), (65, 333, 700)):
        seen = []
        for workers in (1, 2, 3, 7):
            x = fucina.randn((m, k), 'batch in', seed=1, requires_grad=True)
            w = fucina.randn((n, k), 'out in', seed=2, requires_grad=True)
            with ExecContext(workers=workers, gemm='pinned'), exec_scope():
                y = x.dot(w, 'in')
                (y * y).sum_all().backward()
                seen.append(digest(y, x.grad, w.grad))
        assert all(s == seen[0] for s in seen)


def test_training_bits_do_not_depend_on_workers():
    seen = []
    for workers in (1, 2, 3, 7):
        with ExecContext(workers=workers, gemm='pinned'):
            net = MLP((256, 512, 16), seed=3)
            opt = optim.AdamW(lr=0.01)
            for p in net.parameters(): opt.add_param(p)
            x = fucina.randn((400, 256), 'batch in', seed=1)
            for _ in range(3):
                with exec_scope():
                    net(x).cross_entropy('out', np.arange(400) % 16).backward()
                    opt.clip_grad_norm(0.1)
                    opt.step()
                    opt.zero_grad()
        seen.append(digest(*net.parameters()))
    assert all(s == seen[0] for s in seen)


def test_four_workers_equal_a_serial_run():
    serial = [training(seed) for seed in range(4)]
    results = [None] * 4
    start = threading.Barrier(4)

    def evaluator(k):
        with ExecContext(workers=1):
            start.wait()
            results[k] = training(k)
    threads = [threading.Thread(target=evaluator, args=(k,)) for k in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert results == serial


# --- crowds

def test_eight_threads_call_everything_at_once():
    set_num_threads(3)
    big = fucina.randn((LEAST + 100,), 'd', seed=1)
    wide = fucina.randn((300, 600), 'batch in', seed=2)
    w = fucina.randn((64, 600), 'out in', seed=3)
    labels = np.arange(300) % 64

    def work():
        a = big.tanh().dropout(0.2, seed=4).sum_all()
        b = wide.softmax('in').dot(w, 'in').cross_entropy('out', labels)
        v = variable(w, 'out in')
        wide.layer_norm('in', 1e-5).dot(v, 'in').gelu().mean_all().backward()
        return digest(a, b, v.grad)
    expected, stop = work(), time.monotonic() + 1
    wrong, count = [], [0] * 8

    def crowd(k):
        try:
            while time.monotonic() < stop:
                if k % 2:
                    with exec_scope(): got = work()
                else: got = work()
                if got != expected: wrong.append(k)
                count[k] += 1
        except BaseException as e:
            wrong.append(e)
            raise
    threads = [threading.Thread(target=crowd, args=(k,)) for k in range(8)]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert not any(t.is_alive() for t in threads) and wrong == [] and min(count) > 0


def test_plans_are_made_by_many_threads_at_once():
    failed = []

    def shapes(k):
        try:
            for n in range(1, 120):
                x, y = fucina.ones((n, 3), f'a{k} b'), fucina.ones(3, 'b')
                assert (x + y).dot(y, 'b').sum_all().item() == 6 * n
        except BaseException as e: failed.append(e)
    threads = [threading.Thread(target=shapes, args=(k % 4,)) for k in range(8)]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert failed == []


# --- fork

FORK = '''
import os, sys, threading, warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)   # fork with threads: our point
import numpy as np, fucina
from fucina import ExecContext, exec_scope
fucina.set_num_threads(3)
x = fucina.randn((2**18,), "d", seed=1)
def step():
    with exec_scope(): return x.tanh().sum_all().item()
want = step()
assert threading.active_count() > 1              # the team is alive
with exec_scope():
    y = x.scale(2)
    child = os.fork()
    if not child:
        ok = step() == want and threading.active_count() > 1 and y.numpy().size == x.size
        ok = ok and fucina.current_context().stats()["open_scopes"] == 1
        os._exit(0 if ok else 3)
    _, status = os.waitpid(child, 0)
assert step() == want
sys.exit(os.waitstatus_to_exitcode(status))
'''


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork on this system')
def test_fork_with_a_live_team():
    python(FORK)
