"""Saving and loading tensors against safetensors and torch: a few large ones, many small ones.

    python benchmarks/checkpoint.py --size 1000        50 tensors of 20 MB
    python benchmarks/checkpoint.py --where /mnt/disk  instead of memory, if there is /dev/shm

Loading means: names, shapes and dtypes are compared, then the values end up in arrays that
exist. Ours does that by itself; after `load_file` or `torch.load` it takes two lines. No side
waits for the disk, but the last lines say what waiting costs. `--check` fails above the bar.
"""
import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from timing import interleave, limit_threads, report  # first: sets OMP_WAIT_POLICY

import numpy as np
from safetensors.numpy import load_file, save_file

import fucina
from fucina.param_registry import ParamRegistry
from fucina.training_checkpoint import (
    TrainerState, load_checkpoint, save_checkpoint, write_file_atomic)

try: import torch
except ImportError: torch = None

BAR = 1.1  # of the fastest that does the same work
STATE = TrainerState(step=1)


def fitting(found, wanted):
    "What was found, if it is what is wanted."
    assert found.keys() == wanted.keys()
    for name, a in found.items():
        assert a.shape == wanted[name].shape and a.dtype == wanted[name].dtype
    return found


class Tensors:
    "The same values on every side, and what each side does with them."

    def __init__(self, folder, shapes):
        self.folder, self.dir = Path(folder), Path(folder) / 'run'
        self.arrays = {f'layers.{k}.weight': np.full(shape, k, np.float32)
                       for k, shape in enumerate(shapes)}
        self.registry = ParamRegistry()
        for name, a in self.arrays.items():
            self.registry.add_param(name, fucina.from_numpy(a, a.ndim))
        self.others = {name: a.copy() for name, a in self.arrays.items()}
        if torch: self.torch = {name: torch.from_numpy(a) for name, a in self.others.items()}
        for save in self.saves().values(): save()

    def path(self, name): return str(self.folder / name)

    def save(self):
        write_file_atomic(self.path('ours'), self.registry.save_state_dict, durable=False)

    def save_all(self): save_checkpoint(self.dir, self.registry, None, STATE, durable=False)
    def save_durable(self): save_checkpoint(self.dir, self.registry, None, STATE)
    def save_safetensors(self): save_file(self.others, self.path('theirs'))
    def save_torch(self): torch.save(self.torch, self.path('torch'))

    def load(self): fucina.load(self.path('ours'), self.registry)
    def load_all(self): load_checkpoint(self.dir, self.registry)

    def load_safetensors(self):
        found = fitting(load_file(self.path('theirs')), self.others)
        for name, a in found.items(): self.others[name][...] = a

    def load_torch(self, **options):
        found = fitting(torch.load(self.path('torch'), **options), self.torch)
        for name, t in found.items(): self.torch[name].copy_(t)

    def saves(self):
        found = {'fucina': self.save, 'fucina, a checkpoint': self.save_all,
                 'safetensors': self.save_safetensors}
        return found | {'torch': self.save_torch} if torch else found

    def loads(self):
        found = {'fucina': self.load, 'fucina, a checkpoint': self.load_all,
                 'safetensors': self.load_safetensors}
        if not torch: return found
        mapped = partial(self.load_torch, mmap=True)
        return found | {'torch': self.load_torch, 'torch, mapped': mapped}

    def check(self):
        "After a load of other values every side has the right ones."
        wanted = {name: a.copy() for name, a in self.arrays.items()}
        for name, load in self.loads().items():
            for arrays in (self.arrays, self.others):
                for a in arrays.values(): a[...] = -1
            load()
            arrays = self.arrays if 'fucina' in name else self.others
            assert all((arrays[k] == wanted[k]).all() for k in wanted), name
        for arrays in (self.arrays, self.others):
            for k, a in arrays.items(): a[...] = wanted[k]


def judge(title, times, missed):
    "Both of ours against the fastest of the others."
    for ours in [name for name in times if 'fucina' in name]:
        others = {name: t for name, t in times.items() if 'fucina' not in name}
        ratios = report(title, {ours: times[ours], **others}, ours)
        if max(ratios.values()) > BAR:
            missed.append(f'{title}, {ours}: {max(ratios.values()):.2f} of the fastest, bar {BAR}')


def take_turns(contestants, rounds):
    "Times of all; what takes a second is called once."
    times = {}
    for name, f in contestants.items():
        start = time.perf_counter()
        f()
        times[name] = [(time.perf_counter() - start) * 1e6]
    quick = {name: f for name, f in contestants.items() if times[name][0] < 1e6}
    return times | interleave(quick, rounds, 0.001)


def case(title, shapes, folder, rounds, missed):
    "Time one set of tensors."
    t = Tensors(folder, shapes)
    t.check()
    times = take_turns(t.saves(), rounds), take_turns(t.loads(), rounds)
    for verb, found in zip(('save', 'load'), times): judge(f'{verb} {title}', found, missed)
    return [min(found['fucina, a checkpoint']) for found in times]


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument('--size', type=int, default=200, help='MB in 50 tensors')
    parser.add_argument('--many', type=int, default=20_000, help='small tensors')
    parser.add_argument('--rounds', type=int, default=11)
    parser.add_argument('--where', default='/dev/shm' if os.path.isdir('/dev/shm') else None)
    parser.add_argument('--check', action='store_true')
    args = parser.parse_args(argv)
    limit_threads(1)
    missed, costs = [], {}
    large = [(50, args.size * 10**6 // 50 // 4 // 50)] * 50
    with tempfile.TemporaryDirectory(dir=args.where) as folder:
        case(f'{args.size} MB in 50 tensors', large, folder, args.rounds, missed)
    for n in (args.many // 4, args.many):
        with tempfile.TemporaryDirectory(dir=args.where) as folder:
            costs[n] = case(f'{n} small tensors', [(8,)] * n, folder, args.rounds, missed)
    for k, verb in enumerate(('save', 'load')):
        few, many = (cost[k] / n for n, cost in costs.items())
        print(f'{verb}: {few:.2f} us a tensor for {args.many // 4}, {many:.2f} for {args.many}')
        if many > 1.5 * few: missed.append(f'{verb} is not linear in the number of tensors')
    with tempfile.TemporaryDirectory() as folder:
        for title, shapes in ((f'{args.size} MB', large), ('small model', [(64, 64)] * 4)):
            t = Tensors(folder, shapes)
            times = interleave({'durable': t.save_durable, 'durable=False': t.save_all}, 5, 0.001)
            report(f'the price of waiting for this disk, {title}', times, 'durable')
    print('\n'.join(missed) if missed else 'all bars met')
    return 1 if missed and args.check else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
