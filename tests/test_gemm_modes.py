"""Products through tensors: both modes, both gradients, 16-bit and frozen right operands."""
import threading

import numpy as np
import pytest

import fucina
from fucina import (ExecContext, constant, einsum_many, exec_scope, gather, get_gemm, no_grad,
                    set_gemm, variable)
from fucina.errors import (DTypeError, IndexOutOfBoundsError, InvalidConfigError,
                           InvalidShapeError, ShapeMismatchError, TagError, UseAfterScopeError)

f32 = np.float32
SIZES = dict(b=3, c=2, i=5, j=4, k=33, l=6)


@pytest.fixture(autouse=True)
def blas_afterwards():
    assert get_gemm() == 'blas'
    yield
    set_gemm('blas')


def draw(tags, seed=0, **sizes):
    shape = [{**SIZES, **sizes}[t] for t in tags]
    return np.random.default_rng([seed, *map(ord, tags)]).standard_normal(shape).astype(f32)


def by_hand(a, a_tags, b, b_tags, out):
    "From +0, for rising contracted index, the product rounded and then the sum rounded."
    over = [t for t in a_tags if t in b_tags and t not in out]  # row-major as in `a`
    sizes = dict(zip(a_tags + b_tags, a.shape + b.shape))
    def line(x, tags):  # (contracted, *axes of the result)
        x = x.transpose([tags.index(t) for t in (*over, *[t for t in out if t in tags])])
        x = x[(slice(None),) * len(over) + tuple(slice(None) if t in tags else None for t in out)]
        return x.reshape(-1, *x.shape[len(over):])
    total = np.zeros([sizes[t] for t in out], f32)
    for p, q in zip(line(a, a_tags), line(b, b_tags)): total = total + p * q
    return total


def same(got, want): assert got.tobytes() == np.ascontiguousarray(want).tobytes()


# --- the pinned product

DOTS = [('bk', 'ki'), ('bk', 'ik'), ('kb', 'ki'), ('kb', 'ik'), ('k', 'k'), ('k', 'ki'), ('bk', 'k'),
        ('cbk', 'cki'), ('bck', 'kic'), ('bkc', 'ik'), ('ckb', 'jik'), ('bk', 'bk'), ('bck', 'jki')]


@pytest.mark.parametrize('x_tags, w_tags', DOTS)
def test_pinned_dot_and_its_gradients(x_tags, w_tags):
    a, b = draw(x_tags), draw(w_tags, 1)
    x, w = variable(a, tuple(x_tags)), variable(b, tuple(w_tags))
    with ExecContext(gemm='pinned'):
        y = x.dot(w, 'k')
        out = ''.join(y.tags)
        gy = draw(out, 2)
        y.backward(gy)
    batch = [t for t in x_tags if t in w_tags and t != 'k']
    assert out == ''.join(batch + [t for t in x_tags if t not in w_tags]
                          + [t for t in w_tags if t not in x_tags])
    same(y.numpy(), by_hand(a, x_tags, b, w_tags, out))
    same(x.grad.numpy(), by_hand(gy, out, b, w_tags, x_tags))
    same(w.grad.numpy(), by_hand(a, x_tags, gy, out, w_tags))


EINSUMS = [('bk', 'ki', 'ib'), ('bkl', 'lik', 'bi'), ('bkl', 'lik', 'ib'), ('cbk', 'ckb', 'c'),
           ('bk', 'bk', ''), ('bk', 'bk', 'kb'), ('b', 'i', 'bi'), ('b', 'i', 'ib'), ('', 'i', 'i'),
           ('cbk', 'kci', 'ibc'), ('klb', 'bkl', '')]


