"""The ternary product, and an iteration of the ternary spirals, against the same in NumPy.

    python benchmarks/es_ternary.py [--check] [--rounds N]

Two threads on both sides. The product takes float32 activations, rounds them to eight bits and
multiplies by packed trits; NumPy unpacks the trits, rounds in whole arrays and has BLAS multiply
the integers as float32. Bar: 0.30. `unpacked` is NumPy with trits that were float32 before, 16 times
the memory; `float` is `dot` with a float32 matrix. With --check a miss is exit code 1.
"""
import argparse
import sys

from timing import interleave, limit_threads, report  # first: sets OMP_WAIT_POLICY

import numpy as np

import fucina
from fucina.es.ternary import TernaryMatrix, trits
from fucina.rng import gaussian_fill

BAR = 0.30
SHAPES = (194, 256, 256), (1, 1024, 4096), (512, 1024, 1024)
f32 = np.float32


def rounded(x):
    "Eight bits and a scale for each 256 activations."
    x = x.reshape(len(x), -1, 256)
    size = np.abs(x)
    top = np.take_along_axis(x, size.argmax(-1)[..., None], -1)
    with np.errstate(divide='ignore'): inverse = np.where(top != 0, f32(-127) / top, f32(0))
    with np.errstate(divide='ignore'): d = np.where(top != 0, f32(1) / inverse, f32(0))
    return np.minimum(np.rint(x * inverse), f32(127)), d[..., 0]


def product(x, t, scales):
    "x times trits t (columns, blocks, 256) with their scales (columns, blocks)."
    q, d = rounded(x)
    y = np.zeros((len(x), len(t)), f32)
    for b in range(t.shape[1]): y += (d[:, b, None] * scales[:, b]) * (q[:, b] @ t[:, b].T)
    return y


def contestants(rows, columns, depth):
    w = fucina.constant(gaussian_fill(1, np.empty((columns, depth), f32), 1.0), 'out in')
    x = fucina.constant(gaussian_fill(2, np.empty((rows, depth), f32), 1.0), 'batch in')
    m, a = TernaryMatrix.encode(w), x.numpy()
    shape = columns, depth // 256
    t = trits(m.blocks).reshape(*shape, 256).astype(f32)
    scales = m.blocks['d'].reshape(shape).astype(f32)
    assert product(a, t, scales).tobytes() == m.dot_int8(x).numpy().tobytes()
    def unpack(): return trits(m.blocks).reshape(*shape, 256).astype(f32)
    return {'ours': lambda: m.dot_int8(x), 'NumPy': lambda: product(a, unpack(), scales),
            'unpacked': lambda: product(a, t, scales), 'float': lambda: x.dot(w, 'in')}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='exit with 1 above the bar')
    parser.add_argument('--rounds', type=int, default=15)
    args = parser.parse_args()
    limit_threads(2)
    missed = False
    for shape in SHAPES:
        name = ' x '.join(map(str, shape))
        ratios = report(f'product {name}', interleave(contestants(*shape), args.rounds), 'ours')
        missed |= ratios['NumPy'] > BAR
    return int(args.check and missed)


if __name__ == '__main__': sys.exit(main())
