"""The commands, run in process: results, verdicts, refusals, figures, and the same bits twice."""
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import python

import fucina
from fucina.apps import bench_optim, cli, program, spirals
from fucina.data import two_spirals
from fucina.errors import (CheckpointConfigMismatchError, InvalidAccumStepsError,
                           ResumeNotBitExactError, UnknownArgumentError)
from fucina.exec import ExecContext
from fucina.optim import SGD, Adam, AdamW
from fucina.tensor import constant, variable
from fucina.training_checkpoint import latest_committed, load_trainer_state

GOLDENS = Path(__file__).parent / 'goldens'


@pytest.fixture
def digits():
    pytest.importorskip('sklearn')
    from fucina.apps import digits
    return digits


def fnv(a):
    h = 0xcbf29ce484222325
    for byte in np.ascontiguousarray(a).tobytes(): h = (h ^ byte) * 0x100000001b3 % 2**64
    return f'{h:016x}'


def fucina_command(*argv, **env):
    return subprocess.run([sys.executable, '-m', 'fucina', *argv], capture_output=True,
                          text=True, timeout=300, env=os.environ | env)


# --- flags

def test_flags_of_a_program():
    parser = program.Parser('test', 'Test.')
    program.add_common_flags(parser, 'of all', target=0.5)
    for argv in (['--seed', '-7', '--threads', '3', '--target', '0.25'],
                 ['--seed=-7', '--threads=3', '--target=0.25']):
        args = parser.parse_args(argv)
        assert (args.seed, args.threads, args.target, args.plot) == (-7, 3, 0.25, None)
    assert parser.parse_args(['--seed', '0xFF']).seed == 255
    assert parser.parse_args(['--seed', '007']).seed == 7
    assert parser.parse_args([]).target == 0.5


@pytest.mark.parametrize('main', [spirals.main, 'digits'])
@pytest.mark.parametrize('argv, said', [
    (['--no-such-flag'], '--no-such-flag'), (['--seed'], '--seed'), (['--seed', 'x'], "'x'"),
    (['--seed', '1.5'], '--seed'), (['--threads', '0'], '--threads'), (['--see', '1'], '--see'),
    (['--threads', 'two'], '--threads'), (['--target', '99'], '--target'), (['word'], 'word'),
    (['--target', 'nan'], '--target'), (['--plot', 'a.xyz'], '--plot'), (['--plot'], '--plot'),
    (['--gemm', 'fast'], '--gemm')])
def test_bad_flags_are_named(main, argv, said, request):
    if main == 'digits': main = request.getfixturevalue('digits').main
    with pytest.raises(UnknownArgumentError) as e: main(argv)
    assert said in str(e.value).splitlines()[0] and 'usage: fucina ' in str(e.value)


def test_bad_flags_of_one_program(digits):
    for argv in (['--optimizer', 'lion'], ['--optimizer'], ['--steps', '0'], ['--steps=-1']):
        with pytest.raises(UnknownArgumentError, match=argv[0].split('=')[0]): spirals.main(argv)
    for argv in (['--epochs', '0'], ['--batch', 'x'], ['--accum', '1.5'], ['--steps', '3']):
        with pytest.raises(UnknownArgumentError, match=argv[0]): digits.main(argv)
    for n in ('0', '-2'):
        with pytest.raises(InvalidAccumStepsError, match='--accum'): digits.main(['--accum', n])


def test_a_figure_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(spirals, 'learn', None)  # not reached
    with pytest.raises(FileNotFoundError, match='no folder'):
        spirals.main(['--plot', str(tmp_path / 'none' / 'a.png')])
    (tmp_path / 'folder.png').mkdir()
    with pytest.raises(IsADirectoryError): spirals.main(['--plot', str(tmp_path / 'folder.png')])
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "fucina\[plot\]"'):
        spirals.main(['--plot', str(tmp_path / 'a.png')])


