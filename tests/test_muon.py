"""Muon: BLAS runs, anchors, independent formulas, routing, memory.

The golden runs in pinned mode, resumed and on several threads, are in test_frames.py.
"""
import copy
import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import (MISC, MUON, at_any_number_of_threads, bits, fresh, golden_cases,
                        golden_steps, hexa, noise, same, saved)
from processes import printed, python

import fucina
from fucina import optim
from fucina.errors import (DTypeError, DuplicateParamError, GradShapeMismatchError,
                           InvalidConfigError, InvalidShapeError)
from fucina.exec import ExecContext
from fucina.kernels import sum_squares
from fucina.optim import AdamWConfig, Muon, MuonConfig, MuonScale, muon, newton_schulz5
from fucina.rng import uniform_fill

f32, f64 = np.float32, np.float64
# -- golden runs with BLAS --------------------------------------------------------------------

CASES = golden_cases(MUON)


def floats(values, dtype):
    if dtype == 'f32': return values
    return fucina.from_bits(values.view(np.uint16), 1, dtype).to('f32').numpy()


@pytest.mark.parametrize('case', CASES)
def test_golden_case_with_blas(case):
    opt, params, c = fresh(MUON, case)
    dtype = c['param_dtype']
    ulp = 0 if dtype == 'f32' else 2.0**-7  # a step of the 16-bit format, relative
    for t in golden_steps(opt, params, c):
        for k, p in params.items():
            expected = MUON[f'{case}/{k}'][t]
            if any(slot.param.tensor is p for slot in opt.fallback.slots):
                assert np.array_equal(bits(p.value), bits(expected))
            found = floats(p.value.reshape(-1), dtype)
            assert np.allclose(found, floats(expected, dtype), rtol=ulp, atol=1e-6)
    other, _, _ = fresh(MUON, case)
    other.load_state(io.BytesIO(MUON[f'{case}/state_after_step7'].tobytes()))
    for slot, golden in zip(opt.slots, other.slots):  # no product enters the momentum
        assert np.array_equal(slot.momentum, golden.momentum)
        assert np.allclose(slot.param.master, golden.param.master, rtol=0, atol=2e-6)
    assert saved(opt.fallback) == saved(other.fallback)


def test_there_are_ten_cases(): assert len(CASES) == 10


# -- Newton-Schulz ----------------------------------------------------------------------------

def by_definition(u, steps, dtype=f64):
    "The iteration, as it is written in papers."
    x = u.astype(dtype)
    if len(u) > len(u[0]): x = x.T
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if len(u) > len(u[0]) else x


def in_order(a, b):
    "The pinned product."
    out = np.zeros((len(a), len(b[0])), f32)
    for k in range(len(b)): out = out + a[:, k:k + 1] * b[k:k + 1]
    return out


def contract(u, steps):
    "The iteration in float32, one rounding after the other, transposed where the text says so."
    tall = len(u) > len(u[0])
    with np.errstate(all='ignore'):
        x = np.ascontiguousarray(u.T if tall else u)
        x = x * f32(1.0 / (np.sqrt(sum_squares(x)) + 1e-7))
        a, b, c = f32(3.4445), f32(-4.7750), f32(2.0315)
        for _ in range(steps):
            g = in_order(x, x.T)
            q = in_order(g, g)
            x = (a * x) + in_order((b * g) + (c * q), x)
    return x.T if tall else x


@pytest.mark.parametrize('k', range(5))
@pytest.mark.parametrize('steps', [1, 5])
def test_golden_newton_schulz(k, steps, threads):
    u, expected = MISC[f'newton_schulz5/in{k}'], MISC[f'newton_schulz5/out{k}_steps{steps}']
    with ExecContext(gemm='pinned'):
        assert np.array_equal(bits(newton_schulz5(u, steps)), bits(expected))
    assert abs(newton_schulz5(u, steps) - expected).max() < 2e-6
    assert abs(by_definition(u, steps) - expected).max() < 2e-6


SIDES = [(1, 1), (1, 9), (9, 1), (2, 2), (7, 7), (17, 5), (5, 17), (33, 32), (40, 3), (1, 300),
         (300, 1), (61, 67)]


