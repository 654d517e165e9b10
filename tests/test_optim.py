"""Optimizers: an independent formula, anchors, norms, settings, refusals, memory."""
import copy
import inspect
import pickle
import zlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import MISC, at_any_number_of_threads, bits, hexa, same, variable
from processes import printed, python

import fucina
from fucina import optim
from fucina.optim import param
from fucina.optim.moments import power
from fucina.rng import gaussian_fill, uniform_fill

f32, f64 = np.float32, np.float64


# -- an independent formula -------------------------------------------------------------------

def zig_pow(x, t):
    "beta ** t as the contract writes it, on Python floats."
    if t == 0 or x == 1: return 1.0
    if x != x or t == 1: return x
    if x == 0: return x if t % 2 else 0.0
    (x1, xe), a1, ae, i = np.frexp(x), 1.0, 0, t
    x1, xe = float(x1), int(xe)
    while i:
        if abs(xe) > 4096:
            ae += xe
            break
        if i & 1: a1, ae = a1 * x1, ae + xe
        x1, xe = x1 * x1, 2 * xe
        if x1 < 0.5: x1, xe = x1 + x1, xe - 1
        i >>= 1
    with np.errstate(all='ignore'): return float(np.ldexp(a1, ae))


def adam_scalars(c, t):
    F = {k: f64(getattr(c, k)) for k in ('lr', 'beta1', 'beta2', 'weight_decay')}
    keep = f32(1.0 - F['lr'] * F['weight_decay']) if F['weight_decay'] else f32(1)
    return (keep, f32(1.0 - F['beta1']), f32(1.0 - F['beta2']),
            f32(F['lr'] / f64(1 - zig_pow(float(F['beta1']), t))),
            f32(np.sqrt(f64(1 - zig_pow(float(F['beta2']), t)))))


def adam_oracle(c, decoupled, p, g, m, v, t):
    keep, omb1, omb2, ss, bc2s = adam_scalars(c, t)
    if not decoupled:
        keep = f32(1)
        if c.weight_decay != 0: g = g + c.weight_decay * p
    m = m + omb1 * (g - m)
    v = (c.beta2 * v) + ((omb2 * g) * g)
    return p * keep - ss * (m / ((np.sqrt(v) / bc2s) + c.eps)), m, v


def sgd_oracle(c, p, g, b, t):
    if c.weight_decay != 0: g = g + c.weight_decay * p
    if c.momentum != 0:
        b = g if t == 1 else c.momentum * b + f32(1.0 - f64(c.dampening)) * g
        g = g + c.momentum * b if c.nesterov else b
    return p - c.lr * g, b


# One row per optimizer and setting: every test below runs over all of them.
MATRIX = {
    'sgd': (optim.SGD, dict(lr=0.1)),
    'sgd decay': (optim.SGD, dict(lr=0.1, weight_decay=0.3)),
    'momentum': (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.2)),
    'nesterov': (optim.SGD, dict(lr=0.1, momentum=0.8, weight_decay=0.1, nesterov=True)),
    'adam': (optim.Adam, dict(lr=0.05)),
    'adam coupled': (optim.Adam, dict(lr=0.05, beta1=0.7, weight_decay=0.2)),
    'adamw': (optim.AdamW, dict(lr=0.05)),
    'adamw decay': (optim.AdamW, dict(lr=0.05, beta2=0.9, eps=1e-3, weight_decay=0.5)),
}
matrix = pytest.mark.parametrize('kind, fields', list(MATRIX.values()), ids=list(MATRIX))


def oracle_step(opt, t, p, g, state):
    with np.errstate(all='ignore'):
        if isinstance(opt, optim.SGD):
            p, b = sgd_oracle(opt.config, p, g, state[0] if state else f32(0), t)
            return p, (b,)
        m, v = state or (np.zeros_like(p), np.zeros_like(p))
        p, m, v = adam_oracle(opt.config, isinstance(opt, optim.AdamW), p, g, m, v, t)
        return p, (m, v)


@matrix
@pytest.mark.parametrize('shape', [(1,), (), (7,), (3, 1), (2, 3, 5), (1025,)])
def test_every_shape_follows_the_formula(kind, fields, shape):
    opt, n = kind(**fields), int(np.prod(shape))
    w = fucina.variable(uniform_fill(1, np.empty(n, f32), -1, 1).reshape(shape), len(shape))
    opt.add_param(w)
    p, state = w.numpy().reshape(-1).copy(), ()
    for t in range(1, 8):
        g = gaussian_fill(t, np.empty(n, f32), 1.0)
        w.set_grad(g.reshape(shape))
        opt.step()
        p, state = oracle_step(opt, t, p, g, state)
        assert same(w.numpy().reshape(-1), p)
    assert opt.slots[0].step == 7


@matrix
def test_threads_change_no_bit(kind, fields, monkeypatch):
    monkeypatch.setattr(param, 'LEAST', 1)
    n = 2**18 + 5
    start, grads = uniform_fill(1, np.empty(n, f32), -1, 1), gaussian_fill(2, np.empty((3, n), f32), 1.0)

    def run():
        opt, w, small = kind(**fields), variable(start), variable(start[:9])
        for t in (small, w): opt.add_param(t)
        for g in grads:
            w.set_grad(g)
            small.set_grad(g[:9])
            opt.step()
        return w.numpy().tobytes(), small.numpy().tobytes()
    found, (opt, p, state) = at_any_number_of_threads(run), (kind(**fields), start, ())
    for t, g in enumerate(grads, 1): p, state = oracle_step(opt, t, p, g, state)
    assert found == (p.tobytes(), p[:9].tobytes())


