"""One APOLLO step against apollo-torch (pip install --no-deps apollo-torch), threads equal.

`step()` alone is timed, with gradients set before. The bar, 0.6, is for the geometric mean over
all rows, at two threads; `--check` fails above it. `product` is the projection of the gradient by
NumPy's BLAS: a step of either side contains one, so at rank 256 it bounds the ratio from below.
"""
import statistics
import sys
from functools import partial
from pathlib import Path

from timing import interleave, limit_threads, report  # first: sets OMP_WAIT_POLICY

import numpy as np
import torch

import fucina
from fucina import optim

sys.path.append(str(Path(__file__).resolve().parents[1] / 'tests'))
from references import apollo_torch

SHAPES, BAR = [(1024, 1024), (1024, 3072), (3072, 1024)], 0.6
RULES = {'rank 256': optim.ApolloConfig(lr=1e-3, rank=256), 'mini': optim.ApolloConfig.mini(lr=1e-3)}


def contestants(config, shape):
    g = np.random.default_rng(0)
    w, grad = g.standard_normal(shape, np.float32), g.standard_normal(shape, np.float32)
    ours, p = optim.Apollo(config), fucina.variable(w, 2)
    ours.add_param(p)
    p.set_grad(grad)
    ours.step()
    q = torch.nn.Parameter(torch.from_numpy(w))
    q.grad = torch.from_numpy(grad)
    group = dict(params=[q], rank=config.rank, proj='random', proj_type='std', scale_type=config.scale_type.name,
                 update_proj_gap=config.update_proj_gap, scale=float(config.scale))
    theirs, slot = apollo_torch()([group], lr=1e-3), ours.slots[0]
    sides = (shape[0], config.rank) if slot.tall else (config.rank, shape[1])
    out = np.empty(sides, np.float32)
    product = partial(slot.sketch, out, config.update_proj_gap, 'blas')
    return {'ours': ours.step, 'apollo-torch': theirs.step, 'product': product}


def warm_up():
    "OpenBLAS is slow on one thread until a wide product has touched all of its buffer."
    a = np.ones((256, 1024), np.float32)
    np.matmul(a, np.ones((1024, 3072), np.float32))


def main(argv):
    if apollo_torch() is None:
        print('apollo-torch is not installed')
        return 0
    missed = False
    for threads in 1, 2:
        limit_threads(threads)
        warm_up()
        print(f'--- {threads} thread{"s" * (threads > 1)}, torch {torch.__version__}')
        every = []
        for rule, config in RULES.items():
            ratios = [report(f'{rule}, {m} x {n}', interleave(contestants(config, (m, n)), 15, 0.05),
                             'ours')['apollo-torch'] for m, n in SHAPES]
            print(f'{rule}: geometric mean {statistics.geometric_mean(ratios):.2f} of apollo-torch')
            every += ratios
        mean = statistics.geometric_mean(every)
        print(f'all rows: geometric mean {mean:.2f} of apollo-torch, bar {BAR}')
        missed = threads == 2 and mean > BAR
    return int(missed and '--check' in argv)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
