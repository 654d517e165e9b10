"""`fucina inspect`: checkpoints, directories of them, single files, damage."""
import io
import json
from pathlib import Path

import numpy as np
import pytest

import fucina
from fucina import errors, optim
from fucina.apps import cli
from fucina.apps.inspect import inspect
from fucina.safetensors import TensorEntry, save_file_atomic
from fucina.training_checkpoint import (
    ADAPTERS_STATE_FILE, TrainerState, begin_save, save_checkpoint, save_trainer_state)

GOLDENS = Path(__file__).parent / 'goldens'


def told(capsys, *argv):
    code = cli.main(['inspect', *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def checkpoint(folder, step=3, **options):
    model, opt = {'w': fucina.variable(np.ones((3, 2)), 'a b')}, optim.AdamW()
    opt.add_param(model['w'], name='w')
    state = TrainerState(step=step, seed=9, learning_rate=1e-5, data_index=0)
    save_checkpoint(folder, model, opt, state, durable=False, **options)
    return folder


def test_a_checkpoint(tmp_path, capsys):
    code, out, err = told(capsys, checkpoint(tmp_path / 'run'))
    assert (code, err) == (0, '')
    assert [line.split() for line in out.splitlines()] == [line.split() for line in '''\
trainer_state.json: version 1
  name           value
  step           3
  seed           9
  learning_rate  1e-05
  data_index     0
  the checkpoint is committed

model.safetensors
  name  dtype  shape  bytes
  w     F32    3 x 2  24
  1 tensor, 24 bytes

optimizer.fucina: FZA3: AdamW()
  parameter  shape  numbers  state         bytes
  w          3 x 2  step 0   m f32, v f32  48
  1 parameter, 83 bytes in the stream'''.splitlines()]
    _, out, _ = told(capsys, checkpoint(tmp_path / 'lora', tensor_file=ADAPTERS_STATE_FILE))
    assert 'adapters.safetensors\n' in out and 'model' not in out


@pytest.mark.parametrize('name, magic, steps', [('ckpt_adamw', 'FZA3', 6), ('ckpt_groups', 'FZO3', 6)])
def test_golden_checkpoints(name, magic, steps, capsys):
    code, out, _ = told(capsys, GOLDENS / name)
    assert code == 0 and f'optimizer.fucina: {magic}' in out and out.count('step 1000') == steps
    assert 'w2    F32    64 x 64  16,384' in out and '6 tensors, 17,928 bytes' in out


def test_files_one_by_one(capsys):
    for path, text in (('state_dict.safetensors', 'I64'), ('groups_state.fucina', 'OptimizerSet'),
                       ('tensors_fzt1.bin', 'FZT1'), ('adapters.safetensors', 'lora_a'),
                       ('ckpt_adamw/trainer_state.json', '1000')):
        code, out, _ = told(capsys, GOLDENS / path)
        assert code == 0 and text in out and Path(path).name in out


def test_every_row_in_the_terminal_and_few_in_a_notebook(tmp_path, capsys):
    path = tmp_path / 'many.safetensors'
    entries = [TensorEntry(f't{k:02}', 'F32', [], bytes(4)) for k in range(40)]
    save_file_atomic(path, entries, {'from': 'a <test>'})
    _, out, _ = told(capsys, path)
    assert 't39' in out and 'scalar' in out and 'many.safetensors: from=a <test>' in out
    assert 't39' not in repr(inspect(path)) and '28 more' in repr(inspect(path))
    assert 'a &lt;test&gt;' in inspect(path)._repr_html_()


def test_a_split_model(tmp_path, capsys):
    for k in (1, 2):
        save_file_atomic(tmp_path / f'{k}.safetensors', [TensorEntry(f'w{k}', 'BF16', [2], bytes(4))])
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': {'w1': '1.safetensors', 'w2': '2.safetensors'}}))
    _, out, _ = told(capsys, index)
    assert 'w1' in out and 'w2' in out and '2 tensors, 8 bytes' in out


def test_a_directory_of_checkpoints(tmp_path, capsys):
    for n in (5, 10, 100): checkpoint(tmp_path / f'checkpoint-step-{n}', n)
    begin_save(tmp_path / 'checkpoint-step-7')
    (tmp_path / 'checkpoint-step-8').write_text('a file')
    code, out, _ = told(capsys, tmp_path)
    rows = [line.split()[:2] for line in out.splitlines()[2:-1]]
    assert rows == [['checkpoint-step-5', '5'], ['checkpoint-step-10', '10'],
                    ['checkpoint-step-100', '100'], ['checkpoint-step-7', 'not']]
    assert code == 0 and 'the newest is checkpoint-step-100' in out
    checkpoint(tmp_path, 200)
    _, out, _ = told(capsys, tmp_path)
    assert 'model.safetensors' in out and f'the newest is {tmp_path.name}' in out


def test_what_is_not_there_or_damaged(tmp_path, capsys):
    folder = checkpoint(tmp_path / 'run')
    (folder / 'trainer_state.json').unlink()
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'text').write_text('hello, this is not a file of ours')
    (tmp_path / 'none').write_bytes(b'')
    (tmp_path / 'torn.safetensors').write_bytes((folder / 'model.safetensors').read_bytes()[:-1])
    (tmp_path / 'torn.fucina').write_bytes((folder / 'optimizer.fucina').read_bytes()[:-1])
    (tmp_path / 'other.fucina').write_bytes(b'GGUF')
    for name, error in (('run', FileNotFoundError), ('empty', FileNotFoundError),
                        ('missing', FileNotFoundError), ('text', errors.SafetensorsError),
                        ('none', errors.HeaderTooSmallError),
                        ('torn.safetensors', errors.MetadataIncompleteBufferError),
                        ('torn.fucina', errors.EndOfStreamError),
                        ('other.fucina', errors.CheckpointMagicMismatchError)):
        with pytest.raises(error): inspect(tmp_path / name)
        code, out, err = told(capsys, tmp_path / name)
        assert (code, out) == (1, '') and err.startswith('error: ') and name in err
        assert err.count('\n') == 1
    assert told(capsys)[0] == 2 and told(capsys, 'a', 'b')[0] == 2


def test_bytes_after_the_frame(tmp_path):
    stream = io.BytesIO()
    optim.OptimizerSet([optim.AdamW()]).save_state(stream)
    (tmp_path / 'x.fucina').write_bytes(stream.getvalue() + b'tail')
    assert '4 more bytes' in repr(inspect(tmp_path / 'x.fucina'))


def test_a_future_state(tmp_path, capsys):
    folder = checkpoint(tmp_path / 'checkpoint-step-3')
    save_trainer_state(folder, TrainerState())
    path = folder / 'trainer_state.json'
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    assert 'UnsupportedTrainerStateVersionError' in told(capsys, folder)[2]
    assert 'not committed' in told(capsys, tmp_path)[1]


def test_nothing_in_a_file_steers_the_terminal(tmp_path, capsys):
    path, evil = tmp_path / 'x.safetensors', 'w\x1b[2J\r\n\x9b31m\u202e'
    save_file_atomic(path, [TensorEntry(evil, 'U8', [1], b'a')], {evil: evil, 'né': 'ok'})
    optimizer = optim.AdamW()
    optimizer.add_param(fucina.variable(np.ones(2), 'd'), name=evil)
    with (tmp_path / 'x.fucina').open('wb') as file: optimizer.save_state(file)
    for name in ('x.safetensors', 'x.fucina'):
        code, out, _ = told(capsys, tmp_path / name)
        assert code == 0 and r'w\x1b[2J\r\n\x9b31m\u202e' in out
        assert all(c.isprintable() or c == '\n' for c in out)
        assert '\x1b' not in inspect(tmp_path / name)._repr_html_()
    assert 'né=ok' in told(capsys, path)[1]


def test_a_file_that_vanishes_meanwhile(tmp_path, monkeypatch, capsys):
    checkpoint(tmp_path / 'checkpoint-step-5', 5)
    gone, real = tmp_path / 'checkpoint-step-6', Path.iterdir
    checkpoint(gone, 6)
    def iterdir(self):
        yield from real(self)
        if self.name.startswith('checkpoint'): yield self / 'gone.tmp'
        if self == gone: raise FileNotFoundError(2, 'injected')
    monkeypatch.setattr(Path, 'iterdir', iterdir)
    code, out, err = told(capsys, tmp_path)
    assert (code, err) == (0, '') and 'checkpoint-step-5' in out and 'checkpoint-step-6' in out