@pytest.mark.parametrize('shape', SIDES)
def test_newton_schulz_is_the_contract_in_every_layout(shape, pinned):
    u = noise(1, shape)
    expected = contract(u, 5)
    wide = noise(1, (shape[0] * 2, shape[1] * 3))
    wide[::2, ::3] = u
    frozen = u.copy()
    frozen.flags.writeable = False
    for given_ in (u, np.asfortranarray(u), wide[::2, ::3], frozen, u[::-1, ::-1][::-1, ::-1]):
        before = given_.copy()
        out = newton_schulz5(given_, 5)
        assert np.array_equal(bits(out), bits(expected)) and out.shape == shape
        assert out.flags.owndata and out.flags.c_contiguous and out.flags.writeable
        assert np.array_equal(before, given_) and not np.shares_memory(out, given_)
    assert np.array_equal(bits(newton_schulz5(u, 0)), bits(contract(u, 0)))
    assert abs(by_definition(u, 5) - expected).max() < 1e-5


@pytest.mark.parametrize('gemm', ['blas', 'pinned'])
@pytest.mark.parametrize('shape', [(400, 390), (1200, 130), (130, 1200)])
def test_large_newton_schulz(shape, gemm):
    u = noise(3, shape)
    def run():
        with ExecContext(gemm=gemm): return newton_schulz5(u, 3).tobytes()
    found = np.frombuffer(at_any_number_of_threads(run), f32).reshape(shape)
    assert abs(found - by_definition(u, 3)).max() < 1e-5


def test_tall_is_wide_on_its_side(pinned):
    for shape in SIDES:
        if shape[0] == shape[1]: continue  # a square matrix stands as it is
        u = noise(5, shape)
        assert np.array_equal(newton_schulz5(u.T, 5), newton_schulz5(u, 5).T)


def test_singular_values_come_near_one():
    for shape in ((8, 8), (33, 8), (8, 33)):
        s = np.linalg.svd(newton_schulz5(noise(2, shape), 5), compute_uv=False)
        assert 0.5 < s.min() and s.max() < 1.5
    out = newton_schulz5(np.diag(np.array([0.8, -1.6, 0.1], f32)), 5)
    assert abs(out - np.diag(np.diag(out))).max() < 1e-6
    assert (0.3 < abs(np.diag(out))).all() and (abs(np.diag(out)) < 1.7).all()
    assert np.array_equal(np.sign(np.diag(out)), [1, -1, 1])


def test_newton_schulz_anchors(pinned):
    out = newton_schulz5(np.diag(np.array([0.8, -1.6], f32)), 5)
    assert hexa(np.diag(out)) == '3f8e9cf3 bf3052cc' and out[0, 1] == out[1, 0] == 0
    u = np.array([[0.5, 0.1], [-0.2, 0.4], [0.3, -0.6]], f32)
    assert hexa(newton_schulz5(u, 5)) == '3f380898 3e673018 be4c08fa 3eec540c 3e9906be bf313f0c'


def test_what_newton_schulz_refuses():
    good = np.ones((2, 3), f32)
    for bad in (good.astype(f64), good.astype('>f4'), [[1.0]], None, good.astype(np.int32),
                fucina.constant(good, 'a b')):
        with pytest.raises(DTypeError, match='float32'): newton_schulz5(bad, 5)
    for bad in (good[0], good[None], np.ones((), f32), good[:0], good[:, :0]):
        with pytest.raises(InvalidShapeError, match='matrix'): newton_schulz5(bad, 5)
    for bad in (5.0, '5', None, True):
        with pytest.raises(TypeError, match='steps'): newton_schulz5(good, bad)
    with pytest.raises(InvalidConfigError, match='steps'): newton_schulz5(good, -1)
    assert np.array_equal(newton_schulz5(good, np.int64(3)), newton_schulz5(good, 3))


@pytest.mark.parametrize('gemm', ['blas', 'pinned'])
def test_matrices_of_every_size_of_number(gemm):
    with ExecContext(gemm=gemm):
        assert not newton_schulz5(np.zeros((3, 4), f32), 5).any()
        for value in (np.nan, np.inf, -np.inf):
            u = noise(1, (4, 6))
            u[1, 2] = value
            assert same(newton_schulz5(u, 1), contract(u, 1)) or gemm == 'blas'
            assert np.isnan(newton_schulz5(u, 5)).all()
        u = noise(1, (4, 6))
        for factor in (1e-38, 1e19, 1e37):  # 1e-7 is added to a norm of 1e-38
            out = newton_schulz5(u * f32(factor), 5)
            assert np.isfinite(out).all() and (factor < 1 or abs(out - newton_schulz5(u, 5)).max() < 1e-5)


# -- steps ------------------------------------------------------------------------------------

