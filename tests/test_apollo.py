"""APOLLO: BLAS runs, anchors, an independent formula, the reference, routing, memory.

The golden runs in pinned mode, resumed and on several threads, are in test_frames.py.
"""
import copy
import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import (APOLLO, THREADS, bits, fresh, golden_cases, golden_steps, hexa, load,
                        noise, same, saved, variable)
from processes import printed, python
from references import apollo_torch

import fucina
from fucina import optim
from fucina.errors import DuplicateParamError, GradShapeMismatchError, InvalidConfigError
from fucina.exec import ExecContext
from fucina.kernels import sum_squares
from fucina.optim.apollo import Apollo, ApolloConfig, ApolloScaleType
from fucina.optim.moments import power
from fucina.rng import gaussian_fill, uniform_fill

f32, f64 = np.float32, np.float64
# -- golden runs with BLAS --------------------------------------------------------------------

CASES = golden_cases(APOLLO)


def close(name, found, expected):
    if found.dtype == 'f32': assert abs(found.numpy().reshape(-1) - expected).max() <= 1e-5
    else:
        other = fucina.from_bits(expected.view(np.uint16), 1, found.dtype).to('f32').numpy()
        assert np.allclose(found.to('f32').numpy().reshape(-1), other, rtol=2**-7, atol=1e-5)
    if name in ('vec', 'conv'): assert np.array_equal(bits(found.value), bits(expected)), name


def test_there_are_nine_cases(): assert len(CASES) == 9


@pytest.mark.parametrize('case', CASES)
def test_golden_case_by_blas(case):
    opt, params, c = fresh(APOLLO, case)
    for t in golden_steps(opt, params, c):
        for k, p in params.items(): close(k, p, APOLLO[f'{case}/{k}'][t])


# -- anchors ----------------------------------------------------------------------------------

W6 = np.array([1, -2, 0.5, 3, -0.25, 1.5], f32)
G6 = np.array([[0.5, -1, 2, 0.25, -0.75, 1.25], [-0.3, 0.8, -1.2, 0.6, 0.1, -0.9],
               [1.1, 0.2, -0.4, -1.3, 0.7, 0.05]], f32)
W12 = np.array([1, -2, 0.5, 3, -0.25, 1.5, 0.75, -1.25, 2.25, -0.5, 0.3, -1.8], f32).reshape(4, 3)
G12 = np.array([[0.5, -1, 2, 0.25, -0.75, 1.25, -0.6, 0.45, -0.15, 0.9, -1.1, 0.7],
                [-0.3, 0.8, -1.2, 0.6, 0.1, -0.9, 1.05, -0.35, 0.55, -0.85, 0.2, 0.4],
                [1.1, 0.2, -0.4, -1.3, 0.7, 0.05, -0.95, 0.65, -0.25, 0.15, -0.45, 1.35]],
               f32).reshape(3, 4, 3)
W15 = np.array([0.5, -1.5, 2, -0.25, 1, 0.75, -0.5, 1.25, -2, 0.3, -0.8, 0.6, -1.1, 0.9, -0.4],
               f32).reshape(3, 5)
G15 = np.array([[0.2, -0.9, 1.3, 0.45, -0.7, -0.55, 0.85, -0.2, 0.65, -1.15, 0.95, -0.35, 0.5, -0.6,
                 0.1], [-0.4, 0.7, -1, 0.55, 0.15, 0.8, -1.2, 0.35, -0.65, 0.25, -0.9, 1.05, -0.15,
                        0.45, -0.75]], f32).reshape(2, 3, 5)
ANCHORS = {
    'tall': (ApolloConfig(lr=0.02, weight_decay=0.1, rank=2, update_proj_gap=1000), W12, G12,
             [[.4, -.7, .2], [-.3, .6, .9]],
             '3f7b430e bffd0861 3ef1d32c 403e1f4d be6e1973 3fbc583a 3f446fbc bfa1ecd1 400f33c4 '
             'bf019718 3ea66b27 bfe9fd3d',
             '.981491923 -1.9768182 .472314239 2.97066045 -.232518956 1.47144246 .767329931 '
             '-1.26503956 2.23753452 -.506211758 .325036258 -1.82804072'),
    'wide': (ApolloConfig(lr=0.02, rank=2), W15, G15, [[.3, -.5], [.8, .1], [-.6, .4]],
             '3efe8fd2 bfbc79e5 3ff683e4 be8df908 3f81f195 3f428cf5 bf054201 3fa1609b bfffcb16 '
             '3ea65c35 bf522042 3f1a5296 bf908bc0 3f671bfb becb5ce2',
             '.497191012 -1.47246993 1.92589998 -.277290583 1.015185 .759963334 -.52053839 '
             '1.26076066 -1.99838519 .324922234 -.820804715 .602822661 -1.12926483 .902770698 '
             '-.397193015'),
    'mini': (ApolloConfig.mini(lr=0.005), W12, G12, [[.7, -.2, .5]],
             '3f7557d8 bffd54f6 3ee459c3 403ff72f be6d6e7c 3fbb5ee9 3f452168 bfa375d4 400fc5e3 '
             'bf05c223 3eb81913 bff0854f',
             '.958371639 -1.9791553 .445997328 2.99946189 -.231866777 1.46383381 .770040989 '
             '-1.27703333 2.24645305 -.522493541 .359566301 -1.87906826')}