@pytest.mark.parametrize('x_tags, w_tags, out', EINSUMS)
def test_pinned_einsum_and_its_gradients(x_tags, w_tags, out):
    a, b = draw(x_tags), draw(w_tags, 1)
    x, w = variable(a, tuple(x_tags)), variable(b, tuple(w_tags))
    with ExecContext(gemm='pinned'):
        y = x.einsum(w, tuple(out))
        gy = draw(out, 2)
        y.backward(gy)
    same(y.numpy(), by_hand(a, x_tags, b, w_tags, out))
    # The product itself has its own order of axes; the gradient is a product with that.
    natural = [t for t in x_tags if t in w_tags and t in out] + [
        t for t in x_tags if t not in w_tags] + [t for t in w_tags if t not in x_tags]
    g = gy.transpose([out.index(t) for t in natural])
    same(x.grad.numpy(), by_hand(g, ''.join(natural), b, w_tags, x_tags))
    same(w.grad.numpy(), by_hand(a, x_tags, g, ''.join(natural), w_tags))


def test_axes_of_one_operand_are_summed_first():
    x, w = variable(draw('bkl'), 'b k l'), variable(draw('kij'), 'k i j')
    with ExecContext(gemm='pinned'):
        y = x.einsum(w, 'i b')
        same(y.numpy(), x.sum('l').dot(w.sum('j'), 'k').permute_to('i b').numpy())
        y.backward(draw('ib', 2))
        u, v = variable(x.sum('l').numpy(), 'b k'), variable(w.sum('j').numpy(), 'k i')
        u.dot(v, 'k').backward(draw('ib', 2).T)
    same(x.grad.numpy(), np.broadcast_to(u.grad.numpy()[..., None], x.shape))
    same(w.grad.numpy(), np.broadcast_to(v.grad.numpy()[..., None], w.shape))


def test_einsum_many_folds_from_the_left():
    a, b, c = (variable(draw(t), tuple(t)) for t in ('bk', 'kil', 'lj'))
    with ExecContext(gemm='pinned'):
        y = einsum_many('j b', a, b, c)
        same(y.numpy(), a.einsum(b, 'b l').einsum(c, 'j b').numpy())
        y.backward(draw('jb', 2))
        grads = [t.grad.numpy() for t in (a, b, c)]
        for t in (a, b, c): t.zero_grad()
        a.einsum(b, 'b l').einsum(c, 'j b').backward(draw('jb', 2))
    for t, g in zip((a, b, c), grads): same(t.grad.numpy(), g)
    same(einsum_many('b i l', a, b).numpy(), a.einsum(b, 'b i l').numpy())


@pytest.mark.parametrize('m', [*range(1, 66, 4), 65])
def test_pinned_rows_do_not_know_each_other(m):
    a, b = draw('bk', b=65), draw('ik', 1, i=m)
    x, w = variable(a[:m], 'b k'), variable(b, 'i k')
    with ExecContext(gemm='pinned', workers=1 + m % 3):
        y = x.dot(w, 'k')
        y.backward(np.ones(y.shape))
    same(y.numpy(), by_hand(a, 'bk', b, 'ik', 'bi')[:m])
    same(w.grad.numpy(), by_hand(np.ones((m, m), f32), 'bi', a[:m], 'bk', 'ik'))


def test_pinned_bits_do_not_depend_on_workers_or_layout():
    a, b = draw('bk', b=130, k=257), draw('ik', 1, i=190, k=257)
    seen = set()
    for workers in (1, 2, 7):
        for turn in (False, True):
            x, w = variable(a.T if turn else a, 'k b' if turn else 'b k'), variable(b, 'i k')
            spread = constant(np.stack([a, a], -1), 'b k z').select('z', 1)
            with ExecContext(gemm='pinned', workers=workers), exec_scope():
                left = x.permute_to('b k')
                y = left.dot(w, 'k')
                y.backward(np.ones(y.shape))
                g = x.grad.numpy().T if turn else x.grad.numpy()
                seen |= {(y.numpy().tobytes(), g.tobytes(), w.grad.numpy().tobytes())}
                same(spread.dot(w, 'k').numpy(), y.numpy())
                one = constant(a[:1], 'b k').broadcast_to('b k', a.shape).dot(w, 'k').numpy()
                same(one, np.broadcast_to(y.numpy()[:1], y.shape))
    assert len(seen) == 1


