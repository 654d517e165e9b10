"""PEFT directories: our own, those of the package itself, and every way to be neither."""
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as pypi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references import peft as peft_package

import fucina
from fucina import errors, lora
from fucina.errors import (
    CheckpointConfigMismatchError, CheckpointMissingEntryError, CheckpointShapeMismatchError,
    CheckpointUnknownNameError, FucinaError, PeftUnsupportedError, SafetensorsError)
from fucina.lora import Adapter, export_peft, import_peft
from fucina.lora import peft as chapter
from fucina.safetensors import File, TensorEntry, serialize_alloc

f32 = np.float32
CHAPTER = Path(__file__).parent.parent / 'nbs' / '12b_peft.ipynb'
CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
TABLE = {'q': 'self_attn.q_proj', 'k': 'self_attn.k_proj', 'v': 'self_attn.v_proj',
         'o': 'self_attn.o_proj', 'gate': 'mlp.gate_proj', 'up': 'mlp.up_proj',
         'down': 'mlp.down_proj'}
SIMPLE = {'one': 'fc1', 'two': 'fc2'}


def filled(adapter, seed=0):
    "Random numbers into A and B."
    g = np.random.default_rng(seed)
    for e in adapter.named_tensors_mut('x'):
        e.bytes.view(f32)[:] = g.standard_normal(e.bytes.size // 4, f32)
    return adapter


def adapter(n=6, m=5, rank=2, alpha=4.0, seed=0, tags=('in', 'out'), **more):
    return filled(Adapter(*tags, n, m, rank=rank, alpha=alpha, seed=seed, **more), seed)


def bits(a): return [e.bytes.tobytes() for e in a.named_tensors('x')], a.scale.tobytes()


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, a in wanted.items(): assert bits(found[name]) == bits(a)


def read(folder): return json.loads((folder / CONFIG).read_text())
def write(folder, **changes):
    (folder / CONFIG).write_text(json.dumps({**read(folder), **changes}))


def rewrite(folder, change):
    "Replace the tensors by what `change` makes of each, by name and array; None drops one."
    old = File.load(folder / TENSORS).tensors
    new = [entry for t in old for entry in [change(t.name, t.array)] if entry]
    (folder / TENSORS).write_bytes(serialize_alloc(
        [e if isinstance(e, TensorEntry) else TensorEntry(e[0], 'F32', e[1].shape, e[1]) for e in new]))


def refused(match, *args, error=PeftUnsupportedError, **keywords):
    with pytest.raises(error, match=match) as e: import_peft(*args, **keywords)
    assert type(e.value) is error
    assert '/' not in str(e.value) or str(args[0]) in str(e.value)


@pytest.fixture
def two(tmp_path):
    "A directory with two adapters."
    export_peft(tmp_path / 'two', {'one': adapter(), 'two': adapter(5, 4, seed=1)}, names=SIMPLE)
    return tmp_path / 'two'


# What is written


def test_the_files_are_those_of_the_specification(tmp_path):
    ours = {f'layers.{i}.{t}': adapter(seed=i, dropout_p=0.1) for i in (0, 10, 2) for t in TABLE}
    export_peft(tmp_path / 'a' / 'b', ours, base_model='org/model')
    text = (tmp_path / 'a' / 'b' / CONFIG).read_text()
    assert list(json.loads(text).items()) == [
        ('peft_type', 'LORA'), ('task_type', 'CAUSAL_LM'), ('base_model_name_or_path', 'org/model'),
        ('r', 2), ('lora_alpha', 4), ('lora_dropout', 0.1),
        ('target_modules', sorted(m.split('.')[1] for m in TABLE.values())), ('bias', 'none'),
        ('fan_in_fan_out', False), ('use_rslora', False), ('use_dora', False), ('inference_mode', True),
        ('init_lora_weights', True), ('layers_to_transform', None), ('layers_pattern', None),
        ('modules_to_save', None), ('rank_pattern', {}), ('alpha_pattern', {})]
    assert '"lora_alpha": 4,' in text
    raw = (tmp_path / 'a' / 'b' / TENSORS).read_bytes()
    assert File.parse(raw).metadata == {'format': 'pt'}
    assert sorted(os.listdir(tmp_path / 'a' / 'b')) == [CONFIG, TENSORS]
    found = pypi.load(raw)
    assert len(found) == 2 * len(ours)
    for name, a in ours.items():
        _, i, t = name.split('.')
        for side, matrix in (('A', a.a), ('B', a.b)):
            key = f'base_model.model.model.layers.{i}.{TABLE[t]}.lora_{side}.weight'
            assert found[key].dtype == f32 and found[key].shape == matrix.shape
            assert found[key].tobytes() == matrix.numpy().tobytes()


def test_what_is_exported_comes_back_bit_for_bit_and_in_the_order_of_the_layers(tmp_path):
    names = [f'layers.{i}.{t}' for i in (0, 2, 10) for t in TABLE]
    ours = {name: adapter(seed=k, alpha=2.5) for k, name in enumerate(names)}
    export_peft(tmp_path, dict(reversed(ours.items())), base_model='x')
    found = import_peft(tmp_path)
    assert list(found) == names and found.base_model == 'x'
    same(found, ours)
    assert found['layers.2.o'].a.tags == ('lora_r', 'attn')
    assert found['layers.2.down'].b.tags == ('embed', 'lora_r')
    before = [(tmp_path / f).read_bytes() for f in (CONFIG, TENSORS)]
    export_peft(tmp_path, found, found.base_model)
    assert [(tmp_path / f).read_bytes() for f in (CONFIG, TENSORS)] == before


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 4), numbers), min_size=1, max_size=5),
       st.floats(0, 0.9375, width=32))
