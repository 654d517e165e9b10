"""`fucina es-digits`: half-trained by gradients, then by accuracy alone; workers, resume, refusals."""
import json
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from fucina.apps import cli, es_digits, es_spirals
from fucina.apps.digits import first_net, load_digits, make_task, predict
from fucina.errors import (CheckpointConfigMismatchError, CheckpointShapeMismatchError,
                           FromScratchTrainingFailedError, InvalidConfigError, InvalidRewardNormError,
                           InvalidWorkersError, UnknownArgumentError)
from fucina.exec import ExecContext
from fucina.tensor import constant
from fucina.training_checkpoint import load_trainer_state

pytest.importorskip('sklearn')
SETTINGS = dict(sigma=0.03, alpha=0.06, population=64, antithetic=True)


@pytest.fixture(scope='module')
def task(): return make_task(*load_digits(), 42)


def half_trained(task, epochs=1):
    net = first_net(42)
    es_digits.half_train(net, task, 42, epochs)
    return net


def begun(seed=42, **settings):
    tuning = es_digits.first_search(seed, **SETTINGS | settings)
    tuning.begin()
    return tuning


def files(folder):
    "The bytes of a checkpoint."
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def weights(net): return [t.numpy().tobytes() for t in vars(net).values()]


# --- half-trained

def test_half_trained_is_the_same_at_any_number_of_threads_and_mode(task):
    found = []
    for workers, gemm in ((1, 'pinned'), (2, 'blas'), (3, 'pinned')):
        with ExecContext(workers=workers, gemm=gemm):
            found.append(weights(half_trained(task)))
    assert found[0] == found[1] == found[2]
    assert weights(half_trained(task, 2)) != found[0]


# --- one call

@pytest.mark.parametrize('settings', [{}, {'antithetic': False}, {'noise': 'correlated'},
                                      {'cache_streams': True}, {'population': 5, 'antithetic': False}])
def test_one_call_is_a_member_and_a_forward_pass(task, settings):
    net, x, y = half_trained(task), task.x[:300], task.y[:300]
    trainer = es_spirals.train_on(net, seed=1, **SETTINGS | settings)
    trainer.iteration = 3
    scorer, other = es_digits.DigitScorer(trainer, net, x, y), first_net(0)
    for member in (0, 1, 2, trainer.config.population - 1):
        trainer.materialize_member(member, [t.value for t in vars(other).values()])
        loss, hits = scorer(member)
        assert [w.tobytes() for w in scorer.net] == weights(other)
        with ExecContext(gemm='pinned'): logits = other(constant(x, 'batch in'))
        assert abs(loss - logits.cross_entropy('class', y).item()) < 1e-5
        assert hits == np.sum(predict(other, x) == y)
    scorer()
    assert [w.tobytes() for w in scorer.net] == weights(net)


# --- what the digits held back are for

def test_digits_held_back_change_no_bit_of_the_training():
    found = []
    for spoiled in (False, True):
        tuning = begun(population=6)
        if spoiled: tuning.unseen.x[:], tuning.unseen.labels[:] = 1, 0
        for _ in tuning.run(3): tuning.judge()
        found.append([s.data.tobytes() for s in tuning.trainer.floats.slots])
    assert found[0] == found[1] and len(tuning.judged) == 3


def test_the_reward_is_the_share_that_is_read(task):
    tuning = begun()
    assert tuning.score(0, 5) == tuning.scorers[0](5)[1] / 1438
    loss, accuracy = tuning.judge()
    net = half_trained(task)
    assert accuracy == tuning.judged[0] == np.mean(predict(net, task.test_x) == task.test_y)
    assert 0.8 < accuracy < 0.9 and 0.5 < loss < 1.5


# --- whole runs

def test_smoke(capsys):
    assert es_digits.main(['--iterations=10', '--population=8', '--target=0.8', '--workers=2']) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert '9610 weights' in lines[0] and 'population 8 in antithetic pairs' in lines[0]
    assert 'z_score, workers 2' in lines[0]
    assert lines[1].startswith('before: accuracy 0.8') and 'chance 0.100' in lines[1]
    assert lines[2].startswith('   10: accuracy ')
    assert lines[3].startswith('after: 10 iterations') and 'ms/iteration' in lines[3]
    assert lines[4].startswith('PASS: accuracy ') and lines[4].endswith(' points') and '10/10' in err


def test_workers_and_threads_change_no_bit(tmp_path):
    found = []
    for k, threads in ((1, 1), (2, 1), (3, 2)):
        folder = tmp_path / str(k)
        es_digits.main(['--iterations=4', '--population=10', '--target=0', f'--workers={k}',
                        f'--threads={threads}', '--save', str(folder)])
        found.append(files(folder))
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {'model.safetensors', 'trainer_state.json'}


def test_copies_elsewhere_change_no_bit(monkeypatch):
    here, there = begun(population=6), begun(population=6)
    monkeypatch.setattr(es_digits, 'half_train', None)         # a copy gets the weights
    build = partial(es_spirals.replica_of, partial(es_digits.first_search, **SETTINGS), 42)
    with ThreadPoolExecutor(2) as pool:
        for _ in here.run(3):
            there.trainer.update(there.trainer.evaluate_members(build, workers=2, executor=pool))
    a, b = ([s.data.tobytes() for s in t.trainer.floats.slots] for t in (here, there))
    assert a == b and pickle.loads(pickle.dumps(build)).args[1] == 42


