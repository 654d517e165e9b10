"""The pinned product: its order bit for bit, any layout, any threads, and a golden iteration."""
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import printed, python

from fucina import gemm
from fucina.errors import DTypeError, InvalidConfigError, ShapeMismatchError
from fucina.gemm import matmul
from fucina.kernels import sum_squares

f32, u32 = np.float32, np.uint32
SIZES = 1, 2, 3, 7, 8, 9, 16, 31, 64, 65, 130
JIT = hasattr(gemm._product, 'compile')
needs_jit = pytest.mark.skipif(not JIT, reason='numba is switched off')


def in_order(a, b):
    "The contract, as vector additions: from +0, for every contracted index one product each."
    out = np.zeros((*a.shape[:-1], b.shape[-1]), f32)
    with np.errstate(all='ignore'):
        for k in range(a.shape[-1]): out = out + a[..., k, None] * b[..., k, None, :]
    return out


def bits(x):
    "Bit patterns; every NaN counts as the same."
    x = np.ascontiguousarray(x)
    return np.where(np.isnan(x), u32(0x7FC00000), x.view(u32))


def same(x, y): return x.shape == y.shape and np.array_equal(bits(x), bits(y))


def normal(*shape, seed=0): return np.random.default_rng(seed).standard_normal(shape, dtype=f32)


def pinned(a, b):
    out = np.full((*a.shape[:-1], b.shape[-1]), np.nan, f32)
    assert matmul(a, b, out, 'pinned') is out
    return out


# --- the order

def test_the_reference_is_the_triple_loop():
    a, b = normal(3, 17), normal(17, 4)
    for (i, j), c in np.ndenumerate(in_order(a, b)):
        s = f32(0)
        for k in range(17): s = f32(s + f32(a[i, k] * b[k, j]))
        assert s == c


@pytest.mark.parametrize('depth', SIZES)
def test_every_size(depth):
    a = normal(65, depth, seed=depth)
    for n in SIZES:
        b = normal(depth, n, seed=n)
        expected = in_order(a, b)
        for m in range(1, 66): assert same(pinned(a[:m], b), expected[:m]), (m, depth, n)


@pytest.mark.parametrize('m, depth, n', [
    (5, 255, 3), (9, 256, 40), (13, 257, 17), (140, 600, 24), (6, 300, 255), (131, 259, 257),
    (8, 2, 300), (3, 520, 290), (1, 1025, 1), (70, 1, 261)])
def test_blocks_continue_the_sum(m, depth, n):
    a, b = normal(m, depth), normal(depth, n, seed=1)
    expected = in_order(a, b)
    assert same(pinned(a, b), expected)
    assert same(pinned(np.asfortranarray(a), b.T.copy().T), expected)


def test_the_company_of_a_row_changes_nothing():
    a, b = normal(64, 1000), normal(1000, 48, seed=1)
    whole = pinned(a, b)
    for m in 1, 2, 3, 7, 16, 63: assert same(pinned(a[:m], b), whole[:m])
    for n in 1, 9, 33: assert same(pinned(a, b[:, :n]), whole[:, :n])


def test_the_order_shows():
    "Values for which another order, or one rounding fewer, gives another result."
    one, big = f32(1), f32(2**24)
    assert pinned(np.array([[big, one, -big]]), np.ones((3, 1), f32))[0, 0] == 0
    assert pinned(np.array([[big, -big, one]]), np.ones((3, 1), f32))[0, 0] == 1
    x = f32(1 + 2**-12)
    fused = f32(float(x) * float(x) - 1.0)
    got = pinned(np.array([[-one, x]]), np.array([[one], [x]]))[0, 0]
    assert got == f32(f32(x * x) - one) and got != fused


# --- layouts

def layouts(x):
    "The values of `x` under many strides."
    h, w = x.shape
    wide = np.zeros((2 * h, 3 * w), f32); wide[::2, ::3] = x
    tall = np.zeros((w + 2, h + 3), f32); tall[1:-1, 2:-1] = x.T
    frozen = x.copy(); frozen.flags.writeable = False
    odd = np.zeros(4 * x.size + 1, np.uint8)[1:].view(f32).reshape(x.shape); odd[...] = x
    yield from (x, np.asfortranarray(x), x.T.copy().T, wide[::2, ::3], tall[1:-1, 2:-1].T,
                x[::-1].copy()[::-1], x[:, ::-1].copy()[:, ::-1], frozen, frozen.T.copy().T, odd)


