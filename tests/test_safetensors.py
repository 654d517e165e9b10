"""Files: golden bytes, the public package in both directions, and every way to be wrong."""
import errno
import gc
import gzip
import io
import json
import mmap
import os
import re
import stat
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import safetensors.numpy as pypi
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import error, fails

import fucina
from fucina import errors
from fucina import safetensors as s
from fucina.safetensors import (
    DType, File, Sharded, TensorEntry, read_prefix, serialize_alloc, strict_json)

f32 = np.float32
GOLDENS = Path(__file__).parent/'goldens'
POSIX = pytest.mark.skipif(os.name == 'nt', reason='a matter of POSIX')


def build(header, data=b'', length=None):
    "A file around a header: text, bytes or a table."
    if isinstance(header, dict): header = json.dumps(header)
    if isinstance(header, str): header = header.encode()
    return (len(header) if length is None else length).to_bytes(8, 'little') + header + data


def tensor(dtype='F32', shape=(2,), offsets=(0, 8), **more):
    return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets), **more}


def entry(name='t', dtype='U8', shape=(3,), data=b'abc'): return TensorEntry(name, dtype, shape, data)


@pytest.fixture(scope='module')
def golden():
    with np.load(GOLDENS/'state_dict.npz') as d: return dict(d)


SAMPLE = [entry('é "quoted"\\\n\x01', 'F32', (2, 3), np.arange(6, dtype=f32)),
          entry('b', 'BF16', (3,), np.array([1, 2, 3], np.uint16)),
          entry('ids', 'I64', (2,), np.array([7, -1])),
          entry('one', 'F64', (), np.array(0.5)),
          entry('none', 'F16', (2, 0), b'')]


# --- golden bytes -------------------------------------------------------------------------

def test_bytes_of_the_original():
    assert serialize_alloc([]) == b'\x08' + bytes(7) + b'{}      '
    six = np.arange(6, dtype=f32)
    raw = serialize_alloc([entry('attn.0', 'F32', (1, 2, 3), six)])
    assert raw[:8] == (64).to_bytes(8, 'little') and raw[72:] == six.tobytes()
    assert raw[8:72] == b'{"attn.0":{"dtype":"F32","shape":[1,2,3],"data_offsets":[0,24]}}'
    raw = serialize_alloc([entry('attn0', 'F32', (1, 1, 2, 3), six)])
    assert raw[:8] == (72).to_bytes(8, 'little') and raw[73:80] == b' ' * 7
    raw = serialize_alloc([], {'framework': 'pt'})
    assert raw == (40).to_bytes(8, 'little') + b'{"__metadata__":{"framework":"pt"}}' + b' ' * 5


def test_the_file_of_the_original(golden):
    raw = golden['bytes'].tobytes()
    assert (GOLDENS/'state_dict.safetensors').read_bytes() == raw
    for file in (File.parse(raw), File.load(GOLDENS/'state_dict.safetensors'),
                 File.load_mmap(GOLDENS/'state_dict.safetensors')):
        with file:
            for name in str(golden['registration_order']).split('\x1f'):
                values = golden['entry/bias' if name.endswith('\n') else f'entry/{name}']
                assert np.array_equal(file.tensor(name).array, values)
            assert serialize_alloc(file.tensors) == raw
    assert File.parse(golden['empty_bytes']).is_empty()


# --- dtypes -------------------------------------------------------------------------------

TAGS = ('BOOL:8 F4:4 F6_E2M3:6 F6_E3M2:6 U8:8 I8:8 F8_E5M2:8 F8_E4M3:8 F8_E8M0:8 F8_E4M3FNUZ:8 '
        'F8_E5M2FNUZ:8 I16:16 U16:16 F16:16 BF16:16 I32:32 U32:32 F32:32 C64:64 F64:64 I64:64 '
        'U64:64').split()


def test_table_of_dtypes():
    assert [f'{d.string}:{d.bitsize}' for d in DType] == TAGS
    assert [d.order for d in DType] == list(range(22))
    for d in DType:
        assert DType(d.string) is DType(d) is d
        if d.storage: assert np.dtype(d.storage).itemsize * 8 == d.bitsize
    for bad in ('f32', '', 'F128', None, 3, []): fails('UnsupportedDtypeTag', DType, bad)


def test_our_dtypes():
    ours = {'f32': 'F32', 'f16': 'F16', 'bf16': 'BF16', 'i64': 'I64', 'f8_e4m3': 'F8_E4M3',
            'f8_e5m2': 'F8_E5M2'}
    for name, tag in ours.items():
        assert s.dtype_from_fucina(name) is DType(tag)
        assert s.dtype_to_fucina(DType(tag)) == name
    for d in DType:
        if d.string not in ours.values(): fails('UnsupportedDtypeTag', s.dtype_to_fucina, d)
    fails('UnsupportedDtypeTag', s.dtype_from_fucina, 'F32')


def test_one_tensor_of_each_dtype_in_the_order_of_sizes():
    entries = [entry(f'x{d.order:02}', d.string, (8,), bytes(range(d.bitsize))) for d in DType]
    raw = serialize_alloc(entries)
    assert [t.dtype for t in File.parse(raw).tensors] == [*reversed(DType)]
    theirs = dict(safetensors.deserialize(raw))
    for d, e in zip(DType, entries):
        assert bytes(theirs[e.name]['data']) == e.data and theirs[e.name]['dtype'] == d.string
        t = File.parse(raw).tensor(e.name)
        if d.storage: assert t.array.shape == (8,) and t.array.tobytes() == e.data
        else: assert 'packs' in fails('MisalignedSlice', lambda t=t: t.array)


def test_byte_length():
    for shape, n in (((), 1), ((0,), 0), ((2, 3), 6), ((2**60,), 2**60)):
        assert s.byte_length(DType.U8, shape) == n
    assert s.byte_length(DType.F32, (2**63, 0)) == 0
    assert s.byte_length(DType.F6_E2M3, (4,)) == 3
    fails('MisalignedSlice', s.byte_length, DType.F6_E2M3, (2,))
    for dtype, shape in (('U8', (2, 2**63)), ('U8', (2**63, 4, 0)), ('F32', (2**60,)),
                         ('U8', (2**61,)), ('U8', (2**64 - 1,)), ('F32', (2, 2**64 - 2))):
        fails('ValidationOverflow', s.byte_length, DType(dtype), shape)


# --- writing ------------------------------------------------------------------------------

