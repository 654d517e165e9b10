"""trainer_state.json to the byte, the order of a save, golden checkpoints, many under one root."""
import dataclasses
import io
import json
import math
import os
import random
import stat
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import fucina
from fucina import errors, optim, training_checkpoint
from fucina.param_registry import ParamRegistry
from fucina.safetensors import File
from fucina.training_checkpoint import (
    ADAPTERS_STATE_FILE, MODEL_STATE_FILE, OPTIMIZER_STATE_FILE, TRAINER_STATE_FILE,
    TrainerState, begin_save, format_trainer_state, latest_committed, load_checkpoint,
    load_trainer_state, parse_trainer_state, path_join, rotate_checkpoints, save_checkpoint,
    save_trainer_state, write_file_atomic)

GOLDENS = Path(__file__).parent / 'goldens'
GOLDEN = np.load(GOLDENS / 'trainer_state.npz')
FLOATS = ('lora_alpha', 'lora_dropout_p', 'learning_rate', 'es_sigma', 'es_alpha',
          'es_anchor_lambda', 'es_ternary_flip_rate', 'es_ternary_update_fraction',
          'es_ternary_update_decay')
posix = pytest.mark.skipif(os.name == 'nt', reason='permissions and directories as on POSIX')
EXAMPLE = '''{
  "format": "fucina.training_checkpoint",
  "version": 1,
  "step": 12,
  "seed": 34,
  "lora_rank": 8,
  "learning_rate": 0.001,
  "es_iteration": 17
}
'''


def head(rest='', version='1', step='5', seed='6', format='"fucina.training_checkpoint"'):
    return f'{{"format":{format},"version":{version},"step":{step},"seed":{seed}{rest}}}'


def bits(x): return struct.pack('<d', x)


# -- the text ---------------------------------------------------------------------------------

def test_example():
    state = TrainerState(step=12, seed=34, lora_rank=8, learning_rate=0.001, es_iteration=17)
    assert format_trainer_state(state) == EXAMPLE.encode()
    assert parse_trainer_state(EXAMPLE.encode()) == state


def test_fields_and_defaults():
    names = [f.name for f in dataclasses.fields(TrainerState)]
    assert names == '''version step seed lora_rank lora_alpha lora_dropout_p learning_rate
        accum_steps data_seed data_epoch data_index es_sigma es_alpha es_population es_noise
        es_antithetic es_anchor_decay es_anchor_lambda es_ternary_flip_rate
        es_ternary_update_fraction es_ternary_update_decay es_iteration'''.split()
    state = TrainerState()
    assert (state.version, state.step, state.seed) == (1, 0, 0)
    assert {getattr(state, name) for name in names[3:]} == {None}
    assert fucina.training_checkpoint is training_checkpoint
    assert training_checkpoint.TrainerStateError is errors.TrainerStateError


@pytest.mark.parametrize('k', range(7))
def test_golden_text(k):
    text = str(GOLDEN[f'state{k}']).encode()
    state = parse_trainer_state(text)
    assert format_trainer_state(state) == text
    for name, x, again in zip(FLOATS, GOLDEN[f'floats{k}'], GOLDEN[f'floats_reloaded{k}']):
        value = getattr(state, name)
        assert math.isnan(x) if value is None else type(value) is float
        assert value is None or bits(value) == bits(x) == bits(again)


@pytest.mark.parametrize('line', str(GOLDEN['load_cases']).split('\n')[:-1])
def test_golden_load_case(line):
    result, text = line.split('\t')
    if result.startswith('ok'):
        state = parse_trainer_state(text.encode())
        assert result == f'ok step={state.step} seed={state.seed}'
    else:
        with pytest.raises(errors.TrainerStateError) as e: parse_trainer_state(text.encode())
        assert type(e.value).__name__ == f'{result}Error'


@pytest.mark.parametrize('x, text', [
    (1e-3, '0.001'), (16.0, '16'), (0.0, '0'), (-0.0, '-0'), (1e-8, '0.00000001'),
    (1e-10, '0.0000000001'), (1e22, '1' + '0' * 22), (123456789.125, '123456789.125'),
    (5e-324, '0.' + '0' * 323 + '5'), (0.30000000000000004, '0.30000000000000004'),
    (np.float32(1e-3), '0.0010000000474974513'), (np.float64(0.5), '0.5'), (16, '16'),
    (-2.5, '-2.5'), (100.0, '100'), (1.7976931348623157e308, '17976931348623157' + '0' * 292),
    (np.int64(3), '3'), (True, None), (math.nan, None), (math.inf, None), (10**400, None),
    ('1', None), (1j, None), (np.bool_(True), None)])
def test_float_text(x, text):
    state = TrainerState(learning_rate=x)
    if text is None:
        with pytest.raises(errors.InvalidTrainerStateError, match='learning_rate'):
            format_trainer_state(state)
    else: assert f'"learning_rate": {text}\n}}\n' in format_trainer_state(state).decode()


