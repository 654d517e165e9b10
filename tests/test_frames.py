"""Saved state: golden bytes and resumes of every optimizer, damaged streams, refusals, names."""
import io
import json
import struct
import tracemalloc
import zlib
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import (ADAM, APOLLO, GOLDENS, INPUTS, MISC, MUON, SGD, SHAPES, configured, fresh, give_gradients,
                        golden_cases, load, saved, variable)

import fucina
from fucina import errors, optim
from fucina.optim import param
from fucina.optim.frames import LAYOUTS
from fucina.rng import gaussian_fill, uniform_fill

f32 = np.float32
REFUSED = (errors.OptimError, EOFError)


@pytest.fixture(autouse=True)
def pinned():
    with fucina.ExecContext(gemm='pinned'): yield


# -- golden runs ------------------------------------------------------------------------------

every_case = pytest.mark.parametrize('d, case', [
    pytest.param(d, case, id=case) for d in (SGD, ADAM, MUON, APOLLO) for case in golden_cases(d)])


def replay(d, case, opt, params, limit, steps):
    for t in steps:
        give_gradients(params, t)
        if limit is not None:
            assert opt.grad_squared_norm() == d[f'{case}/grad_squared_norm'][t]
            norm = opt.clip_grad_norm(f32(limit))
            assert type(norm) is f32 and norm == d[f'{case}/clip_return'][t]
            for k, p in params.items():
                clipped = d[f'{case}/clipped_grad_{k}'][t]
                assert p.grad is None or p.grad.numpy().tobytes() == clipped.tobytes()
        opt.step()
        opt.zero_grad()
        for k, p in params.items():
            assert p.value.tobytes() == d[f'{case}/{k}'][t].tobytes(), (case, t, k)
        if t in (3, 6): assert saved(opt) == d[f'{case}/state_after_step{t + 1}'].tobytes()


@every_case
def test_golden_case_from_the_start_and_resumed(d, case, threads, monkeypatch):
    opt, params, c = fresh(d, case)
    limit = c['clip_max_norm']
    if limit is None and c['optimizer'] != 'Apollo':  # many portions; not for norms
        monkeypatch.setattr(param, 'CHUNK', 16)
    replay(d, case, opt, params, limit, range(7))
    opt, params, _ = fresh(d, case, row=3)
    raw = d[f'{case}/state_after_step4'].tobytes()
    assert load(opt, raw + b'more') == len(raw) and saved(opt) == raw
    replay(d, case, opt, params, limit, range(4, 7))


def golden_set(case, row=None):
    c = json.loads(str(MISC[f'{case}/config']))
    params = {k: variable((INPUTS[f'init_f32/{k}'] if row is None else MISC[f'{case}/{k}'][row])
                          .reshape(s)) for k, s in SHAPES.items()}
    opts, sched = optim.OptimizerSet(configured(m) for m in c['members']), optim.LrSchedule()
    for opt, m in zip(opts.members, c['members']):
        for entry in m['params']:  # 'wide as enc.w', or without a name
            k, _, name = entry.partition(' as ')
            opt.add_param(params[k], name=name.split()[0] if name else None)
        sched.attach(opt)
        if isinstance(opt, optim.Muon): sched.attach(opt.fallback)
    return opts, params, sched, c


@pytest.mark.parametrize('case', ['set_groups', 'set_mixed'])
def test_golden_set(case, threads):
    for row, steps in ((None, range(7)), (3, range(4, 7))):
        opts, params, sched, c = golden_set(case, row)
        if row is not None: load(opts, MISC[f'{case}/state_after_step4'].tobytes())
        for t in steps:
            sched.apply(optim.warmup_cosine_factor(t, 7, 3, 0.05))
            give_gradients(params, t)
            assert opts.members[0].lr == MISC[f'{case}/first_lr'][t]
            assert opts.grad_squared_norm() == MISC[f'{case}/grad_squared_norm'][t]
            assert opts.clip_grad_norm(c['clip_max_norm']) == MISC[f'{case}/clip_return'][t]
            opts.step()
            opts.zero_grad()
            for k, p in params.items(): assert p.value.tobytes() == MISC[f'{case}/{k}'][t].tobytes()
            if t in (3, 6): assert saved(opts) == MISC[f'{case}/state_after_step{t + 1}'].tobytes()


def test_golden_file_of_a_set():
    opts, *_ = golden_set('set_mixed')
    with open(GOLDENS / 'groups_state.fucina', 'rb') as file: opts.load_state(file)
    assert saved(opts) == (GOLDENS / 'groups_state.fucina').read_bytes()