def test_any_mixture_of_ranks_and_alphas_comes_back(tmp_path, kinds, p):
    ours = {f'm{k}': adapter(5, 4, rank, alpha + 0.0, k, dropout_p=p) for k, (rank, alpha) in enumerate(kinds)}
    names = {f'm{k}': f'a{"." * (k % 2)}b.{k // 2}.x' for k in range(len(kinds))}
    export_peft(tmp_path, ours, names=names, durable=False)
    found = import_peft(tmp_path, names=names)
    same(found, ours)
    assert {a.dropout_p for a in found.values()} == {f32(p)}


def test_every_bit_pattern_survives(tmp_path):
    a = adapter(4, 4, 4)
    odd = [0x7fc00001, 0x7f800001, 0xff800000, 0x80000000, 1, 0x807fffff, 0x7f7fffff, 0]
    a.named_tensors_mut('x')[0].bytes.view(np.uint32)[:] = odd * 2
    export_peft(tmp_path, {'one': a}, names=SIMPLE)
    same(import_peft(tmp_path, names=SIMPLE), {'one': a})


def test_names_replace_the_table(tmp_path):
    a = adapter()
    for names, name in ((None, 'one'), (None, 'layers.00.q'), (None, 'layers.0.x'), (None, 'layers.0.q.w'),
                        (None, 'model.layers.0.self_attn.q_proj'), (SIMPLE, 'layers.0.q'), ({}, 'one')):
        with pytest.raises(PeftUnsupportedError, match='no module is known'):
            export_peft(tmp_path / 'no', {name: a}, names=names)
    for bad in ('', 'a..b', 'a b', 'a/b', '../a', 'é', 'a\n', '.a'):
        with pytest.raises(PeftUnsupportedError, match='no path'):
            export_peft(tmp_path / 'no', {'one': a}, names={'one': bad})
    with pytest.raises(PeftUnsupportedError, match='two adapters'):
        export_peft(tmp_path / 'no', {'one': a, 'two': a}, names={'one': 'x', 'two': 'x'})
    assert not (tmp_path / 'no').exists()

    export_peft(tmp_path / 'yes', {'layers.0.q': a}, names={'layers.0.q': 'decoder.attn.wq'})
    config = read(tmp_path / 'yes')
    assert config['target_modules'] == ['decoder.attn.wq'] and config['task_type'] is None
    refused('no name is known', tmp_path / 'yes')
    refused('no name is known', tmp_path / 'yes', names=SIMPLE)
    with pytest.raises(ValueError, match='two adapters'):
        import_peft(tmp_path / 'yes', names={'one': 'x', 'two': 'x'})
    found = import_peft(tmp_path / 'yes', names={'layers.0.q': 'decoder.attn.wq', 'unused': 'x'})
    assert found['layers.0.q'].a.tags == ('lora_r', 'embed')


def test_axes_of_imported_adapters(two):
    found = import_peft(two, names=SIMPLE, tags={'two': ('x', 'y')})
    assert found['one'].a.tags == ('lora_r', 'in') and found['one'].b.tags == ('out', 'lora_r')
    assert found['two'].a.tags == ('lora_r', 'x') and found['two'].b.tags == ('y', 'lora_r')


def test_what_cannot_be_exported_leaves_no_trace(tmp_path):
    for match, adapters in (('no adapter', {}), ('dropout', {'one': adapter(dropout_p=0.5), 'two': adapter()}),
                            ('alpha', {'one': adapter(), 'two': adapter(alpha=math.inf)})):
        with pytest.raises(PeftUnsupportedError, match=match):
            export_peft(tmp_path / 'no', adapters, names=SIMPLE)
    with pytest.raises(TypeError, match='no adapter but'):
        export_peft(tmp_path / 'no', {'one': adapter().a}, names=SIMPLE)
    with pytest.raises(TypeError, match='base_model'):
        export_peft(tmp_path / 'no', {'one': adapter()}, Path('x'), names=SIMPLE)
    assert not (tmp_path / 'no').exists()


@pytest.mark.parametrize('base_model', ['\ud800', 'x' * 2**22])
def test_settings_that_could_not_be_read_back_are_not_written(tmp_path, base_model):
    with pytest.raises(PeftUnsupportedError, match='base_model'):
        export_peft(tmp_path / 'x', {'one': adapter()}, base_model, names=SIMPLE)
    assert not any(tmp_path.iterdir())


def test_arguments_of_other_types_are_named(two):
    before = {name: bits(a) for name, a in import_peft(two, names=SIMPLE).items()}
    into = {'one': adapter(seed=7), 'two': 3}
    untouched = bits(into['one'])
    for match, call in (
            ("'two' is no adapter but int", lambda: import_peft(two, names=SIMPLE, into=into)),
            ('names: 3 is no str', lambda: import_peft(two, names={'one': 3})),
            ('names: 3 is no str', lambda: export_peft(two, {'one': adapter()}, names={'one': 3})),
            ('tags is a mapping', lambda: import_peft(two, names=SIMPLE, tags='in out')),
            ("tags: 'one' has two axes", lambda: import_peft(two, names=SIMPLE, tags={'one': 'in'}))):
        with pytest.raises(TypeError, match=match): call()
    assert bits(into['one']) == untouched
    assert {name: bits(a) for name, a in import_peft(two, names=SIMPLE).items()} == before