def test_random_floats_are_exact():
    words = random.Random(7)
    patterns = [words.getrandbits(64) for _ in range(10_000)]
    patterns += [words.getrandbits(52) for _ in range(500)]  # subnormal
    found = [struct.unpack('<d', struct.pack('<Q', p))[0] for p in patterns]
    found += [float(np.float32(x)) for x in np.random.default_rng(0).lognormal(0, 20, 500)]
    for x in found:
        if not math.isfinite(x): continue
        raw = format_trainer_state(TrainerState(es_sigma=x))
        text = raw.decode().split('"es_sigma": ')[1].split('\n')[0]
        assert 'e' not in text.lower() and bits(float(text)) == bits(x)
        assert not ('.' in text and text.endswith('0')) and not text.endswith('.')
        assert bits(parse_trainer_state(raw).es_sigma) == bits(x)


@pytest.mark.parametrize('name', [f.name for f in dataclasses.fields(TrainerState)])
def test_every_field_travels(name):
    high = {'version': 1}.get(name, 2**64 - 1)
    for value in (0.25, 7.0) if name in FLOATS else (high, np.uint64(high)):
        state = TrainerState(**{name: value})
        assert parse_trainer_state(format_trainer_state(state)) == state
    wrong = (None,) if name in ('version', 'step', 'seed') else ()
    for value in ('1', math.nan, math.inf, True, b'1', [], *wrong):
        with pytest.raises(errors.InvalidTrainerStateError, match=name):
            format_trainer_state(TrainerState(**{name: value}))
    if name in FLOATS: return
    for value in (-1, 2**64, 1.0, np.float32(1), *([0, 2] if name == 'version' else [])):
        with pytest.raises(errors.InvalidTrainerStateError, match=name):
            format_trainer_state(TrainerState(**{name: value}))


def test_all_fields_together():
    values = {f.name: 1.5 if f.name in FLOATS else k
              for k, f in enumerate(dataclasses.fields(TrainerState)) if k}
    state = TrainerState(**values)
    raw = format_trainer_state(state)
    assert parse_trainer_state(raw) == state and raw.isascii() and raw.count(b'\n') == 25
    assert json.loads(raw) == {'format': 'fucina.training_checkpoint', 'version': 1, **values}


# -- what is accepted -------------------------------------------------------------------------

ACCEPTED = {
    'blanks around': (f' \t\r\n{head()}\n ', {}),
    'any order': ('{"seed":6,"step":5,"version":1,"format":"fucina.training_checkpoint"}', {}),
    'largest integers': (head(step=str(2**64 - 1), rest=f',"es_noise":{2**64 - 1}'),
                         {'step': 2**64 - 1, 'es_noise': 2**64 - 1}),
    'a float as an integer': (head(',"lora_alpha":16'), {'lora_alpha': 16.0}),
    'minus zero': (head(',"lora_alpha":-0'), {'lora_alpha': -0.0}),
    'an exponent in a float': (head(',"lora_alpha":1.5e1'), {'lora_alpha': 15.0}),
    'a large integer, to the nearest': (head(f',"lora_alpha":{2**53 + 1}'), {'lora_alpha': 2.0**53}),
    'a tiny float': (head(',"lora_alpha":1e-999'), {'lora_alpha': 0.0}),
    'unknown keys': (head(',"x":null,"y":[1,{"z":1e999}],"-0":-0'), {}),
    'an escaped key': (head(r',"lora\u005frank":3'), {'lora_rank': 3}),
    'an escaped format': (head(format=r'"fucina\u002etraining_checkpoint"'), {}),
    'a pair of surrogates': (head(r',"x":"\ud83d\ude00"'), {}),
}


@pytest.mark.parametrize('case', ACCEPTED)
def test_accepted(case):
    text, fields = ACCEPTED[case]
    state = parse_trainer_state(text.encode())
    assert state == TrainerState(**{'step': 5, 'seed': 6, **fields})
    for name, value in fields.items():
        assert type(getattr(state, name)) is type(value)
        if type(value) is float: assert bits(getattr(state, name)) == bits(value)
    assert parse_trainer_state(memoryview(text.encode())) == state


