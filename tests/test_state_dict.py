"""Named tensors: golden bytes, each rule and its place, and loads that are all or nothing."""
import gc
import gzip
import io
import json
import os
import signal
import tracemalloc
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as pypi
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fails

import fucina
from fucina import errors, optim, state_dict
from fucina.errors import FucinaError, StaleGraphError, UseAfterScopeError
from fucina.exec import ExecContext
from fucina.safetensors import File, Sharded, TensorEntry, serialize_alloc, write_atomic
from fucina.state_dict import (Alias, LoadOptions, NamedTensor, NamedTensorMut, load_state_dict,
                               save_state_dict)

f32 = np.float32
GOLDENS = Path(__file__).parent/'goldens'


@pytest.fixture(scope='module')
def golden():
    with np.load(GOLDENS/'state_dict.npz') as d: return dict(d)


def tensor(a, dtype=None):
    "A constant of the storage `a`."
    if a.dtype == np.uint16: return fucina.from_bits(a, a.ndim)
    return fucina.constant(a, a.ndim, dtype=dtype)


def save(model):
    out = io.BytesIO()
    save_state_dict(out, [NamedTensor.of(name, t) for name, t in model.items()])
    return out.getvalue()


def targets(model): return [NamedTensorMut.of(name, t) for name, t in model.items()]


def load(raw, model, *args, **keywords):
    load_state_dict(io.BytesIO(raw), targets(model), *args, **keywords)


def digest(entries):
    h = sha256()
    for e in entries: h.update(bytes(memoryview(e.bytes)))
    return h.digest()


def hand(name='a', dtype='f32', shape=(2,), data=b'12345678'): return NamedTensor(name, dtype, shape, data)
def room(name='a', dtype='f32', shape=(2,), n=8): return NamedTensorMut(name, dtype, shape, bytearray(n))


# --- the original -------------------------------------------------------------------------

def golden_model(golden):
    names = str(golden['registration_order']).split('\x1f')
    return {n: tensor(golden['entry/bias' if n.endswith('\n') else f'entry/{n}']) for n in names}


def test_bytes_of_the_original(golden):
    model, raw = golden_model(golden), golden['bytes'].tobytes()
    model['scalar'] = fucina.scalar(float(golden['entry/scalar'][0]))
    assert save(model) == save(dict(reversed(model.items()))) == raw
    assert (GOLDENS/'state_dict.safetensors').read_bytes() == raw
    assert save({}) == golden['empty_bytes'].tobytes()
    twin = {name: t.zeros_like() for name, t in model.items()}
    twin['zeta.weight'] = fucina.variable(np.zeros((2, 3)), 'a b')
    load(raw, twin)
    assert save(twin) == raw
    for name, t in twin.items(): assert t.data_const().tobytes() == model[name].data_const().tobytes()
    load(golden['empty_bytes'].tobytes(), {})


def outcome(f, *args, **keywords):
    try: f(*args, **keywords)
    except FucinaError as e: return type(e).__name__.removesuffix('Error')
    return 'ok'


