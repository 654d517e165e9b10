"""Ternary weights: packing, products, flips, votes, files and the network, to the bit."""
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fucina
from fucina import errors, es
from fucina.data import two_spirals
from fucina.es import genome, ternary
from fucina.es.forward import TernaryNet
from fucina.es.genome import (TernarySlots, elect, flip, flip_count, load_genome, save_genome,
                              step, undo, update_count)
from fucina.es.rewards import Config, fold, reward_stats, shape
from fucina.es.ternary import (BlockQ8_K, BlockTQ2_0, TernaryMatrix, absmean, decode, encode,
                               multiply, quantize, trits)
from fucina.kernels import set_workers
from fucina.rng import at, at_array, gaussian_fill, uniform_fill
from fucina.safetensors import DType, File, TensorEntry, save_file_atomic

f32, u8 = np.float32, np.uint8
GOLDENS = Path(__file__).parent / 'goldens'
TERNARY, ES = np.load(GOLDENS / 'ternary.npz'), np.load(GOLDENS / 'es.npz')
THREADS = 1, 2, 3, 7
R0, R1 = (0.1, 0.9, -0.4, 0.35), (1, -1, 0.25, 0.5)


def fnv(a):
    h = 0xcbf29ce484222325
    for b in np.ascontiguousarray(a).tobytes(): h = (h ^ b) * 0x100000001b3 % 2**64
    return f'{h:016x}'


def noise(seed, shape, scale=1.0): return gaussian_fill(seed, np.empty(shape, f32), scale)


def codes_to_blocks(codes, d=None):
    "Pack codes 0, 1, 2 by the rule of the format, in NumPy."
    codes = np.asarray(codes, u8).reshape(-1, 2, 4, 32)
    blocks = np.zeros(len(codes), BlockTQ2_0)
    for lane in range(4): blocks['qs'].reshape(-1, 2, 32)[:] |= codes[:, :, lane] << u8(2 * lane)
    blocks['d'] = 1 if d is None else d
    return blocks


def seeded(seed, blocks):
    "The genome of the worked vectors."
    codes = (at_array(seed, np.arange(blocks * 256)) % 3).astype(np.int64).reshape(blocks, 64, 4)
    out = np.zeros(blocks, BlockTQ2_0)
    out['qs'] = codes @ 4**np.arange(4)
    out['d'] = (0x3C00 + np.arange(blocks)).astype(np.uint16).view(np.float16)
    return out


@pytest.fixture(params=THREADS)
def threads(request, monkeypatch):
    "Several threads even for a small case."
    monkeypatch.setattr(ternary, 'LEAST', 1)
    monkeypatch.setattr(ternary, 'CHUNK', 256)
    monkeypatch.setattr(ternary, 'LANES', 16)
    monkeypatch.setattr(ternary, 'COLUMNS', 60)
    old = set_workers(request.param)
    yield request.param
    set_workers(old)


def update(slots, config, iteration, rewards):
    rewards = np.asarray(rewards, f32)
    leaders, weights = fold(config, shape(rewards, reward_stats(rewards), config.reward_norm))
    elections = slots.elect(config, iteration, leaders, weights)
    slots.step(elections)
    return elections


def trainer(*genomes):
    slots = TernarySlots()
    for g in genomes: slots.add(g)
    return slots


# -- the format -------------------------------------------------------------------------------

def test_layout():
    assert BlockTQ2_0.itemsize == 66 and BlockQ8_K.itemsize == 292
    assert BlockTQ2_0.fields['d'][1] == 64 and BlockQ8_K.fields['bsums'][1] == 260
    codes = (at_array(4, np.arange(1024)) % 3).astype(u8)
    blocks = codes_to_blocks(codes, 0.5)
    assert np.array_equal(trits(blocks).reshape(-1), codes.astype(np.int8) - 1)
    assert np.array_equal(decode(blocks), (codes.astype(f32) - 1) * f32(0.5))
    assert encode(decode(blocks), 0.5).tobytes() == blocks.tobytes()
    raw = blocks.view(u8).reshape(-1, 66)
    assert np.array_equal(decode(raw), decode(blocks)) and np.shares_memory(raw, blocks)


def test_codec_goldens(threads):
    x, d = TERNARY['codec/x'], TERNARY['codec/scaled_d'][0]
    for name, blocks in (('', encode(x)), ('scaled_', encode(x, d))):
        assert blocks.tobytes() == TERNARY[f'codec/{name}blocks'].tobytes()
        stored = TERNARY[f'codec/{name}blocks']
        assert decode(stored).tobytes() == TERNARY[f'codec/{name}decoded'].tobytes()
        out = np.empty(x.shape, f32)
        assert decode(stored, out) is out
        assert out.tobytes() == TERNARY[f'codec/{name}decoded'].tobytes()


def test_rounding():
    x = np.zeros(256, f32)
    x[:10] = 0.5, -0.5, 0.49999997, -0.49999997, 7, -7, np.inf, -np.inf, np.nan, -0.0
    assert trits(encode(x, 1))[0, :10].tolist() == [1, -1, 0, 0, 1, -1, 1, -1, 0, 0]
    assert not np.isnan(f32(encode(x)['d'][0]))  # NaN is no largest size
    assert encode(np.zeros(256, f32)).tobytes() == bytes([0x55] * 64 + [0, 0])
    assert absmean(np.zeros(7, f32)) == f32(1e-5)
    sizes = noise(1, 70_001)
    total = 0.0
    for v in np.abs(sizes).tolist(): total += v
    assert absmean(sizes) == f32(total / sizes.size)


@pytest.mark.parametrize('x, d', [(np.zeros(0, f32), None), (np.zeros(255, f32), None),
                                  (np.zeros(256, f32), 0), (np.zeros(256, f32), -1),
                                  (np.zeros(256, f32), float('nan'))])
def test_lengths_and_scales_are_checked(x, d):
    with pytest.raises(errors.InvalidQuantizedLengthError): encode(x, d)