INVALID = {
    'empty': '', 'blank': ' \n', 'only a brace': '{', 'a list': '[]', 'a text': '"x"', 'null': 'null',
    'empty object': '{}', 'trailing text': head() + 'x', 'a second object': head() + head(),
    'duplicate key': head(',"seed":6'), 'duplicate unknown key': head(',"x":1,"x":1'),
    'duplicate key inside': head(',"x":[{"a":1,"a":2}]'), 'trailing comma': head(','),
    'NaN': head(',"x":NaN'), 'Infinity': head(',"x":-Infinity'), 'single quotes': "{'a':1}",
    'control character': head(',"x":"a\tb"'), 'lone surrogate': head(r',"x":"\ud800"'),
    'lone surrogate in a key': head(r',"\udc00":1'), 'plus': head(step='+5'), 'zeros': head(step='05'),
    'hexadecimal': head(step='0x5'), 'comment': head('/**/'), 'deep': head(f',"x":{"[" * 100_000}'),
    'no format': '{"version":1,"step":5,"seed":6}', 'format is a number': head(format='1'),
    'other format': head(format='"fucina"'), 'other format and version': head(format='"x"', version='2'),
    'format in other letters': head(format='"Fucina.training_checkpoint"'),
    'no version': '{"format":"fucina.training_checkpoint","step":5,"seed":6}',
    'version is a text': head(version='"1"'), 'version is a float': head(version='1.0'),
    'version is true': head(version='true'), 'version is null': head(version='null'),
    'version is negative': head(version='-1'), 'version is minus zero': head(version='-0'),
    'version is too large': head(version=str(2**32)), 'version is far too large': head(version=str(2**64)),
    'no step': '{"format":"fucina.training_checkpoint","version":1,"seed":6}',
    'no seed': '{"format":"fucina.training_checkpoint","version":1,"step":6}',
}
for _name in ('step', 'seed', 'es_iteration'):
    for _value in ('5.0', '1e1', '-1', '-0', '"8"', 'null', 'true', '[]', str(2**64), '1' + '0' * 5000):
        _text = head(**{_name: _value}) if _name != 'es_iteration' else head(f',"{_name}":{_value}')
        INVALID[f'{_name} {_value[:9]}'] = _text
for _value in ('"8"', 'null', 'true', '{}', '1e999', '-1e999', '1' + '0' * 400, '1' + '0' * 5000):
    INVALID[f'learning_rate {_value[:9]}'] = head(f',"learning_rate":{_value}')


@pytest.mark.parametrize('case', INVALID)
def test_invalid(case):
    with pytest.raises(errors.InvalidTrainerStateError): parse_trainer_state(INVALID[case].encode())


def test_invalid_bytes():
    good = head().encode()
    for raw in (b'\xef\xbb\xbf' + good, good.replace(b'"seed"', b'"se\xffed"'), good[:-1] + b'\xc3',
                head().encode('utf-16'), head().encode('utf-32'), b'\0' + good, good + b'\0'):
        with pytest.raises(errors.InvalidTrainerStateError): parse_trainer_state(raw)


@pytest.mark.parametrize('text', [head(version='2'), head(version='0'), head(version=str(2**32 - 1)),
                                  '{"format":"fucina.training_checkpoint","version":3}',
                                  head(version='7', step='null', rest=',"lora_rank":null')])
def test_other_versions(text):
    with pytest.raises(errors.UnsupportedTrainerStateVersionError): parse_trainer_state(text.encode())


def test_the_first_error_wins():
    text = '{"format":"fucina.training_checkpoint","version":1,"lora_rank":null,"seed":-1,"step":-1}'
    for name, fixed in (('step', '"step":1'), ('seed', '"seed":1'), ('lora_rank', '"lora_rank":1')):
        with pytest.raises(errors.InvalidTrainerStateError, match=f'^{name}:'):
            parse_trainer_state(text.encode())
        text = text.replace('"seed":-1' if name == 'seed' else f'"{name}":-1', fixed)
    with pytest.raises(errors.InvalidTrainerStateError, match='es_sigma'):
        parse_trainer_state(head(',"es_iteration":null,"es_sigma":null').encode())


def test_torn_text_is_never_valid():
    raw = EXAMPLE.encode()
    for n in range(len(raw) - 1):
        with pytest.raises(errors.InvalidTrainerStateError): parse_trainer_state(raw[:n])
    assert parse_trainer_state(raw[:-1]) == parse_trainer_state(raw)


def test_errors_of_one_kind():
    for name in ('InvalidTrainerStateError', 'UnsupportedTrainerStateVersionError'):
        kind = getattr(errors, name)
        assert issubclass(kind, errors.TrainerStateError) and issubclass(kind, ValueError)
        assert getattr(training_checkpoint, name) is kind


# -- files ------------------------------------------------------------------------------------

def model(values=1.0): return {'w': fucina.variable(np.full((3, 2), values, np.float32), 'out in'),
                               'b': fucina.variable(np.full(3, values, np.float32), 'out')}


def trained(values=1.0):
    params, opt = model(values), optim.AdamW(lr=0.1)
    registry = ParamRegistry()
    registry.collect(params)
    registry.add_params_to(opt)
    for t in params.values(): t.set_grad(np.full(t.shape, values, np.float32))
    opt.step()
    opt.zero_grad()
    return params, registry, opt


def contents(folder): return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_paths():
    assert path_join('a', 'b') == path_join(Path('a'), 'b') == os.path.join('a', 'b')
    assert path_join('', 'b') == 'b' and type(path_join(Path('a'), 'b')) is str
    assert (MODEL_STATE_FILE, ADAPTERS_STATE_FILE, OPTIMIZER_STATE_FILE, TRAINER_STATE_FILE) == (
        'model.safetensors', 'adapters.safetensors', 'optimizer.fucina', 'trainer_state.json')


