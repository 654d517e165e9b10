"""Evolution strategies on floats: golden runs, worked vectors, refusals, threads, resume."""
import json
import math
import threading
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from fucina import (ParamRegistry, constant, errors, es, from_bits, get_num_threads,
                    set_num_threads, training_checkpoint, variable)
from fucina.dtypes import narrow_bf16, narrow_f16
from fucina.rng import gaussian_fill_at_fast, uniform_fill
from fucina.training_checkpoint import TrainerState

f32 = np.float32
GOLDENS = Path(__file__).parent/'goldens'
DTYPES = 'f32', 'f16', 'bf16'
GOLD = np.load(GOLDENS/'es.npz')


def raw(t): return t.numpy() if t.dtype == 'f32' else t.bits
def data(*tensors): return b''.join(raw(t).tobytes() for t in tensors)
def hexa(t): return ' '.join(f'{x:x}' for x in raw(t).view(f'u{raw(t).itemsize}').ravel())


def bits_of(a): return ' '.join(f'{x:08x}' for x in np.asarray(a, f32).view(np.uint32))


def tensor(values, dtype):
    "Storage (bf16 as bits) as a constant."
    if dtype == 'bf16': return from_bits(values, 'd', 'bf16')
    return constant(values, 'd', dtype=dtype)


def trainer_of(tensors, **settings):
    trainer = es.Trainer(**settings)
    for t in tensors: trainer.add_param(t)
    return trainer


@pytest.fixture(params=(1, 2, 3, 7))
def threads(request):
    before = get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


# -- golden runs ------------------------------------------------------------------------------

def golden_tensors(): return [tensor(GOLD[f'init/{dtype}'], dtype) for dtype in DTYPES]


def check_golden(case, what, place, tensors):
    for dtype, t in zip(DTYPES, tensors):
        wanted = GOLD[f'{case}/{what}_{dtype}'][place]
        assert raw(t).tobytes() == wanted.tobytes(), (case, what, place, dtype)


@pytest.mark.parametrize('case', [f'case{k:02}' for k in range(24)])
def test_golden_case(case):
    settings = json.loads(str(GOLD[f'{case}/config']))
    tensors = golden_tensors()
    trainer = trainer_of(tensors, **settings)
    if settings['anchor_decay'] != 'none': trainer.capture_anchor()
    for t, rewards in enumerate(GOLD['rewards']):
        for member in range(4):
            trainer.perturb(member)
            check_golden(case, 'perturbed', (t, member), tensors)
            trainer.restore(member)
            check_golden(case, 'restored', (t, member), tensors)
        s = trainer.update(rewards)
        check_golden(case, 'updated', t, tensors)
        found = [s.mean_reward, s.std_reward, s.min_reward, s.max_reward]
        assert found == GOLD[f'{case}/stats'][t].tolist()


def test_golden_long_run(threads):
    about = json.loads(str(GOLD['long/config']))
    w = constant(uniform_fill(about['init_seed'], np.empty(about['n'], f32), -1, 1), 'd')
    trainer, found = trainer_of([w], **about['config']), []
    trainer.perturb(3)
    found.append(zlib.crc32(data(w)))
    trainer.restore(3)
    found.append(zlib.crc32(data(w)))
    for _ in range(3):
        trainer.update(about['rewards'])
        found.append(zlib.crc32(data(w)))
    assert found == GOLD['long/crc32'].tolist()
    assert w.numpy()[-64:].tobytes() == GOLD['long/final_tail64'].tobytes()


@pytest.mark.parametrize('scheme', ('iid', 'iid_antithetic', 'correlated',
                                    'correlated_antithetic'))
def test_golden_members_elsewhere(scheme):
    about = json.loads(str(GOLD[f'materialize_{scheme}/config']))
    tensors = golden_tensors()
    before = data(*tensors)
    trainer = trainer_of(tensors, **about['config'] | dict(restore_mode='snapshot'))
    trainer.iteration = about['iteration']
    for member in range(4):
        dst = [np.empty_like(raw(t)) for t in tensors]
        trainer.materialize_member(member, dst)
        for dtype, a in zip(DTYPES, dst):
            assert a.tobytes() == GOLD[f'materialize_{scheme}/{dtype}'][member].tobytes()
        buffers = [bytearray(raw(t).nbytes) for t in tensors]
        trainer.materialize_member(member, buffers)
        assert data(*tensors) == before
        trainer.perturb(member)
        assert data(*tensors) == b''.join(buffers)
        trainer.restore(member)


def test_golden_seeds():
    for row in GOLD['member_seed/table'].tolist():
        seed, population, iteration, member, *wanted = row
        trainer = es.Trainer(seed=seed, population=population)
        trainer.iteration = iteration
        flips = trainer.ternary_member_seed(member)
        assert wanted == [trainer.member_seed(member), flips,
                          trainer.ternary_slot_stream_seed(flips, 0),
                          trainer.ternary_slot_stream_seed(flips, 3)]


def test_seeds_of_the_worked_example():
    for values, noise, flips in (
        ((0, 0, 30, 0), 0xfd7bbb3d3409619c, 0x65ca4504a72d63cd),
        ((42, 1, 30, 0), 0xc2fd60ba2f2cc434, 0xb4944080892afd2c),
        ((7, 3, 8, 5), 0x4245346d9fe99056, 0x22bc3be7bf8918df),
        ((2**64 - 1, 10**6, 128, 127), 0xbee1cb5ee188e484, 0x7c981c9db4c5bfd9)):
        seed, iteration, population, member = values
        trainer = es.Trainer(seed=seed, population=population)
        trainer.iteration = iteration
        assert trainer.member_seed(member) == noise
        assert trainer.ternary_member_seed(member) == flips
    with pytest.raises(IndexError): es.Trainer().member_seed(-1)


