"""Every operation against a float64 formula: one row of TABLE each, then rules for all rows.

A new operation joins by adding a row. A row gives the axes of its operands (`b`, `c`, `e` have
fixed sizes, `d` and `k` run over SIZES, `b=1` overrides), of its result, the call, the formula
on arrays and its gradient. The formula is written so that it runs in float64 and in float32.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import fucina
from fucina import (ExecContext, Tensor, concat, constant, einsum_many, exec_scope, gradcheck,
                    no_grad, rng, stack, variable)
from fucina.dtypes import narrow_bf16, widen_bf16
from fucina.errors import (DTypeError, GradientCastUnsupportedError, IndexOutOfBoundsError,
                           InvalidDataLengthError, InvalidDropoutError, InvalidShapeError,
                           ShapeMismatchError, TagError, UnsupportedGradientError,
                           UseAfterScopeError)

f32 = np.float32
SIZES = (1, 7, 8, 9, 64, 1025)
FIXED = dict(b=3, c=2, e=4)


@dataclass
class Op:
    name: str
    operands: tuple[str, ...]
    out: str
    run: Callable[..., Any]  # tensors -> tensor
    ref: Callable[..., Any]  # arrays -> array with the axes of `out`
    grad: Callable[..., Any] | None  # (gy, *arrays) -> gradients; None: the result is untracked
    close: Callable[..., Any]  # (ref, arrays, size) -> (expected, tolerance)
    lo: float = -2.0
    hi: float = 2.0
    least: int = 1  # smallest size that makes sense
    half: str = 'f32'  # dtype for 16-bit operands: 'same', 'f32', or 'refused'
    integers: bool = False  # takes i64 operands
    half_leaves: tuple[int, ...] = ()  # operands that may be tracked in 16 bits
    smooth: bool = True
    blas: bool = False
    bad: tuple = ()  # (call on the operands, error, pattern)

    def __repr__(self): return self.name


# --- tolerances (runtime.md, section 10)

def exactly(ref, arrays, n): return ref(*[f32(a) for a in arrays]), 0


def ulps(k, small=0.0):
    def close(ref, arrays, n):
        want = ref(*arrays)
        return want, k * np.spacing(abs(want).astype(f32)) + small
    return close


def within(absolute, relative):
    def close(ref, arrays, n):
        want = ref(*arrays)
        return want, absolute + relative * abs(want)
    return close


def summed(ref, arrays, n):
    count = max(a.size for a in arrays)
    return ref(*arrays), 1e-6 * max(1, math.log2(count)) * ref(*[abs(a) for a in arrays])


def contracted(ref, arrays, n):
    "As a sum: BLAS adds small products serially. test_gemm_modes.py is stricter on large ones."
    return ref(*arrays), 1e-6 * max(1, math.log2(n)) * ref(*[abs(a) for a in arrays])


# --- axes

def axes(spec, n):
    words = [w.partition('=') for w in spec.split()]
    return (tuple(t for t, _, _ in words),
            tuple(int(size) if size else FIXED.get(t, n) for t, _, size in words))


def lift(a, spec, out):
    "An array with the axes of an operand, lined up with those of the result."
    tags, full = axes(spec, 0)[0], axes(out, 0)[0]
    a = a.transpose([tags.index(t) for t in full if t in tags])
    return a[tuple(slice(None) if t in tags else None for t in full)]


def lower(g, spec, out, shape):
    "A gradient with the axes of the result, as one of the operand."
    tags, full = axes(spec, 0)[0], axes(out, 0)[0]
    g = g.sum(tuple(k for k, t in enumerate(full) if t not in tags))
    left = [t for t in full if t in tags]
    g = g.transpose([left.index(t) for t in tags])
    for k, n in enumerate(shape):
        if n < g.shape[k]: g = g.sum(k, keepdims=True)
    return g


# --- kinds of rows

def pointwise(name, f, df, close, run=None, **kw):
    def grad(gy, x): return (gy * df(x),)
    return Op(name, ('b d',), 'b d', run or (lambda x: getattr(x, name)()), f, grad, close,
              half='same', **kw)


PAIRS = {'equal': ('b d', 'b d', 'b d'), 'bias': ('b d', 'd', 'b d'), 'row': ('b d', 'b', 'b d'),
         'left lacks': ('d', 'b d', 'd b'), 'turned': ('b d', 'd b', 'b d'),
         'scalar': ('b d', '', 'b d'), 'numbers': ('', '', ''), 'both lack': ('b d', 'd c', 'b d c'),
         'disjoint': ('b', 'd', 'b d'), 'ones': ('b=1 d', 'b d=1', 'b d'),
         'one batch': ('b=1 d', 'd', 'b=1 d'), 'one lacks': ('d', 'c=1 d', 'd c=1')}


FEW = {k: PAIRS[k] for k in ('equal', 'bias', 'left lacks', 'scalar')}


def pairwise(name, f, df, close, pairs=PAIRS, **kw):
    def wrong_size(x, y):
        return getattr(constant(np.ones((2, 5)), 'a d'), name)(constant(np.ones(4), 'd'))
    bad = ((wrong_size, ShapeMismatchError, 'd=5.*d=4'),
           (lambda x, y: getattr(x, name)(y.numpy()), TypeError, 'tensor'),
           (lambda x, y: getattr(x, name)(y.to('bf16')), DTypeError, 'f32.*bf16'),
           (lambda x, y: getattr(x.to('f16'), name)(y.to('bf16')), DTypeError, 'f16.*bf16'))
    for kind, (a, b, out) in pairs.items():
        def ref(x, y, a=a, b=b, out=out): return f(lift(x, a, out), lift(y, b, out))
        def grad(gy, x, y, a=a, b=b, out=out):
            gs = df(lift(x, a, out), lift(y, b, out))
            return tuple(lower(gy * g, s, out, v.shape) for g, s, v in zip(gs, (a, b), (x, y)))
        yield Op(f'{name}, {kind}', (a, b), out, lambda x, y: getattr(x, name)(y), ref, grad,
                 close, half='same', bad=bad if kind == 'equal' else (), **kw)


def moved(ref, gy, *arrays):
    "The gradient of an operation that only moves elements."
    ends = np.cumsum([0] + [a.size for a in arrays])
    numbered = [np.arange(i, j).reshape(a.shape) for i, j, a in zip(ends, ends[1:], arrays)]
    g = np.bincount(ref(*numbered).ravel(), gy.ravel(), ends[-1])
    return tuple(g[i:j].reshape(a.shape) for i, j, a in zip(ends, ends[1:], arrays))


def moving(name, operands, out, run, ref, **kw):
    return Op(name, operands, out, run, ref, partial(moved, ref), exactly, half='same',
              integers=True, **kw)


def product(name, operands, out, run, bad=()):
    letters = [s.replace(' ', '') for s in operands]
    final = out.replace(' ', '')

    def ref(*arrays): return np.einsum(f'{",".join(letters)}->{final}', *arrays)

    def grad(gy, *arrays):
        for k, x in enumerate(arrays):
            others = [s for i, s in enumerate(letters) if i != k]
            rest = [a for i, a in enumerate(arrays) if i != k]
            formula = ','.join([final, *others, letters[k]]) + '->' + letters[k]
            yield np.einsum(formula, gy, *rest, np.ones_like(x), optimize=True)
    half = tuple(range(1, len(operands)))
    return Op(name, operands, out, run, ref, grad, contracted, half='refused', blas=True,
              half_leaves=half, bad=bad)


# --- formulas

def sigmoid(x): return 1 / (1 + np.exp(-x))
def silu_slope(x): return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


A, B = 0.7978845608028654, 0.044715
def gelu(x): return 0.5 * x * (1 + np.tanh(A * (x + B * x**3)))
def gelu_slope(x):
    t = np.tanh(A * (x + B * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * A * (1 + 3 * B * x * x)


def keep(x, seed=5):
    "The mask of dropout(0.3) times its factor, by definition, in the dtype of `x`."
    p = f32(0.3)
    cutoff = math.ceil((1 - float(p)) * 2**53)
    kept = [rng.at(seed, i) >> 11 < cutoff for i in range(x.size)]
    return np.where(np.reshape(kept, x.shape), f32(1) / (f32(1) - p), 0).astype(x.dtype)


def shifted(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def causal(x, offset=0):
    "x (b, d): row q sees sources 0 … offset + q."
    return np.where(np.arange(x.shape[1]) <= np.arange(x.shape[0])[:, None] + offset, x, -np.inf)


def soft_grad(y, gy, axis, scale=1.0): return scale * y * (gy - (gy * y).sum(axis, keepdims=True))
def logs(x, axis): return np.log(np.exp(x - x.max(axis, keepdims=True)).sum(
    axis, keepdims=True)) + x.max(axis, keepdims=True)


EPS = float(f32(1e-3))


def rms(x, w=1.0): return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * w
def rms_grad(gy, x, w=None):
    g, n = gy if w is None else gy * w, x.shape[1]
    s = 1 / np.sqrt((x * x).mean(1, keepdims=True) + EPS)
    dx = g * s - x * (s**3 * (g * x).sum(1, keepdims=True) / n)
    return (dx,) if w is None else (dx, (gy * x * s).sum(0))


def hat(x):
    d = x - x.mean(1, keepdims=True)
    return d / np.sqrt((d * d).mean(1, keepdims=True) + EPS)


def layer(x, w=1.0, b=0.0): return hat(x) * w + b
def layer_grad(gy, x, w=None, b=None):
    g, h = gy if w is None else gy * w, hat(x)
    s = 1 / np.sqrt(x.var(1, keepdims=True) + EPS)
    dx = s * (g - g.mean(1, keepdims=True) - h * (g * h).mean(1, keepdims=True))
    return (dx,) if w is None else (dx, (gy * h).sum(0), gy.sum(0))


def labels(n): return np.arange(3) * 5 % n
def xent(x, reduce=np.mean, eps=0.0):
    lp = x - logs(x, 1)
    return reduce(-(1 - eps) * lp[np.arange(3), labels(x.shape[1])] - eps * lp.mean(1))


def xent_grad(gy, x, eps=0.0, count=3):
    want = (1 - eps) * np.eye(x.shape[1])[labels(x.shape[1])] + eps / x.shape[1]
    return ((shifted(x, 1) - want) * np.reshape(gy, (-1, 1)) / count,)


def round_bf16(x):
    if x.dtype.kind == 'i': return x  # numbered elements of `moved`
    return widen_bf16(narrow_bf16(np.ascontiguousarray(x, f32))).astype(x.dtype)


def picks(n): return [n - 1, 0, n - 1, n // 2]


def first_peak(gy, x, pick):
    return (np.where(np.arange(x.shape[1]) == pick(x, 1)[:, None], gy[:, None], 0),)


def variance_grad(gy, x, ddof):
    return (2 * (x - x.mean(1, keepdims=True)) / (x.shape[1] - ddof) * gy[:, None],)


def no_axis(call): return (lambda *ts: call(*ts), TagError, "no axis 'z'.*b=3, d=9")


TABLE = [
    # two tensors, by tag
    *pairwise('add', np.add, lambda x, y: (1, 1), exactly),
    *pairwise('sub', np.subtract, lambda x, y: (1, -1), exactly),
    *pairwise('mul', np.multiply, lambda x, y: (y, x), exactly),
    *pairwise('div', np.divide, lambda x, y: (1 / y, -x / y**2), exactly, lo=0.3),
    *pairwise('maximum', np.maximum, lambda x, y: (x > y, y > x), exactly),
    *pairwise('minimum', np.minimum, lambda x, y: (x < y, y < x), exactly),
    *pairwise('swiglu', lambda x, y: x * y * sigmoid(y),
              lambda x, y: (y * sigmoid(y), x * silu_slope(y)), within(5e-7, 1e-6), FEW),
    *pairwise('geglu', lambda x, y: x * gelu(y), lambda x, y: (gelu(y), x * gelu_slope(y)),
              within(5e-7, 1e-6), FEW),
    *pairwise('glu', lambda x, y: x * sigmoid(y),
              lambda x, y: (sigmoid(y), x * sigmoid(y) * (1 - sigmoid(y))), within(5e-7, 1e-6),
              FEW),
    # one tensor
    pointwise('neg', np.negative, lambda x: -1, exactly),
    pointwise('abs', np.abs, np.sign, exactly),
    pointwise('exp', np.exp, np.exp, ulps(4)),
    pointwise('log', np.log, lambda x: 1 / x, ulps(4), lo=0.1),
    pointwise('log1p', np.log1p, lambda x: 1 / (1 + x), ulps(4), lo=-0.5),
    pointwise('sqrt', np.sqrt, lambda x: 0.5 / np.sqrt(x), exactly, lo=0.1),
    pointwise('rsqrt', lambda x: 1 / np.sqrt(x), lambda x: -0.5 * x**-1.5, exactly, lo=0.2),
    pointwise('reciprocal', lambda x: 1 / x, lambda x: -1 / x**2, exactly, lo=0.3),
    pointwise('sin', np.sin, np.cos, ulps(4)),
    pointwise('cos', np.cos, lambda x: -np.sin(x), ulps(4)),
    pointwise('relu', lambda x: np.where(x > 0, x, x * 0), lambda x: x > 0, exactly),
    pointwise('leaky_relu', lambda x: np.where(x > 0, x, x * x.dtype.type(f32(0.1))),
              lambda x: np.where(x > 0, 1, 0.1), exactly, lambda x: x.leaky_relu(0.1),
              bad=((lambda x: x.leaky_relu('a'), TypeError, "slope.*'a'"),)),
    pointwise('tanh', np.tanh, lambda x: 1 - np.tanh(x)**2, ulps(4)),
    pointwise('sigmoid', sigmoid, lambda x: sigmoid(x) * (1 - sigmoid(x)), ulps(4)),
    pointwise('silu', lambda x: x * sigmoid(x), silu_slope, ulps(8, 1e-7)),
    pointwise('gelu', gelu, gelu_slope, ulps(8, 1e-7)),
    pointwise('clamp', lambda x: np.clip(x, x.dtype.type(f32(-0.713)), x.dtype.type(f32(0.911))),
              lambda x: (x > -0.713) & (x < 0.911), exactly, lambda x: x.clamp(-0.713, 0.911),
              bad=((lambda x: x.clamp(1, 0), ValueError, 'lo <= hi'),
                   (lambda x: x.clamp(float('nan'), 0), ValueError, 'nan'),
                   (lambda x: x.clamp(None, 0), TypeError, 'lo'))),
    pointwise('scale', lambda x: x * x.dtype.type(f32(0.3)), lambda x: 0.3, exactly,
              lambda x: x.scale(0.3), bad=((lambda x: x.scale(x), TypeError, 'real number'),
                                           (lambda x: x.scale(True), TypeError, 'True'))),
    pointwise('add_scalar', lambda x: x + x.dtype.type(f32(0.3)), lambda x: 1, exactly,
              lambda x: x.add_scalar(0.3),
              bad=((lambda x: x.add_scalar('1'), TypeError, 'real number'),)),
    pointwise('sub_scalar', lambda x: x + x.dtype.type(-f32(0.3)), lambda x: 1, exactly,
              lambda x: x.sub_scalar(0.3),
              bad=((lambda x: x.sub_scalar(None), TypeError, 'real number'),)),
    pointwise('div_scalar', lambda x: x * x.dtype.type(f32(1) / f32(0.3)), lambda x: 1 / 0.3,
              exactly, lambda x: x.div_scalar(0.3),
              bad=((lambda x: x.div_scalar(1j), TypeError, 'real number'),)),
    *[pointwise(f'pow_scalar {e}', lambda x, e=e: np.power(x, x.dtype.type(e)),
                lambda x, e=e: e * x**(e - 1), ulps(4), lambda x, e=e: x.pow_scalar(e), lo=lo)
      for e, lo in ((2, -2), (3, -2), (1, -2), (0, -2), (-1, 0.3), (0.5, 0.1), (-1.5, 0.3))],
    pointwise('dropout', lambda x: x * keep(x), lambda x: keep(x).astype(float), exactly,
              lambda x: x.dropout(0.3, 5),
              bad=((lambda x: x.dropout(1, 5), InvalidDropoutError, 'p < 1'),
                   (lambda x: x.dropout(-0.1, 5), InvalidDropoutError, '-0.1'),
                   (lambda x: x.dropout(float('nan'), 5), InvalidDropoutError, 'nan'),
                   (lambda x: x.dropout(1 - 1e-9, 5), InvalidDropoutError, 'p < 1'),
                   (lambda x: x.dropout('a', 5), TypeError, 'p must'),
                   (lambda x: x.dropout(0.5, 0.5), TypeError, 'integer'))),
    pointwise('dropout of nothing', lambda x: x, lambda x: 1, exactly, lambda x: x.dropout(0, 5)),
    # fewer axes
    Op('sum', ('b d',), 'b', lambda x: x.sum('d'), lambda x: x.sum(1),
       lambda gy, x: (gy[:, None] + 0 * x,), summed,
       bad=(no_axis(lambda x: x.sum('z')), no_axis(lambda x: x.sum('b z')),
            (lambda x: x.sum(''), TagError, 'sum_all or mean_all'), (lambda x: x.sum('d d'), TagError, 'dupl'))),
    Op('sum over rows', ('b d',), 'd', lambda x: x.sum('b'), lambda x: x.sum(0),
       lambda gy, x: (gy + 0 * x,), summed),
    Op('sum of many rows', ('d b',), 'b', lambda x: x.sum('d'), lambda x: x.sum(0),
       lambda gy, x: (gy + 0 * x,), summed),
    Op('sum of the middle', ('b d c',), 'b c', lambda x: x.sum('d'), lambda x: x.sum(1),
       lambda gy, x: (gy[:, None] + 0 * x,), summed),
    Op('sum of two', ('b d c',), 'd', lambda x: x.sum('c b'), lambda x: x.sum((0, 2)),
       lambda gy, x: (gy[:, None] + 0 * x,), summed),
    Op('mean', ('b d',), 'b', lambda x: x.mean('d'), lambda x: x.mean(1),
       lambda gy, x: (gy[:, None] / x.shape[1] + 0 * x,), summed,
       bad=(no_axis(lambda x: x.mean('z')),)),
    Op('mean of two', ('b d',), '', lambda x: x.mean(('d', 'b')), lambda x: x.mean(),
       lambda gy, x: (gy / x.size + 0 * x,), summed),
    Op('sum_all', ('b d',), '', lambda x: x.sum_all(), lambda x: x.sum(),
       lambda gy, x: (gy + 0 * x,), summed),
    Op('mean_all', ('b d',), '', lambda x: x.mean_all(), lambda x: x.mean(),
       lambda gy, x: (gy / x.size + 0 * x,), summed),
    Op('max', ('b d',), 'b', lambda x: x.max('d'), lambda x: x.max(1),
       lambda gy, x: first_peak(gy, x, np.argmax), exactly, bad=(no_axis(lambda x: x.max('z')),)),
    Op('min', ('b d',), 'b', lambda x: x.min('d'), lambda x: x.min(1),
       lambda gy, x: first_peak(gy, x, np.argmin), exactly, bad=(no_axis(lambda x: x.min('z')),)),
    Op('variance', ('b d',), 'b', lambda x: x.variance('d'), lambda x: x.var(1),
       lambda gy, x: variance_grad(gy, x, 0), within(1e-6, 5e-6),
       bad=(no_axis(lambda x: x.variance('z')),
            (lambda x: x.variance('d', ddof=9), InvalidShapeError, 'd=9 with ddof=9'),
            (lambda x: x.variance('d', ddof=0.5), TypeError, 'integer'))),
    Op('variance of a sample', ('b d',), 'b', lambda x: x.variance('d', ddof=1),
       lambda x: x.var(1, ddof=1), lambda gy, x: variance_grad(gy, x, 1), within(1e-6, 5e-6),
       least=2),
    Op('argmax', ('b d',), 'b', lambda x: x.argmax('d'), lambda x: x.argmax(1), None, exactly,
       half_leaves=(0,), bad=(no_axis(lambda x: x.argmax('z')),)),
    # products
    *[product(f'dot {a}, {b}', (a, b), out, lambda x, w: x.dot(w, 'k'), bad=(
        (lambda x, w: x.dot(w, 'z'), TagError, "'z'"),
        (lambda x, w: x.dot(constant(np.ones((4, 5)), 'e k'), 'k'), ShapeMismatchError,
         'dot over "k": left has k=9, right has k=5'),
        (lambda x, w: x.dot(w.numpy(), 'k'), TypeError, 'ndarray'),
        (lambda x, w: x.to('bf16').dot(w, 'k'), DTypeError, 'left operand'))
        if a == 'b k' and b == 'k e' else ())
      for a, b, out in (('b k', 'k e', 'b e'), ('b k', 'e k', 'b e'), ('k b', 'k e', 'b e'),
                        ('k b', 'e k', 'b e'), ('b k', 'k', 'b'), ('k', 'e k', 'e'), ('k', 'k', ''),
                        ('c b k', 'c k e', 'c b e'), ('b c k', 'k e c', 'c b e'),
                        ('b k c', 'e k', 'b c e'), ('b k', 'b k', 'b'), ('c b k', 'e k', 'c b e'))],
    *[product(f'einsum {a}, {b} -> {out}', (a, b), out, lambda x, w, out=out: x.einsum(w, out),
              bad=((lambda x, w: x.einsum(w, 'b z'), TagError, r"'z'.*b=3.*e=4"),
                   (lambda x, w: x.einsum(constant(np.ones((5, 4)), 'k e'), 'e'),
                    ShapeMismatchError, 'k=9, right has k=5'),
                   (lambda x, w: x.einsum(w.numpy(), 'b'), TypeError, 'ndarray'),
                   (lambda x, w: x.einsum(w, 'b b'), TagError, 'duplicate'))
              if out == 'e b' else ())
      for a, b, out in (('b k', 'k e', 'e b'), ('b', 'k', 'k b'), ('b k', 'k e', 'e'),
                        ('b k', 'k e', ''), ('c b k', 'b k e', 'b e c'), ('b k', 'b k', 'k b'),
                        ('b k', 'b e', 'b e'), ('b k c', 'c e k', 'e b'), ('', 'k', 'k'), ('', '', ''))],
    product('einsum_many', ('b k', 'k e', 'e c'), 'c b',
            lambda x, y, z: einsum_many('c b', x, y, z), bad=(
                (lambda x, y, z: einsum_many('b z', x, y), TagError, "'z'"),
                (lambda x, y, z: einsum_many('b', x), TypeError, 'two tensors'),
                (lambda x, y, z: einsum_many('b', x.numpy(), y), TypeError, 'ndarray'),
                (lambda x, y, z: einsum_many('c', x, y, constant(np.ones((2, 5)), 'c e')),
                 ShapeMismatchError, 'e=4 before, e=5'))),
    # along one axis
    Op('softmax', ('b d',), 'b d', lambda x: x.softmax('d'), lambda x: shifted(x, 1),
       lambda gy, x: (soft_grad(shifted(x, 1), gy, 1),), within(2e-6, 2e-6),
       bad=(no_axis(lambda x: x.softmax('z')), no_axis(lambda x: x.softmax('d', causal=('z', 0))),
            (lambda x: x.softmax('d', causal=('b', 7)), InvalidShapeError, '3 queries.*7.*d=9'),
            (lambda x: x.softmax('d', causal=('b', -1)), InvalidShapeError, 'offset -1'),
            (lambda x: x.softmax('d', causal=('d', 0)), InvalidShapeError, 'same'),
            (lambda x: x.softmax('d', scale='a'), TypeError, 'scale'))),
    Op('softmax of columns', ('d b',), 'd b', lambda x: x.softmax('d', scale=0.5),
       lambda x: shifted(x * 0.5, 0), lambda gy, x: (soft_grad(shifted(x * 0.5, 0), gy, 0, 0.5),),
       within(2e-6, 2e-6)),
    Op('softmax, causal', ('b d',), 'b d', lambda x: x.softmax('d', causal=('b', 1)),
       lambda x: shifted(causal(x, 1), 1),
       lambda gy, x: (soft_grad(shifted(causal(x, 1), 1), gy, 1),), within(2e-6, 2e-6), least=4),
    *[Op(f'softmax, causal, {spec}', (spec,), spec, lambda x: x.softmax('d', 2, ('b', 0)),
         lambda x, spec=spec: np.stack([shifted(causal(2 * v), 1) for v in np.einsum(
             f'{spec.replace(" ", "")}->cbd', x)]).transpose(
                 ['cbd'.index(t) for t in spec.split()]),
         lambda gy, x, spec=spec: (np.stack([
             soft_grad(shifted(causal(2 * v), 1), g, 1, 2) for v, g in zip(*[np.einsum(
                 f'{spec.replace(" ", "")}->cbd', u) for u in (x, gy)])]).transpose(
                     ['cbd'.index(t) for t in spec.split()]),), within(2e-6, 2e-6), least=3)
      for spec in ('c b d', 'b c d', 'd b c', 'd c b', 'b d c', 'c d b')],
    Op('log_softmax', ('b d',), 'b d', lambda x: x.log_softmax('d'), lambda x: x - logs(x, 1),
       lambda gy, x: (gy - shifted(x, 1) * gy.sum(1, keepdims=True),), within(2e-6, 2e-6),
       bad=(no_axis(lambda x: x.log_softmax('z')),)),
    Op('log_softmax of the middle', ('b d c',), 'b d c', lambda x: x.log_softmax('d'),
       lambda x: x - logs(x, 1),
       lambda gy, x: (gy - shifted(x, 1) * gy.sum(1, keepdims=True),), within(2e-6, 2e-6)),
    Op('logsumexp', ('b d',), 'b', lambda x: x.logsumexp('d'), lambda x: logs(x, 1)[:, 0],
       lambda gy, x: (shifted(x, 1) * gy[:, None],), within(2e-6, 2e-6),
       bad=(no_axis(lambda x: x.logsumexp('z')),)),
    Op('rms_norm', ('b d',), 'b d', lambda x: x.rms_norm('d', EPS), rms, rms_grad,
       within(2e-6, 2e-6), bad=(no_axis(lambda x: x.rms_norm('z', EPS)),
                                (lambda x: x.rms_norm('d', None), TypeError, 'eps'))),
    Op('rms_norm, weight', ('b d', 'd'), 'b d', lambda x, w: x.rms_norm('d', EPS, w), rms,
       rms_grad, within(2e-6, 2e-6), bad=(
           (lambda x, w: x.rms_norm('b', EPS, w), ShapeMismatchError, 'd=9.*b=3'),
           (lambda x, w: x.rms_norm('d', EPS, constant(np.ones(4), 'd')), ShapeMismatchError,
            'd=4.*d=9'),
           (lambda x, w: x.rms_norm('d', EPS, w.numpy()), TypeError, 'weight'))),
    Op('layer_norm', ('b d',), 'b d', lambda x: x.layer_norm('d', EPS), layer, layer_grad,
       within(2e-6, 2e-6), bad=(no_axis(lambda x: x.layer_norm('z', EPS)),)),
    Op('layer_norm, weight', ('b d', 'd', 'd'), 'b d',
       lambda x, w, b: x.layer_norm('d', EPS, w, b), layer, layer_grad, within(2e-6, 2e-6), bad=(
           (lambda x, w, b: x.layer_norm('d', EPS, w), TypeError, 'together'),
           (lambda x, w, b: x.layer_norm('d', EPS, bias=b), TypeError, 'together'),
           (lambda x, w, b: x.layer_norm('d', EPS, w, constant(np.ones(4), 'd')),
            ShapeMismatchError, 'bias.*d=4.*d=9'))),
    # losses (more in test_cross_entropy.py)
    Op('cross_entropy', ('b d',), '', lambda x: x.cross_entropy('d', labels(x.dim('d'))), xent,
       xent_grad, within(1e-6, 2e-6), bad=(
           no_axis(lambda x: x.cross_entropy('z', [0] * 3)),
           (lambda x: x.cross_entropy('d', [0] * 4), InvalidDataLengthError, '4 labels for 3'),
           (lambda x: x.cross_entropy('d', [0, 9, 0]), IndexOutOfBoundsError, '9 at position 1'),
           (lambda x: x.cross_entropy('d', [0, 1, -1]), IndexOutOfBoundsError, '-1 at position 2'),
           (lambda x: x.cross_entropy('d', [0.0, 1, 2]), DTypeError, 'float64'),
           (lambda x: x.cross_entropy('d', [0] * 3, reduction='max'), ValueError, "'max'"),
           (lambda x: x.cross_entropy('d', [0] * 3, label_smoothing=1), ValueError, 'got 1'))),
    Op('cross_entropy, smoothed sum', ('b d',), '', lambda x: x.cross_entropy(
        'd', labels(x.dim('d')), reduction='sum', label_smoothing=0.25),
       lambda x: xent(x, np.sum, 0.25), lambda gy, x: xent_grad(gy, x, 0.25, 1),
       within(3e-6, 2e-6)),
    Op('cross_entropy, none', ('b d',), 'b', lambda x: x.cross_entropy(
        'd', labels(x.dim('d')), reduction='none'),
       lambda x: xent(x, lambda v: v), lambda gy, x: xent_grad(gy, x, 0, 1), within(1e-6, 2e-6)),
    *[Op(f'mse_loss, {kind}', ('b d', 'b d'), out, lambda x, y, kind=kind: x.mse_loss(y, kind),
         lambda x, y, reduce=reduce: reduce((x - y)**2),
         lambda gy, x, y, mean=kind == 'mean': (2 * (x - y) * gy / (x.size if mean else 1),
                                                2 * (y - x) * gy / (x.size if mean else 1)),
         within(1e-6, 2e-6), bad=(
             (lambda x, y: x.mse_loss(variable(np.ones((9, 3)), 'd b')), ShapeMismatchError,
              r'\[b=3, d=9\].*\[d=9, b=3\]'),
             (lambda x, y: x.mse_loss(constant(np.ones((3, 1)), 'b d')), ShapeMismatchError, 'd=1'),
             (lambda x, y: x.mse_loss(y.numpy()), TypeError, 'tensor'),
             (lambda x, y: x.mse_loss(y, 'max'), ValueError, "'max'")) if kind == 'mean' else ())
      for kind, out, reduce in (('mean', '', np.mean), ('sum', '', np.sum),
                                ('none', 'b d', lambda v: v))],
    # picking, joining, casting
    moving('gather', ('b d',), 'b s=4', lambda x: x.gather('d', picks(x.dim('d')), 's'),
           lambda x: x[:, picks(x.shape[1])], bad=(
               no_axis(lambda x: x.gather('z', [0])),
               (lambda x: x.gather('d', [0, 9]), IndexOutOfBoundsError, '9 at position 1.*9 entr'),
               (lambda x: x.gather('d', [-1]), IndexOutOfBoundsError, 'index -1'),
               (lambda x: x.gather('d', [0.5]), DTypeError, 'float64'),
               (lambda x: x.gather('d', [True]), DTypeError, 'bool'),
               (lambda x: x.gather('d', []), InvalidShapeError, 'at least one'),
               (lambda x: x.gather('d', np.int64([])), InvalidShapeError, 'at least one'),
               (lambda x: x.gather('d', [[0]]), InvalidShapeError, 'one axis'),
               (lambda x: x.gather('d', [0], 'b'), TagError, 'duplicate'),
               (lambda x: x.gather('d', [0], ''), TagError, 'non-empty'))),
    moving('gather rows', ('d b',), 's=4 b', lambda x: x.gather('d', picks(x.dim('d')), 's'),
           lambda x: x[picks(len(x))]),
    moving('index_select', ('b d',), 'b s=4',
           lambda x: x.index_select('d', constant(picks(x.dim('d')), 's')),
           lambda x: x[:, picks(x.shape[1])], bad=(
               (lambda x: x.index_select('d', [0]), DTypeError, 'i64 tensor'),
               (lambda x: x.index_select('d', constant([0.0], 's')), DTypeError, 'i64 tensor'),
               (lambda x: x.index_select('d', constant([99], 's')), IndexOutOfBoundsError, '99'))),
    moving('concat', ('b d', 'b d=2', 'b d'), 'b d', lambda *ts: concat('d', ts),
           lambda *xs: np.concatenate(xs, 1), bad=(
               (lambda *ts: concat('z', ts), TagError, "no axis 'z'|d=2"),
               (lambda *ts: concat('b', ts), ShapeMismatchError, "d=9.*d=2.*differ in 'd'"),
               (lambda x, y, z: concat('d', [x, y.numpy()]), TypeError, 'ndarray'),
               (lambda x, y, z: concat('d', []), TypeError, 'at least one'),
               (lambda x, y, z: concat('d', [x, x.detach().to('bf16')]), DTypeError, 'f32.*bf16'),
               (lambda x, y, z: concat('d', [x, constant(np.ones((3, 9)), 'a d')]), TagError,
                'b=3.*a=3'))),
    moving('concat rows', ('b d', 'c d'), 'e d', lambda x, y: concat('e', [
        t.with_tags('e d') for t in (x, y)]), lambda *xs: np.concatenate(xs, 0)),
    moving('stack', ('b d', 'b d'), 'b s=2 d', lambda *ts: stack('s', 1, ts),
           lambda *xs: np.stack(xs, 1), bad=(
               (lambda x, y: stack('b', 0, [x, y]), TagError, 'duplicate'),
               (lambda x, y: stack('s', 3, [x, y]), IndexOutOfBoundsError, 'stack at 3'),
               (lambda x, y: stack('s', -1, [x, y]), IndexOutOfBoundsError, 'stack at -1'),
               (lambda x, y: stack('s', 0, [x, constant(np.ones((3, 1)), 'b d')]),
                ShapeMismatchError, "d=9.*d=1.*differ in 'd'"),
               (lambda x, y: stack('s', 0, [x, y.numpy()]), TypeError, 'ndarray'))),
    Op('to and back', ('b d',), 'b d', lambda x: x.to('bf16').to('f32'), round_bf16,
       lambda gy, x: (gy,), exactly, integers=True, half_leaves=(0,), smooth=False, bad=(
           (lambda x: x.to('f64'), DTypeError, "'f64'"),
           (lambda x: x.to('i64'), GradientCastUnsupportedError, 'b=3, d=9'))),
    Op('to f32', ('b d',), 'b d', lambda x: x.to('f32'), lambda x: x, lambda gy, x: (gy,),
       exactly, integers=True, half_leaves=(0,)),
    # views (more in test_tensor.py)
    moving('with_tags', ('b d',), 'x=3 d', lambda x: x.with_tags('x d'), lambda x: x),
    moving('permute_to', ('b d c',), 'd c b', lambda x: x.permute_to('d c b'),
           lambda x: x.transpose(1, 2, 0)),
    moving('align_to', ('b d',), 'd x=1 b', lambda x: x.align_to('d x b'), lambda x: x.T[:, None]),
    moving('insert_axis', ('b d',), 'b x=1 d', lambda x: x.insert_axis('x', 1),
           lambda x: x[:, None]),
    moving('squeeze', ('b x=1 d',), 'b d', lambda x: x.squeeze('x'), lambda x: x[:, 0]),
    moving('split', ('e d',), 'x=2 y=2 d', lambda x: x.split('e', 'x y', (2, 2)),
           lambda x: x.reshape(2, 2, -1)),
    moving('merge', ('d b c',), 'd x=6', lambda x: x.contiguous().merge('x', 'b c'),
           lambda x: x.reshape(len(x), 6)),
    moving('broadcast_to', ('b x=1 d',), 'd c b x=5', lambda x: x.broadcast_to(
        'd c b x', (x.dim('d'), 2, 3, 5)), lambda x: np.broadcast_to(
            x.transpose(2, 0, 1)[:, None], (x.shape[2], 2, 3, 5))),
    moving('narrow', ('b d',), 'x=2 d', lambda x: x.narrow('b', 1, 2).with_tags('x d'),
           lambda x: x[1:]),
    moving('select', ('b d',), 'b', lambda x: x.select('d', -1), lambda x: x[:, -1]),
    moving('materialize', ('b d',), 'b d', lambda x: x.materialize(), lambda x: x),
    moving('contiguous', ('b d',), 'b d', lambda x: x.contiguous(), lambda x: x),
    moving('flatten', ('b c',), 'x=6', lambda x: x.flatten('x'), lambda x: x.ravel()),
    Op('detach', ('b d',), 'b d', lambda x: x.detach(), lambda x: x, None, exactly, half='same',
       integers=True, half_leaves=(0,)),
]
NAMES = [op.name for op in TABLE]
assert len(set(NAMES)) == len(NAMES)


def every(ops=TABLE): return pytest.mark.parametrize('op', ops, ids=repr)


# --- operands

def data(op, n):
    "Shuffled grids: no ties, and no value at a kink."
    g, out = np.random.default_rng(n), []
    for k, spec in enumerate(op.operands):
        shape = axes(spec, n)[1]
        size = math.prod(shape)
        grid = op.lo + (np.arange(size) + 0.37 - 0.17 * k) * (op.hi - op.lo) / size
        out.append(g.permutation(grid).reshape(shape).astype(f32))
    return out


LAYOUTS = ('contiguous', 'transposed', 'strided', 'repeated')


def placed(a, tags, layout):
    "A variable, the operand made of it, its array, and where a gradient of the operand goes."
    if layout == 'transposed':
        leaf = variable(a.T, tags[::-1])
        return leaf, leaf.permute_to(tags), a, lambda g: g.T
    if layout == 'strided':
        leaf = variable(np.stack([a, a + 9], -1), (*tags, 'layout'))
        return leaf, leaf.select('layout', 0), a, lambda g: np.stack([g, 0 * g], -1)
    if layout == 'repeated' and a.ndim:
        leaf = variable(a[:1], tags)
        return (leaf, leaf.broadcast_to(tags, a.shape), np.broadcast_to(a[:1], a.shape),
                lambda g: g.sum(0, keepdims=True))
    leaf = variable(a, tags)
    return leaf, leaf, a, lambda g: g


def operands(op, n=9, make=variable):
    return [make(a, axes(s, n)[0]) for a, s in zip(data(op, n), op.operands)]


def check(got, want, tolerance, what):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    error = abs(got - want)
    assert (error <= tolerance).all(), f'{what}: off by {(error - tolerance).max():.3g} too much'


def test_no_operation_is_missing():
    public = {n for base in Tensor.__mro__[:-1] for n, f in vars(base).items()
              if callable(f) and not n.startswith('_')}
    no_operation = {
        'numpy', 'item', 'tolist', 'copy_to', 'data', 'data_const', 'axis', 'dim', 'has_tag',
        'zero_grad', 'set_grad', 'retain_grad', 'backward', 'transpose',
        'full_like', 'zeros_like', 'ones_like', 'empty_like'}
    assert public - no_operation <= {op.name.split()[0].rstrip(',') for op in TABLE}


# --- values and gradients

RARE = {k for k in PAIRS if k not in FEW}
PLACED = [pytest.param(op, layout, id=f'{op}-{layout}') for op in TABLE for layout in LAYOUTS
          if layout in ('contiguous', 'repeated') or op.name.partition(', ')[2] not in RARE]


@pytest.mark.parametrize('op, layout', PLACED)
def test_values_and_gradients(op, layout):
    for n in [n for n in (SIZES if layout == 'contiguous' else (1, 9, 1025)) if n >= op.least]:
        tags = [axes(s, n)[0] for s in op.operands]
        leaves, ts, arrays, homes = zip(*[placed(a, t, layout) for a, t in zip(data(op, n), tags)])
        y = op.run(*ts)
        assert y.tags == axes(op.out, n)[0] and type(y) is Tensor
        want, tolerance = op.close(op.ref, [a.astype(np.float64) for a in arrays], n)
        check(y.numpy(), want, tolerance, f'{op}, n = {n}')
        assert y.requires_grad == (op.grad is not None)
        if not op.blas and layout != 'repeated':  # the layout never shows
            plain = op.run(*[constant(a, t) for a, t in zip(arrays, tags)])
            assert y.numpy().tobytes() == plain.numpy().tobytes(), n
        if op.grad is None: continue
        gy = np.random.default_rng(n + 1).uniform(-1, 1, y.shape).astype(f32)
        y.backward(gy)
        grads = op.grad(gy.astype(np.float64), *[a.astype(np.float64) for a in arrays])
        for leaf, g, home in zip(leaves, grads, homes):
            g = home(g * np.ones(()))
            many = math.sqrt(max(1, max(y.size, *(a.size for a in arrays)) / g.size))
            check(leaf.grad.numpy(), g, 2e-5 * abs(g) + 3e-6 * many * max(1, abs(g).max()),
                  f'{op}, gradient, n = {n}')


@every([op for op in TABLE if op.grad is not None and op.smooth])
def test_the_formulas_of_this_table(op):
    "Each gradient formula above against float64 central differences of the value's formula."
    n = max(op.least, 3)
    arrays = [a.astype(np.float64) for a in data(op, n)]
    gy = np.random.default_rng(0).uniform(-1, 1, np.shape(op.ref(*arrays)))
    for x, g in zip(arrays, op.grad(gy, *arrays)):
        flat, slopes = x.reshape(-1), []
        for i in range(flat.size):
            v, ends = flat[i], []
            for step in (1e-6, -1e-6):
                flat[i] = v + step
                ends.append((op.ref(*arrays) * gy).sum())
            flat[i] = v
            slopes.append((ends[0] - ends[1]) / 2e-6)
        np.testing.assert_allclose((g * np.ones(x.shape)).ravel(), slopes, rtol=1e-5, atol=1e-7)


@every([op for op in TABLE if op.grad is not None and op.smooth])
def test_gradcheck(op):
    n = max(op.least, 3)
    weights = None

    def loss(*ts):
        nonlocal weights
        y = op.run(*ts)
        if weights is None: weights = constant(np.random.default_rng(1).uniform(
            -1, 1, y.shape), y.tags)
        return (y * weights).sum_all()
    leaves = operands(op, n)
    assert gradcheck(loss, *leaves).checked == sum(t.size for t in leaves)


@every([op for op in TABLE if op.grad is not None])
def test_only_variables_get_gradients(op):
    for k in range(len(op.operands)):
        ts = operands(op, make=constant)
        ts[k] = operands(op)[k]
        y = op.run(*ts)
        y.backward(np.ones(y.shape))
        assert [t.grad is not None for t in ts] == [i == k for i in range(len(ts))]
        assert ts[k].grad.dtype == 'f32' and ts[k].grad.shape == ts[k].shape


@every()
def test_without_a_graph(op):
    ts = operands(op)
    with no_grad(): silent = op.run(*ts)
    plain = op.run(*operands(op, make=constant))
    for y in (silent, plain): assert not y.requires_grad
    assert silent.numpy().tobytes() == plain.numpy().tobytes() == op.run(*ts).numpy().tobytes()


@every([op for op in TABLE if ', ' not in op.name or op.name.partition(', ')[2] not in PAIRS
        or op.name.endswith(('equal', 'bias', 'turned'))])
def test_any_number_of_workers_gives_the_same_bits(op):
    n, seen = 2**17 // 3 + 1, set()
    arrays = data(op, n)
    for workers in (1, 7, 2):
        ts = [variable(a, axes(s, n)[0]) for a, s in zip(arrays, op.operands)]
        with ExecContext(workers=workers), exec_scope():
            y = op.run(*ts)
            if op.grad is not None: y.backward(np.ones(y.shape))
            seen.add(tuple(hash(v.numpy().tobytes()) for v in (
                y, *[t.grad for t in ts if op.grad is not None])))
    assert len(seen) == 1


def poison(context):
    for shelf in context.pool.free.values():
        for a in shelf: a.fill(np.nan)


@every()
def test_recycled_memory_never_shows_through(op):
    "Results and gradients in buffers that held NaN equal those in fresh memory."
    def step(ts):
        y = op.run(*ts)
        if op.grad is not None: y.backward(np.linspace(-1, 1, y.size).reshape(y.shape))
        seen = [v.numpy().tobytes() for v in (y, *[t.grad for t in ts if op.grad is not None])]
        for t in ts: t.zero_grad()
        return seen
    ts = operands(op)
    plain = step(ts)
    with ExecContext() as context:
        for _ in range(3):
            with exec_scope(): assert step(ts) == plain
            poison(context)
        fresh = context.stats()['fresh']
        with exec_scope(): assert step(ts) == plain
        assert context.stats()['fresh'] == fresh and context.stats()['escaped'] == 0


def test_any_two_operands_meet():
    "Random axes, orders and sizes of 1: lining up, and the way back of both gradients."
    g = np.random.default_rng(0)
    for _ in range(400):
        sizes = {t: int(g.integers(1, 4)) for t in 'abcd'}
        specs = []
        for _ in range(2):
            tags = [t for t in g.permutation(list('abcd')) if g.random() < 0.6]
            specs.append(' '.join(f'{t}={1 if g.random() < 0.3 else sizes[t]}' for t in tags))
        (s, n), (t, m) = (axes(spec, 0) for spec in specs)
        x, y = (variable(g.standard_normal(shape), tags) for tags, shape in ((s, n), (t, m)))
        out = s + tuple(v for v in t if v not in s)
        want = lift(x.numpy(), specs[0], ' '.join(out)) * lift(y.numpy(), specs[1], ' '.join(out))
        z = x * y
        assert z.tags == out and np.array_equal(z.numpy(), want), specs
        gy = g.standard_normal(z.shape)
        z.backward(gy)
        for v, other, spec, shape in ((x, y, specs[0], n), (y, x, specs[1], m)):
            o = lift(other.numpy(), specs[1] if v is x else specs[0], ' '.join(out))
            np.testing.assert_allclose(v.grad.numpy(), lower(
                gy.astype(f32) * o * np.ones(z.shape), spec, ' '.join(out), shape),
                rtol=1e-4, atol=1e-5, err_msg=str(specs))


def test_any_two_operands_contract():
    g = np.random.default_rng(1)
    for _ in range(300):
        sizes = {t: int(g.integers(1, 4)) for t in 'abcde'}
        s, t = ([v for v in g.permutation(list('abcde')) if g.random() < 0.6] for _ in range(2))
        out = [v for v in g.permutation(list('abcde')) if v in s + t and g.random() < 0.6]
        op = product('', (' '.join(s), ' '.join(t)), ' '.join(out), None)
        x, w = (variable(g.standard_normal([sizes[v] for v in tags]), tags) for tags in (s, t))
        y = x.einsum(w, out)
        a, b = x.numpy().astype(np.float64), w.numpy().astype(np.float64)
        np.testing.assert_allclose(y.numpy(), op.ref(a, b), rtol=1e-4, atol=1e-4)
        gy = g.standard_normal(y.shape)
        y.backward(gy)
        for v, want in zip((x, w), op.grad(gy, a, b)):
            np.testing.assert_allclose(v.grad.numpy(), want, rtol=1e-4, atol=1e-4)


# --- dtypes

def halves(op, dtype, make=constant):
    return [make(t.numpy(), t.tags, dtype=dtype) for t in operands(op)]


@pytest.mark.parametrize('dtype', ['f16', 'bf16'])
@every()
def test_16_bit_operands(op, dtype):
    ts = halves(op, dtype)
    if op.half == 'refused':
        with pytest.raises(DTypeError, match=rf'Tensor\[.*\] {dtype}'): op.run(*ts)
        return
    y, wide = op.run(*ts), op.run(*[t.to('f32') for t in ts])
    if op.half == 'same':
        assert y.dtype == dtype and np.array_equal(y.bits, wide.to(dtype).bits)
    else: assert y.dtype == wide.dtype and y.numpy().tobytes() == wide.numpy().tobytes()
    with exec_scope(): y = op.run(*ts)
    if y.dtype != 'f32': y.numpy()  # an untracked 16-bit result belongs to no scope


@every()
def test_tracked_16_bit_operands(op):
    for k in range(len(op.operands)):
        ts = operands(op, make=constant)
        ts[k] = halves(op, 'bf16', variable)[k]
        if k in op.half_leaves:
            y = op.run(*ts)
            assert y.requires_grad == (op.grad is not None)
            if op.grad is not None:
                y.backward(np.ones(y.shape))
                assert ts[k].grad.dtype == 'f32' and ts[k].grad.shape == ts[k].shape
            continue
        ts = halves(op, 'bf16')
        ts[k] = halves(op, 'bf16', variable)[k]
        with pytest.raises(UnsupportedGradientError, match='bf16'): op.run(*ts)
        with no_grad():
            if op.half == 'refused':
                with pytest.raises(DTypeError): op.run(*ts)
            else: assert not op.run(*ts).requires_grad


@every()
def test_integer_operands(op):
    for k in range(len(op.operands)):
        ts = operands(op, make=constant)
        ts[k] = ts[k].to('i64')
        if op.integers and len(ts) == 1: op.run(*ts)
        else:
            with pytest.raises(DTypeError, match='i64'): op.run(*ts)
    ts = [t.to('i64') for t in operands(op, make=constant)]
    if op.integers: assert not op.run(*ts).requires_grad
    else:
        with pytest.raises(DTypeError, match='i64'): op.run(*ts)


# --- refusals

@every()
def test_a_released_operand_is_named(op):
    for k in range(len(op.operands)):
        for make in (variable, constant):
            ts = operands(op, make=make)
            with exec_scope(): ts[k] = ts[k].scale(1)
            with pytest.raises(UseAfterScopeError, match=r'Tensor\[.*test_ops.py:\d+'): op.run(*ts)


BAD = [pytest.param(op, *bad, id=f'{op}-{k}') for op in TABLE for k, bad in enumerate(op.bad)]


@pytest.mark.parametrize('op, call, error, says', BAD)
def test_refusals_name_what_is_wrong_and_change_nothing(op, call, error, says):
    made = []

    def counted(*ts):
        with exec_scope() as s:
            try: call(*ts)
            finally: made.append(s.stats['results'])
    ts = operands(op, make=variable)
    if error is DTypeError and 'bf16' in says or 'left' in says: ts = operands(op, make=constant)
    before = [(t.tolist(), t._version) for t in ts]
    with pytest.raises(error, match=says): counted(*ts)
    assert made[0] <= 1  # at most an operand that the call itself prepares
    assert before == [(t.tolist(), t._version) for t in ts] and all(t.grad is None for t in ts)


# --- NaN, infinities, signs, ranges

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize('call, x, want', [
    ('neg', [0.0, NAN, INF], [-0.0, NAN, -INF]), ('abs', [-0.0, NAN, -INF], [0.0, NAN, INF]),
    ('exp', [NAN, INF, -INF, -200, 89], [NAN, INF, 0, 0, INF]),
    ('log', [NAN, INF, 0, -1], [NAN, INF, -INF, NAN]),
    ('log1p', [NAN, INF, -1, -2], [NAN, INF, -INF, NAN]),
    ('sqrt', [NAN, INF, -0.0, -1], [NAN, INF, -0.0, NAN]),
    ('rsqrt', [NAN, INF, 0, -1], [NAN, 0, INF, NAN]),
    ('reciprocal', [NAN, INF, 0, -0.0], [NAN, 0, INF, -INF]),
    ('sin', [NAN, INF], [NAN, NAN]), ('cos', [NAN, INF], [NAN, NAN]),
    ('relu', [NAN, INF, -INF, -0.0], [NAN, INF, 0, 0]),
    ('leaky_relu', [NAN, INF, -INF, -100], [NAN, INF, -INF, -1]),
    ('tanh', [NAN, INF, -INF, -0.0, 30], [NAN, 1, -1, -0.0, 1]),
    ('sigmoid', [NAN, INF, -INF, -200, 0], [NAN, 1, 0, 0, 0.5]),
    ('silu', [NAN, INF, -200, -0.0], [NAN, INF, -0.0, -0.0]),
    ('gelu', [NAN, INF, -200, -0.0], [NAN, INF, -0.0, -0.0]),
    (lambda x: x.clamp(-1, 1), [NAN, INF, -INF], [NAN, 1, -1]),
    (lambda x: x.clamp(-INF, 2), [NAN, 5, -INF], [NAN, 2, -INF]),
    (lambda x: x.scale(1e39), [1, -1, 0], [INF, -INF, NAN]),
    (lambda x: x.div_scalar(0), [1, -1, 0], [INF, -INF, NAN]),
    (lambda x: x.pow_scalar(0), [NAN, INF, 0], [1, 1, 1]),
    (lambda x: x.maximum(constant([1.0], 'd')), [NAN, INF, -INF], [NAN, INF, 1]),
    (lambda x: constant([1.0], 'd').minimum(x), [NAN, INF, -INF], [NAN, 1, -INF]),
    (lambda x: x.maximum(constant([NAN], 'd')), [1, NAN], [NAN, NAN]),
    (lambda x: x.max('d'), [1, NAN, 3], NAN), (lambda x: x.min('d'), [1, NAN, 3], NAN),
    (lambda x: x.sum('d'), [1, INF], INF), (lambda x: x.mean('d'), [INF, -INF], NAN),
    (lambda x: x.argmax('d'), [NAN, 1, 3, 3], 2), (lambda x: x.argmax('d'), [NAN, NAN], 0),
    (lambda x: x.argmax('d'), [NAN, -INF], 1), (lambda x: x.argmax('d'), [-INF, -INF], 0),
    (lambda x: x.softmax('d'), [-INF, 0, 0], [0, 0.5, 0.5]),
    (lambda x: x.softmax('d'), [-1e30, 1e30], [0, 1]),
    (lambda x: x.softmax('d'), [0, NAN, 1], [NAN] * 3),
    (lambda x: x.softmax('d'), [-INF, -INF], [NAN] * 2),
    (lambda x: x.log_softmax('d'), [0, -INF], [0, -INF]),
    (lambda x: x.log_softmax('d'), [-300, 300], [-600, 0]),
    (lambda x: x.log_softmax('d'), [0, INF], [-INF, NAN]),
    (lambda x: x.logsumexp('d'), [-INF, -INF], -INF), (lambda x: x.logsumexp('d'), [0, INF], INF),
    (lambda x: x.logsumexp('d'), [1, NAN], NAN), (lambda x: x.logsumexp('d'), [1e30] * 2, 1e30),
    (lambda x: x.rms_norm('d', 0), [3e-30, 4e-30], None), (lambda x: x.variance('d'), [NAN, 1], NAN),
    (lambda x: x.dropout(0.5, 0), [NAN] * 8, None)])
def test_special_values(call, x, want):
    with np.errstate(all='ignore'):
        t = constant(f32(x), 'd')
        y = (getattr(t, call)() if isinstance(call, str) else call(t)).numpy()
    if want is None: return
    want = f32(want)
    assert np.array_equal(y, want, equal_nan=True)
    assert np.array_equal(np.signbit(y)[~np.isnan(y)], np.signbit(want)[~np.isnan(want)])


@pytest.mark.parametrize('call, x, want', [
    ('abs', [0, -0.0, NAN, -2], [0, 0, 0, -1]), ('relu', [0, NAN, INF, -INF], [0, 0, 1, 0]),
    ('leaky_relu', [0, NAN], [f32(0.01), f32(0.01)]), ('tanh', [INF, 0, -50], [0, 1, 0]),
    ('sigmoid', [INF, 0, -INF], [0, 0.25, 0]), ('silu', [-200, 200, 0], [0, 1, 0.5]),
    ('gelu', [-200, 200, 0], [0, 1, 0.5]), ('sqrt', [0, 4], [INF, 0.25]),
    (lambda x: x.clamp(-1, 1), [1, -1, 2, NAN, 0], [1, 1, 0, 0, 1]),
    (lambda x: x.pow_scalar(0), [0, 1, NAN], [0, 0, 0]),
    (lambda x: x.pow_scalar(1), [0, 5, -5], [1, 1, 1]),
    (lambda x: x.pow_scalar(2), [0, 5, -5], [0, 10, -10]),
    (lambda x: x.maximum(constant([1.0, 1, 1, NAN], 'd')), [1, 2, NAN, NAN], [0.5, 1, 1, 0.5]),
    (lambda x: x.minimum(constant([1.0, 1, 1, NAN], 'd')), [1, 2, NAN, 5], [0.5, 0, 1, 0]),
    (lambda x: x.maximum(x), [1, 2], [1, 1]),
    (lambda x: x.max('d'), [5, 7, 7], [0, 1, 0]), (lambda x: x.min('d'), [5, 5, 7], [1, 0, 0]),
    (lambda x: x.max('d'), [5, NAN, NAN], [0, 1, 0]),
    (lambda x: x.logsumexp('d'), [-300, 300], [0, 1]),
    (lambda x: x.softmax('d').select('d', 0), [-INF, 0, 0], [0, 0, 0])])
def test_gradients_at_special_points(call, x, want):
    t = variable(f32(x), 'd')
    with np.errstate(all='ignore'):
        y = getattr(t, call)() if isinstance(call, str) else call(t)
        y.backward(np.ones(y.shape))
    assert np.array_equal(t.grad.numpy(), f32(want), equal_nan=True)


@pytest.mark.parametrize('name, exact, lo, hi, ulp, small', [
    ('exp', np.exp, -100, 88, 4, 1e-45), ('tanh', np.tanh, -12, 12, 4, 0),
    ('sigmoid', sigmoid, -80, 20, 4, 0), ('silu', lambda x: x * sigmoid(x), -40, 40, 8, 1e-7),
    ('gelu', gelu, -12, 12, 8, 1e-7), ('log', np.log, 1e-30, 1e30, 4, 0),
    ('log1p', np.log1p, -0.99, 50, 4, 0), ('sin', np.sin, -300, 300, 4, 0),
    ('cos', np.cos, -300, 300, 4, 0)])
def test_accuracy_over_the_range(name, exact, lo, hi, ulp, small):
    x = np.concatenate([np.linspace(lo, hi, 20_001), np.geomspace(1e-30, 1, 200) * hi / abs(hi)])
    x = x.astype(f32)
    want = exact(x.astype(np.float64))
    error = abs(getattr(constant(x, 'd'), name)().numpy() - want)
    assert (error <= ulp * np.spacing(abs(want).astype(f32)) + small).all()


def test_softmax_rows_sum_to_one_and_hide_the_future():
    x = fucina.randn((50, 300), 'q s', seed=1) * 10
    for y in (x.softmax('s'), x.softmax('s', causal=('q', 250))):
        assert abs(y.numpy().sum(1, dtype=np.float64) - 1).max() < 1e-6
    y = x.softmax('s', causal=('q', 3)).numpy()
    future = np.arange(300) > np.arange(50)[:, None] + 3
    assert (y[future] == 0).all() and (y[~future] > 0).any()
    leak = np.where(future, np.nan, x.numpy())  # what is masked is not even read
    assert np.array_equal(constant(leak, 'q s').softmax('s', causal=('q', 3)).numpy(), y)
    w = variable(leak, 'q s')
    w.softmax('s', causal=('q', 3)).backward(np.ones((50, 300)))
    assert (w.grad.numpy()[future] == 0).all()


def test_norms_far_from_zero():
    x = 1e4 + np.random.default_rng(0).standard_normal((4, 500))
    t, a = constant(x, 'b d'), x.astype(f32).astype(np.float64)
    np.testing.assert_allclose(t.layer_norm('d', 1e-5).numpy(), (a - a.mean(1, keepdims=True)) /
                               np.sqrt(a.var(1, keepdims=True) + 1e-5), atol=2e-3)
    np.testing.assert_allclose(t.variance('d').numpy(), a.var(1), rtol=1e-3)


# --- rules of their own

def test_operand_order_decides_the_layout():
    a, b = constant([1.0, 2], 'd'), constant(np.ones((3, 2)), 'batch d')
    assert (a + b).tags == ('d', 'batch') and (b + a).tags == ('batch', 'd')
    assert (a * b).is_contiguous and (b - a).is_contiguous


def test_scalars_are_rounded_once():
    x = constant([3.0, -7.1], 'd')
    for s in (0.1, np.float64(0.1), f32(0.1)):
        assert np.array_equal(x.scale(s).numpy(), x.numpy() * f32(0.1))
        assert np.array_equal(x.div_scalar(s).numpy(), x.scale(f32(1) / f32(0.1)).numpy())
        assert np.array_equal(x.sub_scalar(s).numpy(), x.add_scalar(-f32(0.1)).numpy())
        assert np.array_equal(x.div_scalar(3).numpy(), x.scale(f32(1 / 3)).numpy())
    assert x.scale(np.int64(2)).tolist() == [6, 2 * float(f32(-7.1))]


def test_dropout_is_a_function_of_seed_and_position():
    x = variable(np.ones((30, 40)), 'b d')
    y = x.dropout(0.25, seed=2**64 + 3)
    assert np.array_equal(y.numpy(), x.dropout(0.25, seed=3).numpy())
    assert np.array_equal(x.dropout(0.25, -1).numpy(), x.dropout(0.25, 2**64 - 1).numpy())
    assert not np.array_equal(y.numpy(), x.dropout(0.25, 4).numpy())
    assert set(np.unique(y.numpy())) == {0, f32(1) / f32(0.75)}
    assert abs((y.numpy() != 0).mean() - 0.75) < 0.04
    y.backward(np.ones(y.shape))
    assert np.array_equal(x.grad.numpy(), y.numpy())
    turned = x.detach().permute_to('d b').dropout(0.25, 3)  # positions of the operand as it is
    assert np.array_equal(turned.numpy().ravel(), y.numpy().ravel())


def test_gather_adds_duplicates_in_order():
    table = variable(np.zeros((4, 1)), 'vocab embed')
    big = f32(2**24)
    table.gather('vocab', [1, 1, 1, 3], 'seq').backward(f32([[big], [1], [-big], [5]]))
    assert table.grad.tolist() == [[0], [0], [0], [5]]  # (2^24 + 1) - 2^24 loses the 1
    table.zero_grad()
    table.gather('vocab', [1, 1, 1], 'seq').backward(f32([[big], [-big], [1]]))
    assert table.grad.tolist() == [[0], [1], [0], [0]]


def test_indices_are_read_once():
    w, at = variable(np.arange(4), 'd'), np.array([0, 1])
    y = w.gather('d', at)
    at[:] = 3
    y.backward([1, 2])
    assert w.grad.tolist() == [1, 2, 0, 0]


def test_a_tied_table_gets_one_gradient():
    table, h = variable([[1, 2], [3, 4]], 'vocab embed'), constant([[1.0, 1]], 'b embed')
    (table.gather('vocab', [0], 'b') * h).sum_all().add(
        h.dot(table, 'embed').sum_all()).backward()
    assert table.grad.tolist() == [[2, 2], [1, 1]]


@pytest.mark.parametrize('source', ['f32', 'f16', 'bf16', 'i64'])
@pytest.mark.parametrize('target', ['f32', 'f16', 'bf16', 'i64'])
def test_casts_always_copy(source, target):
    t = constant([1, -2, 300], 'd', dtype=source)
    y = t.to(target)
    assert y.dtype == target and y.tolist() == [1, -2, 300]
    assert not np.shares_memory(y.value, t.value) and not y.requires_grad


def test_casts_round_and_truncate():
    assert constant([1.9, -1.9], 'd').to('i64').tolist() == [1, -1]
    assert constant([1 + 2**-9, 1 + 3 * 2**-9], 'd').to('bf16').tolist() == [1, 1 + 2**-6 / 2 + 0]
    assert constant([70000.0], 'd').to('f16').tolist() == [INF]
    v = variable([1 + 2**-9], 'd')
    y = v.to('bf16')
    assert y.requires_grad and y.to('f16').requires_grad
    with exec_scope():
        inner = v.to('bf16')
        wide = inner.to('f32').scale(3)
        wide.backward([2])
    assert v.grad.tolist() == [6]
    with pytest.raises(UseAfterScopeError): inner.numpy()  # a tracked cast is the scope's


def test_subclasses_stay_themselves():
    class Mine(Tensor): __slots__ = ()
    for op in TABLE:
        ts = [Mine._make(t.value, t.tags, t.dtype) for t in operands(op, make=constant)]
        assert type(op.run(*ts)) is Mine, op


def test_helpers_heed_the_floating_point_modes_of_the_caller():
    big = constant(np.full(2**17 + 5, 1000.0), 'd')
    with ExecContext(workers=2):
        with np.errstate(all='ignore'): assert big.scale(1e38).numpy()[-1] == INF
        with np.errstate(over='raise'), pytest.raises(FloatingPointError): big.scale(1e38)
        with pytest.warns(RuntimeWarning, match='overflow'): big.scale(1e38)