def test_order_and_escapes():
    names = ['b', 'a', '', 'é', '/', '\x7f', '"\\\b\f\n\r\t\x01\x1f', '\0', '日本', '😀']
    entries = [entry(n, 'U8', (1,), b'x') for n in names if n]
    raw = serialize_alloc(entries, [('z', '1'), ('a', '"\n'), ('é', '')])
    text = raw[8:8 + int.from_bytes(raw[:8], 'little')].decode().rstrip(' ')
    records = [f'{json.dumps(n, ensure_ascii=False)}:{{"dtype":"U8","shape":[1],'
               f'"data_offsets":[{k},{k + 1}]}}'
               for k, n in enumerate(sorted(n for n in names if n))]
    head = '"__metadata__":{"z":"1","a":"\\"\\n","é":""}'
    assert text == '{' + ','.join([head, *records]) + '}'
    assert len(raw[:-len(entries)]) % 8 == 0
    file = File.parse(raw)
    assert file.names() == sorted(n for n in names if n)
    assert list(file.metadata.items()) == [('z', '1'), ('a', '"\n'), ('é', '')]
    assert {k for k, _ in safetensors.deserialize(raw)} == set(file.names())


WRITE = [  # class, entries, metadata
    ('InvalidTensorName', [entry('')], None),
    ('InvalidTensorName', [entry('__metadata__')], None),
    ('InvalidTensorName', [entry('\ud800')], None),
    ('InvalidTensorName', [entry(b'x')], None),
    ('UnsupportedDtypeTag', [entry(dtype='f32')], None),
    ('TensorInvalidInfo', [entry(shape=(2,))], None),
    ('TensorInvalidInfo', [entry(shape=(0,))], None),
    ('TensorInvalidInfo', [entry(shape=(-1, -3))], None),
    ('MisalignedSlice', [entry(dtype='F4')], None),
    ('ValidationOverflow', [entry(shape=(2**63, 4, 0))], None),
    ('DuplicateTensorName', [entry(), entry()], None),
    ('DuplicateTensorName', [entry(), entry(dtype='U16', data=bytes(6))], None),
    ('DType', [entry(dtype='F32', data=np.ones(3, '>f4'))], None),
    ('UnsupportedView', [entry(dtype='F32', shape=(2, 2), data=np.ones((2, 2), f32, 'F'))], None),
    ('UnsupportedView', [entry(data=np.zeros(6, np.uint8)[::2])], None),
    ('UnsupportedView', [entry(data=memoryview(b'abcdef')[::2])], None),
    ('InvalidTensorName', [], {'': 'x'}),
    ('InvalidTensorName', [], {'\ud800': 'x'}),
    ('InvalidMetadata', [], {'x': '\udcff'}),
    ('InvalidMetadata', [], {'x': 3}),
    ('InvalidMetadata', [], [('x', 'a'), ('x', 'b')]),
    # The earlier check wins: larger dtypes first, then names; tensors before metadata.
    ('InvalidTensorName', [entry('a', shape=(1,)), entry('', 'F64', (1,), b'')], None),
    ('TensorInvalidInfo', [entry('b'), entry('b'), entry('a', shape=(1,))], None),
    ('MisalignedSlice', [entry(dtype='F4', data=b'')], None),
    ('DuplicateTensorName', [entry(), entry()], {'': 'x'}),
    ('InvalidTensorName', [], [('', '\ud800')]),
]


@pytest.mark.parametrize('name, entries, metadata', WRITE, ids=range(len(WRITE)))
def test_nothing_is_written_if_something_is_wrong(name, entries, metadata, tmp_path):
    out = io.BytesIO()
    fails(name, s.serialize, out, entries, metadata)
    fails(name, serialize_alloc, entries, metadata)
    fails(name, s.save_file_atomic, tmp_path/'new'/'file', entries, metadata)
    assert out.getvalue() == b'' and os.listdir(tmp_path) == []


@pytest.mark.parametrize('name', [3, None, b'a', ['a'], 1.5])
def test_a_name_of_another_type_among_texts(name):
    for names in (('a', name), (name, 'a'), ('z', name, 'b')):
        fails('InvalidTensorName', serialize_alloc, [entry(n) for n in names])


@POSIX
def test_when_only_the_directory_cannot_be_synced_the_file_is_new(tmp_path, monkeypatch):
    path = tmp_path/'model'
    s.save_file_atomic(path, [entry('old')])
    monkeypatch.setattr(s, 'sync_directory', lambda path: (_ for _ in ()).throw(OSError('injected')))
    with pytest.raises(OSError, match='injected'): save(path)
    assert path.read_bytes() == serialize_alloc(SAMPLE) and os.listdir(tmp_path) == ['model']


def test_text_for_a_terminal():
    assert s.printable('wéights.0 日本 \\ "q"') == 'wéights.0 日本 \\ "q"'
    assert s.printable('a\x1b[31m\r\n\x9b\u202e\x7f\ud800') == r'a\x1b[31m\r\n\x9b\u202e\x7f\ud800'


def test_limits_of_a_written_file(monkeypatch):
    half = SimpleNamespace(nbytes=2**63)
    rows = [(0, name, DType.U8, [2**63], half) for name in 'ab']
    fails('ValidationOverflow', s.frame, rows, {})
    raw = serialize_alloc([entry()])
    monkeypatch.setattr(s, 'MAX_HEADER_SIZE', len(raw) - 11)
    assert serialize_alloc([entry()]) == raw and len(File.parse(raw)) == 1
    monkeypatch.setattr(s, 'MAX_HEADER_SIZE', len(raw) - 12)
    fails('HeaderTooLarge', serialize_alloc, [entry()])
    fails('HeaderTooLarge', File.parse, raw)
    fails('HeaderTooLarge', read_prefix, io.BytesIO(raw))


def test_what_memory_may_be():
    data = bytes(range(24))
    six = np.frombuffer(data, f32).reshape(2, 3)  # read-only
    for same in (data, bytearray(data), memoryview(data), six, six.view('<i4'),
                 six.reshape(3, 1, 2).view(np.complex64), six.copy().T.T, memoryview(six)):
        t, = File.parse(serialize_alloc(iter([entry('t', 'F32', [np.int64(2), 3], same)]))).tensors
        assert t.data == data and t.shape == (2, 3)
    for empty in (b'', np.empty((0, 3), f32), np.empty((2, 0, 5)), memoryview(np.empty((0, 2)))):
        t, = File.parse(serialize_alloc([entry('t', 'F32', (0, 3), empty)])).tensors
        assert t.array.shape == (0, 3) and t.data == b''
    with pytest.raises(TypeError): serialize_alloc([entry(data='abc')])
    with pytest.raises(TypeError): serialize_alloc([entry(shape=(1.5, 2))])