def test_special_values_take_part():
    a = f32([[np.inf, 1, -0.0], [np.nan, 0, 0], [0, 0, 0]])
    with np.errstate(invalid='ignore'):
        for mode in ('blas', 'pinned'):
            with ExecContext(gemm=mode):
                y = constant(a, 'b k').dot(constant(np.ones((3, 2)), 'k i'), 'k').numpy()
            assert y[0, 0] == np.inf and np.isnan(y[1]).all() and not y[2].any()


def test_accuracy_of_both_modes():
    a, b = draw('bk', b=64, k=1024), draw('ik', 1, i=64, k=1024)
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    for mode, tolerance in (('blas', 8e-5), ('pinned', 2e-4)):  # lanes against one serial sum
        with ExecContext(gemm=mode): y = constant(a, 'b k').dot(constant(b, 'i k'), 'k').numpy()
        assert abs(y - exact).max() < tolerance and np.sqrt(((y - exact)**2).mean()) < tolerance / 4


# --- which mode is in force

def test_the_context_decides_before_the_process():
    a, b = draw('bk', b=64, k=500), draw('ik', 1, i=64, k=500)
    x, w = constant(a, 'b k'), constant(b, 'i k')
    pinned = by_hand(a, 'bk', b, 'ik', 'bi').tobytes()

    def kind(): return get_gemm(), x.dot(w, 'k').numpy().tobytes() == pinned
    def other():
        out = []
        thread = threading.Thread(target=lambda: out.append(kind()))
        thread.start()
        thread.join()
        return out[0]
    blas = ('blas', x.dot(w, 'k').numpy().tobytes() == pinned)
    assert not blas[1], 'choose operands on which the modes differ'
    with ExecContext(gemm='pinned') as outer:
        assert kind() == ('pinned', True) and other() == blas
        with ExecContext(): assert kind() == blas
        with ExecContext(gemm='blas'):
            assert kind() == blas
            with outer: assert kind() == ('pinned', True)
        with pytest.raises(ZeroDivisionError), ExecContext(gemm='blas'): _ = 1 / 0
        assert kind() == ('pinned', True)
    assert kind() == blas
    set_gemm('pinned')
    assert kind() == other() == ('pinned', True)
    with ExecContext(gemm='blas'): assert kind() == blas and other() == ('pinned', True)
    with ExecContext(): assert kind() == ('pinned', True)


def test_backward_uses_the_mode_it_runs_under():
    a, b, gy = draw('bk', b=64, k=500), draw('ik', 1, i=64, k=500), draw('bi', 2, b=64, i=64)
    x, w = variable(a, 'b k'), variable(b, 'i k')
    y = x.dot(w, 'k')
    with ExecContext(gemm='pinned'): y.backward(gy)
    same(x.grad.numpy(), by_hand(gy, 'bi', b, 'ik', 'bk'))
    same(w.grad.numpy(), by_hand(a, 'bk', gy, 'bi', 'ik'))


@pytest.mark.parametrize('mode', ['BLAS', '', None, 1, 'fast', ['blas']])
def test_unknown_modes(mode):
    with pytest.raises(InvalidConfigError, match='blas.*pinned'): set_gemm(mode)
    if mode is not None:
        with pytest.raises(InvalidConfigError, match='blas.*pinned'): ExecContext(gemm=mode)
    assert get_gemm() == 'blas'


# --- 16-bit right operands

@pytest.mark.parametrize('mode', ['blas', 'pinned'])
@pytest.mark.parametrize('dtype', ['f16', 'bf16'])
@pytest.mark.parametrize('x_tags, w_tags', [('bk', 'ik'), ('bk', 'ki'), ('cbk', 'cik'), ('k', 'ik'),
                                            ('bk', 'k'), ('kb', 'jki')])