def test_arguments_are_checked():
    blocks = codes_to_blocks(np.ones(512))
    with pytest.raises(errors.DTypeError, match='float32 array, got float64'): encode(np.zeros(256))
    with pytest.raises(errors.DTypeError, match='66 columns'): decode(np.zeros((2, 65), u8))
    with pytest.raises(errors.DTypeError, match='not list'): decode([1])
    with pytest.raises(errors.UnsupportedViewError): decode(codes_to_blocks(np.ones(768))[::2])
    with pytest.raises(errors.InvalidQuantizedLengthError): decode(blocks, np.empty(256, f32))
    with pytest.raises(errors.DTypeError): decode(blocks, np.empty(512))
    with pytest.raises(errors.ReadOnlyDataError):
        out = np.empty(512, f32)
        out.flags.writeable = False
        decode(blocks, out)
    with pytest.raises(errors.DTypeError): quantize(np.zeros(256))
    with pytest.raises(errors.InvalidQuantizedLengthError): quantize(np.zeros((2, 200), f32))


# -- eight-bit rows and the product -----------------------------------------------------------

def rounded(x):
    "Q8_K, one block at a time."
    out = np.zeros(x.shape[:-1] + (x.shape[-1] // 256,), BlockQ8_K)
    for v, block in zip(x.reshape(-1, 256), out.reshape(-1)):
        size = np.abs(v)
        if not size.max(): continue
        inverse = f32(-127) / v[np.argmax(size)]
        q = np.minimum(127, np.rint(inverse * v)).astype(np.int8)
        block['d'], block['qs'] = f32(1) / inverse, q
        block['bsums'] = q.reshape(16, 16).astype(int).sum(1)
    return out


def product(x, blocks, columns):
    q, w = quantize(x), blocks.reshape(columns, -1)
    t = trits(w).reshape(*w.shape, 256).astype(f32)
    y = np.zeros((len(x), columns), f32)
    for b in range(w.shape[1]):
        scale = w['d'][:, b].astype(f32) * q['d'][:, b, None]
        y = y + scale * (q['qs'][:, b].astype(f32) @ t[:, b].T)
    return y


def test_rows_of_eight_bits(threads):
    x = noise(1, (9, 512))
    x[1] = 0
    x[2, 256:] = x[2, 0]  # all equally large: the first one counts
    x[3, 5], x[3, 9] = -9, 9
    x[4] *= f32(1e-30)
    assert quantize(x).tobytes() == rounded(x).tobytes()
    assert quantize(x)['d'][3, 0] > 0 and quantize(x)['qs'][3, 0, 5] == -127


def test_rows_that_have_no_size():
    x = noise(1, (5, 256))
    x[0, 3], x[1, 200], x[2, 0] = np.nan, np.inf, -np.inf
    x[3] = f32(1e-45)  # its reciprocal is no float32
    q = quantize(x)
    assert np.isnan(q['d'][:3]).all() and not q['qs'][:4].any() and q['d'][3, 0] == 0
    y = np.empty((5, 64), f32)
    for rows in (5, 20):
        many = np.concatenate([x] * (rows // 5))
        y = np.empty((rows, 64), f32)
        multiply(many, encode(noise(2, (64, 256))), y)
        assert np.isnan(y[:3]).all() and not y[3].any() and np.isfinite(y[4]).all()


@pytest.mark.parametrize('rows, columns, depth', [
    (1, 256, 1), (1, 7, 3), (15, 70, 2), (16, 47, 1), (16, 48, 2), (33, 130, 2), (130, 2, 1),
    (129, 49, 2)])
def test_product(threads, rows, columns, depth):
    x, w = noise(1, (rows, 256 * depth)), encode(noise(2, (columns, 256 * depth), 0.1))
    x[0, :256] = 0
    y = np.full((rows, columns), 7, f32)
    multiply(x, w, y)
    assert y.tobytes() == product(x, w, columns).tobytes()


def test_largest_sums_fit_into_sixteen_bits():
    x = np.ones((20, 256), f32)
    x[1::2] = -1
    for value in (-1, 1):
        w = encode(np.full((64, 256), value, f32))
        y = np.empty((20, 64), f32)
        multiply(x, w, y)
        assert np.array_equal(y, x @ np.full((256, 64), value, f32))
        few = np.empty((1, 64), f32)
        multiply(x[:1], w, few)
        assert np.array_equal(few, y[:1])


def test_a_sum_of_zero_is_plus_zero():
    x = np.ones((20, 256), f32)
    w = encode(np.tile(np.array([1, -1], f32), 64 * 128))
    for rows in (1, 20):
        y = np.empty((rows, 64), f32)
        multiply(x[:rows], w, y)
        assert not np.signbit(y).any() and not y.any()


def test_code_3_in_memory_reads_nothing_foreign():
    "Not a result, but no crash either: any byte is a line of the table."
    w = encode(noise(1, (64, 256)))
    w['qs'] = 255
    multiply(noise(2, (32, 256)), w, np.empty((32, 64), f32))


# -- a matrix ---------------------------------------------------------------------------------

@pytest.fixture
def matrix():
    return TernaryMatrix.encode(fucina.constant(noise(1, (6, 512)), 'out in'), 0.7)


def test_matrix_in_dot_and_gather(matrix):
    dense = matrix.to('f32')
    x = fucina.variable(noise(2, (3, 512)), 'batch in')
    y = fucina.variable(noise(3, (3, 6)), 'batch out')
    for v, tag in ((x, 'in'), (y, 'out')):
        a, b = v.dot(matrix, tag), v.dot(dense, tag)
        assert a.tags == b.tags and a.numpy().tobytes() == b.numpy().tobytes()
        grads = []
        for product in (a, b):
            v.zero_grad()
            product.sum_all().backward()
            grads.append(v.grad.numpy().tobytes())
        assert grads[0] == grads[1]
    picked = fucina.gather(matrix, 'out', [5, 0, 5], 'word')
    assert picked.tags == ('word', 'in')
    assert np.array_equal(picked.numpy(), dense.numpy()[[5, 0, 5]])
    assert matrix.to('bf16').dtype == 'bf16'
    with pytest.raises(errors.IndexOutOfBoundsError): fucina.gather(matrix, 'out', [6])
    with pytest.raises(errors.TagError): fucina.gather(matrix, 'in', [0])


def test_matrix_borrows_its_blocks(matrix):
    matrix.blocks['qs'] = 0
    matrix.blocks['d'] = 2
    assert (matrix.widen() == -2).all()
    other = copy.deepcopy(matrix)
    other.blocks['d'] = 1
    assert (matrix.widen() == -2).all() and (other.widen() == -1).all()
    out = np.empty((6, 512), f32)
    assert matrix.widen(out) is out
    with pytest.raises(errors.ShapeMismatchError): matrix.widen(np.empty((512, 6), f32))
    assert repr(matrix) == 'TernaryMatrix[out=6, in=512] 792 bytes'
    assert (matrix.dtype, matrix.size, matrix.nbytes) == ('tq2_0', 3072, 792)


def test_matrix_is_checked():
    blocks = codes_to_blocks(np.ones(512))
    assert TernaryMatrix(blocks, 'out in', (2, 256)).shape == (2, 256)
    for tags, sizes, error in (('out in', (1, 256), errors.InvalidConfigError),
                               ('out in', (4, 128), errors.InvalidQuantizedLengthError),
                               ('out in', (0, 256), errors.InvalidShapeError),
                               ('out', (2, 256), errors.TagError),
                               ('in', (512,), errors.TagError)):
        with pytest.raises(error): TernaryMatrix(blocks, tags, sizes)
    blocks['qs'][1, 7] = 0b11_01_00_10
    with pytest.raises(errors.InvalidConfigError, match='block 1 holds code 3'):
        TernaryMatrix(blocks, 'out in', (2, 256))


def test_dot_int8(matrix, threads):
    x = noise(2, (2, 512, 3))
    t = fucina.constant(x, 'batch in time')
    y = matrix.dot_int8(t)
    assert y.tags == ('batch', 'time', 'out') and y.shape == (2, 3, 6)
    rows = np.ascontiguousarray(x.transpose(0, 2, 1)).reshape(-1, 512)
    assert y.numpy().tobytes() == product(rows, matrix.blocks, 6).tobytes()
    one = matrix.dot_int8(fucina.constant(rows[0], 'in'))
    assert one.tags == ('out',) and one.numpy().tobytes() == y.numpy()[0, 0].tobytes()
    exact = t.dot(matrix, 'in').numpy()
    assert np.abs(y.numpy() - exact).max() < 0.02 * np.abs(exact).max()


def test_dot_int8_is_checked(matrix):
    x = noise(2, (3, 512))
    with pytest.raises(errors.UnsupportedGradientError):
        matrix.dot_int8(fucina.variable(x, 'batch in'))
    with fucina.no_grad(): assert not matrix.dot_int8(fucina.variable(x, 'b in')).requires_grad
    with pytest.raises(errors.TagError, match="no axis 'in'"):
        matrix.dot_int8(fucina.constant(x, 'batch feature'))
    with pytest.raises(errors.TagError, match="an axis 'out' too"):
        matrix.dot_int8(fucina.constant(x, 'out in'))
    with pytest.raises(errors.ShapeMismatchError, match=r'left is \[b=3, in=256\]'):
        matrix.dot_int8(fucina.constant(x[:, :256].copy(), 'b in'))
    with pytest.raises(errors.DTypeError):
        matrix.dot_int8(fucina.constant(x, 'b in').to('f16'))


def test_a_registry_holds_no_genome(matrix):
    class Model:
        def __init__(self): self.w, self.m = fucina.variable(np.ones(3), 'd'), matrix
    registry = fucina.ParamRegistry()
    registry.collect(Model())
    assert [v.name for v in registry] == ['w']


def test_an_adapter_stands_on_a_ternary_matrix(matrix):
    class Model:
        def __init__(self): self.w = matrix
    model = Model()
    fucina.lora.attach(model, 'w', rank=2, alpha=4, seed=1)
    x = fucina.constant(noise(2, (3, 512)), 'batch in')
    assert np.array_equal(x.dot(model.w, 'in').numpy(), x.dot(matrix, 'in').numpy())


# -- flips ------------------------------------------------------------------------------------

def reference_flips(stream, n, length, mirror=False):
    for i in range(n):
        yield at(stream, 2 * i) % length, (1 if at(stream, 2 * i + 1) & 1 else -1) * (
            -1 if mirror else 1)


def reference_member(values, stream, n, mirror):
    out = values.copy()
    for e, delta in reference_flips(stream, n, out.size, mirror):
        out[e] = min(1, max(-1, int(out[e]) + delta))
    return out


def test_flip_count():
    rates, lengths, out = (ES[f'flip_count/{k}'] for k in ('rate', 'len', 'out'))
    assert [[flip_count(r, int(n)) for n in lengths] for r in rates] == out.tolist()
    cases = (256, 0.001), (2048, 0.001), (65536, 0.002), (512, 0.002), (256, 1.0)
    assert [flip_count(r, n) for n, r in cases] == [1, 2, 131, 1, 256]
    assert flip_count(2.5 / 256, 256) == 3  # half away from zero
    assert [update_count(6 / 512, 0.5, t, 512) for t in range(4)] == [6, 4, 3, 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 400), st.booleans(), st.integers(0, 3))
def test_flips_against_a_reference(stream, n, mirror, start):
    values = (np.full(512, start - 1) if start < 3 else
              (at_array(stream, np.arange(512)) % 3).astype(int) - 1)
    blocks = codes_to_blocks(values + 1, 0.5)
    before, log = blocks.copy(), np.empty(n, np.int64)
    flip(blocks, stream, log, mirror)
    assert np.array_equal(trits(blocks).reshape(-1),
                          reference_member(values, stream, n, mirror))
    assert (blocks['d'] == 0.5).all()
    undo(blocks, log)
    assert blocks.tobytes() == before.tobytes()


def test_mirrors_of_zeros_are_opposite():
    blocks = codes_to_blocks(np.ones(1024))
    a, b = blocks.copy(), blocks.copy()
    flip(a, 7, np.empty(300, np.int64))
    flip(b, 7, np.empty(300, np.int64), mirror=True)
    assert np.array_equal(trits(a), -trits(b)) and trits(a).any()


@pytest.mark.parametrize('start', ['random', 'ones'])
def test_round_trip_with_collisions(start):
    values = np.full(768, 2) if start == 'ones' else at_array(1, np.arange(768)) % 3
    blocks, config = codes_to_blocks(values), Config(population=8, ternary_flip_rate=0.05)
    slots = trainer(blocks)
    before = blocks.tobytes()
    for iteration in range(3):
        for member in range(8):
            slots.perturb(config, iteration, member)
            assert len(slots.logs[0]) == 38 and blocks.tobytes() != before
            slots.restore()
            assert blocks.tobytes() == before


# -- votes ------------------------------------------------------------------------------------

def reference_election(length, streams, weights, flips, most):
    votes = {}
    for stream, c in zip(streams, weights):
        for e, delta in reference_flips(stream, flips, length):
            votes[e] = f32(votes.get(e, f32(0)) + f32(c * f32(delta)))
    kept = sorted(((-abs(v), e, v) for e, v in votes.items() if v != 0))[:most]
    return [(e, float(v)) for _, e, v in kept]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 300), st.integers(1, 400),
       st.sampled_from(['noise', 'halves', 'zeros']))
def test_votes_against_a_reference(seed, members, flips, most, kind):
    streams = at_array(seed, np.arange(members))
    weights = noise(seed, members)
    if kind == 'halves': weights = np.rint(weights * 2) / 2  # ties and cancellations
    if kind == 'zeros': weights = weights * 0
    found = elect(512, streams, weights.astype(f32), flips, most)
    assert list(zip(found.places.tolist(), found.votes.tolist())) == reference_election(
        512, streams.tolist(), weights.astype(f32), flips, most)


@pytest.mark.parametrize('most', [1, 5, 40, 10_000])
def test_a_step_moves_by_one_towards_the_vote(most):
    blocks = encode(noise(3, 1024), 0.6)
    before, scales = trits(blocks).reshape(-1).astype(int), blocks['d'].copy()
    found = elect(1024, at_array(5, np.arange(9)), noise(6, 9), 60, most)
    step(blocks, found)
    change = trits(blocks).reshape(-1) - before
    moved = np.flatnonzero(change)
    votes = dict(zip(found.places.tolist(), found.votes.tolist()))
    assert 0 < len(found.places) <= most and len(moved) <= len(found.places)
    for e in moved.tolist(): assert change[e] == np.sign(votes[e])
    for e, v in votes.items():  # who stays was at its rail
        if not change[e]: assert before[e] == np.sign(v)
    assert np.array_equal(blocks['d'], scales)


def test_decay_shrinks_the_update():
    blocks = codes_to_blocks(at_array(1, np.arange(512)) % 3)
    config = Config(population=8, ternary_update_fraction=16 / 512, ternary_update_decay=1,
                    ternary_flip_rate=0.1, reward_norm='none')
    slots, before = trainer(blocks), blocks.tobytes()
    update(slots, config, 0, np.zeros(8))
    assert blocks.tobytes() == before
    found = update(slots, config, 1, np.arange(8))
    assert len(found[0].places) == 8


def test_genomes_have_votes_and_streams_of_their_own():
    a, b = (codes_to_blocks(np.ones(512)) for _ in range(2))
    config = Config(population=4, ternary_flip_rate=0.05)
    slots = trainer(a, b)
    slots.perturb(config, 0, 1)
    assert a.tobytes() != b.tobytes()
    slots.restore()
    found = slots.elect(config, 0, range(4), np.arange(4, dtype=f32))
    alone = trainer(a).elect(config, 0, range(4), np.arange(4, dtype=f32))
    assert found[0].places.tolist() == alone[0].places.tolist() != found[1].places.tolist()


# -- golden runs ------------------------------------------------------------------------------

@pytest.mark.parametrize('case', [f'case{k:02}' for k in range(12)])
def test_golden_runs(threads, case):
    floats = fucina.constant(TERNARY['init/float_slot'], 'd')
    genomes = [TERNARY[f'init/slot{k}'].copy() for k in range(2)]
    t = es.Trainer(**json.loads(str(TERNARY[f'{case}/config'])))
    t.add_ternary_param(genomes[0], 512)
    t.add_param(floats)
    t.add_ternary_param(genomes[1], 256)
    def golden(name, *at): return TERNARY[f'{case}/{name}'][at].tobytes()
    for i in range(3):
        for m in range(4):
            before = [g.tobytes() for g in genomes]
            copies = [np.zeros_like(g) for g in genomes]
            t.materialize_ternary_member(m, copies)
            t.perturb(m)
            assert floats.numpy().tobytes() == golden('perturbed_float', i, m)
            for k, g in enumerate(genomes):
                assert g.tobytes() == copies[k].tobytes() == golden(f'perturbed_slot{k}', i, m)
                if i == 1: assert g.tobytes() == golden(f'materialized_iter1_slot{k}', m)
            t.restore(m)
            assert [g.tobytes() for g in genomes] == before
        t.update(TERNARY['rewards'][i])
        assert floats.numpy().tobytes() == golden('updated_float', i)
        for k, g in enumerate(genomes): assert g.tobytes() == golden(f'updated_slot{k}', i)


MEMBERS = '''
6954a6409aaa5624981992a1192829aa62a16260449456684200488249aa1698a1a6a612456486095685909100500a59a022896505a68064a88a94188a8a2159003c
6954a6409aaa5624981992a1192829aa62a06260449456684200488246aa1698a5a6a616456486091689909100500a69a022856505a68068a88a9418898a2159003c
6954a6409aaa5624981992a1192829aa62a0226044945668420048825aa65698a5a6a612456486095685909100500a59a022856505a68064a88a94088a8a2159003c
6954a6409aaa5624981992a1196829aa62a0626044945668420048828aaa1698a556a612456486095685909100500a59a022856505a68064a88a94188a8a2159003c
'''.split()
UPDATES = '''
6954a6409aaa5624981992a1192829aa62a06260449456684200488246aa1698a5a6a616456486095689909100500a59a022856505a68068a88a9418898a2159003c
6954a6409a6a4624991992a1192829aa62a06260449456684200488146aa1698a5a6a616456486095689909200500a59a022856505a68068a88a9418898a2159003c
'''.split()


def test_one_block_bit_for_bit():
    blocks, config = seeded(0x7E57, 1), Config(population=4, ternary_flip_rate=8 / 256,
                                               ternary_update_fraction=6 / 256, seed=42)
    slots = trainer(blocks)
    for member, want in enumerate(MEMBERS):
        slots.perturb(config, 0, member)
        assert blocks.tobytes().hex() == want
        slots.restore()
    moves = {60: -1.4149693, 105: -1.4149693, 156: -1.4149693, 163: 1.4149693,
             169: 1.4149693, 183: 1.4149693}
    for iteration, (rewards, want) in enumerate(zip((R0, R1), UPDATES)):
        found, = update(slots, config, iteration, rewards)
        assert blocks.tobytes().hex() == want
        if iteration == 0:
            assert dict(zip(found.places.tolist(), found.votes)) == pytest.approx(moves, abs=1e-6)


def test_pairs_with_decay_bit_for_bit():
    blocks = seeded(0x51ED, 2)
    config = Config(population=6, antithetic=True, ternary_flip_rate=0.05, seed=7,
                    ternary_update_fraction=0.02, ternary_update_decay=0.5)
    slots, found = trainer(blocks), []
    for iteration in range(3):
        slots.perturb(config, iteration, 3)
        found.append(fnv(blocks))
        slots.restore()
        update(slots, config, iteration, (0.5, -0.25, 1.5, 1.0, -2.0, 0.0))
        found.append(fnv(blocks))
    assert found == ['de62b22d1e584f78', 'f75c1dadb773f1db', 'aac6527099996aea',
                     'e24e9147a2c887fc', '27c39667ddd4ca9f', 'e819d320da0d99d6']


def test_hamming_run_bit_for_bit():
    blocks, target = codes_to_blocks(np.ones(512)), at_array(99, np.arange(512)) % 3
    target = target.astype(int).reshape(2, 256) - 1
    t = es.Trainer(population=32, antithetic=True, ternary_flip_rate=4 / 512, seed=7,
                   ternary_update_fraction=8 / 512)
    t.add_ternary_param(blocks, 512)
    def distance(member=None): return np.count_nonzero(trits(blocks) != target)
    path = []
    for _ in range(300):
        path.append(distance())
        t.step(lambda member: -f32(distance()) / f32(512))
    assert [path[k] for k in (0, 1, 10, 100)] + [distance()] == [365, 359, 325, 139, 78]


# -- the network of the spirals ---------------------------------------------------------------

def spiral_net(seed=42):
    bound = float(np.sqrt(f32(0.5)))
    w1 = uniform_fill(at(seed, 0), np.empty((2, 256), f32), -bound, bound)
    d = f32(1) / np.sqrt(f32(512) / f32(3)) * f32(3)
    def layer(k, out):
        u = uniform_fill(at(seed, k), np.empty((out, 256), f32), 0, 3)
        t = np.floor(np.minimum(u, f32(2.5))) - f32(1)
        return TernaryMatrix.encode(fucina.constant(t * d, 'out in'), d)
    biases = [fucina.zeros(n, 'out') for n in (256, 256, 2)]
    return TernaryNet(fucina.constant(w1, 'in out'), biases, [layer(1, 256), layer(2, 2)])


def tanh_rational(z):
    x = np.clip(z, f32(-4.9), f32(4.9))
    s = x * x
    p = x * (f32(135135) + s * (f32(17325) + s * (f32(378) + s)))
    return p / (f32(135135) + s * (f32(62370) + s * (f32(3150) + s * f32(28))))


def layers_of(net, x):
    "Every value on the way, in NumPy."
    w = net.first.numpy()
    z = x[:, :1] * w[0]
    for k in range(1, len(w)): z = z + x[:, k:k + 1] * w[k]
    for b, m in zip(net.biases, net.layers):
        yield z
        a = tanh_rational(z + b.numpy())
        yield a
        z = product(a, m.blocks, m.shape[0])
    yield z


def test_initial_network_of_the_spirals(threads):
    net, (x, labels) = spiral_net(), two_spirals(97, 42)
    assert fnv(net.first.numpy()) == '5240189d4d0d1acb'
    assert [fnv(m.blocks) for m in net.layers] == ['d32154d59f22ac33', '0893723d319c69e0']
    assert net.layers[0].blocks['d'].view(np.uint16)[0] == 0x3359
    z1, a1, z2, a2, logits = layers_of(net, x)
    assert fnv(z2) == 'f9fb456cd848d728' and fnv(a2) == 'f72403f728d6e875'
    q = quantize(a2)[0, 0]
    assert q['d'].view(np.uint32) == 0x3b7b036e and q['qs'][:4].tolist() == [20, -10, 1, -57]
    assert q['bsums'][:2].tolist() == [-137, -243]
    assert fnv(net(x)) == fnv(logits) == '1736361b74df9204'
    first = ' '.join(f'{b:08x}' for b in net(x).reshape(-1)[:8].view(np.uint32))
    assert first == ('bf400bb9 beaa3502 3f0e07b4 3e5912a7 '
                     'bf732937 bee055ec 3f6caae6 3ee18405')
    loss, hits = net.cross_entropy(x, labels)
    assert hits == 103 and abs(int(loss.view(np.uint32)) - 0x3f37cb45) <= 1


REWARDS = '''
bf3fdb33 bf4d37f5 bf46d5fb bf43378e bf4451cc bf48e88d bf34a922 bf3b3b53 bf32b90f bf4dcaa4 bf4d2763
bf45961d bf42e2a0 bf313049 bf34fee2 bf37417e bf400797 bf32e70d bf5c60d3 bf4c2728 bf3912fd bf45ea6c
bf3cf641 bf3492b2 bf45287a bf44cd82 bf3326be bf3f5eff bf459119 bf4b5a6d bf371421 bf3914d0 bf3dbc7a
bf3aff5c bf44bcd1 bf464a6a bf3562bf bf407046 bf40ec83 bf4992f2 bf3e9447 bf3b73da bf36d1d0 bf424a0a
bf37802b bf392bdf bf442fd9 bf482c73 bf3ea741 bf32e135 bf44f06f bf477fe8 bf529aa1 bf592b88 bf33bd02
bf3ebfa5 bf458045 bf3c38c5 bf441986 bf34d423 bf32fd91 bf39ec2d bf53adac bf3d80eb bf4dd224 bf4ab010
bf40f351 bf3487ac bf3d3666 bf32b9cb bf40a295 bf31e66d bf4bb7d2 bf2eefca bf3e966b bf355a6f bf3d7d6a
bf4633c2 bf38e23d bf421c9f bf3c3eae bf37ed89 bf373bd3 bf34c875 bf35a180 bf353820 bf317422 bf47e2a2
bf38354f bf41d46c bf441b47 bf4fcda0 bf393cdb bf3f8bce bf33e8bf bf42a92e bf4a4d3d bf415696 bf3db0c9
bf376db1 bf3d13dd bf4edfbb bf3cc1a3 bf32b694 bf36acb1 bf48fa9b bf495c8b bf512c9f bf40064c bf3a78b2
bf458a7f bf41ebbc bf3f6065 bf3e3731 bf340be3 bf40615d bf3e4a24 bf3629da bf3b6263 bf3c3bfd bf3aa0a6
bf4610d4 bf451c88 bf3653a7 bf37b1f3 bf3365ba bf418a40 bf306f5c
'''.split()


def spiral_trainer(net):
    t = es.Trainer(sigma=0.05, alpha=0.075, population=128, antithetic=True,
                   ternary_flip_rate=0.002, ternary_update_fraction=0.001)
    for p in (net.first, *net.biases): t.add_param(p)
    for k, m in enumerate(net.layers): t.add_ternary_param(m, m.size, f'layers.{k}')
    return t


def test_first_update_of_the_spirals():
    net = spiral_net()
    t = spiral_trainer(net)
    assert (t.param_count(), t.element_count()) == (6, 67074)
    assert [t.ternary_flip_count(m.size) for m in net.layers] == [131, 1]
    rewards = np.array([int(h, 16) for h in REWARDS], np.uint32).view(f32)
    stats = t.update(rewards)
    assert (stats.mean_reward, stats.std_reward) == (-0.7463885047473013, 0.03610414502306549)
    found = [fnv(p.numpy()) for p in (net.first, *net.biases)]
    assert found == ['31f0361ba97e2484', 'ea2716b96729509c', '7bd7ea22a9f717bc',
                     '0a05f3691b2bdaef']
    assert [fnv(m.blocks) for m in net.layers] == ['63ad763b84f9e6ec', '355c523ee3bd06c4']


@pytest.mark.parametrize('workers', [1, 3])
def test_three_iterations_of_the_spirals(workers):
    "Rewards of our own, off by an ulp here and there from those of the original."
    net, (x, labels) = spiral_net(), two_spirals(97, 42)
    t, replicas = spiral_trainer(net), [copy.deepcopy(net) for _ in range(workers)]
    first = np.array([int(h, 16) for h in REWARDS], np.uint32).view(f32)
    def score(worker, member):
        r = replicas[worker]
        t.materialize_member(member, [p.data() for p in (r.first, *r.biases)])
        t.materialize_ternary_member(member, [m.blocks for m in r.layers])
        return -r.cross_entropy(x, labels)[0]
    found = []
    for _ in range(3):
        rewards = t.evaluate_members(score, workers=workers)
        if not found:
            off = np.abs(rewards.view(np.int32) - first.view(np.int32))
            assert off.max() <= 1 and np.count_nonzero(off) <= 8
        t.update(rewards)
        found.append([fnv(m.blocks) for m in net.layers])
    assert found == [['63ad763b84f9e6ec', '355c523ee3bd06c4'],
                     ['05d0f3433537349c', 'fcff6cf5bfcceb94'],
                     ['68edeba6bb5585c5', '141d0bdae1a73054']]


@pytest.mark.parametrize('inputs, sizes, examples', [
    (1, (256, 3), 5), (3, (512, 256, 256, 4), 40), (2, (256, 60), 1), (2, (256, 256, 2), 700)])
def test_network_against_numpy(threads, inputs, sizes, examples):
    biases = [fucina.constant(noise(9, n, 0.1), 'out') for n in sizes]
    layers = [TernaryMatrix.encode(fucina.constant(noise(k, (m, n), 0.1), 'out in'))
              for k, (n, m) in enumerate(zip(sizes, sizes[1:]))]
    net = TernaryNet(fucina.constant(noise(8, (inputs, sizes[0])), 'in out'), biases, layers)
    x = noise(7, (examples, inputs))
    x[0] = 100
    *_, z = layers_of(net, x)
    assert net(x).tobytes() == (z + biases[-1].numpy()).tobytes()
    other = copy.deepcopy(net)
    other.layers[0].blocks['d'] *= 2
    assert net(x).tobytes() == (z + biases[-1].numpy()).tobytes() != other(x).tobytes()


def test_network_is_checked():
    net = spiral_net()
    with pytest.raises(errors.ShapeMismatchError): net(np.zeros((3, 3), f32))
    with pytest.raises(errors.ShapeMismatchError): net(np.zeros((3, 2)))
    with pytest.raises(errors.ShapeMismatchError, match='no chain'):
        TernaryNet(net.first, net.biases, net.layers[::-1])
    with pytest.raises(errors.ShapeMismatchError, match='biases of'):
        TernaryNet(net.first, net.biases[:2], net.layers)
    with pytest.raises(errors.InvalidDataLengthError):
        net.cross_entropy(np.zeros((3, 2), f32), np.zeros(2, int))
    with pytest.raises(errors.IndexOutOfBoundsError):
        net.cross_entropy(np.zeros((3, 2), f32), np.full(3, 2))
    x = np.zeros((3, 2), f32)
    x[1] = np.nan
    assert np.isnan(net(x)[1]).all() and np.isfinite(net(x)[[0, 2]]).all()


# -- registration -----------------------------------------------------------------------------

def test_registration_errors_of_the_original():
    lines = str(TERNARY['errors']).strip().splitlines()
    assert len(lines) == 6
    slots, blocks = TernarySlots(), codes_to_blocks(np.ones(512))
    broken = blocks.copy()
    broken['qs'][1, 63] = 0xC0
    cases = {'crumb code 3': (broken, 512), 'len not multiple of 256': (blocks, 500),
             'len 0': (blocks, 0), 'len/blocks mismatch': (blocks, 256),
             'first registration': (blocks, 512),
             'second registration of the same blocks': (blocks, 512)}
    for line in lines:
        what, want = line.split(': ')
        try: slots.add(*cases[what])
        except errors.FucinaError as e: assert type(e).__name__ == want + 'Error'
        else: assert want == 'ok'
    assert len(slots) == 1
    broken['qs'][1, 63] = 0x55
    slots.add(broken, 512, 'repaired')
    assert list(slots.by_name()) == ['ternary0', 'repaired']


def test_registration_order_of_checks():
    blocks = codes_to_blocks(np.ones(512))
    slots = trainer(blocks)
    blocks['qs'][0] = 255
    with pytest.raises(errors.DuplicateParamError): slots.add(blocks)  # before its codes
    with pytest.raises(errors.InvalidConfigError, match='512 trits are 2 blocks'):
        slots.add(blocks[:1], 512)  # its length before its address
    slots.add(codes_to_blocks(np.ones(512))[1:])  # a part of other memory
    frozen = codes_to_blocks(np.ones(256))
    frozen.flags.writeable = False
    with pytest.raises(errors.ReadOnlyDataError): slots.add(frozen)
    with pytest.raises(errors.UnsupportedViewError): slots.add(codes_to_blocks(np.ones(768))[::2])
    assert len(slots) == 2


def test_materialize_checks_before_it_writes():
    blocks, config = codes_to_blocks(np.ones(512)), Config(population=4)
    slots = trainer(blocks, codes_to_blocks(np.ones(256)))
    good, bad = np.zeros(2, BlockTQ2_0), np.zeros(2, BlockTQ2_0)
    for dst in ([good], [good, bad], [good, bad, bad]):
        with pytest.raises(errors.ReplicaShapeMismatchError): slots.materialize(config, 0, 0, dst)
    assert not good.view(u8).any()


def test_an_interrupt_between_genomes_takes_the_flips_back(monkeypatch):
    genomes = [codes_to_blocks(np.ones(512)) for _ in range(3)]
    slots, before, calls = trainer(*genomes), genomes[0].tobytes(), []
    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2: raise KeyboardInterrupt
        flip(*args)
    monkeypatch.setattr(genome, 'flip', interrupted)
    with pytest.raises(KeyboardInterrupt):
        slots.perturb(Config(population=4, ternary_flip_rate=0.1), 0, 0)
    assert [g.tobytes() for g in genomes] == [before] * 3 and not slots.logs


# -- in a trainer -----------------------------------------------------------------------------

def test_no_call_while_a_member_is_in():
    blocks, spare = codes_to_blocks(np.ones(512)), codes_to_blocks(np.ones(512))
    t = es.Trainer(population=4)
    t.add_ternary_param(blocks, 512)
    t.perturb(2)
    inside = blocks.tobytes()
    calls = (lambda: t.perturb(1), lambda: t.update(R0), lambda: t.capture_anchor(),
             lambda: t.add_ternary_param(spare, 3), lambda: t.evaluate_members(lambda w, m: 0),
             lambda: t.materialize_ternary_member(0, []))
    for call in calls:
        with pytest.raises(errors.MemberActiveError): call()
    with pytest.raises(errors.MemberNotActiveError): t.restore(1)
    assert blocks.tobytes() == inside and t.iteration == 0
    t.restore(2)
    assert blocks.tobytes() == spare.tobytes()
    with pytest.raises(errors.MemberNotActiveError): t.restore(2)


def test_genomes_alone_are_parameters():
    t = es.Trainer(population=4, anchor_decay='l2', anchor_lambda=1, ternary_flip_rate=0.1)
    with pytest.raises(errors.NoParamsError): t.capture_anchor()
    with pytest.raises(errors.NoParamsError): t.perturb(0)
    blocks = codes_to_blocks(np.ones(256))
    t.add_ternary_param(blocks, 256)
    t.capture_anchor()
    t.update(R0)
    assert t.iteration == 1 and trits(blocks).any()
    t.materialize_member(0, [])
    with pytest.raises(errors.ReplicaShapeMismatchError): t.materialize_ternary_member(0, [])


@pytest.mark.parametrize('first', [True, False])
def test_floats_do_not_see_genomes(first):
    def floats(with_genome):
        w = fucina.constant(noise(1, 50), 'd')
        t = es.Trainer(sigma=0.1, population=4, ternary_flip_rate=0.1)
        if with_genome and first: t.add_ternary_param(codes_to_blocks(np.ones(256)), 256)
        t.add_param(w)
        if with_genome and not first: t.add_ternary_param(codes_to_blocks(np.ones(256)), 256)
        t.perturb(1)
        inside = w.numpy().tobytes()
        t.restore(1)
        t.update(R0)
        return inside, w.numpy().tobytes()
    assert floats(True) == floats(False)


@pytest.mark.parametrize('mode', ['regenerate', 'snapshot'])
def test_an_error_inside_a_step_takes_the_member_out(mode):
    blocks = codes_to_blocks(at_array(1, np.arange(512)) % 3)
    t = es.Trainer(population=4, ternary_flip_rate=0.1, restore_mode=mode)
    t.add_ternary_param(blocks, 512)
    before = blocks.tobytes()
    def score(member):
        assert blocks.tobytes() != before
        if member == 2: raise KeyboardInterrupt
        return 0
    with pytest.raises(KeyboardInterrupt): t.step(score)
    assert blocks.tobytes() == before and t.iteration == 0
    t.perturb(0)
    t.restore(0)


def test_a_failed_election_changes_nothing(monkeypatch):
    w, blocks = fucina.constant(noise(1, 50), 'd'), codes_to_blocks(np.ones(512))
    t = es.Trainer(population=4, ternary_flip_rate=0.1)
    t.add_param(w)
    t.add_ternary_param(blocks, 512)
    before = w.numpy().tobytes(), blocks.tobytes()
    def fail(*args): raise MemoryError
    monkeypatch.setattr(genome, '_tally', fail)
    with pytest.raises(MemoryError): t.update(R0)
    for rewards in ((1, 2, 3), (1, 2, np.nan, 4)):
        with pytest.raises(errors.EsError): t.update(rewards)
    assert (w.numpy().tobytes(), blocks.tobytes()) == before and t.iteration == 0
    monkeypatch.undo()
    t.update(R0)
    assert (w.numpy().tobytes() != before[0]) and (blocks.tobytes() != before[1])


def test_equal_rewards_leave_a_genome(threads):
    for norm, moves in (('z_score', False), ('centered_ranks', True)):
        blocks = codes_to_blocks(np.ones(512))
        t = es.Trainer(population=4, ternary_flip_rate=0.1, reward_norm=norm)
        t.add_ternary_param(blocks, 512)
        t.update([2.5] * 4)
        assert trits(blocks).any() == moves


def test_resume_in_a_checkpoint_directory(tmp_path):
    settings = dict(population=6, antithetic=True, ternary_flip_rate=0.05, seed=11,
                    ternary_update_fraction=0.03, ternary_update_decay=0.25)
    target = (at_array(8, np.arange(768)) % 3).astype(int).reshape(3, 256) - 1
    def run(t, blocks, n):
        for _ in range(n): t.step(lambda m: -np.count_nonzero(trits(blocks) != target))
    def start(key, **settings):
        blocks, t = codes_to_blocks(at_array(key, np.arange(768)) % 3), es.Trainer(**settings)
        t.add_ternary_param(blocks, 768, 'g')
        return blocks, t
    whole, t = start(1, **settings)
    run(t, whole, 9)
    half, t = start(1, **settings)
    run(t, half, 5)
    checkpoint = fucina.training_checkpoint
    checkpoint.begin_save(tmp_path, durable=False)
    save_genome(tmp_path, {'g': half}, durable=False)
    checkpoint.save_trainer_state(tmp_path, checkpoint.TrainerState(
        step=t.iteration, seed=t.config.seed, **t.state_fields()), durable=False)
    state = checkpoint.load_trainer_state(tmp_path)
    assert state.es_ternary_flip_rate == float(f32(0.05)) and state.es_iteration == 5
    fresh, t = start(2, population=4)
    t.restore_state(state)
    load_genome(tmp_path, {'g': fresh})
    run(t, fresh, 4)
    assert fresh.tobytes() == whole.tobytes()


# -- files ------------------------------------------------------------------------------------

@pytest.fixture
def saved(tmp_path):
    "A directory with two genomes, and their bytes."
    genomes = {'l2': encode(noise(1, 1024)), 'head': encode(noise(2, 256))}
    save_genome(tmp_path, genomes, durable=False)
    return tmp_path, genomes


def test_genomes_come_back(saved):
    folder, genomes = saved
    with File.load(folder / 'genome.safetensors') as file:
        assert {t.name: (t.dtype, t.shape) for t in file.tensors} == {
            'l2': (DType.U8, (4, 66)), 'head': (DType.U8, (1, 66))}
        assert bytes(file.tensor('l2').data) == genomes['l2'].tobytes()
    live = {name: np.zeros((len(g), 66), u8) for name, g in genomes.items()}
    load_genome(folder, live)
    for name, g in genomes.items(): assert live[name].tobytes() == g.tobytes()


def damaged(folder, **changes):
    blocks = {'l2': encode(noise(3, 1024)).view(u8).reshape(-1, 66),
              'head': encode(noise(4, 256)).view(u8).reshape(-1, 66)} | changes
    save_file_atomic(folder / 'genome.safetensors',
                     [TensorEntry(k, DType.U8 if a.dtype == u8 else DType.F32, a.shape, a)
                      for k, a in blocks.items() if a is not None], durable=False)


@pytest.mark.parametrize('changes, error', [
    ({'head': None}, errors.CheckpointMissingEntryError),
    ({'more': np.zeros((1, 66), u8)}, errors.CheckpointUnknownNameError),
    ({'head': np.zeros((2, 66), u8)}, errors.CheckpointShapeMismatchError),
    ({'head': np.zeros(66, u8)}, errors.CheckpointShapeMismatchError),
    ({'head': np.zeros((1, 66), f32)}, errors.CheckpointDtypeMismatchError),
    ({'head': np.full((1, 66), 255, u8)}, errors.InvalidConfigError)])
def test_a_damaged_file_changes_nothing(saved, changes, error):
    folder, genomes = saved
    damaged(folder, **changes)
    before = {name: g.tobytes() for name, g in genomes.items()}
    with pytest.raises(error, match='genome.safetensors: '): load_genome(folder, genomes)
    assert {name: g.tobytes() for name, g in genomes.items()} == before
    damaged(folder)
    load_genome(folder, genomes)
    assert {name: g.tobytes() for name, g in genomes.items()} != before


def test_a_cut_file_and_no_file(saved):
    folder, genomes = saved
    path = folder / 'genome.safetensors'
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.MetadataIncompleteBufferError): load_genome(folder, genomes)
    path.unlink()
    with pytest.raises(FileNotFoundError): load_genome(folder, genomes)
    for name in ('', '__metadata__'):
        with pytest.raises(errors.InvalidTensorNameError):
            save_genome(folder, {name: genomes['head']})
    assert not path.exists()
    slots = TernarySlots()
    for g in genomes.values(): slots.add(g, name='same')
    with pytest.raises(errors.CheckpointDuplicateNameError): slots.by_name()


