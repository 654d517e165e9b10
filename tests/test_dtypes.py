"""Sixteen-bit storage: golden bits, every pattern, and a search that knows no formula."""
import platform
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numba import njit

from fucina import dtypes
from fucina.dtypes import narrow_bf16, narrow_f16, widen_bf16, widen_f16
from fucina.errors import DTypeError, ReadOnlyDataError, ShapeMismatchError, UnsupportedViewError

f32, f16, u16, u32 = np.float32, np.float16, np.uint16, np.uint32
EVERY = np.arange(2**16, dtype=u16)


@pytest.fixture(scope='module')
def golden():
    with np.load(Path(__file__).parent / 'goldens' / 'dtype.npz') as d: return dict(d)


def test_golden_narrowing(golden):
    x = golden['f32_bits'].view(f32)
    for bits in golden['bf16_bits'], golden['bf16_bits_tensor_to']:
        assert np.array_equal(narrow_bf16(x), bits)
    for bits in golden['f16_bits'], golden['f16_bits_tensor_to']:
        assert np.array_equal(narrow_f16(x).view(u16), bits)


def test_golden_widening(golden):
    h = EVERY.view(f16)
    nan = np.isnan(h)
    sums = [zlib.crc32(a) for a in (widen_bf16(EVERY), widen_f16(h[~nan]), widen_f16(h[nan]))]
    assert sums == golden['widen_crc32_bf16all_f16nonnan_f16nan'].tolist()
    some = golden['f16_nan_code_sample'].view(f16)
    assert np.array_equal(widen_f16(some).view(u32), golden['f16_nan_widened_bits'])


def test_round_trip_of_every_pattern():
    back = narrow_bf16(widen_bf16(EVERY))
    nan = (EVERY & 0x7FFF) > 0x7F80
    assert np.array_equal(back, np.where(nan, EVERY | 0x0040, EVERY))
    back = narrow_f16(widen_f16(EVERY.view(f16))).view(u16)
    nan = (EVERY & 0x7FFF) > 0x7C00
    assert np.array_equal(back, np.where(nan, EVERY | 0x0200, EVERY))


def nearest(x, codes, values):
    "Code of the value nearest to x, of two equally near ones the even code."
    order = np.argsort(values)
    codes, values = codes[order], values[order]
    hi = np.clip(np.searchsorted(values, x), 1, values.size - 1)
    lo = hi - 1
    down, up = x - values[lo], values[hi] - x
    take_hi = (up < down) | ((up == down) & (codes[hi] % 2 == 0))
    return np.where(take_hi, codes[hi], codes[lo])


@pytest.mark.parametrize('narrow, infinity, top', [
    (narrow_bf16, 0x7F80, 2.0**128), (narrow_f16, 0x7C00, 2.0**16)], ids=['bf16', 'f16'])
def test_a_million_random_patterns_against_a_search(narrow, infinity, top):
    u = np.random.default_rng(1).integers(0, 2**32, 1_000_000, dtype=u32)
    x = u.view(f32)
    ours = narrow(x).view(u16)
    # Infinity takes part as the number that would come next.
    codes = np.arange(infinity + 1, dtype=u16)
    wide = widen_bf16(codes) if narrow is narrow_bf16 else codes.view(f16).astype(f32)
    values = wide.astype(np.float64)
    values[-1] = top
    number = ~np.isnan(x)
    size = np.minimum(np.abs(x[number].astype(np.float64)), top)
    expected = nearest(size, codes, values) | (u[number] >> 16 & 0x8000)
    assert np.array_equal(ours[number], expected)
    keep = u[~number]
    if narrow is narrow_bf16: expected = keep >> 16 | 0x40
    else: expected = keep >> 16 & 0x8000 | 0x7E00 | keep >> 13 & 0x3FF
    assert np.array_equal(ours[~number], expected)