@pytest.mark.parametrize('flag', ['--save', '--resume'])
def test_a_folder_is_there_before_the_work(tmp_path, flag):
    parser = program.Parser('test', 'Test.')
    program.add_checkpoint_flags(parser)
    (tmp_path / 'file').touch()
    with pytest.raises(OSError, match='file'):
        with program.folder_for(parser.parse_args([flag, str(tmp_path / 'file' / 'run')])): pass
    (tmp_path / 'a').mkdir()
    path = tmp_path / 'a' if flag == '--resume' else tmp_path / 'a' / 'b'
    with program.folder_for(parser.parse_args([flag, str(path)])) as found:
        assert found == path and path.is_dir()


def test_digits_without_scikit_learn(digits, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'sklearn', None)
    monkeypatch.delitem(sys.modules, 'sklearn.datasets', raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "fucina\[data\]"'):
        digits.main(['--epochs', '1'])
    assert cli.main(['digits', '--epochs', '1']) == 1
    assert 'error: ModuleNotFoundError: fucina digits needs scikit-learn' in capsys.readouterr().err


# --- the command

def test_command_answers(capsys):
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out == f'fucina {fucina.__version__}\n'
    for argv in ([], ['--help'], ['-h']):
        assert cli.main(argv) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in cli.COMMANDS)
    assert cli.main(['config']) == 0
    assert 'numpy' in capsys.readouterr().out
    for name in cli.COMMANDS:
        assert cli.main([name, '--help']) == 0
        out = capsys.readouterr().out
        assert f'usage: fucina {name}' in out and (name != 'config' or 'BLAS' in out)


@pytest.mark.parametrize('argv', [['train'], ['--verbose'], ['spirals', '--step', '3'],
                                  ['digits', '3'], ['config', '--all']])