def test_begin_save(tmp_path):
    folder = tmp_path / 'a' / 'b' / 'c'
    begin_save(folder)
    assert folder.is_dir() and not any(folder.iterdir())
    (folder / 'other').write_text('stays')
    save_trainer_state(folder, TrainerState())
    for durable in (True, False):
        begin_save(str(folder), durable=durable)
        assert contents(folder) == {'other': b'stays'}
    (tmp_path / 'file').write_text('')
    for path in (tmp_path / 'file', tmp_path / 'file' / 'below'):
        with pytest.raises((FileExistsError, NotADirectoryError)): begin_save(path)
    (folder / TRAINER_STATE_FILE).mkdir()
    with pytest.raises(OSError): begin_save(folder)


def test_state_in_a_directory(tmp_path):
    state = TrainerState(step=3, seed=2**63, learning_rate=0.1)
    save_trainer_state(tmp_path / 'new', state)
    assert load_trainer_state(str(tmp_path / 'new')) == state
    assert (tmp_path / 'new' / TRAINER_STATE_FILE).read_bytes() == format_trainer_state(state)
    with pytest.raises(errors.InvalidTrainerStateError):
        save_trainer_state(tmp_path / 'x', TrainerState(step=-1))
    assert not (tmp_path / 'x').exists()
    (tmp_path / 'new' / TRAINER_STATE_FILE).write_text(head(version='2'))
    with pytest.raises(errors.UnsupportedTrainerStateVersionError, match='trainer_state.json'):
        load_trainer_state(tmp_path / 'new')


def test_a_step_in_the_place_of_a_state(tmp_path):
    params, _, opt = trained()
    with pytest.raises(TypeError, match='TrainerState, got int'):
        save_checkpoint(tmp_path / 'run', params, opt, 5)
    assert not (tmp_path / 'run').exists()


def test_no_committed_checkpoint(tmp_path):
    params, _, opt = trained()
    save_checkpoint(tmp_path, params, opt, TrainerState(step=1))
    os.unlink(tmp_path / TRAINER_STATE_FILE)
    for folder in (tmp_path, tmp_path / 'missing'):
        for call in (load_trainer_state, lambda f: load_checkpoint(f, params, opt)):
            with pytest.raises(FileNotFoundError, match='no committed checkpoint') as e: call(folder)
            assert e.value.filename == str(folder / TRAINER_STATE_FILE)


@posix
def test_a_directory_in_the_place_of_the_state(tmp_path):
    (tmp_path / TRAINER_STATE_FILE).mkdir()
    with pytest.raises(IsADirectoryError): load_trainer_state(tmp_path)


@posix
def test_mode_follows_umask(tmp_path):
    for mask in (0o022, 0o077, 0o002):
        old = os.umask(mask)
        try: save_checkpoint(tmp_path / f'{mask}', *trained()[::2], TrainerState())
        finally: os.umask(old)
        for path in (tmp_path / f'{mask}').iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_write_file_atomic(tmp_path):
    path = tmp_path / 'deep' / 'er' / 'file'
    write_file_atomic(path, lambda f: f.write(b'one'))
    for error in (ValueError, KeyboardInterrupt):
        def fails(file, error=error):
            file.write(b'x' * 300_000)
            raise error
        with pytest.raises(error): write_file_atomic(str(path), fails)
        assert contents(path.parent) == {'file': b'one'}
    write_file_atomic(path, lambda f: f.write(b'two'), durable=False)
    assert contents(path.parent) == {'file': b'two'}


# -- whole checkpoints ------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['ckpt_adamw', 'ckpt_groups'])
def test_golden_checkpoint(name, tmp_path):
    inits = np.load(GOLDENS / 'spirals.npz')
    params = {k: fucina.variable(inits[f'init/{k}'], inits[f'init/{k}'].ndim)
              for k in ('w1', 'w2', 'w3', 'b1', 'b2', 'b3')}
    opt = optim.AdamW(lr=0.02, weight_decay=1e-4)
    if name == 'ckpt_adamw':
        for t in params.values(): opt.add_param(t)
    else:
        opt = optim.OptimizerSet([optim.AdamW(weight_decay=0.01), optim.AdamW(weight_decay=0)])
        for k, t in params.items(): opt.members['b' in k].add_param(t)
    assert latest_committed(GOLDENS / name) == GOLDENS / name
    state = load_checkpoint(GOLDENS / name, params, opt)
    assert state == TrainerState(step=1000, seed=42)
    save_checkpoint(tmp_path, params, opt, state)
    assert contents(tmp_path) == contents(GOLDENS / name)