def test_golden_mixed_dtypes():
    d, case = MISC, 'adamw_mixed_dtype'
    opt = configured(json.loads(str(d[f'{case}/config'])))
    wide = variable(INPUTS['init_f32/wide'].reshape(5, 7))
    vec = variable(INPUTS['init_bf16/vec'], 'bf16')
    for t, name in ((wide, 'f32.wide'), (vec, 'bf16.vec')): opt.add_param(t, name=name)
    for t in range(7):
        wide.set_grad(INPUTS['grad/wide'][t].reshape(5, 7))
        vec.set_grad(INPUTS['grad/vec'][t])
        opt.step()
        assert wide.value.tobytes() == d[f'{case}/f32_wide'][t].tobytes()
        assert vec.value.tobytes() == d[f'{case}/bf16_vec'][t].tobytes()
    raw = d[f'{case}/state_after_step7'].tobytes()
    assert saved(opt) == raw and raw[:4] == b'FZA5'


@pytest.mark.parametrize('case, kind', [('big_sgd', optim.SGD), ('big_adamw', optim.AdamW)])
def test_golden_large_state(case, kind, threads):
    c = json.loads(str(MISC[f'{case}/config']))
    n, seed = c['n'], c['seed']
    w, opt = variable(uniform_fill(seed, np.empty(n, f32), -1, 1)), kind(**c['config'])
    opt.add_param(w, name='big')
    for t in range(7):
        w.set_grad(gaussian_fill(seed + 1 + t, np.empty(n, f32), 0.5))
        opt.step()
        assert w.numpy()[:64].tobytes() == MISC[f'{case}/head64'][t].tobytes()
        assert zlib.crc32(w.numpy().tobytes()) == MISC[f'{case}/crc32'][t]
    raw = saved(opt)
    assert [len(raw), zlib.crc32(raw)] == MISC[f'{case}/state_len_crc32'].tolist()
    other = kind(**c['config'])
    other.add_param(w, name='big')
    load(other, raw)
    assert saved(other) == raw


def spirals_parameters():
    d = np.load(GOLDENS / 'spirals.npz')
    return {k: fucina.variable(d[f'init/{k}'], d[f'init/{k}'].ndim)
            for k in ('w1', 'w2', 'w3', 'b1', 'b2', 'b3')}


def test_golden_checkpoints():
    p = spirals_parameters()
    opt = optim.AdamW(lr=0.02, weight_decay=1e-4)
    for t in p.values(): opt.add_param(t)
    groups = optim.OptimizerSet([optim.AdamW(weight_decay=0.01), optim.AdamW(weight_decay=0)])
    for k, t in p.items(): groups.members['b' in k].add_param(t)
    for name, which in (('ckpt_adamw', opt), ('ckpt_groups', groups)):
        raw = (GOLDENS / name / 'optimizer.fucina').read_bytes()
        assert load(which, raw) == len(raw) and saved(which) == raw
    assert opt.slots[0].step == 1000


# -- worked bytes -----------------------------------------------------------------------------

def pair(dtype='f32'):
    values = {'f32': [[1, -2]], 'bf16': np.array([[0x3f80, 0xc000]], np.uint16)}[dtype]
    return variable(np.array(values, f32 if dtype == 'f32' else np.uint16), dtype), variable([0.5])


def stepped(opt, steps, dtype='f32', names=('w', None)):
    w, b = pair(dtype)
    for t, name in zip((w, b), names): opt.add_param(t, name=name)
    for k in range(steps):
        w.set_grad([[0.5, -1]])
        if k == 0: b.set_grad([0.25])
        else: b.zero_grad()
        opt.step()
    return opt


