"""A save that fails, is killed or loses power at any call: the old checkpoint, none, or the new one.

All calls of a save go through `os`, so a shim sees them. Each of them is (a) failed, (b) the last
one that happens, and (c) followed by a loss of power, after which any part of what was not yet
synchronised may be missing. Real kills are in tools/kill_test.py, of which a few run here.
"""
import itertools
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import fucina
from fucina import optim
from fucina.training_checkpoint import (
    TrainerState, latest_committed, load_checkpoint, load_trainer_state, rotate_checkpoints,
    save_checkpoint)

pytestmark = pytest.mark.skipif(os.name == 'nt', reason='the calls are those of POSIX')
ROOT = Path(__file__).resolve().parents[1]
CALLS = ('open', 'write', 'fsync', 'close', 'replace', 'rename', 'unlink', 'mkdir', 'rmdir')
REAL = {name: getattr(os, name) for name in CALLS}
REAL['fsync'] = os.fstat  # nobody pulls the plug here, so nobody has to wait


class Stopped(BaseException):
    "The process is no more."


@contextmanager
def calls_through(hook):
    "Every call of `os` goes to `hook(name, real, *args, **keywords)`."
    def through(name): return lambda *args, **kw: hook(name, REAL[name], *args, **kw)
    before = {name: getattr(os, name) for name in CALLS}
    for name in CALLS: setattr(os, name, through(name))
    try: yield
    finally:
        for name, f in before.items(): setattr(os, name, f)