def test_after_a_failure_new_numbers_never_stand_beside_an_old_alpha(two, monkeypatch):
    old, real = {f: (two / f).read_bytes() for f in (CONFIG, TENSORS)}, os.replace
    for fail_at in range(2):
        for f, raw in old.items(): (two / f).write_bytes(raw)
        calls = iter(range(9))
        def replace(*args):
            if next(calls) == fail_at: raise OSError('the disk is full')
            return real(*args)
        monkeypatch.setattr(os, 'replace', replace)
        with pytest.raises(OSError, match='full'):
            export_peft(two, {'one': adapter(alpha=64)}, names=SIMPLE)
        monkeypatch.undo()
        assert os.listdir(two) == [TENSORS]
        with pytest.raises(FileNotFoundError): import_peft(two, names=SIMPLE)


# What is read


@pytest.mark.parametrize('change', [
    lambda k: k.removeprefix('base_model.model.'),
    lambda k: k.replace('.weight', '.default.weight'),
    lambda k: k.removeprefix('base_model.model.').replace('.weight', '.my-own_name.weight')])
def test_prefix_and_name_of_the_adapter_are_optional(two, change):
    wanted = import_peft(two, names=SIMPLE)
    rewrite(two, lambda key, a: (change(key), a))
    same(import_peft(two, names=SIMPLE), wanted)


@pytest.mark.parametrize('dtype', ['F16', 'BF16'])
def test_half_precision_is_widened_exactly(two, dtype):
    "Every finite value of 16 bits, in a file whose data are not aligned."
    g = np.random.default_rng(0)
    half = np.arange(2**16, dtype=np.uint16)
    exponent = 0x7c00 if dtype == 'F16' else 0x7f80
    half = half[half & exponent != exponent].reshape(2, -1)
    other = g.integers(0, exponent, (half.shape[1], 2)).astype(np.uint16)
    entries = [TensorEntry(f'fc1.lora_{s}.weight', dtype, a.shape, a) for s, a in (('A', half), ('B', other))]
    raw = serialize_alloc(entries)
    n = int.from_bytes(raw[:8], 'little')
    text = raw[8:8 + n].rstrip()
    text += b' ' * ((len(text) + 1) % 2)  # ends on an odd byte
    (two / TENSORS).write_bytes(len(text).to_bytes(8, 'little') + text + raw[8 + n:])
    found = import_peft(two, names=SIMPLE)['one']
    for t, a in ((found.a, half), (found.b, other)):
        if dtype == 'F16': wanted = a.view(np.float16).astype(f32)
        else: wanted = (a.astype(np.uint32) << 16).view(f32)
        assert t.numpy().tobytes() == wanted.tobytes()


def test_rank_stabilised_adapters_get_another_alpha(two):
    write(two, use_rslora=True, lora_alpha=3, alpha_pattern={'fc2': 0.7})
    found = import_peft(two, names=SIMPLE)
    for name, alpha in (('one', 3), ('two', 0.7)):
        assert found[name].alpha == f32(alpha * math.sqrt(2))
        assert abs(found[name].scale / (alpha / math.sqrt(2)) - 1) < 2**-22


@pytest.mark.parametrize('patterns, wanted', [
    ({'fc1': 3}, (3, 4)), ({'^fc1': 3}, (3, 4)), ({'fc2': 5, 'fc1': 3}, (3, 5)), ({'c1': 3}, (4, 4)),
    ({'fc.': 9}, (9, 9)), ({'f.1': 9}, (9, 4)), ({'..1': 9, 'fc.': 5}, (9, 5)), ({r'fc\.': 9}, (4, 4)),
    ({'^..2': 9}, (4, 9)), ({'.fc1': 9}, (4, 4)), ({'...': 8, 'fc1': 9}, (8, 8)), ({'c.': 9}, (4, 4)),
    ({'fc1': 3, '^fc1': 7}, (3, 4)), ({'^fc1': 7, 'fc1': 3}, (7, 4)), ({'x.fc1': 3}, (4, 4)), (None, (4, 4))])
def test_patterns_name_modules(two, patterns, wanted):
    write(two, alpha_pattern=patterns)
    found = import_peft(two, names=SIMPLE)
    assert (found['one'].alpha, found['two'].alpha) == wanted


def test_patterns_end_with_whole_parts_of_a_path(tmp_path):
    names = {'one': 'block.0.fc1', 'two': 'fc1'}
    export_peft(tmp_path, {'one': adapter(), 'two': adapter()}, names=names)
    for patterns, wanted in (({r'^fc1': 3}, (4, 3)), ({'0.fc1': 3}, (3, 4)), ({r'block\.0\.fc1': 3}, (3, 4)),
                             ({'fc1': 3}, (3, 3)), ({'^0.fc1': 3}, (4, 4)), ({'block.0': 3}, (4, 4))):
        write(tmp_path, alpha_pattern=patterns)
        found = import_peft(tmp_path, names=names)
        assert (found['one'].alpha, found['two'].alpha) == wanted


signs = st.lists(st.sampled_from(['a', 'b', '_', '.', r'\.']), min_size=1, max_size=6).map(''.join)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text('ab_.', min_size=1, max_size=6), min_size=1, max_size=5),
       st.lists(st.tuples(st.sampled_from(['', '^']), signs).map(''.join), max_size=6))
def test_patterns_fit_what_the_package_says_they_fit(modules, patterns):
    config = dict(r=1, lora_alpha=-1, alpha_pattern={pattern: k for k, pattern in enumerate(patterns)})
    for module in modules:
        fits = [k for k, pattern in enumerate(config['alpha_pattern'])
                if re.match(rf'(.*\.)?({pattern})$', module)]  # as peft.utils.other.get_pattern_key does
        wanted = list(config['alpha_pattern'].values())[fits[0]] if fits else -1
        assert chapter._settings(config).of(module) == (1, wanted)