def test_writers_that_take_a_part_at_a_time():
    class Part(io.BytesIO):
        def write(self, data): return super().write(bytes(data[:3]))

    class Plain:
        def __init__(self): self.parts = []
        def write(self, data): self.parts.append(bytes(data))

    whole, part, plain = serialize_alloc(SAMPLE), Part(), Plain()
    s.serialize(part, SAMPLE)
    s.serialize(plain, SAMPLE)
    assert part.getvalue() == b''.join(plain.parts) == whole
    with pytest.raises(OSError, match='no more'):
        s.serialize(SimpleNamespace(write=lambda data: 0), SAMPLE)


# --- the public package -------------------------------------------------------------------

DTYPES = 'f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 ?'.split()
names = st.text(st.characters(blacklist_categories=['Cs']), min_size=1, max_size=12).filter(
    lambda name: name != '__metadata__')
shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def arrays(draw):
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    raw = draw(st.binary(min_size=300, max_size=300))
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if dtype == '?': raw = bytes(x & 1 for x in raw)
    return np.frombuffer((raw * 8)[:n], dtype).reshape(shape)


models = st.dictionaries(names, arrays(), max_size=5)


def entries_of(model):
    tags = dict(zip(DTYPES, 'F16 F32 F64 I8 I16 I32 I64 U8 U16 U32 U64 BOOL'.split()))
    return [entry(k, tags[a.dtype.str[1:].replace('b1', '?')], a.shape, a) for k, a in model.items()]


@settings(max_examples=150, deadline=None)
@given(models, st.dictionaries(st.text(st.characters(blacklist_categories=['Cs']), min_size=1),
                               st.text(st.characters(blacklist_categories=['Cs']))))
def test_the_public_package_in_both_directions(model, metadata):
    raw = serialize_alloc(entries_of(model))
    assert pypi.save(model) == raw
    read = pypi.load(serialize_alloc(entries_of(model), metadata))
    file = File.parse(pypi.save(model, metadata or None))
    assert file.metadata == metadata and set(read) == set(file.names()) == set(model)
    for name, a in model.items():
        for b in (read[name], file.tensor(name).array):
            assert b.dtype == a.dtype and b.shape == a.shape and b.tobytes() == a.tobytes()


def test_files_on_disk_both_ways(tmp_path):
    model = {'w': np.arange(6, dtype=f32).reshape(2, 3), 'b': np.array([1, 2], np.float16)}
    s.save_file_atomic(tmp_path/'ours', entries_of(model))
    pypi.save_file(model, tmp_path/'theirs')
    assert (tmp_path/'ours').read_bytes() == (tmp_path/'theirs').read_bytes()
    assert np.array_equal(pypi.load_file(tmp_path/'ours')['w'], model['w'])


def test_torch_reads_bf16():
    torch = pytest.importorskip('torch')
    from safetensors.torch import load
    bits = np.array([0x3f80, 0xc020], np.uint16)
    t = load(serialize_alloc([entry('w', 'BF16', (2,), bits)]))['w']
    assert t.dtype is torch.bfloat16 and t.tolist() == [1.0, -2.5]


# --- reading: one line per rule -----------------------------------------------------------