class Shim:
    "Counts the calls; at number `k` one fails, or (`dead`) none happens from there on."

    def __init__(self, k=None, dead=False, half=False):
        self.k, self.dead, self.half, self.names, self.open = k, dead, half, [], set()

    def __call__(self, name, real, *args, **keywords):
        k, self.names = len(self.names), [*self.names, name]
        if self.k is not None and (k == self.k or self.dead and k > self.k):
            if name == 'close': self.shut(args[0])
            if self.half and k == self.k and name == 'write': real(args[0], args[1][:len(args[1]) // 2])
            if self.dead: raise Stopped
            raise OSError(5, 'Input/output error')
        result = real(*args, **keywords)
        if name == 'open': self.open.add(result)
        if name == 'close': self.open.discard(args[0])
        return result

    def shut(self, fd):
        "A descriptor that could not be closed is gone all the same."
        REAL['close'](fd)
        self.open.discard(fd)


# -- a run with two states --------------------------------------------------------------------

def run(steps):
    "A small model with bfloat16 in it, trained by a set."
    w = fucina.variable(np.linspace(-1, 1, 60, dtype=np.float32).reshape(6, 10), 'a b')
    half, b = fucina.variable(np.ones((4, 5)), 'c d', dtype='bf16'), fucina.variable(np.zeros(7), 'e')
    opt = optim.OptimizerSet([optim.AdamW(lr=0.1), optim.SGD(lr=0.1, momentum=0.9)])
    for member, name, t in ((0, 'w', w), (0, 'half', half), (1, 'b', b)):
        opt.members[member].add_param(t, name=name)
    for k in range(steps):
        for t in (w, half, b): t.set_grad(np.full(t.shape, 0.1 * (k + 1), np.float32))
        opt.step()
    return {'w': w, 'half': half, 'b': b}, opt


@cache
def trained(steps):
    "A run that is only looked at."
    return run(steps)


def save(folder, steps, durable=True, optimizer=True):
    model, opt = trained(steps)
    save_checkpoint(folder, model, opt if optimizer else None, TrainerState(step=steps), durable=durable)


def contents(folder): return {p.name: p.read_bytes() for p in folder.iterdir() if '.tmp' not in p.name}


@pytest.fixture(scope='module')
def states(tmp_path_factory):
    "The files of the two checkpoints, with an optimizer (2, 5) and without (0)."
    root = tmp_path_factory.mktemp('states')
    for steps in (0, 2, 5): save(root / str(steps), steps, False, steps > 0)
    return {steps: contents(root / str(steps)) for steps in (0, 2, 5)}


def found(folder, states):
    "The step of the checkpoint that loads, or None; its files are of one piece."
    try: step = load_trainer_state(folder).step
    except FileNotFoundError:
        assert latest_committed(folder) is None
        with pytest.raises(FileNotFoundError): load_checkpoint(folder, {})
        return None
    assert contents(folder) == states[step] and latest_committed(folder) == folder
    model, opt = run(1)
    assert load_checkpoint(folder, model, opt if step else None).step == step
    wanted, _ = trained(step)
    for name, t in model.items(): assert t.value.tobytes() == wanted[name].value.tobytes()
    return step


SCENES = {  # the step that is there before, the step that is saved
    'first': (None, 5), 'over': (2, 5), 'no optimizer any more': (2, 0), 'an optimizer now': (0, 5)}


def scene(tmp_path, name, states):
    "A directory as it is before the save, and what saves."
    old, new = SCENES[name]
    folder = tmp_path / 'deep' / 'run' if old is None else tmp_path / 'run'
    if old is not None: folder.mkdir()
    for leaf, raw in states.get(old, {}).items(): (folder / leaf).write_bytes(raw)
    model, opt = trained(new)
    def again(durable):
        save_checkpoint(folder, model, opt if new else None, TrainerState(step=new), durable=durable)
    return folder, again, {None, old, new}


def reset(tmp_path, name, states):
    for path in tmp_path.iterdir(): shutil.rmtree(path)
    return scene(tmp_path, name, states)


both = pytest.mark.parametrize('durable', [True, False])
scenes = pytest.mark.parametrize('name', SCENES)


def number_of_calls(tmp_path, name, states, durable):
    folder, again, _ = reset(tmp_path, name, states)
    shim = Shim()
    with calls_through(shim): again(durable)
    assert found(folder, states) == SCENES[name][1] and not shim.open
    assert {'open', 'write', 'replace', 'close'} < set(shim.names) and 'unlink' in shim.names
    assert ('fsync' in shim.names) == durable
    return len(shim.names)


@scenes
@both
def test_a_call_fails(tmp_path, name, durable, states):
    old, new = SCENES[name]
    seen = []
    for k in range(number_of_calls(tmp_path, name, states, durable)):
        folder, again, _ = reset(tmp_path, name, states)
        shim = Shim(k)
        with calls_through(shim), pytest.raises(OSError): again(durable)
        assert not shim.open, shim.names  # no descriptor is lost
        if folder.exists():
            assert not [p for p in folder.iterdir() if '.tmp' in p.name]
            seen.append(found(folder, states))
        assert seen == sorted(seen, key=[old, None, new].index)  # first old, then none, then new
        again(False)
        assert found(folder, states) == new
    assert set(seen) >= {None} | ({old} if old is not None else set())


@scenes
@both
@pytest.mark.parametrize('half', [False, True], ids=['between', 'in a write'])
def test_killed_at_a_call(tmp_path, name, durable, half, states):
    old, new = SCENES[name]
    seen = []
    for k in range(number_of_calls(tmp_path, name, states, durable) + 1):
        folder, again, _ = reset(tmp_path, name, states)
        shim = Shim(k, dead=True, half=half)
        try:
            with calls_through(shim): again(durable)
        except Stopped: pass
        for fd in list(shim.open): shim.shut(fd)
        if folder.exists(): seen.append(found(folder, states))
        again(False)  # what is left over does not hinder the next save
        assert found(folder, states) == new
    assert seen == sorted(seen, key=[old, None, new].index) and seen[-1] == new


# -- loss of power ----------------------------------------------------------------------------

class Disk:
    "A journal of calls, and what a loss of power after any of them can leave."

    def __init__(self, root, block=None):
        self.root, self.block, self.ops, self.open, self.safe = root, block, [], {}, set()
        self.marks = []  # after each call: number of operations, and which of them are safe
        self.start = {p: p.read_bytes() if p.is_file() else None for p in root.rglob('*')}
        self.inode = {p: p for p in self.start}  # a file is named by its first path

    def __call__(self, name, real, *args, **keywords):
        if name == 'write' and self.block: args = args[0], args[1][:self.block]
        base = self.open.get(keywords.get('dir_fd'), Path())
        path = None if isinstance(args[0], int) else base / os.fspath(args[0])
        new = path is not None and not path.exists()
        result = real(*args, **keywords)
        getattr(self, f'on_{name}')(path, result, new, *args)
        self.marks.append((len(self.ops), frozenset(self.safe)))
        return result

    def on_open(self, path, fd, new, *_):
        self.open[fd] = path
        if new: self.name(path, ('make', path, self.fresh(path)))

    def fresh(self, path):
        self.inode[path] = (path, len(self.ops))
        return self.inode[path]

    def name(self, path, op): self.ops.append((*op, path.parent))

    def on_write(self, _, n, __, fd, data):
        path, data = self.open[fd], bytes(data[:n])
        at = sum(len(op[2]) for op in self.ops if op[0] == 'write' and op[1] == self.inode[path])
        self.ops.append(('write', self.inode[path], data, at))

    def on_fsync(self, _, __, ___, fd):
        path = self.open[fd]
        for i, op in enumerate(self.ops):
            data = op[0] == 'write'
            if op[1] == self.inode.get(path) if data else op[-1] == path: self.safe.add(i)

    def on_close(self, _, __, ___, fd): self.open.pop(fd)
    def on_mkdir(self, path, *_): self.name(path, ('mkdir', path, None))
    def on_unlink(self, path, *_): self.name(path, ('remove', path, self.inode.pop(path)))
    def on_rmdir(self, path, *_): self.name(path, ('remove', path, self.inode.pop(path, None)))

    def on_replace(self, path, _, __, ___, to):
        to = Path(to)
        self.inode[to] = self.inode.pop(path)
        self.name(path, ('move', path, to, self.inode[to]))

    def on_rename(self, path, _, __, ___, to):
        inside = {p: Path(to) / p.relative_to(path) for p in self.inode if path in (p, *p.parents)}
        for p, q in inside.items(): self.inode[q] = self.inode.pop(p)
        self.name(path, ('tree', path, Path(to)))

    def outcomes(self, most=2**13):
        "Every set of operations that may have reached the disk, as numbers."
        seen = set()
        for n, safe in [(0, frozenset()), *self.marks]:
            loose = [i for i in range(n) if i not in safe]
            assert 2 ** len(loose) <= most
            for size in range(len(loose) + 1):
                seen |= {safe | {*part} for part in itertools.combinations(loose, size)}
        return seen

    def after(self, kept):
        "The files and directories after these operations, in the order of the calls."
        names = {p: None if raw is None else p for p, raw in self.start.items()}
        data = dict(self.start)
        for i in sorted(kept):
            op = self.ops[i]
            if op[0] == 'write':
                old = data.get(op[1], b'').ljust(op[3], b'\0')
                data[op[1]] = old[:op[3]] + op[2] + old[op[3] + len(op[2]):]
            elif op[0] == 'make': names[op[1]] = op[2]
            elif op[0] == 'mkdir': names[op[1]] = None
            elif op[0] == 'remove': names.pop(op[1], None)
            elif op[0] == 'move':
                names.pop(op[1], None)
                names[op[2]] = op[3]
            else:
                for p in [p for p in names if op[1] in (p, *p.parents)]:
                    names[op[2] / p.relative_to(op[1])] = names.pop(p)
        return {p: data.get(inode, b'') if inode is not None else None for p, inode in names.items()}

    def lay_out(self, kept, root):
        "Such a disk as a directory; what lies in a directory that is not there is lost."
        for p, raw in sorted(self.after(kept).items()):
            q = root / p.relative_to(self.root)
            if not q.parent.is_dir(): continue
            if raw is None: q.mkdir(exist_ok=True)
            else: q.write_bytes(raw)


@pytest.fixture
def spare(tmp_path_factory):
    "A function that gives an empty directory, again and again."
    root = tmp_path_factory.mktemp('spare')

    def empty():
        shutil.rmtree(root)
        root.mkdir()
        return root
    return empty


@scenes
@pytest.mark.parametrize('block', [None, 150], ids=['whole writes', 'small writes'])
def test_power_fails(tmp_path, name, block, states, spare):
    folder, again, allowed = reset(tmp_path, name, states)
    disk = Disk(tmp_path, block)
    with calls_through(disk): again(True)
    ends = {}
    for kept in disk.outcomes():
        root = spare()
        disk.lay_out(kept, root)
        ends.setdefault(found(root / folder.relative_to(tmp_path), states), []).append(kept)
    assert set(ends) == allowed
    assert sum(map(len, ends.values())) > (60 if block else 15)
    assert disk.marks[-1] == (len(disk.ops), {*range(len(disk.ops))})  # once it returns, it stays


def mixture(folder, states):
    "Whether something loads that is of two minds, or nothing that is whole."
    try: return contents(folder) != states[load_trainer_state(folder).step]
    except FileNotFoundError: return False
    except ValueError: return True


@pytest.mark.parametrize('forget', ['files', 'directories'])
def test_the_model_sees_what_fsync_is_for(tmp_path, forget, states, spare):
    folder, again, _ = reset(tmp_path, 'over', states)
    disk, real = Disk(tmp_path), Disk.on_fsync
    def on_fsync(self, _, __, ___, fd):
        directory = self.open[fd].is_dir()
        if directory == (forget == 'files'): real(self, _, __, ___, fd)
    disk.on_fsync = on_fsync.__get__(disk)
    with calls_through(disk): again(True)
    found = 0
    for kept in disk.outcomes():
        root = spare()
        disk.lay_out(kept, root)
        found += mixture(root / 'run', states)
    assert found > 0


# -- rotation ---------------------------------------------------------------------------------

def five(root):
    for k, n in enumerate((1, 2, 3)): save(root / f'checkpoint-step-{n}', (0, 2, 5)[k], False, k > 0)


def committed(root, states):
    "The steps of all checkpoints that count; each of them is whole."
    steps = []
    for path in root.glob('checkpoint-*'):
        try: steps.append(load_trainer_state(path).step)
        except FileNotFoundError: continue
        assert contents(path) == states[steps[-1]]
    assert latest_committed(root) == root / 'checkpoint-step-3'
    return sorted(steps)


@pytest.mark.parametrize('dead', [False, True], ids=['fails', 'killed'])
def test_rotation_stops_anywhere(tmp_path, dead, states):
    root, k, done = tmp_path / 'root', 0, False
    while not done:
        if root.exists(): shutil.rmtree(root)
        five(root)
        shim = Shim(k, dead)
        try:
            with calls_through(shim): rotate_checkpoints(root, 1)
            done = len(shim.names) <= k
        except (Stopped, OSError): pass
        for fd in list(shim.open): shim.shut(fd)
        assert committed(root, states)[-1] == 5
        rotate_checkpoints(root, 1)
        assert os.listdir(root) == ['checkpoint-step-3']
        k += 1
    assert k > 10


def test_power_fails_in_a_rotation(tmp_path, states, spare):
    five(tmp_path)
    disk = Disk(tmp_path)
    with calls_through(disk): rotate_checkpoints(tmp_path, 1)
    ends = set()
    for kept in disk.outcomes():
        root = spare()
        disk.lay_out(kept, root)
        ends.add(tuple(committed(root, states)))
        rotate_checkpoints(root, 1, durable=False)
        assert os.listdir(root) == ['checkpoint-step-3']
    assert ends == {(0, 2, 5), (0, 5), (2, 5), (5,)}


# -- real kills -------------------------------------------------------------------------------

def kill(*args):
    command = [sys.executable, ROOT / 'tools' / 'kill_test.py', *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr


def test_a_few_kills(): kill(10, '--fresh', 1)


@pytest.mark.slow
def test_many_kills(): kill(200, '--fresh', 20)