def test_many_patterns_take_no_longer_than_many_modules(two):
    write(two, alpha_pattern={f'blocks.{k}.fc{j}': 3 for k in range(9999) for j in (1, 2)} | {'fc1': 5})
    assert import_peft(two, names=SIMPLE)['one'].alpha == 5
    write(two, alpha_pattern={'a' * k: 3 for k in range(1, 1001)})
    assert import_peft(two, names=SIMPLE)['one'].alpha == 4
    write(two, alpha_pattern={'a' * k: 3 for k in range(1, 1002)})
    refused('alpha_pattern: patterns of more', two, names=SIMPLE)


NEUTRAL = dict(use_dora=False, lora_bias=False, modules_to_save=[], layer_replication=None, loftq_config={},
               from_next_year=None, target_modules='.*(a|b)$', exclude_modules=['x'], task_type='SEQ_CLS',
               layers_to_transform=[1], layers_pattern='h', auto_mapping={'a': 'b'}, peft_version='9',
               revision='main', qalora_group_size=16, megatron_core='megatron.core', inference_mode=False,
               eva_config={'rho': 2.0}, init_lora_weights='gaussian', bias='none', fan_in_fan_out=False)


def test_settings_that_change_nothing_are_accepted(two):
    wanted = import_peft(two, names=SIMPLE)
    write(two, **NEUTRAL)
    same(import_peft(two, names=SIMPLE), wanted)
    (two / CONFIG).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    found = import_peft(two, names=SIMPLE)
    same(found, wanted)
    assert found.base_model is None and found['one'].dropout_p == 0


REFUSED = dict(
    peft_type=['IA3', 'ADALORA', None, 1], use_dora=[True, 1, 'yes'], bias=['all', 'lora_only', None, True],
    fan_in_fan_out=[True], modules_to_save=[['lm_head'], 'lm_head'], lora_bias=[True], use_qalora=[True],
    layer_replication=[[[0, 4]]], target_parameters=[['w']], trainable_token_indices=[[1]],
    alora_invocation_tokens=[[1]], loftq_config=[{'bits': 4}], corda_config=[{}, {'a': 1}][1:],
    megatron_config=[{'a': 1}], arrow_config=[{'a': 1}], velora_config=[{'a': 1}], kasa_config=[{'a': 1}],
    use_bdlora=[{'a': 1}], monteclora_config=[{'a': 1}], ensure_weight_tying=[True], from_next_year=[True, 0, 0.0, ''],
    init_lora_weights=['pissa', 'pissa_niter_4', 'olora', 'corda', 'loftq', 'lora_ga', 'mica', 1, 0, [], {}],
    r=[0, -1, 2.0, True, '2', None, 2**31, 3, 1], lora_alpha=['4', None, True, [], 1e39, 10**400],
    lora_dropout=[-0.1, 1, 1.0, 0.99999999999, 'x', None, True], use_rslora=[1, 'x', []], base_model_name_or_path=[1, ['x']],
    rank_pattern=[{'fc1': 3}, {'fc1': '2'}, {'fc1': 0}, {'f.*': 2}, {'(a+)+$': 2}, {'': 2}, {'^': 2}, {'a^': 2},
                  {'fc[12]': 2}, {'fc1\n': 2}, ['fc1'], 'fc1', 1],
    alpha_pattern=[{'fc1': '2'}, {'fc1': None}, {'fc1|fc2': 2}, {'\\w': 1}, [1]])


@pytest.mark.parametrize('key, value', [(key, v) for key, values in REFUSED.items() for v in values])
def test_settings_are_refused_by_name(two, key, value):
    write(two, **{key: value})
    other = f'rank {value}' if key == 'r' and type(value) is int else 'rank 3' if value == {'fc1': 3} else key
    refused(other if key in ('r', 'rank_pattern') and value not in (0, -1, 2**31) else key, two, names=SIMPLE)


@pytest.mark.parametrize('text', [
    '', '{', '[]', 'null', '"LORA"', '{"peft_type": "LORA", "peft_type": "LORA", "r": 2, "lora_alpha": 4}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}', '{"peft_type": "LORA", "r": 2, "lora_alpha": 1e999}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": 4} x', '\ufeff{"peft_type": "LORA", "r": 2, "lora_alpha": 4}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"\\ud800": 2}}', '[' * 100_000,
    '{"peft_type": "LORA", "r": ' + '9' * 10_000 + ', "lora_alpha": 4}', '{"r": 2, "lora_alpha": 4}',
    '{"peft_type": "LORA", "lora_alpha": 4}', '{"peft_type": "LORA", "r": 2}', '{"a": "\x01"}'])
def test_settings_are_json_to_the_letter(two, text):
    (two / CONFIG).write_text(text, encoding='utf-8')
    refused(CONFIG, two, names=SIMPLE)


def test_settings_have_a_size_and_an_encoding(two):
    raw = (two / CONFIG).read_bytes()
    (two / CONFIG).write_bytes(raw + b' ' * 2**22)
    refused('more than', two, names=SIMPLE)
    (two / CONFIG).write_bytes(raw + b' ' * (2**22 - len(raw)))
    import_peft(two, names=SIMPLE)
    (two / CONFIG).write_bytes(raw[:-2] + b', "\xff": null}')
    refused('utf-8', two, names=SIMPLE)


