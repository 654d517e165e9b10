"""Perturb, restore and update of an evolution strategy against the same in torch, threads equal.

A million float32 weights, population 32. Theirs: `torch.randn` with a generator seeded for the
member, then `add_` with a factor; the update does so for every member. `in blocks` does the same
with noise for 16,384 weights at a time, which stays in the cache. Bars are for two threads.
`--check` fails above them; words choose rows by the start of their names.
"""
import sys
import tracemalloc

from timing import interleave, limit_threads, report  # first: sets OMP_WAIT_POLICY

import numpy as np
import torch

import fucina
from fucina import es

BAR = 0.5  # ours / theirs
SIZE, POPULATION, SIGMA = 10**6, 32, 0.01
BLOCK = 2**14  # elements whose noise stays in the cache


def rewards(): return np.random.default_rng(0).standard_normal(POPULATION).astype(np.float32)


def ours(dtype='f32', size=SIZE, **settings):
    w = fucina.constant(np.zeros(size, np.float32), 'd', dtype=dtype)
    trainer = es.Trainer(sigma=SIGMA, population=POPULATION, **settings)
    trainer.add_param(w)
    return trainer


class Theirs:
    "The algorithm as one would write it."
    def __init__(self, dtype, block=SIZE):
        self.p, self.g = torch.zeros(SIZE, dtype=dtype), torch.Generator()
        self.views = self.p.split(block)

    def add(self, member, factor, views):
        self.g.manual_seed(member)
        for view in views: view.add_(torch.randn(len(view), generator=self.g).to(view.dtype), alpha=factor)

    def try_member(self):
        self.add(3, SIGMA, self.views)
        self.add(3, -SIGMA, self.views)

    def update(self):
        total = torch.zeros(SIZE)
        for member, r in enumerate(rewards().tolist()): self.add(member, r, total.split(len(self.views[0])))
        self.p.add_((SIGMA / 2 / POPULATION * total).to(self.p.dtype))


def try_member(trainer):
    def call():
        trainer.perturb(3)
        trainer.restore(3)
    return call


def rows():
    for dtype in ('f32', 'bf16', 'f16'):
        kind = dict(f32=torch.float32, bf16=torch.bfloat16, f16=torch.float16)[dtype]
        trainer, whole, blocks = ours(dtype), Theirs(kind), Theirs(kind, BLOCK)
        yield f'perturb and restore, {dtype}', 2, try_member(trainer), {
            'torch': whole.try_member, 'torch, in blocks': blocks.try_member}
        r = rewards()
        yield f'update, {dtype}', POPULATION, lambda trainer=trainer, r=r: trainer.update(r), {
            'torch': whole.update, 'torch, in blocks': blocks.update}


def memory(size=10**7):
    "Most bytes beyond the weights while a member is tried and an update made, as a share."
    trainer, r = ours(size=size), rewards()
    try_member(trainer)()
    tracemalloc.start()
    try:
        try_member(trainer)()
        trainer.update(r)
        return tracemalloc.get_traced_memory()[1] / (4 * size)
    finally: tracemalloc.stop()


def main(argv):
    missed, chosen = [], [a for a in argv if not a.startswith('-')]
    limit_threads(2)
    for name, passes, call, others in rows():
        if chosen and not name.startswith(tuple(chosen)): continue
        times = interleave({'fucina': call, **others}, rounds=9, seconds=0.05)
        ratios = report(name, times, 'fucina')
        best = min(times['fucina']) * 1e3 / SIZE / passes
        print(f'  {best:.2f} ns per weight and member')
        missed += [f'{name}: {x:.2f} of {other}, bar {BAR}' for other, x in ratios.items() if x > BAR]
    if not chosen or 'memory' in chosen:
        share = memory()
        print(f'memory beyond 10 million weights: {share:.3%} of them')
        missed += ['memory: bar 1 %'] * (share > 0.01)
    print('\n'.join(missed) if missed else 'all bars met')
    return 1 if missed and '--check' in argv else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