floats = st.floats(width=32, allow_subnormal=True)


@matrix
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_value_follows_the_formula(kind, fields, data):
    p, *grads = (np.array(data.draw(st.lists(floats, min_size=9, max_size=9)), f32)
                 for _ in range(4))
    opt, w, state = kind(**fields), variable(p), ()
    opt.add_param(w)
    for t, g in enumerate(grads, 1):
        w.set_grad(g)
        opt.step()
        p, state = oracle_step(opt, t, p, g, state)
        assert same(w.numpy(), p)


@matrix
@pytest.mark.parametrize('dtype', ['f16', 'bf16'])
def test_sixteen_bit_parameters_are_their_rounded_twin(kind, fields, dtype):
    values = uniform_fill(3, np.empty(10, f32), -2, 2)
    half = fucina.variable(values, 'd', dtype=dtype)
    twin = fucina.variable(half.to('f32').numpy(), 'd')
    opts = kind(**fields), kind(**fields)
    for opt, t in zip(opts, (half, twin)): opt.add_param(t)
    start = twin.numpy().copy()
    for k in range(4):
        for opt, t in zip(opts, (half, twin)):
            t.set_grad(gaussian_fill(k, np.empty(10, f32), 1.0))
            opt.step()
        rounded = fucina.constant(twin.numpy(), 'd').to(dtype)
        assert np.array_equal(bits(half.value), bits(rounded.value))
        assert np.array_equal(bits(opts[0].slots[0].param.master), bits(twin))
    assert not np.array_equal(start, twin.numpy())


def test_power_anchors():
    for beta, t, value in ((0.9, 2, '0x1.9eb8507ae1480p-1'), (0.9, 10, '0x1.650befd153364p-2'),
                           (0.9, 100, '0x1.bda0098fb295bp-16'), (0.9, 1000, '0x1.fee3ca4486bc3p-153'),
                           (0.999, 2, '0x1.fef9fd8db6a20p-1'), (0.999, 10, '0x1.fae72de427186p-1'),
                           (0.999, 100, '0x1.cf4111b35cab4p-1'), (0.999, 1000, '0x1.7886644366271p-2')):
        assert power(f64(f32(beta)), f64(t)) == float.fromhex(value) == zig_pow(float(f32(beta)), t)


@settings(max_examples=300, deadline=None)
@given(x=st.floats(width=32), t=st.integers(0, 2**40))
def test_power_is_the_contract(x, t):
    ours, theirs = power(f64(x), f64(t)), zig_pow(x, t)
    assert f64(ours).tobytes() == f64(theirs).tobytes() or (ours != ours and theirs != theirs)


def test_first_step_scalars():
    scalars = adam_scalars(optim.AdamWConfig(), 1)
    assert [f'{s.view(np.uint32):08x}' for s in scalars] == [
        '3f7fff58', '3dccccd0', '3a831200', '3c23d708', '3d0186ac']


# -- anchors ----------------------------------------------------------------------------------

W10 = [1, -2, 0.5, 3, -0.25, 1.5, 0.75, -1.25, 2.25, -0.5]
G10 = [[0.5, -1, 2, 0.25, -0.75, 1.25, -0.6, 0.45, -0.15, 0.9],
       [-0.3, 0.8, -1.2, 0.6, 0.1, -0.9, 1.05, -0.35, 0.55, -0.85],
       [1.1, 0.2, -0.4, -1.3, 0.7, 0.05, -0.95, 0.65, -0.25, 0.15],
       [-0.7, 0.4, 0.9, -0.2, 0.35, -1.15, 0.8, -0.05, 0.3, -0.45]]