WORKED = {
    'sgd': (lambda: stepped(optim.SGD(lr=0.1, momentum=0.9), 2), '''
        46 5a 53 33 66 66 66 3f 00 00 00 00 00 02 00 00 00 01 00 77 01 00 00 00 00 00 00 00 02 00
        00 00 00 00 00 00 02 00 00 00 00 00 00 00 33 33 73 3f 33 33 f3 bf 06 00 70 61 72 61 6d 31
        01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 00 00 80 3e'''),
    'adamw': (lambda: stepped(optim.AdamW(), 1), '''
        46 5a 41 33 02 00 00 00 01 00 77 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 01 00 00
        00 00 00 00 00 d0 cc 4c 3d d0 cc cc bd 00 12 83 39 00 12 83 3a 06 00 70 61 72 61 6d 31 01
        00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 d0 cc cc 3c 00 12 83
        38'''),
    'adamw v4': (lambda: stepped(optim.AdamW(state_dtype='bf16'), 1), '''
        46 5a 41 34 02 00 00 00 01 00 77 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 01 00 00
        00 00 00 00 00 01 4d 3d cd bd 00 00 12 83 39 00 12 83 3a 06 00 70 61 72 61 6d 31 01 00 00
        00 00 00 00 00 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 01 cd 3c 00 00 12 83 38'''),
    'adamw v5': (lambda: stepped(optim.AdamW(), 1, 'bf16'), '''
        46 5a 41 35 02 00 00 00 01 00 77 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 01 00 00
        00 00 00 00 00 00 d0 cc 4c 3d d0 cc cc bd 00 00 12 83 39 00 12 83 3a 01 cf bd 7f 3f 93 de
        ff bf 06 00 70 61 72 61 6d 31 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 01 00 00 00
        00 00 00 00 00 d0 cc cc 3c 00 00 12 83 38 00'''),
    'muon': (lambda: stepped(optim.Muon(), 0, names='wb'), '''
        46 5a 4d 33 00 01 05 00 00 00 01 00 00 00 01 00 77 01 00 00 00 00 00 00 00 02 00 00 00 00
        00 00 00 00 00 00 00 00 00 00 00 46 5a 41 33 01 00 00 00 01 00 62 01 00 00 00 00 00 00 00
        01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00'''),
    'apollo': (lambda: stepped(optim.Apollo(optim.ApolloConfig.mini()), 0, names='wb'), '''
        46 5a 50 33 01 00 00 00 00 00 00 00 c8 00 00 00 00 00 00 00 00 00 00 43 01 01 00 00 01 00
        00 00 01 00 77 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01
        00 00 00 00 00 00 00 00 00 80 bf 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00
        00 01 00 62 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
        00 00 00 00 00 00'''),
    'empty set': (lambda: optim.OptimizerSet(), '46 5a 4f 33 00 00 00 00'),
    'set': (lambda: optim.OptimizerSet([stepped(optim.AdamW(), 1), optim.SGD()]), None),
}


@pytest.mark.parametrize('name', [k for k, v in WORKED.items() if v[1]])
def test_worked_bytes(name):
    make, expected = WORKED[name]
    assert saved(make()).hex(' ') == ' '.join(expected.split())


def test_worked_bytes_of_tensors():
    stream, (w, b) = io.BytesIO(), pair()
    optim.save_tensors(stream, [w, b])
    assert stream.getvalue().hex(' ') == ' '.join('''
        46 5a 54 31 02 00 00 00 02 00 00 00 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 00 00
        80 3f 00 00 00 c0 01 00 00 00 01 00 00 00 00 00 00 00 00 00 00 3f'''.split())


def test_pinned_bytes_by_hand():
    for tag, fields in ((None, {}), (1, dict(state_dtype='bf16'))):
        opt = optim.AdamW(**fields)
        opt.add_param(fucina.variable([1.0, 2.0], 'd'), name='a')
        slot = opt.slots[0]
        slot.step, slot.v = 3, [0.125, 2]
        slot.m = [0.25, -0.5] if tag is None else np.array([0x3e80, 0xbf00], np.uint16)
        m = struct.pack('<2f', 0.25, -0.5) if tag is None else b'\1' + struct.pack('<2H', 0x3e80, 0xbf00)
        v = (b'' if tag is None else b'\0') + struct.pack('<2f', 0.125, 2)
        raw = saved(opt)
        assert raw == (b'FZA3' if tag is None else b'FZA4') + struct.pack('<IH', 1, 1) + b'a' \
            + struct.pack('<QQQ', 2, 1, 3) + m + v
        slot.step, slot.m, slot.v = 9, 0, 0
        load(opt, raw)
        assert saved(opt) == raw and slot.step == 3


@pytest.mark.parametrize('kind, fields, dtype, magic', [
    ('Adam', {}, 'f32', b'FZAD'), ('Adam', dict(second_moment_dtype='bf16'), 'f32', b'FZD4'),
    ('Adam', {}, 'f16', b'FZD5'), ('AdamW', {}, 'f32', b'FZA3'),
    ('AdamW', dict(state_dtype='bf16'), 'f32', b'FZA4'), ('AdamW', {}, 'bf16', b'FZA5'),
    ('SGD', {}, 'f32', b'FZS3'), ('SGD', dict(state_dtype='bf16'), 'f32', b'FZS3'),
    ('SGD', dict(momentum=0.5, state_dtype='bf16'), 'f32', b'FZS4'),
    ('SGD', dict(momentum=0.5), 'bf16', b'FZS5'), ('Muon', {}, 'f32', b'FZM3'),
    ('Muon', dict(state_dtype='bf16'), 'f32', b'FZM4'), ('Muon', {}, 'bf16', b'FZM5'),
    ('Apollo', {}, 'f32', b'FZP3'), ('Apollo', {}, 'f16', b'FZP5')])
