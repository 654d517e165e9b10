"""Random streams: golden bits, windows, and a definition in plain integers."""
import math
import platform
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numba import njit
from optimizers import at_any_number_of_threads
from processes import printed, python

from fucina import rng
from fucina.errors import DTypeError, ReadOnlyDataError, UnsupportedViewError
from fucina.kernels import LEAST, f32, f64, i64, u32, u64
from fucina.rng import (at, at_array, gaussian_fill, gaussian_fill_at, gaussian_fill_at_fast,
                        gumbel_fill, kaiming_uniform_fill, normal_fill, randint_fill,
                        randperm_fill, splitmix64, uniform_fill)

SEEDS = [0, 1, 42, 0x0123456789ABCDEF, 2**64 - 1]


@pytest.fixture(scope='module')
def golden():
    with np.load(Path(__file__).parent / 'goldens' / 'rng.npz') as d: return dict(d)


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(a.view(f'u{a.itemsize}'), b.view(f'u{b.itemsize}'))


def hexes(x): return ' '.join(f'{b:08x}' for b in x.view(u32))
def new(*shape): return np.empty(shape, f32)


# --- golden data, at several thread counts ---

def test_golden_words(golden):
    seeds = [int(s) for s in golden['splitmix64/seeds']]
    for seed, words, after in zip(seeds, golden['splitmix64/out'],
                                  golden['splitmix64/state_after']):
        state = seed
        for w in words:
            state, value = splitmix64(state)
            assert value == w
        assert state == after
    index = golden['at/index']
    for seed, words in zip(seeds, golden['at/out']):
        assert same(at_array(seed, index), words)
        assert [at(seed, int(i)) for i in index] == words.tolist()


def test_golden_gaussian(golden, threads):
    g = {k.split('/')[1]: v for k, v in golden.items() if k.startswith('gaussian_fill/')}
    for k, (seed, n, scale) in enumerate(zip(g['seed'], g['len'], g['scale'])):
        assert same(gaussian_fill(int(seed), new(int(n)), scale), g[f'out{k}'])
    g = {k.split('/')[1]: v for k, v in golden.items() if k.startswith('gaussian_fill_at/')}
    seed = int(g['seed'][0])
    for k, (first, n, scale) in enumerate(zip(g['first'], g['len'], g['scale'])):
        assert same(gaussian_fill_at(seed, int(first), new(int(n)), scale), g[f'out{k}'])


def test_golden_fast(golden, threads):
    g = {k.split('/')[1]: v for k, v in golden.items() if k.startswith('gaussian_fill_at_fast/')}
    seed = int(g['seed'][0])
    for k, first in enumerate(g['first']):
        for n in range(1, 41):
            x = gaussian_fill_at_fast(seed, int(first), new(n), 0.75 if k % 2 else 1.0)
            assert same(x, g[f'out{k}'][n - 1, :n])
    x = gaussian_fill_at_fast(int(g['long_seed'][0]), 3, new(20_000), 1.0)
    assert same(x[:2000], g['long_first3_head']) and zlib.crc32(x) == g['long_first3_crc32'][0]


def test_golden_uniform(golden, threads):
    for k in range(5):
        lo, hi, seed = (golden[f'uniform_fill/{name}'][k] for name in ('lo', 'hi', 'seed'))
        out = golden[f'uniform_fill/out{k}']
        assert same(uniform_fill(int(seed), new(out.size), lo, hi), out)
    for seed, out in zip(golden['uniform_fill/clamp_seed'], golden['uniform_fill/clamp_out']):
        assert same(uniform_fill(int(seed), new(2), 0, 1), out)
    for k in range(4):
        seed, fan_in = (golden[f'kaiming_uniform_fill/{name}'][k] for name in ('seed', 'fan_in'))
        out = golden[f'kaiming_uniform_fill/out{k}']
        assert same(kaiming_uniform_fill(int(seed), new(48), fan_in), out)