def one(shape, values, grads, dtype='f32', **fields):
    w, opt = fucina.variable(np.reshape(values, shape), len(shape), dtype=dtype), Muon(**fields)
    opt.add_param(w)
    for g in grads:
        w.set_grad(np.reshape(g, shape))
        opt.step()
    return w, opt


W10 = [1, -2, 0.5, 3, -0.25, 1.5, 0.75, -1.25, 2.25, -0.5]
G10 = [[0.5, -1, 2, 0.25, -0.75, 1.25, -0.6, 0.45, -0.15, 0.9],
       [-0.3, 0.8, -1.2, 0.6, 0.1, -0.9, 1.05, -0.35, 0.55, -0.85],
       [1.1, 0.2, -0.4, -1.3, 0.7, 0.05, -0.95, 0.65, -0.25, 0.15]]
ANCHORS = [  # shape, scale, bits after three steps, the same from the original implementations
    ((3, 2), 'spectral', '3f7824a5 bfffbd1f 3efaf5b8 404002c8 be6808e4 3fbef1ad',
     [0.969309151, -1.99795902, 0.490155995, 3.00016975, -0.226596415, 1.49175036]),
    ((3, 2), 'match_rms_adamw', '3f7daaea bfffd0e4 3efe76de 403feba5 be791c8a 3fbf9e65',
     [0.990889192, -1.99856234, 0.497000635, 2.9987576, -0.24327293, 1.49702132]),
    ((2, 3), 'spectral', '3f7b0581 c0018135 3effd378 40400381 be77fe2e 3fc0002d',
     [0.980552793, -2.02351117, 0.499660254, 3.00021386, -0.242180541, 1.50000536])]


@pytest.mark.parametrize('shape, scale, pattern, decimals', ANCHORS)
def test_anchors(shape, scale, pattern, decimals, pinned):
    w, _ = one(shape, W10[:6], [g[:6] for g in G10], lr=0.02, weight_decay=0.01, scale=scale)
    assert hexa(w) == pattern
    with ExecContext():
        w, _ = one(shape, W10[:6], [g[:6] for g in G10], lr=0.02, weight_decay=0.01, scale=scale)
    assert abs(w.numpy().reshape(-1) - decimals).max() < 1e-4


def test_anchor_of_bf16_state(pinned):
    w, opt = one((5, 2), W10, G10, lr=0.02, weight_decay=0.01, state_dtype='bf16')
    assert hexa(w) == ('3f76ebd5 bfff9e29 3ef4cc96 403fcc87 be75510b 3fbe8061 3f41134b bfa28940 '
                       '400f69c4 bf0119c3')
    assert hexa(opt.slots[0].momentum) == ('3d82 3b3a 3c5c bcce 3bbd 3c85 bccb 3d14 3be1 3bfb')


def narrowed(x): return fucina.constant(x, x.ndim).to('bf16').to('f32').numpy()


def oracle(c, p, g, m):
    "One step by the text of the contract."
    with np.errstate(all='ignore'):
        beta, w = c.momentum, f32(1) - c.momentum
        m = m + w * (g - m) if w < 0.5 else g - (g - m) * beta
        u = m
        if c.nesterov: u = g + beta * (m - g) if beta < 0.5 else m - (m - g) * w
        if c.state_dtype == optim.StateDType.bf16: m = narrowed(m)
        o = contract(u, c.ns_steps)
        keep = f32(1.0 - f64(c.lr) * f64(c.weight_decay)) if c.weight_decay != 0 else f32(1)
        rows, cols = f32(len(p)), f32(len(p[0]))
        if c.scale == MuonScale.spectral: length = c.lr * np.sqrt(np.fmax(f32(1), rows / cols))
        else: length = (c.lr * f32(0.2)) * np.sqrt(np.fmax(rows, cols))
        return p * keep - length * o, m


SETTINGS = [dict(), dict(nesterov=False, weight_decay=0.3), dict(momentum=0.0),
            dict(momentum=0.3, scale='match_rms_adamw'), dict(momentum=0.5, ns_steps=0),
            dict(momentum=1.0, state_dtype='bf16'), dict(lr=-0.1, momentum=0.51, ns_steps=1),
            dict(momentum=0.2, nesterov=False, state_dtype='bf16', weight_decay=-0.1)]
variants = pytest.mark.parametrize('fields', SETTINGS, ids=map(str, SETTINGS))


