"""The same operations, a network and its training in another framework."""
import math

import numpy as np
import pytest

from fucina import (ExecContext, concat, constant, einsum_many, exec_scope, from_bits, nn, optim,
                    stack, variable)
from fucina.dtypes import narrow_bf16, narrow_f16, widen_bf16, widen_f16

torch = pytest.importorskip('torch')
F = torch.nn.functional
f32 = np.float32


@pytest.fixture(autouse=True, scope='module')
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(shape, seed=0, lo=-2.0, hi=2.0):
    return np.random.default_rng(seed).uniform(lo, hi, shape).astype(f32)


# --- operations: (name, shapes and tags, ours, theirs); positive operands after a '+'

LABELS = [0, 4, 2, 1]
OPS = [
    ('add', ['b d', 'd'], lambda x, y: x + y, lambda x, y: x + y),
    ('sub', ['b d', 'b'], lambda x, y: x - y, lambda x, y: x - y[:, None]),
    ('mul', ['b d', ''], lambda x, y: x * y, lambda x, y: x * y),
    ('div', ['b d', '+d'], lambda x, y: x / y, lambda x, y: x / y),
    ('maximum', ['b d', 'b d'], lambda x, y: x.maximum(y), torch.maximum),
    ('minimum', ['b d', 'd'], lambda x, y: x.minimum(y), torch.minimum),
    *[(name, ['+b d'], lambda x, name=name: getattr(x, name)(),
       lambda x, name=name: getattr(torch, name)(x)) for name in (
           'neg', 'abs', 'exp', 'log', 'log1p', 'sqrt', 'rsqrt', 'reciprocal', 'sin', 'cos')],
    *[(name, ['b d'], lambda x, name=name: getattr(x, name)(),
       lambda x, name=name: getattr(torch, name)(x)) for name in ('relu', 'tanh', 'sigmoid')],
    ('leaky_relu', ['b d'], lambda x: x.leaky_relu(0.1), lambda x: F.leaky_relu(x, 0.1)),
    ('silu', ['b d'], lambda x: x.silu(), F.silu),
    ('gelu', ['b d'], lambda x: x.gelu(), lambda x: F.gelu(x, approximate='tanh')),
    ('clamp', ['b d'], lambda x: x.clamp(-0.7, 0.9), lambda x: x.clamp(-0.7, 0.9)),
    ('scalars', ['+b d'], lambda x: 3 - ((2 * x + 1) / 7 - 2)**3 + 1 / x,
     lambda x: 3 - ((2 * x + 1) / 7 - 2)**3 + 1 / x),
    ('pow_scalar', ['+b d'], lambda x: x.pow_scalar(-1.5), lambda x: x**-1.5),
    ('swiglu', ['b d', 'b d'], lambda x, y: x.swiglu(y), lambda x, y: x * F.silu(y)),
    ('geglu', ['b d', 'b d'], lambda x, y: x.geglu(y), lambda x, y: x * F.gelu(y, approximate='tanh')),
    ('glu', ['b d', 'b d'], lambda x, y: x.glu(y), lambda x, y: F.glu(torch.cat([x, y], 1), 1)),
    ('sum', ['b c d'], lambda x: x.sum('c'), lambda x: x.sum(1)),
    ('mean', ['b c d'], lambda x: x.mean('b d'), lambda x: x.mean((0, 2))),
    ('sum_all', ['b d'], lambda x: x.sum_all(), torch.sum),
    ('mean_all', ['b d'], lambda x: x.mean_all(), torch.mean),
    ('max', ['b d'], lambda x: x.max('d'), lambda x: x.max(1).values),
    ('min', ['b d'], lambda x: x.min('b'), lambda x: x.min(0).values),
    ('variance', ['b d'], lambda x: x.variance('d'), lambda x: x.var(1, correction=0)),
    ('variance, ddof', ['b d'], lambda x: x.variance('d', ddof=1), lambda x: x.var(1)),
    ('dot', ['b d', 'k d'], lambda x, w: x.dot(w, 'd'), F.linear),
    ('dot, batched', ['c b d', 'c d k'], lambda x, w: x.dot(w, 'd'), torch.bmm),
    ('einsum', ['b c d', 'd k c'], lambda x, w: x.einsum(w, 'k b'),
     lambda x, w: torch.einsum('bcd,dkc->kb', x, w)),
    ('einsum, private', ['b c d', 'd k'], lambda x, w: x.einsum(w, 'b'),
     lambda x, w: torch.einsum('bcd,dk->b', x, w)),
    ('einsum_many', ['b d', 'd k', 'k c'], lambda *ts: einsum_many('c b', *ts),
     lambda *ts: torch.einsum('bd,dk,kc->cb', *ts)),
    ('softmax', ['b d'], lambda x: x.softmax('d', scale=0.7), lambda x: (x * 0.7).softmax(1)),
    ('softmax, causal', ['c b d'], lambda x: x.softmax('d', causal=('b', 1)),
     lambda x: x.masked_fill(torch.ones(x.shape, dtype=bool).triu(2), -math.inf).softmax(2)),
    ('log_softmax', ['b c d'], lambda x: x.log_softmax('c'), lambda x: x.log_softmax(1)),
    ('logsumexp', ['b d'], lambda x: x.logsumexp('b'), lambda x: x.logsumexp(0)),
    ('rms_norm', ['b d', 'd'], lambda x, w: x.rms_norm('d', 1e-5, w),
     lambda x, w: F.rms_norm(x, w.shape, w, 1e-5)),
    ('layer_norm', ['b d', 'd', 'd'], lambda x, w, b: x.layer_norm('d', 1e-5, w, b),
     lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5)),
    ('layer_norm, first axis', ['b d'], lambda x: x.layer_norm('b', 1e-5),
     lambda x: F.layer_norm(x.T, (4,)).T),
    ('cross_entropy', ['b d'], lambda x: x.cross_entropy('d', LABELS),
     lambda x: F.cross_entropy(x, torch.tensor(LABELS))),
    ('cross_entropy, ignored and smoothed', ['b d'], lambda x: x.cross_entropy(
        'd', LABELS, ignore_index=2, label_smoothing=0.1), lambda x: F.cross_entropy(
            x, torch.tensor(LABELS), ignore_index=2, label_smoothing=0.1)),
    ('cross_entropy, middle axis', ['c d b'], lambda x: x.cross_entropy(
        'd', [[0, 4, 2, 1]] * 3, reduction='none'), lambda x: F.cross_entropy(
            x, torch.tensor([[0, 4, 2, 1]] * 3), reduction='none')),
    ('mse_loss', ['b d', 'b d'], lambda x, t: x.mse_loss(t), F.mse_loss),
    ('gather', ['b d'], lambda x: x.gather('b', [3, 1, 3], 's'), lambda x: F.embedding(
        torch.tensor([3, 1, 3]), x)),
    ('concat', ['b d', 'b d'], lambda x, y: concat('d', [x, y]), lambda x, y: torch.cat([x, y], 1)),
    ('stack', ['b d', 'b d'], lambda x, y: stack('s', 1, [x, y]), lambda x, y: torch.stack([x, y], 1)),
    ('views', ['b c d'], lambda x: x.permute_to('d b c').merge('m', 'b c').narrow('d', 1, 3)
     .select('m', -1).broadcast_to('n d', (2, 3)).flatten('f'),
     lambda x: x.permute(2, 0, 1).flatten(1)[1:4, -1].expand(2, 3).flatten()),
    ('split', ['b k'], lambda x: x.split('k', 'p q', (2, 3)).permute_to('q b p').contiguous(),
     lambda x: x.unflatten(1, (2, 3)).permute(2, 0, 1)),
]
DIMS = dict(b=4, c=3, d=7, k=6)