def test_command_does_not_understand(argv, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith('error: UnknownArgumentError: ') and 'usage: fucina' in err


def test_command_turns_errors_into_a_line(capsys, monkeypatch):
    assert cli.main(['digits', '--accum=0']) == 1
    assert capsys.readouterr().err.startswith('error: InvalidAccumStepsError: --accum')
    assert cli.main(['spirals', '--plot', 'no/such/a.png']) == 1
    assert capsys.readouterr().err.startswith('error: FileNotFoundError: --plot')

    def interrupted(argv): raise KeyboardInterrupt
    monkeypatch.setattr(spirals, 'main', interrupted)
    assert cli.main(['spirals']) == 130

    def broken(argv): raise ZeroDivisionError
    monkeypatch.setattr(spirals, 'main', broken)
    with pytest.raises(ZeroDivisionError): cli.main(['spirals'])


def test_command_as_a_module():
    done = fucina_command('spirals', '--sede', '1')
    assert done.returncode == 2 and 'usage: fucina spirals' in done.stderr


def test_version_imports_no_program():
    code = ('import runpy, sys; sys.argv = ["fucina", "--version"]\n'
            'try: runpy.run_module("fucina", run_name="__main__")\n'
            'finally: assert not {"fucina.apps.spirals", "sklearn", "matplotlib"} & set(sys.modules)')
    assert python(code) == f'fucina {fucina.__version__}\n'


# --- spirals

def test_first_weights():
    net = spirals.first_net(42)
    assert [fnv(w.numpy()) for w in (net.w1, net.w2, net.w3)] == [
        '618fc432b99ba4ca', 'd0f1e530cd70b274', 'd82446999e21d7a0']
    first = net.w1.numpy().ravel()[:4].view(np.uint32)
    assert first.tolist() == [0x3f277485, 0xbd3de099, 0x3e50e556, 0x3ef97ebf]
    assert not any(b.numpy().any() for b in (net.b1, net.b2, net.b3))
    with np.load(GOLDENS / 'spirals.npz') as golden:
        for name, t in vars(net).items():
            assert np.array_equal(t.numpy(), golden[f'init/{name}']) and t.requires_grad


@pytest.mark.parametrize('gemm', ['blas', 'pinned'])
@pytest.mark.parametrize('name', list(spirals.RUNS))
def test_losses_of_the_reference(name, gemm):
    key = name.removeprefix('adamw-').replace('-', '_')
    with np.load(GOLDENS / 'spirals.npz') as golden:
        init = {k: golden[f'init/{k}'] for k in ('w1', 'b1', 'w2', 'b2', 'w3', 'b3')}
        points, labels, losses = golden['x'], golden['labels'], golden[f'{key}/losses'][:50]
    net = spirals.first_net(0)
    net = spirals.Net(**{k: variable(init[k], t.tags) for k, t in vars(net).items()})
    trainer = spirals.RUNS[name].make(net, 2000)
    with ExecContext(gemm=gemm):
        ours = list(spirals.train(net, trainer, points, labels, 50))
    np.testing.assert_allclose(ours, losses, rtol=1e-4)


def test_spirals_reach_and_miss_the_target(capsys):
    assert spirals.main(['--optimizer', 'adamw', '--steps', '300']) == 0
    out, err = capsys.readouterr()
    assert 'adamw' in out and 'sgd' not in out and 'reached' in out and '450/450' in err
    assert spirals.main(['--steps=5', '--seed=3', '--threads=1']) == 1
    out = capsys.readouterr().out
    assert out.count('MISSED') == 6 and all(name in out for name in spirals.RUNS)
    assert spirals.main(['--steps=5', '--target=0']) == 0


def test_spirals_are_saved_and_go_on(tmp_path, capsys):
    argv, root = ['--optimizer=adamw-groups', '--target=0', '--steps=60'], tmp_path / 'runs'
    assert spirals.main([*argv, '--save', str(root), '--save-every', '20']) == 0
    run = root / 'adamw-groups'
    names = ['checkpoint-step-20', 'checkpoint-step-30', 'checkpoint-step-40', 'checkpoint-step-60']
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == names
    whole = {f: (run / f).read_bytes() for f in ('model.safetensors', 'optimizer.fucina')}
    shutil.rmtree(run / 'checkpoint-step-60')
    (run / 'trainer_state.json').unlink()                      # killed before the end
    assert spirals.main([*argv, '--save', str(tmp_path / 'more'), '--resume', str(root)]) == 0
    assert {f: (tmp_path / 'more' / 'adamw-groups' / f).read_bytes() for f in whole} == whole
    assert 'step 50' in capsys.readouterr().out                # half-way from 40 to 60
    for wrong in (['--seed', '3'], ['--steps', '30']):
        with pytest.raises(CheckpointConfigMismatchError, match='checkpoint-step-40'):
            spirals.main([*argv, *wrong, '--resume', str(root)])
    with pytest.raises(NotADirectoryError): spirals.main(['--resume', str(tmp_path / 'none')])
    assert spirals.main([*argv, '--steps=4', '--resume', str(tmp_path)]) == 0  # nothing there yet


def test_spirals_notice_a_resume_that_differs(monkeypatch):
    first, calls = spirals.begin, []
    def begin(*args):
        net, trainer, step = first(*args)
        calls.append(step)
        if len(calls) == 2: net.b1.value[0] += 1
        return net, trainer, step
    monkeypatch.setattr(spirals, 'begin', begin)
    with pytest.raises(ResumeNotBitExactError, match='adamw'):
        spirals.main(['--optimizer=adamw', '--steps=6', '--target=0'])


@pytest.mark.parametrize('name, key', [('adamw', 'adamw'), ('adamw-groups', 'groups')])
def test_spirals_go_on_from_the_checkpoints_of_the_reference(name, key):
    "Second halves: losses within 1e-4, parameters within 1e-3 of the original's."
    with np.load(GOLDENS / 'spirals.npz') as golden:
        points, labels, losses = golden['x'], golden['labels'], golden[f'{key}/losses'][1000:]
        net, trainer, first = spirals.begin(name, 42, 2000, GOLDENS / f'ckpt_{key}')
        with ExecContext(gemm='pinned'):
            ours = list(spirals.train(net, trainer, points, labels, 2000, first))
        assert first == 1000
        np.testing.assert_allclose(ours, losses, rtol=1e-4)
        for k, t in vars(net).items():
            np.testing.assert_allclose(t.numpy(), golden[f'{key}/final/{k}'], rtol=0, atol=1e-3)


def test_spirals_seed_sets_data_and_weights(monkeypatch):
    seen = []
    monkeypatch.setattr(spirals, 'two_spirals', lambda n, seed: seen.append(seed) or two_spirals(n, 1))
    first = spirals.first_net
    monkeypatch.setattr(spirals, 'first_net', lambda seed: seen.append(seed) or first(seed))
    for flags in ([], ['--seed', '5']):
        spirals.main(['--optimizer=adamw', '--steps=1', '--target=0', *flags])
    assert seen == [1234, 42, 5, 5]


def test_accuracy_ties_go_to_class_0():
    points, labels = two_spirals(10, 1)
    tied = lambda x: constant(np.zeros((len(x), 2)), 'batch class')
    assert spirals.accuracy(tied, points, labels) == 0.5
    assert spirals.accuracy(tied, points, np.zeros(20, int)) == 1.0


def is_png(path):
    data = path.read_bytes()
    return data[:8] == b'\x89PNG\r\n\x1a\n' and data[-8:-4] == b'IEND' and len(data) > 5000


def test_spirals_figure(tmp_path):
    pytest.importorskip('matplotlib')
    spirals.main(['--steps=3', '--target=0', '--plot', str(tmp_path / 'a.png')])
    assert is_png(tmp_path / 'a.png')


@pytest.mark.slow
@pytest.mark.parametrize('name', list(spirals.RUNS))
def test_spirals_reach_99_percent(name):
    "APOLLO-Mini has one number for a whole matrix; with some seeds 2000 steps are not enough."
    for seed in (None, 0, 1, 2)[:1 if name == 'apollo-mini' else 4]:
        argv = ['--optimizer', name, *([] if seed is None else ['--seed', str(seed)])]
        assert spirals.main(argv) == 0


def test_the_table_of_runs_shares_nothing():
    "An optimizer of the table is copied for each run."
    for run in spirals.RUNS.values():
        first, second = (run.make(spirals.first_net(1), 10).opt for _ in range(2))
        assert first is not second and (not hasattr(first, 'slots') or first.slots is not second.slots)


# --- digits

def test_digits_default_run(digits, tmp_path, capsys):
    pytest.importorskip('matplotlib')
    assert digits.main(['--target', '0.97', '--plot', str(tmp_path / 'a.png')]) == 0
    out, err = capsys.readouterr()
    assert 'reached' in out and '480/480' in err and is_png(tmp_path / 'a.png')


def test_digits_miss_the_target(digits, capsys):
    assert digits.main(['--epochs=1', '--seed=3', '--target=1', '--threads=1']) == 1
    assert 'MISSED' in capsys.readouterr().out


def test_digits_task(digits):
    images, labels = digits.load_digits()
    task = digits.make_task(images, labels, seed=1)
    assert (len(task.y), len(task.test_y)) == (1438, 359)
    assert np.array_equal(labels[task.test_at], task.test_y)
    assert abs(np.bincount(task.test_y) - 0.2 * np.bincount(labels)).max() <= 0.5
    other = digits.make_task(images, labels, seed=2)
    assert not np.array_equal(task.test_at, other.test_at)


def test_accumulation_is_normalised_over_the_window(digits):
    task, order = digits.make_task(*digits.load_digits(), seed=1), np.arange(1000, 1100)
    grads, losses = [], []
    for cuts in ([], [50], [1, 2], [97], [10, 20, 30, 40]):
        net = digits.first_net(1)
        losses.append(digits.add_gradients(net, task.x, task.y, np.split(order, cuts)))
        grads.append([t.grad.numpy().copy() for t in vars(net).values()])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    for other in grads[1:]:
        for g, expected in zip(other, grads[0]): np.testing.assert_allclose(g, expected, atol=2e-7)


def test_accumulation_steps_and_clips_once_per_window(digits, monkeypatch):
    calls = []

    class Recorded(digits.AdamW):
        def clip_grad_norm(self, max_norm):
            calls.append('clip')
            return super().clip_grad_norm(max_norm)
        def step(self):
            calls.append('step')
            super().step()
    monkeypatch.setattr(digits, 'AdamW', Recorded)
    task = digits.make_task(*digits.load_digits(), seed=1)
    batches = digits.Batches(len(task.y), 128, 0)
    losses = list(digits.train(digits.Run(digits.first_net(1), task, batches, epochs=1, accum=5)))
    assert len(losses) == 3 and calls == ['clip', 'step'] * 3  # 12 batches: 5, 5 and 2
    assert batches.epoch == 1 and batches.index == 0


def test_digits_go_on_after_a_kill(digits, tmp_path, monkeypatch):
    "Dropped in the middle of an epoch and of a step; data order, window and schedule are kept."
    flags = ['--epochs=3', '--batch=64', '--accum=4', '--target=0']
    assert digits.main([*flags, '--save', str(tmp_path / 'whole')]) == 0
    calls, real = [], digits.add_gradients
    def killed(*args):
        calls.append(1)
        if len(calls) == 9: raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(digits, 'add_gradients', killed)
    part = tmp_path / 'part'
    with pytest.raises(KeyboardInterrupt):
        digits.main([*flags, '--save', str(part), '--save-every', '5'])
    monkeypatch.undo()
    assert [p.name for p in part.iterdir()] == ['checkpoint-step-5']
    for wrong, what in ((['--accum=2'], '--accum'), (['--seed=1'], 'seed'), (['--batch=32'], '--batch')):
        with pytest.raises(CheckpointConfigMismatchError, match=what):
            digits.main([*flags, *wrong, '--resume', str(part)])
    assert digits.main([*flags, '--save', str(part), '--resume', str(part)]) == 0
    for leaf in ('model.safetensors', 'optimizer.fucina', 'trainer_state.json'):
        assert (part / leaf).read_bytes() == (tmp_path / 'whole' / leaf).read_bytes()
    state = load_trainer_state(part)
    assert (state.accum_steps, state.data_epoch, state.data_index) == (4, 3, 0)
    assert digits.main([*flags, '--resume', str(part)]) == 0  # nothing left to do


@pytest.mark.skipif(os.name == 'nt', reason='no SIGKILL')
def test_digits_survive_kill_9(digits, tmp_path):
    flags = ['--epochs=6', '--accum=2', '--target=0', '--save-every=1']
    assert digits.main([*flags, '--save', str(tmp_path / 'whole')]) == 0
    folder = tmp_path / 'killed'
    child = subprocess.Popen([sys.executable, '-m', 'fucina', 'digits', *flags, '--save', str(folder)],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder.is_dir() and len(list(folder.iterdir())) > 3) and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert latest_committed(folder) is not None
    assert digits.main([*flags, '--save', str(folder), '--resume', str(folder)]) == 0
    for leaf in ('model.safetensors', 'optimizer.fucina', 'trainer_state.json'):
        assert (folder / leaf).read_bytes() == (tmp_path / 'whole' / leaf).read_bytes()


@pytest.mark.slow
def test_digits_median_of_ten_seeds(digits):
    with ExecContext(gemm='pinned'):
        found = [digits.learn(seed).accuracy for seed in range(10)]
    print(*(f'{a:.1%}' for a in found))
    assert np.median(found) >= 0.97


# --- bench-optim

def test_bench_optim_measures_every_row(capsys):
    assert bench_optim.main(['--scale', '0.05', '--embedding=false', '--steps=2']) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines() if line and 'moves' not in line]
    rows = {name: rest for name, *rest in lines}
    names = list(bench_optim.ROWS)
    assert [name for name in rows if name in names] == names and 'embedding' not in rows
    assert names == ['sgd', 'sgd-momentum', 'sgd-momentum-bf16', 'adamw', 'adamw-bf16-m',
                     'adamw-bf16-mv', 'muon', 'muon-bf16', 'apollo-r256', 'apollo-mini', 'clip-norm']
    for name in names:
        millions, ms, speed, share, _ = rows[name]
        assert millions == '0.04' and float(ms) > 0
        if name[:4] in ('muon', 'apol'): assert speed == share == '-'
        else: assert float(speed) > 0 and share[-1] == '%'
    assert 'adamw-bf16-mv moves 71% of the bytes of adamw' in out and '/block' not in err


