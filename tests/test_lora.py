"""The adapter itself: golden values, bits, gradients, bases of every kind, merges, refusals."""
import copy
import io
import json
import threading
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fucina
from fucina import (ExecContext, ParamRegistry, checkpoint, constant, exec_scope, from_bits,
                    gather, gradcheck, lora, no_grad, optim, state_dict, variable)
from fucina.dtypes import narrow_bf16, narrow_f16
from fucina.errors import (CheckpointCapturedVariableError, CheckpointMissingEntryError,
                           DTypeError, DuplicateParamError, ExecScopeRequiredError,
                           FucinaError, InvalidConfigError, InvalidDropoutError,
                           InvalidRankError, MutableDataRequiresNoGradError,
                           NoGradientGraphError, ReadOnlyDataError, ShapeMismatchError,
                           TagError, UnsupportedViewError, UseAfterScopeError)
from fucina.kernels import set_workers
from fucina.lora import Adapter, Config
from fucina.rng import at, gaussian_fill, kaiming_uniform_fill, uniform_fill

f32 = np.float32
GOLDENS = Path(__file__).parent / 'goldens'
LORA = np.load(GOLDENS / 'lora.npz')
CASES = ['adapter0', 'adapter1', 'adapter2']
SIZES = dict(in_tag='in', out_tag='out', in_dim=8, out_dim=4, rank=2, alpha=4, seed=42)


@pytest.fixture(params=(1, 2, 3, 7))
def threads(request):
    old = set_workers(request.param)
    yield request.param
    set_workers(old)


def pinned(): return ExecContext(gemm='pinned')


def bits(a): return np.ascontiguousarray(a).view(f'u{np.asarray(a).itemsize}').tolist()


def same(a, b):
    "Equal to the last bit, the sign of a zero included."
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(a.view(f'u{a.itemsize}'), b.view(f'u{b.itemsize}'))


def fill(seed, *shape, size=1.0): return uniform_fill(seed, np.empty(shape, f32), -size, size)


def product(a, b):
    "A matrix product by definition: one contracted index after the other."
    out = np.zeros((a.shape[0], b.shape[1]), f32)
    for k in range(a.shape[1]): out += a[:, k, None] * b[k]
    return out


def made(b=True, **changes):
    "An adapter, trained if `b`."
    ad = Adapter(**SIZES | changes)
    if b: uniform_fill(7, ad.b.value, -0.5, 0.5)
    return ad


def step(opt, loss):
    "One step inside a scope; the loss."
    with exec_scope():
        y = loss()
        y.backward()
        opt.step()
        opt.zero_grad()
        return y.item()


def gradients(run, *leaves):
    "What `run` sends back to each leaf."
    for t in leaves: t.zero_grad()
    with exec_scope(): run().sum_all().backward()
    return [None if t.grad is None else t.grad.numpy().copy() for t in leaves]