# -- the same without a compiler --------------------------------------------------------------

PLAIN = '''
import numpy as np
from fucina.es.forward import TernaryNet
from fucina.es.genome import elect, flip, step, undo
from fucina.es.ternary import TernaryMatrix, decode, encode, multiply, quantize
from fucina.rng import at_array, gaussian_fill
import fucina, zlib
def noise(seed, shape): return gaussian_fill(seed, np.empty(shape, np.float32), 1.0)
w, x = encode(noise(1, (48, 256))), noise(2, (16, 256))
y, z = np.empty((16, 48), np.float32), np.empty((2, 48), np.float32)
multiply(x, w, y)
multiply(x[:2], w, z)
log = np.empty(20, np.int64)
flip(w, 2**64 - 1, log)
undo(w[:], log[10:])
found = elect(48 * 256, at_array(3, np.arange(4)), noise(4, 4), 20, 30)
step(w, found)
net = TernaryNet(fucina.constant(noise(5, (2, 256)), 'in out'), [fucina.zeros(n, 'out') for n in
                 (256, 2)], [TernaryMatrix(w[:2], 'out in', (2, 256))])
loss, hits = net.cross_entropy(noise(6, (3, 2)), np.array([0, 1, 0]))
print([zlib.crc32(a.tobytes()) for a in (y, z, decode(w), *found, np.array(loss))], hits)
'''


def test_without_the_compiler():
    out = [subprocess.run([sys.executable, '-c', PLAIN], capture_output=True, text=True, check=True,
                          env=dict(os.environ, NUMBA_DISABLE_JIT=off)).stdout for off in '01']
    assert out[0] == out[1] and '[' in out[0]
