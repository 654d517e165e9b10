"""`fucina es-spirals`, `es-ternary-spirals`, `es-digits`: first networks, refusals, workers, resume."""
import json
import shutil
from importlib.util import find_spec

import numpy as np
import pytest

from fucina.apps import cli, es_digits, es_spirals, es_ternary_spirals
from fucina.data import two_spirals
from fucina.errors import (CheckpointConfigMismatchError,
                           FromScratchTrainingFailedError, InvalidConfigError, InvalidDScaleError,
                           InvalidRewardError, InvalidRewardNormError, InvalidWorkersError, StateDictError,
                           UnknownArgumentError)
from fucina.exec import ExecContext
from fucina.tensor import constant
from fucina.training_checkpoint import load_trainer_state

DATA = pytest.mark.skipif(find_spec('sklearn') is None, reason='needs scikit-learn')
programs = pytest.mark.parametrize('app', [
    pytest.param(es_spirals, id='es-spirals'), pytest.param(es_ternary_spirals, id='es-ternary-spirals'),
    pytest.param(es_digits, id='es-digits', marks=DATA)])
CHANCE = {es_spirals: 0.5, es_ternary_spirals: 0.5, es_digits: 0.1}
EVERY = {es_spirals: 500, es_ternary_spirals: 250, es_digits: 10}        # iterations between two lines
POINTS, LABELS = two_spirals(97, 42)


def fnv(a):
    h = 0xcbf29ce484222325
    for byte in np.ascontiguousarray(a).tobytes(): h = (h ^ byte) * 0x100000001b3 % 2**64
    return f'{h:016x}'


def float_trainer(**settings):
    net = es_spirals.first_net(42)
    config = dict(sigma=0.1, alpha=0.1, population=128, antithetic=True, seed=42) | settings
    trainer = es_spirals.train_on(net, **config)
    return net, trainer, es_spirals.Scorer(trainer, net, POINTS, LABELS)


def files(folder):
    "The bytes of a checkpoint."
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


# --- first networks

def test_first_weights_of_es_spirals():
    net, trainer, scorer = float_trainer()
    assert [fnv(w.numpy()) for w in (net.w1, net.w2, net.w3)] == [
        'edd315d66e18f29d', '083b23e6c9d7ee71', 'a8ffd9c4b7dc7eff']
    assert not any(b.numpy().any() for b in (net.b1, net.b2, net.b3))
    assert (trainer.param_count(), trainer.element_count()) == (6, 4482)
    loss, hits = scorer()
    assert f'{loss:.4f}' == '0.6824' and f'{hits / 194:.3f}' == '0.577'


def test_first_network_of_es_ternary_spirals():
    d = es_ternary_spirals.block_scale(3)
    assert d.view(np.uint32) == 0x3e6b26a8 and d.astype(np.float16).view(np.uint16) == 0x3359
    assert es_ternary_spirals.block_scale(1).view(np.uint32) == 0x3d9cc470
    net = es_ternary_spirals.first_net(42)
    assert fnv(net.first.numpy()) == '5240189d4d0d1acb'
    assert [fnv(w.blocks) for w in net.layers] == ['d32154d59f22ac33', '0893723d319c69e0']
    assert fnv(net(POINTS)) == '1736361b74df9204'
    loss, hits = net.cross_entropy(POINTS, LABELS)
    assert loss.view(np.uint32) == 0x3f37cb45 and hits == 103


def test_three_updates_of_the_reference():
    net = es_ternary_spirals.first_net(42)
    trainer = es_ternary_spirals.train_on(
        net, sigma=0.05, alpha=0.075, population=128, antithetic=True, seed=42,
        ternary_flip_rate=0.002, ternary_update_fraction=0.001)
    assert [s.data.size for s in trainer.floats.slots] == [512, 256, 256, 2]
    assert [trainer.ternary_flip_count(w.size) for w in net.layers] == [131, 1]
    scorers = [es_ternary_spirals.Scorer(trainer, net, POINTS, LABELS) for _ in range(3)]
    search = es_spirals.Search(trainer, scorers, 194)
    found = [[fnv(w.blocks) for w in net.layers] for _ in search.run(3)]
    assert found == [['63ad763b84f9e6ec', '355c523ee3bd06c4'],
                     ['05d0f3433537349c', 'fcff6cf5bfcceb94'],
                     ['68edeba6bb5585c5', '141d0bdae1a73054']]


# --- one call

@pytest.mark.parametrize('settings', [{}, {'antithetic': False}, {'noise': 'correlated'},
                                      {'cache_streams': True}, {'population': 5, 'antithetic': False}])