def test_numpy_agrees_on_f16_numbers():
    x = np.random.default_rng(2).integers(0, 2**32, 300_000, dtype=u32).view(f32)
    x = x[~np.isnan(x)]
    with np.errstate(over='ignore'): theirs = x.astype(f16)
    assert np.array_equal(narrow_f16(x).view(u16), theirs.view(u16))
    numbers = EVERY.view(f16)[~np.isnan(EVERY.view(f16))]
    assert np.array_equal(widen_f16(numbers).view(u32), numbers.astype(f32).view(u32))


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_narrowing_is_monotone_and_odd(x):
    x = f32(x)
    with np.errstate(over='ignore'): pair = np.array([x, np.nextafter(x, f32(np.inf))], f32)
    for narrow, widen in ((narrow_bf16, widen_bf16), (narrow_f16, widen_f16)):
        low, high = widen(narrow(pair))
        assert low <= high
        assert np.array_equal(narrow(-pair).view(u16), narrow(pair).view(u16) ^ 0x8000)


@pytest.mark.parametrize('size', [0, 1, 7, 2**17 - 1, 2**17, 2**17 + 1, 300_001])
def test_threads_do_not_show(threads, size):
    u = np.random.default_rng(3).integers(0, 2**32, size, dtype=u32)
    n = min(size, 1000)
    x = u.view(f32)
    for narrow, widen in ((narrow_bf16, widen_bf16), (narrow_f16, widen_f16)):
        bits = narrow(x)
        wide = widen(bits)
        assert bits.size == wide.size == size
        for part in (slice(n), slice(size - n, None)):
            assert np.array_equal(narrow(x[part]).view(u16), bits[part].view(u16))
            assert np.array_equal(widen(bits[part]).view(u32), wide[part].view(u32))


def test_shapes_strides_and_out():
    x = np.arange(24, dtype=f32).reshape(4, 6)
    assert narrow_bf16(x.T).shape == (6, 4)
    assert np.array_equal(widen_bf16(narrow_bf16(x.T[::2])), x.T[::2])
    assert widen_f16(narrow_f16(np.array(3, f32))).shape == ()
    x.flags.writeable = False
    out = np.empty((4, 6), f16)
    assert narrow_f16(x, out=out) is out and np.array_equal(out, x)


def test_refusals_leave_out_alone():
    x, out = np.ones((2, 3), f32), np.zeros((2, 3), u16)
    for error, f, args in (
            (DTypeError, narrow_bf16, (x.astype(float), out)),
            (DTypeError, narrow_bf16, ([1.0], out)),
            (DTypeError, narrow_bf16, (x.astype('>f4'), out)),
            (DTypeError, narrow_bf16, (x, out.view(f16))),
            (DTypeError, narrow_f16, (x, out)),
            (DTypeError, widen_bf16, (out.view(f16),)),
            (DTypeError, widen_f16, (out,)),
            (ShapeMismatchError, narrow_bf16, (x.T, out)),
            (UnsupportedViewError, narrow_bf16, (x, np.zeros((3, 2), u16).T)),
            (ReadOnlyDataError, narrow_bf16, (x, np.broadcast_to(u16(0), (2, 3))))):
        with pytest.raises(error): f(*args)
        assert not out.any()
    with pytest.raises(DTypeError, match='float64'): narrow_bf16(x.astype(float))
    with pytest.raises(ShapeMismatchError, match=r'\(2, 3\).*\(3, 2\)'): narrow_bf16(x.T, out)


def test_the_table():
    assert list(dtypes.DTYPES) == ['f32', 'f16', 'bf16', 'i64']
    assert [d.itemsize for d in dtypes.DTYPES.values()] == [4, 2, 2, 8]


@pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='x86 instructions')
@pytest.mark.parametrize('loop, source, target', [
    (dtypes._narrow_bf16, f32, u16), (dtypes._widen_bf16, u16, f32),
    (dtypes._narrow_f16, f32, u16), (dtypes._widen_f16, u16, f32)],
    ids=['narrow_bf16', 'widen_bf16', 'narrow_f16', 'widen_f16'])
def test_the_loops_are_vector_code(loop, source, target):
    k = njit(error_model='numpy')(loop.py_func)  # what comes from the cache shows no code
    k(np.zeros(9, source), np.zeros(9, target))
    asm = ''.join(k.inspect_asm().values())
    assert re.search(r'\sv?ps[lr]ld\s', asm)  # shifts of four integers and more
    assert not re.search(r'\sv?fn?m(add|sub)', asm)