def test_magic_words(kind, fields, dtype, magic):
    kind = getattr(optim, kind)
    assert saved(kind(**fields))[:3] in (magic[:3], b'FZA')  # no slots: version 3
    opt = kind(**fields)
    opt.add_param(fucina.variable(np.ones((2, 3)), 'a b', dtype=dtype))
    assert saved(opt)[:4] == magic


# -- damage -----------------------------------------------------------------------------------

def setups():
    "Name -> a function that makes optimizers with equal state; small, of every layout."
    def small(opt, dtypes=('f32', 'f32'), steps=2):
        for k, dtype in enumerate(dtypes):
            w = fucina.variable(uniform_fill(k, np.empty((2, 2 - k), f32), -1, 1), 2, dtype=dtype)
            opt.add_param(w, name='ab'[k] if k else None)
            for t in range(steps):
                w.set_grad(gaussian_fill(t + 9 * k, np.empty((2, 2 - k), f32), 1.0))
                opt.step()
        if hasattr(opt, 'add_fallback_param'): opt.add_fallback_param(fucina.variable([1.0], 1), 'c')
        return opt
    both = dict(state_dtype='bf16', second_moment_dtype='bf16')
    return {
        'sgd': lambda: small(optim.SGD(momentum=0.9)), 'plain': lambda: small(optim.SGD()),
        'adam': lambda: small(optim.Adam()), 'adamw bf16': lambda: small(optim.AdamW(**both)),
        'adamw masters': lambda: small(optim.AdamW(), ('bf16', 'f32')),
        'muon': lambda: small(optim.Muon()), 'muon bf16': lambda: small(
            optim.Muon(state_dtype='bf16'), ('f16', 'f32')),
        'apollo': lambda: small(optim.Apollo(rank=1)),
        'apollo masters': lambda: small(optim.Apollo(rank=2), ('f16', 'bf16')),
        'set': lambda: optim.OptimizerSet([small(optim.AdamW()), small(optim.SGD(momentum=0.5), ('bf16',))]),
    }


damaged = pytest.mark.parametrize('make', list(setups().values()), ids=list(setups()))


def lists_of(opt):
    members = opt.members if isinstance(opt, optim.OptimizerSet) else [opt]
    return [slot for m in members for slots in m._lists() for slot in slots]


def whole_state(opt):
    "All that a load may change, parameters included."
    parts = [saved(opt)]
    for slot in lists_of(opt): parts += [slot.param.value.tobytes(), slot.param.master.tobytes()]
    return parts


@damaged
def test_cut_at_every_byte(make):
    raw, opt = saved(make()), make()
    for slot in lists_of(opt): slot.param.value[...] = 0  # masters and tensors differ now
    before = whole_state(opt)
    for n in range(len(raw)):
        with pytest.raises(EOFError): load(opt, raw[:n])
        assert whole_state(opt) == before
        with pytest.raises(EOFError): optim.inspect_state(io.BytesIO(raw[:n]))
    assert load(opt, raw + b'tail') == len(raw)
    stream = io.BytesIO(raw + b'tail')
    assert optim.inspect_state(stream).size == stream.tell() == len(raw)


@damaged
def test_every_byte_flipped(make):
    "An error and nothing changed; or the flipped bytes are what is now remembered."
    raw, opt = saved(make()), make()
    before, loaded = whole_state(opt), 0
    masters = any(len(slot.param.master) for slot in lists_of(opt))
    for at in range(len(raw)):
        for mask in (0x01, 0x80, 0xff):
            bad = raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1:]
            try: end = load(opt, bad)
            except REFUSED: assert whole_state(opt) == before
            else:
                again = saved(opt)
                flag = raw[at] == 1 and bad[at] and again == raw  # of a master: any but 0
                shorter = end < len(bad) and masters  # the last master was left out
                assert again == bad or flag or shorter, (at, mask)
                loaded += 1
                load(opt, raw)
            try: optim.inspect_state(io.BytesIO(bad))
            except REFUSED: pass
    assert loaded