@pytest.mark.parametrize('name, specs, ours, theirs', OPS, ids=[op[0] for op in OPS])
def test_values_and_gradients(name, specs, ours, theirs):
    arrays = [draw([DIMS[t] for t in s.strip('+').split()], k, 0.2 if '+' in s else -2)
              for k, s in enumerate(specs)]
    xs = [variable(a, s.strip('+')) for a, s in zip(arrays, specs)]
    ts = [torch.tensor(a, requires_grad=True) for a in arrays]
    with exec_scope():
        y, z = ours(*xs), theirs(*ts)
        assert y.shape == tuple(z.shape)
        np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=3e-6, atol=3e-6)
        gy = draw(y.shape, 9)
        y.backward(gy)
        z.backward(torch.tensor(gy))
    for x, t in zip(xs, ts):
        np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('call', [
    'relu', 'tanh', 'sigmoid', 'silu', 'exp', 'log', 'sqrt', 'rsqrt', 'reciprocal', 'abs', 'log1p'])
def test_special_values(call):
    x = f32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38])
    with np.errstate(all='ignore'): y = getattr(constant(x, 'd'), call)().numpy()
    want = (F.silu if call == 'silu' else getattr(torch, call))(torch.tensor(x)).numpy()
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-44, equal_nan=True)
    if call != 'relu':  # ours gives +0 for -0
        signed = ~np.isnan(y) & (want != 0)
        assert np.array_equal(np.signbit(y[signed]), np.signbit(want[signed]))