def test_stopped_and_resumed(tmp_path, capsys, monkeypatch):
    argv, root = ['--population=7', '--sigma=0.03125', '--seed=-3', '--target=0'], tmp_path / 'run'
    assert es_digits.main([*argv, '--iterations=9', '--save', str(root), '--save-every', '3']) == 0
    whole = files(root)
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == [
        f'checkpoint-iter-{k}' for k in (3, 6, 9)]
    shutil.rmtree(root / 'checkpoint-iter-9')
    (root / 'trainer_state.json').unlink()                     # killed before the end
    capsys.readouterr()
    monkeypatch.setattr(es_digits, 'half_train', None)         # the weights are in the checkpoint
    more = str(tmp_path / 'more')
    assert es_digits.main(['--target=0', '--iterations=9', '--resume', str(root), '--save', more]) == 0
    assert files(tmp_path / 'more') == whole
    out = capsys.readouterr().out
    assert 'population is 7 in the checkpoint, not 64' in out and 'sigma is 0.03125' in out
    assert es_digits.main([*argv, '--seed=5', '--iterations=9', '--resume', more]) == 0
    assert f'seed is {2**64 - 3} in the checkpoint, not 5' in capsys.readouterr().out
    assert files(tmp_path / 'more') == whole                   # nothing was left to do


def test_a_folder_without_a_checkpoint_starts_at_the_beginning(tmp_path):
    (tmp_path / 'empty').mkdir()
    argv = ['--iterations=2', '--population=4', '--target=0.8']
    assert es_digits.main([*argv, '--resume', str(tmp_path / 'empty')]) == 0
    assert es_digits.main([*argv, '--save', str(tmp_path / 'other')]) == 0
    assert files(tmp_path / 'empty') == files(tmp_path / 'other')


def test_fields_of_a_checkpoint(tmp_path):
    es_digits.main(['--iterations=2', '--population=6', '--target=0', '--save', str(tmp_path)])
    state = load_trainer_state(tmp_path)
    assert (state.step, state.seed, state.es_iteration, state.es_population) == (2, 42, 2, 6)
    assert state.es_sigma == float(np.float32(0.03)) and state.es_alpha == float(np.float32(0.06))
    text = json.loads((tmp_path / 'trainer_state.json').read_text())
    del text['es_sigma']
    (tmp_path / 'trainer_state.json').write_text(json.dumps(text))
    with pytest.raises(CheckpointConfigMismatchError, match='es_sigma'):
        es_digits.main(['--resume', str(tmp_path)])


def test_a_checkpoint_of_another_program(tmp_path):
    es_spirals.main(['--iterations=1', '--population=2', '--target=0', '--save', str(tmp_path)])
    with pytest.raises(CheckpointShapeMismatchError): es_digits.main(['--resume', str(tmp_path)])


# --- verdict

def test_missed(capsys):
    argv = ['--iterations=1', '--population=2', '--target=1']
    with pytest.raises(FromScratchTrainingFailedError, match='target 1.000'): es_digits.main(argv)
    assert capsys.readouterr().out.splitlines()[-1].startswith('FAIL: accuracy 0.')
    assert cli.main(['es-digits', *argv]) == 1
    assert 'error: FromScratchTrainingFailedError' in capsys.readouterr().err


def test_figure(tmp_path):
    pytest.importorskip('matplotlib')
    path = tmp_path / 'a.png'
    es_digits.main(['--iterations=3', '--population=4', '--target=0', '--plot', str(path)])
    assert path.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n' and path.stat().st_size > 5000


@pytest.mark.slow
def test_three_points_on_digits_held_back():
    gains = []
    for seed in (0, 1, 2):
        tuning = begun(seed, workers=2)
        tuning.judge()
        for _ in tuning.run(100): pass
        assert tuning.judge()[1] >= 0.95                       # the target of the command
        gains.append(tuning.judged[1] - tuning.judged[0])
    assert np.median(gains) >= 0.03, gains


# --- refusals

@pytest.mark.parametrize('argv, error, said', [
    (['--workers=0'], InvalidWorkersError, '--workers'),
    (['--workers', '-2'], InvalidWorkersError, '--workers'),
    (['--norm', 'rank'], InvalidRewardNormError, "'rank'"),
    (['--sigma=0'], InvalidConfigError, 'sigma'), (['--sigma=nan'], InvalidConfigError, 'sigma'),
    (['--alpha=-1'], InvalidConfigError, 'alpha'),
    (['--population=1'], InvalidConfigError, 'population'),
    (['--epochs=0'], UnknownArgumentError, '--epochs'),
    (['--epochs=x'], UnknownArgumentError, '--epochs'),
    (['--iterations=0'], UnknownArgumentError, '--iterations'),
    (['--target=95'], UnknownArgumentError, '--target'),
    (['--gemm=blas'], UnknownArgumentError, '--gemm'),
    (['--save-every=3'], UnknownArgumentError, '--save-every')])
def test_refused(argv, error, said):
    with pytest.raises(error, match=said): es_digits.main(argv)


def test_without_the_data(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(ModuleNotFoundError, match=r'fucina\[data\]'): es_digits.main(['--iterations=1'])