@variants
@pytest.mark.parametrize('shape', [(1, 1), (1, 7), (7, 1), (9, 4), (4, 9), (2, 3, 4), (6, 2, 1, 2)])
def test_every_shape_follows_the_contract(fields, shape, pinned):
    w, opt = one(shape, uniform_fill(1, np.empty(shape, f32), -1, 1), [], **fields)
    p = w.numpy().reshape(shape[0], -1).copy()
    m = np.zeros_like(p)
    for t in range(4):
        g = noise(t, p.shape)
        w.set_grad(g.reshape(shape))
        opt.step()
        p, m = oracle(opt.config, p, g, m)
        assert same(w.numpy().reshape(p.shape), p)


numbers32 = st.floats(width=32, allow_subnormal=True)


@variants
@settings(max_examples=15, deadline=None)
@given(data=st.data(), shape=st.sampled_from([(2, 3), (3, 2), (2, 2)]))
def test_any_value_follows_the_contract(fields, data, shape):
    def draw():
        size = shape[0] * shape[1]
        return np.array(data.draw(st.lists(numbers32, min_size=size, max_size=size)), f32).reshape(shape)
    p, grads = draw(), [draw() for _ in range(2)]
    with ExecContext(gemm='pinned'):
        w, opt = one(shape, p, [], **fields)
        m = np.zeros_like(p)
        for g in grads:
            w.set_grad(g)
            opt.step()
            p, m = oracle(opt.config, p, g, m)
            if not np.isfinite(m).all(): break  # bits of a NaN on the way to bf16 are not ours
            assert same(w.numpy(), p)


def test_zero_gradients_move_only_by_decay(pinned):
    w, opt = one((2, 3), W10[:6], [np.zeros(6)] * 3, weight_decay=0.5)
    p, keep = np.array(W10[:6], f32), f32(1 - f64(f32(0.02)) * 0.5)
    for _ in range(3): p = p * keep
    assert np.array_equal(w.numpy().reshape(-1), p) and not opt.slots[0].momentum.any()


@pytest.mark.parametrize('gemm', ['blas', 'pinned'])
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_gradients_that_are_not_finite(gemm, value):
    "They spoil their own matrix and no other, and say so in the report."
    opt, twin = Muon(), Muon()
    ws = [fucina.variable(noise(k, (3, 4)), 'a b') for k in range(4)]
    for k, w in enumerate(ws): (opt if k < 2 else twin).add_param(w)
    for k, w in enumerate(ws): w.set_grad(noise(k % 2, (3, 4)))
    bad = noise(0, (3, 4))
    bad[1, 1] = value
    ws[0].set_grad(bad)
    assert list(opt.finite_report()) == ['param0']
    ws[3].value[...] = ws[1].numpy()
    with ExecContext(gemm=gemm):
        opt.step()
        twin.step()
    assert np.isnan(ws[0].numpy()).all() and np.array_equal(ws[1].numpy(), ws[3].numpy())


def test_masters_are_the_float_twin(pinned):
    for dtype in ('f16', 'bf16'):
        half = fucina.variable(np.reshape(W10, (5, 2)), 'a b', dtype=dtype)
        bias = fucina.variable(W10[:3], 'a', dtype=dtype)
        twins = [fucina.variable(t.to('f32').numpy(), t.tags) for t in (half, bias)]
        opts = Muon(lr=0.02), Muon(lr=0.02)
        for opt, ts in zip(opts, ((half, bias), twins)):
            for t in ts: opt.add_param(t)
        start, version = twins[0].numpy().copy(), half._node.version
        for k in range(3):
            for opt, (w, b) in zip(opts, ((half, bias), twins)):
                w.set_grad(np.reshape(G10[k], (5, 2)))
                b.set_grad(G10[k][:3])
                opt.step()
            for t, twin in zip((half, bias), twins):
                assert np.array_equal(bits(t._data), bits(fucina.constant(twin.numpy(), t.tags).to(dtype).value))
            assert np.array_equal(bits(opts[0].slots[0].param.master), bits(twins[0].numpy()))
        assert half._node.version > version and not np.array_equal(start, twins[0].numpy())