def test_ties_share_the_gradient():
    for ours, theirs in (('maximum', torch.maximum), ('minimum', torch.minimum)):
        a, b = f32([1, 2, 3]), f32([1, 3, 2])
        x, y = variable(a, 'd'), variable(b, 'd')
        s, t = torch.tensor(a, requires_grad=True), torch.tensor(b, requires_grad=True)
        getattr(x, ours)(y).backward(np.ones(3))
        theirs(s, t).backward(torch.ones(3))
        assert x.grad.tolist() == s.grad.tolist() and y.grad.tolist() == t.grad.tolist()


# --- dtypes

BITS = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
VALUES = np.concatenate([BITS, (np.arange(65536, dtype=np.uint32) << 16) | 0x8000,
                         np.uint32([0, 0x7f800000, 0x7f7fffff, 0x477fefff, 0x477ff000,
                                    0x33000000, 0x33000001, 1])]).view(f32)


def test_narrowing_agrees_with_torch():
    x = torch.tensor(VALUES)
    finite = ~np.isnan(VALUES)
    bf16 = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    f16 = x.half().numpy().view(np.uint16)
    assert np.array_equal(narrow_bf16(VALUES)[finite], bf16[finite])
    assert np.array_equal(narrow_f16(VALUES).view(np.uint16)[finite], f16[finite])
    t = constant(VALUES, 'd')
    assert np.array_equal(t.to('bf16').bits[finite], bf16[finite])
    assert np.array_equal(t.to('f16').bits[finite], f16[finite])
    assert np.isnan(t.to('bf16').numpy()[~finite]).all()