def test_every_result_of_the_original(golden):
    raw = golden['bytes'].tobytes()
    zeta = fucina.zeros((2, 3), 'a b')
    def saving(*entries):
        out = io.BytesIO()
        result = outcome(save_state_dict, out, entries)
        return f'{result} bytes_written={len(out.getvalue())}'
    def loading(raw, *entries, **keywords):
        before = digest(entries)
        result = outcome(load_state_dict, io.BytesIO(raw), entries, **keywords)
        assert result == 'ok' or digest(entries) == before
        return result
    def at(name, t=zeta): return NamedTensorMut.of(name, t)
    found = {
        'save empty name': saving(hand(''), hand('b')),
        'save __metadata__': saving(hand('__metadata__')),
        'save NUL inside': saving(hand('a\0b')),
        'save invalid UTF-8': saving(hand('a\udcff')),
        'save duplicate name': saving(hand('a'), hand('a')),
        'save short bytes': saving(hand(data=b'1234')).split()[0],
        'save u8 dtype': saving(hand(dtype='u8')).split()[0],
        'load strict, only zeta.weight destination': loading(raw, at('zeta.weight')),
        'load non-strict, only zeta.weight destination': loading(raw, at('zeta.weight'), strict=False),
        'load non-strict, destination absent from stream': loading(raw, at('x'), strict=False),
        'load non-strict, transposed shape': loading(
            raw, at('zeta.weight', fucina.zeros((3, 2), 'a b')), strict=False),
        'load non-strict, f16 destination for f32 entry': loading(
            raw, at('zeta.weight', fucina.zeros((2, 3), 'a b', 'f16')), strict=False),
        'load non-strict, alias zeta.weight->new.w': loading(
            raw, at('new.w'), strict=False, aliases={'zeta.weight': 'new.w'}),
        'load non-strict, alias bias->zeta.weight (two stream entries on one destination)': loading(
            raw, at('zeta.weight'), strict=False, aliases={'bias': 'zeta.weight'}),
        'load strict, empty stream, one destination': loading(golden['empty_bytes'].tobytes(), at('x')),
        'load truncated by 1 byte': loading(raw[:-1], *targets(golden_model(golden))),
        'load header cut after 20 bytes': loading(raw[:20], at('x'))}
    lines = dict(line.split(': ', 1) for line in str(golden['errors']).strip().split('\n'))
    assert found == lines


# --- entries ------------------------------------------------------------------------------

def test_an_entry_borrows():
    w = fucina.variable([[1, 2], [3, 4]], 'out in')
    read, write = NamedTensor.of('w', w), NamedTensorMut.of('w', w)
    assert read[:3] == write[:3] == ('w', 'f32', (2, 2))
    write.bytes.view(f32)[3] = 9
    assert w.numpy()[1, 1] == 9 == read.bytes.view(f32)[3]
    assert not read.bytes.flags.writeable and read.bytes.shape == write.bytes.shape == (16,)
    assert write.leaf is w._node and NamedTensorMut.of('c', fucina.zeros(2, 'd')).leaf is None
    assert repr(write) == "NamedTensorMut('w', f32 [2, 2])"
    with pytest.raises(ValueError): read.bytes[0] = 1
    w.value[0, 0] = 7  # the view of the entry is read-only, not the tensor
    for dtype in ('f16', 'bf16', 'i64'):
        e = NamedTensor.of('x', fucina.zeros((3, 2), 'a b', dtype))
        assert e.dtype == dtype and e.bytes.nbytes == (48 if dtype == 'i64' else 12)
    assert NamedTensor.of('s', fucina.scalar(3)).shape == (1,)


@pytest.mark.parametrize('of', [NamedTensor.of, NamedTensorMut.of])
def test_what_makes_no_entry(of):
    x = fucina.constant(np.arange(6, dtype=f32).reshape(2, 3), 'a b')
    for other in (None, 3, np.zeros(2, f32), 'x', [x]):
        with pytest.raises(TypeError, match='tensor'): of('x', other)
    assert 'strided' in fails('NonContiguousParam', of, 'x', x.transpose('b a'))
    odd = fucina.zeros(2, 'a')
    odd._dtype = 'u8'
    fails('DType', of, 'x', odd)
    with fucina.exec_scope(): y = x + x
    with pytest.raises(UseAfterScopeError): of('y', y)
    of('\0 names are not looked at here', x)


def test_read_only_memory():
    a = np.arange(3, dtype=f32)
    a.flags.writeable = False
    t = fucina.from_numpy(a, 'd')
    assert NamedTensor.of('t', t).bytes.tobytes() == a.tobytes()
    assert "'t'" in fails('ReadOnlyData', NamedTensorMut.of, 't', t)


# --- saving -------------------------------------------------------------------------------