# -- worked vectors ---------------------------------------------------------------------------

R0, R1 = (0.1, 0.9, -0.4, 0.35), (1, -1, 0.25, 0.5)
A = dict(sigma=0.05, population=4)
RANKS, PAIRS = A | dict(reward_norm='centered_ranks'), A | dict(antithetic=True)
L2, L1 = (A | dict(anchor_decay=kind, anchor_lambda=x) for kind, x in (('l2', 10), ('l1', 0.4)))
PLAIN = dict(sigma=0.02, alpha=0.01, population=3, noise='correlated', reward_norm='none')


def four():
    return [constant(values, 'd', dtype=dtype) for values, dtype in (
        ([0.8, -1.25, 0.5, 2, -0.125, 1.5, -0.75], 'f32'),
        ([0.5, -0.25, 1, -1.5, 2, 0.125, -0.875, 0.0625], 'f16'),
        ([1, -2, 0.5, -0.25, 3], 'bf16'),
        ([-0.5, 0.75, -1, 0.25, 1.125, -2.5, 0.375], 'f32'))]


VECTORS = [line.split('|') for line in """\
3f4755dc bf96933c 3f001038 4004644d be6c5dc5 3fc2ae81 bf4cbf8f|38d6 b434 3c0d bdf8 4003 3301 bb2f 28b2|3f84 bff9 3f04 be86 403e|befef1c5 3f51e058 bf788d90 3e85611c 3f900a7d c01e9e1e 3ed8ef0b
3f4ccccd bfa00000 3effffff 40000000 be000000 3fc00000 bf400000|3800 b400 3c00 be00 3fff 3000 bb00 2c00|3f80 c000 3f00 be80 4040|bf000000 3f400000 bf800000 3e800000 3f900000 c0200000 3ec00000
3f4d1e37 bfa2097d 3f00e825 3ffc5d66 bdec34f0 3fbf54c9 bf3dca44|3806 b409 3c08 bdfc 3ff8 2ffb bafa 2c0a|3f80 bfff 3f00 be7e 4040|bef8b021 3f3e5506 bf81139d 3e8734ea 3f8f0c00 c02031be 3ebeed9e
3f48b130 bfa3335b 3f04b9ba 3ffdd393 bdfbf137 3fbd2e48 bf3c6da1|3805 b410 3bf6 bde7 4000 3031 bac2 2b60|3f7f c000 3f01 be71 403f|bef63d5e 3f3d2f89 bf837f86 3e79d3f5 3f905d79 c01fcde9 3ec2b18d
3f4e43fe bfa0abe8 3f007782 3fff6d0d bdfcab3a 3fbefe10 bf3df408|380c b415 3c02 be05 4001 2f7f baf0 2b85|3f81 c000 3f00 be82 4040|befd119e 3f3ea82f bf7f887e 3e7b6868 3f90354c c02080f8 3ec417f1
3f4cc7f7 bfa0dc30 3f003ba7 3ffec655 bdf9023f 3fbfca6d bf3f20de|3802 b408 3c04 bdff 3ffc 3005 baff 2c0d|3f80 bfff 3f00 be80 4040|befcf63c 3f3f24b7 bf8042af 3e829daf 3f8f9577 c0201303 3ebfd56e
3f5243be bfa96cc4 3effdf8f 3ff73766 bc9d11d8 3fbd517f bf334071|3655 b398 3be7 be08 3ff9 27f8 bad1 2da7|3f78 c004 3ef8 be74 4042|bf00871d 3f2e1fa8 bf83b938 3e753dc9 3f8ff583 c02161e2 3ea710f5
3f4ccccd bfa00000 3f000000 40000000 be000000 3fc00000 bf400000|3800 b400 3c00 be00 4000 3000 bb00 2c00|3f80 c000 3f00 be80 4040|beffffff 3f400000 bf800000 3e800000 3f900000 c0200000 3ec00000
3f4f266f bfa3c548 3f00ae98 3fff3e99 bde2d5cf 3fc03ca2 bf3dbf7d|37d8 b43b 3c08 be01 3fe7 3029 baec 2ccd|3f7f c000 3ef6 be84 4041|bef939b7 3f3af3dd bf801a4a 3e858bf8 3f8d2945 c020d8fc 3eb6ab12
3f4c99e1 bfa48a80 3f04f59e 4000593c bde5a357 3fbcf75d bf3ca7ab|37f5 b419 3c12 bdda 3ff5 2fb2 baa5 2da2|3f81 c000 3ef6 be77 4041|bef9a7e3 3f39a060 bf82f265 3e755df2 3f8d4a25 c0201b8b 3ec3facd
3f4d09dc bfa1871e 3f00ae1c 3ffd460c bdf127b4 3fbf7f97 bf3e57b3|3804 b407 3c06 bdfd 3ffa 2ffc bafc 2c08|3f80 bfff 3f00 be7e 4040|befa8419 3f3ebfc4 bf80ceb6 3e8567b0 3f8f4900 c020254e 3ebf3236
3f49a8d3 bfa204bd 3f035fc5 3fff0d2b be00557e 3fbe02d0 bf3dbc4c|3802 b40a 3bf6 bdee 4001 3025 bad3 2b85|3f7f c000 3f01 be75 403f|befa0d00 3f3e33b5 bf826bf7 3e78ab21 3f9073db c01fd11b 3ec2389c
3f4ccccd bfa0c1cf 3f000000 3ffda514 be000000 3fc00000 bf400000|3800 b400 3c00 be00 4000 3000 bb00 2c00|3f80 c000 3f00 be80 4040|befdced9 3f400000 bf800000 3e821632 3f900000 c0200000 3ec00000
3f4aef22 bfa0a3ff 3f014239 40000000 be000000 3fbf212d bf400000|3800 b400 3bfa bdf5 4000 3000 badc 2c00|3f80 c000 3f00 be7d 4040|bf000000 3f400000 bf81243b 3e79d3f6 3f9009cb c0200000 3ec00000
3f4c1175 bfa11119 3eff0381 3fff8663 bdf58305 3fbfe53e bf3eceda|37eb b410 3c04 be01 3ffc 2fe6 bb04 2c32|3f80 c000 3f00 be80 4040|befd7dd1 3f3df1cf bf7f4210 3e803302 3f8fcfa1 c020049b 3ec0f75b""".splitlines()]  # noqa: E501