@pytest.mark.parametrize('dtype', ['f32', 'bf16'])
def test_no_gradient_no_change(dtype, pinned):
    opt, ws = Muon(weight_decay=0.5), [fucina.variable(noise(k, (3, 4)), 'a b', dtype=dtype) for k in range(2)]
    for w in ws: opt.add_param(w)
    ws[0].set_grad(noise(3, (3, 4)))
    before, versions = ws[1]._data.copy(), [w._node.version for w in ws]
    opt.step()
    assert np.array_equal(bits(ws[1]._data), bits(before)) and not opt.slots[1].momentum.any()
    assert ws[0]._node.version > versions[0] and ws[1]._node.version == versions[1]
    ws[1].set_grad(noise(4, (3, 4)))  # late: as if it had joined now
    opt.step()
    alone = Muon(weight_decay=0.5)
    w = fucina.variable(noise(1, (3, 4)), 'a b', dtype=dtype)
    alone.add_param(w)
    w.set_grad(noise(4, (3, 4)))
    alone.step()
    assert np.array_equal(bits(w.value), bits(ws[1].value))


def test_gradients_of_every_layout(pinned):
    g, found = noise(1, (5, 4)), []
    frozen = g.copy()
    frozen.flags.writeable = False
    for given_ in (g, np.asfortranarray(g), frozen, np.repeat(g, 2, axis=1)[:, ::2], g.astype(f64)):
        w, opt = one((5, 4), noise(2, (5, 4)), [])
        w.set_grad(given_)
        opt.step()
        found.append(bits(w))
        assert np.array_equal(w.grad.numpy(), g)
    assert all(np.array_equal(b, found[0]) for b in found)


def test_every_gradient_is_checked_before_the_first_step():
    opt = Muon()
    ws = [fucina.variable(noise(k, (2, 3)), 'a b') for k in range(2)] + [fucina.variable(W10[:3], 'a')]
    for w in ws: opt.add_param(w)
    for bad in ws:
        for w in ws: w.set_grad(np.ones(w.shape))
        bad._node.grad = np.ones(7, f32)
        before = [w.numpy().copy() for w in ws]
        with pytest.raises(GradShapeMismatchError): opt.step()
        assert all(np.array_equal(w.numpy(), b) for w, b in zip(ws, before))
        assert not opt.slots[0].momentum.any() and opt.fallback.slots[0].step == 0


def test_parameters_may_join_at_any_time(pinned):
    late, opt = Muon(), Muon()
    ws = [fucina.variable(noise(k % 3, (4, 3)), 'a b') for k in range(6)]
    def steps(opt, ws, seeds):
        for seed in seeds:
            for k, w in enumerate(ws): w.set_grad(noise(10 * seed + k, (4, 3)))
            opt.step()
    for w in ws[:3]: opt.add_param(w)
    steps(opt, ws[:1], [1])
    for w in ws[1:3]: w.zero_grad()
    for w in ws[3:4]: late.add_param(w)
    steps(late, ws[3:4], [1])
    for w in ws[4:]: late.add_param(w)
    for o, group in ((opt, ws[:3]), (late, ws[3:])): steps(o, group, [2, 3])
    for a, b in zip(ws[:3], ws[3:]): assert np.array_equal(bits(a), bits(b))


def test_batches_change_no_bit(monkeypatch, pinned):
    shapes, found = [(5, 7), (33, 8), (3, 2, 4), (1, 1), (40, 30), (2, 2)], []
    for together in (1, 40, 300, 2**20):
        monkeypatch.setattr(muon, 'TOGETHER', together)
        opt, ws = Muon(state_dtype='bf16'), [fucina.variable(noise(1, s), len(s)) for s in shapes]
        for w in ws: opt.add_param(w)
        for t in range(3):
            for k, w in enumerate(ws):
                if (t, k) != (1, 2): w.set_grad(noise(10 * t + k, w.shape))
                else: w.zero_grad()
            opt.step()
        found.append([bits(w).tolist() for w in ws])
        assert all(b.size <= together or len(b) == 1 for b in opt._batches)
        assert [s for b in opt._batches for s in b] == list(opt.slots)
    assert found[1:] == found[:-1] and len(opt._batches) == 1


def test_settings_are_read_at_every_step(pinned):
    changed, fresh = Muon(), Muon(lr=0.1, momentum=0.3, nesterov=False, ns_steps=2, weight_decay=0.2,
                                  scale='match_rms_adamw')
    ws = [fucina.variable(noise(1, (3, 5)), 'a b') for _ in range(2)]
    for opt, w in zip((changed, fresh), ws):
        opt.add_param(w)
        w.set_grad(noise(2, (3, 5)))
    for k in ('lr', 'momentum', 'nesterov', 'ns_steps', 'weight_decay', 'scale'):
        setattr(changed.config, k, getattr(fresh.config, k))
    for opt in (changed, fresh): opt.step()
    assert np.array_equal(bits(ws[0]), bits(ws[1]))