@pytest.mark.parametrize('match, change', [
    ('lora_embedding_A', lambda k, a: (k.replace('lora_A', 'lora_embedding_A'), a)),
    ('lora_embedding_B', lambda k, a: (k.replace('lora_B.weight', 'lora_embedding_B'), a)),
    ('magnitude', lambda k, a: (k.replace('lora_A', 'lora_magnitude_vector'), a)),
    ('lora_B.bias', lambda k, a: (k.replace('lora_B.weight', 'lora_B.bias'), a)),
    ('lm_head', lambda k, a: ('base_model.model.lm_head.weight', a) if 'fc1.lora_A' in k else (k, a)),
    ('fc3', lambda k, a: (k.replace('fc2', 'fc3'), a)),
    (r"'x\.fc2'", lambda k, a: (k.replace('fc2', 'x.fc2'), a)),
    ('several adapters', lambda k, a: (k.replace('fc2.lora_A', 'fc2.lora_A.other'), a)),
    ('several adapters', lambda k, a: (k.replace('.weight', '.x.weight' if 'fc1' in k else '.y.weight'), a)),
    ('two tensors lora_A', lambda k, a: ('fc1.lora_A.weight', a) if 'fc2.lora_A' in k else (k, a)),
    ('fc2 has no lora_B', lambda k, a: None if 'fc2.lora_B' in k else (k, a)),
    ('fc2 has no lora_A', lambda k, a: None if 'fc2.lora_A' in k else (k, a)),
    ('no adapter', lambda k, a: None),
    ('no matrix', lambda k, a: (k, a[None] if 'fc1' in k else a)),
    ('no matrix', lambda k, a: (k, a.ravel() if 'fc1' in k else a)),
    ('rank 2 by the settings, 2 by A, 1 by B', lambda k, a: (k, a[:, :1].copy() if 'fc1.lora_B' in k else a)),
    ('fc1: rank 2 by the settings, 5 by A, 2 by B', lambda k, a: (k, a[[0, 1, 0, 1, 0]] if 'fc1.lora_A' in k else a)),
    ('exceeds the smaller side', lambda k, a: (k, a[:, :1].copy() if 'lora_A' in k else a)),
    ('exceeds the smaller side', lambda k, a: (k, a[:0].copy() if 'lora_B' in k else a)),
    ('I64', lambda k, a: TensorEntry(k, 'I64', a.shape, np.zeros(a.shape, np.int64)) if 'fc1' in k else (k, a)),
    ('F64', lambda k, a: TensorEntry(k, 'F64', a.shape, a.astype(np.float64)) if 'fc2' in k else (k, a)),
    ('U8', lambda k, a: TensorEntry(k, 'U8', a.shape, np.zeros(a.shape, np.uint8))),
    ('F8_E4M3', lambda k, a: TensorEntry(k, 'F8_E4M3', a.shape, np.zeros(a.shape, np.uint8))),
    ('fc1.weight', lambda k, a: ('fc1.weight', a) if 'fc1.lora_A' in k else (k, a)),
    ('no A or B', lambda k, a: (k.replace('fc1', 'fc1\n'), a)),
    ('no A or B', lambda k, a: (k.replace('.weight', '.x.y.weight'), a)),
    ('no A or B', lambda k, a: (k.replace('lora_A', 'lora_a'), a))])
def test_tensors_are_refused_by_name(two, match, change):
    rewrite(two, change)
    refused(match, two, names=SIMPLE)


@pytest.mark.parametrize('name', ['model.layers.0.self_attn.x_proj', 'model.layers.01.self_attn.q_proj', 'layers.0.self_attn.q_proj',
                                  'model.layers.-1.mlp.up_proj', 'model.layers.٣.mlp.up_proj', 'model.layers.0.mlp.q_proj',
                                  'model.model.layers.0.mlp.up_proj', 'model.embed_tokens', 'lm_head', 'model.layers.0.mlp'])
def test_unknown_suffixes_are_refused(tmp_path, name):
    export_peft(tmp_path, {'layers.0.up': adapter()})
    rewrite(tmp_path, lambda k, a: (k.replace('model.layers.0.mlp.up_proj', name), a))
    refused('no name is known', tmp_path)


def test_a_layer_may_have_any_number(tmp_path):
    ours = {f'layers.{"1" * n}.q': adapter(seed=n) for n in (1, 2, 30, 5000)}
    export_peft(tmp_path, dict(reversed(ours.items())))
    found = import_peft(tmp_path)
    same(found, ours)
    assert list(found) == list(ours)


def test_pickles_and_parts_are_refused_by_name(two):
    raw = (two / TENSORS).read_bytes()
    (two / 'adapter_model.bin').write_bytes(b'whatever')
    import_peft(two, names=SIMPLE)  # not looked at
    (two / TENSORS).unlink()
    refused('adapter_model.bin: a pickle', two, names=SIMPLE)
    (two / 'adapter_model.bin').unlink()
    (two / f'{TENSORS}.index.json').write_text('{}')
    refused('index.json', two, names=SIMPLE)
    (two / f'{TENSORS}.index.json').unlink()
    with pytest.raises(FileNotFoundError): import_peft(two, names=SIMPLE)
    (two / TENSORS).write_bytes(raw)
    (two / CONFIG).unlink()
    with pytest.raises(FileNotFoundError): import_peft(two, names=SIMPLE)
    with pytest.raises(FileNotFoundError): import_peft(two / 'nowhere')
    with pytest.raises((NotADirectoryError, FileNotFoundError)): import_peft(two / TENSORS)