@pytest.mark.parametrize('m, depth, n', [(9, 31, 35), (4, 3, 2), (33, 8, 7), (12, 270, 259)])
def test_any_strides(m, depth, n):
    a, b = normal(m, depth), normal(depth, n, seed=1)
    expected = in_order(a, b)
    for x in layouts(a):
        for y in layouts(b): assert same(pinned(x, y), expected)


def test_broadcast_operands():
    row, column = normal(1, 31), normal(12, 1)
    for a in np.broadcast_to(row, (12, 31)), np.broadcast_to(column, (12, 31)):
        for b in np.broadcast_to(normal(1, 35), (31, 35)), np.broadcast_to(normal(31, 1), (31, 35)):
            assert same(pinned(a, b), in_order(a, b))


def test_square_of_a_view_of_itself():
    x = normal(33, 70)
    assert same(pinned(x, x.T), in_order(x, x.T)) and same(pinned(x.T, x), in_order(x.T, x))


def test_out_may_be_a_part_of_a_larger_array():
    a, b, all_rows = normal(5, 9), normal(9, 21, seed=1), np.full((9, 21), 7, f32)
    matmul(a, b, all_rows[2:7], 'pinned')
    assert same(all_rows[2:7], in_order(a, b))
    assert (all_rows[:2] == 7).all() and (all_rows[7:] == 7).all()


def test_no_write_outside_out():
    for m in range(1, 12):
        for n in 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 65:
            a, b, room = normal(m, 5), normal(5, n), np.full(m * n + 200, 7, f32)
            matmul(a, b, room[100:-100].reshape(m, n), 'pinned')
            assert (room[:100] == 7).all() and (room[-100:] == 7).all()


# --- stacks

@pytest.mark.parametrize('count, m, depth, n', [
    (1, 4, 3, 2), (3, 9, 31, 35), (40, 5, 4, 3), (2, 70, 300, 40), (5, 1, 1, 1)])
def test_stacks(count, m, depth, n):
    a, b = normal(count, m, depth), normal(count, depth, n, seed=1)
    expected = in_order(a, b)
    turned = a.transpose(1, 0, 2).copy().transpose(1, 0, 2), b.transpose(2, 1, 0).copy().T
    for x, y in (a, b), (a[::-1].copy()[::-1], b), turned: assert same(pinned(x, y), expected)
    for i in range(count): assert same(pinned(a[i], b[i]), expected[i])
    shared = np.broadcast_to(b[0], b.shape)
    assert same(pinned(a, shared), in_order(a, shared))


# --- threads

@pytest.mark.parametrize('shape', [
    (300, 200, 150), (1500, 3, 2), (20000, 2, 3), (64, 400, 512), (129, 257, 263)])
def test_threads_change_no_bit(threads, shape):
    m, depth, n = shape
    a, b = normal(m, depth), normal(n, depth, seed=1).T
    assert same(pinned(a, b), in_order(a, b))


@pytest.mark.parametrize('shape', [(40, 30, 70, 50), (2, 300, 100, 90), (3, 1100, 5, 4),
                                   (30, 33, 65, 66)])
def test_threads_change_no_bit_of_a_stack(threads, shape):
    count, m, depth, n = shape
    a, b = normal(count, m, depth), normal(count, depth, n, seed=1)
    assert same(pinned(a, b), in_order(a, b))


def test_calls_from_many_threads():
    a, b = normal(70, 60), normal(60, 50, seed=1)
    expected = in_order(a, b)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: same(pinned(a, b), expected), range(400)))


# --- special values

def test_signed_zeros():
    zero = np.array([[0.0, -0.0]], f32)
    for a in zero, -zero, np.array([[-1, -1]], f32):
        for b in zero.T, np.array([[-0.0], [-0.0]], f32):
            assert same(pinned(a, b), np.zeros((1, 1), f32))
    assert same(pinned(np.array([[1, -1]], f32), np.ones((2, 40), f32)), np.zeros((1, 40), f32))