BIG = (2**33, 2**33)
SAVE = [  # class, entries
    *[('CheckpointInvalidName', [hand(n)]) for n in ('', '__metadata__', '\0', 'a\0', '\ud800', 'x\udcff')],
    *[('InvalidShape', [hand(shape=x)]) for x in ((), (1,) * 9, (0,), (2, 0), (-2, -1), BIG, (2**64,))],
    *[('CheckpointUnsupportedDtype', [hand(dtype=d)]) for d in ('u8', 'F32', 'f64', 'f8_e4m3', '')],
    *[('CheckpointShapeMismatch', [hand(data=d)]) for d in (b'', b'1234567', bytes(9), bytes(16))],
    ('CheckpointShapeMismatch', [hand(shape=(2**61,))]),
    ('CheckpointDuplicateName', [hand('a'), hand('b'), hand('a')]),
    ('NonContiguousParam', [hand(data=np.zeros(4, f32)[::2])]),
    # two things wrong: the earlier rule, of the earlier entry
    ('CheckpointInvalidName', [hand('', shape=(), dtype='u8')]),
    ('InvalidShape', [hand(shape=(0,), dtype='u8', data=b'')]),
    ('CheckpointUnsupportedDtype', [hand(dtype='u8', data=b'')]),
    ('CheckpointShapeMismatch', [hand('a'), hand('a', data=b'')]),
    ('CheckpointDuplicateName', [hand('a'), hand('a'), hand('')]),
    ('CheckpointInvalidName', [hand('b'), hand(''), hand('b')]),
    ('CheckpointUnsupportedDtype', [hand('z', dtype='u8'), hand('')]),
    ('CheckpointUnsupportedDtype', [hand('z', dtype=['f32'])]),
    ('CheckpointUnsupportedDtype', [hand('z', dtype=None)]),
]


@pytest.mark.parametrize('name, entries', SAVE, ids=range(len(SAVE)))
def test_nothing_is_written_if_something_is_wrong(name, entries):
    out = io.BytesIO()
    message = fails(name, save_state_dict, out, [hand('good'), *entries])
    assert out.getvalue() == b'' and len(message) < 400
    assert 'good' not in message


def test_hand_made_entries():
    two = np.array([1, 2], f32)
    for data in (two.tobytes(), bytearray(two), memoryview(two), two, two.view('<i4'), two[None],
                 np.asfortranarray(two.reshape(2, 1))):
        out = io.BytesIO()
        save_state_dict(out, iter([NamedTensor('é "\\\n日', 'f32', [np.int64(2)], data)]))
        assert pypi.load(out.getvalue())['é "\\\n日'].tolist() == [1, 2]
    out = io.BytesIO()
    save_state_dict(out, [NamedTensorMut('a', 'bf16', (2,), np.array([1, 2], np.uint16))])
    assert File.parse(out.getvalue()).tensor('a').dtype.string == 'BF16'


# --- loading: rules and their order -------------------------------------------------------

def stored(*rows, metadata=None):
    tags = {'f32': 'F32', 'f16': 'F16', 'bf16': 'BF16', 'i64': 'I64'}
    return serialize_alloc([TensorEntry(n, tags.get(d, d), s, bytes(data))
                            for n, d, s, data in rows], metadata)


