"""`fucina es-digits`: half-trained by gradients, then by accuracy alone; workers, resume, refusals."""
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from fucina.apps import es_digits, es_spirals
from fucina.apps.digits import first_net, load_digits, make_task, predict
from fucina.errors import (CheckpointShapeMismatchError,
                           UnknownArgumentError)
from fucina.exec import ExecContext
from fucina.tensor import constant

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

def test_copies_elsewhere_change_no_bit(monkeypatch):
    here, there = begun(population=6), begun(population=6)
    monkeypatch.setattr(es_digits, 'half_train', None)         # a copy gets the weights
    build = partial(es_spirals.replica_of, partial(es_digits.first_search, **SETTINGS), 42)
    with ThreadPoolExecutor(2) as pool:
        for _ in here.run(3):
            there.trainer.update(there.trainer.evaluate_members(build, workers=2, executor=pool))
    a, b = ([s.data.tobytes() for s in t.trainer.floats.slots] for t in (here, there))
    assert a == b and pickle.loads(pickle.dumps(build)).args[1] == 42


def test_a_checkpoint_of_another_program(tmp_path):
    es_spirals.main(['--iterations=1', '--population=2', '--target=0', '--save', str(tmp_path)])
    with pytest.raises(CheckpointShapeMismatchError): es_digits.main(['--resume', str(tmp_path)])


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

@pytest.mark.parametrize('epochs', ['0', 'x'])
def test_refused(epochs):
    with pytest.raises(UnknownArgumentError, match='--epochs'): es_digits.main([f'--epochs={epochs}'])


def test_without_the_data(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(ModuleNotFoundError, match=r'fucina\[data\]'): es_digits.main(['--iterations=1'])