def test_golden_others(golden, threads):
    for k in range(3):
        seed, mean, std = (golden[f'normal_fill/{name}'][k] for name in ('seed', 'mean', 'std'))
        out = golden[f'normal_fill/out{k}']
        assert same(normal_fill(int(seed), new(out.size), mean, std), out)
    assert same(gumbel_fill(int(golden['gumbel_fill/seed'][0]), new(200)),
                golden['gumbel_fill/out'])
    for k in range(5):
        seed, low, high, out = (golden[f'randint_fill/{name}'][k]
                                for name in ('seed', 'low', 'high', 'out'))
        assert same(randint_fill(int(seed), np.empty(40, i64), low, high), out)
        seed, n = (golden[f'randperm_fill/{name}'][k] for name in ('seed', 'n'))
        assert same(randperm_fill(int(seed), np.empty(int(n), i64)),
                    golden[f'randperm_fill/out{k}'])


# --- vectors ---

WORDS = {
    0: 'e220a8397b1dcdaf 6e789e6aa1b965f4 06c45d188009454f f88bb8a8724c81ec',
    1: '910a2dec89025cc1 beeb8da1658eec67 f893a2eefb32555e 71c18690ee42c90b',
    42: 'bdd732262feb6e95 28efe333b266f103 47526757130f9f52 581ce1ff0e4ae394',
    0x0123456789ABCDEF: '157a3807a48faa9d d573529b34a1d093 2f90b72e996dccbe a2d419334c4667ec',
    2**64 - 1: 'e4d971771b652c20 e99ff867dbf682c9 382ff84cb27281e9 6d1db36ccba982d2'}
ONES = 0x31628AF67B2131AB  # its first word begins with 53 ones
VECTORS = [
    (lambda: gaussian_fill(42, new(7), 1.0),
     '3ed45626 3f27161e bf6452a8 3fa9d5af 3fdd634e bff113cd 3f0badc8'),
    (lambda: gaussian_fill(7, new(6), 0.3),
     '3ed1a9af 3d319672 bdf39fd5 bd8bd5ce 3ab0e3a6 3ec172ed'),
    (lambda: gaussian_fill_at(42, 3, new(4), 1.0), '3fa9d5af 3fdd634e bff113cd 3f0badc8'),
    (lambda: gaussian_fill_at_fast(42, 0, new(7), 1.0),
     '3ed45626 3f27161d bf6452a7 3fa9d5ae 3fdd634f bff113cc 3f0badca'),
    (lambda: gaussian_fill_at_fast(42, 3, new(4), 1.0), '3fa9d5ae 3fdd634f bff113cc 3f0badca'),
    (lambda: gaussian_fill_at_fast(0xDEADBEEFCAFEF00D, 11, new(5), 2.0),
     'bf396ba9 bf086d02 bce8719a 3f86609c 3cf9cf4d'),
    (lambda: gaussian_fill(ONES, new(2), 1.0), '80000000 00000000'),
    (lambda: gaussian_fill_at_fast(ONES, 0, new(2), 1.0), '80000000 00000000'),
    (lambda: gaussian_fill_at_fast(0x932B113CFBD6B596, 0, new(2), 1.0), '3e289367 00000000'),
    (lambda: uniform_fill(99, new(6), -0.25, 0.75),
     '3c3cea4e be5f951c 3f15b2d0 be173996 bda3b823 bc7b4143'),
    (lambda: uniform_fill(ONES, new(2), -0.25, 0.75), '3f3fffff 3f00986b'),
    (lambda: uniform_fill(ONES, new(2), 0, 1), '3f7fffff 3f40986b'),
    (lambda: kaiming_uniform_fill(7, new(6), 48),
     'bd02444b be0ed6c8 3deceeb1 3cc41da3 bc60eef0 bd942344'),
    (lambda: kaiming_uniform_fill(42, new(6), 8),
     '3e2ee962 be76404d be204f56 bde1a2cd bea7403e 3e855014'),
    (lambda: normal_fill(3, new(6), 2.0, 0.5),
     '3fd6f903 3f80ef20 401c663e 400dfe74 3fb69989 3fab7184'),
    (lambda: gumbel_fill(123, new(6)),
     '3f8750b4 406f8e46 3ff1cc52 3f7a9add 3f79e5e4 3f677f82')]


def test_word_vectors():
    for seed, words in WORDS.items():
        assert ' '.join(f'{at(seed, i):016x}' for i in range(4)) == words
    assert at(42 ^ 0x64726F7064726F70, (3 * 28 + 2) * 7) == 0xeeaa9d6f853bcf48
    assert at(42 ^ 0x64726F7064726F70, (3 * 28 + 2) * 7 + 2) == 0x2911a96c36e49b4f