@pytest.mark.parametrize('name', ANCHORS)
@pytest.mark.parametrize('mode', ['pinned', 'blas'])
def test_anchors_with_a_given_projection(name, mode, threads):
    config, start, gradients, p, exact_bits, reference = ANCHORS[name]
    opt, w = Apollo(config), variable(start)
    opt.add_param(w)
    assert opt.slots[0].proj is None
    opt.slots[0].proj, opt.slots[0].proj_chunk = p, 0
    with ExecContext(gemm=mode, workers=threads):
        for g in gradients:
            w.set_grad(g)
            opt.step()
    assert mode == 'blas' or hexa(w) == exact_bits
    assert np.allclose(w.numpy().ravel(), np.array(reference.split(), float), rtol=0, atol=1e-5)


def test_projections_are_made_from_the_seed():
    expected = ('bca3a3d7 bf40e5bc be250807 3d70aa9a 3d954aa9 bf65d558',
                '3f085a50 bdc8f89c bf5890dd 3e9e3386 3ebf19d6 beb98ad5',
                'be250807 3d70aa9a 3d954aa9 bf65d558 beb743f4 bd55fe61')
    opt, w = Apollo(rank=2, update_proj_gap=10), variable(np.zeros((4, 3)))
    opt.add_param(w)
    slot, arrays = opt.slots[0], []
    for step in (0, 9, 10, 19, 20, 25):
        slot.step = step
        w.set_grad(np.ones((4, 3)))
        opt.step()
        arrays.append(slot.proj)
        assert hexa(slot.proj) == expected[step // 10] and slot.proj_chunk == step // 10
    assert all(a is arrays[0] for a in arrays)  # regenerated in place
    everyone = [slot.projection(1).copy() for slot.step in range(9)]
    for a, b in zip(everyone, everyone[2:]): assert np.array_equal(a.ravel()[2:], b.ravel()[:-2])


def test_a_run_across_projections(pinned, threads):
    w = variable(W12)
    opt = Apollo(lr=0.02, weight_decay=0.1, rank=2, update_proj_gap=2)
    opt.add_param(w)
    for t, norm in enumerate('416dc738 41475b58 414959b2 414b5d28 414d65c4'.split()):
        w.set_grad(G12[t % 3])
        opt.step()
        assert hexa(opt.slots[0].prev_norm) == norm
    assert hexa(w) == ('3f7b3d40 bffed990 3f010bd0 403d4c56 be6f8b25 3fbc5e04 3f50226a bfa69922 '
                       '400f2914 bf00b68b 3eb4fe0c bfee51c6')
    assert hexa(opt.slots[0].m) == ('bd414315 bd97f06c be04a675 be0e2d13 bd977127 bdd2746d bd0a40d8 '
                                    'bdb62b31')
    assert hexa(opt.slots[0].v) == ('3b3f1d0a 3bbeab58 3ac7a0b9 3b377524 39a8a070 3a77bcb6 3ad074e4 '
                                    '3acbc0b5')


def test_anchor_of_the_fallback(threads):
    opt, w = Apollo(lr=0.1, weight_decay=0.1), variable(W6)
    opt.add_param(w)
    for g in G6:
        w.set_grad(g)
        opt.step()
    assert hexa(w) == '3f4ab0ec bfebef7a 3ebb30fb 402fb767 bdcf777a 3fab2fb7'


# -- an independent formula -------------------------------------------------------------------

def product(a, b):
    "One contracted index after the other."
    out = np.zeros((a.shape[0], b.shape[1]), f32)
    for k in range(a.shape[1]): out = out + a[:, k, None] * b[k]
    return out


def in_order(x, axis=None):
    "Sum in float64, one after the other."
    return np.add.accumulate(x.astype(f64)**2, axis=axis if axis is not None else 0)[-1]


class Formula:
    "The rank path on plain arrays; all optimizers are small enough to be followed."

    def __init__(self, c, p, seed):
        self.c, self.p, self.seed, self.step, self.norm = c, p, seed, 0, f32(-1)
        self.tall = p.shape[0] >= p.shape[1]
        self.m = self.v = np.zeros((p.shape[0], c.rank) if self.tall else (c.rank, p.shape[1]), f32)

    def advance(self, g):
        with np.errstate(all='ignore'): self._advance(g)

    def _advance(self, g):
        c, (rows, cols) = self.c, self.p.shape
        p = np.empty((c.rank, cols) if self.tall else (rows, c.rank), f32)
        seed = self.seed + self.step // c.update_proj_gap * 0x9E3779B97F4A7C15
        gaussian_fill(seed % 2**64, p, f32(1) / np.sqrt(f32(c.rank)))
        r = product(g, p.T) if self.tall else product(p.T, g)
        self.step += 1
        omb1, omb2 = (f32(1.0 - f64(b)) for b in (c.beta1, c.beta2))
        self.m = c.beta1 * self.m + omb1 * r
        self.v = c.beta2 * self.v + (omb2 * r) * r
        o = self.m / (np.sqrt(self.v) + c.eps)
        if c.scale_type == ApolloScaleType.tensor: so, sr = in_order(o.ravel()), in_order(r.ravel())
        elif self.tall: so, sr = in_order(o.T), in_order(r.T)
        else: so, sr = in_order(o), in_order(r)
        factor = (np.sqrt(so) / (np.sqrt(sr) + 1e-8)).astype(f32)
        if factor.ndim and self.tall: factor = factor[:, None]
        root, one = np.sqrt(c.scale), f32(1)
        front, back = (root, one) if c.scale_front else (one, root)
        u, limiter = (g * factor) * front, one
        if not c.disable_norm_growth_limiter:
            now = f32(np.sqrt(sum_squares(np.ascontiguousarray(u))))
            if self.norm >= 0:
                limiter = np.fmax(now / (self.norm + f32(1e-8)), f32(1.01)) / f32(1.01)
                now = now / limiter
            self.norm = now
        lr, t, decay = c.lr, f64(self.step), f32(0)
        if c.correct_bias:
            lr = f32((f64(lr) * np.sqrt(1 - power(f64(c.beta2), t))) / (1 - power(f64(c.beta1), t)))
        if c.weight_decay > 0: decay = f32(-(f64(c.lr) * f64(c.weight_decay)))
        s = self.p - lr * ((u / limiter) * back)
        self.p = s + decay * s


def follow(opt, shapes, gradients):
    "Step the optimizer and the formula side by side."
    starts = [uniform_fill(k, np.empty(s, f32), -1, 1) for k, s in enumerate(shapes)]
    ws = [variable(p) for p in starts]
    for w in ws: opt.add_param(w)
    others = [Formula(opt.config, p, slot.seed) for p, slot in zip(starts, opt.slots)]
    for g in gradients:
        for w, x in zip(ws, g): w.set_grad(x)
        opt.step()
        for w, x, slot, other in zip(ws, g, opt.slots, others):
            other.advance(x)
            assert same(w.numpy(), other.p) and same(slot.prev_norm, other.norm)
            assert same(slot.m, other.m) and same(slot.v, other.v) and slot.step == other.step


SETTINGS = {
    'plain': {}, 'rank 1': dict(rank=1), 'rank above': dict(rank=9), 'tensor': dict(scale_type='tensor'),
    'mini': dict(rank=1, scale_type='tensor', scale=128), 'front': dict(scale=3, scale_front=True),
    'back': dict(scale=3), 'free': dict(disable_norm_growth_limiter=True), 'decay': dict(weight_decay=0.3),
    'raw': dict(correct_bias=False, eps=0), 'grow': dict(weight_decay=-0.3), 'negative scale': dict(scale=-1)}
ODD = [(1, 1), (1, 6), (6, 1), (5, 5), (4, 7), (7, 4), (2, 40), (40, 2)]


@pytest.mark.parametrize('fields', SETTINGS.values(), ids=SETTINGS)
def test_every_shape_follows_the_formula(fields, pinned, threads):
    opt = Apollo(**dict(dict(lr=0.1, rank=3, update_proj_gap=2), **fields))
    follow(opt, ODD, [[noise(10 * t + k, s) for k, s in enumerate(ODD)] for t in range(5)])


@pytest.mark.parametrize('fields', [dict(rank=40), dict(rank=1100), dict(rank=3, scale_type='tensor'),
                                    dict(rank=40, scale_type='tensor', weight_decay=0.1)],
                         ids=['channels', 'long sketches', 'tensor', 'long tensor'])
def test_large_matrices_follow_the_formula_at_any_number_of_threads(fields):
    shapes, out = [(700, 211), (211, 700), (12, 5), (300, 300)], []
    if fields['rank'] > 1000: shapes = [(150, 120), (120, 150)]
    gradients = [[noise(10 * t + k, s) for k, s in enumerate(shapes)] for t in range(2)]
    for workers in THREADS:
        with ExecContext(gemm='pinned', workers=workers):
            opt = Apollo(lr=0.1, **fields)
            if workers == 2: follow(opt, shapes, gradients)
            else:
                ws = [variable(uniform_fill(k, np.empty(s, f32), -1, 1)) for k, s in enumerate(shapes)]
                for w in ws: opt.add_param(w)
                for g in gradients:
                    for w, x in zip(ws, g): w.set_grad(x)
                    opt.step()
            out.append((saved(opt), [s.param.value.tobytes() for s in opt.slots]))
    assert out[1:] == out[:-1]


floats = st.floats(width=32, allow_subnormal=True)


@pytest.mark.parametrize('fields', SETTINGS.values(), ids=SETTINGS)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 5), cols=st.integers(1, 5), data=st.data())
def test_any_gradient_follows_the_formula(fields, rows, cols, data):
    n = rows * cols
    gradients = [[np.array(data.draw(st.lists(floats, min_size=n, max_size=n)), f32).reshape(rows, cols)]
                 for _ in range(3)]
    with ExecContext(gemm='pinned'):
        follow(Apollo(**dict(dict(lr=0.1, rank=2, update_proj_gap=2), **fields)), [(rows, cols)], gradients)