TINY = [2e-5, -1e-5, 3e-5, -4e-5], [-1e-5, 2.5e-5, -2e-5, 1.5e-5]
BOTH = dict(state_dtype='bf16', second_moment_dtype='bf16')
ANCHORS = {  # optimizer, start, gradients, values after the last step, then each buffer
    'adamw': (optim.AdamW(lr=0.1, weight_decay=0.1), W10[:6], [g[:6] for g in G10[:3]],
              '3f4a3a28 bfebcf27 3eba9279 402f9bc5 bdcc8820 3fab088c',
              '3dfced95 3c343960 3c656038 bd645a1c 3c958108 3cced91b',
              '3acb14ea 3adbda2c 3bb73073 3b0a6947 3a8b1d0f 3b1b6362'),
    'adamw tiny': (optim.AdamW(lr=0.1, weight_decay=0), [1, -2, 0.5, 3], TINY,
                   '3f5f9950 bff8dec3 3ec56ba7 4048bd61'),
    'adam': (optim.Adam(lr=0.1, weight_decay=0.1), W10[:6], [g[:6] for g in G10[:3]],
             '3f4a7ab3 bfed60c9 3ebe38de 4032a8ff bdccf4e4 3facf4a8'),
    'nesterov': (optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True), W10[:6],
                 [g[:6] for g in G10[:3]],
                 '3f29980b bfeada73 3e4e62c6 403863e3 be155ea4 3f9fee92'),
    'dampening': (optim.SGD(lr=0.1, momentum=0.9, dampening=0.1), W10[:6],
                  [g[:6] for g in G10[:3]],
                  '3f5119ce bff1205b 3e4bfb17 403c95ea be01e4f7 3fa7c361'),
    'sgd': (optim.SGD(lr=0.1), W10[:6], [g[:6] for g in G10[:2]],
            '3f7ae148 bffd70a4 3ed70a3e 403a8f5c be3d70a4 3fbb851f'),
    'adamw bf16 m': (optim.AdamW(lr=0.1, weight_decay=0.1, state_dtype='bf16'), W10, G10,
                     '3f43e5be bfec2d35 3eac9866 402fa0df be011c60 3face598 3f4b7fa7 bfb285df '
                     '400a1f21 bf10b89e',
                     '3d29 3d4c 3dd2 bd90 3d52 bdbd 3d13 3d6d 3d28 bd0f',
                     '3b058d31 3af09a88 3bd18c3d 3b0ce4ec 3a9b07cf 3b71e730 3b44a8aa 3a44457c '
                     '39f9f58c 3ae5d87c'),
    'adamw bf16': (optim.AdamW(lr=0.1, weight_decay=0.1, **BOTH), W10, G10,
                   '3f43e503 bfec2ce4 3eac9658 402fa18f be010dc6 3face606 3f4b7f7c bfb285fc '
                   '400a1f01 bf10b967',
                   '3d29 3d4c 3dd2 bd90 3d52 bdbd 3d13 3d6d 3d28 bd0f',
                   '3b06 3af1 3bd1 3b0c 3a9b 3b72 3b45 3a44 39fa 3ae6'),
    'adam bf16': (optim.Adam(lr=0.1, weight_decay=0.1, **BOTH), W10[:9],
                  [g[:9] for g in G10[:3]],
                  '3f4a7a24 bfed5e97 3ebe3d84 4032a956 bdcc858f 3facfa53 3f526c49 bfad425e '
                  '4000addd',
                  '3e18 bd29 3ccf 3cbb 3c64 3d82 bcde 3d0d 3d91',
                  '3aed 3aee 3bba 3b0c 3a8e 3b28 3b18 3a20 3a1b'),
    'nesterov bf16': (optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True,
                                state_dtype='bf16'), W10, G10[:3],
                      '3f299180 bfead1d5 3e4d7eb4 40385f29 be159260 3f9fdfb2 3f523c81 bfb0dc19 '
                      '4007129d bf15aaa9',
                      '3fae be14 3e37 be28 3e2a 3ee0 bec7 3f06 3ed8 3d11'),
}


@pytest.mark.parametrize('opt, start, grads, values, buffers',
                         [(o, w, g, v, b) for o, w, g, v, *b in ANCHORS.values()], ids=list(ANCHORS))
def test_anchor(opt, start, grads, values, buffers):
    opt, w = copy.deepcopy(opt), fucina.variable(start, 'd')
    opt.add_param(w)
    for g in grads:
        w.set_grad(g)
        opt.step()
    assert hexa(w) == values
    for a, expected in zip(opt.slots[0].arrays(), buffers):
        assert hexa(a) == expected


@pytest.mark.parametrize('dtype, stages', [
    ('bf16', ['3f80 c000 3eff 4040', '3f7f c000 3eff 4040', '3f7f c000 3efe 4040',
              '3f7f bfff 3efe 4040']),
    ('f16', ['3bfe bfff 37fc 41ff', '3bfb bffe 37f7 41ff', '3bf9 bffc 37f3 41fe',
             '3bf7 bffb 37ef 41fd'])])
def test_anchor_of_published_masters(dtype, stages):
    w, opt = fucina.variable([1, -2, 0.5, 3], 'd', dtype=dtype), optim.AdamW(weight_decay=0.1)
    opt.add_param(w)
    for stage in stages:
        w.set_grad([0.5, -1, 2, 0.25])
        opt.step()
        assert hexa(w.value) == stage
    assert hexa(opt.slots[0].param.master) == '3f7edfb0 bfff62ba 3efdd996 403faad2'


def test_anchor_of_a_clipped_set():
    a, b = fucina.variable(W10[:6], 'd'), fucina.variable([0.5, -1], 'd')
    members = [optim.SGD(lr=0.1, momentum=0.9) for _ in range(2)]
    for opt, t in zip(members, (a, b)): opt.add_param(t)
    group = optim.OptimizerSet(members)
    for g, h, norm in ((G10[0][:6], [0.3, -0.6], '4033bdf6'), (G10[1][:6], [-0.2, 0.4], '3ff12ba5')):
        a.set_grad(g)
        b.set_grad(h)
        assert hexa(group.clip_grad_norm(0.5)) == norm
        group.step()
        group.zero_grad()
    assert hexa(a) == '3f7db553 bffe633d 3eedaa9a 403e7094 be68bd26 3fbda517'
    assert hexa(b) == '3efd858e bf7d858e'


# -- other libraries, other arithmetic --------------------------------------------------------

