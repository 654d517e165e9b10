"""ParamRegistry: what a walk finds and in which order, names, views, files."""
import enum
import io
import json
import os
import tempfile
import types
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

import fucina
from fucina import errors, optim
from fucina.param_registry import ParamRegistry, load, save, walk


def var(*shape, dtype='f32'): return fucina.variable(np.ones(shape), len(shape), dtype=dtype)


def const(*shape): return fucina.constant(np.ones(shape), len(shape))


def names(model, prefix=''):
    registry = ParamRegistry()
    registry.collect_prefixed(prefix, model)
    return [v.name for v in registry]


@dataclass
class Layer:
    w: Any
    b: Any = None


@dataclass
class Net:
    enc: Layer
    head: Layer
    shared: ClassVar = var(1)
    borrowed: Any = field(default=None, metadata={'collect': False})
    _private: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ('a', 'b', 'unset')
    def __init__(self): self.b, self.a = var(1), var(1)


class Grown(Slotted):
    def __init__(self):
        super().__init__()
        self.late = var(1)
        self._hidden = var(1)

    @property
    def computed(self): return var(1)


class Stored:
    def __init__(self, active): self.active = active
    def __fucina_children__(self): yield None, self.active


class Renaming:
    def __init__(self, t): self.t = t
    def __fucina_children__(self): return [('alpha', self.t), ('beta', [self.t])]


Plain = namedtuple('Plain', 'x y')
CASES = {
    'dataclass': (Net(Layer(var(1), var(1)), Layer(var(1)), var(1), var(1)), ['enc.w', 'enc.b', 'head.w']),
    'list': ([Layer(var(1)), None, Layer(var(1))], ['0.w', '2.w']),
    'tuple': ((var(1), (var(1),)), ['0', '1.0']),
    'named tuple': (Pair(var(1), [var(1)]), ['first', 'second.0']),
    'namedtuple': (Plain(var(1), var(1)), ['x', 'y']),
    'dict': ({'b': var(1), 'a': var(1), 3: var(1), 'n': 5}, ['b', 'a', '3']),
    'ordered dict': (OrderedDict(z=var(1), a=var(1)), ['z', 'a']),
    'other keys': ({'ok': var(1), 'no': {(1, 2): var(1)}, 'nor': {True: var(1)}, 'mixed': {'a': var(1), 1.5: 0}}, ['ok']),
    'slots': (Slotted(), ['a', 'b']),
    'slots and attributes': (Grown(), ['a', 'b', 'late']),
    'namespace': (types.SimpleNamespace(q=var(1), p=var(1)), ['q', 'p']),
    'active alternative': ({'proj': [Stored(var(1)), Stored(var(1, dtype='f16')), Stored(object())]}, ['proj.0', 'proj.1']),
    'own children': (Renaming(var(1)), ['alpha', 'beta.0']),
    'integers': ({'w': var(1), 'n': fucina.constant([1, 2], 'd')}, ['w']),
    'halves': ({'a': var(1, dtype='bf16'), 'b': const(1).to('f16'), 'c': const(1)}, ['a', 'b', 'c']),
    'nothing': ([1, 2.0, 'text', b'x', np.ones(3), np.float32(1), types, len, int, {var(1)}, None, lambda: 0,
                 (x for x in ()), partial(print), fucina.ExecContext(), optim.AdamW(), optim.OptimizerSet(),
                 optim.LrSchedule(), weakref.ref(Net), [].append, complex(1), range(3)], []),
    'an optimizer inside': ({'w': var(1), 'opt': optim.SGD()}, ['w']),
    'empty': ({}, []),
}


@pytest.mark.parametrize('model, expected', list(CASES.values()), ids=list(CASES))
def test_walk(model, expected):
    assert names(model) == expected
    assert names(model, 'model') == [f'model.{n}' for n in expected]


def test_an_optimizer_that_has_parameters_is_no_part_of_a_model():
    opt, w = optim.Apollo(rank=1), var(2, 3)
    opt.add_param(w)
    group = optim.OptimizerSet([opt])
    sched = optim.LrSchedule()
    sched.attach(opt)
    assert names({'w': w, 'opt': opt, 'group': group, 'any': optim.any_optimizer(opt), 'sched': sched}) == ['w']