@pytest.mark.parametrize('k', range(len(VECTORS)))
def test_float_vectors(k):
    call, expected = VECTORS[k]
    assert hexes(call()) == expected


def test_integer_vectors():
    def ints(n): return np.empty(n, i64)
    assert randint_fill(7, ints(12), -3, 5).tolist() == [0, -3, 4, 1, 0, -2, 0, -1, -2, 0, -3, 4]
    assert randint_fill(11, ints(3), -2**63, 2**63 - 1).tolist() == [
        -3389692655897136996, -4383589228225031264, 2546431754547958380]
    assert randperm_fill(31, ints(12)).tolist() == [0, 7, 9, 1, 3, 6, 2, 11, 4, 5, 8, 10]


# --- against definitions ---

def test_the_walk_and_the_jump_agree():
    for seed in SEEDS:
        state, walk = seed, []
        for _ in range(1000):
            state, value = splitmix64(state)
            walk.append(value)
        assert walk == [at(seed, i) for i in range(1000)]
        assert walk == at_array(seed, np.arange(1000)).tolist()


@settings(deadline=None, max_examples=300)
@given(st.integers(-2**70, 2**70), st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_kernel_words_are_those_of_plain_integers(seed, index):
    assert at_array(seed, np.array(index, u64)).tolist() == [at(seed, i) for i in index]
    assert at(seed, -1) == at(seed, 2**64 - 1)


def test_kernel_words_at_ten_thousand_places():
    places = np.random.default_rng(0).integers(0, 2**64, (100, 100), dtype=u64)
    places[:, :5] = np.array([2**64 - k for k in range(1, 6)], u64)
    for seed, row in zip(places[:, 50].tolist(), places):
        assert at_array(seed, row).tolist() == [at(seed, i) for i in row.tolist()]


def test_integers_against_python():
    ints = randint_fill(5, np.empty(3000, i64), -2**62, 2**63 - 7)
    span = 2**63 - 7 + 2**62
    assert ints.tolist() == [-2**62 + (at(5, i) * span >> 64) for i in range(3000)]
    order = list(range(500))
    for k in range(499, 0, -1):
        j = at(6, 499 - k) * (k + 1) >> 64
        order[k], order[j] = order[j], order[k]
    assert randperm_fill(6, np.empty(500, i64)).tolist() == order


def test_uniform_against_float64():
    lo, hi = f32(-0.1), f32(0.7)
    u = np.array([at(8, i) >> 11 for i in range(5000)], f64) * 2.0**-53
    v = (f64(lo) + (f64(hi) - f64(lo)) * u).astype(f32)
    assert same(uniform_fill(8, new(5000), lo, hi), np.where(v >= hi, np.nextafter(hi, lo), v))


def plain_fast(seed, first, n, scale):
    "The fast mapping as it is written down, in NumPy: one rounding per operation."
    half = u64(11)
    c = (np.arange(n, dtype=u64) + u64(first)) & ~u64(1)
    ua = ((at_array(seed, c) >> half).astype(f64) + 1.0).astype(f32) * f32(2.0**-53)
    ub = (at_array(seed, c + u64(1)) >> half).astype(f64).astype(f32) * f32(2.0**-53)
    bits = ua.view(u32)
    e = ((bits >> u32(23)).astype(np.int32) - 126).astype(f32)
    m = ((bits & u32(0x007fffff)) | u32(0x3f000000)).view(f32)
    small = m < f32(0.7071067811865476)
    e, m = np.where(small, e - f32(1), e), np.where(small, m + m, m)
    f = m - f32(1)
    z = f * f
    p = np.full_like(f, rng.LN[0])
    for a in rng.LN[1:]: p = p * f + a
    y = f * z * p
    y = y + e * f32(-2.12194440e-4)
    y = y - f32(0.5) * z
    ln = f + y + e * f32(0.693359375)
    radius = np.sqrt(f32(-2) * ln)
    t4 = ub * f32(4)
    jf = np.floor(t4 + f32(0.5))
    arg = (t4 - jf) * f32(math.pi / 2)
    z = arg * arg
    sp = (rng.SIN[0] * z + rng.SIN[1]) * z + rng.SIN[2]
    s = arg + arg * z * sp
    cp = (rng.COS[0] * z + rng.COS[1]) * z + rng.COS[2]
    c = (f32(1) - f32(0.5) * z) + z * z * cp
    q = jf.astype(u32) & u32(3)
    sin, cos = np.where(q & 1, c, s), np.where(q & 1, s, c)
    sin, cos = np.where(q & 2, -sin, sin), np.where((q + 1) & 2, -cos, cos)
    odd = (np.arange(n, dtype=u64) + u64(first)) & u64(1)
    return (radius * np.where(odd, sin, cos)) * f32(scale)


@pytest.mark.parametrize('seed, first, n, scale', [
    (42, 0, 1_000_000, 1.0), (0xDEADBEEFCAFEF00D, 11, 300_001, 2.0), (-5, 2**64 - 7, 5000, -0.3),
    (ONES, 0, 2, 1.0), (0x932B113CFBD6B596, 0, 2, 1.0)])
def test_the_fast_mapping_as_written_down(seed, first, n, scale):
    assert same(gaussian_fill_at_fast(seed, first, new(n), scale),
                plain_fast(seed, first, n, scale))


def test_the_word_loop_with_and_without_vector_code():
    "The counter's mask, which the compiler may or may not see through, changes no bit."
    loop = rng._uniform_block.py_func
    blocks = []
    for wide in (False, True):
        code = type(loop)(loop.__code__, {**loop.__globals__, 'WIDE': wide}, 'loop')
        ua, ub = new(1001), new(1001)
        njit(error_model='numpy')(code)(u64(2**64 - 500), u64(2**64 - 1), ua, ub)
        blocks.append(ua.tobytes() + ub.tobytes())
    assert blocks[0] == blocks[1]


def test_trigonometry_is_within_an_ulp():
    x = np.concatenate([np.random.default_rng(0).uniform(0, 2 * math.pi, 20_000),
                        np.arange(1, 8) * math.pi / 4, [0.0, 1e-300, 1e-9]])
    x = np.concatenate([x, np.nextafter(x, 0), np.nextafter(x, 6)])
    ours = np.array([rng.sincos(a) for a in x])
    libm = np.array([(math.sin(a), math.cos(a)) for a in x])
    assert (abs(ours - libm) <= np.spacing(abs(libm))).all()


# --- windows and threads ---

WINDOWS = [(0, 1), (1, 1), (1, 2), (3, 5), (2, 254), (255, 2), (256, 1), (7, 250)]


@pytest.mark.parametrize('fill', [gaussian_fill_at, gaussian_fill_at_fast])
def test_windows(fill):
    whole = fill(42, 0, new(1001), 0.7)
    for first, n in WINDOWS: assert same(fill(42, first, new(n), 0.7), whole[first:first + n])
    for k in range(20):
        ends = np.unique(np.random.default_rng(k).integers(0, 1001, 9)).tolist()
        ends = [0, *ends, 1001]
        pieces = [fill(42, a, new(b - a), 0.7) for a, b in zip(ends, ends[1:])]
        assert same(np.concatenate(pieces), whole)
    assert same(gaussian_fill_at(42, 0, new(9), 1), gaussian_fill(42, new(9), 1))


FILLS = {
    'uniform': lambda x: uniform_fill(3, x, -1, 2),
    'kaiming': lambda x: kaiming_uniform_fill(3, x, 64),
    'gaussian': lambda x: gaussian_fill(3, x, 0.5),
    'gaussian_at': lambda x: gaussian_fill_at(3, 77, x, 0.5),
    'fast': lambda x: gaussian_fill_at_fast(3, 0, x, 0.5),
    'fast, odd': lambda x: gaussian_fill_at_fast(3, 2**64 - 9, x, 0.5),
    'normal': lambda x: normal_fill(3, x, 1, 0.5),
    'gumbel': lambda x: gumbel_fill(3, x),
    'randint': lambda x: randint_fill(3, x, -9, 9),
    'randperm': lambda x: randperm_fill(3, x)}


@pytest.mark.parametrize('name', FILLS)
@pytest.mark.parametrize('size', [0, 1, LEAST - 1, LEAST, LEAST + 1])
def test_threads_do_not_show(name, size):
    dtype = i64 if name in ('randint', 'randperm') else f32

    def fill():
        x = np.empty(size, dtype)
        assert FILLS[name](x) is x
        return x.tobytes()
    at_any_number_of_threads(fill)


def test_shapes_are_filled_in_row_major_order():
    flat = gaussian_fill(1, new(24), 1)
    assert same(gaussian_fill(1, new(2, 3, 4), 1).reshape(-1), flat)
    assert uniform_fill(1, new(), 0, 1).shape == ()
    assert uniform_fill(1, new(3, 0), 0, 1).size == 0
    x = np.zeros((5, 4), f32)
    gaussian_fill(1, x[1:3], 1)
    assert same(x[1:3].reshape(-1), flat[:8]) and not x[0].any() and not x[3:].any()


# --- distributions ---

def test_moments():
    for x in gaussian_fill(1, new(65536), 1), gaussian_fill_at_fast(1, 0, new(65536), 1):
        assert abs(x.mean()) <= 0.02 and abs(x.var() - 1) <= 0.02
    assert abs(gumbel_fill(1, new(4096)).mean() - 0.5772) <= 0.08
    u = uniform_fill(1, new(4096), -3, 5)
    assert -3 <= u.min() and u.max() < 5 and abs(u.mean() - 1) <= 0.02 * 8
    w = kaiming_uniform_fill(1, new(8192), 64)
    assert 0.9 / 8 < abs(w).max() <= 1 / 8


def test_the_two_gaussians_are_close_and_not_equal():
    exact, fast = gaussian_fill(9, new(100_000), 1), gaussian_fill_at_fast(9, 0, new(100_000), 1)
    assert (abs(fast - exact) <= 1e-5 * np.maximum(1, abs(exact))).all()
    assert not np.array_equal(fast, exact)


def test_integer_ranges():
    assert set(randint_fill(1, np.empty(4096, i64), -4, 4)) == set(range(-4, 4))
    top = 2**63 - 1
    assert set(randint_fill(1, np.empty(100, i64), top - 1, top)) == {top - 1}
    for n in (0, 1): assert randperm_fill(1, np.empty(n, i64)).tolist() == list(range(n))
    for n in (2, 3, 1000):
        assert sorted(randperm_fill(n, np.empty(n, i64))) == list(range(n))


# --- arguments ---

def test_numpy_scalars_and_large_seeds():
    a = uniform_fill(np.uint64(2**64 - 1), new(9), f32(-1), np.float64(1))
    assert same(a, uniform_fill(-1, new(9), -1, np.int64(1)))
    assert same(a, uniform_fill(2**80 - 1, new(9), np.float16(-1), 1))
    b = gaussian_fill_at_fast(np.int64(-5), np.uint32(3), new(9), np.float64(0.1))
    assert same(b, gaussian_fill_at_fast(2**64 - 5, 3, new(9), f32(0.1)))
    assert same(kaiming_uniform_fill(1, new(4), np.int32(9)), kaiming_uniform_fill(1, new(4), 9))
    c = randint_fill(1, np.empty(9, i64), np.int8(-3), np.uint64(7))
    assert same(c, randint_fill(1, np.empty(9, i64), -3, 7))


NAN, INF = float('nan'), float('inf')
BAD_NUMBERS = [
    lambda x: uniform_fill(1, x, 1, 0), lambda x: uniform_fill(1, x, NAN, 1),
    lambda x: uniform_fill(1, x, 0, NAN), lambda x: uniform_fill(1, x, 0, INF),
    lambda x: uniform_fill(1, x, -INF, 0), lambda x: uniform_fill(1, x, 0, 1e39),
    lambda x: kaiming_uniform_fill(1, x, 0), lambda x: kaiming_uniform_fill(1, x, -3),
    lambda x: gaussian_fill(1, x, NAN), lambda x: gaussian_fill_at(1, 0, x, INF),
    lambda x: gaussian_fill_at_fast(1, 0, x, NAN), lambda x: gaussian_fill_at_fast(1, 0, x, 1e39),
    lambda x: normal_fill(1, x, NAN, 1), lambda x: normal_fill(1, x, 0, NAN),
    lambda x: normal_fill(1, x, INF, 1)]


@pytest.mark.parametrize('k', range(len(BAD_NUMBERS)))
def test_bad_numbers_are_refused_before_any_write(k):
    x = np.zeros(9, f32)
    with pytest.raises(ValueError): BAD_NUMBERS[k](x)
    assert not x.any()


def test_bad_integers_are_refused_before_any_write():
    n = np.zeros(9, i64)
    for low, high in ((3, 3), (4, 3), (-2**63 - 1, 0), (0, 2**63)):
        with pytest.raises(ValueError): randint_fill(1, n, low, high)
    for f in (lambda: randint_fill(1, n, 0, 2.5), lambda: randint_fill(1.0, n, 0, 2),
              lambda: kaiming_uniform_fill(1, new(2), 2.0), lambda: at(1.5, 0),
              lambda: at_array(1, [0.5]), lambda: gaussian_fill_at(1, 0.5, new(2), 1),
              lambda: uniform_fill(1, new(2), None, 1)):
        with pytest.raises(TypeError): f()
    assert not n.any()


@pytest.mark.parametrize('name', FILLS)
def test_bad_arrays(name):
    fill, ints = FILLS[name], name in ('randint', 'randperm')
    good, bad = (i64, f32) if ints else (f32, i64)
    fixed = np.zeros(6, good)
    fixed.flags.writeable = False
    for error, out in (
            (DTypeError, np.zeros(6, bad)), (DTypeError, np.zeros(6, f64)), (DTypeError, [0.0]),
            (DTypeError, np.zeros(6, np.dtype(good).newbyteorder())), (DTypeError, None),
            (UnsupportedViewError, np.zeros((3, 4), good).T),
            (UnsupportedViewError, np.zeros(12, good)[::2]), (ReadOnlyDataError, fixed)):
        with pytest.raises(error): fill(out)
        assert not np.any(out)
    with pytest.raises(DTypeError, match=np.dtype(good).name): fill(np.zeros(6, f64))


# --- machine code ---

X86 = platform.machine() in ('x86_64', 'AMD64')
LOOPS = {
    '_gaussian': (u64(1), u64(0), new(9), f64(1)), '_gumbel': (u64(1), u64(0), new(9)),
    '_normal_block': (np.ones(9, f32), np.ones(9, f32), new(18), f32(1)),
    '_uniform_block': (u64(1), u64(2**64 - 1), new(9), new(9)),
    '_uniform': (u64(1), u64(0), new(9), f64(0), f64(1), f32(1), f32(0.5)),
    '_gaussian_fast': (u64(1), u64(1), new(9), f32(1), u64(2**64 - 1))}


@pytest.mark.parametrize('name', LOOPS)
def test_no_fused_instruction(name):
    loop = njit(nogil=True, error_model='numpy')(getattr(rng, name).py_func)
    loop(*LOOPS[name])
    asm = ''.join(loop.inspect_asm().values())
    assert not re.search(r'\sv?f(n?m(add|sub)|ml[as])', asm)
    if X86 and name == '_normal_block':
        assert re.search(r'\sv?mulps\s', asm) and re.search(r'\sv?sqrtps\s', asm)


@pytest.mark.slow
def test_the_plainest_processor_makes_the_same_bits(tmp_path):
    code = """
import zlib
import numpy as np
from fucina.rng import *
x = np.empty(30_001, np.float32)
print(zlib.crc32(gaussian_fill_at_fast(1, 7, x, 0.3)), zlib.crc32(gaussian_fill(1, x, 0.3)),
      zlib.crc32(uniform_fill(1, x, -1, 2)))
"""
    plain = python(code, NUMBA_CPU_NAME='generic', NUMBA_CACHE_DIR=str(tmp_path))
    assert plain == printed(code)


def test_kernels_stay_in_their_types():
    for pair, args, float_type in ((rng.gaussian_pair, (u64(1), u64(0)), 'float64'),
                                   (rng.gaussian_pair_fast, (f32(1), f32(0)), 'float32')):
        compiled = njit(lambda a, b: pair(a, b))
        compiled(*args)
        result = compiled.nopython_signatures[0].return_type
        assert str(result) == f'UniTuple({float_type} x 2)'
    compiled = njit(lambda s, i: rng.word(s, i))
    compiled(u64(1), u64(2))
    assert str(compiled.nopython_signatures[0].return_type) == 'uint64'