U64 = 2**64
OK = tensor()
READ = [  # class, file
    ('HeaderTooSmall', b''), ('HeaderTooSmall', bytes(7)),
    ('HeaderTooLarge', build('{}', length=100_000_001)),
    ('HeaderTooLarge', build('{}', length=2**32 - 1)),
    ('HeaderTooLarge', build('{}', length=2**63)),
    ('HeaderTooLarge', build('{}', length=U64 - 1)),
    ('InvalidHeaderLength', build('{}', length=3)),
    ('InvalidHeaderLength', build('{}', length=100_000_000)),
    ('InvalidHeader', build(b'{"\xff":{}}')), ('InvalidHeader', build(b'\xed\xa0\x80')),
    ('InvalidHeader', build(b'{"\xc0\x80":{}}')),
    *[('InvalidHeaderDeserialization', build(text)) for text in (
        '', ' ', '{', '}', '{} {}', '{}x', '{}\0', '[]', 'null', '3', '"x"', '\ufeff{}', "{'a':1}",
        '{"a":NaN}', '{"a":{"x":Infinity}}', '{"a":{"x":-Infinity}}', '{"a":1,}', '{"a"}', '{a:1}',
        '{"a":01}', '{"a":+1}', '{"a":.5}', '{"a":1.}', '{"\x01":1}', '{"\\x41":1}', '{"a":tru}',
        '{"\\ud800":{}}', '{"\\udc00\\ud800":{}}', '{"a":{"x":["\\udfff"]}}', '/**/{}', '{}//',
        '\x0b{}', '\xa0{}')],
    *[('InvalidHeaderDeserialization', build(text)) for text in (
        f'{{"a":{json.dumps(OK)},"a":{json.dumps(OK)}}}', f'{{"\\ud800":{json.dumps(OK)}}}',
        *[json.dumps({'a': {**OK, 'x': [v]}}) for v in (float('nan'), float('inf'), '\ud83d')],
        '{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"x":[{"y":1,"y":1}],"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"__metadata__":{},"__metadata__":{}}', '{"__metadata__":{"a":"1","a":"1"}}',
        '{"\\u0061":{},"a":{}}')],
    *[('InvalidMetadata', build({'__metadata__': value})) for value in (
        None, [], 'x', 3, {'a': 1}, {'a': None}, {'a': {}}, {'a': 'x', 'b': True})],
    ('InvalidTensorName', build({'': OK})),
    *[('InvalidHeaderDeserialization', build({'a': value})) for value in (
        None, [], 3, 'F32', True, {}, {'shape': [2], 'data_offsets': [0, 8]})],
    *[('InvalidHeaderDeserialization', build({'a': {**OK, 'dtype': v}})) for v in (None, 3, ['F32'])],
    *[('UnsupportedDtypeTag', build({'a': {**OK, 'dtype': v}})) for v in ('', 'f32', 'F128', 'é')],
    ('InvalidHeaderDeserialization', build({'a': {'dtype': 'F32', 'data_offsets': [0, 8]}})),
    ('InvalidHeaderDeserialization', build({'a': {'dtype': 'F32', 'shape': [2]}})),
    *[('InvalidHeaderDeserialization', build({'a': {**OK, key: v}}))
      for key in ('shape', 'data_offsets') for v in (None, 2, '2', {}, {'0': 2}, [[0], 8], [0, None],
                                                     [0, '8'], [True, 8], [0, 8.0], [-1, 8])],
    *[('InvalidHeaderDeserialization', build({'a': {**OK, 'data_offsets': v}}))
      for v in ([], [0], [0, 8, 8], [[0, 8]])],
    *[('InvalidHeaderDeserialization', build(json.dumps({'a': OK}).replace('[2]', v).replace(
        '[0, 8]', w))) for v, w in (('[1e0]', '[0, 8]'), ('[2.0]', '[0, 8]'), ('[-0]', '[0, 0]'),
                                    ('[2]', '[-0, 8]'), ('[2]', '[0, 8e0]'), ('[1e999]', '[0, 8]'),
                                    ('[%s]' % ('9' * 5000), '[0, 8]'))],
    *[('ValidationOverflow', build({'a': {**OK, key: v}}))
      for key in ('shape', 'data_offsets') for v in ([U64, 0], [0, U64], [0, 10**40])],
    *[('ValidationOverflow', build({'a': tensor('F32', shape)})) for shape in (
        [2**63, 4, 0], [2, 2**63], [U64 - 1], [2**60, 1])],
    ('MisalignedSlice', build({'a': tensor('F4', [3], [0, 2])}, bytes(2))),
    ('MisalignedSlice', build({'a': tensor('F6_E3M2', [], [0, 1])}, bytes(1))),
    *[('InvalidOffset', build({'a': {**OK, 'data_offsets': v}}, bytes(8))) for v in (
        [1, 9], [8, 0], [8, 16], [U64 - 1, U64 - 1], [2**63, 8])],
    *[('InvalidOffset', build({'a': OK, 'b': {**OK, 'data_offsets': v}}, bytes(16))) for v in (
        [0, 8], [4, 12], [7, 15], [9, 17], [16, 24], [8, 7])],
    *[('TensorInvalidInfo', build({'a': {**OK, 'data_offsets': v}}, bytes(9))) for v in (
        [0, 0], [0, 7], [0, 9], [0, U64 - 1])],
    ('TensorInvalidInfo', build({'a': tensor(shape=[2, 0])}, bytes(8))),
    ('MetadataIncompleteBuffer', build({'a': OK}, bytes(7))),
    ('MetadataIncompleteBuffer', build({'a': tensor('U8', [2**60], [0, 2**60])}, bytes(8))),
    ('MetadataIncompleteBuffer', build({'a': OK}, bytes(9))),
    ('MetadataIncompleteBuffer', build({}, b'x')),
]
ORDER = [  # two things wrong: the earlier rule speaks
    ('HeaderTooLarge', build(b'\xff', length=2**40)),
    ('InvalidHeaderLength', build(b'\xff', length=9)),
    ('InvalidHeader', build(b'{"\xff')),
    ('InvalidHeaderDeserialization', build('{"":1,"a":{}')),
    ('InvalidMetadata', build({'__metadata__': 1, '': OK})),
    ('InvalidTensorName', build({'': OK, '__metadata__': 1})),
    ('InvalidTensorName', build({'': 3})),
    ('InvalidHeaderDeserialization', build({'a': {'dtype': 1, 'shape': [U64]}})),
    ('UnsupportedDtypeTag', build({'a': {'dtype': 'X', 'shape': 1}})),
    ('ValidationOverflow', build({'a': {**OK, 'shape': [U64, -1], 'data_offsets': 1}})),
    ('InvalidHeaderDeserialization', build({'a': {**OK, 'shape': [-1, U64], 'data_offsets': [U64]}})),
    ('InvalidHeaderDeserialization', build({'a': {**OK, 'data_offsets': [U64]}})),
    ('UnsupportedDtypeTag', build({'a': {**OK, 'data_offsets': [3, 11]}, 'b': {**OK, 'dtype': 'X'}})),
    ('InvalidOffset', build({'a': tensor('F32', [2**63, 4], [1, 0])})),
    ('ValidationOverflow', build({'a': tensor('F32', [2**63, 4], [0, 9])})),
    ('MisalignedSlice', build({'a': tensor('F4', [3], [0, 9])})),
    ('TensorInvalidInfo', build({'a': tensor('F32', [2], [0, 9])}, bytes(3))),
    ('MetadataIncompleteBuffer', build({'a': OK, 'b': tensor(offsets=[99, 107])}, bytes(7))),
    ('InvalidOffset', build({'a': OK, 'b': tensor(offsets=[99, 107])}, bytes(8))),
]


@pytest.mark.parametrize('name, raw', READ + ORDER, ids=lambda v: v if isinstance(v, str) else '')
def test_each_rule_of_reading(name, raw, tmp_path):
    message = fails(name, File.parse, raw)
    assert len(message) < 600
    path = tmp_path/'bad'
    path.write_bytes(raw)
    assert str(path) in fails(name, File.load, path)
    fails(name, File.load_mmap, path)
    if name == 'MetadataIncompleteBuffer': return
    if name in ('HeaderTooSmall', 'InvalidHeaderLength'): name = 'EndOfStream'
    fails(name, read_prefix, io.BytesIO(raw))
    assert gc.isenabled()


@pytest.mark.parametrize('raw', [
    build(f' \t\r\n{{"a" : {json.dumps(OK)}}} \t\r\n', bytes(8)),
    build({'a': tensor(x=[1.5, None, {'y': {}}], z='\\')}, bytes(8)),
    build({'b': tensor(offsets=[8, 16]), 'a': OK}, bytes(16)),
    build('{"\\u0061\\ud83d\\ude00-0":' + json.dumps(tensor(x=-0.0, y=-7)) + '}', bytes(8)),
    build({'a': tensor('U8', [], [0, 1])}, bytes(1)),
    build({'__metadata__': {}, 'a': OK}, bytes(8)),
    build({'a': tensor('F32', [1] * 300, [0, 4])}, bytes(4)),
    build({'z': tensor('F32', [2, 0], [0, 0]), 'a': tensor('F16', [1], [0, 2])}, bytes(2)),
    build({'z': tensor('F32', [0], [8, 8]), 'y': tensor('F32', [0], [0, 0]), 'a': OK}, bytes(8)),
])
def test_what_is_unusual_but_right(raw):
    for file in (File.parse(raw), read_prefix(io.BytesIO(raw + b'more'))):
        end = 0
        for t in file.tensors:
            assert t.data_offsets[0] == end
            end = t.data_offsets[1]


def test_tensors_without_bytes_before_others():
    "The original cannot read this file of its own; the public package can."
    entries = [entry('z', 'F32', (2, 0), b''), entry('a', 'F16', (1,), b'hi')]
    file = File.parse(serialize_alloc(entries))
    assert file.names() == ['z', 'a'] and file.tensor('a').data == b'hi'