def test_bench_optim_embedding_and_threads(capsys, monkeypatch):
    monkeypatch.setattr(bench_optim, 'ROWS', {name: bench_optim.ROWS[name] for name in
                                              ('adamw', 'adamw-bf16-mv', 'apollo-mini')})
    assert bench_optim.main(['--scale=0.02', '--steps=1', '--threads', '3']) == 0
    out = capsys.readouterr().out
    assert 'threads: 3' in out and out.index('block') < out.index('embedding')
    block, embedding = out.split('embedding')
    assert 'ms x 28' in block and 'apollo' in block
    assert 'ms x 28' not in embedding and 'apollo' not in embedding


@pytest.mark.parametrize('argv', [['--scale', '0'], ['--scale=nan'], ['--scale', 'inf'],
                                  ['--scale=x'], ['--embedding', 'no'], ['--embedding'],
                                  ['--steps', '0'], ['--threads=0'], ['--seed', '1']])
def test_bench_optim_bad_flags(argv):
    with pytest.raises(UnknownArgumentError, match=argv[0].split('=')[0]): bench_optim.main(argv)


def test_bench_optim_steps_are_steps(monkeypatch):
    calls = []
    class Counted(bench_optim.AdamW):
        def step(self):
            calls.append([s.param.grad_state.grad is not None for s in self.slots])
            super().step()
    monkeypatch.setitem(bench_optim.ROWS, 'adamw', bench_optim.Row(Counted, 28))
    found = bench_optim.measure('adamw', [(3, 2), (4,)], 7)
    assert calls == [[True, True]] * (bench_optim.WARM + 7) and found.size == 10