class Q8:
    "A matrix in blocks of 32: int8 codes and a float16 scale."

    def __init__(self, values, tags):
        blocks = values.reshape(-1, 32)
        d = (abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        self.q = np.rint(blocks / np.where(d == 0, 1, d).astype(f32)).astype(np.int8)
        self.d, self.tags, self.shape = d, tuple(tags.split()), values.shape

    def widen(self, out=None):
        if out is None: out = np.empty(self.shape, f32)
        np.multiply(self.q, self.d.astype(f32), out=out.reshape(self.q.shape))
        return out

    def rows(self, indices): return self.widen()[indices]
    def to(self, dtype): return constant(self.widen(), self.tags, dtype=dtype)
    def bytes(self): return self.q.tobytes() + self.d.tobytes()


def base_of(kind, values, tags='out in'):
    if kind == 'q8': return Q8(values, tags)
    return constant(values, tags, dtype=kind)


def held(w): return w.bytes() if isinstance(w, Q8) else w.data_const().tobytes()


# -- golden values ----------------------------------------------------------------------------

class Golden:
    "A golden case and the adapter that belongs to it."

    def __init__(self, case):
        self.config = c = json.loads(str(LORA[f'{case}/config']))
        self.case = case
        self.adapter = Adapter.from_config(
            'in', 'out', c['in_dim'], c['out_dim'],
            Config(c['rank'], c['alpha'], c['dropout_p']), c['seed'])
        same(self.adapter.a.numpy(), self['a'])
        same(self.adapter.b.numpy(), self['b_init'])
        uniform_fill(c['seed'] + 1, self.adapter.b.value, -0.5, 0.5)
        same(self.adapter.b.numpy(), self['b'])
        self.x, self.w = constant(self['x'], 'batch in'), constant(self['w'], 'out in')
        self.seed = c['dropout_seed']

    def __getitem__(self, name): return LORA[f'{self.case}/{name}']


@pytest.mark.parametrize('case', CASES)
def test_golden_adapters_bit_for_bit(case, threads):
    g = Golden(case)
    ad = g.adapter
    for name, first, size in (('x', 2, 'x'), ('w', 3, 'w'), ('loss_weights', 4, 'loss_weights')):
        same(g[name], fill(g.config['seed'] + first, *g[size].shape))
    with pinned():
        base = g.x.dot(g.w, 'in')
        same(base.numpy(), g['base'])
        for mode, seed in (('eval', None), ('train', g.seed)):
            same(ad.delta(g.x, seed).numpy(), g[f'delta_{mode}'])
            same(ad.apply(g.x, base, seed).numpy(), g[f'apply_{mode}'])
        with exec_scope():
            y = ad.apply(g.x, g.x.dot(g.w, 'in'), g.seed)
            (y * constant(g['loss_weights'], 'batch out')).sum_all().backward()
        same(ad.a.grad.numpy(), g['grad_a'])
        same(ad.b.grad.numpy(), g['grad_b'])
        half = constant(g['w_f16'], 'out in')
        same(ad.merge_f16(half).numpy(), g['merge_f16'])
        assert ad.merge_into(g.w) is None
        same(g.w.numpy(), g['merge_into'])


@pytest.mark.parametrize('case', CASES)
def test_golden_adapters_with_blas(case):
    g = Golden(case)
    ad, close = g.adapter, partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    golden_base = constant(g['base'], 'batch out')
    for mode, seed in (('eval', None), ('train', g.seed)):
        delta = ad.delta(g.x, seed).numpy()
        close(delta, g[f'delta_{mode}'])
        # base + delta is exact, whatever product was used
        same(g['base'] + g[f'delta_{mode}'], g[f'apply_{mode}'])
        same(ad.apply(g.x, golden_base, seed).numpy(), g['base'] + delta)
    with exec_scope():
        y = ad.apply(g.x, g.x.dot(g.w, 'in'), g.seed)
        (y * constant(g['loss_weights'], 'batch out')).sum_all().backward()
    close(ad.a.grad.numpy(), g['grad_a'])
    close(ad.b.grad.numpy(), g['grad_b'])
    merged = ad.merge_f16(constant(g['w_f16'], 'out in')).numpy()
    apart = merged.view(np.int16).astype(int) - g['merge_f16'].view(np.int16)
    assert abs(apart).max() <= 1
    ad.merge_into(g.w)
    close(g.w.numpy(), g['merge_into'])


@pytest.mark.parametrize('case', CASES)
def test_golden_files(case):
    g = Golden(case)
    stream = io.BytesIO()
    state_dict.save_state_dict(stream, g.adapter.named_tensors('layers.0.q_proj')[::-1])
    raw = g['adapters_safetensors'].tobytes()
    assert stream.getvalue() == raw
    if case == 'adapter0': assert raw == (GOLDENS / 'adapters.safetensors').read_bytes()
    c = g.config
    other = Adapter('in', 'out', c['in_dim'], c['out_dim'], rank=c['rank'], alpha=c['alpha'],
                    seed=1)
    state_dict.load_state_dict(io.BytesIO(raw), other.named_tensors_mut('layers.0.q_proj'))
    same(other.a.numpy(), g['a'])
    same(other.b.numpy(), g['b'])


def test_golden_refusals():
    seen = 0
    for line in str(LORA['errors']).splitlines():
        what, _, outcome = line.rpartition(': ')
        words = what.replace('(', '').replace(')', '').replace(',', '').split()
        changes = dict(rank=int(words[1])) if words[0] == 'rank' else dict(dropout_p=float(words[1]))
        seen += 1
        if outcome.startswith('ok'): made(**changes)
        else:
            with pytest.raises(getattr(fucina.errors, outcome + 'Error')): made(**changes)
    assert seen == 7


def test_golden_masks():
    seeds = LORA['dropout/seed'].tolist()
    for p, rows in zip(LORA['dropout/p'], LORA['dropout/out']):
        for seed, row in zip(seeds, rows):
            same(constant(np.ones(128, f32), 'd').dropout(p, seed).numpy(), row)


# -- construction -----------------------------------------------------------------------------

def test_start():
    ad = Adapter(**SIZES)
    assert ad.a.tags == ('lora_r', 'in') and ad.a.shape == (2, 8)
    assert ad.b.tags == ('out', 'lora_r') and ad.b.shape == (4, 2)
    assert ad.a.is_leaf and ad.b.is_leaf and ad.a.dtype == ad.b.dtype == 'f32'
    assert [f'{v:08x}' for v in bits(ad.a.numpy())[0][:6]] == (
        '3e2ee962 be76404d be204f56 bde1a2cd bea7403e 3e855014'.split())
    assert not np.any(bits(ad.b.numpy()))  # +0
    assert ad.scale == 2 and type(ad.scale) is type(ad.dropout_p) is f32
    assert ad.dropout_p == 0 and ad.parameters() == [ad.a, ad.b]
    assert lora.RANK_TAG == 'lora_r'
    same(Adapter.from_config('in', 'out', 8, 4, Config(2, 4), 42).a.numpy(), ad.a.numpy())


@given(seed=st.integers(-2**65, 2**65), n=st.integers(1, 40), r=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_is_the_fill_of_its_seed(seed, n, r):
    r = min(r, n)
    ad = Adapter('in', 'out', n, r, rank=r, alpha=1, seed=seed)
    same(ad.a.numpy(), kaiming_uniform_fill(seed, np.empty(r * n, f32), n).reshape(r, n))
    bound = f32(np.sqrt(1 / n))
    assert (ad.a.numpy() >= -bound).all() and (ad.a.numpy() < bound).all()
    if r * n > 4:
        assert (Adapter('in', 'out', n, r, rank=r, alpha=1, seed=seed + 1).a.numpy()
                != ad.a.numpy()).any()


@pytest.mark.parametrize(('alpha', 'rank'), [
    (8, 4), (0.1, 3), (16, 3), (0, 2), (-1.5, 2), (1e-45, 2), (3e38, 1), (np.inf, 2),
    (2**70, 4), (np.float64(0.1), np.int8(3)), (f32(0.1), np.uint64(3)), (np.int64(16), 3),
    (np.float16(0.1), 3), (Fraction(1, 3), 1), (np.array(0.1), np.array(3)), (True + 0.0, 1)])
def test_scale_is_one_division_of_float32(alpha, rank):
    ad = made(alpha=alpha, rank=rank)
    same(ad.scale, f32(float(alpha)) / f32(int(rank)))
    assert ad.rank == int(rank) and type(ad.rank) is int and ad.alpha == f32(float(alpha))
    same(ad.a.numpy(), made(rank=int(rank)).a.numpy())


def test_rounded_settings_give_the_same_bits():
    x = constant(fill(1, 5, 8), 'batch in')
    for kind in (float, np.float64, f32, np.float16):
        p, alpha = kind(0.3), kind(1.3)
        one = made(dropout_p=p, alpha=alpha)
        other = made(dropout_p=f32(float(p)), alpha=f32(float(alpha)))
        same(one.dropout_p, other.dropout_p)
        same(one.delta(x, 3).numpy(), other.delta(x, 3).numpy())


REFUSED_SETTINGS = [
    (dict(rank=0), InvalidRankError, 'rank must be 1 to 4 for in=8, out=4, got 0'),
    (dict(rank=5), InvalidRankError, 'got 5'), (dict(rank=-1), InvalidRankError, 'got -1'),
    (dict(rank=10**30), InvalidRankError, 'got 1000000'),
    (dict(rank=1, in_dim=0), InvalidRankError, 'in=0'),
    (dict(rank=2.0), TypeError, 'rank'), (dict(rank='2'), TypeError, 'rank'),
    (dict(rank=None), TypeError, 'rank'), (dict(rank=True), TypeError, 'rank'),
    (dict(dropout_p=1), InvalidDropoutError, 'below 1, got 1'),
    (dict(dropout_p=-0.1), InvalidDropoutError, 'got -0.1'),
    (dict(dropout_p=np.nan), InvalidDropoutError, 'NaN'),
    (dict(dropout_p=np.inf), InvalidDropoutError, 'inf'),
    (dict(dropout_p=1e300), InvalidDropoutError, 'too large'),
    (dict(dropout_p=1 - 1e-9), InvalidDropoutError, '0.999999999'),  # 1 as float32
    (dict(dropout_p='0.1'), TypeError, 'dropout_p'), (dict(dropout_p=None), TypeError, 'dropout_p'),
    (dict(dropout_p=False), TypeError, 'dropout_p'),
    (dict(alpha=np.nan), InvalidConfigError, 'alpha is NaN'),
    (dict(alpha=1e300), InvalidConfigError, 'alpha is too large'),
    (dict(alpha='4'), TypeError, 'alpha'), (dict(alpha=None), TypeError, 'alpha'),
    (dict(alpha=True), TypeError, 'alpha'), (dict(alpha=1j), TypeError, 'alpha'),
    (dict(alpha=Decimal(1)), TypeError, 'alpha'), (dict(alpha=[4]), TypeError, 'alpha'),
    (dict(in_dim=8.0), TypeError, 'in_dim'), (dict(out_dim='4'), TypeError, 'out_dim'),
    (dict(seed=1.5), TypeError, 'float'), (dict(seed=None), TypeError, 'NoneType'),
    (dict(in_tag='out'), TagError, 'duplicate'), (dict(in_tag='lora_r'), TagError, 'lora_r.*between A and B'),
    (dict(out_tag='lora_r'), TagError, 'lora_r.*between A and B'), (dict(in_tag='a b'), TagError, 'a b'),
    (dict(in_tag=''), TagError, 'non-empty'), (dict(out_tag=3), TagError, '3'),
    # the order: tags, then the rank, then dropout
    (dict(in_tag='out', rank=0, dropout_p=1), TagError, 'out'),
    (dict(rank=0, dropout_p=1), InvalidRankError, 'rank'),
]


@pytest.mark.parametrize(('changes', 'error', 'says'), REFUSED_SETTINGS, ids=str)
def test_settings_that_are_refused(changes, error, says):
    with pytest.raises(error, match=says) as e: Adapter(**SIZES | changes)
    assert e.type is error


def test_missing_settings():
    for name in ('rank', 'alpha', 'seed'):
        with pytest.raises(TypeError, match=name):
            Adapter(**{k: v for k, v in SIZES.items() if k != name})


def test_config_is_a_frozen_record():
    c = Config(2, 4.0)
    assert c == Config(rank=2, alpha=4.0, dropout_p=0.0) and hash(c) == hash(Config(2, 4.0))
    with pytest.raises(AttributeError): c.rank = 3


def test_made_outside_every_scope():
    with exec_scope() as s:
        ad = made()
        assert s.stats['results'] == 0
    assert ad.delta(constant(fill(1, 3, 8), 'batch in')).shape == (3, 4)
    with exec_scope(): made().delta(constant(fill(1, 3, 8), 'batch in')).sum_all().backward()


def test_a_copy_is_independent():
    ad = made(dropout_p=0.25)
    twin = copy.deepcopy(ad)
    ad.b.value[:] = 0
    assert twin.b.numpy().any() and twin.b.is_leaf and twin.a is not ad.a
    assert (twin.dropout_p, twin.scale, twin.rank) == (ad.dropout_p, ad.scale, ad.rank)


@pytest.mark.parametrize('name', ['rank', 'alpha', 'dropout_p', 'scale', 'in_tag', 'out_tag', 'in_dim', 'out_dim'])
def test_settings_stay_as_they_were_made(name):
    for ad in (made(), copy.copy(made()), copy.deepcopy(made())):
        before = getattr(ad, name)
        with pytest.raises(AttributeError, match=f'{name} of an adapter cannot be changed'):
            setattr(ad, name, before)
        ad.a = ad.a
        assert getattr(ad, name) is before and ad._over(ad.a, ad.b).scale == ad.scale


def test_an_adapted_weight_is_merged_by_its_set():
    model = fucina.nn.Linear(8, 4, seed=0)
    adapters = lora.attach(model, 'w', rank=2, alpha=4, seed=0)
    for call in ('merge_into', 'merge_f16', 'merge_bf16'):
        with pytest.raises(TypeError, match=fr'{call} takes a plain weight.*use merge\(\) of the set'):
            getattr(made(), call)(model.w)
    adapters.merge()
    made().merge_into(constant(model.w.numpy(), 'out in'))


def test_repr_tells_what_there_is():
    assert repr(made(in_dim=1024, out_dim=512, rank=8, alpha=16, dropout_p=0.1)) == (
        'Adapter(in=1024 -> lora_r=8 -> out=512, scale 16/8 = 2, dropout 0.1, '
        '12,288 parameters for 524,288)')


# -- the forward pass -------------------------------------------------------------------------

def test_nothing_changes_at_first():
    ad, x = Adapter(**SIZES | dict(dropout_p=0.5)), constant(fill(1, 6, 8), 'batch in')
    base = x.dot(constant(fill(2, 4, 8), 'out in'), 'in')
    for seed in (None, 5):
        assert not ad.delta(x, seed).numpy().any()
        same(ad.apply(x, base, seed).numpy(), base.numpy())


SHAPES = [('in', ''), ('batch in', 'batch'), ('in batch', 'batch'), ('t in head', 't head'),
          ('b t head in', 'b t head'), ('in b t', 'b t'), ('a b c d e f g in', 'a b c d e f g')]


@pytest.mark.parametrize(('tags', 'rest'), SHAPES)
@pytest.mark.parametrize('mode', ['blas', 'pinned'])
def test_axes(tags, rest, mode):
    sizes = dict(zip('batch t head b a c d e f g'.split(), (3, 5, 2, 4, 2, 1, 2, 1, 2, 1)))
    sizes['in'] = 8
    x = constant(fill(1, *(sizes[t] for t in tags.split())), tags)
    ad = made(dropout_p=0.3)
    rest = tuple(rest.split())
    flat = x.permute_to(rest + ('in',)).numpy().reshape(-1, 8)
    with ExecContext(gemm=mode):
        y = ad.delta(x)
        assert y.tags == rest + ('out',) and y.shape == (*(sizes[t] for t in rest), 4)
        exact = flat.astype(float) @ ad.a.numpy().T.astype(float) @ ad.b.numpy().T * 2
        np.testing.assert_allclose(y.numpy().reshape(-1, 4), exact, rtol=0, atol=2e-6)
        if mode == 'pinned':
            same(y.numpy().reshape(-1, 4),
                 product(product(flat, ad.a.numpy().T), ad.b.numpy().T) * ad.scale)
        w = constant(fill(2, 4, 8), 'out in')
        base = x.dot(w, 'in')
        same(ad.apply(x, base, 9).numpy(), base.numpy() + ad.delta(x, 9).numpy())


@pytest.mark.parametrize(('n', 'm', 'rank'), [(8, 4, 1), (8, 4, 4), (3, 9, 3), (1, 1, 1), (5, 1, 1)])
def test_extreme_ranks(n, m, rank):
    ad = Adapter('in', 'out', n, m, rank=rank, alpha=3, seed=5)
    gaussian_fill(6, ad.b.value, 1.0)
    x, w = variable(fill(1, 4, n), 'batch in'), constant(fill(2, m, n), 'out in')
    with exec_scope():
        y = ad.apply(x, x.dot(w, 'in'))
        y.sum_all().backward()
        full = w.numpy().astype(float) + 3 / rank * ad.b.numpy().astype(float) @ ad.a.numpy()
        np.testing.assert_allclose(y.numpy(), x.numpy() @ full.T, rtol=0, atol=5e-6)
    np.testing.assert_allclose(x.grad.numpy(), np.tile(full.sum(0), (4, 1)), rtol=0, atol=5e-6)
    ad.merge_into(w)
    np.testing.assert_allclose(w.numpy(), full, rtol=0, atol=1e-6)


def test_the_base_is_the_left_operand():
    "Of the sum, and so the path that a backward pass goes first."
    ad, w = made(), variable(fill(2, 4, 8), 'out in')
    x = constant(fill(1, 3, 8), 'batch in')
    base = x.dot(w, 'in')
    with exec_scope(): assert ad.apply(x, base)._node.parents[0] is base._node


def test_the_order_of_the_chain_is_the_contract():
    "Neither a scaled factor nor the product of both gives these bits."
    ad = made(in_dim=33, out_dim=17, rank=5, alpha=1.7)
    x = fill(1, 9, 33)
    a, b, s = ad.a.numpy(), ad.b.numpy(), ad.scale
    with pinned():
        y = ad.delta(constant(x, 'batch in')).numpy()
        same(y, product(product(x, a.T), b.T) * s)
        assert (y != product(product(x, a.T * s), b.T)).any()
        assert (y != product(x, product(b, a).T) * s).any()


def test_many_threads_give_the_same_bits():
    ad = made(in_dim=384, out_dim=320, rank=16, dropout_p=0.1)
    x, rows, found = variable(fill(1, 400, 384), 'batch in'), fill(2, 320, 384), []
    for n in (1, 2, 3, 7):
        old = set_workers(n)
        try:
            with pinned():
                w = constant(rows, 'out in')
                with exec_scope():
                    y = ad.apply(x, x.dot(w, 'in'), 3)
                    (y * y).sum_all().backward()
                    parts = [y.numpy().copy(), *(t.grad.numpy() for t in (ad.a, ad.b, x))]
                ad.merge_into(w)
        finally: set_workers(old)
        found.append([*parts, w.numpy()])
        for t in (ad.a, ad.b, x): t.zero_grad()
    for other in found[1:]:
        for a, b in zip(found[0], other): same(a, b)


# -- dropout ----------------------------------------------------------------------------------

@pytest.mark.parametrize('p', [0.1, 0.5, 0.999])
def test_a_mask_is_a_function_of_its_seed(p):
    ad, x = made(dropout_p=p), constant(fill(1, 400, 8), 'batch in')
    same(ad.delta(x, 5).numpy(), ad.delta(x, 5).numpy())
    for seed in (0, 5): same(ad.delta(x, seed).numpy(), made().delta(x.dropout(p, seed)).numpy())
    for other in (6, 0, 5 + 2**63): assert (ad.delta(x, other).numpy() != ad.delta(x, 5).numpy()).any()
    same(ad.delta(x, 5 + 2**64).numpy(), ad.delta(x, np.int64(5)).numpy())
    assert (ad.delta(x, 5).numpy() != ad.delta(x).numpy()).any()
    silent = (ad.delta(x, 5).numpy() == 0).all(1).mean()  # rows of which A sees nothing
    assert abs(silent - f32(p)**8) < 0.05


def test_without_dropout_a_seed_does_nothing():
    ad, x = made(), variable(fill(1, 5, 8), 'batch in')
    same(ad.delta(x, 5).numpy(), ad.delta(x).numpy())
    same(made(dropout_p=0.4).delta(x).numpy(), ad.delta(x).numpy())
    leaves = x, ad.a, ad.b
    for g, h in zip(gradients(lambda: ad.delta(x, 5), *leaves), gradients(lambda: ad.delta(x), *leaves)):
        same(g, h)


def test_a_seed_is_a_whole_number():
    x = constant(fill(1, 5, 8), 'batch in')
    for p in (0, 0.5):
        for seed in (1.5, '3', [3], np.float32(3)):
            with exec_scope() as s:
                with pytest.raises(TypeError): made(dropout_p=p).delta(x, seed)
                assert s.stats['results'] == 0


# -- what is refused, before any work ---------------------------------------------------------

def refused_calls():
    x, base = constant(fill(1, 3, 8), 'batch in'), constant(fill(2, 3, 4), 'batch out')
    with exec_scope(): gone = x.scale(1)
    for bad, error, says in (
            (x.numpy(), TypeError, 'ndarray; wrap arrays'), (None, TypeError, 'NoneType'),
            (gone, UseAfterScopeError, 'released'),
            (x.to('f16'), DTypeError, 'must be f32: .*f16'),
            (x.to('bf16'), DTypeError, 'bf16'),
            (constant([[1, 2]], 'batch in'), DTypeError, 'i64'),
            (variable(x.numpy(), 'batch in', dtype='f16'), DTypeError, 'f16'),
            (constant(fill(1, 3, 8), 'batch feat'), TagError, "'in'"),
            (constant(fill(1, 3, 8, 2), 'batch in out'), TagError, "'out'"),
            (constant(fill(1, 3, 8, 2), 'batch in lora_r'), TagError, "'lora_r'"),
            (constant(fill(1, 3, 7), 'batch in'), ShapeMismatchError, 'in=8, got .*in=7')):
        yield lambda ad, bad=bad: ad.delta(bad), error, says
        yield lambda ad, bad=bad: ad.apply(bad, base), error, says
    with exec_scope(): gone = base.scale(1)
    wide = constant(fill(1, 1, 3, 4), 'a batch out')
    for bad, error, says in (
            (base.numpy(), TypeError, 'the base must be a tensor, got ndarray'),
            (2.0, TypeError, 'float'), (gone, UseAfterScopeError, 'released'),
            (base.to('f16'), DTypeError, 'the base must be f32'),
            (base.permute_to('out batch'), TagError, r'\[batch=3, out=4\]'),
            (wide, TagError, 'batch=3, out=4'), (base.with_tags('batch class'), TagError, 'class'),
            (constant(fill(1, 4), 'out'), TagError, 'out'),
            (constant(fill(1, 2, 4), 'batch out'), ShapeMismatchError, 'batch=2'),
            (constant(fill(1, 1, 4), 'batch out'), ShapeMismatchError, 'batch=1'),
            (constant(fill(1, 3, 1), 'batch out'), ShapeMismatchError, 'out=1')):
        yield lambda ad, bad=bad: ad.apply(x, bad), error, says


@pytest.mark.parametrize(('call', 'error', 'says'), list(refused_calls()))
def test_operands_that_are_refused(call, error, says):
    ad = made()
    with exec_scope() as s:
        with pytest.raises(error, match=says) as e: call(ad)
        assert e.type is error and s.stats['results'] == 0
    assert ad.a.grad is None and ad.b.grad is None


# -- the rule about scopes --------------------------------------------------------------------

def test_a_graph_over_an_adapter_lives_in_a_scope():
    ad, x = made(dropout_p=0.5), variable(fill(1, 3, 8), 'batch in')
    w, base = variable(fill(2, 4, 8), 'out in'), constant(fill(2, 3, 4), 'batch out')
    for call, name in ((lambda: ad.delta(x, 1), 'adapter.delta'), (lambda: ad.delta(x), 'adapter.delta'),
                       (lambda: ad.apply(x, base, 1), 'adapter.apply')):
        y = call()
        assert f'result of {name}' in repr(y)
        loss = (y * x.dot(w, 'in') + x.dot(w, 'in')).sum_all()  # other paths come first and last
        for _ in range(2):
            with pytest.raises(ExecScopeRequiredError, match=f'{name} was recorded without'):
                loss.backward()
        for t in (ad.a, ad.b, x, w): assert t.grad is None
        with exec_scope():  # a scope that comes later is too late
            with pytest.raises(ExecScopeRequiredError): y.sum_all().backward()
        with exec_scope(): call().sum_all().backward()
        for t in (ad.a, ad.b, x):
            assert t.grad is not None
            t.zero_grad()


def test_what_needs_no_scope():
    ad, x = made(), constant(fill(1, 3, 8), 'batch in')
    y = ad.delta(x)  # evaluation
    assert y.requires_grad and np.isfinite(y.numpy()).all()
    with no_grad(): z = ad.delta(x)
    assert not z.requires_grad
    with pytest.raises(NoGradientGraphError): z.sum_all().backward()
    same(y.numpy(), z.numpy())
    w = variable(fill(2, 4, 8), 'out in')  # graphs without an adapter, and what was detached
    (x.dot(w, 'in') * y.detach()).sum_all().backward()
    assert w.grad is not None
    y = checkpoint(lambda x, ad: ad.delta(x), x, ad)  # its graphs have scopes of their own
    y.sum_all().backward()
    assert ad.a.grad is not None


def test_the_scope_of_another_thread_does_not_count():
    ad, x, found = made(), constant(fill(1, 3, 8), 'batch in'), []
    def work():
        try: ad.delta(x).sum_all().backward()
        except FucinaError as e: found.append(type(e))
    with exec_scope():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [ExecScopeRequiredError]


# -- gradients --------------------------------------------------------------------------------

def test_finite_differences():
    ad, x = made(dropout_p=0.25), variable(fill(1, 3, 8), 'batch in')
    w, c = constant(fill(2, 4, 8), 'out in'), constant(fill(3, 3, 4), 'batch out')
    def loss(x, a, b, seed): return (ad.apply(x, x.dot(w, 'in'), seed) * c).sum_all()
    for seed in (None, 5):
        r = gradcheck(partial(loss, seed=seed), x, ad.a, ad.b, eps=5e-3, abs_tol=1e-3, rel_tol=1e-3)
        assert r.checked == 24 + 16 + 8


def test_first_gradients():
    ad, x = Adapter(**SIZES), variable(fill(1, 3, 8), 'batch in')
    da, db, dx = gradients(lambda: ad.delta(x), ad.a, ad.b, x)
    assert not da.any() and not dx.any() and db.all()
    uniform_fill(7, ad.b.value, -0.5, 0.5)
    assert all(g.all() for g in gradients(lambda: ad.delta(x), ad.a, ad.b, x))


def test_a_moves_from_the_second_step_on():
    ad, x = Adapter(**SIZES), constant(fill(1, 3, 8), 'batch in')
    opt, moved = optim.AdamW(lr=0.1, weight_decay=0), []
    ad.register_params(opt, 'w')
    a, b = ad.a.numpy().copy(), ad.b.numpy().copy()
    for _ in range(2):
        step(opt, lambda: ad.delta(x).sum_all())
        moved.append((bits(a) != bits(ad.a.numpy()), bits(b) != bits(ad.b.numpy())))
    assert moved == [(False, True), (True, True)]


@pytest.mark.parametrize('kind', ['f32', 'f16', 'bf16', 'q8'])
@pytest.mark.parametrize('mode', ['blas', 'pinned'])
def test_every_frozen_base(kind, mode):
    ad = made(in_dim=32, out_dim=6, rank=3)
    w = base_of(kind, fill(2, 6, 32))
    before, x = held(w), variable(fill(1, 5, 32), 'batch in')
    leaves = ad.a, ad.b, x
    dense = constant(w.to('f32').numpy(), 'out in')
    with ExecContext(gemm=mode):
        found = gradients(lambda: ad.apply(x, x.dot(w, 'in'), 3), *leaves)
        wanted = gradients(lambda: ad.apply(x, x.dot(dense, 'in'), 3), *leaves)
        same(ad.apply(x, x.dot(w, 'in')).numpy(), ad.apply(x, x.dot(dense, 'in')).numpy())
    for g, h in zip(found, wanted): same(g, h)
    full = dense.numpy() + ad.scale * (ad.b.numpy() @ ad.a.numpy())
    np.testing.assert_allclose(found[2], np.tile(full.sum(0), (5, 1)), rtol=0, atol=2e-5)
    assert held(w) == before
    if kind != 'q8': assert not w.requires_grad and w.grad is None


@pytest.mark.parametrize('kind', ['f16', 'bf16', 'q8'])
def test_training_over_a_frozen_base(kind):
    ad = Adapter('in', 'class', 32, 4, rank=2, alpha=4, dropout_p=0.1, seed=3)
    w = base_of(kind, fill(2, 4, 32), 'class in')
    x, labels, before = constant(fill(1, 16, 32), 'batch in'), np.arange(16) % 4, held(w)
    opt = optim.AdamW(lr=0.02)
    ad.register_params(opt, 'w')
    losses = [step(opt, lambda: ad.apply(x, x.dot(w, 'in'), at(1, t)).cross_entropy('class', labels))
              for t in range(3)]
    assert losses[2] < losses[0] and held(w) == before
    assert ad.delta(x).numpy().any()


def test_a_packed_table_feeds_an_adapter():
    "Rows of a packed embedding go in, and the same packed matrix is the tied head."
    table = Q8(fill(2, 10, 32), 'vocab in')
    head = Adapter('in', 'vocab', 32, 10, rank=4, alpha=8, seed=1)
    gaussian_fill(5, head.b.value, 0.1)
    h = gather(table, 'vocab', [3, 0, 3], 'seq')
    assert h.tags == ('seq', 'in') and not h.requires_grad
    same(h.numpy(), table.widen()[[3, 0, 3]])
    with exec_scope():
        y = head.apply(h, h.dot(table, 'in'))
        y.cross_entropy('vocab', [3, 0, 3]).backward()
        assert y.tags == ('seq', 'vocab')
    assert head.a.grad.numpy().any() and head.b.grad.numpy().any()


def test_one_adapter_in_two_places():
    "A tied weight with its adapter: both uses add into one gradient, and one merge serves both."
    ad = made(in_dim=6, out_dim=6, rank=2)
    w, x = constant(fill(2, 6, 6), 'out in'), constant(fill(1, 5, 6), 'batch in')
    def layer(x, ad): return ad.apply(x, x.dot(w, 'in'))
    def twice(first, second): return layer(layer(x, first).tanh().with_tags('batch in'), second)
    both = gradients(lambda: twice(ad, ad), ad.a, ad.b)
    copies = copy.deepcopy(ad), copy.deepcopy(ad)
    apart = gradients(lambda: twice(*copies), *(t for c in copies for t in c.parameters()))
    for g, h, k in zip(both, apart[:2], apart[2:]): np.testing.assert_allclose(g, h + k, rtol=0, atol=1e-5)
    y = twice(ad, ad).numpy()
    ad.merge_into(w)
    z = x.dot(w, 'in').tanh().with_tags('batch in').dot(w, 'in').numpy()
    np.testing.assert_allclose(y, z, rtol=0, atol=1e-5)


def test_two_adapters_on_one_weight_add_up():
    w = constant(fill(2, 4, 8), 'out in')
    first, second, x = made(), made(seed=9, rank=3), constant(fill(1, 5, 8), 'batch in')
    y = second.apply(x, first.apply(x, x.dot(w, 'in'))).numpy()
    first.merge_into(w)
    second.merge_into(w)
    np.testing.assert_allclose(x.dot(w, 'in').numpy(), y, rtol=0, atol=1e-5)


def test_four_micro_batches_are_one_batch():
    ad, w = made(), constant(fill(2, 4, 8), 'out in')
    rows, labels = fill(1, 32, 8), np.arange(32) % 4
    def loss(i, j):
        x = constant(rows[i:j], 'batch in')
        return ad.apply(x, x.dot(w, 'in')).cross_entropy('out', labels[i:j])
    whole = gradients(lambda: loss(0, 32), ad.a, ad.b)
    for t in ad.parameters(): t.zero_grad()
    for k in range(0, 32, 8):
        with exec_scope(): loss(k, k + 8).scale(0.25).backward()
    for t, g in zip(ad.parameters(), whole):
        np.testing.assert_allclose(t.grad.numpy(), g, rtol=0, atol=1e-7)


def test_a_recomputed_block_has_the_same_mask():
    ad, x = made(dropout_p=0.5), variable(fill(1, 30, 8), 'batch in')
    w, runs = constant(fill(2, 4, 8), 'out in'), []
    def block(x, ad):
        runs.append(1)
        return ad.apply(x, x.dot(w, 'in'), 11).tanh()
    leaves = x, ad.a, ad.b
    plain = gradients(lambda: block(x, ad), *leaves)
    runs.clear()
    again = gradients(lambda: checkpoint(block, x, ad), *leaves)
    assert len(runs) == 2
    for g, h in zip(plain[1:], again[1:]): same(g, h)
    np.testing.assert_allclose(again[0], plain[0], rtol=0, atol=1e-7)  # x is used twice
    same(checkpoint(block, x, ad).numpy(), block(x, ad).numpy())
    with exec_scope(), pytest.raises(CheckpointCapturedVariableError):
        checkpoint(lambda x: block(x, ad), x)


# -- merging ----------------------------------------------------------------------------------

@pytest.mark.parametrize('mode', ['blas', 'pinned'])
def test_a_merge_rounds_twice(mode):
    ad = made(rank=1, alpha=1.7, in_dim=64, out_dim=32)
    w = fill(2, 32, 64)
    merged = constant(w, 'out in')
    with ExecContext(gemm=mode): ad.merge_into(merged)
    outer = ad.b.numpy() * ad.a.numpy()  # a single product per element, in any mode
    same(merged.numpy(), w + ad.scale * outer)
    once = (w.astype(float) + float(ad.scale) * outer.astype(float)).astype(f32)
    assert (merged.numpy() != once).any()  # so the test can tell


@pytest.mark.parametrize('inside', [False, True])
def test_merges_into_16_bits_are_the_rounded_f32_merge(inside):
    ad = made(in_dim=64, out_dim=32, rank=4)
    values = gaussian_fill(2, np.empty((32, 64), f32), 1.0)
    for dtype, merge, narrow in (('f16', ad.merge_f16, narrow_f16),
                                 ('bf16', ad.merge_bf16, narrow_bf16)):
        w = constant(values, 'out in', dtype=dtype)
        before = w.data_const().copy()
        dense = w.to('f32')
        ad.merge_into(dense)
        if inside:
            with exec_scope(): y = merge(w)
        else: y = merge(w)
        same(y.data_const(), narrow(dense.numpy()))
        assert y.dtype == dtype and y.tags == w.tags and y is not w
        assert not y.requires_grad and y.is_contiguous
        y.data()[0, 0] = 0  # its own memory
        same(w.data_const(), before)
        trained = variable(values, 'out in', dtype=dtype)  # a copy needs no frozen original
        assert not merge(trained).requires_grad and trained.requires_grad
        turned = constant(values.T.copy(), 'in out', dtype=dtype).permute_to('out in')
        same(merge(turned).bits, narrow(dense.numpy()).view(np.uint16))


def test_merged_values_at_the_edges():
    ad = Adapter('in', 'out', 4, 1, rank=1, alpha=1, seed=1)
    ad.a.value[:] = [[2**-24, 1, -1, 1]]
    ad.b.value[:] = 1
    half = ad.merge_f16(constant([[0, 65504 - 1, -65504, np.inf]], 'out in', dtype='f16'))
    assert half.bits.tolist() == [[1, 0x7bff, 0xfbff, 0x7c00]]  # 2^-24 is the least subnormal
    ad.b.value[:] = 100
    half = ad.merge_f16(constant([[0, 65504, -65504, -np.inf]], 'out in', dtype='f16'))
    assert half.bits.tolist() == [[100, 0x7c00, 0xfc00, 0xfc00]]
    w = from_bits(np.array([[0x7fa1, 0x7c01, 0xfc01, 0x0001]], np.uint16), 'out in', 'f16')
    assert ad.merge_f16(w).bits[0, :3].tolist() == [0x7fa1, 0x7e01, 0xfe01]  # NaN keeps its payload
    ad.b.value[:] = 1e38
    dense = constant([[0, 3e38, -3e38, np.inf]], 'out in')
    ad.merge_into(dense)  # overflow is infinity, without a warning
    assert dense.numpy()[0, 1:].tolist() == [np.inf, -np.inf, np.inf]


@pytest.mark.parametrize('kind', ['f32', 'f16', 'bf16', 'q8'])
def test_the_merged_weight_does_what_the_adapter_did(kind):
    ad = made(in_dim=32, out_dim=6, rank=3)
    w, x = base_of(kind, fill(2, 6, 32)), constant(fill(1, 5, 32), 'batch in')
    y = ad.apply(x, x.dot(w, 'in')).numpy()
    if kind in ('f32', 'q8'):
        merged = w.to('f32')
        ad.merge_into(merged)
    else: merged = getattr(ad, f'merge_{kind}')(w)
    tolerance = dict(f32=1e-4, f16=0.05, bf16=0.4, q8=1e-4)[kind]
    np.testing.assert_allclose(x.dot(merged, 'in').numpy(), y, rtol=0, atol=tolerance)


def test_a_borrowed_weight_is_merged_in_place():
    array = fill(2, 4, 8)
    before, ad = array.copy(), made()
    ad.merge_into(fucina.from_numpy(array, 'out in'))
    with no_grad(): same(array, before + ad.scale * ad.b.dot(ad.a, 'lora_r').numpy())


def refused_weights():
    values = fill(2, 4, 8)
    frozen = values.copy()
    frozen.flags.writeable = False
    with exec_scope(): gone = constant(values, 'out in').scale(1)
    all3 = 'merge_into', 'merge_f16', 'merge_bf16'
    dense = partial(constant, values)
    for calls, w, error, says in (
            (all3, Q8(fill(2, 4, 32), 'out in'), DTypeError, r'Q8\[out=4, in=32\].*packed.*w.to\("f32"\)'),
            (all3, values, TypeError, 'ndarray'), (all3, None, TypeError, 'NoneType'),
            (all3, constant(np.ones((4, 8), int), 'out in'), DTypeError, 'i64'),
            (all3[:1], gone, UseAfterScopeError, 'released'),
            (all3[:1], dense('out in', dtype='f16'), DTypeError, 'f16 there is merge_f16'),
            (all3[:1], dense('out in', dtype='bf16'), DTypeError, 'there is merge_bf16'),
            (all3[1:], dense('out in'), DTypeError, 'there is merge_into'),
            (all3[1:2], dense('out in', dtype='bf16'), DTypeError, 'there is merge_bf16'),
            (all3[:1], dense('in out'), TagError, r'takes \[out=4, in=8\], got .*in=4, out=8'),
            (all3[:1], dense('out feat'), TagError, 'feat'),
            (all3[:1], constant(fill(2, 4, 8, 1), 'out in k'), TagError, 'k=1'),
            (all3[:1], constant(fill(2, 8, 4), 'out in'), ShapeMismatchError, 'out=8, in=4'),
            (all3[:1], variable(fill(2, 4, 9), 'out in'), ShapeMismatchError, 'in=9'),
            (all3[1:2], constant(fill(2, 4, 9), 'out in', dtype='f16'), ShapeMismatchError, 'in=9'),
            (all3[2:], constant(fill(2, 4, 9), 'out in', dtype='bf16'), ShapeMismatchError, 'in=9'),
            (all3[:1], variable(values, 'out in'), MutableDataRequiresNoGradError, 'frozen'),
            (all3[:1], variable(values, 'out in').scale(1), MutableDataRequiresNoGradError, 'graph'),
            (all3[:1], constant(values.T.copy(), 'in out').permute_to('out in'), UnsupportedViewError,
             'strided'),
            (all3[:1], constant(frozen, 'out in', copy=False), ReadOnlyDataError, 'read-only')):
        for call in calls: yield call, w, error, says


@pytest.mark.parametrize(('call', 'w', 'error', 'says'), list(refused_weights()))
def test_weights_that_are_refused(call, w, error, says):
    ad = made(in_dim=32) if isinstance(w, Q8) else made()
    def memory():
        if isinstance(w, Q8): return w.bytes()
        return w._data.tobytes() if getattr(w, '_data', None) is not None else None
    before = memory()
    with pytest.raises(error, match=says) as e: getattr(ad, call)(w)
    assert e.type is error and memory() == before


# -- names, files, optimizers -----------------------------------------------------------------

def test_a_round_trip_in_any_order():
    ads = [made(seed=k, rank=k + 1) for k in range(3)]
    others = [Adapter(**SIZES | dict(seed=90 + k, rank=k + 1)) for k in range(3)]
    names = [f'layers.{k}.q' for k in range(3)]
    stream = io.BytesIO()
    state_dict.save_state_dict(stream, [e for ad, n in zip(ads, names) for e in ad.named_tensors(n)])
    raw = stream.getvalue()
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], 'little')])
    assert [*header] == [f'{n}.lora_{k}' for n in names for k in 'ab']
    entries = [e for ad, n in zip(others, names) for e in ad.named_tensors_mut(n)]
    state_dict.load_state_dict(io.BytesIO(raw), entries[::-1])
    x = constant(fill(1, 5, 8), 'batch in')
    for ad, other in zip(ads, others): same(ad.delta(x).numpy(), other.delta(x).numpy())
    before = others[0].a.numpy().copy()
    with pytest.raises(CheckpointMissingEntryError):
        state_dict.load_state_dict(io.BytesIO(raw), [*entries, *others[0].named_tensors_mut('new')])
    same(others[0].a.numpy(), before)


