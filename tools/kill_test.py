"""Kill a training run again and again, as the system would, and look at what is left.

    python tools/kill_test.py 10000            kill -9 that many times
    python tools/kill_test.py 200 --fresh 20   20 more of processes that start from nothing

A run trains a small network and saves after every step. Children are forked from this
process, which has compiled and loaded everything but has not started a worker thread. Each
is killed at a random moment; then the newest checkpoint has to load, its files have to be
those of the run that was never killed, byte for byte; and the next child goes on from it.
When a run has reached its end the next one begins.
"""
import os

os.environ['OPENBLAS_NUM_THREADS'] = '1'  # a process that forks has one thread

import argparse
import hashlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import fucina
from fucina import nn, optim
from fucina.data import Batches, two_spirals
from fucina.optim import param
from fucina.training_checkpoint import (
    MODEL_STATE_FILE, OPTIMIZER_STATE_FILE, TRAINER_STATE_FILE, TrainerState,
    latest_committed, load_checkpoint, load_trainer_state, path_join, rotate_checkpoints,
    save_checkpoint)

FILES = MODEL_STATE_FILE, OPTIMIZER_STATE_FILE, TRAINER_STATE_FILE
STEPS = 40
POINTS, LABELS = two_spirals(64, seed=7)


class Run:
    "A training run: model, optimizers, schedule, place in the data, step."

    def __init__(self):
        self.model = nn.MLP((2, 16, 16, 2), seed=1, tags='in h1 h2 class')
        decay, rest = optim.AdamW(lr=0.02, weight_decay=0.01), optim.AdamW(lr=0.02)
        self.opt, self.schedule = optim.OptimizerSet([decay, rest]), optim.LrSchedule()
        for p in self.model.parameters():
            (decay if len(p.shape) == 2 else rest).add_param(p)
        for member in self.opt.members: self.schedule.attach(member)
        self.batches, self.step = Batches(len(LABELS), 24, seed=3), 0

    def train(self):
        "One step."
        self.schedule.apply(optim.warmup_cosine_factor(self.step, STEPS, 5, 0.1))
        batch = next(self.batches)
        with fucina.exec_scope():
            x = fucina.constant(POINTS[batch], 'batch in')
            self.model(x).cross_entropy('class', LABELS[batch]).backward()
            self.opt.clip_grad_norm(1.0)
            self.opt.step()
            self.opt.zero_grad()
        self.step += 1

    def save(self, folder):
        state = TrainerState(step=self.step, seed=1, **self.batches.state())
        save_checkpoint(folder, self.model, self.opt, state, durable=False)

    def load(self, folder):
        state = load_checkpoint(folder, self.model, self.opt)
        self.batches.restore(state)
        self.step = state.step


def live(root, restart, ready=lambda: None):
    "Go on from what there is in `root`, up to the end."
    run, newest = Run(), latest_committed(root)
    if newest is not None: run.load(newest)
    first = run.step if restart else 0  # whether names count the steps of this life or all
    ready()
    while run.step < STEPS:
        run.train()
        run.save(path_join(root, f'checkpoint-step-{run.step - first}'))
        rotate_checkpoints(root, 2, durable=False)
    run.save(root)


def digest(folder):
    files = [(Path(folder) / leaf).read_bytes() for leaf in FILES]
    return [hashlib.sha256(raw).hexdigest() for raw in files]


def reference(root):
    "The files after every step of a run that nobody disturbs."
    run, found = Run(), {}
    while run.step < STEPS:
        run.train()
        run.save(root)
        found[run.step] = digest(root)
    return found


def forked(root, restart, delay):
    "A child that goes on, killed after `delay` seconds; whether it was still alive."
    pid = os.fork()
    if pid == 0:
        try:
            fucina.set_num_threads(3)
            param.LEAST = 1  # small as the model is, the team gets to work
            live(root, restart)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status): sys.exit('a child failed')
    return os.WIFSIGNALED(status)


def fresh(root, restart, delay):
    "The same with a process that starts from nothing, as soon as it is ready."
    command = [sys.executable, __file__, '0', '--live', root, *['--restart'] * restart]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        time.sleep(delay)
        child.kill()
    if child.returncode > 0 and os.name != 'nt': sys.exit('a child failed')
    return child.returncode != 0


def check(root, files, seen, before):
    "The newest checkpoint loads, and is what it should be; its step."
    newest = latest_committed(root)
    for path in [Path(root), *Path(root).glob('checkpoint-*')]:
        seen['temporary files'] += len(list(path.glob('.*.tmp')))
        if path.name != Path(root).name and not (path / TRAINER_STATE_FILE).exists():
            seen['uncommitted directories'] += 1
    if newest is None:
        assert before in (None, 0), f'a checkpoint of step {before} was lost'
        return 0
    run = Run()
    run.load(newest)
    assert digest(newest) == files[run.step], f'{newest} is not that of step {run.step}'
    run.save(path_join(root, 'again'))  # what was loaded is what is in the files
    assert digest(path_join(root, 'again')) == files[run.step]
    seen['checkpoints loaded'] += 1
    assert before is None or run.step >= before, f'back from step {before} to {run.step}'
    return run.step


def campaign(kills, attack, longest, files, words, seen):
    "Runs one after the other, until there were enough kills."
    while kills > 0:
        restart = bool(words.getrandbits(1))
        with tempfile.TemporaryDirectory() as root:
            step, alive = 0, True
            while alive and kills > 0:
                alive = attack(root, restart, words.uniform(0, longest))
                step = check(root, files, seen, None if restart else step)
                kills -= alive
                seen['kills'] += alive
            if not alive:
                assert step == load_trainer_state(root).step == STEPS
                seen['runs that reached the end'] += 1


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument('kills', type=int)
    parser.add_argument('--fresh', type=int, default=0)
    parser.add_argument('--seed', type=int, default=int(time.time()))
    parser.add_argument('--live', help=argparse.SUPPRESS)
    parser.add_argument('--restart', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    fucina.set_gemm('pinned')
    if args.live:
        live(args.live, args.restart, lambda: print('ready', flush=True))
        return 0
    print(f'seed {args.seed}', flush=True)
    fucina.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        reference(root)  # loads and compiles
        start = time.perf_counter()
        files = reference(root)
        longest = time.perf_counter() - start
    print(f'{STEPS} steps, each with a save, take {longest:.2f} s', flush=True)
    words, seen = random.Random(args.seed), Counter()
    start = time.perf_counter()
    if args.kills and not hasattr(os, 'fork'): sys.exit('no fork here; use 0 --fresh N')
    campaign(args.kills, forked, longest, files, words, seen)
    campaign(args.fresh, fresh, longest, files, words, seen)
    print(*(f'{n:6} {what}' for what, n in seen.items()), sep='\n')
    print(f'{time.perf_counter() - start:.0f} s; all bytes are those of the quiet run')
    return 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