def test_infinities_nans_and_subnormals():
    tiny = np.finfo(f32).smallest_subnormal
    special = np.array([0, -0.0, 1, -1.5, np.inf, -np.inf, np.nan, tiny, -tiny, 3e38, -3e38, 2**-70,
                        1e-38, -1e-30, 2**-126], f32)
    g = np.random.default_rng(0)
    for m, depth, n in (4, 3, 5), (17, 9, 33), (12, 300, 7), (9, 20, 260):
        a, b = g.choice(special, (m, depth)), g.choice(special, (depth, n))
        assert same(pinned(a, b), in_order(a, b))
        a, b = (np.where(abs(x) < 2, x, 0).astype(f32) for x in (a, b))  # without overflow
        assert same(pinned(a, b), in_order(a, b))


def test_subnormals_are_not_flushed():
    tiny = np.finfo(f32).smallest_subnormal
    assert pinned(np.full((1, 3), tiny, f32), np.ones((3, 1), f32))[0, 0] == 3 * tiny


def test_one_nan_stays_in_its_row_and_column():
    a, b = normal(9, 5), normal(5, 20)
    a[3, 2] = np.nan; b[1, 11] = np.inf
    out = pinned(a, b)
    assert np.isnan(out[3]).all() and not np.isfinite(out[:, 11]).any()
    assert np.isfinite(np.delete(np.delete(out, 3, 0), 11, 1)).all()


# --- empty sums, modes, refusals

def test_empty():
    assert same(pinned(np.empty((3, 0), f32), np.empty((0, 2), f32)), np.zeros((3, 2), f32))
    assert pinned(np.empty((0, 3), f32), np.empty((3, 2), f32)).shape == (0, 2)
    assert pinned(np.empty((2, 3), f32), np.empty((3, 0), f32)).shape == (2, 0)
    assert pinned(np.empty((0, 2, 3), f32), np.empty((0, 3, 4), f32)).shape == (0, 2, 4)
    assert same(pinned(np.empty((2, 3, 0), f32), np.empty((2, 0, 4), f32)), np.zeros((2, 3, 4), f32))


def test_modes():
    a, b = normal(4, 5), normal(5, 6)
    for mode in 'blas', 'pinned':
        out = np.empty((4, 6), f32)
        assert matmul(a, b, out, mode) is out
        assert np.allclose(out, a.astype(float) @ b, atol=1e-5)
        assert same(matmul(a, b, mode=mode), out) and matmul(a, b, mode=mode).dtype == f32
    assert same(matmul(a, b), a @ b)
    with pytest.raises(InvalidConfigError, match='fast'): matmul(a, b, mode='fast')


@pytest.mark.parametrize('a, b', [
    ((4, 5), (6, 5)), ((4, 5), (5,)), ((5,), (5, 4)), ((2, 4, 5), (5, 6)), ((2, 4, 5), (3, 5, 6)),
    ((2, 4, 5), (2, 6, 5)), ((1, 4, 5), (2, 5, 6)), ((1, 2, 4, 5), (1, 2, 5, 6)), ((), ())])
def test_shapes_that_do_not_fit(a, b):
    with pytest.raises(ShapeMismatchError): matmul(np.ones(a, f32), np.ones(b, f32), mode='pinned')


def test_out_is_checked_before_it_is_written():
    a, b = normal(4, 5), normal(5, 6)
    frozen = np.full((4, 6), 7, f32); frozen.flags.writeable = False
    for out, error in [(np.full((4, 7), 7, f32), ShapeMismatchError), (frozen, ValueError),
                       (np.full((24,), 7, f32), ShapeMismatchError),
                       (np.full((4, 6), 7.0), DTypeError),
                       *[(np.full((6, 4), 7, f32).T, ValueError)] * JIT]:
        with pytest.raises(error): matmul(a, b, out, 'pinned')
        assert (out == 7).all()


@pytest.mark.parametrize('dtype', ['f8', 'f2', 'i4', '>f4', 'c8'])
def test_only_float32(dtype):
    a, b = normal(4, 5), normal(5, 6)
    with pytest.raises(DTypeError, match='a must be float32'): matmul(a.astype(dtype), b, mode='pinned')
    with pytest.raises(DTypeError, match='b must be float32'): matmul(a, b.astype(dtype), mode='pinned')


# --- the machine code