@damaged
def test_forged_numbers_allocate_nothing(make):
    raw, opt = saved(make()), make()
    before = whole_state(opt)
    for width, values in ((2, (2**16 - 1,)), (4, (2**32 - 1, 2**31)), (8, (2**64 - 1, 2**63, 2**40))):
        for at in range(4, len(raw) - width):
            for value in values:
                bad = raw[:at] + value.to_bytes(width, 'little') + raw[at + width:]
                tracemalloc.start()
                try: loaded = load(opt, bad)
                except REFUSED: loaded = False
                try: optim.inspect_state(io.BytesIO(bad))
                except REFUSED: pass
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < 20 * len(raw) + 2**17, (at, width, value)
                if loaded: load(opt, raw)
                else: assert whole_state(opt) == before


def test_a_short_stream_costs_no_large_buffer():
    opt = optim.AdamW()
    opt.add_param(fucina.variable(np.zeros(2**22), 'd'), name='large')
    raw = saved(opt)[:10_000]
    tracemalloc.start()
    with pytest.raises(EOFError): load(opt, raw)
    with pytest.raises(EOFError): optim.inspect_state(io.BytesIO(raw))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_refused_or_loaded_exactly(data): check_damage(data)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(data=st.data())
def test_any_damage_for_a_minute(data): check_damage(data)


@cache
def whole_frames(): return {k: saved(make()) for k, make in setups().items()}


def check_damage(data):
    "Pieces of frames cut, repeated, exchanged: a typed error, or what was read is what is written."
    makes, frames = setups(), whole_frames()
    target = data.draw(st.sampled_from(list(makes)))
    raw = bytearray(frames[target])
    for _ in range(data.draw(st.integers(1, 4))):
        other = frames[data.draw(st.sampled_from(list(makes)))]
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
        c, e = sorted(data.draw(st.tuples(*[st.integers(0, len(other))] * 2)))
        raw[a:b] = data.draw(st.sampled_from([other[c:e], b'', bytes(3), b'\xff' * 8]))
    opt = makes[target]()
    before = whole_state(opt)
    try: end = load(opt, bytes(raw))
    except REFUSED: assert whole_state(opt) == before
    else: assert end <= len(raw) and len(saved(opt)) <= len(frames[target])
    for reader in (optim.inspect_state, lambda r: optim.load_tensors(r, [variable([1.0])])):
        try: reader(io.BytesIO(bytes(raw)))
        except REFUSED: pass


# -- streams ----------------------------------------------------------------------------------

class Drip:
    "Reads and writes a few bytes at a time."
    def __init__(self, raw=b''): self.raw, self.out = io.BytesIO(raw), bytearray()
    def read(self, n): return self.raw.read(min(n, 3))
    def write(self, block):
        self.out += block[:5]
        return min(len(block), 5)


def test_slow_streams():
    opt, other = stepped(optim.AdamW(), 1), stepped(optim.AdamW(), 0)
    drip = Drip()
    opt.save_state(drip)
    assert drip.out == saved(opt)
    other.load_state(Drip(bytes(drip.out)))
    assert saved(other) == saved(opt)


def test_text_streams_are_refused():
    with pytest.raises(TypeError, match="'rb'"): stepped(optim.AdamW(), 0).load_state(io.StringIO('FZA3' * 99))
    with pytest.raises(TypeError): stepped(optim.AdamW(), 0).save_state(io.StringIO())


def test_one_stream_for_all():
    opt, (w, b), stream = stepped(optim.AdamW(), 1), pair(), io.BytesIO()
    optim.save_tensors(stream, [w, b])
    opt.save_state(stream)
    optim.OptimizerSet([opt]).save_state(stream)
    stream.seek(0)
    kinds = [optim.inspect_state(stream).kind for _ in range(3)]
    assert kinds == ['tensors', 'AdamW', 'OptimizerSet'] and not stream.read()
    stream.seek(0)
    optim.load_tensors(stream, [w, b])
    for which in (opt, optim.OptimizerSet([opt])): which.load_state(stream)
    assert not stream.read()


# -- refusals, in order -----------------------------------------------------------------------

def rename(raw, old, new): return raw.replace(struct.pack('<H', len(old)) + old,
                                              struct.pack('<H', len(new)) + new)


def refused(error, opt, raw, match=None):
    before = whole_state(opt)
    with pytest.raises(error, match=match): load(opt, raw)
    assert whole_state(opt) == before