@pytest.mark.parametrize('text', ['[' * 100_000, '{"a":' * 100_000, '{"a":{"x":%s1%s}}'])
def test_deep_nesting(text):
    if '%s' in text: text %= '[' * 100_000, ']' * 100_000
    fails('InvalidHeaderDeserialization', File.parse, build(text))


def test_names_may_be_long_but_messages_not():
    long = 'x' * 1_000_000
    for header in ({long: {**OK, 'shape': [-1]}}, {long: {**OK, 'dtype': long}},
                   {'a': {**OK, 'shape': [list(range(10**5))]}},
                   {'a': tensor('U8', [1] * 10**5, [0, 2])}):
        with pytest.raises(s.SafetensorsError) as e: File.parse(build(header, bytes(2)))
        assert len(str(e.value)) < 1000
    assert len(fails('TensorNotFound', File.parse(build({})).tensor, long)) < 1000


# --- damage -------------------------------------------------------------------------------

WHOLE = serialize_alloc(SAMPLE, {'by': 'us'})
DATA = 8 + int.from_bytes(WHOLE[:8], 'little')


def test_cut_anywhere():
    for n in range(len(WHOLE)):
        name = ('HeaderTooSmall' if n < 8 else 'InvalidHeaderLength' if n < DATA
                else 'MetadataIncompleteBuffer')
        fails(name, File.parse, WHOLE[:n])
        fails('EndOfStream', read_prefix, io.BytesIO(WHOLE[:n]))
    fails('MetadataIncompleteBuffer', File.parse, WHOLE + b'\0')


def test_every_byte_changed():
    whole = File.parse(WHOLE)
    for k in range(len(WHOLE)):
        for bit in range(8):
            raw = WHOLE[:k] + bytes([WHOLE[k] ^ 1 << bit]) + WHOLE[k + 1:]
            try: file = File.parse(raw)
            except s.SafetensorsError: assert k < DATA
            else:
                if k >= DATA: assert [t[:4] for t in file.tensors] == [t[:4] for t in whole.tensors]
                assert b''.join(t.data for t in file.tensors) == raw[DATA:]


def damaged(draw):
    raw = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(raw)))
        if draw(st.booleans()): raw[at:at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
        else: raw[at:at] = draw(st.sampled_from([b'"', b'{', b'}', b',', b'0', b'-', b'[', b'null']))
    if draw(st.booleans()): raw[:8] = (len(raw) - (len(WHOLE) - DATA) - 8).to_bytes(8, 'little')
    return bytes(raw)


def covered(file, raw):
    start = 8 + int.from_bytes(raw[:8], 'little')
    assert b''.join(t.data for t in file.tensors) == raw[start:]
    for t in file.tensors: assert len(t.data) == s.byte_length(t.dtype, t.shape)
    again = File.parse(serialize_alloc(file.tensors, file.metadata))
    assert sorted(t.name for t in again.tensors) == sorted(file.names())


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_random_damage_gives_typed_errors(data):
    raw = damaged(data.draw)
    try: file = File.parse(raw)
    except s.SafetensorsError: return
    covered(file, raw)


numbers = st.integers(-2, 9) | st.sampled_from([2**32 - 1, 2**63, 2**64 - 1, 2**64, 1.0, True, None])
records = st.fixed_dictionaries({}, optional={
    'dtype': st.sampled_from(['F32', 'U8', 'BOOL', 'F4', 'I64', 'X', 3]),
    'shape': st.lists(numbers, max_size=3) | numbers,
    'data_offsets': st.lists(numbers, min_size=2, max_size=2) | st.lists(numbers, max_size=3)})


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(['a', 'b', 'c', '', '__metadata__']), records | numbers),
       st.integers(0, 20))
def test_random_headers_give_typed_errors(header, size):
    raw = build(header, bytes(size))
    for read in (File.parse, lambda raw: read_prefix(io.BytesIO(raw))):
        try: file = read(raw)
        except (s.SafetensorsError, errors.EndOfStreamError): continue
        if read is File.parse: covered(file, raw)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_give_typed_errors(data):
    for raw in (data, build(data), build(b'{' + data + b'}')):
        with pytest.raises(s.SafetensorsError): File.parse(raw + b'\0')


# --- memory -------------------------------------------------------------------------------

def peak(f):
    tracemalloc.start()
    try: f()
    except errors.FucinaError: pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize('raw', [
    build('{}', length=100_000_000), build('{}', length=2**63),
    build({'a': tensor('U8', [2**40], [0, 2**40])}, bytes(100)),
    build({'a': tensor('U8', [2**61 - 1], [0, 2**61 - 1])}, bytes(100)),
    build({'a': tensor('F32', [10**9] * 2, [0, 4 * 10**18])}, bytes(100))])
def test_a_claim_allocates_nothing(raw, tmp_path):
    path = tmp_path/'file'
    path.write_bytes(raw)
    for f in (lambda: File.parse(raw), lambda: File.load(path), lambda: File.load_mmap(path)):
        assert peak(f) < 50_000
    def stream():
        with open(path, 'rb') as f: read_prefix(f)
    class Plain:
        def __init__(self): self.read = io.BytesIO(raw).read
    for f in (stream, lambda: read_prefix(io.BytesIO(raw)), lambda: read_prefix(Plain())):
        assert peak(f) < 250_000


def test_memory_grows_with_what_arrives():
    raw = build({'a': tensor('U8', [2**40], [0, 2**40])}, bytes(300_000))
    assert peak(lambda: read_prefix(io.BytesIO(raw))) < 1_500_000


def test_memory_is_a_small_multiple_of_the_file(tmp_path):
    a = np.zeros(2_000_000, np.uint8)
    raw = serialize_alloc([entry('a', 'U8', a.shape, a)])
    path = tmp_path/'file'
    path.write_bytes(raw)
    assert peak(lambda: s.save_file_atomic(path, [entry('a', 'U8', a.shape, a)])) < 700_000
    assert peak(lambda: File.load(path)) < 1.2 * len(raw)
    assert peak(lambda: File.load_mmap(path)) < 100_000
    with open(path, 'rb') as f: assert peak(lambda: read_prefix(f)) < 1.2 * len(raw)
    assert peak(lambda: read_prefix(io.BytesIO(raw))) < 4 * len(raw)
    many = serialize_alloc([entry(f'layer.{k}', 'U8', (1,), b'x') for k in range(3000)])
    assert peak(lambda: File.parse(many)) < 20 * len(many)
    nonsense = build('{"a":{"x":[' + ','.join(['[]'] * 50_000) + ']}}')
    assert peak(lambda: File.parse(nonsense)) < 60 * len(nonsense)


# --- streams ------------------------------------------------------------------------------