@pytest.mark.parametrize('shape', [(37, 5), (5, 37), (1, 9), (9, 1), (700, 300), (300, 701)])
def test_rank_1_asks_for_no_library(shape):
    "One number per channel: a loop, so both modes and all numbers of threads have the same bits."
    g, out = noise(1, shape), []
    for mode in 'pinned', 'blas':
        for workers in THREADS:
            opt, w = Apollo(ApolloConfig.mini(lr=0.1)), variable(np.ones(shape))
            opt.add_param(w)
            with ExecContext(gemm=mode, workers=workers):
                for _ in range(2):
                    w.set_grad(g)
                    opt.step()
            p = opt.slots[0].proj
            r = product(g, p.T) if shape[0] >= shape[1] else product(p.T, g)
            assert np.array_equal(bits(opt.slots._sketches[0]), bits(r))
            out.append((w.numpy().tobytes(), saved(opt)))
    assert out[1:] == out[:-1]


def test_the_norm_is_taken_in_chunks(pinned):
    "Growth is judged by `sum_squares` of the update, so many chunks make the same sum."
    opt, w = Apollo(rank=4, lr=1, correct_bias=False), variable(np.zeros((300, 500)))
    opt.add_param(w)
    g = noise(1, (300, 500))
    w.set_grad(g)
    opt.step()
    u = g * opt.slots[0].scaling
    assert np.array_equal(-w.numpy(), u)
    assert opt.slots[0].prev_norm == f32(np.sqrt(sum_squares(u)))