def test_what_a_record_may_not_be():
    opt = stepped(optim.AdamW(), 1)
    raw = saved(opt)
    refused(errors.CheckpointMagicMismatchError, opt, b'FZA6' + raw[4:], 'FZA6')
    refused(errors.CheckpointMagicMismatchError, opt, b'FZAD' + raw[4:], 'AdamW')
    refused(errors.CheckpointInvalidNameError, opt, rename(raw, b'w', b''))
    refused(errors.CheckpointUnknownNameError, opt, rename(raw, b'w', b'v'), "'v'")
    refused(errors.CheckpointUnknownNameError, opt, rename(raw, b'w', b'\xff\0'))
    refused(errors.CheckpointDuplicateNameError, opt, rename(raw, b'param1', b'w'), "'w'")
    refused(errors.CheckpointShapeMismatchError, opt, raw[:11] + b'\2' + raw[12:], 'w, rows.*2.*1')
    refused(errors.CheckpointShapeMismatchError, opt, raw[:19] + b'\3' + raw[20:], 'w, columns.*3.*2')
    refused(errors.CheckpointMissingEntryError, opt, raw[:4] + b'\1' + raw[5:], 'param1')
    refused(errors.CheckpointMissingEntryError, opt, raw[:4] + b'\0' + raw[5:], 'w')
    half = stepped(optim.AdamW(state_dtype='bf16'), 1)
    tagged = saved(half)
    refused(errors.CheckpointUnsupportedDtypeError, half, tagged[:0x23] + b'\2' + tagged[0x24:], 'w, m.*2')
    refused(errors.CheckpointDtypeMismatchError, half, tagged[:0x23] + b'\0' + tagged[0x24:], 'f32.*bf16')
    master = stepped(optim.AdamW(), 1, 'bf16')
    refused(errors.CheckpointDtypeMismatchError, stepped(optim.AdamW(), 1), saved(master), 'master')


def test_rows_are_judged_before_columns_are_read():
    opt = stepped(optim.AdamW(), 1)
    refused(errors.CheckpointShapeMismatchError, opt, saved(opt)[:11] + b'\2' + bytes(7))


def test_state_dtypes_must_agree():
    def adamw(**fields): return stepped(optim.AdamW(**fields), 1)
    m, both = dict(state_dtype='bf16'), dict(state_dtype='bf16', second_moment_dtype='bf16')
    for stored, live in (({}, m), (m, {}), (m, both), (both, m), ({}, both)):
        refused(errors.CheckpointDtypeMismatchError, adamw(**live), saved(adamw(**stored)))


@pytest.mark.parametrize('kind, fields, changes', [
    ('SGD', dict(momentum=0.9), dict(momentum=0.5, dampening=0.1, nesterov=True)),
    ('Muon', {}, dict(scale='match_rms_adamw', nesterov=False, ns_steps=4)),
    ('Apollo', dict(rank=1), dict(rank=2, update_proj_gap=7, scale=2.0, scale_type='tensor',
                                      correct_bias=False, scale_front=True,
                                      disable_norm_growth_limiter=True))])
def test_settings_that_shape_the_state(kind, fields, changes):
    def make(**more):
        opt = getattr(optim, kind)(**{**fields, **more})
        opt.add_param(fucina.variable(np.ones((2, 2)), 'a b'))
        return opt
    raw = saved(make())
    for name, value in changes.items():
        refused(errors.CheckpointConfigMismatchError, make(**{name: value}), raw, f'^.?{name}:')
    load(make(lr=7, weight_decay=0.5), raw)  # these change from run to run


def test_settings_are_compared_by_bits():
    opt, other = (stepped(optim.SGD(dampening=z), 1) for z in (0.0, -0.0))
    refused(errors.CheckpointConfigMismatchError, other, saved(opt), 'dampening')
    raw = saved(opt)
    refused(errors.CheckpointConfigMismatchError, opt, raw[:12] + b'\2' + raw[13:], 'nesterov')


def test_names_that_cannot_be_written():
    for name, error in (('', 'InvalidName'), ('a\0b', 'InvalidName'), ('x' * 65536, 'InvalidName'),
                        ('\ud800', 'InvalidName'), ('é' * 32768, 'InvalidName'), ('param0', 'DuplicateName')):
        opt, stream = optim.AdamW(), io.BytesIO()
        opt.add_param(fucina.variable([1.0], 'd'))
        opt.add_param(fucina.variable([1.0], 'd'), name=name)
        for what in (opt, optim.OptimizerSet([opt])):
            with pytest.raises(getattr(errors, f'Checkpoint{error}Error')): what.save_state(stream)
        assert stream.getvalue() == b''
    for name in ('x' * 65535, 'é', ' ', '\n', '名' * 21845):
        opt = optim.SGD()
        opt.add_param(fucina.variable([1.0], 'd'), name=name)
        load(opt, saved(opt))
    muon = optim.Muon()
    muon.add_param(fucina.variable(np.ones((2, 2)), 2))
    muon.add_param(fucina.variable([1.0], 1), name='a\0')
    stream = io.BytesIO()
    with pytest.raises(errors.CheckpointInvalidNameError): muon.save_state(stream)
    assert stream.getvalue() == b''
    with pytest.raises(TypeError, match='name'): optim.SGD().add_param(fucina.variable([1.0], 'd'), name=5)