def test_round_trip(tmp_path):
    params, registry, opt = trained(2.0)
    for k, which in enumerate((params, registry)):
        save_checkpoint(tmp_path / str(k), which, opt, TrainerState(step=k), durable=False)
    for k in (0, 1):
        fresh, fresh_registry, fresh_opt = trained(5.0)
        memory = [t.value.ctypes.data for t in fresh.values()]
        which = (fresh_registry, fresh)[k]
        assert load_checkpoint(tmp_path / str(k), which, fresh_opt).step == k
        assert [t.value.ctypes.data for t in fresh.values()] == memory
        save_checkpoint(tmp_path / 'again', which, fresh_opt, TrainerState(step=k))
        assert contents(tmp_path / 'again') == contents(tmp_path / str(k))


def test_adapters_aliases_and_strictness(tmp_path):
    params, _, _ = trained()
    save_checkpoint(tmp_path, params, None, TrainerState(), tensor_file=ADAPTERS_STATE_FILE)
    assert sorted(contents(tmp_path)) == [ADAPTERS_STATE_FILE, TRAINER_STATE_FILE]
    with pytest.raises(FileNotFoundError): load_checkpoint(tmp_path, params)
    renamed = {'weight': model(7.0)['w'], 'b': model(7.0)['b']}
    with pytest.raises(errors.CheckpointUnknownNameError):
        load_checkpoint(tmp_path, renamed, tensor_file=ADAPTERS_STATE_FILE)
    assert (renamed['b'].numpy() == 7).all()
    load_checkpoint(tmp_path, renamed, tensor_file=ADAPTERS_STATE_FILE, strict=False)
    assert (renamed['weight'].numpy() == 7).all()
    assert renamed['b'].tolist() == params['b'].tolist()
    load_checkpoint(tmp_path, renamed, tensor_file=ADAPTERS_STATE_FILE, aliases={'w': 'weight'})
    assert renamed['weight'].tolist() == params['w'].tolist()


def test_no_optimizer_leaves_none_behind(tmp_path):
    params, _, opt = trained()
    save_checkpoint(tmp_path, params, opt, TrainerState(step=1))
    save_checkpoint(tmp_path, params, None, TrainerState(step=2))
    assert OPTIMIZER_STATE_FILE not in contents(tmp_path)
    assert load_checkpoint(tmp_path, params).step == 2
    with pytest.raises(FileNotFoundError): load_checkpoint(tmp_path, params, opt)


class Broken:
    def save_state(self, writer): raise errors.CheckpointInvalidNameError('before the first byte')


def test_what_can_be_checked_is_checked_first(tmp_path):
    params, _, opt = trained()
    twice = optim.AdamW()
    for t in model().values(): twice.add_param(t, name='same')
    bad_name = model()
    bad_name['__metadata__'] = bad_name.pop('w')
    for first in (True, False):
        folder = tmp_path / 'run'
        if not first: save_checkpoint(folder, params, opt, TrainerState(step=1))
        before = contents(folder) if not first else None
        for wrong, error in (((bad_name, opt, TrainerState()), errors.CheckpointInvalidNameError),
                             ((params, twice, TrainerState()), errors.CheckpointDuplicateNameError),
                             ((params, Broken(), TrainerState()), errors.CheckpointInvalidNameError),
                             ((params, opt, TrainerState(learning_rate=math.inf)),
                              errors.InvalidTrainerStateError)):
            with pytest.raises(error): save_checkpoint(folder, *wrong)
            assert (contents(folder) if folder.exists() else None) == before


def state_of(params, opt):
    stream = io.BytesIO()
    opt.save_state(stream)
    return [t.value.tobytes() for t in params.values()], stream.getvalue()


@pytest.mark.parametrize('damage', [MODEL_STATE_FILE, OPTIMIZER_STATE_FILE, 'names', 'missing'])
@pytest.mark.parametrize('of_a_set', [False, True])
def test_a_load_changes_all_or_nothing(tmp_path, damage, of_a_set):
    def wrapped(opt): return optim.OptimizerSet([opt]) if of_a_set else opt
    params, _, opt = trained(2.0)
    save_checkpoint(tmp_path, params, wrapped(opt), TrainerState())
    path = tmp_path / (damage if '.' in damage else OPTIMIZER_STATE_FILE)
    if damage == 'missing': path.unlink()
    elif '.' in damage: path.write_bytes(path.read_bytes()[:-1])
    other, _, other_opt = trained(5.0)
    before = state_of(other, other_opt)
    model = {'v': other['w'], 'b': other['b']} if damage == 'names' else other
    with pytest.raises((errors.FucinaError, FileNotFoundError)):
        load_checkpoint(tmp_path, model, wrapped(other_opt))
    assert state_of(other, other_opt) == before


