"""One optimizer step through the public API against torch.optim, threads equal.

Gradients are set before; `step()` alone is timed, or `clip_grad_norm` alone. Bars are for two
threads. `--check` fails above them; `--quick` leaves out what takes a gigabyte; words choose rows
by the start of their names. `idle` is our own worker team on the same memory, with a kernel that
reads and writes what the step does and computes nothing: idle/ours is the share of bandwidth.
Muon and APOLLO have files of their own.
"""
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from timing import interleave, limit_threads, report  # first: sets OMP_WAIT_POLICY

import numpy as np
import torch

import fucina
from fucina import optim
from fucina.apps.bench_optim import idle

HUGE = 2**23  # elements from which on a row counts as big


@dataclass
class Row:
    name: str
    shapes: list[tuple[int, ...]]
    ours: Callable[[], optim.Optimizer]
    theirs: dict[str, Callable[[list], object]]  # name: optimizer for torch parameters
    bars: dict[str, float] = field(default_factory=dict)  # ours / theirs
    share: float = 0  # of the bandwidth of `idle`
    call: Callable[[optim.Optimizer], Callable[[], object]] = lambda opt: opt.step
    their_call: Callable[[object, list], Callable[[], object]] = lambda opt, params: opt.step

    @property
    def size(self): return sum(int(np.prod(s)) for s in self.shapes)


def values(shapes):
    "Weights and gradients, the same for both sides."
    g = np.random.default_rng(0)
    return [(g.standard_normal(s, np.float32), g.standard_normal(s, np.float32)) for s in shapes]


def our_side(row):
    opt = row.ours()
    for w, g in values(row.shapes):
        p = fucina.variable(w, [f'd{i}' for i in range(w.ndim)])
        p.set_grad(g)
        opt.add_param(p)
    return opt


def their_side(row, make):
    params = []
    for w, g in values(row.shapes):
        params.append(torch.nn.Parameter(torch.from_numpy(w)))
        params[-1].grad = torch.from_numpy(g)
    return row.their_call(make(params), params)


def elementwise(size, count=1):
    "SGD, momentum, Adam and AdamW with parameters of `size` elements."
    shapes, t, huge = [(size,)] * count, torch.optim, size * count >= HUGE
    bar = 0.15 if size <= 10**4 else 0.65 if size <= 10**5 else 0.8 if size <= 10**6 else 1.0
    bars = {'fused': 0.12, 'foreach': 0.04} if count > 1 else {'fused': bar}
    rest = {'fused': 1.1} if huge else bars
    light = {'fused': rest['fused']}  # their foreach does next to nothing here
    name = f'{count} x {size:,}' if count > 1 else f'{size:,}'

    def pair(kind, **options):
        modes = ('fused',) if huge else ('fused', 'foreach')
        return {m: lambda p, m=m: getattr(t, kind)(p, lr=1e-3, **{m: True}, **options)
                for m in modes}
    momentum = dict(momentum=0.9)
    half = dict(state_dtype='bf16', second_moment_dtype='bf16')
    share = 0.85 if size > 5 * 10**7 else 0
    return [
        Row(f'adamw {name}', shapes, lambda: optim.AdamW(lr=1e-3), pair('AdamW'), bars, share),
        Row(f'adamw-bf16 {name}', shapes, lambda: optim.AdamW(lr=1e-3, **half), pair('AdamW'),
            {'fused': 0.85} if huge else {}),
        Row(f'adam {name}', shapes, lambda: optim.Adam(lr=1e-3), pair('Adam'), rest),
        Row(f'sgd {name}', shapes, lambda: optim.SGD(lr=1e-3), pair('SGD'), light),
        Row(f'sgd-momentum {name}', shapes, lambda: optim.SGD(lr=1e-3, **momentum),
            pair('SGD', **momentum), light)]


def clipping(size):
    "The norm of a gradient, without and with scaling it afterwards."
    def shrinking():
        limit = 1.0
        while True:
            limit *= 0.9999
            yield limit

    def clip(limits): return lambda opt: lambda: opt.clip_grad_norm(next(limits))
    def their_clip(limits):
        f = torch.nn.utils.clip_grad_norm_
        return lambda opt, params: lambda: f(params, next(limits))
    def large():
        while True: yield 1e30
    theirs = {'clip_grad_norm_': lambda params: None}
    return [Row(f'{name} {size:,}', [(size,)], lambda: optim.SGD(lr=1e-3), theirs,
                call=clip(limits()), their_call=their_clip(limits()))
            for name, limits in (('clip-norm', large), ('clip-scale', shrinking))]


def rows():
    sizes = 10**3, 10**4, 10**5, 10**6, 16 * 10**6, 60 * 10**6
    for size in sizes: yield from elementwise(size)
    yield from elementwise(1000, 200)
    for size in sizes[:-1]: yield from clipping(size)


def measure(row):
    "Print one row; return what missed its bar."
    opt = our_side(row)
    contestants = {'ours': row.call(opt)}
    contestants |= {name: their_side(row, make) for name, make in row.theirs.items()}
    moved = idle(opt) if row.size >= 10**6 and 'clip' not in row.name else None
    if moved: contestants['idle'] = moved
    big = row.size >= HUGE
    times = interleave(contestants, rounds=9 if big else 25, seconds=0.1 if big else 0.004)
    ratios = report(row.name, times, 'ours')
    missed = [f'{row.name}: {ratios[k]:.3f} of {k}, bar {bar}'
              for k, bar in row.bars.items() if ratios[k] > bar]
    if moved:
        share = 1 / ratios['idle']
        print(f'  share of the bandwidth {share:.0%}')
        if share < row.share: missed.append(f'{row.name}: {share:.0%} of the bandwidth')
    return missed


def main(argv):
    flags, words = {a for a in argv if a[:2] == '--'}, [a for a in argv if a[:2] != '--']
    missed = []
    for threads in (1, 2):
        limit_threads(threads)
        print(f'--- {threads} thread{"s" * (threads > 1)}, torch {torch.__version__}')
        for row in rows():
            if '--quick' in flags and row.size >= HUGE: continue
            if words and not any(row.name.startswith(w) for w in words): continue
            late = measure(row)
            if threads == 2: missed += late
            gc.collect()
    print('\n'.join(missed) if missed else 'all bars met')
    return 1 if missed and '--check' in flags else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