def test_counts_have_four_bytes():
    with pytest.raises(errors.CheckpointTooManyEntriesError): optim.frames.count_field(2**32, 'members')
    assert optim.frames.count_field(2**32 - 1, 'members') == b'\xff' * 4


def test_named_slots_come_back_in_any_order():
    def build(order):
        opt, ts = optim.SGD(lr=0.1, momentum=0.9), {}
        for k in order:
            ts[k] = fucina.variable(np.ones({'w': 4, 'b': 2}[k]), 'd')
            opt.add_param_named(ts[k], k)
        return opt, ts
    opt, ts = build('wb')
    ts['w'].sum_all().backward()
    opt.step()
    other, _ = build('bw')
    load(other, saved(opt))
    assert other.slots[1].step == 1 and (other.slots[1].buf == 1).all() and other.slots[0].step == 0


def test_a_set_is_one_state():
    def build(): return optim.OptimizerSet([stepped(optim.AdamW(), 1), stepped(optim.SGD(momentum=0.5), 2)])
    opts = build()
    raw, first = saved(opts), opts.members[0]
    first.slots[0].m, first.slots[0].step = 8, 123
    refused(EOFError, opts, raw[:-1])
    refused(errors.CheckpointShapeMismatchError, opts, raw[:4] + b'\3' + raw[5:], '3 members')
    refused(errors.CheckpointMagicMismatchError, opts, raw[8:], 'OptimizerSet')
    refused(errors.CheckpointMagicMismatchError, opts, raw[:8] + saved(opts)[8:].replace(b'FZS3', b'FZS9'))
    load(opts, raw)
    assert first.slots[0].step == 1 and saved(opts) == raw
    any_one = optim.any_optimizer(first)
    stream = io.BytesIO()
    any_one.save_state(stream)
    stream.seek(0)
    any_one.load_state(stream)
    assert stream.getvalue() == saved(first)


# -- masters, counters, seeds -----------------------------------------------------------------

def test_a_master_is_taken_from_the_stream_or_made_again():
    opt = stepped(optim.AdamW(), 1, 'bf16')
    w, slot = opt.slots[0].param.tensor, opt.slots[0]
    master, published = slot.param.master.copy(), w.value.copy()
    v5, held = saved(opt), slot.param.master
    w.value[...] = 0
    slot.param.master[:] = 7
    version = w._version
    load(opt, v5)
    assert slot.param.master is held and (held == master).all() and (w.value == published).all()
    assert w._version > version
    v3 = saved(stepped(optim.AdamW(), 1))
    w.value[...] = np.array([0x4000, 0x4080], np.uint16)  # 2 and 4
    load(opt, v3)
    assert held.tolist() == [2, 4] and (w.value == [0x4000, 0x4080]).all()


@pytest.mark.parametrize('step', [0, 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1])
@pytest.mark.parametrize('name', ['sgd', 'adam', 'adamw bf16', 'apollo'])
def test_step_counters_of_any_size(name, step):
    opt = setups()[name]()
    for slot in lists_of(opt): slot.step = step
    raw, twin = saved(opt), setups()[name]()
    load(twin, raw)
    assert saved(twin) == raw and lists_of(twin)[0].step == step
    for slot in lists_of(twin): slot.param.tensor.set_grad(np.ones(slot.param.tensor.shape))
    twin.step()
    assert {slot.step for slot in lists_of(twin)} == {(step + 1) % 2**64}


def test_a_restored_slot_at_step_0_starts_again():
    opt = optim.SGD(lr=0.1, momentum=0.9, dampening=0.5)
    w = fucina.variable([1.0], 'd')
    opt.add_param(w)
    w.set_grad([1.0])
    opt.step()
    opt.slots[0].step = 0
    load(opt, saved(opt))
    opt.step()
    assert opt.slots[0].buf.tolist() == [1]  # a clone of the gradient, undampened


# -- tensors in a row -------------------------------------------------------------------------