@pytest.mark.skipif(os.name == 'nt', reason='a matter of POSIX')
@pytest.mark.parametrize('leaf', [CONFIG, TENSORS])
def test_only_regular_files_are_opened(two, leaf):
    raw = (two / leaf).read_bytes()
    (two / leaf).unlink()
    for make in (os.mkfifo, os.mkdir):
        make(two / leaf)
        refused('no regular file', two, names=SIMPLE)
        (two / leaf).rmdir() if make is os.mkdir else (two / leaf).unlink()
    for target in ('/dev/zero', '/dev/full'):
        (two / leaf).symlink_to(target)
        refused('no regular file', two, names=SIMPLE)
        (two / leaf).unlink()
    (two / 'elsewhere').write_bytes(raw)
    (two / leaf).symlink_to('elsewhere')  # as in a cache of downloads
    import_peft(two, names=SIMPLE)


def test_the_container_is_checked_by_its_own_rules(two):
    raw = (two / TENSORS).read_bytes()
    for bad in (b'', raw[:-1], raw + b'x', raw[:40], b'\xff' * 16, raw[:8] + b'[' + raw[9:]):
        (two / TENSORS).write_bytes(bad)
        with pytest.raises(SafetensorsError, match=TENSORS): import_peft(two, names=SIMPLE)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_refused_or_harmless(tmp_path, data):
    "Any change of bytes: an error of the package, or adapters of the right sizes."
    folder = tmp_path / 'damaged'
    export_peft(folder, {'one': adapter(), 'two': adapter(5, 4, seed=1)}, names=SIMPLE, durable=False)
    leaf = data.draw(st.sampled_from([CONFIG, TENSORS]))
    raw = bytearray((folder / leaf).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        k = data.draw(st.integers(0, min(len(raw), 700) - 1))
        raw[k:k + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    (folder / leaf).write_bytes(raw)
    into = {'one': adapter(seed=7), 'two': adapter(5, 4, seed=8)}
    before = [bits(a) for a in into.values()]
    try: import_peft(folder, names=SIMPLE, into=into)
    except FucinaError: assert [bits(a) for a in into.values()] == before


# Into adapters that exist


def test_filling_is_all_or_nothing(two):
    def fails(error, into, match):
        before = [bits(a) for a in into.values()]
        refused(match, two, error=error, names=SIMPLE, into=into)
        assert [bits(a) for a in into.values()] == before

    def fresh(): return {'one': adapter(seed=5), 'two': adapter(5, 4, seed=6)}
    fails(CheckpointShapeMismatchError, {**fresh(), 'two': adapter(5, 4, rank=3)}, 'two.lora_a')
    fails(CheckpointShapeMismatchError, {**fresh(), 'two': adapter(5, 5)}, 'two.lora_b')
    fails(CheckpointConfigMismatchError, {**fresh(), 'two': adapter(5, 4, alpha=5)}, 'alpha 5, in the directory 4')
    fails(CheckpointMissingEntryError, {**fresh(), 'three': adapter()}, 'three')
    fails(CheckpointUnknownNameError, {'one': adapter(seed=5)}, 'two')
    into = fresh()
    memory = [t.data_const() for a in into.values() for t in a.parameters()]
    found = import_peft(two, names=SIMPLE, into=into)
    assert [*map(id, found.values())] == [*map(id, into.values())]
    same(into, import_peft(two, names=SIMPLE))
    for t, was in zip([t for a in into.values() for t in a.parameters()], memory):
        assert np.shares_memory(t.data_const(), was)


def test_a_set_in_a_model_is_exported_and_filled(tmp_path):
    def attached(seed):
        model = fucina.nn.MLP((6, 5, 4), seed=0)
        return model, lora.attach(model, ['layers.0.w', 'layers.1.w'], rank=2, alpha=4, seed=seed)
    names = {'layers.0.w': 'net.0', 'layers.1.w': 'net.2'}
    x = fucina.constant(np.random.default_rng(0).standard_normal((3, 6)), 'batch in')
    model, adapters = attached(1)
    for k, a in enumerate(adapters.values()): filled(a, k)
    export_peft(tmp_path, adapters, names=names)
    other, others = attached(2)
    import_peft(tmp_path, names=names, into=others)
    assert other(x).numpy().tobytes() == model(x).numpy().tobytes()


def test_a_trained_adapter_notices_an_import_between_forward_and_backward(two):
    a = import_peft(two, names=SIMPLE)
    x = fucina.constant(np.ones((2, 6)), 'batch in')
    with fucina.ExecContext(debug=True), fucina.exec_scope():
        loss = a['one'].delta(x).sum_all()
        import_peft(two, names=SIMPLE, into=a)
        with pytest.raises(errors.StaleGraphError): loss.backward()


# The package itself


@pytest.fixture(scope='module')
def peft():
    found = peft_package()
    if found is None: pytest.skip('peft is not installed')
    return found


@pytest.fixture(scope='module')
def torch(peft): return pytest.importorskip('torch')


def torch_net(torch, bias=True):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(6, 5, bias), torch.nn.Linear(5, 4, bias)

        def forward(self, x): return self.fc2(torch.tanh(self.fc1(x)))
    torch.manual_seed(0)
    return Net()


def randomised(torch, model):
    "Numbers into every B, which starts at zero."
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'lora_' in name: p.normal_()
    return model


def our_net(torch, net, adapters):
    "The same network here, with adapters `one` and `two`."
    layers = [(fucina.constant(layer.weight.detach().numpy(), tags), fucina.constant(layer.bias.detach().numpy(), tags[:1]))
              for layer, tags in ((net.fc1, ('h', 'in')), (net.fc2, ('out', 'h')))]

    def forward(x):
        (w1, b1), (w2, b2) = layers
        h = (adapters['one'].apply(x, x.dot(w1, 'in')) + b1).tanh()
        return adapters['two'].apply(h, h.dot(w2, 'h')) + b2
    return forward


TAGS = {'one': ('in', 'h'), 'two': ('h', 'out')}
X = np.random.default_rng(3).standard_normal((7, 6)).astype(f32)


def close(ours, theirs):
    theirs = theirs.detach().numpy()
    assert abs(ours - theirs).max() <= 1e-5 * max(1, abs(theirs).max())


@pytest.mark.parametrize('rslora', [False, True])
@pytest.mark.parametrize('n, m, r, alpha', [(6, 5, 1, 1), (6, 5, 2, 16), (33, 64, 8, 16), (16, 16, 16, 5), (9, 40, 3, 0.5)])
def test_forward_gradients_and_merge_agree_with_peft(peft, torch, tmp_path, n, m, r, alpha, rslora):
    base = torch.nn.Sequential(torch.nn.Linear(n, m, bias=False))
    w = base[0].weight.detach().numpy().copy()
    config = peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=['0'], use_rslora=rslora, lora_dropout=0.5)
    theirs = randomised(torch, peft.get_peft_model(base, config)).eval()
    theirs.save_pretrained(tmp_path)
    a = import_peft(tmp_path, names={'w': '0'})['w']
    assert a.dropout_p == f32(0.5) and abs(a.scale / (alpha / (math.sqrt(r) if rslora else r)) - 1) < 2**-22

    g = np.random.default_rng(0)
    x, weight = g.standard_normal((4, n)).astype(f32), g.standard_normal((4, m)).astype(f32)
    tx = torch.tensor(x, requires_grad=True)
    y = theirs(tx)
    (y * torch.from_numpy(weight)).sum().backward()
    for mode in ('blas', 'pinned'):
        ox = fucina.variable(x, 'batch in')
        with fucina.ExecContext(gemm=mode), fucina.exec_scope():
            out = a.apply(ox, ox.dot(fucina.constant(w, 'out in'), 'in'))
            close(out.numpy(), y)
            (out * fucina.constant(weight, 'batch out')).sum_all().backward()
            layer = theirs.base_model.model[0]
            close(a.a.grad.numpy(), layer.lora_A.default.weight.grad)
            close(a.b.grad.numpy(), layer.lora_B.default.weight.grad)
            close(ox.grad.numpy(), tx.grad)
            a.a.zero_grad(); a.b.zero_grad()
    ours = fucina.constant(w, 'out in').to('f32')
    a.merge_into(ours)
    close(ours.numpy(), theirs.merge_and_unload()[0].weight)


def test_adapters_go_both_ways(peft, torch, tmp_path):
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=['fc1', 'fc2'])
    theirs = randomised(torch, peft.get_peft_model(torch_net(torch), config)).eval()
    theirs.save_pretrained(tmp_path / 'theirs')
    found = import_peft(tmp_path / 'theirs', names=SIMPLE, tags=TAGS)
    ours = our_net(torch, torch_net(torch), found)
    close(ours(fucina.constant(X, 'batch in')).numpy(), theirs(torch.from_numpy(X)))

    export_peft(tmp_path / 'ours', found, names=SIMPLE)
    assert (tmp_path / 'ours' / TENSORS).read_bytes() == (tmp_path / 'theirs' / TENSORS).read_bytes()
    again = peft.PeftModel.from_pretrained(torch_net(torch), tmp_path / 'ours').eval()
    assert torch.equal(again(torch.from_numpy(X)), theirs(torch.from_numpy(X)))