# -- the reference ----------------------------------------------------------------------------

RULES = {
    'channel': dict(rank=4), 'wide rank': dict(rank=20, scale=2), 'tensor': dict(rank=3, scale_type='tensor'),
    'mini': dict(rank=1, scale_type='tensor', scale=128), 'front': dict(rank=4, scale=4, scale_front=True),
    'free': dict(rank=4, disable_norm_growth_limiter=True), 'decay': dict(rank=4, weight_decay=0.1),
    'raw': dict(rank=4, correct_bias=False)}


@pytest.mark.parametrize('fields', RULES.values(), ids=RULES)
@pytest.mark.parametrize('shape', [(12, 7), (7, 12), (8, 8), (9,)])
def test_apollo_torch_takes_the_same_steps(fields, shape):
    """Its random projections come from another generator, so each new one is handed over.

    Apart from that the rules agree, up to rounding: it takes norms in float32 and in another
    order, fuses a product with a sum, and keeps rates in float64."""
    reference = apollo_torch()
    if reference is None: pytest.skip('needs torch and apollo-torch')
    import torch
    c = ApolloConfig(lr=0.01, update_proj_gap=4, **fields)
    opt, start = Apollo(c), uniform_fill(1, np.empty(shape, f32), -1, 1)
    w, p = variable(start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    opt.add_param(w)
    group = dict(params=[p], weight_decay=float(c.weight_decay), correct_bias=c.correct_bias)
    if len(shape) == 2:
        group.update(rank=c.rank, proj='random', proj_type='std', scale_type=c.scale_type.name,
                     update_proj_gap=c.update_proj_gap, scale=float(c.scale))
    theirs = reference([group], lr=0.01, scale_front=c.scale_front,
                       disable_nl=c.disable_norm_growth_limiter)
    for t in range(10):
        g = noise(t, shape) * f32(10 if t == 5 else 1)
        p.grad = torch.from_numpy(g.copy())
        w.set_grad(g)
        theirs.step()
        for slot in opt.slots:
            slot.proj, slot.proj_chunk = theirs.state[p]['projector'].ortho_matrix.numpy(), t // 4
        opt.step()
        assert np.allclose(w.numpy(), p.detach().numpy(), rtol=1e-5, atol=2e-6)
        for slot in opt.slots:
            if not c.disable_norm_growth_limiter:
                assert slot.prev_norm == pytest.approx(float(theirs.state[p]['scaled_grad']), rel=1e-5)


# -- training ---------------------------------------------------------------------------------

@pytest.mark.parametrize('config', [ApolloConfig(lr=0.02, rank=2, update_proj_gap=50),
                                    ApolloConfig.mini(scale=4, lr=0.02, update_proj_gap=50)],
                         ids=['channel', 'mini'])
def test_a_quadratic(config):
    target, offset = uniform_fill(5, np.empty((4, 3), f32), -1, 1), np.array([0.5, -0.25, 0.75], f32)
    opt, w, b = Apollo(config), variable(np.zeros((4, 3))), variable(np.zeros(3))
    for t in (w, b): opt.add_param(t)
    assert len(opt.slots) == len(opt.fallback_slots) == 1
    for _ in range(600):
        with fucina.exec_scope():
            for t, goal in ((w, target), (b, offset)):
                d = t - fucina.constant(goal, goal.ndim)
                (d * d).sum_all().backward()
            opt.step()
            opt.zero_grad()
    assert abs(w.numpy() - target).max() < 0.1 and abs(b.numpy() - offset).max() < 0.05


def some(names=(None, None, None), order=(0, 1, 2), values=None, **fields):
    "A tall matrix, a wide one and a vector."
    shapes = (4, 2), (2, 3), (5,)
    values = [uniform_fill(k, np.empty(s, f32), -1, 1) for k, s in enumerate(shapes)] if values is None else values
    ts, opt = [variable(v) for v in values], Apollo(**dict(dict(lr=0.05, rank=2, update_proj_gap=3), **fields))
    for k in order: opt.add_param(ts[k], name=names[k])
    return opt, ts


def run(opt, ts, steps):
    for t in steps:
        for k, w in enumerate(ts): w.set_grad(noise(100 * t + k, w.shape))
        opt.step()


def test_resume_across_a_new_projection():
    "5 steps, a snapshot and a frame in one stream, 5 more; the sixth is the last of its projection."
    opt, ts = some()
    run(opt, ts, range(5))
    stream = io.BytesIO()
    optim.save_tensors(stream, ts)
    opt.save_state(stream)
    run(opt, ts, range(5, 10))
    again, others = some(values=[np.zeros(t.shape, f32) for t in ts])
    run(again, others, range(2))  # has a projection, of the wrong time
    stream.seek(0)
    optim.load_tensors(stream, others)
    again.load_state(stream)
    assert all(slot.proj_chunk == 2**64 - 1 for slot in again.slots) and stream.read() == b''
    run(again, others, range(5, 10))
    assert saved(again) == saved(opt)
    assert [t.value.tobytes() for t in ts] == [t.value.tobytes() for t in others]


def test_named_parameters_keep_their_seeds_in_any_order():
    opt, ts = some('abc')
    run(opt, ts, range(4))
    again, others = some('abc', (2, 1, 0), [t.numpy() for t in ts])
    assert [s.seed for s in again.slots] == [1, 2] != [s.seed for s in again.slots][::-1]
    load(again, saved(opt))
    assert {s.param.name: s.seed for s in again.slots} == dict(a=1, b=2)
    run(opt, ts, range(4, 8))
    run(again, others, range(4, 8))
    assert [t.value.tobytes() for t in ts] == [t.value.tobytes() for t in others]


def test_a_failed_load_keeps_the_projection():
    opt, ts = some()
    run(opt, ts, range(2))
    before, raw = saved(opt), saved(opt)
    for cut in range(len(raw)):
        with pytest.raises(EOFError): load(opt, raw[:cut])
    assert saved(opt) == before and [s.proj_chunk for s in opt.slots] == [0, 0]


@pytest.mark.parametrize('norm', [0x7fc12345, 0xff800001, 0x80000000, 0x7f800000, 0xbf800000, 1])
def test_every_bit_of_the_last_norm_is_kept(norm):
    opt, _ = some()
    opt.slots[0].prev_norm, opt.slots[1].seed, opt.slots[1].step = np.uint32(norm).view(f32), 2**64 - 1, 2**64 - 1
    again, _ = some()
    load(again, saved(opt))
    assert saved(again) == saved(opt) and bits(again.slots[0].prev_norm)[0] == norm
    assert (again.slots[1].seed, again.slots[1].step) == (2**64 - 1,) * 2


@pytest.mark.parametrize('dtype', ['f16', 'bf16'])
def test_sixteen_bit_parameters_are_their_rounded_twin(dtype):
    values = {s: uniform_fill(3, np.empty(s, f32), -2, 2) for s in ((4, 3), (3, 4), (5,))}
    half = [fucina.variable(v, v.ndim, dtype=dtype) for v in values.values()]
    twin = [fucina.variable(h.to('f32').numpy(), h.numpy().ndim) for h in half]
    opts = Apollo(rank=2, weight_decay=0.1), Apollo(rank=2, weight_decay=0.1)
    for opt, ts in zip(opts, (half, twin)):
        for t in ts: opt.add_param(t)
    for k in range(4):
        versions = [h._node.version for h in half]
        for opt, ts in zip(opts, (half, twin)):
            for t in ts:
                if k == 2 and len(t.shape) == 1: t.zero_grad()
                else: t.set_grad(noise(k, t.shape))
            opt.step()
        written = [h._node.version > before for h, before in zip(half, versions)]
        assert written == [True, True, k != 2]
        for h, t in zip(half, twin):
            rounded = fucina.constant(t.numpy(), t.numpy().ndim).to(dtype)
            assert np.array_equal(bits(h.value), bits(rounded.value))


# -- gradients --------------------------------------------------------------------------------

def test_a_parameter_without_a_gradient_stands_still():
    opt, ts = some(weight_decay=0.5)
    start = [t.numpy().copy() for t in ts]
    ts[0].set_grad(noise(1, (4, 2)))
    for _ in range(3): opt.step()
    assert [s.step for s in (*opt.slots, *opt.fallback_slots)] == [3, 0, 0]
    late = opt.slots[1]
    assert late.proj is None and late.prev_norm == -1 and not late.m.any() and not late.scaling.any()
    assert np.array_equal(ts[1].numpy(), start[1]) and np.array_equal(ts[2].numpy(), start[2])
    ts[1].set_grad(noise(2, (2, 3)))
    opt.step()
    assert late.step == 1 and late.proj_chunk == 0 and opt.slots[0].proj_chunk == 1


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_matrix_and_makes_the_norm_unknown(bad):
    opt, ts = some()
    run(opt, ts, range(2))
    g = noise(1, (4, 2))
    g[1, 1] = bad
    ts[0].set_grad(g)
    opt.step()
    assert np.isnan(opt.slots[0].prev_norm) and np.isfinite(opt.slots[1].prev_norm)
    assert not np.isfinite(ts[0].numpy()).all() and all(np.isfinite(t.numpy()).all() for t in ts[1:])
    slot = opt.slots[0]
    slot.m, slot.v = 0, 0
    ts[0].set_grad(noise(2, (4, 2)))
    opt.step()  # after NaN as on the first step: no limit, and known again
    assert np.isfinite(slot.prev_norm) and opt.slots._limits[0] == 1


def test_zero_gradients():
    opt, ts = some(weight_decay=0)
    start = [t.numpy().copy() for t in ts]
    for _ in range(3):
        for t in ts: t.set_grad(np.zeros(t.shape))
        opt.step()
    assert all(np.array_equal(t.numpy(), s) for t, s in zip(ts, start))
    assert [s.prev_norm for s in opt.slots] == [0, 0] and not any(s.scaling.any() for s in opt.slots)


def test_gradients_are_checked_before_anything_moves():
    opt, ts = some()
    run(opt, ts, range(1))
    before = saved(opt), [t.value.tobytes() for t in ts]
    ts[2]._node.grad = np.ones(3, f32)
    for call in (opt.step, opt.grad_squared_norm, lambda: opt.scale_gradients(2), lambda: opt.clip_grad_norm(1)):
        with pytest.raises(GradShapeMismatchError, match='param0'): call()
    assert (saved(opt), [t.value.tobytes() for t in ts]) == before


def test_gradients_in_any_memory():
    g, found = noise(3, (6, 4)), []
    frozen = g.copy()
    frozen.flags.writeable = False
    for grad in (g, np.asfortranarray(g), frozen, np.repeat(g, 2, 1)[:, ::2], g.astype(float), g.tolist()):
        w, opt = variable(np.ones((6, 4))), Apollo(rank=2)
        opt.add_param(w)
        for _ in range(2):
            w.set_grad(grad)
            opt.step()
        found.append((w.numpy().tobytes(), saved(opt)))
    assert found[1:] == found[:-1]


def test_norms_are_added_matrices_first():
    opt, ts = Apollo(rank=2), [variable(np.ones(s)) for s in ((3,), (4, 5), (2, 2, 2), (6, 2))]
    for t in ts:
        opt.add_param(t)
        t.set_grad(noise(len(t.shape) + t.shape[0], t.shape) * f32(3.3))
    total = 0.0
    for k in (1, 3, 0, 2): total += sum_squares(ts[k].grad.numpy())
    assert opt.grad_squared_norm() == total


# -- steps, seeds, projections ----------------------------------------------------------------

def test_seeds_count_matrices_and_wrap():
    opt = Apollo(seed=2**64 - 2)
    for shape in ((2, 2), (3,), (2, 3), (2, 2, 2), (3, 2)): opt.add_param(variable(np.ones(shape)))
    opt.add_fallback_param(variable(np.ones((2, 2))))
    opt.add_param(variable(np.ones((4, 4))))
    assert [s.seed for s in opt.slots] == [2**64 - 1, 0, 1, 2]


def test_steps_near_the_end_of_their_counter():
    opt, ts = some(update_proj_gap=1)
    for slot in (*opt.slots, *opt.fallback_slots): slot.step = 2**64 - 3
    run(opt, ts, range(4))
    assert [s.step for s in (*opt.slots, *opt.fallback_slots)] == [1, 1, 1]
    opt, ts = some(update_proj_gap=2**64 - 1)
    for slot in opt.slots: slot.step = 2**63
    run(opt, ts, range(1))
    assert [s.proj_chunk for s in opt.slots] == [0, 0]


def test_limiter_off_leaves_the_norm_alone():
    opt, ts = some(disable_norm_growth_limiter=True)
    opt.slots[0].prev_norm = 3
    run(opt, ts, range(3))
    assert [s.prev_norm for s in opt.slots] == [3, -1]
    opt.config.disable_norm_growth_limiter = False
    run(opt, ts, range(1))
    assert opt.slots[1].prev_norm > 0
    opt.config.disable_norm_growth_limiter = True  # and the divisor of that step is forgotten
    opt.slots._limits[:] = 5
    run(opt, ts, range(1))
    assert (opt.slots._limits == 1).all()


def test_projections_can_be_given():
    slot = some()[0].slots[0]
    slot.proj = np.asfortranarray([[1, 2], [3, 4]])
    assert slot.proj.dtype == f32 and slot.proj.flags.c_contiguous and slot.proj.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError): slot.proj = np.ones(3)
    slot.proj = None
    assert slot.proj is None