def test_golden_tensors():
    ts = [fucina.variable(INPUTS[f'init_f32/{k}'].reshape(SHAPES[k]), len(SHAPES[k]))
          for k in ('wide', 'vec', 'conv')]
    stream = io.BytesIO()
    optim.save_tensors(stream, ts)
    raw = (GOLDENS / 'tensors_fzt1.bin').read_bytes()
    assert stream.getvalue() == raw == MISC['fzt1/bytes_wide_vec_conv'].tobytes()
    zeros = [fucina.variable(np.zeros(t.shape), len(t.shape)) for t in ts]
    optim.load_tensors(io.BytesIO(raw), zeros)
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(ts, zeros))
    info = optim.inspect_state(io.BytesIO(raw))
    assert [s.shape for s in info.slots] == [(5, 7), (9,), (3, 2, 4)]


def test_tensors_are_loaded_together():
    ts = [fucina.variable([1.0, 2.0], 'd'), fucina.constant([[3.0]], 'a b'), fucina.variable(4.0, '')]
    stream = io.BytesIO()
    optim.save_tensors(stream, tuple(ts))
    raw = stream.getvalue()
    for t in ts: t.value[...] = 9
    versions = [t._version for t in ts]
    for n in range(len(raw)):
        with pytest.raises(EOFError): optim.load_tensors(io.BytesIO(raw[:n]), ts)
    for at in (8, 12, 20 + 8, 32, 40):
        bad = raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1:]
        with pytest.raises(errors.CheckpointShapeMismatchError): optim.load_tensors(io.BytesIO(bad), ts)
    with pytest.raises(errors.CheckpointShapeMismatchError): optim.load_tensors(io.BytesIO(raw), ts[:2])
    with pytest.raises(errors.CheckpointMagicMismatchError): optim.load_tensors(io.BytesIO(b'FZT2' + raw), ts)
    assert all((t.numpy() == 9).all() for t in ts)
    stream = io.BytesIO(raw + b'tail')
    optim.load_tensors(stream, ts)
    assert [t.tolist() for t in ts] == [[1, 2], [[3]], 4] and stream.read() == b'tail'
    assert ts[0]._version > versions[0]


def test_tensors_that_fzt1_does_not_hold():
    good, stream = fucina.variable([1.0], 'd'), io.BytesIO()
    view = fucina.constant(np.ones((2, 3)), 'a b').permute_to('b a')
    for error, t in ((errors.DTypeError, good.detach().to('bf16')), (TypeError, np.ones(3)),
                     (errors.DTypeError, fucina.constant([1], 'd'))):
        with pytest.raises(error): optim.save_tensors(stream, [good, t])
        with pytest.raises(error): optim.load_tensors(io.BytesIO(b'FZT1'), [good, t])
    assert stream.getvalue() == b''
    with pytest.raises(errors.NonContiguousParamError): optim.save_tensors(stream, [view])
    with pytest.raises(errors.NonContiguousParamError): optim.load_tensors(io.BytesIO(b'FZT1\1\0\0\0'), [view])


# -- looking ----------------------------------------------------------------------------------

@every_case
def test_inspection_lists_what_a_load_takes(d, case):
    opt, *_ = fresh(d, case, row=3)
    raw = d[f'{case}/state_after_step4'].tobytes()
    load(opt, raw)
    info = optim.inspect_state(io.BytesIO(raw + b'tail'))
    assert info.kind == type(opt).__name__ and info.size == len(raw)
    found = [*info.slots, *(s for m in info.members for s in m.slots)]
    live = [(name, slot) for _, name, slot in opt._named()]
    for s, (name, slot) in zip(found, live, strict=True):
        assert (s.name, s.shape) == (name, (slot.param.rows, slot.param.cols))
        assert s.master == (len(slot.param.master) > 0)
        assert s.numbers.get('step', slot.step) == slot.step
        assert list(s.state) == [f'{b} {"bf16" if a.dtype == np.uint16 else "f32"}'
                                 for b, a in zip(slot.buffers, slot.arrays()) if a.size]
    for text in (repr(info), info._repr_html_()):
        assert live[0][0] in text and raw[:4].decode() in text


def test_every_layout_is_known():
    magics = {m.decode() for m in LAYOUTS}
    assert {'FZAD', 'FZD4', 'FZD5', 'FZA3', 'FZA4', 'FZA5', 'FZS3', 'FZS4', 'FZS5', 'FZM3', 'FZM4',
            'FZM5', 'FZP3', 'FZP5'} <= magics
