"""One Muon step against torch.optim.Muon and against the same loop in float32 torch.

    python benchmarks/muon.py [--check] [1024x1024 1024x3072 3072x1024]

Bars, for two threads and the geometric mean over the matrices: 0.70 of torch.optim.Muon, 1.05 of the
loop. The former iterates in bfloat16; where a processor has no instructions for that, a step takes a
minute, so after a first step of more than some seconds it is not asked for a second one. `pinned`
is our step in the pinned order of summation. With --check a miss is exit code 1.
"""
import argparse
import statistics
import sys
import time

from timing import interleave, limit_threads, report  # first: sets OMP_WAIT_POLICY

import numpy as np
import torch

import fucina
from fucina.optim import Muon

TORCH = 'torch.optim.Muon'
BARS = {TORCH: 0.70, 'float32 loop': 1.05}
SHAPES = '1024x1024', '1024x3072', '3072x1024'
PATIENCE = 5  # seconds


class Loop(torch.optim.Optimizer):
    "torch.optim.Muon with its iteration in float32."

    def __init__(self, params):
        super().__init__(params, dict(lr=0.02, momentum=0.95))

    @staticmethod
    def orthogonalise(u):
        tall = u.size(0) > u.size(1)
        x = u.T if tall else u
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            g = x @ x.T
            q = torch.addmm(g, g, g, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, q, x, beta=3.4445)
        return x.T if tall else x

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, momentum = group['lr'], group['momentum']
            for p in group['params']:
                m = self.state[p].setdefault('momentum', torch.zeros_like(p))
                m.lerp_(p.grad, 1 - momentum)
                o = self.orthogonalise(p.grad.lerp(m, momentum))
                p.add_(o, alpha=-lr * max(1, p.size(0) / p.size(1))**0.5)


def contestants(shape):
    "Steps with the same matrix and gradient."
    g = np.random.default_rng(0)
    w, grad = g.standard_normal(shape, np.float32), g.standard_normal(shape, np.float32)

    def ours(mode):
        p, opt = fucina.variable(w, 'out in'), Muon(lr=0.02)
        p.set_grad(grad)
        opt.add_param(p)
        context = fucina.ExecContext(gemm=mode)
        def step():
            with context: opt.step()
        return step

    def theirs(kind):
        p = torch.nn.Parameter(torch.tensor(w))
        p.grad = torch.tensor(grad)
        return kind([p]).step
    return {'ours': ours('blas'), 'pinned': ours('pinned'), 'float32 loop': theirs(Loop),
            TORCH: theirs(lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0))}


def measure(name, rounds):
    "Print one matrix; return ours / theirs."
    steps = contestants([int(n) for n in name.split('x')])
    start = time.perf_counter()
    steps[TORCH]()
    seconds, once = time.perf_counter() - start, {}
    if seconds > PATIENCE:
        once[TORCH] = [seconds * 1e6]
        del steps[TORCH]
    return report(name, interleave(steps, rounds) | once, 'ours')


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('shapes', nargs='*', default=SHAPES)
    parser.add_argument('--check', action='store_true', help='exit with 1 above the bar')
    parser.add_argument('--rounds', type=int, default=7)
    args = parser.parse_args()
    limit_threads(2)
    for step in contestants((64, 64)).values(): step()  # load what is loaded late
    ratios = [measure(name, args.rounds) for name in args.shapes]
    missed = []
    for name in ratios[0]:
        mean = statistics.geometric_mean(r[name] for r in ratios)
        bar = BARS.get(name)
        print(f'{name}: geometric mean {mean:.3f}' + (f', bar {bar}' if bar else ''))
        if bar and mean > bar: missed.append(name)
    return int(args.check and bool(missed))


if __name__ == '__main__': sys.exit(main())