def test_copies_go_their_own_way():
    opt, ts = some()
    run(opt, ts, range(2))
    others, other = copy.deepcopy((ts, opt))
    run(other, others, range(2, 5))
    assert opt.slots[0].proj_chunk == 0 and other.slots[0].proj_chunk == 1 and opt.slots[0].step == 2
    run(opt, ts, range(2, 5))
    assert saved(opt) == saved(other)


def test_parameters_that_join_late():
    opt, ts = some()
    run(opt, ts, range(2))
    late = variable(np.ones((400, 600)))
    opt.add_param(late, 'late')
    run(opt, [*ts, late], range(2, 4))
    assert [s.step for s in opt.slots] == [4, 4, 2] and opt.slots[2].seed == 3


# -- registration and settings ----------------------------------------------------------------

def test_routing():
    opt = Apollo(rank=3)
    kinds = {(): 1, (5,): 1, (4, 3): 0, (3, 4): 0, (1, 1): 0, (2, 3, 4): 1, (2, 2, 2, 2): 1}
    for shape, rest in kinds.items():
        before = len(opt.slots), len(opt.fallback_slots)
        opt.add_param(variable(np.ones(shape)))
        assert (len(opt.slots), len(opt.fallback_slots)) == (before[0] + (not rest), before[1] + rest)
    opt.add_fallback_param(variable(np.ones((4, 3))), 'forced')
    opt.add_fallback_param_named(variable(np.ones((4, 3))), 'named')
    assert opt.fallback_slots.label(5) == 'named' and opt.slots.label(1) == 'param1'
    assert opt.slots[0].m.size == 12 and opt.slots[0].scaling.size == 4 and opt.fallback_slots[4].m.size == 12
    with pytest.raises(TypeError): opt.add_fallback_param(np.ones(3))