@pytest.mark.parametrize('damage', [MODEL_STATE_FILE, OPTIMIZER_STATE_FILE, TRAINER_STATE_FILE, 'names'])
def test_an_error_names_its_file_once(tmp_path, damage):
    params, _, opt = trained(2.0)
    save_checkpoint(tmp_path, params, opt, TrainerState())
    path = tmp_path / (damage if '.' in damage else MODEL_STATE_FILE)
    if '.' in damage: path.write_bytes(path.read_bytes()[:-5])
    other, _, other_opt = trained(5.0)
    model = {'v': other['w'], 'b': other['b']} if damage == 'names' else other
    with pytest.raises(errors.FucinaError) as e: load_checkpoint(tmp_path, model, other_opt)
    assert str(e.value).startswith(f'{path}: ') and str(e.value).count(str(path)) == 1


def test_a_model_without_tensors_replaces_no_checkpoint(tmp_path):
    params, _, opt = trained(2.0)
    save_checkpoint(tmp_path, params, opt, TrainerState(step=1))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match='found no tensor'): save_checkpoint(tmp_path, 5, opt, TrainerState())
    assert contents(tmp_path) == before


def test_a_wrapped_optimizer_loads_all_or_nothing(tmp_path):
    if not hasattr(optim.AnyOptimizer, 'stage_state'): pytest.skip('no stage_state yet')
    params, _, opt = trained(2.0)
    save_checkpoint(tmp_path, params, optim.any_optimizer(opt), TrainerState(step=4))
    other, _, other_opt = trained(5.0)
    before, wrapped = state_of(other, other_opt), optim.any_optimizer(other_opt)
    path = tmp_path / OPTIMIZER_STATE_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(errors.FucinaError): load_checkpoint(tmp_path, other, wrapped)
    assert state_of(other, other_opt) == before
    path.write_bytes(whole)
    assert load_checkpoint(tmp_path, other, wrapped).step == 4
    assert state_of(other, other_opt) == state_of(params, opt)


class Foreign:
    "All that an optimizer needs for a checkpoint."
    def __init__(self, memory=b''): self.memory = memory
    def save_state(self, writer): writer.write(self.memory)
    def load_state(self, reader): self.memory = reader.read()


@pytest.mark.parametrize('memory', [b'', b'something'])
def test_any_object_with_two_methods(tmp_path, memory):
    params, other = model(), Foreign()
    save_checkpoint(tmp_path, params, Foreign(memory), TrainerState())
    load_checkpoint(tmp_path, params, other)
    assert other.memory == memory == (tmp_path / OPTIMIZER_STATE_FILE).read_bytes()


@pytest.mark.parametrize('dtype', ['bf16', 'f16'])
@pytest.mark.parametrize('steps', [0, 2])
def test_masters_follow_the_tensors(tmp_path, dtype, steps):
    def build(value):
        w, opt = fucina.variable(np.full((2, 3), value), 'a b', dtype=dtype), optim.AdamW(lr=0.01)
        opt.add_param(w, name='w')
        return {'w': w}, opt

    def step(params, opt, k):
        params['w'].set_grad(np.full((2, 3), 0.1 * (k + 1), np.float32))
        opt.step()
    params, opt = build(1.0)
    for k in range(steps): step(params, opt, k)
    save_checkpoint(tmp_path, params, opt, TrainerState(step=steps))
    other, other_opt = build(5.0)
    load_checkpoint(tmp_path, other, other_opt)
    for k in range(3):
        step(params, opt, k)
        step(other, other_opt, k)
        assert other['w'].bits.tolist() == params['w'].bits.tolist()


def test_saving_over_a_mapped_checkpoint(tmp_path):
    params, _, opt = trained()
    save_checkpoint(tmp_path, params, opt, TrainerState(step=1))
    old = params['w'].numpy().tobytes()
    with File.load_mmap(tmp_path / MODEL_STATE_FILE) as file:
        params['w'].value[...] = 9
        if os.name == 'nt':
            with pytest.raises(PermissionError, match='mapped'):
                save_checkpoint(tmp_path, params, opt, TrainerState(step=2))
        else:
            save_checkpoint(tmp_path, params, opt, TrainerState(step=2))
            assert bytes(file.tensor('w').data) == old
    save_checkpoint(tmp_path, params, opt, TrainerState(step=3))
    load_checkpoint(tmp_path, params, opt)
    save_checkpoint(tmp_path, params, opt, TrainerState(step=4))  # nothing stays mapped
    assert load_checkpoint(tmp_path, params).step == 4 and (params['w'].numpy() == 9).all()


class Recorder:
    "Notes what a save asks of the system, with the names of files instead of descriptors."
    NAMES = 'open', 'write', 'fsync', 'replace', 'unlink', 'mkdir'

    def __init__(self, monkeypatch):
        self.calls, self.paths = [], {}
        for name in self.NAMES: monkeypatch.setattr(os, name, self.watch(name, getattr(os, name)))

    def watch(self, name, real):
        def call(*args, **keywords):
            result = real(*args, **keywords)
            path = self.paths.get(args[0], args[0])
            if name == 'open': self.paths[result] = path
            if name == 'replace': path = args[1]
            leaf = Path(os.fspath(path)).name
            if '.tmp' in leaf: leaf = leaf[1:].rsplit('.', 2)[0]
            if name != 'open': self.calls.append(f'{name} {leaf}')
            return result
        return call