class Slow:
    "Gives one byte at a time, and has nothing but `read`."
    def __init__(self, data): self.stream, self.asked = io.BytesIO(data), 0
    def read(self, n):
        self.asked = max(self.asked, n)
        return self.stream.read(min(n, 1))


def test_files_in_a_row():
    stream = io.BytesIO(WHOLE + WHOLE + serialize_alloc([]) + b'TAIL')
    first, second, third = (read_prefix(stream) for _ in range(3))
    assert first.tensors == second.tensors == File.parse(WHOLE).tensors and not len(third)
    assert stream.read() == b'TAIL'


def test_kinds_of_streams(tmp_path):
    path, packed = tmp_path/'file', tmp_path/'file.gz'
    path.write_bytes(WHOLE + b'TAIL')
    with gzip.open(packed, 'wb') as f: f.write(WHOLE + b'TAIL')
    def unpacked(): return gzip.open(packed, 'rb')
    for make in (lambda: open(path, 'rb'), lambda: open(path, 'rb', buffering=0), unpacked,
                 lambda: io.BytesIO(WHOLE + b'TAIL')):
        with make() as f:
            assert read_prefix(f).tensors == File.parse(WHOLE).tensors
            assert f.read() == b'TAIL'
    slow = Slow(WHOLE + b'TAIL')
    assert read_prefix(slow).tensors == File.parse(WHOLE).tensors
    assert slow.stream.read() == b'TAIL' and slow.asked < len(WHOLE)
    with pytest.raises(TypeError): read_prefix(io.StringIO('text' * 9))


@POSIX
def test_a_pipe():
    big = serialize_alloc([entry('a', 'U8', (300_000,), bytes(300_000))])
    r, w = os.pipe()
    def feed():
        with open(w, 'wb') as out: out.write(big)
    thread = threading.Thread(target=feed)
    thread.start()
    with open(r, 'rb') as f: assert read_prefix(f).tensor('a').data == bytes(300_000)
    thread.join()


def test_a_stream_beyond_64_bits():
    n = 2**61 - 1
    header = {f'{k}': tensor('U8', [n], [k * n, (k + 1) * n]) for k in range(8)}
    assert 8 * n < U64
    fails('ValidationOverflow', read_prefix, io.BytesIO(build(header)))
    fails('MetadataIncompleteBuffer', File.parse, build(header))


# --- a file and its tensors ---------------------------------------------------------------

def test_questions():
    file = File.parse(WHOLE)
    assert file.names() == file.tensor_names() == ['ids', 'one', SAMPLE[0].name, 'b', 'none']
    assert len(file) == file.len() == 5 and not file.is_empty() and file.metadata == {'by': 'us'}
    assert file.maybe_tensor('x') is None and file.maybe_tensor('b') == file.tensor('b')
    assert issubclass(error('TensorNotFound'), KeyError)
    assert "'x'" in fails('TensorNotFound', file.tensor, 'x')
    assert repr(file) == 'File(5 tensors)' and repr(file.tensors[0]) == "TensorInfo('ids', I64 [2])"
    t = file.tensor('one')
    assert t.array.shape == () and float(t.array) == 0.5 and t.shape == ()
    assert file.tensor('none').array.shape == (2, 0)
    file.close()
    file.close()
    assert repr(file) == 'File(closed)'
    for ask in (file.names, file.is_empty, lambda: len(file), lambda: file.tensor('b')):
        with pytest.raises(ValueError, match='closed'): ask()


def test_the_buffer_is_shared_and_read_only(tmp_path):
    buffer = bytearray(WHOLE)
    t = File.parse(buffer).tensor('ids')
    buffer[DATA] = 9
    assert t.array[0] == 9
    path = tmp_path/'file'
    path.write_bytes(WHOLE)
    for file in (File.parse(buffer), File.load(path), File.load_mmap(path)):
        t = file.tensor('ids')
        assert t.data.readonly and not t.array.flags.writeable
        with pytest.raises(TypeError): t.data[0] = 1
        del t
        file.close()


def mapped(path):
    with open('/proc/self/maps') as f: return sum(str(path) in line for line in f)


@pytest.mark.skipif(not os.path.exists('/proc/self/maps'), reason='asks Linux for its maps')
def test_a_map_lives_as_long_as_someone_looks(tmp_path):
    path = tmp_path/'file'
    path.write_bytes(WHOLE)
    with File.load_mmap(path): assert mapped(path) == 1
    assert mapped(path) == 0
    with File.load_mmap(path) as file: a = file.tensor('ids').array
    del file
    gc.collect()
    path.unlink()
    assert mapped(path) == 1 and a.tolist() == [7, -1]
    del a
    gc.collect()
    assert mapped(path) == 0


def test_no_file_a_directory_nothing(tmp_path):
    for load in (File.load, File.load_mmap, Sharded.load, Sharded.load_mmap):
        with pytest.raises(FileNotFoundError): load(tmp_path/'none')
        with pytest.raises(IsADirectoryError): load(tmp_path)
    (tmp_path/'empty').touch()
    for load in (File.load, File.load_mmap):
        assert 'empty' in fails('HeaderTooSmall', load, tmp_path/'empty')
        assert load(os.fspath(GOLDENS/'state_dict.safetensors')).len() == 9