@pytest.mark.parametrize('first, settings, calls', (
    (0, A, (('perturb', 2), ('restore', 2))),
    (2, A, (('update', R0), ('update', R1))),
    (4, PLAIN, (('update', (0.5, -0.25, 1.5)),)),
    (5, RANKS, (('update', R0),)),
    (6, PAIRS, (('perturb', 3), ('restore', 3))),
    (8, PAIRS, (('update', R0), ('update', R1))),
    (10, L2, (('update', R0), ('update', R1))),
    (12, L1, (('update', R0), ('update', R1))),
    (14, RANKS, (('update', (0.5, 0.5, -1.0, 0.5)),))))
@pytest.mark.parametrize('cached', (False, True))
def test_worked_scenario(first, settings, calls, cached):
    tensors = four()
    trainer = trainer_of(tensors, **settings, cache_streams=cached)
    trainer.capture_anchor()
    for k, (name, argument) in enumerate(calls):
        getattr(trainer, name)(argument)
        assert list(map(hexa, tensors)) == VECTORS[first + k]


def fnv(a):
    h = 0xcbf29ce484222325
    for b in a.tobytes(): h = (h ^ b) * 0x100000001b3 & 2**64 - 1
    return f'{h:016x}'


def test_worked_vector_of_40001_elements(threads):
    theta = uniform_fill(7, np.empty(40001, f32), -2, 2)
    tensors = [tensor(theta, 'f32'), tensor(narrow_f16(theta), 'f16'),
               tensor(narrow_bf16(theta), 'bf16')]
    trainer = trainer_of(tensors, sigma=0.01, alpha=0.004, population=5, seed=99)
    found = []
    for call, argument in (('perturb', 3), ('restore', 3),
                           ('update', [0.3, -1.2, 0.75, 0.0, 2.5])):
        getattr(trainer, call)(argument)
        found += [fnv(raw(t)) for t in tensors]
    assert found == (
        'ebfa44a89601f0a5 b72f496eb55e5812 51794c95ff45129b '
        'ff7a86213a394269 868e941ed5b30b23 e183c6a72e1f779d '
        'e4dd4b6300930c4a 302ec09796f9b43c b0a8be3c2574b6b2').split()


# -- what must hold ---------------------------------------------------------------------------

def weights(n=40_000, dtype='f32', seed=5):
    values = uniform_fill(seed, np.empty(n, f32), -1, 1)
    if dtype == 'bf16': return tensor(narrow_bf16(values), dtype)
    return tensor(narrow_f16(values) if dtype == 'f16' else values, dtype)


def eps(trainer, member, slot, n):
    "The noise of a member (or of its pair), by the formula."
    from fucina.es.rewards import leader_and_sign, slot_stream
    leader, _ = leader_and_sign(trainer.config, member)
    stream = slot_stream(trainer.member_seed(leader), slot, trainer.config.noise)
    return gaussian_fill_at_fast(stream, 0, np.empty(n, f32), 1.0)


def test_update_is_the_serial_sum(threads):
    w, n = weights(), 40_000
    trainer, before = trainer_of([w], sigma=0.1, population=6, reward_norm='none'), w.numpy().copy()
    rewards, total = np.array([0.5, -1, 2, 0.25, -0.125, 1.5], f32), np.zeros(n, f32)
    for member, r in enumerate(rewards): total += r * eps(trainer, member, 0, n)
    trainer.update(rewards)
    assert data(w) == (before + f32(f32(0.05) / f32(6)) * total).tobytes()


def test_a_pair_is_folded(threads):
    w, n = weights(), 40_000
    trainer = trainer_of([w], sigma=0.1, population=4, antithetic=True, reward_norm='none')
    before, total = w.numpy().copy(), np.zeros(n, f32)
    for member, c in ((0, f32(0.5) - f32(-1)), (2, f32(2) - f32(0.3))):
        total += c * eps(trainer, member, 0, n)
    trainer.update([0.5, -1, 2, 0.3])
    assert data(w) == (before + f32(f32(0.05) / f32(4)) * total).tobytes()


def test_mirrored_members_are_negatives_and_schemes_differ():
    w, v = (constant(np.zeros(101, f32), 'd') for _ in range(2))
    for noise, same in (('iid', False), ('correlated', True)):
        trainer = trainer_of([w, v], sigma=0.5, population=4, antithetic=True, noise=noise,
                             restore_mode='snapshot')
        trainer.perturb(2)
        even = w.numpy().copy()
        assert (data(w) == data(v)) == same
        trainer.restore(2)
        trainer.perturb(3)
        assert np.array_equal(w.numpy(), -even) and even.any()
        trainer.restore(3)