A, B = ('a', 'f32', (2,), b'AAAABBBB'), ('b', 'f32', (2,), b'CCCCDDDD')
LOAD = [  # class, stream, destinations, keywords
    ('CheckpointDuplicateName', b'', [room('a'), room('b'), room('a')], {}),  # before any read
    ('EndOfStream', b'', [room('a')], {}),
    ('InvalidHeaderDeserialization', bytes(8), [room('a')], {}),
    ('CheckpointUnknownName', stored(A, B), [room('a')], {}),
    ('CheckpointUnknownName', stored(A, B), [room('a'), room('c')], {}),
    ('CheckpointMissingEntry', stored(A), [room('a'), room('b')], {}),
    ('CheckpointMissingEntry', stored(), [room('a')], {}),
    *[('CheckpointDtypeMismatch', stored(('a', d, s, bytes(8))), [room()], {}) for d, s in (
        ('I64', (1,)), ('F16', (4,)), ('BF16', (4,)), ('I32', (2,)), ('U8', (8,)), ('F64', (1,)),
        ('F8_E4M3', (8,)), ('F4', (16,)))],
    ('CheckpointDtypeMismatch', stored(('a', 'U8', (8,), bytes(8))), [room(dtype='U8', shape=(8,))], {}),
    ('CheckpointDtypeMismatch', stored(('a', 'F16', (2,), bytes(4))), [room(dtype='bf16', n=4)], {}),
    *[('CheckpointShapeMismatch', stored(A), [room(shape=x)], {}) for x in ((1, 2), (2, 1), (1,), (), (8,))],
    ('CheckpointShapeMismatch', stored(('a', 'f32', (), b'1234')), [room(shape=(1,), n=4)], {}),
    *[('CheckpointShapeMismatch', stored(A), [room(n=n)], {}) for n in (0, 7, 9)],
    ('ReadOnlyData', stored(A), [hand()], {}),
    ('NonContiguousParam', stored(A), [NamedTensorMut('a', 'f32', (2,), np.zeros(4, f32)[::2])], {}),
    ('CheckpointDuplicateName', stored(A, B), [room('a')], dict(aliases={'b': 'a'}, strict=False)),
    ('CheckpointDuplicateName', stored(A, B), [room('c')], dict(aliases={'a': 'c', 'b': 'c'})),
    ('CheckpointUnknownName', stored(A), [room('c')], dict(aliases={'a': 'b', 'b': 'c'})),
    ('CheckpointUnknownName', stored(A), [room('a')], dict(aliases={'a': 'b'})),
    # the first failure in the order of the file
    ('CheckpointShapeMismatch', stored(A, B), [room('a', shape=(3,), n=12)], {}),
    ('CheckpointUnknownName', stored(A, B), [room('b', shape=(3,), n=12)], {}),
    ('CheckpointDtypeMismatch', stored(A, B), [room('a'), room('b', 'i64', (9,)), room('c')], {}),
    ('CheckpointDtypeMismatch', stored(A, ('b', 'i64', (1,), bytes(8))), [room('a', shape=(3,)), room('b')], {}),
    ('CheckpointShapeMismatch', stored(A), [room(shape=(3,)), room('b')], {}),
    ('CheckpointDtypeMismatch', stored(A), [hand(dtype='f16', shape=(3,))], {}),
    ('CheckpointShapeMismatch', stored(A), [hand(shape=(3,))], {}),
]


@pytest.mark.parametrize('name, raw, entries, keywords', LOAD, ids=range(len(LOAD)))
def test_each_rule_of_loading(name, raw, entries, keywords):
    good = room('good', 'i64', (1,))
    before = digest([good, *entries]) if name != 'NonContiguousParam' else None
    message = fails(name, load_state_dict, io.BytesIO(raw), [*entries], **keywords)
    assert len(message) < 400
    if raw[:1] and len(raw) > 8:  # and behind a tensor that is right
        rows = [(t.name, t.dtype.string, t.shape, t.data) for t in File.parse(raw).tensors]
        with_good = stored(('good', 'i64', (1,), b'GOODGOOD'), *rows)
        fails(name, load_state_dict, io.BytesIO(with_good), [*entries, good], **keywords)
    if before: assert digest([good, *entries]) == before


def test_messages_name_what_differs():
    assert "'b' of the file" in fails('CheckpointUnknownName', load_state_dict,
                                      io.BytesIO(stored(B)), [room('a')])
    assert "'a' is f32, in the file I64" in fails('CheckpointDtypeMismatch', load_state_dict, io.BytesIO(
        stored(('a', 'i64', (2,), bytes(16)))), [room('a')])
    assert "'a' has shape [2], in the file [1, 2]" in fails('CheckpointShapeMismatch', load_state_dict, io.BytesIO(
        stored(('a', 'f32', (1, 2), bytes(8)))), [room('a')])