def test_one_call_is_a_member_and_a_forward_pass(settings):
    net, trainer, scorer = float_trainer(**settings)
    trainer.iteration = 3
    other, last = es_spirals.first_net(0), trainer.config.population - 1
    for member in (0, 1, 2, last):
        trainer.materialize_member(member, [t.data() for t in vars(other).values()])
        loss, hits = scorer(member)
        for ours, theirs in zip(scorer.net, vars(other).values()):
            assert ours.tobytes() == theirs.numpy().tobytes()
        with ExecContext(gemm='pinned'): logits = other(constant(POINTS, 'batch in'))
        assert abs(loss - logits.cross_entropy('class', LABELS).item()) < 1e-5
        assert hits == np.sum(logits.argmax('class').numpy() == LABELS)
    scorer()
    for ours, theirs in zip(scorer.net, vars(net).values()):
        assert ours.tobytes() == theirs.numpy().tobytes()


def test_ties_go_to_class_0():
    net, _, scorer = float_trainer()
    for t in vars(net).values(): t.data()[...] = 0
    assert scorer()[1] == 97


# --- whole runs

@programs
def test_smoke(app, capsys):
    n = min(EVERY[app], 250)
    assert app.main([f'--iterations={n}', '--population=8', '--target=0', '--workers=2']) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert 'population 8 in antithetic pairs' in lines[0] and 'z_score, workers 2' in lines[0]
    assert lines[1].startswith('before: accuracy 0.') and f'chance {CHANCE[app]:.3f}' in lines[1]
    assert lines[-2].startswith(f'after: {n} iterations') and 'ms/iteration' in lines[-2]
    assert lines[-1].startswith('PASS: accuracy ') and f'{n}/{n}' in err
    assert any(line.startswith(f'{n:5}: accuracy') for line in lines) == (n == EVERY[app])


@programs
def test_workers_and_threads_change_no_bit(app, tmp_path):
    found = []
    for k, threads in ((1, 1), (2, 1), (3, 2)):
        folder = tmp_path / str(k)
        app.main(['--iterations=4', '--population=10', '--target=0', f'--workers={k}',
                  f'--threads={threads}', '--save', str(folder)])
        found.append(files(folder))
    assert found[0] == found[1] == found[2]
    names = {'model.safetensors', 'trainer_state.json'}
    if app is es_ternary_spirals: names.add('genome.safetensors')
    assert set(found[0]) == names


@programs
def test_stopped_and_resumed(app, tmp_path, capsys, monkeypatch):
    argv, root = ['--population=7', '--sigma=0.0625', '--seed=-3', '--target=0'], tmp_path / 'run'
    assert app.main([*argv, '--iterations=9', '--save', str(root), '--save-every', '3']) == 0
    whole = files(root)
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == [
        f'checkpoint-iter-{k}' for k in (3, 6, 9)]
    shutil.rmtree(root / 'checkpoint-iter-9')
    (root / 'trainer_state.json').unlink()                     # killed before the end
    capsys.readouterr()
    monkeypatch.setattr(es_digits, 'half_train', None)         # weights and settings are in the checkpoint
    more = str(tmp_path / 'more')
    assert app.main(['--target=0', '--iterations=9', '--resume', str(root), '--save', more]) == 0
    assert files(tmp_path / 'more') == whole
    out = capsys.readouterr().out
    usual = 64 if app is es_digits else 128
    assert f'population is 7 in the checkpoint, not {usual}' in out and 'sigma is 0.0625' in out
    assert 'population 7,' in out and 'seed is' not in out
    assert out.splitlines()[1] == 'goes on after iteration 6'
    assert app.main([*argv, '--seed=5', '--iterations=9', '--resume', str(tmp_path / 'more')]) == 0
    assert f'seed is {2**64 - 3} in the checkpoint, not 5' in capsys.readouterr().out
    assert files(tmp_path / 'more') == whole                   # nothing was left to do