@pytest.mark.parametrize('antithetic', (False, True))
@pytest.mark.parametrize('noise', ('iid', 'correlated'))
def test_cached_noise_changes_nothing(antithetic, noise):
    results = []
    for cached in (False, True):
        tensors = golden_tensors()
        trainer = trainer_of(tensors, sigma=0.05, population=4, antithetic=antithetic,
                             noise=noise, cache_streams=cached)
        for t in range(2):
            for member in range(4):
                trainer.perturb(member)
                trainer.restore(member)
            trainer.update(GOLD['rewards'][t])
        trainer.iteration = 7  # as a resume does
        trainer.perturb(1)
        trainer.restore(1)
        tensors.append(weights(9))
        trainer.add_param(tensors[-1])
        trainer.update(R0)
        results.append(data(*tensors))
    assert results[0] == results[1]
    with pytest.raises(IndexError): trainer.perturb(4)
    trainer.perturb(3)  # nothing was left active


def test_settings_may_change_while_a_member_is_in():
    w = weights(100)
    before, trainer = w.numpy().copy(), trainer_of([w], sigma=0.1, population=4)
    trainer.perturb(0)
    trainer.config.sigma, trainer.iteration, trainer.config.seed = 3, 9, 1
    trainer.restore(0)
    assert abs(w.numpy() - before).max() < 1e-6


def test_snapshot_is_taken_anew_for_each_member():
    w = weights(100)
    trainer = trainer_of([w], population=4, restore_mode='snapshot')
    trainer.perturb(0)
    trainer.restore(0)
    w.value[:] = 2  # as a load does
    trainer.perturb(1)
    trainer.restore(1)
    assert (w.numpy() == 2).all()


@pytest.mark.parametrize('dtype, most', (('f32', 1e-6), ('f16', 2e-3), ('bf16', 3.2e-2)))
def test_regenerated_noise_is_nearly_undone(dtype, most):
    w = weights(5000, dtype)
    before, trainer = w.to('f32').numpy().copy(), trainer_of([w], sigma=0.05, population=4)
    trainer.perturb(2)
    trainer.restore(2)
    assert 0 < abs(w.to('f32').numpy() - before).max() < most


def test_equal_rewards():
    for norm, moves in (('z_score', False), ('centered_ranks', True)):
        w = weights(100)
        before, trainer = data(w), trainer_of([w], population=4, reward_norm=norm)
        stats = trainer.update([0.1] * 4)
        assert (data(w) != before) == moves and trainer.iteration == 1
        assert stats.std_reward == 0 and stats.min_reward == stats.max_reward == f32(0.1)


def test_ranks_do_not_ask_how_bad():
    results = []
    for worst in (-5, -1e6):
        w = weights(100)
        trainer_of([w], population=4, reward_norm='centered_ranks').update([-4, worst, -3.9, -4.5])
        results.append(data(w))
    assert results[0] == results[1]


def test_registry_trains_tied_weights_once():
    w, frozen = variable([[1, 2], [3, 4]], 'a b'), constant([1, 2], 'a', dtype='bf16')
    registry = ParamRegistry()
    registry.collect(dict(embed=w, norm=frozen, head=w))
    trainer = es.Trainer(population=4, sigma=0.5)
    assert trainer.add_registry(registry) == 2 and trainer.add_registry(registry) == 0
    assert trainer.param_count() == 2 and trainer.element_count() == 6
    once = trainer_of([variable([[1, 2], [3, 4]], 'a b')], population=4, sigma=0.5)
    trainer.perturb(1)
    dst = np.empty(4, f32)
    once.materialize_member(1, [dst])
    assert data(w) == dst.tobytes()
    trainer.restore(1)
    with pytest.raises(errors.DuplicateParamError): trainer.add_param(w)
    registry = ParamRegistry()
    registry.add_param('w', weights(4))
    registry.add_param('ids', constant([1, 2], 'a'))
    with pytest.raises(errors.UnsupportedDTypeError): trainer.add_registry(registry)
    assert trainer.param_count() == 3  # what came before stays
    with pytest.raises(TypeError, match=r'got dict; registry.collect\(model\)'): trainer.add_registry(dict(w=w))


@pytest.mark.parametrize('workers', [1, 2])
def test_an_evaluator_without_a_return(workers):
    w = weights(4)
    trainer, before = trainer_of([w], population=4, restore_mode='snapshot'), data(w)
    with pytest.raises(TypeError, match='returned None'): trainer.step(lambda member: None)
    with pytest.raises(TypeError, match='returned None'):
        trainer.evaluate_members(lambda worker, member: None, workers=workers)
    assert data(w) == before and trainer.iteration == 0


def test_views_of_one_memory_are_two_slots_by_their_start():
    w = constant(np.arange(8, dtype=f32), 'd')
    trainer = trainer_of([w, w.narrow('d', 4, 4)], population=2)
    assert trainer.param_count() == 2


def test_noise_in_a_variable_is_seen_by_the_graph():
    import fucina
    w, x = variable([[1.0, 2.0]], 'out in'), constant([[1.0, 1.0]], 'b in')
    trainer = trainer_of([w], population=2)
    with fucina.ExecContext(debug=True), fucina.exec_scope():
        loss = x.dot(w, 'in').sum_all()
        trainer.update([1, 2])
        with pytest.raises(errors.StaleGraphError): loss.backward()