def test_no_descriptor_stays_open(tmp_path):
    if not os.path.isdir('/proc/self/fd'): pytest.skip('asks Linux for its descriptors')
    path = tmp_path/'file'
    path.write_bytes(WHOLE)
    before = len(os.listdir('/proc/self/fd'))
    for _ in range(3):
        File.load(path).close()
        File.load_mmap(path).close()
        s.save_file_atomic(path, SAMPLE)
        with pytest.raises(ZeroDivisionError): s.write_atomic(path, lambda out: 1 // 0)
    assert len(os.listdir('/proc/self/fd')) == before


# --- parts --------------------------------------------------------------------------------

@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parts_are_those_of_numpy(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = data.draw(st.sampled_from(['u1', '<i2', '<f4', '<f8']))
    a = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    tag = {'u1': 'U8', '<i2': 'I16', '<f4': 'F32', '<f8': 'F64'}[dtype]
    t, = File.parse(serialize_alloc([entry('t', tag, shape, a)])).tensors
    ranges = []
    for n in shape[:data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.integers(0, n))
        ranges.append((start, data.draw(st.none() | st.integers(start, n))))
    assert t.slice_bytes(ranges) == a[tuple(slice(*r) for r in ranges)].tobytes()


def test_parts_that_are_none():
    t = File.parse(WHOLE).tensor(SAMPLE[0].name)
    for ranges in ([(0, 3)], [(2, 1)], [(3, None)], [(-1, 1)], [(0, 1)] * 3, [(0, -1)]):
        fails('InvalidSlice', t.slice_bytes, ranges)
    assert File.parse(WHOLE).tensor('one').slice_bytes([]) == np.float64(0.5).tobytes()
    fails('InvalidSlice', File.parse(WHOLE).tensor('one').slice_bytes, [(0, None)])
    packed, = File.parse(serialize_alloc([entry('p', 'F4', (2, 2), b'xy')])).tensors
    fails('MisalignedSlice', packed.slice_bytes, [(0, 1)])
    fails('InvalidSlice', packed.slice_bytes, [(0, 3)])
    deep, = File.parse(serialize_alloc([entry('d', 'U8', (1,) * 99 + (3,), b'abc')])).tensors
    assert deep.slice_bytes([(0, 1)] * 99 + [(1, 3)]) == b'bc'


# --- saving -------------------------------------------------------------------------------

CALLS = 'open write fsync replace unlink mkdir close'.split()


class Shim:
    "Records calls that change the disk, and fails the k-th."

    def __init__(self, monkeypatch, k=None, failure=None):
        self.calls, self.k, self.failure = [], k, failure
        for name in CALLS: self.wrap(monkeypatch, name, getattr(os, name))

    def wrap(self, monkeypatch, name, real):
        def call(*args, **keywords):
            self.calls.append(name)
            if len(self.calls) - 1 == self.k:
                if name == 'close': real(*args)
                raise self.failure
            return real(*args, **keywords)
        monkeypatch.setattr(os, name, call)


def save(path, durable=True): s.save_file_atomic(path, SAMPLE, durable=durable)


@POSIX
@pytest.mark.parametrize('durable, expected', [
    (True, 'open write fsync close replace open fsync close'),
    (False, 'open write close replace')])
def test_calls_of_a_save(tmp_path, monkeypatch, durable, expected):
    with monkeypatch.context() as m:
        shim = Shim(m)
        save(tmp_path/'model', durable)
    assert shim.calls == expected.split()
    with monkeypatch.context() as m:
        shim = Shim(m)
        save(tmp_path/'a'/'b'/'model', durable)
    made = ['mkdir', 'open', 'fsync', 'close'] if durable else ['mkdir']
    assert shim.calls == made + made + expected.split()


@POSIX
@pytest.mark.parametrize('failure', [OSError(errno.ENOSPC, 'injected'), KeyboardInterrupt()],
                         ids=['OSError', 'interrupt'])
def test_every_call_of_a_save_may_fail(tmp_path, monkeypatch, failure):
    path, old = tmp_path/'model', serialize_alloc([entry('old')])
    for k in range(8):
        path.write_bytes(old)
        with monkeypatch.context() as m, pytest.raises(type(failure)):
            Shim(m, k, failure)
            save(path)
        assert os.listdir(tmp_path) == ['model']
        assert path.read_bytes() == (old if k < 5 else serialize_alloc(SAMPLE))


@POSIX
def test_a_dead_process_leaves_the_old_file(tmp_path):
    path, old = tmp_path/'model', serialize_alloc([entry('old')])
    path.write_bytes(old)
    for durable in True, False:
        pid = os.fork()
        if not pid: s.write_atomic(path, lambda out: (out.write(WHOLE), os._exit(3)), durable=durable)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert path.read_bytes() == old
    left = sorted(set(os.listdir(tmp_path)) - {'model'})
    assert len(left) == 2 and all(re.fullmatch(r'\.model\.[0-9a-f]{16}\.tmp', n) for n in left)


def test_an_error_of_the_writer_leaves_the_old_file(tmp_path):
    path = tmp_path/'model'
    save(path)
    def half(out):
        out.write(bytes(10**6))
        raise RuntimeError('half-way')
    with pytest.raises(RuntimeError): s.write_atomic(path, half)
    assert os.listdir(tmp_path) == ['model'] and path.read_bytes() == serialize_alloc(SAMPLE)


@POSIX
def test_mode_collisions_and_paths(tmp_path, monkeypatch):
    mask = os.umask(0o027)
    try: save(tmp_path/'model')
    finally: os.umask(mask)
    assert stat.S_IMODE((tmp_path/'model').stat().st_mode) == 0o640
    draws = iter([b'\0' * 8, b'\0' * 8, b'\1' * 8])
    (tmp_path/f'.model.{"00" * 8}.tmp').touch()
    with monkeypatch.context() as m:
        m.setattr(os, 'urandom', lambda n: next(draws))
        save(tmp_path/'model')
    assert (tmp_path/f'.model.{"00" * 8}.tmp').exists()
    monkeypatch.chdir(tmp_path)
    for path in ('plain', b'bytes', 'new/dir/model', Path('p')/'q', 'x' * 255, './é'):
        save(path)
        assert File.load(path).len() == 5
    with pytest.raises(FileExistsError): save('plain/model')
    with pytest.raises(IsADirectoryError): save('new')
    assert not [n for n in os.listdir('.') if n.endswith('.tmp') and '00' * 8 not in n]


@POSIX
def test_saving_over_a_file_that_is_mapped(tmp_path):
    path = tmp_path/'model'
    save(path)
    for _ in range(3):
        file = File.load_mmap(path)
        s.save_file_atomic(path, file.tensors, file.metadata)
    assert path.read_bytes() == serialize_alloc(SAMPLE)
    a = file.tensor('ids').array
    s.save_file_atomic(path, [])
    assert a.tolist() == [7, -1]


def test_a_file_that_cannot_be_replaced_says_why(tmp_path, monkeypatch):
    def refuse(*args): raise PermissionError(errno.EACCES, 'Access is denied')
    path = tmp_path/'model'
    for system, text in (('nt', 'open or mapped'), ('posix', 'denied$')):
        with monkeypatch.context() as m:
            m.setattr(os, 'replace', refuse)
            m.setattr(os, 'name', system)
            with pytest.raises(PermissionError, match=text) as e: save(path, durable=False)
        assert os.listdir(tmp_path) == [] and (system == 'posix' or e.value.filename == str(path))
    if os.name != 'nt': return
    save(tmp_path/'model')
    with File.load_mmap(tmp_path/'model'), pytest.raises(PermissionError, match='mapped'):
        save(tmp_path/'model')


@POSIX
def test_directories_that_cannot_be_synced(tmp_path, monkeypatch):
    real = os.fsync
    def fsync(fd, code):
        if stat.S_ISDIR(os.fstat(fd).st_mode): raise OSError(code, 'injected')
        real(fd)
    for code in (errno.EINVAL, errno.ENOTSUP):
        monkeypatch.setattr(os, 'fsync', lambda fd, code=code: fsync(fd, code))
        save(tmp_path/'model')
    monkeypatch.setattr(os, 'fsync', lambda fd: fsync(fd, errno.EIO))
    with pytest.raises(OSError, match='injected'): save(tmp_path/'model')


def test_the_disk_of_a_mac(tmp_path, monkeypatch):
    asked = []
    fake = SimpleNamespace(F_FULLFSYNC=51, fcntl=lambda fd, what: asked.append(what))
    monkeypatch.setattr(s, 'fcntl', fake)
    save(tmp_path/'model')
    assert asked == [51]


# --- several files ------------------------------------------------------------------------

def index(tmp_path, content):
    path = tmp_path/'model.safetensors.index.json'
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.fixture
def shards(tmp_path):
    s.save_file_atomic(tmp_path/'1.safetensors', SAMPLE[:2])
    s.save_file_atomic(tmp_path/'2.safetensors', SAMPLE[2:])
    files = {'ids': '2.safetensors', 'b': '1.safetensors', 'one': '2.safetensors'}
    return index(tmp_path, {'weight_map': files, 'metadata': {'total_size': 42}, 'more': None})


def test_a_model_in_several_files(shards):
    assert s.is_index_path(shards) and s.is_index_path('x/a.safetensors.index.json')
    assert not s.is_index_path('a.safetensors') and not s.is_index_path('index.json')
    for load in (Sharded.load, Sharded.load_mmap):
        with load(shards) as model:
            assert model.tensor_names() == ['ids', 'b', 'one'] and len(model) == 3
            assert list(model.files) == ['2.safetensors', '1.safetensors']
            assert model.tensor('ids').array.tolist() == [7, -1] and model.total_size == 42
            assert model.maybe_tensor('none') is None
            fails('TensorNotFound', model.tensor, 'none')
            assert model.files['2.safetensors'].names() == ['ids', 'one', 'none']
        with pytest.raises(ValueError, match='closed'): model.files['1.safetensors'].names()
    for total in (None, -1, 1.5, True, '3', 10**30):
        shards.write_text(json.dumps({'weight_map': {}, 'metadata': {'total_size': total}}))
        assert Sharded.load(shards).total_size == (total if total == 10**30 else None)
    shards.write_text(json.dumps({'weight_map': {}, 'metadata': 3}))
    assert Sharded.load(shards).total_size is None


@pytest.mark.parametrize('content', [
    b'', b'[]', b'{}', b'null', b'{"weight_map":{}', b'\xff', b'\xef\xbb\xbf{"weight_map":{}}',
    b'{"weight_map":{},"weight_map":{}}', b'{"weight_map":{"\\ud800":"a"}}', b'[' * 99_999,
    {'weight_map': None}, {'weight_map': []},
    *[{'weight_map': {'b': leaf}} for leaf in (
        None, 3, ['1.safetensors'], '', '/etc/passwd', '../1.safetensors', 'a/1.safetensors',
        'a\\b', '..', 'a..b', '1.safetensors\0', './1.safetensors')],
    {'weight_map': {'x': '1.safetensors'}}, {'weight_map': {'': '1.safetensors'}},
    {'weight_map': {'b': '2.safetensors'}}])
def test_an_index_that_is_wrong(shards, content):
    path = index(shards.parent, content)
    for load in (Sharded.load, Sharded.load_mmap): assert str(path) in fails('InvalidIndex', load, path)


@pytest.mark.parametrize('leaf', ['.', '..', '', './a', 'a/'])
def test_a_file_of_an_index_is_a_plain_name(tmp_path, leaf):
    path = tmp_path/'m.safetensors.index.json'
    path.write_text(json.dumps({'weight_map': {'w': leaf}}))
    fails('InvalidIndex', Sharded.load, path)


def test_files_of_an_index_that_are_wrong(shards, monkeypatch):
    path = index(shards.parent, {'weight_map': {'b': '1.safetensors', 'x': 'none.safetensors'}})
    with pytest.raises(FileNotFoundError): Sharded.load(path)
    (shards.parent/'none.safetensors').write_bytes(b'bad')
    assert 'none.safetensors' in fails('HeaderTooSmall', Sharded.load, path)
    monkeypatch.setattr(s, 'MAX_HEADER_SIZE', 10)
    fails('InvalidIndex', Sharded.load, path)


# --- the rest -----------------------------------------------------------------------------

def test_the_collector_is_left_as_it_was():
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            File.parse(WHOLE)
            fails('InvalidHeaderDeserialization', File.parse, build('['))
            assert gc.isenabled() == on
        finally: gc.enable()


def test_errors_are_reachable_from_the_module():
    families = [c for c in vars(errors).values() if isinstance(c, type)
                and issubclass(c, errors.SafetensorsError) and c is not errors.SafetensorsError]
    for c in families:
        assert getattr(s, c.__name__) is getattr(fucina, c.__name__) is c
    assert fucina.safetensors is s and s.SafetensorsError is errors.SafetensorsError


def test_no_pickle_and_no_public_package_behind_it():
    source = Path(s.__file__).read_text(encoding='utf-8')
    assert 'pickle' not in source and 'import safetensors' not in source
    assert mmap.ACCESS_READ and sys.modules['fucina.safetensors'] is s


class Pairs(list):
    "An object in which a key may occur twice: key, value, what stands before the colon."


KEYS, BLANKS = st.text('a":\\ ', max_size=3), st.sampled_from(['', '', ' ', '\n'])
JSON = st.recursive(st.one_of(st.integers(-1, 3), KEYS, st.none()), lambda inner: st.one_of(
    st.lists(inner, max_size=3),
    st.lists(st.tuples(KEYS, inner, BLANKS), max_size=4).map(Pairs)))


def written(value):
    if isinstance(value, Pairs):
        rows = [f'{json.dumps(k)}{blank}:{written(v)}' for k, v, blank in value]
        return '{' + ','.join(rows) + '}'
    if isinstance(value, list): return '[' + ','.join(map(written, value)) + ']'
    return json.dumps(value)


def repeats(value):
    if not isinstance(value, list): return False
    keys = [row[0] for row in value] if isinstance(value, Pairs) else []
    inside = [row[1] for row in value] if isinstance(value, Pairs) else value
    return len(set(keys)) < len(keys) or any(map(repeats, inside))


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_a_repeated_key_is_found_wherever_it_is(value):
    text = written(value)
    if not repeats(value): assert strict_json(text) == json.loads(text)
    else:
        with pytest.raises(ValueError, match='twice'): strict_json(text)