# -- other implementations --------------------------------------------------------------------

def test_jordans_reference_in_float64():
    "The formulas of the original page, in float64: a plain lerp and a plain iteration."
    shapes = [(3, 2), (2, 3), (16, 9), (9, 16), (3, 2, 4)]
    for shape in shapes:
        w, opt = one(shape, noise(1, shape), [], lr=0.02, weight_decay=0.01)
        p = w.numpy().astype(f64).reshape(shape[0], -1)
        m = np.zeros_like(p)
        for t in range(20):
            g = noise(100 + t, shape).astype(f64)
            w.set_grad(g)
            opt.step()
            g = g.reshape(p.shape)
            m = 0.95 * m + 0.05 * g
            u = 0.05 * g + 0.95 * m
            p = p * (1 - 0.02 * 0.01) - 0.02 * max(1, p.shape[0] / p.shape[1])**0.5 * by_definition(u, 5)
        assert abs(w.numpy().reshape(p.shape) - p).max() < 1e-5


@pytest.mark.parametrize('scale, theirs', [('spectral', 'original'), ('match_rms_adamw', 'match_rms_adamw')])
@pytest.mark.parametrize('nesterov', [True, False])
def test_against_torch(scale, theirs, nesterov):
    """PyTorch's Muon has the same lerps, factors and decay. It differs in three ways: it iterates in
    bfloat16, it divides by max(norm, eps) where we divide by norm + eps, and it takes matrices only.
    Hence the tolerance, a few percent of the length of the steps. With its iteration in float32 the
    two agree; that is checked second."""
    torch = pytest.importorskip('torch')
    import torch.optim._muon as inside
    def exact(u, coefficients, steps, eps):
        a, b, c = coefficients
        x = u.T if u.size(0) > u.size(1) else u
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            g = x @ x.T
            x = a * x + (b * g + c * g @ g) @ x
        return x.T if u.size(0) > u.size(1) else x
    half = inside._zeropower_via_newtonschulz
    try:
        for iterate, limit in ((half, 0.05), (exact, 1e-5)):
            inside._zeropower_via_newtonschulz = iterate
            for shape in ((6, 4), (4, 6), (5, 5)):
                w, opt = one(shape, noise(1, shape), [], lr=0.02, weight_decay=0.1, scale=scale,
                             nesterov=nesterov)
                q = torch.nn.Parameter(torch.tensor(w.numpy().copy()))
                other = torch.optim.Muon([q], lr=0.02, weight_decay=0.1, adjust_lr_fn=theirs,
                                         nesterov=nesterov)
                start = w.numpy().copy()
                for t in range(10):
                    g = noise(20 + t, shape)
                    w.set_grad(g)
                    q.grad = torch.tensor(g)
                    opt.step()
                    other.step()
                moved = np.abs(w.numpy() - start).max()
                assert np.abs(w.numpy() - q.detach().numpy()).max() < limit * moved
    finally: inside._zeropower_via_newtonschulz = half


def test_a_quadratic_is_solved():
    target, bias = noise(1, (3, 2)), np.array([0.5, -1], f32)
    w, b = fucina.variable(np.zeros((3, 2)), 'a b'), fucina.variable(np.zeros(2), 'b')
    opt = Muon(lr=0.02, fallback=AdamWConfig(lr=0.05, weight_decay=0))
    for t in (w, b): opt.add_param(t)
    assert (len(opt.slots), len(opt.fallback.slots)) == (1, 1)
    for _ in range(400):
        with fucina.exec_scope():
            dw, db = w - fucina.constant(target, 'a b'), b - fucina.constant(bias, 'b')
            ((dw * dw).sum_all() + (db * db).sum_all()).backward()
        opt.step()
        opt.zero_grad()
    assert abs(w.numpy() - target).max() < 0.08 and abs(b.numpy() - bias).max() < 0.05


# -- registration and settings ----------------------------------------------------------------