def test_duplicates_are_found_in_both_lists():
    for first, second in (('add_param', 'add_fallback_param'), ('add_fallback_param', 'add_param'),
                          ('add_param', 'add_param'), ('add_fallback_param', 'add_fallback_param')):
        opt, w = Apollo(), variable(np.ones((3, 2)))
        getattr(opt, first)(w, 'one')
        with pytest.raises(DuplicateParamError, match='as one, it cannot join as two'): getattr(opt, second)(w, 'two')
        assert len(opt.slots) + len(opt.fallback_slots) == 1
        other = Apollo()
        other.add_param(w)
        with pytest.raises(DuplicateParamError): optim.OptimizerSet([opt, other])


def test_settings():
    c = ApolloConfig()
    assert [getattr(c, k) for k in c._kinds] == [f32(0.01), f32(0.9), f32(0.999), f32(1e-6), 0, 128, 200, 1, 0, True,
                                                 False, False, 0]
    m = ApolloConfig.mini()
    assert (m.rank, m.scale_type, m.scale) == (1, ApolloScaleType.tensor, 128)
    changed = {k for k in c._kinds if getattr(c, k) != getattr(m, k)}
    assert changed == {'rank', 'scale_type', 'scale'} and ApolloConfig.mini(scale=4).scale == 4
    assert ApolloConfig(scale_type='tensor').scale_type is ApolloScaleType.tensor
    for field in ('rank', 'update_proj_gap'):
        for bad in (0, -1, 2**64):
            with pytest.raises(InvalidConfigError, match=field): ApolloConfig(**{field: bad})
        with pytest.raises(InvalidConfigError, match=field): setattr(c, field, 0)
        for bad in (1.0, '1', None, True):
            with pytest.raises(TypeError, match=field): ApolloConfig(**{field: bad})
    for bad in (-1, 2**64):
        with pytest.raises(InvalidConfigError, match='seed'): ApolloConfig(seed=bad)
    with pytest.raises(InvalidConfigError, match='channel, tensor'): ApolloConfig(scale_type='row')
    opt = Apollo(c)
    c.lr = 5
    assert opt.lr == f32(0.01) and Apollo(rank=7).config.rank == 7