@matrix
def test_against_torch(kind, fields):
    torch = pytest.importorskip('torch')
    start = uniform_fill(5, np.empty(64, f32), -1, 1)
    ours, theirs = variable(start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    options = {k: v for k, v in fields.items() if k not in ('beta1', 'beta2')}
    if kind is not optim.SGD:
        c = kind(**fields).config
        options |= dict(betas=(float(c.beta1), float(c.beta2)), weight_decay=float(c.weight_decay))
    opt, ref = kind(**fields), getattr(torch.optim, kind.__name__)([theirs], **options)
    opt.add_param(ours)
    for t in range(10):
        g = gaussian_fill(t, np.empty(64, f32), 1.0)
        ours.set_grad(g)
        theirs.grad = torch.from_numpy(g.copy())
        mine, norm = opt.clip_grad_norm(4.0), torch.nn.utils.clip_grad_norm_([theirs], 4.0)
        assert abs(mine - float(norm)) < 1e-5
        opt.step()
        ref.step()
    assert abs(ours.numpy() - theirs.detach().numpy()).max() < 5e-6


@pytest.mark.parametrize('fields, limit', [({}, 1e-4), (BOTH, 1e-3)])
def test_adamw_solves_a_quadratic(fields, limit):
    target = np.array([[1, -2, 0.5], [3, -0.25, 1.5]], f32)
    w = fucina.variable(np.zeros((2, 3)), 'a b')
    opt, goal = optim.AdamW(lr=0.05, weight_decay=0, **fields), fucina.constant(target, 'a b')
    opt.add_param(w)
    for _ in range(300):
        opt.zero_grad()
        loss = (w - goal).mul(w - goal).sum_all()
        loss.backward()
        opt.step()
    assert loss.item() < limit


# -- norms, clipping, scaling -----------------------------------------------------------------

def with_grad(g, opt=None):
    "A variable of zeros with gradient `g`, and an optimizer that has it."
    w, opt = variable(np.zeros(np.shape(g), f32)), opt or optim.SGD()
    opt.add_param(w)
    w.set_grad(g)
    return w, opt


def test_golden_clip(threads):
    d = MISC
    seed0 = int(d['clip/seed0'][0])
    for k, (n, limit) in enumerate(zip(d['clip/len'], d['clip/max_norm'])):
        w, opt = with_grad(uniform_fill(seed0 + k, np.empty(int(n), f32), -1, 1))
        assert opt.grad_squared_norm() == d['clip/grad_squared_norm'][k]
        assert opt.clip_grad_norm(limit) == d['clip/return'][k]
        g = w.grad.numpy()
        assert zlib.crc32(g.tobytes()) == d['clip/grad_crc32'][k]
        assert np.array_equal(bits(g[:7]), bits(d['clip/grad_head7'][k]))


def test_golden_scale(threads):
    d = MISC
    for factor, out in zip(d['scale_gradients/factor'], d['scale_gradients/out']):
        w, opt = with_grad(d['scale_gradients/in'])
        opt.scale_gradients(factor)
        assert np.array_equal(bits(w.grad.numpy()), bits(out))


def test_golden_sum_squares_of_several_parameters(threads):
    d = MISC
    opt, total, seed0 = optim.AdamW(), 0.0, int(d['sum_squares/seed0'][0])
    for k, (n, out) in enumerate(zip(d['sum_squares/len'], d['sum_squares/out'])):
        if n: with_grad(uniform_fill(seed0 + k, np.empty(int(n), f32), -1, 1), opt)
        total += out
        assert opt.grad_squared_norm() == total
    assert type(opt.grad_squared_norm()) is f64


def test_clipping_at_the_edges():
    w, opt = with_grad([3, -4])
    for limit in (5.1, np.inf, f32(6), 7): assert opt.clip_grad_norm(limit) == 5
    assert w.grad.tolist() == [3, -4]
    for bad in (-1, -1e-30, np.nan, f64('nan'), -np.inf):
        with pytest.raises(ValueError, match='max_norm'): opt.clip_grad_norm(bad)
    for bad in ('1', None, True, 1j, [1]):
        with pytest.raises(TypeError, match='max_norm'): opt.clip_grad_norm(bad)
        with pytest.raises(TypeError, match='factor'): opt.scale_gradients(bad)
    assert w.grad.tolist() == [3, -4]
    assert opt.clip_grad_norm(0) == 5 and w.grad.tolist() == [0, 0]
    w.zero_grad()
    assert opt.clip_grad_norm(1) == 0 and optim.AdamW().clip_grad_norm(1) == 0


def test_clipping_what_is_not_finite():
    w, opt = with_grad([np.nan, 1])
    assert np.isnan(opt.clip_grad_norm(0.1)) and w.grad.tolist()[1] == 1
    w, opt = with_grad([np.inf, 1])
    assert opt.clip_grad_norm(0.1) == np.inf
    assert np.isnan(w.grad.tolist()[0]) and w.grad.tolist()[1] == 0
    w, opt = with_grad([3e38, 3e38])
    assert opt.clip_grad_norm(1) == np.inf  # the norm leaves float32, the sum of squares does not
    assert w.grad.tolist() == [0, 0]


def test_a_snapshot_of_a_gradient_never_changes():
    w, opt = with_grad([3, -4])
    seen = w.grad.numpy()
    opt.clip_grad_norm(1)
    assert seen.tolist() == [3, -4] and abs(np.hypot(*w.grad.tolist()) - 1) < 1e-6
    opt.step()
    assert seen.tolist() == [3, -4] and (w.numpy() != 0).all()
    opt.zero_grad()
    assert seen.tolist() == [3, -4] and w.grad is None


# -- accumulation -----------------------------------------------------------------------------

def network():
    shapes = {'w1': ('hid in', (8, 4)), 'b1': ('hid', (8,)),
              'w2': ('class hid', (3, 8)), 'b2': ('class', (3,))}
    return {k: fucina.variable(uniform_fill(i, np.empty(s, f32), -0.5, 0.5), tags)
            for i, (k, (tags, s)) in enumerate(shapes.items())}


def loss_of(net, x, labels):
    h = (fucina.constant(x, 'batch in').dot(net['w1'], 'in') + net['b1']).tanh()
    return (h.dot(net['w2'], 'hid') + net['b2']).cross_entropy('class', labels)


X, LABELS = gaussian_fill(9, np.empty((8, 4), f32), 1.0), np.array([0, 1, 2, 0, 1, 2, 0, 1])


def window(net, parts, clip=lambda: None):
    for rows in np.split(np.arange(8), parts):
        loss_of(net, X[rows], LABELS[rows]).scale(1 / parts).backward()
        clip()


def grads(net): return [p.grad.numpy().copy() for p in net.values()]


def test_quarter_batches_add_up_to_the_batch():
    results = []
    for _ in range(2):
        net, opt = network(), optim.AdamW(lr=0.05)
        for p in net.values(): opt.add_param(p)
        window(net, 4)
        g = grads(net)
        opt.clip_grad_norm(1.0)
        opt.step()
        results.append((g, [p.numpy().copy() for p in net.values()]))
    for a, b in zip(*(r[0] + r[1] for r in results)): assert np.array_equal(bits(a), bits(b))
    full = network()
    window(full, 1)
    for a, b in zip(results[0][0], grads(full)): np.testing.assert_allclose(a, b, 1e-5, 1e-7)


def test_clip_once_after_the_window():
    net, opt = network(), optim.SGD()
    for p in net.values(): opt.add_param(p)
    window(net, 4)
    summed = grads(net)
    opt.clip_grad_norm(0.01)
    total = f32(np.sqrt(sum(optim.sum_squares(g) for g in summed)))
    factor = f32(0.01) / (total + f32(1e-6))
    for ours, g in zip(grads(net), summed): assert np.array_equal(bits(ours), bits(g * factor))

    early, opt = network(), optim.SGD()
    for p in early.values(): opt.add_param(p)
    window(early, 4, lambda: opt.clip_grad_norm(0.01))
    assert not all(np.array_equal(a, b) for a, b in zip(grads(early), grads(net)))


# -- settings ---------------------------------------------------------------------------------

CONFIGS = {optim.SGD: optim.SgdConfig, optim.Adam: optim.AdamConfig, optim.AdamW: optim.AdamWConfig}
reals = {optim.SGD: ('lr', 'momentum', 'dampening', 'weight_decay'),
         optim.Adam: ('lr', 'beta1', 'beta2', 'eps', 'weight_decay')}
reals[optim.AdamW] = reals[optim.Adam]
FIELDS = [(kind, name) for kind, names in reals.items() for name in names]
kinds = pytest.mark.parametrize('kind', list(CONFIGS))


@pytest.mark.parametrize('kind, name', FIELDS)
def test_numbers_of_any_kind_are_the_same_float32(kind, name):
    config = CONFIGS[kind]()
    for value in (0.1, f64(0.1), f32(0.1), np.array(0.1), np.longdouble(f64(0.1))):
        setattr(config, name, value)
        assert type(getattr(config, name)) is f32 and getattr(config, name) == f32(0.1)
        assert CONFIGS[kind](**{name: value}) == config == kind(**{name: value}).config
    for value in (2, np.int64(2), np.uint8(2), np.float16(2)):
        setattr(config, name, value)
        assert type(getattr(config, name)) is f32 and getattr(config, name) == 2


@pytest.mark.parametrize('kind, name', FIELDS)
def test_what_is_no_number_is_refused(kind, name):
    config, before = CONFIGS[kind](), CONFIGS[kind]()
    for bad in ('0.1', None, True, np.True_, 1j, [0.1], np.ones(1), b'1', object()):
        for make in (partial(setattr, config, name, bad), partial(kind, **{name: bad})):
            with pytest.raises(TypeError, match=f'{CONFIGS[kind].__name__}.{name} '): make()
    for bad in (np.nan, f32('nan'), 1e39, -1e300, 10**400):
        for make in (partial(setattr, config, name, bad), partial(kind, **{name: bad})):
            with pytest.raises(optim.InvalidConfigError, match=f'.{name} '): make()
    assert config == before


@kinds
def test_legal_oddities(kind):
    "Signs, zeros and infinities are the user's business."
    for value in (-0.5, 0, 1, np.inf, -np.inf, 1e-50): kind(lr=value, weight_decay=value)


@kinds
def test_record_and_keywords(kind):
    config = CONFIGS[kind](lr=0.3, state_dtype='bf16')
    opt = kind(config)
    assert opt.config == config == kind(lr=0.3, state_dtype='bf16').config
    config.lr = 5
    assert opt.lr == f32(0.3)  # a copy
    opt.lr = 0.7
    assert opt.config.lr == f32(0.7)
    opt.config.lr = 0.2
    assert opt.lr == f32(0.2) and type(opt.lr) is f32
    with pytest.raises(TypeError): kind(config, lr=1)
    with pytest.raises(TypeError, match='learning_rate'): kind(learning_rate=1)
    with pytest.raises(TypeError, match='as keywords or as one'): kind(0.1)
    weights = [fucina.variable([1.0], 'd')]
    with pytest.raises(TypeError, match='register .* add_param'): kind(weights, lr=0.1)
    with pytest.raises(TypeError, match='for p in model.param'): opt.add_param(weights)
    with pytest.raises(AttributeError, match='rate'): opt.config.rate = 1
    for name in kind.config_type._kinds.keys() - {'lr', 'fallback'}:  # would go unheard
        with pytest.raises(AttributeError, match=f'write to config.{name}'): setattr(opt, name, 1)
    other = optim.AdamConfig() if kind is not optim.Adam else optim.AdamWConfig()
    with pytest.raises(TypeError, match='as keywords or as one'): kind(other)


@kinds
def test_enums_and_flags(kind):
    D = optim.StateDType
    assert (D.f32, D.bf16) == (0, 1)
    assert kind(state_dtype='bf16').config.state_dtype is D.bf16 is kind(state_dtype=D.bf16).config.state_dtype
    for bad in ('f64', 'BF16', ''):
        with pytest.raises(optim.InvalidConfigError, match='state_dtype'): kind(state_dtype=bad)
    for bad in (1, None, True, 0.0):
        with pytest.raises(TypeError, match='state_dtype'): kind(state_dtype=bad)


def test_nesterov_rule():
    for fields in (dict(), dict(momentum=0.9, dampening=0.1), dict(dampening=0.1)):
        with pytest.raises(optim.InvalidConfigError, match='nesterov'): optim.SGD(nesterov=True, **fields)
    optim.SGD(nesterov=np.True_, momentum=0.9)
    for bad in (1, 'yes', None):
        with pytest.raises(TypeError, match='nesterov'): optim.SGD(nesterov=bad, momentum=0.9)


@matrix
def test_settings_are_read_at_every_step(kind, fields):
    "Settings changed half-way: the same bits as an oracle that changes them too."
    w, state = variable(np.array(W10, f32)), ()
    opt = kind(**fields)
    opt.add_param(w)
    p = w.numpy().copy()
    for t, g in enumerate(G10, 1):
        opt.lr = 0.1 / t
        opt.config.weight_decay = 0.01 * t
        w.set_grad(g)
        opt.step()
        p, state = oracle_step(opt, t, p, np.array(g, f32), state)
        assert same(w.numpy(), p)


# -- registration -----------------------------------------------------------------------------

@kinds
def test_what_can_be_registered(kind):
    opt, w = kind(), fucina.variable(np.ones((2, 3)), 'a b')
    opt.add_param(w)
    opt.add_param_named(fucina.variable(1.0, ''), 's')
    for error, t in ((TypeError, np.ones(3)), (TypeError, None), (TypeError, 'w'),
                     (optim.DTypeError, fucina.constant([1, 2], 'd')),
                     (optim.NotAVariableError, fucina.constant([1.0], 'd')),
                     (optim.NotAVariableError, w * w), (optim.NotAVariableError, w.detach()),
                     (optim.DuplicateParamError, w)):
        with pytest.raises(error): opt.add_param(t)
    assert len(opt.slots) == 2
    w.set_grad(np.ones((2, 3)))
    opt.step()
    assert [s.step for s in opt.slots] == [1, 0]


def test_param_handles():
    for shape, (rows, cols, rank) in {(): (1, 1, 1), (9,): (9, 1, 1), (5, 7): (5, 7, 2),
                                      (3, 2, 4): (3, 8, 3)}.items():
        p = optim.Param.of(fucina.variable(np.ones(shape), len(shape)))
        assert (p.rows, p.cols, p.raw_rank, len(p), p.name) == (rows, cols, rank, rows * cols, None)
        assert p.master.size == 0


@kinds
def test_the_optimizer_keeps_its_parameters_alive(kind):
    opt = kind()
    opt.add_param(fucina.variable([1.0, 2.0], 'd'))
    leaf = opt.slots[0].param.grad_state
    leaf.set_grad(np.ones(2, f32))
    opt.step()
    assert (opt.slots[0].param.value != [1, 2]).all()


def test_kind_of_state_cannot_change_between_parameters():
    a, b = fucina.variable([1.0], 'd'), fucina.variable([1.0], 'd')
    for opt, name, value in ((optim.SGD(), 'momentum', 0.9), (optim.SGD(momentum=0.9), 'momentum', 0),
                             (optim.AdamW(), 'state_dtype', 'bf16'),
                             (optim.Adam(), 'second_moment_dtype', 'bf16')):
        opt.add_param(a, name='first')
        setattr(opt.config, name, value)
        with pytest.raises(optim.InvalidConfigError, match='first'): opt.add_param(b)
        assert len(opt.slots) == 1

    opt = optim.SGD(lr=0.1)
    opt.add_param(a, name='first')
    a.set_grad([1.0])
    opt.config.momentum = 0.9
    with pytest.raises(optim.InvalidConfigError, match='first'): opt.step()
    assert a.tolist() == [1] and opt.slots[0].step == 0


def test_buffers_are_written_in_place():
    opt = optim.AdamW(state_dtype='bf16')
    w = fucina.variable([1.0, 2.0], 'd')
    opt.add_param(w)
    w.set_grad([1.0, 1.0])
    opt.step()
    slot, m = opt.slots[0], opt.slots[0].m
    slot.v, slot.step = [8, 8], 123
    slot.m = np.array([0x4100, 0x4100], np.uint16)
    assert slot.m is m and slot.v.tolist() == [8, 8] and slot.step == 123
    with pytest.raises(TypeError): slot.m = np.array([8.0, 8.0])  # values, where bits are kept
    opt.step()
    assert slot.step == 124 and 7 < slot.v[0] < 8


def test_bytes_of_state_per_weight():
    for opt, size in ((optim.SGD(), 0), (optim.SGD(momentum=0.9), 4),
                      (optim.SGD(momentum=0.9, state_dtype='bf16'), 2), (optim.Adam(), 8),
                      (optim.AdamW(state_dtype='bf16'), 6), (optim.AdamW(**BOTH), 4)):
        opt.add_param(fucina.variable(np.ones(100), 'd'))
        assert sum(a.nbytes for a in opt.slots[0].arrays()) == 100 * size


# -- gradients --------------------------------------------------------------------------------

@matrix
def test_no_gradient_no_change(kind, fields):
    opt, ts = kind(**fields), [fucina.variable([1.0, 2.0], 'd') for _ in range(3)]
    for t in ts: opt.add_param(t)
    opt.step()
    ts[1].set_grad([1.0, 1.0])
    opt.step()
    assert [s.step for s in opt.slots] == [0, 1, 0]
    assert ts[0].tolist() == ts[2].tolist() == [1, 2] != ts[1].tolist()
    assert all(not a.any() for s in (opt.slots[0], opt.slots[2]) for a in s.arrays())
    opt.zero_grad()
    before = ts[1].tolist()
    opt.step()
    assert ts[1].tolist() == before and opt.slots[1].step == 1


@matrix
def test_not_finite_gradients_stay_in_their_place(kind, fields):
    opt, w = kind(**fields), fucina.variable(np.ones(20), 'd')
    opt.add_param(w)
    g = np.ones(20, f32)
    g[[3, 11]] = np.nan, np.inf
    w.set_grad(g)
    opt.step()
    values = w.numpy()
    assert not np.isfinite(values[[3, 11]]).any() or np.isnan(values[3])
    assert np.isfinite(np.delete(values, [3, 11])).all() and len(set(np.delete(values, [3, 11]))) == 1


def test_gradients_of_every_layout():
    start, g = uniform_fill(1, np.empty((6, 5), f32), -1, 1), gaussian_fill(2, np.empty((6, 5), f32), 1.0)
    frozen = g.copy()
    frozen.flags.writeable = False
    results = []
    for grad in (g, np.asfortranarray(g), frozen, g.astype(f64), np.repeat(g, 2, 1)[:, ::2], g.tolist()):
        opt, w = optim.AdamW(lr=0.1), variable(start)
        opt.add_param(w)
        w.set_grad(grad)
        opt.clip_grad_norm(0.5)
        opt.step()
        results.append(bits(w).copy())
    assert all(np.array_equal(r, results[0]) for r in results)
    assert np.array_equal(frozen, g)


def test_a_gradient_that_does_not_fit_stops_the_step_before_it_starts():
    opt = optim.AdamW()
    a, b = fucina.variable([1.0, 2.0], 'd'), fucina.variable([1.0, 2.0], 'd')
    opt.add_param(a)
    opt.add_param(b, name='layer.bias')
    a.set_grad([1.0, 1.0])
    b._node.grad = np.ones(3, f32)
    group = optim.OptimizerSet([opt])
    for call in (opt.step, group.step, opt.grad_squared_norm, lambda: opt.clip_grad_norm(1)):
        with pytest.raises(optim.GradShapeMismatchError, match='layer.bias.*3'): call()
    assert a.tolist() == [1, 2] and opt.slots[0].step == 0 and not opt.slots[0].m.any()
    b.set_grad([1.0, 1.0])
    opt.step()
    assert [s.step for s in opt.slots] == [1, 1]


def test_gradients_that_move_are_followed():
    "Held snapshots force new buffers; no step may read an old one."
    opt, w, held = optim.SGD(lr=1), fucina.variable(np.zeros(50), 'd'), []
    opt.add_param(w)
    for k in range(30):
        w.set_grad(np.full(50, k))
        if k % 3: held.append(w.grad)
        opt.scale_gradients(2)
        before = w.numpy().copy()
        opt.step()
        assert (before - w.numpy() == 2 * k).all()
        if k % 2: opt.zero_grad()


def test_parameters_may_join_at_any_time():
    opt, a = optim.AdamW(lr=0.1), fucina.variable([1.0], 'd')
    opt.add_param(a)
    a.set_grad([1.0])
    opt.step()
    m = opt.slots[0].m.copy()
    b = fucina.variable([1.0], 'd')
    opt.add_param(b)
    b.set_grad([1.0])
    opt.step()
    assert [s.step for s in opt.slots] == [2, 1] and opt.slots[0].m[0] > m[0]


def test_versions_count_for_parameters_that_moved():
    opt, a, b = optim.SGD(), fucina.variable([1.0], 'd'), fucina.variable([1.0], 'd')
    for t in (a, b): opt.add_param(t)
    a.set_grad([1.0])
    before = a._version, b._version
    opt.step()
    assert a._version > before[0] and b._version == before[1]


# -- groups, copies, display ------------------------------------------------------------------

def test_sets():
    a, b, c = (fucina.variable([1.0], 'd') for _ in range(3))
    one, two, shared = optim.SGD(), optim.AdamW(), optim.Adam()
    one.add_param(a)
    two.add_param(b)
    shared.add_param(c)
    shared.add_param(b, name='shared')
    group = optim.OptimizerSet([one])
    group.add(optim.any_optimizer(two))
    for bad in (one, shared):
        with pytest.raises(optim.DuplicateParamError): group.add(bad)
    with pytest.raises(optim.DuplicateParamError, match='shared'): group.add(shared)
    with pytest.raises(TypeError): group.add(group)
    with pytest.raises(TypeError): group.add(a)
    assert group.members == [one, two]
    fresh = optim.SGD()
    fresh.add_param(c)
    group.add(fresh)  # the refused one left nothing behind
    group.add(optim.SGD())  # empty ones are welcome
    seen = set()
    shared.collect_grad_states(seen)
    assert seen == {b._node, c._node}
    for t in (a, b, c): t.set_grad([2.0])
    assert group.grad_squared_norm() == 12 and type(group.grad_squared_norm()) is f64
    group.step()
    group.zero_grad()
    assert all(t.grad is None and t.item() < 1 for t in (a, b, c))


def test_any_optimizer_forwards():
    w, opt = with_grad([3, -4])
    wrapped = optim.any_optimizer(opt)
    assert isinstance(wrapped, optim.AnyOptimizer) and wrapped.grad_squared_norm() == 25
    wrapped.scale_gradients(0.5)
    assert w.grad.tolist() == [1.5, -2]
    wrapped.step()
    wrapped.zero_grad()
    assert w.grad is None and opt.slots[0].step == 1


@matrix
def test_copies_go_their_own_way(kind, fields):
    net, opt = network(), kind(**fields)
    for k, p in net.items(): opt.add_param(p, name=k)
    group, sched = optim.OptimizerSet([opt]), optim.LrSchedule()
    sched.attach(opt)

    def train(net, group, sched, steps):
        for t in range(steps):
            sched.apply(1 / (t + 1))
            window(net, 1)
            group.clip_grad_norm(1)
            group.step()
            group.zero_grad()
        return np.concatenate([p.numpy().reshape(-1) for p in net.values()])

    train(net, group, sched, 3)
    twin = copy.deepcopy((net, group, sched))
    before = train(net, group, sched, 0)
    after = train(*twin, 4)
    assert np.array_equal(bits(train(net, group, sched, 0)), bits(before))
    assert np.array_equal(bits(train(net, group, sched, 4)), bits(after))
    with pytest.raises(TypeError, match='deepcopy'): pickle.dumps(opt)


def test_copies_keep_masters():
    w, opt = fucina.variable([1.0, 2.0], 'd', dtype='bf16'), optim.AdamW(weight_decay=0.1)
    opt.add_param(w)
    w.set_grad([1.0, -1.0])
    for _ in range(3): opt.step()
    w2, opt2 = copy.deepcopy((w, opt))
    assert np.array_equal(opt2.slots[0].param.master, opt.slots[0].param.master)
    assert not np.array_equal(opt.slots[0].param.master, w.to('f32').numpy())
    w2.set_grad([1.0, -1.0])
    for o in (opt, opt2): o.step()
    assert np.array_equal(bits(w.value), bits(w2.value))


def test_a_renewed_master_is_the_one_that_is_trained():
    "What a loader does: new values, the master widened again, in the same memory."
    w, opt = fucina.variable([1.0, 2.0], 'd', dtype='bf16'), optim.SGD(lr=1)
    opt.add_param(w)
    w.set_grad([1.0, 1.0])
    opt.step()
    w.value[:] = bits(fucina.constant([5.0, 6.0], 'd').to('bf16').value)
    master = opt.slots[0].param.master
    param.keep_master(opt.slots[0].param)
    assert opt.slots[0].param.master is master and master.tolist() == [5, 6]
    opt.step()
    assert w.tolist() == [4, 5]


def test_display():
    opt = optim.AdamW(lr=1e-3, state_dtype='bf16')
    assert 'lr=0.001' in repr(opt) and '0 parameters' in repr(opt)
    for k in range(40):
        t = fucina.variable(np.ones((2, 3)), 'out in', dtype=('f32', 'bf16')[k % 2])
        opt.add_param(t, name=f'<layer {k}>' if k % 3 else None)
    group = optim.OptimizerSet([opt, optim.SGD(momentum=0.9)])
    for text in (repr(opt), repr(group)):
        for part in ('beta2=0.999', "state_dtype='bf16'", 'param0', '<layer 1>', 'out=2, in=3',
                     'm bf16, v f32', 'master f32', '28 more', '40 parameters, 240 values'):
            assert part in text
    assert 'momentum=0.9' in repr(group) and len(repr(group)) < 3000
    for html in (opt._repr_html_(), group._repr_html_()):
        assert '&lt;layer 1&gt;' in html and '<layer' not in html and len(html) < 20_000
    assert eval(repr(opt.config), vars(optim)) == opt.config


def test_signature_lists_the_settings():
    names = list(inspect.signature(optim.SGD).parameters)
    assert names == ['config', 'lr', 'momentum', 'dampening', 'weight_decay', 'nesterov', 'state_dtype']


# -- without a compiler -----------------------------------------------------------------------

def test_plain_python_gives_the_same_bits():
    code = '''if True:
        import sys
        import numpy as np
        import fucina
        from fucina import optim
        from fucina.rng import gaussian_fill, uniform_fill
        f32 = np.float32
        for opt in (optim.SGD(lr=0.1), optim.SGD(lr=0.1, momentum=0.9, state_dtype='bf16'),
                    optim.Adam(lr=0.1, weight_decay=0.1, state_dtype='bf16'),
                    optim.AdamW(lr=0.1, second_moment_dtype='bf16'), optim.AdamW(lr=0.1)):
            for dtype in ('f32', 'bf16', 'f16'):
                w = fucina.variable(uniform_fill(1, np.empty((3, 7), f32), -1, 1), 2, dtype=dtype)
                b = fucina.variable([1.0], 1)
                o = type(opt)(opt.config)
                o.add_param(w)
                o.add_param(b)
                for t in range(3):
                    w.set_grad(gaussian_fill(t, np.empty((3, 7), f32), 1.0))
                    if t == 1: b.set_grad([np.inf])
                    sys.stdout.write(f'{float(o.clip_grad_norm(1.0)).hex()} ')
                    o.step()
                    o.zero_grad()
                print(w.value.tobytes().hex(), b.value.tobytes().hex())
    '''
    compiled = printed(code)
    assert python(code, NUMBA_DISABLE_JIT='1') == compiled and len(compiled.splitlines()) == 15