@programs
def test_a_folder_without_a_checkpoint_starts_at_the_beginning(app, tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    argv = ['--iterations=2', '--population=4', '--target=0']
    assert app.main([*argv, '--resume', str(tmp_path / 'empty')]) == 0
    assert capsys.readouterr().out.splitlines()[1] == 'no checkpoint there: a new run'
    assert app.main([*argv, '--save', str(tmp_path / 'other')]) == 0
    assert 'new run' not in capsys.readouterr().out
    assert files(tmp_path / 'empty') == files(tmp_path / 'other')


@programs
def test_fields_of_a_checkpoint(app, tmp_path):
    app.main(['--iterations=2', '--population=6', '--target=0', '--save', str(tmp_path)])
    state = load_trainer_state(tmp_path)
    assert (state.step, state.seed, state.es_iteration, state.es_population) == (2, 42, 2, 6)
    assert (state.es_noise, state.es_antithetic, state.es_anchor_decay) == (0, 1, 0)
    assert (state.es_ternary_flip_rate is not None) == (app is es_ternary_spirals)
    alpha = {es_spirals: 0.1, es_ternary_spirals: 0.075, es_digits: 0.06}[app]
    assert state.es_alpha == float(np.float32(alpha))
    text = json.loads((tmp_path / 'trainer_state.json').read_text())
    del text['es_sigma']
    (tmp_path / 'trainer_state.json').write_text(json.dumps(text))
    with pytest.raises(CheckpointConfigMismatchError, match='es_sigma'):
        app.main(['--resume', str(tmp_path)])


def test_a_checkpoint_of_the_other_program(tmp_path):
    es_spirals.main(['--iterations=1', '--population=2', '--target=0', '--save', str(tmp_path)])
    with pytest.raises((StateDictError, FileNotFoundError)):
        es_ternary_spirals.main(['--resume', str(tmp_path)])


# --- verdict

@programs
def test_missed(app, capsys):
    name = app.__name__.rpartition('.')[2].replace('_', '-')
    argv = ['--iterations=1', '--population=2', '--target=1']
    with pytest.raises(FromScratchTrainingFailedError, match='target 1.000'): app.main(argv)
    assert capsys.readouterr().out.splitlines()[-1].startswith('FAIL: accuracy 0.')
    assert cli.main([name, *argv]) == 1
    assert 'error: FromScratchTrainingFailedError' in capsys.readouterr().err


def test_stop_at_target(monkeypatch, capsys):
    first = es_spirals.follow
    monkeypatch.setattr(es_spirals, 'follow', lambda *args: first(*args[:3], 5, args[4]))
    argv = ['--iterations=12', '--population=4', '--target=0.4']
    assert es_spirals.main(argv) == 0
    assert 'after: 12 iterations' in capsys.readouterr().out
    assert es_spirals.main([*argv, '--stop-at-target']) == 0
    out = capsys.readouterr().out
    assert '    5: accuracy' in out and 'after: 5 iterations' in out


@programs
def test_figure(app, tmp_path):
    pytest.importorskip('matplotlib')
    path = tmp_path / 'a.png'
    app.main(['--iterations=3', '--population=4', '--target=0', '--plot', str(path)])
    assert path.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n' and path.stat().st_size > 5000


# --- refusals

@programs
@pytest.mark.parametrize('argv, error, said', [
    (['--workers=0'], InvalidWorkersError, '--workers'),
    (['--workers', '-2'], InvalidWorkersError, '--workers'),
    (['--norm', 'rank'], InvalidRewardNormError, "'rank'"),
    (['--norm='], InvalidRewardNormError, '--norm'),
    (['--sigma=0'], InvalidConfigError, 'sigma'), (['--sigma=nan'], InvalidConfigError, 'sigma'),
    (['--alpha=-1'], InvalidConfigError, 'alpha'),
    (['--population=1'], InvalidConfigError, 'population'),
    (['--iterations=0'], UnknownArgumentError, '--iterations'),
    (['--iterations'], UnknownArgumentError, '--iterations'),
    (['--workers=x'], UnknownArgumentError, '--workers'),
    (['--sigma=x'], UnknownArgumentError, '--sigma'), (['--steps=3'], UnknownArgumentError, '--steps'),
    (['--target=95'], UnknownArgumentError, '--target'), (['--gemm=blas'], UnknownArgumentError, '--gemm'),
    (['--save-every=3'], UnknownArgumentError, '--save-every')])
def test_refused(app, argv, error, said):
    with pytest.raises(error, match=said): app.main(argv)


@pytest.mark.parametrize('argv, error', [
    (['--reward=loss'], InvalidRewardError), (['--dscale=0'], InvalidDScaleError),
    (['--dscale=nan'], InvalidDScaleError), (['--dscale=-1'], InvalidDScaleError),
    (['--dscale=inf'], InvalidDScaleError), (['--flip-rate=0'], InvalidConfigError),
    (['--update-fraction=2'], InvalidConfigError), (['--update-decay=-1'], InvalidConfigError),
    (['--stop-at-target'], UnknownArgumentError)])
def test_refused_by_the_ternary_program(argv, error):
    with pytest.raises(error): es_ternary_spirals.main(argv)


def test_rewards():
    assert es_spirals.minus_loss(0.5, 0.9) == -0.5
    assert es_ternary_spirals.mostly_accuracy(0.0, 0.75) == 0.85
    argv = ['--iterations=2', '--population=4', '--target=0']
    for reward in ('nll', 'acc'):
        for norm in ('none', 'centered_ranks'):
            assert es_ternary_spirals.main([*argv, f'--reward={reward}', f'--norm={norm}']) == 0
    assert es_ternary_spirals.main([*argv, '--dscale=1', '--flip-rate=1e-5']) == 0