def test_widening_agrees_with_torch():
    codes = np.arange(65536, dtype=np.uint16)
    b = torch.tensor(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    h = torch.tensor(codes.view(np.float16)).float().numpy()
    for ours, theirs in ((widen_bf16(codes), b), (widen_f16(codes.view(np.float16)), h),
                         (from_bits(codes, 'd').to('f32').numpy(), b),
                         (from_bits(codes, 'd', 'f16').to('f32').numpy(), h)):
        finite = ~np.isnan(theirs)
        assert np.array_equal(ours[finite], theirs[finite]) and np.isnan(ours[~finite]).all()


@pytest.mark.parametrize('dtype', ['bf16', 'f16'])
@pytest.mark.parametrize('name, f', [
    ('add', torch.add), ('sub', torch.sub), ('mul', torch.mul), ('div', torch.div),
    ('maximum', torch.maximum), ('minimum', torch.minimum)])
def test_16_bit_arithmetic_rounds_once(name, f, dtype):
    a, b = draw(5000), draw(5000, 1, 0.2)
    kind = torch.bfloat16 if dtype == 'bf16' else torch.half
    y = getattr(constant(a, 'd', dtype=dtype), name)(constant(b, 'd', dtype=dtype))
    want = f(torch.tensor(a).to(kind), torch.tensor(b).to(kind))
    assert y.dtype == dtype and np.array_equal(y.numpy(), want.float().numpy())


@pytest.mark.parametrize('dtype', ['bf16', 'f16'])
def test_16_bit_activations(dtype):
    a = draw(5000, 0, -6, 6)
    kind = torch.bfloat16 if dtype == 'bf16' else torch.half
    for name, f in (('tanh', torch.tanh), ('silu', F.silu), ('sigmoid', torch.sigmoid),
                    ('relu', torch.relu), ('exp', torch.exp)):
        y = getattr(constant(a, 'd', dtype=dtype), name)()
        want = f(torch.tensor(a).to(kind).float()).to(kind)
        near = abs(y.numpy() - want.float().numpy()) <= 2e-2 * abs(y.numpy())
        assert near.all() and (y.numpy() == want.float().numpy()).mean() > 0.99


@pytest.mark.parametrize('dtype', ['bf16', 'f16'])
def test_a_16_bit_weight_gets_float32_gradients(dtype):
    x, w = draw((5, 7)), draw((3, 7), 1)
    kind = torch.bfloat16 if dtype == 'bf16' else torch.half
    ours = variable(w, 'o i', dtype=dtype)
    theirs = torch.tensor(w).to(kind).float().requires_grad_()
    gy = draw((5, 3), 2)
    constant(x, 'b i').dot(ours, 'i').tanh().backward(gy)
    torch.tanh(torch.tensor(x) @ theirs.T).backward(torch.tensor(gy))
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-5)


# --- networks

class Twin(torch.nn.Module):
    "A torch network with the weights of an MLP of ours."

    def __init__(self, mlp, activation):
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for ours in mlp.layers:
            theirs = torch.nn.Linear(ours.w.shape[1], ours.w.shape[0])
            with torch.no_grad():
                theirs.weight.copy_(torch.tensor(ours.w.numpy()))
                theirs.bias.copy_(torch.tensor(ours.b.numpy()))
            self.layers.append(theirs)
        self.activation = activation

    def forward(self, x):
        for layer in self.layers[:-1]: x = self.activation(layer(x))
        return self.layers[-1](x)

    def flat(self): return [p for layer in self.layers for p in (layer.weight, layer.bias)]


ACTIVATIONS = {'tanh': torch.tanh, 'relu': torch.relu, 'silu': F.silu, 'sigmoid': torch.sigmoid,
               'gelu': lambda x: F.gelu(x, approximate='tanh')}


@pytest.mark.parametrize('mode', ['blas', 'pinned'])
@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_a_network(activation, mode):
    mlp = nn.MLP((6, 16, 8, 3), seed=5, activation=activation)
    twin = Twin(mlp, ACTIVATIONS[activation])
    x, labels = draw((20, 6)), np.arange(20) % 3
    with ExecContext(gemm=mode), exec_scope():
        loss = mlp(constant(x, 'batch in')).cross_entropy('out', labels)
        loss.backward()
        other = F.cross_entropy(twin(torch.tensor(x)), torch.tensor(labels))
        other.backward()
        assert abs(loss.item() - other.item()) < 1e-6
    for p, q in zip(mlp.parameters(), twin.flat()):
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=1e-5, atol=1e-6)


def blobs():
    g = np.random.default_rng(3)
    labels = np.arange(90) % 3
    centres = np.array([[0, 2], [-2, -1], [2, -1]])
    return (centres[labels] + 0.7 * g.standard_normal((90, 2))).astype(f32), labels