def test_names_of_entries():
    ad = made()
    for entries in (ad.named_tensors('layers.0.q'), ad.named_tensors_mut('layers.0.q')):
        a, b = entries
        assert (a.name, a.shape, a.dtype) == ('layers.0.q.lora_a', (2, 8), 'f32')
        assert (b.name, b.shape, b.dtype) == ('layers.0.q.lora_b', (4, 2), 'f32')
    registry = ParamRegistry()
    registry.collect({'layers': [ad]})
    assert [e.name for e in registry] == ['layers.0.lora_a', 'layers.0.lora_b']
    assert all(e.trainable for e in registry)
    for prefix in (None, 3, b'w'):
        for call in (ad.named_tensors, ad.named_tensors_mut, partial(ad.register_params, optim.SGD())):
            with pytest.raises(TypeError, match='prefix'): call(prefix)


def test_registration_is_all_or_nothing():
    ad, opt = made(), optim.AdamW()
    ad.register_params(opt, 'w')
    assert [s.param.name for s in opt.slots] == ['w.lora_a', 'w.lora_b']
    with pytest.raises(DuplicateParamError, match='w.lora_a'): ad.register_params(opt, 'v')
    assert len(opt.slots) == 2
    opt = optim.AdamW()
    opt.add_param(ad.b, name='alone')
    with pytest.raises(DuplicateParamError, match='alone'): ad.register_params(opt, 'w')
    assert [s.param.name for s in opt.slots] == ['alone']
    with pytest.raises(AttributeError, match='add_param'):
        ad.register_params(optim.OptimizerSet([opt]), 'w')
    calls = []
    class Anything:
        def add_param(self, t, name=None): calls.append((t, name))
    ad.register_params(Anything(), 'w')  # what trains may be no optimizer
    assert calls == [(ad.a, 'w.lora_a'), (ad.b, 'w.lora_b')]


