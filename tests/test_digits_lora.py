"""fucina digits --lora: what each way learns and forgets, checkpoints, refusals."""
import json
import shutil

import numpy as np
import pytest

from fucina.apps import cli
from fucina.data import Batches
from fucina.errors import (CheckpointConfigMismatchError, InvalidAccumStepsError, InvalidRankError,
                           UnknownArgumentError)
from fucina.exec import ExecContext
from fucina.lora import Adapter
from fucina.rng import at

pytest.importorskip('sklearn')
from fucina.apps import digits, digits_lora  # noqa: E402


def run(seed):
    with ExecContext(gemm='pinned'): return digits_lora.learn(seed)


def test_two_tasks():
    images, labels = digits.load_digits()
    old, new = digits_lora.two_tasks(images, labels, seed=1)
    whole = digits.make_task(images, labels, seed=1)
    assert set(old.y) == set(old.test_y) == set(range(5)) and set(new.y) == set(range(5, 10))
    assert sorted([*old.test_at, *new.test_at]) == sorted(whole.test_at)
    assert abs(old.x.mean()) < 1e-5 and abs(old.x.std() - 1) < 1e-5
    for task in (old, new):                       # the same images, up to one scale and one shift
        assert np.array_equal(labels[task.test_at], task.test_y)
    scale = (old.test_x[0] - new.test_x[0]).std() / (images[old.test_at[0]] - images[new.test_at[0]]).std()
    np.testing.assert_allclose(old.test_x[0] - new.test_x[0],
                               scale * (images[old.test_at[0]] - images[new.test_at[0]]), atol=1e-4)


def test_one_seed():
    result = run(42)
    frozen, lora, full = result.ways
    assert [w.trained for w in result.ways] == [0, 1320, 9610]
    assert frozen.new <= 0.2 and frozen.old >= 0.95
    assert lora.new >= 0.9 and full.new >= 0.9
    assert result.alike == result.unseen == 359 and result.far < 1e-4


@pytest.mark.slow
def test_median_of_three_seeds():
    results = [run(seed) for seed in (42, 1, 2)]
    new = np.array([[w.new for w in r.ways] for r in results])
    old = np.array([[w.old for w in r.ways] for r in results])
    frozen, lora, full = np.median(new, 0)
    assert frozen <= 0.2 and lora >= 0.9 and full >= 0.95, new
    frozen, lora, full = np.median(old, 0)
    assert frozen >= 0.98 and lora > full, old
    assert all(r.alike == r.unseen for r in results)


def test_the_command(tmp_path, capsys):
    pytest.importorskip('matplotlib')
    picture = tmp_path / 'a.png'
    assert cli.main(['digits', '--lora', '--epochs=3', '--target=0', '--plot', str(picture)]) == 0
    out, err = capsys.readouterr()
    for word in ('frozen', 'adapters', 'everything', '1,320', '9,610', 'unseen 5-9', 'reached', 'rank 4',
                 'biases frozen', '359 of 359'):
        assert word in out, word
    assert 'learn 0-4' in err and picture.read_bytes()[:4] == b'\x89PNG'
    assert digits.main(['--epochs=1', '--lora', '--rank=10', '--target=1']) == 1
    out = capsys.readouterr().out
    assert 'MISSED' in out and 'rank 10' in out
    assert cli.main(['digits', '--lora', '--help']) == 0
    assert 'usage: fucina digits --lora' in capsys.readouterr().out
    assert cli.main(['digits', '--help']) == 0 and '--lora' in capsys.readouterr().out


def test_refusals(capsys):
    for argv, error in ((['--rank=11'], InvalidRankError), (['--rank=0'], UnknownArgumentError),
                        (['--accum=0'], InvalidAccumStepsError), (['--save-every=3'], UnknownArgumentError),
                        (['--alpha=3'], UnknownArgumentError)):
        with pytest.raises(error): digits.main(['--lora', *argv])
    with pytest.raises(UnknownArgumentError, match='--rank'): digits.main(['--rank=3'])