def test_what_the_package_writes_about_patterns_is_understood_and_so_is_ours(peft, torch, tmp_path):
    for k, more in enumerate((dict(rank_pattern={'fc1': 3}), dict(alpha_pattern={'^fc2': 5}), dict(use_rslora=True, rank_pattern={'fc2': 4}),
                              dict(rank_pattern={'^fc1': 1}, alpha_pattern={'fc1': 0.25, 'fc2': 9}), dict(init_lora_weights='orthogonal'),
                              dict(alpha_pattern={'fc.': 9}), dict(alpha_pattern={'f.1': 9}), dict(alpha_pattern={'..2': 9, '^f..': 7}),
                              dict(rank_pattern={'^...': 4}), dict(init_lora_weights=False), dict(init_lora_weights='gaussian'))):
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=['fc1', 'fc2'], **more)
        theirs = randomised(torch, peft.get_peft_model(torch_net(torch), config)).eval()
        theirs.save_pretrained(tmp_path / f'{k}')
        found = import_peft(tmp_path / f'{k}', names=SIMPLE, tags=TAGS)
        close(our_net(torch, torch_net(torch), found)(fucina.constant(X, 'batch in')).numpy(), theirs(torch.from_numpy(X)))
        export_peft(tmp_path / 'ours', found, names=SIMPLE)
        again = peft.PeftModel.from_pretrained(torch_net(torch), tmp_path / 'ours').eval()
        close(again(torch.from_numpy(X)).detach().numpy(), theirs(torch.from_numpy(X)))