def test_a_tensor_is_a_root_only_with_a_name():
    with pytest.raises(errors.CheckpointInvalidNameError): names(var(2))
    assert names(var(2), 'w') == ['w']


def test_a_model_that_contains_itself():
    loop = Layer(var(1))
    loop.b = [loop]
    with pytest.raises(ValueError, match='b.0'): names(loop)
    shared = Layer(var(1))
    assert names([shared, shared]) == ['0.w', '1.w']  # twice is no cycle


def test_deep_models():
    model = var(1)
    for _ in range(100): model = [model]
    assert names(model) == ['.'.join('0' * 100)]


def test_what_was_found_stays_after_an_error():
    registry = ParamRegistry()
    with pytest.raises(errors.NonContiguousParamError, match="'1'"):
        registry.collect([var(2, 3), fucina.constant(np.ones((2, 3)), 'a b').permute_to('b a'), var(1)])
    assert [v.name for v in registry] == ['0']


def test_names():
    registry, w = ParamRegistry(), var(1)
    for name in ('x' * 65535, 'é', ' ', '__metadata__', '\n', 'a.b'): registry.add_param(name, w)
    for name in ('', 'a\0', 'x' * 65536, 'é' * 32768, '\ud800'):
        with pytest.raises(errors.CheckpointInvalidNameError): registry.add_param(name, w)
    with pytest.raises(errors.CheckpointDuplicateNameError, match='é'): registry.add_param('é', var(3))
    for bad in (None, 3, b'w'):
        with pytest.raises(TypeError): registry.add_param(bad, w)
    for bad in (np.ones(3), None, [w]):
        with pytest.raises(TypeError, match="'w'"): registry.add_param('w', bad)
    assert registry.parameter_count() == len(registry) == 6
    with pytest.raises(errors.CheckpointInvalidNameError): registry.save_state_dict(io.BytesIO())


def test_views():
    registry = ParamRegistry()
    tensors = {'w': var(2, 3), 'half': var(4, dtype='bf16'), 'c': const(2), 's': fucina.variable(3.0, ''),
               'n': fucina.constant([1, 2], 'd')}
    for name, t in tensors.items(): registry.add_param(name, t)
    views = [registry.view(i) for i in range(5)]
    assert [v.name for v in views] == list(tensors)
    assert [v.shape for v in views] == [(2, 3), (4,), (2,), (1,), (2,)]
    assert [v.dtype for v in views] == ['f32', 'bf16', 'f32', 'f32', 'i64']
    assert [v.trainable for v in views] == [True, True, False, True, False]
    assert [v.bytes.size for v in views] == [24, 8, 8, 4, 16]
    for v in views:
        assert v.bytes.dtype == np.uint8 and v.bytes.ndim == 1 and v.bytes.flags.writeable
    views[0].bytes[:4] = np.frombuffer(np.float32(7).tobytes(), np.uint8)
    views[1].array[:] = 0x4000
    views[3].array[0] = 9
    assert tensors['w'].tolist()[0][0] == 7 and tensors['half'].to('f32').tolist() == [2] * 4
    assert tensors['s'].item() == 9
    for i in (5, -1, 10**9):
        with pytest.raises(IndexError): registry.view(i)


def test_a_view_does_not_ask_the_others():
    registry = ParamRegistry()
    registry.collect([var(1) for _ in range(50)])
    assert registry.view(49) is registry.view(49) and registry.view(49).name == '49'
    assert [*registry] == [registry.view(k) for k in range(50)]


def test_optimizers_see_what_trains():
    model = {'w': var(2, 2), 'frozen': const(2), 'b': var(2), 'half': var(3, dtype='f16')}
    registry, opt = ParamRegistry(), optim.AdamW()
    registry.collect(model)
    registry.add_params_to(opt)
    assert [opt.slots.label(i) for i in range(len(opt.slots))] == ['w', 'b', 'half']
    assert len(opt.slots[2].param.master) == 3
    for t in ('w', 'b'): model[t].set_grad(np.ones(model[t].shape))
    registry.zero_grad()
    assert model['w'].grad is None and model['b'].grad is None
    twice = ParamRegistry()
    for name in 'ab': twice.add_param(name, model['w'])
    with pytest.raises(optim.DuplicateParamError, match='as a, .* as b'): twice.add_params_to(optim.SGD())