class Net:
    "A trunk that trains, and a frozen head with an adapter."

    def __init__(self, seed):
        self.w = variable(fill(seed, 12, 8, size=0.5), 'hidden in')
        self.head = constant(fill(100, 4, 12, size=0.5), 'class hidden', dtype='bf16')
        self.adapter = Adapter('hidden', 'class', 12, 4, rank=2, alpha=4, dropout_p=0.25, seed=seed)
        trunk, own = optim.Muon(lr=0.02), optim.AdamW(lr=0.05)
        trunk.add_param(self.w, name='trunk.w')
        self.adapter.register_params(own, 'head')
        self.opt = optim.OptimizerSet([trunk, own])

    def train(self, first, last):
        x, labels = constant(fill(1, 16, 8), 'batch in'), np.arange(16) % 4
        for t in range(first, last):
            with exec_scope():
                h = x.dot(self.w, 'in').tanh()
                y = self.adapter.apply(h, h.dot(self.head, 'hidden'), at(42, t))
                y.cross_entropy('class', labels).backward()
                self.opt.clip_grad_norm(1.0)
                self.opt.step()
                self.opt.zero_grad()

    def tensors(self): return [self.w, *self.adapter.parameters()]


@pytest.mark.parametrize('mode', ['blas', 'pinned'])
def test_a_set_of_optimizers_resumes_in_the_middle(mode):
    with ExecContext(gemm=mode):
        straight, first, second = Net(1), Net(1), Net(2)
        straight.train(0, 8)
        first.train(0, 4)
        weights, state = io.BytesIO(), io.BytesIO()
        entries = [state_dict.NamedTensor.of('trunk.w', first.w), *first.adapter.named_tensors('head')]
        state_dict.save_state_dict(weights, entries)
        first.opt.save_state(state)
        first.train(4, 6)  # goes on, and leaves no trace in what was saved
        assert bits(second.w.numpy()) != bits(straight.w.numpy())
        wanted = [state_dict.NamedTensorMut.of('trunk.w', second.w), *second.adapter.named_tensors_mut('head')]
        state_dict.load_state_dict(io.BytesIO(weights.getvalue()), wanted)
        second.opt.load_state(io.BytesIO(state.getvalue()))
        second.train(4, 8)
        for t, u in zip(straight.tensors(), second.tensors()): same(t.numpy(), u.numpy())
        ends = io.BytesIO(), io.BytesIO()
        for net, stream in zip((straight, second), ends): net.opt.save_state(stream)
        assert ends[0].getvalue() == ends[1].getvalue()
    assert b'head.lora_a' in state.getvalue()