# -- anchors ----------------------------------------------------------------------------------

def test_l2_shrinks_the_distance():
    w = weights(500)
    anchor = w.numpy().copy()
    trainer = trainer_of([w], sigma=0.02, alpha=0.02, population=4, anchor_decay='l2',
                         anchor_lambda=10)
    trainer.capture_anchor()
    w.value[:] = start = weights(500, seed=6).numpy()
    trainer.update([1] * 4)  # no step, only the pull
    keep = f32(1) - f32(0.02) * f32(10)
    assert data(w) == (anchor + (start - anchor) * keep).tobytes()


def test_l1_returns_to_the_anchor():
    for dtype in DTYPES:
        w = weights(500, dtype)
        before, trainer = data(w), trainer_of([w], sigma=0.1, population=4, anchor_decay='l1',
                                              anchor_lambda=1e6)
        trainer.capture_anchor()
        trainer.update(R0)
        assert data(w) == before


def test_anchor_is_dropped_by_a_new_slot_and_renewed_by_capture():
    w = weights(10)
    trainer = trainer_of([w], population=4, anchor_decay='l2', anchor_lambda=1, alpha=0.5)
    with pytest.raises(errors.AnchorMissingError): trainer.update(R0)
    trainer.capture_anchor()
    trainer.update(R0)
    trainer.add_param(weights(10))
    with pytest.raises(errors.AnchorMissingError): trainer.update(R0)
    w.value[:] = 3
    trainer.capture_anchor()
    trainer.update([1] * 4)
    assert (w.numpy() == 3).all()


# -- errors -----------------------------------------------------------------------------------

@pytest.mark.parametrize('wrong', (
    dict(sigma=0), dict(sigma=-1), dict(sigma=math.inf), dict(sigma=math.nan), dict(alpha=0),
    dict(alpha=math.nan), dict(alpha=math.inf), dict(population=1), dict(population=0),
    dict(population=5, antithetic=True), dict(ternary_flip_rate=0),
    dict(ternary_flip_rate=1.5), dict(ternary_flip_rate=math.nan),
    dict(ternary_update_fraction=0), dict(ternary_update_fraction=2),
    dict(ternary_update_decay=-1), dict(ternary_update_decay=math.inf),
    dict(anchor_decay='l1'), dict(anchor_decay='l2', anchor_lambda=-1),
    dict(anchor_decay='l2', alpha=0.5, anchor_lambda=2), dict(noise='pink'),
    dict(reward_norm='rank'), dict(nonfinite='best'), dict(nonfinite='worst'),
    dict(nonfinite='worst', reward_norm='none')))
def test_settings_that_cannot_be(wrong):
    with pytest.raises(errors.InvalidConfigError): es.Trainer(**wrong)


def test_settings():
    c = es.Config(sigma=0.05, seed=-1, noise='correlated', antithetic=True)
    assert c.sigma == f32(0.05) and c.seed == 2**64 - 1 and c.noise == es.NoiseScheme.correlated
    trainer = es.Trainer(c)
    assert trainer.config is not c and trainer.alpha_value() == f32(0.05) / f32(2)
    assert es.Trainer().alpha_value().view(np.uint32) == 0x3a03126f
    assert es.Trainer(anchor_lambda=-3).config.anchor_lambda == -3  # without decay unread
    assert es.Trainer(anchor_decay='l1', anchor_lambda=1e30).alpha_value() > 0
    with pytest.raises(TypeError): es.Trainer(c, population=4)
    with pytest.raises(TypeError): es.Trainer(popluation=4)
    with pytest.raises(TypeError): es.Trainer(42)


def test_what_cannot_be_registered():
    trainer, w = es.Trainer(population=4), weights(8)
    with pytest.raises(TypeError): trainer.add_param([1.0, 2.0])
    with pytest.raises(errors.UnsupportedDTypeError): trainer.add_param(constant([1, 2], 'd'))
    strided = constant(np.ones((2, 3), f32), 'a b').permute_to('b a')
    trainer.add_param_named(w, 'w')
    trainer.perturb(0)
    with pytest.raises(errors.NonContiguousParamError): trainer.add_param(strided)
    with pytest.raises(errors.MemberActiveError): trainer.add_param(w)
    trainer.restore(0)
    with pytest.raises(errors.DuplicateParamError) as e: trainer.add_param(w)
    assert 'w' in str(e.value) and isinstance(e.value, errors.EsError)


def test_what_needs_slots():
    trainer = es.Trainer(population=2, anchor_decay='l2', anchor_lambda=1)
    for call in (lambda: trainer.perturb(0), lambda: trainer.update([1]), trainer.capture_anchor,
                 lambda: trainer.step(lambda member: 0.0)):
        with pytest.raises(errors.NoParamsError): call()
    trainer.materialize_member(0, [])
    assert trainer.evaluate_members(lambda worker, member: member, [0.0, 0.0]) is not None


def test_what_an_active_member_forbids():
    w, v = weights(8), weights(8)
    trainer = trainer_of([w], population=4)
    registry = ParamRegistry()
    registry.collect(dict(v=v))
    trainer.perturb(1)
    inside, state = data(w), TrainerState(seed=42, **trainer.state_fields())
    for call in (lambda: trainer.perturb(1), lambda: trainer.update(R0[:2]),
                 trainer.capture_anchor, lambda: trainer.materialize_member(0, []),
                 lambda: trainer.evaluate_members(lambda *a: 0.0, np.empty(1, f32)),
                 lambda: trainer.add_param(v), lambda: trainer.add_registry(registry),
                 lambda: trainer.step(lambda m: 0.0), lambda: trainer.restore_state(state)):
        with pytest.raises(errors.MemberActiveError, match='1'): call()
    with pytest.raises(errors.MemberNotActiveError): trainer.restore(2)
    assert data(w) == inside and trainer.iteration == 0
    trainer.restore(1)
    with pytest.raises(errors.MemberNotActiveError): trainer.restore(1)
    with pytest.raises(IndexError): trainer.perturb(-1)