def test_routing():
    opt = Muon()
    for shape in ((), (3,), (1,), (2, 3), (1, 1), (2, 3, 4), (2, 1, 2, 1)):
        opt.add_param(fucina.variable(np.zeros(shape), len(shape)))
    opt.add_fallback_param(fucina.variable(np.zeros((9, 4)), 'a b'), 'table')
    opt.add_fallback_param_named(fucina.variable(np.zeros((9, 5)), 'a b'), 'head')
    opt.add_param_named(fucina.variable(np.zeros((9, 6)), 'a b'), 'hidden')
    assert [(s.param.rows, s.param.cols) for s in opt.slots] == [(2, 3), (1, 1), (2, 12), (2, 2), (9, 6)]
    assert [(s.param.rows, s.param.cols) for s in opt.fallback.slots] == [
        (1, 1), (3, 1), (1, 1), (9, 4), (9, 5)]
    assert [opt.fallback.slots.label(i) for i in range(5)] == ['param0', 'param1', 'param2', 'table', 'head']
    assert opt.slots.label(4) == 'hidden'
    text = repr(opt)
    assert 'muon' in text and 'fallback' in text and 'momentum f32' in text and 'm f32, v f32' in text
    assert '<table>' in opt._repr_html_()


def test_duplicates_over_both_lists():
    opt, w, b = Muon(), fucina.variable(np.zeros((2, 3)), 'a b'), fucina.variable([1.0], 'a')
    opt.add_param(w, 'first')
    opt.add_param(b)
    for add in (opt.add_param, opt.add_fallback_param):
        with pytest.raises(DuplicateParamError, match='first.*second'): add(w, 'second')
        with pytest.raises(DuplicateParamError, match='param0.*again'): add(b)
    assert (len(opt.slots), len(opt.fallback.slots)) == (1, 1)
    with pytest.raises(DuplicateParamError): optim.OptimizerSet([opt, opt])
    other = optim.SGD()
    other.add_param(b)
    with pytest.raises(DuplicateParamError): optim.OptimizerSet([opt, other])
    seen = set()
    opt.collect_grad_states(seen)
    assert seen == {w._node, b._node}


def test_settings():
    c = MuonConfig()
    assert c == MuonConfig(0.02, 0.95, True, 5, 0, 'spectral', 'f32',
                           AdamWConfig(3e-4, 0.9, 0.95, 1e-10, 0))
    assert type(c.lr) is f32 and type(c.ns_steps) is int and c.scale is MuonScale.spectral
    assert (MuonScale.spectral, MuonScale.match_rms_adamw) == (0, 1)
    assert MuonConfig(scale='match_rms_adamw').scale is MuonScale.match_rms_adamw
    for bad in (dict(scale='moonlight'), dict(ns_steps=-1), dict(ns_steps=2**32), dict(lr=np.nan)):
        with pytest.raises(InvalidConfigError): MuonConfig(**bad)
    for bad in (dict(scale=1), dict(ns_steps=5.0), dict(nesterov=1), dict(fallback=None),
                dict(fallback=optim.AdamConfig()), dict(lr='0.1')):
        with pytest.raises(TypeError): Muon(**bad)
    assert MuonConfig(ns_steps=np.uint8(7)).ns_steps == 7
    assert MuonConfig(ns_steps=2**32 - 1).ns_steps == 2**32 - 1


def test_settings_are_copied():
    c = MuonConfig(lr=0.1)
    opt = Muon(c)
    c.lr = c.fallback.lr = 0.7
    assert opt.lr == f32(0.1) and opt.fallback.lr == opt.config.fallback.lr == f32(3e-4)
    opt.lr, opt.fallback.lr = 0.2, 0.3
    assert opt.config.lr == f32(0.2) and opt.fallback.config.lr == f32(0.3)
    assert opt.config.fallback.lr == f32(3e-4)  # only where it came from
    shown = repr(opt)
    assert 'lr=0.2' in shown and 'AdamWConfig(lr=0.3' in shown and '0.0003' not in shown
    assert Muon().config.fallback is not Muon().config.fallback


def test_deep_copies_go_their_own_way(pinned):
    w, b = fucina.variable(noise(1, (3, 4)), 'a b'), fucina.variable(noise(2, (3,)), 'a')
    opt = Muon()
    for t in (w, b): opt.add_param(t)
    def step(opt, w, b):
        w.set_grad(noise(3, (3, 4)))
        b.set_grad(noise(4, (3,)))
        opt.step()
    step(opt, w, b)
    (w2, b2), opt2 = copy.deepcopy(((w, b), opt))
    before = w.numpy().copy()
    step(opt2, w2, b2)
    assert np.array_equal(before, w.numpy()) and not np.array_equal(before, w2.numpy())
    step(opt, w, b)
    assert np.array_equal(bits(w), bits(w2)) and np.array_equal(bits(b), bits(b2))
    assert saved(opt) == saved(opt2)