@needs_jit
def test_first_calls_from_many_threads_make_one_kernel_that_rounds_twice(tmp_path):
    "In a fresh process: numba cannot show code that comes from its cache."
    asm = python('''
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from fucina import gemm
assert not gemm._product.signatures  # import compiles nothing
a = np.ones((5, 5), 'f4')
with ThreadPoolExecutor(8) as pool:
    for c in pool.map(lambda _: gemm.matmul(a, a, mode='pinned'), range(64)): assert (c == 5).all()
for a in np.ones((3, 3), 'f4'), np.ones((3, 6), 'f4')[:, ::2], np.broadcast_to(np.float32(1), (3, 3)):
    for b in a, a.T: gemm.matmul(a, b, mode='pinned')
assert len(gemm._product.signatures) == 1
print(*gemm._product.inspect_asm().values())
''', NUMBA_CACHE_DIR=tmp_path)
    assert not re.search(r'\sv?f(n?m(add|sub)|ml[as])', asm)
    assert re.search(r'\sv?mulps|\sfmul[.\s].*4s', asm)
    assert re.search(r'\sv?addps|\sfadd[.\s].*4s', asm)


def test_same_bits_without_the_compiler():
    code = '''
import zlib, numpy as np
from fucina.gemm import matmul
g, crc = np.random.default_rng(0), 0
for shape in ((4, 3, 2), (9, 31, 35), (65, 7, 1), (40, 300, 20), (1100, 3, 2), (130, 140, 150)):
    a, b = g.standard_normal(shape[:2], dtype='f4'), g.standard_normal(shape[:0:-1], dtype='f4').T
    crc = zlib.crc32(matmul(a, b, mode='pinned'), crc)
a, b = g.standard_normal((7, 5, 6), dtype='f4'), g.standard_normal((6, 7, 3), dtype='f4')
print(zlib.crc32(matmul(a, b.transpose(1, 0, 2), mode='pinned'), crc))
'''
    assert printed(code) == python(code, NUMBA_DISABLE_JIT='1')


@needs_jit
def test_same_bits_in_registers_of_the_other_width(tmp_path):
    "LLVM splits the registers that the hardware does not have."
    lanes = 24 - gemm.W
    code = f'''
import importlib, llvmlite.binding as llvm, numpy as np
from fucina import gemm
ask, llvm.get_host_cpu_features = llvm.get_host_cpu_features, lambda: {{'avx512f': {lanes} == 16}}
importlib.reload(gemm)
llvm.get_host_cpu_features = ask
assert gemm.W == {lanes}
g = np.random.default_rng(0)
for m, k, n in (4, 3, 2), (65, 300, 33), (9, 270, 259), (24, 31, 10):
    a, b = g.standard_normal((m, k), dtype='f4'), g.standard_normal((k, n), dtype='f4')
    out, expected = np.empty((2, m, n), 'f4')
    gemm._in_order(a, b, expected)
    assert gemm.matmul(a, b, out, 'pinned').tobytes() == expected.tobytes()
'''
    python(code, NUMBA_CACHE_DIR=str(tmp_path))


# --- the goldens of Newton-Schulz

def newton_schulz5(u, steps, product):
    "The orthogonalisation of Muon, written out; every product in the given order."
    a, b, c = f32(3.4445), f32(-4.7750), f32(2.0315)
    tall = u.shape[0] > u.shape[1]
    x = np.ascontiguousarray(u.T if tall else u)
    x = x * f32(1 / (np.sqrt(sum_squares(x.reshape(-1))) + 1e-7))
    for _ in range(steps):
        gram = product(x, x.T)
        x = (a * x) + product((b * gram) + (c * product(gram, gram)), x)
    return np.ascontiguousarray(x.T) if tall else x


@pytest.mark.parametrize('case', range(5))
@pytest.mark.parametrize('steps', [1, 5])
def test_newton_schulz_goldens(case, steps):
    with np.load(Path(__file__).parent / 'goldens' / 'optim_misc.npz') as golden:
        u = golden[f'newton_schulz5/in{case}']
        expected = golden[f'newton_schulz5/out{case}_steps{steps}']
    assert same(newton_schulz5(u, steps, pinned), expected)
    assert abs(newton_schulz5(u, steps, matmul) - expected).max() < 1e-6