def test_a_16_bit_right_operand_is_widened(x_tags, w_tags, dtype, mode):
    a, b = draw(x_tags), draw(w_tags, 1)
    x, w = variable(a, tuple(x_tags)), variable(b, tuple(w_tags), dtype=dtype)
    u, v = variable(a, tuple(x_tags)), variable(w.numpy(), tuple(w_tags))
    frozen = w.detach()
    with ExecContext(gemm=mode), exec_scope():
        y, z = x.dot(w, 'k'), u.dot(v, 'k')
        assert y.dtype == 'f32' and y.tags == z.tags
        same(y.numpy(), z.numpy())
        same(u.dot(frozen, 'k').numpy(), z.numpy())
        gy = draw(''.join(y.tags), 2)
        y.backward(gy)
        z.backward(gy)
    assert w.grad.dtype == 'f32' and w.dtype == dtype and frozen.grad is None
    same(w.grad.numpy(), v.grad.numpy())
    same(x.grad.numpy(), u.grad.numpy())
    first = w.grad.numpy().copy()
    with exec_scope(): x.detach().dot(w, 'k').backward(gy)
    assert np.allclose(w.grad.numpy(), 2 * first, atol=1e-5)


@pytest.mark.parametrize('dtype', ['f16', 'bf16'])
def test_16_bit_operands_of_einsum(dtype):
    a, b = draw('bkl'), draw('kij', 1)
    x, w = constant(a, 'b k l'), variable(b, 'k i j', dtype=dtype)
    v = variable(w.numpy(), 'k i j')
    for out in ('i b', 'b l j', 'l', 'k i b', ''):
        y, z = x.einsum(w, out), x.einsum(v, out)
        same(y.numpy(), z.numpy())
        gy = draw(''.join(y.tags), 3)
        y.backward(gy)
        z.backward(gy)
        same(w.grad.numpy(), v.grad.numpy())
    t = variable(draw('ij', 4), 'i j', dtype=dtype)
    y = einsum_many('b', x, w, t)
    y.backward(np.ones(3))
    assert t.grad.dtype == 'f32' and y.dtype == 'f32'


def test_a_cast_in_the_graph_is_a_right_operand():
    x, w = variable(draw('bk'), 'b k'), variable(draw('ik', 1), 'i k')
    with exec_scope():
        h = w.to('bf16')
        y = x.dot(h, 'k')
        same(y.numpy(), x.dot(h.to('f32'), 'k').numpy())
        y.backward(draw('bi', 2))
        want = draw('bi', 2).T @ x.numpy()
    assert np.allclose(w.grad.numpy(), want, atol=1e-5) and w.grad.dtype == 'f32'


# --- frozen matrices

class Packed:
    "A matrix kept as int8 with a scale per row: the least that a frozen matrix must offer."

    def __init__(self, values, tags):
        self.tags, self.shape = tags, values.shape
        self.scale = (abs(values).max(1, keepdims=True) / 127).astype(f32)
        self.q = np.rint(values / self.scale).astype(np.int8)
        self.widened = 0

    def rows(self, indices): return self.q[indices] * self.scale[indices]

    def widen(self, out=None):
        self.widened += 1
        return np.multiply(self.q, self.scale, out=out)

    def to(self, dtype): return constant(self.q * self.scale, self.tags, dtype=dtype)


@pytest.mark.parametrize('mode', ['blas', 'pinned'])
@pytest.mark.parametrize('tags', ['ik', 'ki'])
def test_a_frozen_right_operand(tags, mode):
    w = Packed(draw(tags), tuple(tags))
    x, u = variable(draw('bk'), 'b k'), variable(draw('bk'), 'b k')
    with ExecContext(gemm=mode), exec_scope():
        y = x.dot(w, 'k')
        assert w.widened == 1 and y.tags == ('b', 'i')
        z = u.dot(w.to('f32'), 'k')
        same(y.numpy(), z.numpy())
        y.backward(draw('bi', 2))
        assert w.widened == 2  # once for the product, once for the gradient, kept by nobody
        z.backward(draw('bi', 2))
    same(x.grad.numpy(), u.grad.numpy())
    with no_grad(): assert not x.dot(w, 'k').requires_grad
    assert not x.detach().dot(w, 'k').requires_grad


