"""Orders, splits and the two spirals: vectors, checksums, restarts and refusals."""
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fucina import data
from fucina.data import Batches, Order, epoch_order, stratified_split, two_spirals, xoshiro
from fucina.errors import EmptyDatasetError, InvalidLoaderStateError
from fucina.rng import MASK, at, splitmix64

GOLDENS = np.load(Path(__file__).parent / 'goldens' / 'spirals.npz')


def fnv(a):
    h = 0xcbf29ce484222325
    for byte in np.ascontiguousarray(a).tobytes(): h = (h ^ byte) * 0x100000001b3 & MASK
    return f'{h:016x}'


def bits(x): return ' '.join(f'{b:08x}' for b in np.asarray(x, np.float32).ravel().view(np.uint32))


# --- the order of an epoch

@pytest.mark.parametrize('n, seed, epoch, expected', [
    (8, 42, 0, '3 6 0 7 1 2 5 4'), (8, 42, 1, '0 3 4 5 7 2 1 6'), (5, 7, 3, '1 3 4 0 2'),
    (5, 42, 0, '4 0 2 1 3'), (5, 42, 1, '0 3 2 4 1'),
    (16, 99, 0, '13 3 2 7 10 5 8 1 14 11 9 4 12 0 15 6'), (1, 3, 0, '0')])
def test_epoch_order_vectors(n, seed, epoch, expected):
    order = epoch_order(n, seed, epoch)
    assert order.dtype == np.int64 and ' '.join(map(str, order)) == expected


@pytest.mark.parametrize('seed', [0, -1, 2**64 - 1, 10**30])
def test_epoch_order_is_the_loader_rule(seed):
    for n, epoch in [(2, 0), (7, 1), (300, 2**40)]:
        order, state = list(range(n)), at(seed, epoch)
        for i in range(n - 1, 0, -1):
            state, w = splitmix64(state)
            j = w % (i + 1)
            order[i], order[j] = order[j], order[i]
        assert epoch_order(n, seed, epoch).tolist() == order


# --- batches

@pytest.mark.parametrize('n, size', [(1, 1), (8, 3), (8, 8), (8, 100), (97, 16)])
def test_an_epoch_is_every_example_once(n, size):
    batches = Batches(n, size, seed=5)
    for epoch in range(3):
        got = list(batches)
        assert len(got) == len(batches)
        assert [b.size for b in got[:-1]] == [size] * (len(got) - 1) and 1 <= got[-1].size <= size
        assert all(b.dtype == np.int64 for b in got)
        assert np.array_equal(np.concatenate(got), epoch_order(n, 5, epoch))
        assert batches.state() == dict(data_seed=5, data_epoch=epoch + 1, data_index=0)


def test_next_does_not_end():
    batches = Batches(5, 2, seed=1)
    got = np.concatenate([next(batches) for _ in range(30)])
    assert np.array_equal(got, np.concatenate([epoch_order(5, 1, e) for e in range(10)]))


@pytest.mark.parametrize('n, size', [(1, 1), (10, 3), (12, 4)])
def test_resume_from_any_place(n, size):
    def take(batches, count): return [next(batches).tolist() for _ in range(count)]
    whole = take(Batches(n, size, seed=9), 20)
    for stop in range(20):
        first, second = Batches(n, size, seed=9), Batches(n, size, seed=123)
        take(first, stop)
        second.restore(first.state())
        assert take(second, 20 - stop) == whole[stop:]


def test_the_place_says_nothing_about_the_size():
    first, second = Batches(20, 3, seed=2), Batches(20, 7, seed=2)
    for _ in range(4): next(first)
    second.restore(first.state())
    assert np.array_equal(np.concatenate(list(second)), epoch_order(20, 2, 0)[12:])


def test_a_loop_ends_with_the_epoch_it_began_in():
    batches = Batches(10, 4, seed=0)
    next(batches)
    assert [b.size for b in batches] == [4, 2] and batches.epoch == 1
    assert [b.size for b in islice(batches, 1)] == [4] and batches.index == 4


def test_batches_belong_to_the_caller():
    batches = Batches(6, 3, seed=0)
    for batch in batches: batch[:] = -1
    batches.restore(dict(data_seed=0, data_epoch=0, data_index=0))
    assert np.array_equal(np.concatenate(list(batches)), epoch_order(6, 0, 0))


def test_restore_takes_mappings_and_records():
    place = dict(data_seed=MASK, data_epoch=2**40, data_index=3)
    for state in (place, SimpleNamespace(**place), {k: np.uint64(v) for k, v in place.items()}):
        order = Order(4, seed=0)
        order.restore(state)
        assert order.state() == place
        assert all(type(v) is int for v in order.state().values())


@pytest.mark.parametrize('change', [
    dict(data_index=5), dict(data_index=2**63), dict(data_index=-1), dict(data_index=None),
    dict(data_index=1.0), dict(data_index='1'), dict(data_index=True), dict(data_epoch=-1),
    dict(data_epoch=2**64), dict(data_seed=None), dict(data_seed=2**64)])
def test_an_impossible_place_changes_nothing(change):
    batches = Batches(5, 2, seed=8)
    next(batches)
    place = batches.state()
    with pytest.raises(InvalidLoaderStateError, match=next(iter(change))):
        batches.restore(place | change)
    for missing in place:
        with pytest.raises(InvalidLoaderStateError, match=missing):
            batches.restore({k: v for k, v in place.items() if k != missing})
    assert batches.state() == place
    assert np.array_equal(np.concatenate(list(batches)), epoch_order(5, 8, 0)[2:])