def test_bytes_of_state():
    opt, w = Apollo(rank=3), variable(np.ones((7, 10)))
    opt.add_param(w)
    w.set_grad(np.ones((7, 10)))
    opt.step()
    slot = opt.slots[0]
    assert slot.m.nbytes + slot.v.nbytes == 8 * 3 * 10 and slot.proj.nbytes == 4 * 3 * 7
    assert '240 bytes of state' in repr(opt) and 'apollo' in repr(opt)


@pytest.mark.parametrize('mode', ['blas', 'pinned'])
def test_a_step_allocates_next_to_nothing(mode):
    shapes = (1200, 800), (800, 1200), (400,), (8, 8)
    opt, ts = Apollo(rank=64), [variable(np.ones(s)) for s in shapes]
    for t in ts:
        opt.add_param(t)
        t.set_grad(noise(1, t.shape))
    with ExecContext(gemm=mode, workers=2):
        for _ in range(2): opt.step()
        tracemalloc.start()
        try:
            opt.step()
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            opt.step()
            now, peak = tracemalloc.get_traced_memory()
        finally: tracemalloc.stop()
    # A thread has scratch for one chunk. A sketch takes 307 kB, an update would take 3.8 MB.
    assert now - before < 2_000 and peak - before < 300_000


PLAIN = '''
import numpy as np, fucina, zlib
from fucina.optim import Apollo, ApolloConfig
for c in ApolloConfig(rank=2, update_proj_gap=2, weight_decay=0.1), ApolloConfig.mini(correct_bias=False):
    opt, g = Apollo(c), np.random.default_rng(0)
    ws = [fucina.variable(g.standard_normal(s, np.float32), len(s)) for s in ((5, 3), (3, 5), (4,))]
    for w in ws: opt.add_param(w)
    for t in range(4):
        for w in ws: w.set_grad(g.standard_normal(w.shape, np.float32) * (np.inf if t == 3 else 1))
        with fucina.ExecContext(gemm='pinned'): opt.step()
        print([zlib.crc32(np.nan_to_num(w.numpy()).tobytes()) for w in ws])
'''


def test_without_the_compiler():
    compiled = printed(PLAIN)
    assert python(PLAIN, NUMBA_DISABLE_JIT='1') == compiled and len(compiled.splitlines()) == 8