@pytest.mark.parametrize('strict', [True, False])
@pytest.mark.parametrize('more', ['file', 'model', 'both', 'none'])
def test_strict_and_not(strict, more):
    rows = [A, B] if more in ('file', 'both') else [A]
    entries = [room('a'), room('c')] if more in ('model', 'both') else [room('a')]
    result = outcome(load_state_dict, io.BytesIO(stored(*rows)), entries, strict=strict)
    expected = {'file': 'CheckpointUnknownName', 'both': 'CheckpointUnknownName',
                'model': 'CheckpointMissingEntry', 'none': 'ok'}
    assert result == (expected[more] if strict else 'ok')
    assert bytes(entries[0].bytes) == (A[3] if result == 'ok' else bytes(8))
    assert bytes(entries[-1].bytes) == (bytes(8) if len(entries) == 2 or result != 'ok' else A[3])


def test_aliases():
    for aliases in ({'a': 'x'}, [('a', 'x')], [Alias('a', 'x'), Alias('a', 'y')], (Alias('a', 'x'),)):
        for keywords in (dict(aliases=aliases), dict(options=LoadOptions(aliases=aliases))):
            x = room('x')
            load_state_dict(io.BytesIO(stored(A)), [x], **keywords)
            assert bytes(x.bytes) == A[3]
    a, b = room('a'), room('b')
    load_state_dict(io.BytesIO(stored(A, B)), [a, b], aliases={'a': 'b', 'b': 'a'})
    assert (bytes(a.bytes), bytes(b.bytes)) == (B[3], A[3])


def test_options_and_keywords():
    def run(*args, **keywords): load_state_dict(io.BytesIO(stored(A, B)), [room('x')], *args, **keywords)
    lax = LoadOptions(strict=False, aliases={'a': 'x'})
    run(lax)
    run(options=lax)
    fails('CheckpointUnknownName', run, lax, strict=True)
    fails('CheckpointUnknownName', run, LoadOptions(), aliases={'a': 'x'})
    run(LoadOptions(aliases={'a': 'y'}), strict=False, aliases={'a': 'x'})
    assert LoadOptions() == LoadOptions(strict=True, aliases=())
    with pytest.raises(AttributeError): lax.strict = True  # type: ignore[misc]


# --- all or nothing -----------------------------------------------------------------------

def small(fill=0):
    "A model of every dtype, variables and constants."
    return {'w': fucina.variable(np.full((2, 3), fill), 'a b'), 's': fucina.scalar(fill),
            'h': fucina.variable(np.full(3, fill), 'd', dtype='f16'),
            'b': fucina.full(2, fill, 'd', 'bf16'), 'i': fucina.full(2, int(fill), 'd', 'i64')}


WHOLE = save(small(1.75))


def test_cut_anywhere():
    model = small()
    before = save(model)
    for n in range(len(WHOLE)): fails('EndOfStream', load, WHOLE[:n], model)
    assert save(model) == before
    load(WHOLE, model)
    assert save(model) == WHOLE


def test_every_byte_changed():
    start, model = 8 + int.from_bytes(WHOLE[:8], 'little'), small()
    blank = save(model)
    for k in range(len(WHOLE)):
        for bit in range(8):
            raw = WHOLE[:k] + bytes([WHOLE[k] ^ 1 << bit]) + WHOLE[k + 1:]
            try: load(raw, model)
            except FucinaError:
                assert k < start and save(model) == blank
            else:
                assert k >= start and save(model) == raw  # just the flipped value
                load(blank, model)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_damage_changes_nothing_or_everything(data):
    raw, model = bytearray(WHOLE), small()
    blank = save(model)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at:at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try: load(bytes(raw), model, strict=data.draw(st.booleans()))
    except FucinaError: assert save(model) == blank
    else: File.parse(save(model))


class Interrupt(Exception): pass