def test_bad_arguments():
    for n in (0, -3):
        with pytest.raises(EmptyDatasetError): Batches(n, 2, seed=0)
    for size in (0, -1):
        with pytest.raises(ValueError, match='size'): Batches(4, size, seed=0)
    for args in ((2.0, 1, 0), (4, 1.5, 0), (4, 1, 'x'), (4, 1, None)):
        with pytest.raises(TypeError): Batches(*args)
    assert Batches(4, 2, seed=-1).seed == MASK
    assert repr(Batches(4, 2, seed=7)) == 'Batches(n=4, size=2, seed=7): epoch 0, 0 of 4 done'


# --- the split

def test_stratified_split():
    labels = np.random.default_rng(0).integers(0, 10, 1797)
    train, test = stratified_split(labels, 0.2, seed=3)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(1797))
    assert (np.diff(train) > 0).all() and (np.diff(test) > 0).all()
    count = np.bincount(labels)
    assert np.bincount(labels[test]).tolist() == [round(c * 0.2) for c in count]
    assert all(map(np.array_equal, (train, test), stratified_split(labels.tolist(), 0.2, seed=3)))
    assert not np.array_equal(test, stratified_split(labels, 0.2, seed=4)[1])
    for share in (0, 1, -0.1, float('nan')):
        with pytest.raises(ValueError, match='share'): stratified_split(labels, share, seed=3)


# --- the generator of the spirals

def test_xoshiro_words():
    assert [f'{w:016x}' for w in islice(xoshiro(42), 4)] == [
        'd0764d4f4476689f', '519e4174576f3791', 'fbe07cfb0c24ed8c', 'b37d9f600cd835b8']
    assert next(xoshiro(-1)) == next(xoshiro(MASK))


def test_uniform32():
    words = xoshiro(42)
    assert bits([data.uniform32(words) for _ in range(8)]) == (
        '3f76689f 3eef3791 3f24ed8c 3f5835b8 3f046a73 3f50de7d 3e1a3556 3f58cb46')


@pytest.mark.parametrize('words, exponent', [
    ([1 << 63], 126), ([1 << 40], 103), ([1 << 23], 86), ([1 << 22, 1 << 63], 85),
    ([0, 1], 22), ([0, 0, 0x8000_0000], 21), ([0, 0, 0xFFFF_FFFF_0000_0800], 1),
    ([0, 0, 0x7FF], 0), ([0, 0, 0], 0)])
def test_uniform32_exponents(words, exponent):
    rest = iter(words + [99])
    x = np.float32(data.uniform32(rest))
    assert x.view(np.uint32) >> 23 == exponent and next(rest) == 99


@pytest.mark.parametrize('words, exponent', [
    ([1 << 63], 1022), ([1 << 52], 1011), ([1 << 51, 1 << 63], 1010), ([1, 1], 947),
    ([0, 0, 1 << 63], 946), ([0] * 16 + [1], 0), ([0] * 17, 0)])
def test_uniform64_exponents(words, exponent):
    rest = iter(words + [99])
    x = np.float64(data.uniform64(rest))
    assert x.view(np.uint64) >> 52 == exponent and next(rest) == 99


def test_normal64():
    words = xoshiro(42)
    got = np.array([data.normal64(words) for _ in range(4)])
    expected = np.array([0x3feab3627bf1d0c3, 0xbfe07a9388e170e5, 0x3ff6860d5903a0e1,
                         0x3fddb9a0e1db8f12], np.uint64).view(np.float64)
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_normal64_moments_and_tail():
    words = xoshiro(5)
    x = np.array([data.normal64(words) for _ in range(100_000)])
    assert abs(x.mean()) < 0.01 and abs(x.var() - 1) < 0.02
    for edge, share in ((1, 0.31731), (2, 0.0455), (3, 0.0027)):
        assert abs((abs(x) > edge).mean() - share) < 4 * (share / x.size)**0.5
    for word, sign in ((0, -1), (MASK >> 12 << 12, 1)):  # layer 0, its far ends: the tail decides
        assert sign * data.normal64(iter([word, *islice(xoshiro(1), 20)])) > data.TAIL


# --- the spirals

@pytest.mark.parametrize('n, seed, checksum', [
    (97, 42, 'dd47960a32c4857e'), (97, 7, '78ccf4ed2e2b24fe'), (200, 1234, 'ca7e303a6e6271f3')])
def test_spiral_checksums(n, seed, checksum):
    points, labels = two_spirals(n, seed)
    assert points.dtype == np.float32 and points.shape == (2 * n, 2) and fnv(points) == checksum
    assert labels.dtype == np.int64 and labels.tolist() == [0, 1] * n


def test_spiral_vectors():
    points, _ = two_spirals(97, 42)
    assert bits(points[:4]) == ('3c88b52b 3e0f0db6 3ce6a460 be101685 '
                                '3d187cb4 3e2736f9 bd3b314c be191ce3')
    assert bits(points[-2:]) == 'bf831f96 3c88e038 3f806e14 3af83dde'
    assert bits(two_spirals(200, 1234)[0][:2]) == '3c868106 3e16b942 3d18bbf7 be3f0f11'


def test_spiral_goldens():
    points, labels = two_spirals(200, 1234)
    assert points.tobytes() == GOLDENS['x'].tobytes()
    assert np.array_equal(labels, GOLDENS['labels'])


def test_spirals_need_two_points():
    for n in (1, 0, -5):
        with pytest.raises(ValueError, match='2 points'): two_spirals(n, 1)
    assert two_spirals(2, 1)[0].shape == (4, 2)