OPTIMIZERS = {
    'sgd': (lambda: optim.SGD(lr=0.1, momentum=0.9), lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9)),
    'adamw': (lambda: optim.AdamW(lr=0.01, weight_decay=0.1), lambda ps: torch.optim.AdamW(
        ps, lr=0.01, weight_decay=0.1))}


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('clip', [None, 0.5])
def test_training_follows_the_same_path(optimizer, clip):
    x, labels = blobs()
    mlp = nn.MLP((2, 12, 3), seed=1)
    twin = Twin(mlp, torch.tanh)
    ours, theirs = OPTIMIZERS[optimizer][0](), OPTIMIZERS[optimizer][1](twin.parameters())
    for p in mlp.parameters(): ours.add_param(p)
    X, T, K = constant(x, 'batch in'), torch.tensor(x), torch.tensor(labels)
    first = None
    for _ in range(30):
        with exec_scope():
            loss = mlp(X).cross_entropy('out', labels)
            loss.backward()
            if clip: norm = ours.clip_grad_norm(clip)
            ours.step()
            ours.zero_grad()
            value = loss.item()
        theirs.zero_grad()
        other = F.cross_entropy(twin(T), K)
        other.backward()
        if clip:
            total = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip).item()
            assert abs(norm - total) < 1e-4 * total
        theirs.step()
        first = first or value
        assert abs(value - other.item()) < 2e-5 * max(1, value)
    assert value < 0.5 * first
    for p, q in zip(mlp.parameters(), twin.flat()):
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=1e-3, atol=2e-4)


def test_micro_batches_add_up():
    x, labels = blobs()
    mlp = nn.MLP((2, 12, 3), seed=1)
    twin = Twin(mlp, torch.tanh)
    for k in range(0, 90, 30):
        with exec_scope():
            mlp(constant(x[k:k + 30], 'batch in')).cross_entropy(
                'out', labels[k:k + 30], reduction='sum').backward()
        F.cross_entropy(twin(torch.tensor(x[k:k + 30])), torch.tensor(labels[k:k + 30]),
                        reduction='sum').backward()
    for p, q in zip(mlp.parameters(), twin.flat()):
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=1e-5, atol=2e-5)


def test_a_block_with_attention():
    "Norms, a causal softmax, a gated unit and a residual, as in a language model."
    g = np.random.default_rng(0)
    t, d, h = 9, 8, 16
    names = dict(q=(d, d), k=(d, d), v=(d, d), up=(h, d), gate=(h, d), down=(d, h))
    arrays = {n: (g.standard_normal(s) / math.sqrt(s[1])).astype(f32) for n, s in names.items()}
    arrays |= dict(norm=np.ones(d, f32), table=g.standard_normal((11, d)).astype(f32))
    tokens, labels = g.integers(0, 11, t), g.integers(0, 11, t)
    tags = dict(q='e d', k='e d', v='v d', up='h d', gate='h d', down='d h', norm='d',
                table='vocab d')
    w = {n: variable(a, tags[n]) for n, a in arrays.items()}
    u = {n: torch.tensor(a, requires_grad=True) for n, a in arrays.items()}
    with exec_scope():
        x = w['table'].gather('vocab', tokens, 't')
        n = x.rms_norm('d', 1e-5, w['norm'])
        q, k = n.dot(w['q'], 'd'), n.dot(w['k'], 'd').with_tags('s e')
        v = n.dot(w['v'], 'd').with_tags('s d')
        x = x + q.dot(k, 'e').softmax('s', 1 / math.sqrt(d), causal=('t', 0)).dot(v, 's')
        n = x.rms_norm('d', 1e-5, w['norm'])
        x = x + n.dot(w['up'], 'd').swiglu(n.dot(w['gate'], 'd')).dot(w['down'], 'h')
        loss = x.dot(w['table'], 'd').cross_entropy('vocab', labels)
        loss.backward()
        value = loss.item()
    y = u['table'][torch.tensor(tokens)]
    n = F.rms_norm(y, (d,), u['norm'], 1e-5)
    y = y + F.scaled_dot_product_attention(n @ u['q'].T, n @ u['k'].T, n @ u['v'].T, is_causal=True)
    n = F.rms_norm(y, (d,), u['norm'], 1e-5)
    y = y + ((n @ u['up'].T) * F.silu(n @ u['gate'].T)) @ u['down'].T
    other = F.cross_entropy(y @ u['table'].T, torch.tensor(labels))
    other.backward()
    assert abs(value - other.item()) < 2e-6 * max(1, value)
    for name, p in w.items():
        np.testing.assert_allclose(p.grad.numpy(), u[name].grad.numpy(), rtol=1e-4, atol=1e-5)