def test_frozen_operands_of_einsum():
    w = Packed(draw('ik'), ('i', 'k'))
    x = variable(draw('cbk'), 'c b k')
    for out in ('i b', 'c i', 'b', ''):
        y, z = x.einsum(w, out), x.einsum(w.to('f32'), out)
        same(y.numpy(), z.numpy())
        x.zero_grad()
        y.backward(draw(''.join(y.tags), 2))
        g = x.grad.numpy()
        x.zero_grad()
        z.backward(draw(''.join(y.tags), 2))
        same(g, x.grad.numpy())
    y = einsum_many('b j', x, w, constant(draw('ij'), 'i j'))
    assert np.allclose(y.numpy(), np.einsum('cbk,ik,ij->bj', x.numpy(), w.widen(), draw('ij')),
                       atol=1e-3)
    with pytest.raises(TypeError, match='Packed'): einsum_many('b', w, x)


def test_frozen_refusals():
    w, x = Packed(draw('ik'), ('i', 'k')), variable(draw('bk'), 'b k')
    for call, error, says in (
            (lambda: x.dot(w, 'b'), TagError, "'b'.*i=5, k=33"),
            (lambda: x.dot(w, 'z'), TagError, "'z'"),
            (lambda: constant(np.ones((3, 4)), 'b k').dot(w, 'k'), ShapeMismatchError,
             'k=4, right has k=33'),
            (lambda: x.to('bf16').detach().dot(w, 'k'), DTypeError, 'left'),
            (lambda: x + w, TypeError, 'real number'), (lambda: x.mul(w), TypeError, 'Packed'),
            (lambda: x.einsum(w, 'b z'), TagError, "'z'")):
        with exec_scope() as s:
            with pytest.raises(error, match=says): call()
            assert s.stats['results'] <= (error is DTypeError) * 2
    assert w.widened == 0
    with exec_scope(): y = x.scale(1)
    with pytest.raises(UseAfterScopeError): y.dot(w, 'k')


def test_gather_on_a_frozen_matrix():
    table = Packed(draw('ik', i=20), ('i', 'k'))
    for at in ([3, 0, 3], np.int32([3, 0, 3]), constant([3, 0, 3], 'seq')):
        h = gather(table, 'i', at, 'seq')
        assert h.tags == ('seq', 'k') and h.dtype == 'f32' and not h.requires_grad
        same(h.numpy(), table.widen()[[3, 0, 3]])
    assert gather(table, 'i', [1]).tags == ('i', 'k')
    with exec_scope(): h = gather(table, 'i', [3], 'seq')
    with pytest.raises(UseAfterScopeError): h.numpy()
    for call, error, says in (
            (lambda: gather(table, 'k', [0]), TagError, "'i', not 'k'"),
            (lambda: gather(table, 'i', [20]), IndexOutOfBoundsError, '20 at position 0'),
            (lambda: gather(table, 'i', [-1]), IndexOutOfBoundsError, 'index -1'),
            (lambda: gather(table, 'i', [0.5]), DTypeError, 'float64'),
            (lambda: gather(table, 'i', [[0]]), InvalidShapeError, 'one axis'),
            (lambda: gather(table, 'i', [0], 'k'), TagError, 'duplicate'),
            (lambda: gather(np.ones((2, 2)), 'i', [0]), TypeError, 'ndarray')):
        with pytest.raises(error, match=says): call()
    plain = variable(draw('ik'), 'i k')
    gather(plain, 'i', [1, 1], 'seq').sum_all().backward()
    assert plain.grad.numpy()[1].tolist() == [2] * 33
    assert gather(plain.detach().to('bf16'), 'i', [1]).dtype == 'bf16'


def test_a_head_tied_to_a_frozen_table():
    table = Packed(draw('ik', i=20), ('vocab', 'k'))
    w = variable(draw('jk', 1) / 6, 'j k')
    with exec_scope():
        h = gather(table, 'vocab', [3, 7], 'seq').dot(w, 'k').tanh().dot(w, 'j')
        h.dot(table, 'k').cross_entropy('vocab', [1, 2]).backward()
    assert np.isfinite(w.grad.numpy()).all() and w.grad.numpy().any()
    assert fucina.gradcheck(lambda w: gather(table, 'vocab', [3, 7], 'seq').dot(
        w, 'k').tanh().dot(w, 'j').dot(table, 'k').cross_entropy('vocab', [1, 2]), w).checked == 132