@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='needs a timer')
def test_an_interrupt_comes_before_or_after():
    "Whenever a signal arrives: the old model or the new one."
    old, new = ({f'x{k}': fucina.full(2000, v, 'd') for k in range(60)} for v in (1, 2))
    raw = {v: save(m) for v, m in ((1, old), (2, new))}
    entries, seen = targets(old), []
    def interrupt(*_): raise Interrupt
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for k in range(150):
            load_state_dict(io.BytesIO(raw[1]), entries)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + k * 1e-5)
                load_state_dict(io.BytesIO(raw[2]), entries)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt: pass
            found, = {t.numpy()[j] for t in old.values() for j in (0, -1)}
            seen.append(int(found))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(seen) <= {1, 2} and gc.isenabled()


# --- live tensors -------------------------------------------------------------------------

def test_memory_stays_and_writes_are_counted():
    model = small()
    where = {name: t.data_const().ctypes.data for name, t in model.items()}
    versions = {name: t._version for name, t in model.items()}
    load(WHOLE, model)
    for name, t in model.items():
        assert t.data_const().ctypes.data == where[name]
        assert t._version == versions[name] + t.is_leaf
    fails('CheckpointMissingEntry', load, WHOLE, {**model, 'x': fucina.scalar(1)})
    load(save({'w': model['w']}), model, strict=False)
    assert model['w']._version == versions['w'] + 2 and model['h']._version == versions['h'] + 1


def test_a_graph_notices():
    w = fucina.variable([1, 2], 'd')
    raw = save({'w': w})
    with ExecContext(debug=True):
        loss = (w * w).sum_all()
        load(raw, {'w': w})
        with pytest.raises(StaleGraphError): loss.backward()


def test_a_16_bit_parameter_keeps_its_old_master():
    "Values first, then registration: a master is not renewed by a load."
    for first in ('load', 'register'):
        w, opt = fucina.variable([1, 2], 'd', dtype='bf16'), optim.SGD(lr=0.5)
        if first == 'register': opt.add_param(w)
        load(save({'w': fucina.constant([16, 32], 'd', dtype='bf16')}), {'w': w})
        assert w.numpy().tolist() == [16, 32]
        if first == 'load': opt.add_param(w)
        w.set_grad([1, 1])
        opt.step()
        assert w.numpy().tolist() == ([15.5, 31.5] if first == 'load' else [0.5, 1.5])


# --- streams, files, other packages -------------------------------------------------------

class Slow:
    def __init__(self, data): self.stream = io.BytesIO(data)
    def read(self, n): return self.stream.read(min(n, 7))


def test_streams_and_files(tmp_path):
    path = tmp_path/'model.safetensors'
    write_atomic(path, lambda out: save_state_dict(out, [NamedTensor.of(*x) for x in small(3).items()]))
    raw = path.read_bytes()
    with gzip.open(tmp_path/'gz', 'wb') as f: f.write(raw * 2 + b'TAIL')
    def opened(): return open(path, 'rb')
    for make in (opened, lambda: gzip.open(tmp_path/'gz'), lambda: io.BytesIO(raw + b'TAIL'),
                 lambda: Slow(raw), lambda: File.parse(raw), lambda: File.load(path),
                 lambda: File.load_mmap(path)):
        model, reader = small(), make()
        load_state_dict(reader, targets(model))
        assert save(model) == raw
        if hasattr(reader, 'close'): reader.close()
    with gzip.open(tmp_path/'gz') as f:
        for _ in range(2): load_state_dict(f, targets(small()))
        assert f.read() == b'TAIL'
    closed = File.parse(raw)
    closed.close()
    with pytest.raises(ValueError, match='closed'): load_state_dict(closed, targets(small()))


def test_saving_over_the_file_that_was_loaded(tmp_path):
    if os.name == 'nt': pytest.skip('Windows does not replace a mapped file')
    path, model = tmp_path/'m', small(3)
    path.write_bytes(WHOLE)
    with File.load_mmap(path) as file:
        load_state_dict(file, targets(model))
        write_atomic(path, lambda out: save_state_dict(
            out, [NamedTensor(t.name, {'F32': 'f32', 'F16': 'f16', 'BF16': 'bf16', 'I64': 'i64'}[
                t.dtype.string], t.shape, t.data) for t in file.tensors]))
    assert path.read_bytes() == WHOLE == save(model)