def test_update_checks_in_order_and_changes_nothing():
    w = weights(8)
    trainer = trainer_of([w], population=4, anchor_decay='l2', anchor_lambda=1)
    before = data(w)
    with pytest.raises(errors.RewardCountMismatchError): trainer.update([math.nan] * 3)
    with pytest.raises(errors.NonFiniteRewardError, match=r'\b1\b.*\b3\b'):
        trainer.update([0, math.nan, 0, math.inf])
    with pytest.raises(errors.NonFiniteRewardError): trainer.update([0, 0, 0, 1e39])
    with pytest.raises(errors.AnchorMissingError): trainer.update(R0)
    assert data(w) == before and trainer.iteration == 0


def test_non_finite_rewards_rank_last():
    results = []
    for rewards in ([0.5, math.nan, 1, -math.inf, math.inf], [0.5, -9, 1, -8, -7]):
        w = weights(50)
        trainer = trainer_of([w], population=5, reward_norm='centered_ranks', nonfinite='worst')
        trainer.update(rewards)
        results.append(data(w))
    assert results[0] == results[1]


def test_replicas_that_do_not_fit():
    w, v = weights(8), weights(8, 'bf16')
    trainer = trainer_of([w, v], population=4)
    good = np.zeros(8, f32)
    for dst in ([good], [good, np.empty(9, np.uint16)], [good, bytearray(15)], [good] * 3):
        with pytest.raises(errors.ReplicaShapeMismatchError): trainer.materialize_member(0, dst)
    assert not good.any()  # all sizes are looked at first
    locked = np.empty(8, f32)
    locked.flags.writeable = False
    with pytest.raises(errors.ReadOnlyDataError):
        trainer.materialize_member(0, [locked, bytearray(16)])


# -- drivers ----------------------------------------------------------------------------------

class Sphere:
    def __init__(self, w): self.w, self.order = w, []

    def eval(self, member):
        self.order.append(member)
        return -float((self.w.numpy()**2).sum())


def test_step_is_the_loop_by_hand():
    w, twin = weights(50), weights(50)
    evaluator = Sphere(w)
    settings = dict(sigma=0.05, population=6, restore_mode='snapshot')
    a, b = trainer_of([w], **settings), trainer_of([twin], **settings)
    stats, rewards = a.step(evaluator), []
    for member in range(6):
        b.perturb(member)
        rewards.append(Sphere(twin).eval(member))
        b.restore(member)
    assert b.update(rewards) == stats and data(w) == data(twin)
    assert evaluator.order == list(range(6)) and a.iteration == 1


@pytest.mark.parametrize('error', (ZeroDivisionError, KeyboardInterrupt, SystemExit))
def test_an_error_in_the_evaluator_restores_first(error):
    w = weights(50)
    before, raised = data(w), error('stop')

    def score(member):
        if member == 2: raise raised
        return 1.0
    trainer = trainer_of([w], population=4, restore_mode='snapshot')
    with pytest.raises(error) as e: trainer.step(score)
    assert e.value is raised and data(w) == before and trainer.iteration == 0
    trainer.step(lambda member: float(member))
    assert trainer.iteration == 1


def test_spheres_shrink():
    w = constant(np.full(20, 2, f32), 'd')
    trainer = trainer_of([w], sigma=0.1, alpha=0.1, population=32, seed=7)
    for _ in range(150): trainer.step(Sphere(w))
    assert (w.numpy()**2).sum() < 0.25 * 80


class Elsewhere:
    "Scores members in replicas, one per worker."
    def __init__(self, trainer, w, workers):
        self.trainer, self.copies = trainer, [np.empty_like(w.numpy()) for _ in range(workers)]
        self.threads = {}

    def eval_member(self, worker, member):
        self.threads.setdefault(worker, set()).add(threading.get_ident())
        copy = self.copies[worker]
        self.trainer.materialize_member(member, [copy])
        return -float((copy**2).sum())


@pytest.mark.parametrize('workers', (1, 2, 3, 7, 100))
def test_workers_do_not_change_rewards(workers):
    w = weights(3000)
    trainer, before = trainer_of([w], population=16, sigma=0.1), data(w)
    evaluator, rewards = Elsewhere(trainer, w, workers), np.empty(16, f32)
    trainer.evaluate_members(evaluator, rewards, workers)
    alone = np.empty(16, f32)
    trainer.evaluate_members(Elsewhere(trainer, w, 1), alone, 1)
    assert rewards.tobytes() == alone.tobytes() and data(w) == before
    assert all(len(ids) == 1 for ids in evaluator.threads.values())
    assert max(evaluator.threads) < min(workers, 16)


def test_the_first_error_of_the_workers_wins():
    trainer, w = es.Trainer(population=40), weights(8)
    trainer.add_param(w)
    for workers in (1, 4):
        seen, before = [], threading.active_count()

        def score(worker, member):
            seen.append(member)
            if member == 5: raise KeyError('fifth')
            return 0.0
        with pytest.raises(KeyError, match='fifth'):
            trainer.evaluate_members(score, np.empty(40, f32), workers)
        assert len(seen) < 40 and threading.active_count() == before


