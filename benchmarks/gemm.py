"""Matrix products on one thread: the pinned order of summation against BLAS.

    python benchmarks/gemm.py [--check] [--rounds N]

The bar, in percent of BLAS speed: 25 at 64 and at 256 cubed, 18 at 1024 cubed. Of the three
layouts A·B, A·Bᵀ and Aᵀ·B it compares our slowest with the library's fastest, since some
libraries are slow at some of them. With --check a miss is exit code 1.
"""
import argparse
import statistics
import sys

from timing import interleave, limit_threads

import numpy as np

from fucina.gemm import matmul

BARS = {64: 0.25, 256: 0.25, 1024: 0.18}
STEPS = {  # inner layers of a network, as (batch, inputs, outputs)
    'spirals, batch 32': [(32, 2, 64), (32, 64, 64), (32, 64, 2)],
    'spirals, batch 400': [(400, 2, 64), (400, 64, 64), (400, 64, 2)],
    'digits, batch 128': [(128, 64, 128), (128, 128, 10)]}
OTHERS = {'one column': (400, 64, 1), 'one row': (1, 512, 512), 'tiny': (4, 3, 2)}


def operands(layout, m, depth, n):
    "Two normal matrices for an (m, n) product, transposed as views where the layout says so."
    g = np.random.default_rng(0)
    a = g.standard_normal((depth, m) if layout[1] == 'ᵀ' else (m, depth), dtype=np.float32)
    b = g.standard_normal((n, depth) if layout[-1] == 'ᵀ' else (depth, n), dtype=np.float32)
    return a.T if layout[1] == 'ᵀ' else a, b.T if layout[-1] == 'ᵀ' else b


def measure(layout, shape, rounds):
    "Median microseconds of BLAS and of the pinned product."
    a, b = operands(layout, *shape)
    out = np.empty((shape[0], shape[2]), np.float32)
    times = interleave({mode: lambda mode=mode: matmul(a, b, out, mode)
                        for mode in ('blas', 'pinned')}, rounds)
    blas, pinned = (statistics.median(times[mode]) for mode in ('blas', 'pinned'))
    line(f'{layout:4} {"x".join(map(str, shape))}', blas, pinned)
    return blas, pinned


def line(name, blas, pinned):
    print(f'  {name:24} BLAS {blas:9.1f} us   pinned {pinned:9.1f} us   speed {blas / pinned:5.0%}')


def step(layers, rounds):
    "All products of one training step: forward, weight gradients, gradients of hidden inputs."
    total = np.zeros(2)
    for k, (m, i, o) in enumerate(layers):
        total += measure('A·B', (m, i, o), rounds)
        total += measure('Aᵀ·B', (i, m, o), rounds)
        if k: total += measure('A·Bᵀ', (m, o, i), rounds)
    line('together', *total)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='exit with 1 below the bar')
    parser.add_argument('--rounds', type=int, default=40)
    args = parser.parse_args()
    limit_threads(1)
    missed = []
    for n, bar in BARS.items():
        rounds = args.rounds if n < 1000 else max(3, args.rounds // 8)
        print(f'{n} cubed')
        times = np.array([measure(layout, (n, n, n), rounds) for layout in ('A·B', 'A·Bᵀ', 'Aᵀ·B')])
        speed = times[:, 0].min() / times[:, 1].max()
        print(f'  slowest pinned / fastest BLAS: speed {speed:.0%} (bar {bar:.0%})')
        if speed < bar: missed.append(n)
    for name, layers in STEPS.items():
        print(name)
        step(layers, args.rounds // 2)
    print('others')
    for shape in OTHERS.values(): measure('A·B', shape, args.rounds // 2)
    if missed: print('below the bar:', *missed)
    return int(args.check and bool(missed))


if __name__ == '__main__': sys.exit(main())