def test_our_patterns_tell_modules_apart_that_end_alike(peft, torch, tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.block, self.block_fc = (torch.nn.Linear(6, 6) for _ in range(3))
            self.block.fc = torch.nn.Linear(6, 6)
    ours = {name: adapter(6, 6, rank, alpha, rank) for name, rank, alpha in
            (('fc', 1, 2), ('block.fc', 2, 3), ('block_fc', 3, 4))}
    export_peft(tmp_path, ours, names={name: name for name in ours})
    theirs = peft.PeftModel.from_pretrained(Net(), tmp_path)
    for name, a in ours.items():
        layer = theirs.base_model.model.get_submodule(name)
        assert layer.r['default'] == a.rank and layer.scaling['default'] == a.scale
        assert layer.lora_B.default.weight.detach().numpy().tobytes() == a.b.numpy().tobytes()


@pytest.mark.filterwarnings('ignore::FutureWarning')  # of transformers about itself
@pytest.mark.parametrize('family', ['Qwen3', 'Llama'])
def test_the_table_fits_the_models(peft, torch, tmp_path, family):
    transformers = pytest.importorskip('transformers')
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                 head_dim=12, vocab_size=11, max_position_embeddings=32)

    def model():
        torch.manual_seed(0)
        return getattr(transformers, f'{family}ForCausalLM')(getattr(transformers, f'{family}Config')(**sizes)).eval()
    dims = {'q': (16, 24), 'k': (16, 12), 'v': (16, 12), 'o': (24, 16), 'gate': (16, 24), 'up': (16, 24), 'down': (24, 16)}
    ours = {f'layers.{i}.{t}': adapter(*dims[t], rank=3, alpha=5, seed=i) for i in range(2) for t in TABLE}
    export_peft(tmp_path / 'ours', ours)
    theirs = peft.PeftModel.from_pretrained(model(), tmp_path / 'ours').eval()
    for name, p in theirs.named_parameters():
        if 'lora_' not in name: continue
        _, i, t = next(n for n in ours if TABLE[n.split('.')[2]] in name and f'.{n.split(".")[1]}.' in name).split('.')
        a = ours[f'layers.{i}.{t}']
        assert p.detach().numpy().tobytes() == (a.a if 'lora_A' in name else a.b).numpy().tobytes(), name
    theirs.save_pretrained(tmp_path / 'theirs')
    same(import_peft(tmp_path / 'theirs'), ours)
    assert (tmp_path / 'ours' / TENSORS).read_bytes() == (tmp_path / 'theirs' / TENSORS).read_bytes()

    tokens, merged = torch.tensor([[1, 5, 2, 7]]), model()
    with torch.no_grad():
        for name, a in ours.items():
            _, i, t = name.split('.')
            weight = merged.get_parameter(f'model.layers.{i}.{TABLE[t]}.weight')
            w = fucina.constant(weight.numpy(), (a.out_tag, a.in_tag)).to('f32')
            a.merge_into(w)
            weight.copy_(torch.tensor(w.numpy()))
        close(merged(tokens).logits.numpy(), theirs(tokens).logits)


def test_adapters_in_half_precision_come_over(peft, torch, tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=['fc1', 'fc2'])
        net = peft.get_peft_model(torch_net(torch).to(dtype), config, autocast_adapter_dtype=False)
        randomised(torch, net).save_pretrained(tmp_path / 'half')
        found = import_peft(tmp_path / 'half', names=SIMPLE)
        layer = net.base_model.model.fc1
        assert layer.lora_A.default.weight.dtype is dtype
        assert found['one'].a.numpy().tobytes() == layer.lora_A.default.weight.detach().float().numpy().tobytes()
        assert found['one'].b.numpy().tobytes() == layer.lora_B.default.weight.detach().float().numpy().tobytes()


@pytest.mark.filterwarnings('ignore:.*invalid shape')  # of peft about a bias that it made
@pytest.mark.parametrize('match, more', [
    ('use_dora', dict(use_dora=True)), ('modules_to_save', dict(target_modules=['fc1'], modules_to_save=['fc2'])),
    ('lora_bias', dict(lora_bias=True)), ("'bias': 'all'", dict(bias='all')), ('pissa', dict(init_lora_weights='pissa')),
    ('olora', dict(init_lora_weights='olora')), ('exceeds', dict(r=5))])
def test_variants_that_the_package_saves_are_refused(peft, torch, tmp_path, match, more):
    config = peft.LoraConfig(**{**dict(r=2, lora_alpha=3, target_modules=['fc1', 'fc2']), **more})
    peft.get_peft_model(torch_net(torch), config).save_pretrained(tmp_path)
    refused(match, tmp_path, names=SIMPLE)


def test_other_layers_and_formats_of_the_package_are_refused(peft, torch, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=['0'])
    for k, (match, layer) in enumerate((('lora_embedding', torch.nn.Embedding(6, 5)), ('no matrix', torch.nn.Conv2d(3, 4, 3)))):
        peft.get_peft_model(torch.nn.Sequential(layer), config).save_pretrained(tmp_path / f'{k}')
        refused(match, tmp_path / f'{k}', names={'one': '0'})
    linear = torch.nn.Sequential(torch.nn.Linear(6, 5))
    peft.get_peft_model(linear, config).save_pretrained(tmp_path / 'bin', safe_serialization=False)
    refused('adapter_model.bin', tmp_path / 'bin', names={'one': '0'})
    other = peft.IA3Config(target_modules=['0'], feedforward_modules=[])
    peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), other).save_pretrained(tmp_path / 'ia3')
    refused('IA3', tmp_path / 'ia3', names={'one': '0'})


def test_the_chapter_runs_with_the_package(peft, torch):
    cells = json.loads(CHAPTER.read_text(encoding='utf-8'))['cells']
    names: dict = {}
    for cell in cells:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'code' and source.startswith('#| eval: false'): exec(source, names)
    assert names['difference'](names['theirs']) < 1e-5 and len(names['adapters']) == 2