@posix
def test_order_of_the_calls(tmp_path, monkeypatch):
    params, _, opt = trained()
    folder = tmp_path / 'run'
    save_checkpoint(folder, params, opt, TrainerState(step=1))
    with monkeypatch.context() as m:
        seen = Recorder(m)
        save_checkpoint(folder, params, opt, TrainerState(step=2))
    expected = ['unlink trainer_state.json', 'fsync run']
    for leaf in (MODEL_STATE_FILE, OPTIMIZER_STATE_FILE, TRAINER_STATE_FILE):
        expected += [f'write {leaf}', f'fsync {leaf}', f'replace {leaf}', 'fsync run']
    assert seen.calls == expected
    with monkeypatch.context() as m:
        seen = Recorder(m)
        save_checkpoint(folder, params, opt, TrainerState(step=2), durable=False)
        rotate_checkpoints(folder, 1, durable=False)
    assert seen.calls == [call for call in expected if 'fsync' not in call]
    with monkeypatch.context() as m:
        seen = Recorder(m)
        save_checkpoint(tmp_path / 'x' / 'y', params, None, TrainerState())
    assert seen.calls[:5] == ['mkdir x', f'fsync {tmp_path.name}', 'mkdir y', 'fsync x', 'fsync y']


def test_where_the_system_knows_no_directories(tmp_path, monkeypatch):
    "As on Windows: nothing may depend on opening a directory."
    params, _, opt = trained()
    real = os.open

    def open_file(path, *args, **keywords):
        if os.path.isdir(path): raise PermissionError(13, 'Permission denied', path)
        return real(path, *args, **keywords)
    monkeypatch.setattr(os, 'open', open_file)
    monkeypatch.setattr(training_checkpoint, 'sync_directory', lambda path: None)
    monkeypatch.setattr('fucina.safetensors.sync_directory', lambda path: None)
    save_checkpoint(tmp_path / 'run', params, opt, TrainerState(step=1))
    assert load_checkpoint(tmp_path / 'run', params, opt).step == 1


# -- many under one root ----------------------------------------------------------------------

def commit(folder, step):
    begin_save(folder, durable=False)
    (folder / MODEL_STATE_FILE).write_text('any')
    save_trainer_state(folder, TrainerState(step=step), durable=False)
    return folder


def names(root): return sorted(p.name for p in root.iterdir())


def test_latest_committed(tmp_path):
    assert latest_committed(tmp_path) is None and latest_committed(tmp_path / 'missing') is None
    three = commit(tmp_path / 'checkpoint-step-3', 3)
    twenty = commit(tmp_path / 'checkpoint-step-20', 20)
    assert latest_committed(str(tmp_path)) == twenty and type(latest_committed(tmp_path)) is type(tmp_path)
    begin_save(tmp_path / 'checkpoint-step-99')                  # not committed
    (tmp_path / 'checkpoint-step-98').mkdir()
    (tmp_path / 'checkpoint-step-97').write_text('a file')
    (commit(tmp_path / 'checkpoint-step-96', 96) / TRAINER_STATE_FILE).write_text('{')
    (commit(tmp_path / 'checkpoint-step-95', 95) / TRAINER_STATE_FILE).write_text(head(version='2'))
    for name in ('checkpoint-step-', 'checkpoint-step-1x', 'checkpoint-step--1', 'checkpoint-epoch-9',
                 'xcheckpoint-step-9', 'checkpoint-step-9.old', '.trash-checkpoint-step-9',
                 'Checkpoint-step-9', 'checkpoint-step-٣'):
        commit(tmp_path / name, 1000)
    assert latest_committed(tmp_path) == twenty
    resumed = commit(tmp_path / 'checkpoint-step-1', 21)         # the count started again
    assert latest_committed(tmp_path) == resumed
    iteration = commit(tmp_path / 'checkpoint-iter-4', 21)       # a tie: the larger number
    assert latest_committed(tmp_path) == iteration
    commit(tmp_path, 20)
    assert latest_committed(tmp_path) == iteration
    commit(tmp_path, 21)                                         # a tie: the root
    assert latest_committed(tmp_path) == tmp_path
    commit(tmp_path, 2**64 - 1)
    assert latest_committed(tmp_path) == tmp_path and latest_committed(three) == three