def test_files_hold_frozen_entries_too():
    model = {'w': var(2, 2), 'frozen': const(2), 'half': var(3, dtype='bf16')}
    registry = ParamRegistry()
    registry.collect(model)
    registry.add_param('ids', fucina.constant([5, 6], 'n'))
    stream = io.BytesIO()
    registry.save_state_dict(stream)
    before = stream.getvalue()
    values = {v.name: v.bytes.copy() for v in registry}
    for v in registry: v.bytes[:] = 0
    addresses = [v.array.ctypes.data for v in registry]
    version = model['w']._version
    registry.load_state_dict(io.BytesIO(before + b'tail'))
    assert all((v.bytes == values[v.name]).all() for v in registry)
    assert [v.array.ctypes.data for v in registry] == addresses and model['w']._version > version

    other = ParamRegistry()  # another order, the same file
    for v in reversed(list(registry)): other.add_param(v.name, v.tensor)
    stream = io.BytesIO()
    other.save_state_dict(stream)
    assert stream.getvalue() == before


def test_strictness_and_aliases():
    old, new = ParamRegistry(), ParamRegistry()
    old.collect({'enc': {'w': var(2), 'b': var(2)}})
    new.collect({'encoder': {'w': const(2), 'b': const(2)}})
    for v in new: v.bytes[:] = 0
    stream = io.BytesIO()
    old.save_state_dict(stream)
    def attempt(**options):
        new.load_state_dict(io.BytesIO(stream.getvalue()), **options)
        return [v.array.tolist() for v in new]
    with pytest.raises(errors.CheckpointUnknownNameError, match='enc'): attempt()
    half = ParamRegistry()
    half.add_param('encoder.w', var(2))
    part = io.BytesIO()
    half.save_state_dict(part)
    with pytest.raises(errors.CheckpointMissingEntryError, match='encoder.b'):
        new.load_state_dict(io.BytesIO(part.getvalue()))
    assert attempt(strict=False) == [[0, 0], [0, 0]]
    assert attempt(aliases={'enc.w': 'encoder.w', 'enc.b': 'encoder.b'}) == [[1, 1], [1, 1]]
    options = fucina.state_dict.LoadOptions(strict=False, aliases=[('enc.w', 'encoder.w')])
    for v in new: v.bytes[:] = 0
    new.load_state_dict(io.BytesIO(stream.getvalue()), options)
    assert [v.array.tolist() for v in new] == [[1, 1], [0, 0]]


def test_display():
    registry = ParamRegistry()
    registry.collect([Layer(fucina.variable(np.ones((2, 3)), 'out in'), const(2)) for _ in range(20)])
    for text in (repr(registry), registry._repr_html_()):
        for part in ('ParamRegistry of 40', '0.w', 'out=2, in=3', 'frozen', 'yes', '28 more',
                     '160 values, 120 of them trainable, 640 bytes'):
            assert part in text
    assert repr(ParamRegistry()).startswith('ParamRegistry of 0')


def test_one_line_each(tmp_path):
    model, twin = Net(Layer(var(2, 3)), Layer(var(4))), Net(Layer(const(2, 3)), Layer(const(4)))
    for _, t in walk(twin): t.value[...] = 0
    path = tmp_path / 'deep' / 'model.safetensors'
    fucina.save(path, model)
    fucina.load(str(path), twin)
    assert all((t.numpy() == 1).all() for _, t in walk(twin))
    registry = ParamRegistry()
    registry.collect_prefixed('m', model)
    save(path, registry)
    with pytest.raises(errors.CheckpointUnknownNameError): load(path, twin)
    load(path, registry)
    load(path, twin, aliases={'m.enc.w': 'enc.w', 'm.head.w': 'head.w'})
    with pytest.raises(FileNotFoundError): load(tmp_path / 'none', twin)
    before = path.read_bytes()
    with pytest.raises(errors.CheckpointInvalidNameError): save(path, {'': var(1)})
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize('model', [5, 'text', None, Layer(None, None), [None], {'a': 1}, {(1, 2): var(2)},
                                   {'n': fucina.constant([1], 'd')}, types.SimpleNamespace()], ids=repr)