def test_the_public_package_in_both_directions():
    model = {'w': np.arange(6, dtype=f32).reshape(2, 3), 'h': np.ones(3, np.float16),
             'i': np.array([1, -2]), 'x.y': np.zeros((1, 1), f32)}
    assert save({k: tensor(a) for k, a in model.items()}) == pypi.save(model)
    twin = {k: tensor(np.full_like(a, 7)) for k, a in model.items()}
    load(pypi.save(model, {'format': 'np'}), twin)
    for k, a in model.items(): assert np.array_equal(twin[k].numpy(), a)


def test_torch_in_both_directions():
    torch = pytest.importorskip('torch')
    from safetensors.torch import load as torch_load
    from safetensors.torch import save as torch_save
    theirs = torch_load(WHOLE)
    assert theirs['b'].dtype is torch.bfloat16 and theirs['b'].tolist() == [1.75, 1.75]
    assert torch_save(theirs) == WHOLE
    model = small()
    load(torch_save(theirs, {'format': 'pt'}), model)
    assert save(model) == WHOLE


def test_the_other_byte_order(monkeypatch):
    "On a big-endian machine memory is turned round on the way."
    model, turned = small(1.75), small(1.75)
    for t in turned.values(): t._data.byteswap(inplace=True)
    monkeypatch.setattr(state_dict, '_BIG', True)
    assert save(turned) == WHOLE
    twin = small()
    load(WHOLE, twin)
    for name, t in twin.items():
        assert t._data.tobytes() == turned[name]._data.tobytes() != model[name]._data.tobytes()


def test_memory_is_a_small_multiple(tmp_path):
    model = {'a': fucina.zeros(500_000, 'd'), 'b': fucina.zeros(500_000, 'd')}
    path = tmp_path/'m'
    def saving(): write_atomic(path, lambda out: save_state_dict(out, entries))
    def loading():
        with open(path, 'rb') as f: load_state_dict(f, entries)
    def mapping():
        with File.load_mmap(path) as f: load_state_dict(f, entries)
    entries = targets(model)
    for f, most in ((saving, 0.3), (loading, 1.1), (mapping, 0.1)):
        tracemalloc.start()
        f()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most * 4_000_000


def test_names_in_the_package():
    for name in ('NamedTensor', 'NamedTensorMut', 'LoadOptions', 'save_state_dict', 'load_state_dict'):
        assert getattr(optim, name) is getattr(state_dict, name)
    assert fucina.state_dict is state_dict and state_dict.StateDictError is errors.StateDictError


def test_a_model_in_several_files(tmp_path):
    source, entries = small(3), []
    for k, (name, t) in enumerate(source.items()):
        with open(tmp_path / f'part-{k}.safetensors', 'wb') as out:
            save_state_dict(out, [NamedTensor.of(name, t)])
        entries.append((name, f'part-{k}.safetensors'))
    path = tmp_path / 'm.safetensors.index.json'
    path.write_text(json.dumps({'weight_map': dict(entries)}))
    for load_files in (Sharded.load, Sharded.load_mmap):
        twin = small(0)
        with load_files(path) as files: load_state_dict(files, targets(twin))
        assert digest(targets(twin)) == digest(targets(source))
    twin, before = small(0), digest(targets(small(0)))
    first = next(iter(twin))
    with Sharded.load(path) as files:
        fails('CheckpointUnknownName', load_state_dict, files, targets({first: twin[first]}))
        assert digest(targets(twin)) == before
        load_state_dict(files, targets({first: twin[first]}), strict=False)
    assert twin[first].value.tobytes() == source[first].value.tobytes()
    with pytest.raises(ValueError, match='closed'): load_state_dict(files, targets(twin))


def test_a_dtype_of_another_kind():
    out = io.BytesIO()
    save_state_dict(out, [hand('a')])
    fails('CheckpointDtypeMismatch', load_state_dict, io.BytesIO(out.getvalue()), [room('a', dtype=['f32'])])