# -- the door in dot --------------------------------------------------------------------------

class Own:
    "A weight that multiplies by itself."

    def __init__(self): self.calls = []

    def __fucina_dot__(self, x, tag):
        self.calls.append((x, tag))
        return x.scale(2)


def test_dot_asks_the_weight():
    w, x = Own(), variable(fill(1, 3, 8), 'batch in')
    y = x.dot(w, 'in')
    same(y.numpy(), x.numpy() * f32(2))
    (seen, tag), = w.calls
    assert seen is x and tag == 'in'
    y.sum_all().backward()
    assert (x.grad.numpy() == 2).all()
    with exec_scope(): gone = x.scale(1)
    for bad, error in ((gone, UseAfterScopeError), (x.to('f16').detach(), DTypeError),
                       (constant([[1, 2]], 'batch in'), DTypeError)):
        with pytest.raises(error): bad.dot(w, 'in')
    with pytest.raises(TypeError, match='Own, which knows only dot'): x.einsum(w, 'batch out')
    with pytest.raises(TypeError, match='Own'): fucina.einsum_many('batch', x, w)
    assert len(w.calls) == 1


def test_the_door_is_for_dot_alone():
    class Both(Q8, Own):
        def __init__(self, *args):
            Q8.__init__(self, *args)
            Own.__init__(self)
    w, x = Both(fill(2, 4, 32), 'out in'), constant(fill(1, 3, 32), 'batch in')
    same(x.dot(w, 'in').numpy(), x.numpy() * f32(2))
    same(x.einsum(w, 'batch out').numpy(), x.dot(w.to('f32'), 'in').numpy())