def test_workers_that_cannot_be():
    trainer = trainer_of([weights(8)], population=4)
    trainer.perturb(0)
    with pytest.raises(errors.InvalidConfigError):
        trainer.evaluate_members(lambda *a: 0.0, np.empty(4, f32), workers=0)
    trainer.restore(0)
    with pytest.raises(errors.RewardCountMismatchError):
        trainer.evaluate_members(lambda *a: 0.0, np.empty(3, f32))


# -- replicas ---------------------------------------------------------------------------------

class Tied:
    "A matrix twice, once transposed, in 16 bits a bias, and something that is only read."
    def __init__(self):
        self.embed = variable(weights(12).numpy().reshape(4, 3), 'vocab d')
        self.head = self.embed.permute_to('d vocab')
        self.bias = weights(4, 'bf16')
        self.body = constant(np.ones((2, 2), f32), 'a b')
        self.parts = [dict(again=self.bias)]


def total(model):
    bias = model.parts[0]['again'].to('f32')
    return float((model.head.numpy()**3).sum() + bias.numpy().sum())


@pytest.mark.parametrize('workers', (1, 2, 5))
def test_replicas_score_what_perturb_would(workers):
    model = Tied()
    trainer = trainer_of([model.embed, model.bias], population=10, sigma=0.1, antithetic=True,
                         restore_mode='snapshot')
    before = data(model.embed, model.bias)
    found = trainer.evaluate_members(es.Replicas(trainer, model, total, workers), workers=workers)
    assert data(model.embed, model.bias) == before
    for member in range(10):
        trainer.perturb(member)
        assert found[member] == f32(total(model))
        trainer.restore(member)


def test_replicas_share_what_is_not_in_training():
    model = Tied()
    trainer = trainer_of([model.embed], population=4)
    team = es.Replicas(trainer, model, total, 3)
    for copy in team.models:
        assert copy.body is model.body and copy.bias is model.bias
        assert copy.embed.requires_grad and copy.embed is not model.embed
        assert np.shares_memory(copy.embed.numpy(), copy.head.numpy())
        assert not np.shares_memory(copy.embed.numpy(), model.embed.numpy())


def test_replicas_that_cannot_be():
    model, other = Tied(), weights(3)
    with pytest.raises(errors.ReplicaShapeMismatchError, match='stray'):
        trainer = es.Trainer(population=4)
        trainer.add_param(other, 'stray')
        es.Replicas(trainer, model, total, 2)
    w = weights(8)  # a part is in training that begins where a longer tensor begins
    with pytest.raises(errors.ReplicaShapeMismatchError, match='32 bytes'):
        es.Replicas(trainer_of([w.narrow('d', 0, 4)], population=4), dict(w=w), total, 2)


def test_replicas_of_genomes():
    blocks = es.ternary.encode(weights(512).numpy(), 0.1)
    model = dict(layer=es.TernaryMatrix(blocks, 'out in', (2, 256)), same=blocks)
    trainer, seen = es.Trainer(population=4, ternary_flip_rate=0.1), {}
    trainer.add_ternary_param(blocks, 512)

    def score(m):
        seen[len(seen)] = m['layer'].blocks.tobytes(), m['same'].tobytes()
        return 0
    trainer.evaluate_members(es.Replicas(trainer, model, score, 1))
    for member in range(4):
        trainer.perturb(member)
        assert seen[member] == (blocks.tobytes(), blocks.tobytes())
        trainer.restore(member)
    assert len(set(seen.values())) == 4


# -- resume -----------------------------------------------------------------------------------

SETTINGS = dict(sigma=0.02, population=6, antithetic=True, anchor_decay='l2', anchor_lambda=3,
                noise='correlated', seed=2**63 + 5)


def iterate(trainer, w, n):
    for _ in range(n): trainer.step(Sphere(w))


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    w = weights(200)
    trainer = trainer_of([w], **SETTINGS)
    trainer.capture_anchor()
    iterate(trainer, w, 3)
    training_checkpoint.begin_save(tmp_path)
    registry = ParamRegistry()
    registry.collect(dict(w=w))
    with (tmp_path/training_checkpoint.MODEL_STATE_FILE).open('wb') as f:
        registry.save_state_dict(f)
    training_checkpoint.save_trainer_state(tmp_path, TrainerState(
        step=trainer.iteration, seed=trainer.config.seed, **trainer.state_fields()))
    iterate(trainer, w, 4)

    v = weights(200)
    other = trainer_of([v], cache_streams=True)  # all settings come from the checkpoint
    other.capture_anchor()  # of the initial weights, before they are loaded
    other.perturb(1)
    other.restore(1)
    state = training_checkpoint.load_trainer_state(tmp_path)
    other.restore_state(state)
    registry = ParamRegistry()
    registry.collect(dict(w=v))
    with (tmp_path/training_checkpoint.MODEL_STATE_FILE).open('rb') as f:
        registry.load_state_dict(f)
    assert other.iteration == 3 and other.config.sigma == f32(0.02)
    assert other.alpha_value() == f32(0.02) / f32(2)
    iterate(other, v, 4)
    assert data(v) == data(w)


def test_state_fields():
    trainer = trainer_of([weights(4)], **SETTINGS)
    trainer.iteration = 9
    assert trainer.state_fields() == dict(
        es_sigma=0.019999999552965164, es_alpha=float(f32(0.02) / f32(2)), es_population=6,
        es_noise=1, es_antithetic=1, es_anchor_decay=2, es_anchor_lambda=3.0, es_iteration=9)