@pytest.mark.parametrize('accum', [1, 2])
def test_every_micro_batch_has_masks_of_its_own(accum, monkeypatch, tmp_path):
    old, new = digits_lora.two_tasks(*digits.load_digits(), 2)
    base, seen = digits.first_net(3), []
    apply = Adapter.apply

    def watched(self, x, y, seed=None):
        seen.append(seed)
        return apply(self, x, y, seed)

    def run(): return digits_lora.AdapterRun(digits_lora.adapted(base, 5, rank=3), new,
                                             Batches(len(new.y), 128, 1), 2, accum)
    monkeypatch.setattr(Adapter, 'apply', watched)
    with ExecContext(gemm='pinned'):
        one = run()
        adapters = one.net.adapters
        assert (adapters.rank, adapters.alpha, adapters.dropout_p) == (3, 6, np.float32(0.1))
        assert [x.alpha for x in adapters.values()] == [6, 6] and not seen
        losses = digits.finish(one, 'masked')
        assert adapters.step == one.taken == one.todo == 12
        assert None not in seen and len(set(seen)) == len(seen) == 2 * 12
        digits_lora.save(tmp_path / 'a', one, 5)
        adapters._masks.step = 11                              # one micro-batch outside of the block
        with pytest.raises(CheckpointConfigMismatchError, match='step is 11'):
            digits_lora.save(tmp_path / 'b', one, 5)
        assert not (tmp_path / 'b').exists()
        monkeypatch.setattr(digits_lora.Trained, '__call__', lambda self, x: self.net(x))
        seen.clear()
        plain = run()
        dry = digits.finish(plain, 'dry')
    assert set(seen) == {None} and plain.net.adapters.step == 0
    assert dry[0] == losses[0] and dry[1:] != losses[1:]       # B is zero at first: nothing to hide


@pytest.mark.parametrize('accum', [1, 2])
def test_saved_and_resumed(tmp_path, accum, capsys):
    argv = ['--lora', '--epochs=3', '--target=0', f'--accum={accum}']
    first, second = tmp_path / 'a', tmp_path / 'b'
    assert digits.main([*argv, '--save', str(first), '--save-every=4']) == 0
    files = 'adapters.safetensors', 'optimizer.fucina', 'trainer_state.json'
    assert sorted(p.name for p in (first / 'checkpoint-step-4').iterdir()) == sorted(files)
    said = capsys.readouterr().out
    whole = {f: (first / f).read_bytes() for f in files}
    for p in first.glob('checkpoint-step-*'):
        if p.name != 'checkpoint-step-4': shutil.rmtree(p)
    (first / 'trainer_state.json').unlink()                        # killed before the end
    assert digits.main([*argv, '--save', str(second), '--resume', str(first)]) == 0
    assert {f: (second / f).read_bytes() for f in files} == whole
    shares = [line.split()[3:] for line in said.splitlines()[2:5]]
    assert shares == [line.split()[3:] for line in capsys.readouterr().out.splitlines()[2:5]]
    state = json.loads(whole['trainer_state.json'])
    assert (state['lora_rank'], state['lora_alpha'], state['seed'], state['step']) == (4, 8, 42, 18)
    assert state['lora_dropout_p'] == float(np.float32(0.1)) and state['data_seed'] == at(42, 3)
    for wrong, said in ((['--rank=2'], 'lora_rank is 4'), (['--seed=1'], 'the seed'), (['--batch=64'], '--batch'),
                        (['--epochs=4'], '--epochs'), (['--accum=3'], '--accum')):
        with pytest.raises(CheckpointConfigMismatchError, match=said):
            digits.main([*argv, *wrong, '--resume', str(first)])
    assert not (first / 'trainer_state.json').exists()


def test_checkpoints_of_the_other_program(tmp_path):
    digits.main(['--epochs=1', '--target=0', '--save', str(tmp_path)])
    with pytest.raises(CheckpointConfigMismatchError): digits.main(['--lora', '--resume', str(tmp_path)])
