"""Normal noise on one thread: ours against NumPy and torch.

    python benchmarks/noise.py [--check] [--size N] [--rounds N]

The bar: `gaussian_fill_at_fast` takes at most 0.65 of the time of the faster of NumPy's
`standard_normal(float32)` and `torch.randn`. With --check a miss is exit code 1.
Time is the CPU time of the thread, so that what else runs on the machine counts less.
"""
import argparse
import sys
import time

from timing import interleave, limit_threads, report

import numpy as np

from fucina.rng import gaussian_fill, gaussian_fill_at_fast

BAR = 0.65


def contestants(size):
    "Every way to make `size` normal float32 numbers, by name."
    x, g = np.empty(size, np.float32), np.random.default_rng(0)
    ways = {
        'gaussian_fill_at_fast': lambda: gaussian_fill_at_fast(1, 0, x, 1.0),
        'gaussian_fill': lambda: gaussian_fill(1, x, 1.0),
        'NumPy standard_normal': lambda: g.standard_normal(out=x, dtype=np.float32)}
    try: import torch
    except ImportError: print('torch is not installed: compared with NumPy alone')
    else: ways['torch.randn'] = lambda: torch.randn(size)
    return ways


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='exit with 1 above the bar')
    parser.add_argument('--size', type=int, default=2**20, help='numbers in one fill')
    parser.add_argument('--rounds', type=int, default=40)
    args = parser.parse_args()
    limit_threads(1)
    times = interleave(contestants(args.size), rounds=args.rounds, clock=time.thread_time)
    ratios = report(f'{args.size} normals, one thread', times, 'gaussian_fill_at_fast')
    ratio = max(r for name, r in ratios.items() if name != 'gaussian_fill')
    print(f'ours / the faster of the others = {ratio:.2f} (bar {BAR})')
    return int(args.check and ratio > BAR)


if __name__ == '__main__': sys.exit(main())