def test_a_model_without_tensors_is_a_slip(tmp_path, model):
    path = tmp_path / 'model.safetensors'
    fucina.save(path, {'w': var(2)})
    before = path.read_bytes()
    for f in (fucina.save, fucina.load):
        with pytest.raises(ValueError, match='found no tensor in'): f(path, model)
    with pytest.raises(ValueError, match='found no tensor in'): fucina.load(path, model, strict=False)
    assert path.read_bytes() == before and len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize('model', [{}, [], (), ParamRegistry()], ids=repr)
def test_what_is_empty_on_purpose_is_saved(tmp_path, model):
    fucina.save(tmp_path / 'model', model)
    fucina.load(tmp_path / 'model', model)
    fucina.save(tmp_path / 'model', {'w': var(2)})
    with pytest.raises(errors.CheckpointUnknownNameError): fucina.load(tmp_path / 'model', model)


def test_an_index_loads_all_files(tmp_path):
    fucina.save(tmp_path / 'a.safetensors', {'x': var(2)})
    fucina.save(tmp_path / 'b.safetensors', {'y': var(3), 'z': var(4, dtype='bf16')})
    path = tmp_path / 'm.safetensors.index.json'
    files = {'z': 'b.safetensors', 'x': 'a.safetensors', 'y': 'b.safetensors'}
    path.write_text(json.dumps({'weight_map': files}))
    model = {'x': const(2), 'y': const(3), 'z': var(4, dtype='bf16')}
    for t in model.values(): t.value[...] = 0
    fucina.load(path, model)
    assert all((t.to('f32').numpy() == 1).all() for t in model.values())
    registry = ParamRegistry()
    registry.collect(model)
    for v in registry: v.bytes[:] = 0
    with fucina.safetensors.Sharded.load(path) as sharded: registry.load_state_dict(sharded)
    assert all((t.to('f32').numpy() == 1).all() for t in model.values())
    with pytest.raises(errors.CheckpointUnknownNameError) as e: fucina.load(path, {'x': const(2)})
    assert str(e.value).startswith(f'{path}: ')


def test_errors_name_the_file_once(tmp_path):
    path = tmp_path / 'model.safetensors'
    fucina.save(path, {'w': var(2)})
    for other, error in (({'v': var(2)}, errors.CheckpointUnknownNameError),
                         ({'w': var(3)}, errors.CheckpointShapeMismatchError)):
        with pytest.raises(error) as e: fucina.load(path, other)
        assert type(e.value) is error and str(e.value).count(str(path)) == 1
        assert str(e.value).startswith(f'{path}: ')
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.MetadataIncompleteBufferError) as e: fucina.load(path, {'w': var(2)})
    assert str(e.value).count(str(path)) == 1


def test_keys_that_are_enums():
    class Part(str, enum.Enum): HEAD = 'head'
    class Place(enum.IntEnum): FIRST = 1
    class Plain(enum.Enum): A = 'a'
    assert names({Part.HEAD: var(1), Place.FIRST: {Part.HEAD: var(1)}, 'x': {Plain.A: var(1)}}) == \
        ['head', '1.head']
    (name, _), = walk({Part.HEAD: var(1)})
    assert type(name) is str


def test_a_name_cannot_steer_the_terminal():
    registry = ParamRegistry()
    registry.collect({'a\x1b]0;owned\x07\n\x9b2J': var(2), 'schön': var(1)})
    for text in (repr(registry), registry._repr_html_()):
        assert r'a\x1b]0;owned\x07\n\x9b2J' in text and 'schön' in text
        assert not {'\x1b', '\x07', '\x9b'} & {*text}
    assert len(repr(registry).splitlines()) == 5


def test_other_libraries_read_it():
    numpy_files = pytest.importorskip('safetensors.numpy')
    model = {'a': var(2, 3), 'b': const(4)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'm.safetensors'
        fucina.save(path, model)
        theirs = numpy_files.load_file(path)
        assert {k: v.shape for k, v in theirs.items()} == {'a': (2, 3), 'b': (4,)}
        numpy_files.save_file({k: v * 3 for k, v in theirs.items()}, path)
        fucina.load(path, model)
    assert (model['a'].numpy() == 3).all() and (model['b'].numpy() == 3).all()