def test_norms_scaling_and_clipping():
    opt = Muon()
    w, b = fucina.variable(np.zeros((400, 90)), 'a b'), fucina.variable(np.zeros(9), 'a')
    for t in (w, b): opt.add_param(t)
    assert opt.grad_squared_norm() == 0
    gw, gb = noise(1, (400, 90)), noise(2, (9,))
    b.set_grad(gb)
    only = opt.grad_squared_norm()
    w.set_grad(gw)
    first = sum_squares(gw.reshape(-1)[:2**15]), sum_squares(gw.reshape(-1)[2**15:])
    assert only == sum_squares(gb)
    assert opt.grad_squared_norm() == sum_squares(gb) + (first[0] + first[1])  # the fallback first
    opt.scale_gradients(0.5)
    assert np.array_equal(w.grad.numpy(), gw * f32(0.5)) and np.array_equal(b.grad.numpy(), gb * f32(0.5))
    norm = opt.clip_grad_norm(1.0)
    assert norm == f32(np.sqrt(opt.grad_squared_norm())) or opt.grad_squared_norm() < 1.001
    opt.zero_grad()
    assert w.grad is None and b.grad is None


def test_a_failed_load_changes_neither_part(pinned):
    def build():
        opt, ts = Muon(), [fucina.variable(noise(k, s), len(s), dtype=d) for k, (s, d) in
                           enumerate((((2, 3), 'bf16'), ((3,), 'f32'), ((2, 2), 'f32')))]
        for t in ts: opt.add_param(t)
        for k, t in enumerate(ts): t.set_grad(noise(k, t.shape))
        return opt, ts
    (opt, ts), (other, others) = build(), build()
    for _ in range(2): opt.step()
    raw, untouched = saved(opt), saved(other)
    for cut in range(len(raw)):
        with pytest.raises((EOFError, optim.OptimError)): other.load_state(io.BytesIO(raw[:cut]))
        assert saved(other) == untouched
    for at in (0, 4, 5, 6, 10, raw.index(b'FZA')):  # magic, scale, nesterov, iterations, count, magic
        broken = bytearray(raw)
        broken[at] ^= 0x40
        with pytest.raises((EOFError, optim.OptimError)): other.load_state(io.BytesIO(bytes(broken)))
        assert saved(other) == untouched
    other.load_state(io.BytesIO(raw))
    assert saved(other) == raw and np.array_equal(bits(others[0].value), bits(ts[0].value))
    found = optim.inspect_state(io.BytesIO(raw))
    assert [found.magic, found.members[0].magic] == ['FZM5', 'FZA3']
    assert found.settings == dict(scale=0, nesterov=1, ns_steps=5)


# -- memory -----------------------------------------------------------------------------------

def test_steps_use_the_same_memory():
    opt, ws = Muon(), [fucina.variable(noise(k, s), 'a b') for k, s in enumerate(((64, 64), (96, 64), (64, 96)))]
    for w in ws:
        opt.add_param(w)
        w.set_grad(noise(5, w.shape))
    with ExecContext() as context:
        for _ in range(3): opt.step()
        stats = context.stats()
        assert stats['escaped'] == stats['live_bytes'] == stats['open_scopes'] == 0
        tracemalloc.start()
        start = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(5): opt.step()
        now, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert context.stats()['fresh'] == stats['fresh'] and context.stats()['escaped'] == 0
        assert now - start < 4096 and peak - start < 16384  # one matrix has 16384 bytes


def test_a_step_leaves_an_open_scope_alone():
    with fucina.exec_scope() as scope:
        w, opt = one((4, 3), noise(1, (4, 3)), [])
        y = w.sum_all()
        before = y.item()
        y.backward()
        opt.step()
        assert y.item() == before and scope.stats['results'] == 1


def test_without_compiled_code():
    "The same bits from plain Python."
    code = '''
import numpy as np, fucina
from fucina.optim import Muon
with fucina.ExecContext(gemm='pinned'):
    for state in ('f32', 'bf16'):
        opt = Muon(weight_decay=0.01, state_dtype=state)
        for shape in ((5, 2), (2, 5)):
            w = fucina.variable(np.arange(10).reshape(shape) - 4.5, 'a b')
            opt.add_param(w)
            for t in range(2):
                w.set_grad(np.cos(np.arange(10) + t).reshape(shape))
                opt.step()
            print(w.numpy().tobytes().hex())
'''
    compiled = printed(code)
    assert python(code, NUMBA_DISABLE_JIT='1') == compiled and len(compiled.split()) == 4