STATE = dict(es_sigma=0.5, es_alpha=0.25, es_population=4, es_noise=0, es_iteration=3, seed=42)


@pytest.mark.parametrize('change', (
    dict(es_sigma=0.4), dict(es_alpha=0.3), dict(es_population=6), dict(es_noise=1),
    dict(es_antithetic=1), dict(es_anchor_decay=1, es_anchor_lambda=1.0), dict(seed=43),
    dict(es_ternary_flip_rate=0.5), dict(es_ternary_update_fraction=0.5),
    dict(es_ternary_update_decay=0.5)))
def test_a_checkpoint_with_other_settings(change):
    trainer = es.Trainer(sigma=0.5, population=4)
    trainer.restore_state(TrainerState(**STATE), on_mismatch='raise')
    assert trainer.iteration == 3
    trainer.iteration = 0
    other, before = TrainerState(**STATE | change), repr(trainer.config)
    with pytest.raises(errors.CheckpointConfigMismatchError):
        trainer.restore_state(other, on_mismatch='raise')
    assert trainer.iteration == 0 and repr(trainer.config) == before
    trainer.restore_state(other)
    assert repr(trainer.config) != before and trainer.iteration == 3


@pytest.mark.parametrize('change', (
    dict(es_sigma=None), dict(es_alpha=None), dict(es_population=None), dict(es_noise=None),
    dict(es_iteration=None), dict(es_noise=2), dict(es_antithetic=2), dict(es_anchor_decay=3)))
def test_a_checkpoint_that_is_no_run_of_this_kind(change):
    trainer = es.Trainer(sigma=0.5, population=4)
    before = repr(trainer.config)
    for mode in ('adopt', 'raise'):
        with pytest.raises(errors.CheckpointConfigMismatchError):
            trainer.restore_state(TrainerState(**STATE | change), on_mismatch=mode)
    with pytest.raises(errors.InvalidConfigError):
        trainer.restore_state(TrainerState(**STATE | dict(es_population=1)))
    with pytest.raises(errors.InvalidConfigError):
        trainer.restore_state(TrainerState(**STATE), on_mismatch='ignore')
    assert repr(trainer.config) == before and trainer.iteration == 0


# -- memory -----------------------------------------------------------------------------------

def test_noise_takes_no_memory():
    w = constant(np.zeros(10**7, f32), 'd')
    trainer = trainer_of([w], population=2)
    trainer.perturb(0)
    trainer.restore(0)
    tracemalloc.start()
    try:
        trainer.perturb(1)
        trainer.restore(1)
        trainer.update([0, 1])
        assert tracemalloc.get_traced_memory()[1] < 0.01 * w.numpy().nbytes
    finally: tracemalloc.stop()


# -- the published algorithm in another framework ---------------------------------------------

def torch_noise(torch, trainer, member, slot, like):
    return torch.from_numpy(eps(trainer, member, slot, like.numel()))


@pytest.mark.parametrize('anchor', ('none', 'l1', 'l2'))
@pytest.mark.parametrize('noise', ('iid', 'correlated'))
@pytest.mark.parametrize('dtype', DTYPES)
def test_parity_with_torch(dtype, noise, anchor):
    torch = pytest.importorskip('torch')
    kind = dict(f32=torch.float32, f16=torch.float16, bf16=torch.bfloat16)[dtype]
    ours = [weights(3001, dtype, seed) for seed in (1, 2)]
    trainer = trainer_of(ours, sigma=0.05, alpha=0.02, population=8, noise=noise,
                         anchor_decay=anchor, anchor_lambda=0 if anchor == 'none' else 0.5)

    def view(t): return torch.from_numpy(raw(t).view(np.int16 if t.dtype == 'bf16' else
                                                     raw(t).dtype).copy()).view(kind)
    def same(): return all(torch.equal(view(t), p) for t, p in zip(ours, theirs))
    theirs = [view(t) for t in ours]
    first = [p.clone() for p in theirs]
    trainer.capture_anchor()
    sigma, alpha = (float(x) for x in (trainer.config.sigma, trainer.alpha_value()))
    for _ in range(2):
        for member in range(8):
            changes = [(sigma * torch_noise(torch, trainer, member, k, p)).to(kind)
                       for k, p in enumerate(theirs)]
            trainer.perturb(member)
            for p, change in zip(theirs, changes): p.add_(change)
            assert same()
            trainer.restore(member)
            for p, change in zip(theirs, changes): p.sub_(change)
            assert same()
        rewards = np.random.default_rng(3).standard_normal(8).astype(f32)
        r = torch.from_numpy(rewards).double()
        z = ((r - r.mean()) / (r.std(unbiased=False) + 1e-8)).float()
        for k, (p, p0) in enumerate(zip(theirs, first)):
            total = torch.zeros(p.numel())
            for member in range(8):
                total.add_(z[member] * torch_noise(torch, trainer, member, k, p))
            p.add_((float(f32(alpha) / f32(8)) * total).to(kind))
            if anchor == 'none': continue
            d, step = p - p0, float(f32(alpha) * f32(0.5))
            if anchor == 'l2': d = d * float(f32(1) - f32(step))
            else:  # a scalar in a difference would be rounded to 16 bits first
                d = torch.sign(d) * (d.abs().float() - step).to(kind).clamp(min=0)
            p.copy_(p0 + d)
        trainer.update(rewards)
        assert same()