@pytest.mark.parametrize('keep', [1, 2, 3])
def test_rotation(tmp_path, keep):
    made = [commit(tmp_path / f'checkpoint-step-{n}', n) for n in (2, 4, 6, 8, 10)]
    commit(tmp_path, 10)
    begin_save(tmp_path / 'checkpoint-step-99')
    (tmp_path / 'checkpoint-step-99' / MODEL_STATE_FILE).write_text('under way')
    for name in ('notes.txt', 'checkpoint-step-1.old', '.trash-other', 'trash-checkpoint-step-1'):
        (tmp_path / name).mkdir()
    others = set(names(tmp_path)) - {p.name for p in made}
    assert rotate_checkpoints(tmp_path, keep) == made[:-keep]
    assert set(names(tmp_path)) == others | {p.name for p in made[-keep:]}
    assert latest_committed(tmp_path) == tmp_path
    assert rotate_checkpoints(str(tmp_path), keep) == []


def test_rotation_of_a_resumed_run(tmp_path):
    first = [commit(tmp_path / f'checkpoint-step-{n}', n) for n in (1, 2, 3)]
    second = [commit(tmp_path / f'checkpoint-step-{n}', 3 + n) for n in (1, 2)]  # over the first
    assert rotate_checkpoints(tmp_path, 2) == [first[2]]
    assert latest_committed(tmp_path) == second[1]
    commit(tmp_path / 'checkpoint-step-7', 5)
    assert rotate_checkpoints(tmp_path, 1) == [second[0], second[1]]  # a tie of steps: by number


def test_rotation_wants_to_keep_something(tmp_path):
    made = commit(tmp_path / 'checkpoint-step-1', 1)
    for keep in (0, -1):
        with pytest.raises(errors.InvalidConfigError): rotate_checkpoints(tmp_path, keep)
    with pytest.raises(TypeError): rotate_checkpoints(tmp_path, 1.5)
    assert latest_committed(tmp_path) == made and rotate_checkpoints(tmp_path / 'missing', 1) == []


def test_rotation_removes_what_a_crash_left(tmp_path):
    made = [commit(tmp_path / f'checkpoint-iter-{n}', n) for n in (1, 2)]
    made[0].rename(tmp_path / '.trash-checkpoint-iter-1')
    (tmp_path / '.trash-checkpoint-iter-1' / TRAINER_STATE_FILE).unlink()
    commit(made[0], 1)
    assert rotate_checkpoints(tmp_path, 5) == [] and names(tmp_path) == [p.name for p in made]
    made[0].rename(tmp_path / '.trash-checkpoint-iter-1')
    assert latest_committed(tmp_path) == made[1]
    assert rotate_checkpoints(tmp_path, 1) == [] and names(tmp_path) == [made[1].name]


@pytest.mark.skipif(not hasattr(os, 'symlink') or sys.platform == 'win32', reason='no links')
def test_rotation_leaves_links_alone(tmp_path):
    elsewhere = commit(tmp_path / 'elsewhere', 1)
    root = tmp_path / 'root'
    commit(root / 'checkpoint-step-5', 5)
    (root / 'checkpoint-step-1').symlink_to(elsewhere)
    assert rotate_checkpoints(root, 1) == [] and (elsewhere / TRAINER_STATE_FILE).exists()


def test_odd_children_do_not_matter(tmp_path, monkeypatch):
    made = [commit(tmp_path / f'checkpoint-step-{n}', n) for n in (1, 2, 3)]
    closed, locked = commit(tmp_path / 'checkpoint-step-9', 9), commit(tmp_path / 'private', 10)
    real, asked = training_checkpoint.load_trainer_state, []
    def load(path):
        asked.append(path.name)
        if path in (closed, locked): raise PermissionError(13, 'injected', str(path))
        return real(path)
    monkeypatch.setattr(training_checkpoint, 'load_trainer_state', load)
    assert latest_committed(tmp_path) == made[2] and 'private' not in asked
    assert rotate_checkpoints(tmp_path, 2) == made[:1] and 'private' not in asked
    assert closed.exists() and locked.exists()


@pytest.mark.skipif(not hasattr(os, 'symlink') or sys.platform == 'win32', reason='no links')
def test_children_that_are_loops(tmp_path):
    made = commit(tmp_path / 'checkpoint-step-1', 1)
    for name in ('loop', 'checkpoint-step-7', '.trash-checkpoint-step-7'):
        (tmp_path / name).symlink_to(tmp_path / name)
    assert latest_committed(tmp_path) == made and rotate_checkpoints(tmp_path, 1) == []
    assert len(names(tmp_path)) == 4


def test_files_with_the_name_of_rubbish_stay(tmp_path):
    made = [commit(tmp_path / f'checkpoint-step-{n}', n) for n in (1, 2)]
    for name in ('.trash-checkpoint-step-1', '.trash-checkpoint-step-1.0', '.trash-notes'):
        (tmp_path / name).write_text('mine')
    commit(tmp_path / '.trash-checkpoint-step-1.1', 1)
    before = {*names(tmp_path)} - {'checkpoint-step-1', '.trash-checkpoint-step-1.1'}
    assert rotate_checkpoints(tmp_path, 1) == made[:1] and {*names(tmp_path)} == before