@pytest.mark.parametrize('n', [1, 1000, 2**17 + 5])
@pytest.mark.parametrize('make', [lambda: SGD(), lambda: SGD(momentum=0.9, state_dtype='bf16'),
                                  lambda: Adam(state_dtype='bf16'), lambda: AdamW()])
def test_idle_loop_changes_nothing(make, n):
    w, opt = variable(np.random.default_rng(0).standard_normal(n), 'd'), make()
    opt.add_param(w)
    w.set_grad(w.numpy() * 0.1)
    opt.step()
    arrays = [w.numpy(), w.grad.numpy(), *opt.slots[0].arrays()]
    before = [a.copy() for a in arrays]
    bench_optim.idle(opt)()
    if len(arrays) == 3: bench_optim.idle(opt, read=True)()
    assert all(map(np.array_equal, before, arrays)) and opt.slots[0].step == 1


# --- the same bits twice

TRACE = '''
import hashlib, sys, numpy as np
from fucina.apps import spirals
from fucina.data import two_spirals
from fucina.exec import ExecContext
points, labels = two_spirals(200, 1234)
for gemm in ('blas', 'pinned'):
    for name, run in spirals.RUNS.items():
        net = spirals.first_net(42)
        with ExecContext(workers=int(sys.argv[1]), gemm=gemm):
            trace = list(spirals.train(net, run.make(net, 200), points, labels, 25))
        print(gemm, name, hashlib.sha256(np.array(trace).tobytes()).hexdigest())
'''


def test_fresh_processes_give_the_same_losses():
    first = python(TRACE, 1, PYTHONHASHSEED='0')
    assert len(set(first.split())) == 2 + 6 + 12
    assert python(TRACE, 3, PYTHONHASHSEED='1') == first


def test_digits_give_the_same_losses(digits):
    traces = set()
    for workers, seed in ((1, 5), (3, 5), (2, 5), (1, 6)):
        with ExecContext(workers=workers):
            losses = digits.learn(seed, epochs=2, accum=2).losses
        traces.add((seed, hashlib.sha256(np.array(losses).tobytes()).hexdigest()))
    assert len(traces) == 2
