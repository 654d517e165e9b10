"""Custom VJPs, gradcheck, and blocks that forget their insides."""
import gc
import weakref

import fucina
import numpy as np
import pytest
from fucina import (CheckpointCapturedVariableError, CheckpointMissingInputGradientError,
                    CheckpointOutputNotDifferentiableError, DTypeError, ExecContext,
                    GradientMismatchError, InvalidDataLengthError,
                    InvalidGradcheckOptionsError, InvalidShapeError,
                    MissingAnalyticalGradientError, MissingBackwardGradientError,
                    MissingOutputGradientError, NestedCheckpointRecomputeError,
                    NoVariableInputsError, TagError, UnsupportedGradientError,
                    UseAfterScopeError, checkpoint, constant, custom_vjp, exec_scope,
                    gradcheck, is_grad_enabled, no_grad, variable)
from fucina.exec import thread_state

f32 = np.float32


def bits(a): return np.ascontiguousarray(a, f32).view(np.uint32).tolist()


def clear():
    s = thread_state()
    return (s.scope, s.no_grad, s.recompute, s.outsiders) == (None, 0, False, None)


@pytest.fixture(autouse=True)
def flags_are_reset():
    yield
    assert clear()


# --- custom VJPs

@custom_vjp
def scaled_square(x, *, k): return k * x * x


@scaled_square.vjp
def _(gy, y, x, *, k, needs): return (gy * (2 * k) * x,)


def test_the_example_of_the_contract():
    t = variable([1, 2, 3], 'd')
    y = scaled_square(t, k=f32(0.5))
    assert y.tags == ('d',) and y.tolist() == [0.5, 2, 4.5] and 'scaled_square' in repr(y)
    y.sum_all().backward()
    assert t.grad.tolist() == [1, 2, 3]


@pytest.mark.parametrize('shape, tags', [((), ''), ((1,), 'd'), ((2, 3), 'a b'), ((1, 1, 1), 3)])
def test_any_rank(shape, tags):
    t = fucina.full(shape, 3, tags, requires_grad=True)
    y = scaled_square(t, k=2)
    y.backward(np.ones(shape, f32))
    assert y.shape == shape and y.tags == t.tags and t.grad.numpy().tolist() == (
        np.full(shape, 12.0).tolist())


def test_saved_arrays_are_contiguous_and_are_the_ones_of_the_forward():
    seen = {}

    @custom_vjp
    def same(x):
        seen['x'] = x
        return x * 2

    @same.vjp
    def _(gy, y, x, *, needs):
        assert x is seen['x'] and y.tolist() == (x * 2).tolist() and needs == (True,)
        assert x.flags.c_contiguous and gy.dtype == f32
        return gy * 2
    t = variable([[1, 2, 3], [4, 5, 6]], 'a b')
    same(t.permute_to('b a')).sum_all().backward()
    assert t.grad.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_keywords_are_captured_by_value():
    k = np.array([1, 2], f32)
    t = variable([1, 1], 'd')
    y = scaled_square(t, k=k)
    k[:] = 100
    y.sum_all().backward()
    assert t.grad.tolist() == [2, 4]


def test_tags_by_function_and_several_inputs():
    @custom_vjp(tags=lambda a, b: a + b)
    def outer(a, b): return a[:, None] * b

    @outer.vjp
    def _(gy, y, a, b, *, needs):
        return gy @ b if needs[0] else None, a @ gy if needs[1] else None
    a, b = variable([1, 2], 'i'), variable([3, 4, 5], 'j')
    y = outer(a, b)
    assert y.tags == ('i', 'j') and y.shape == (2, 3)
    gradcheck(lambda a, b: (outer(a, b) * outer(a, b)).sum_all(), a, b)
    assert outer(a, constant([1.0, 1], 'j')).requires_grad
    with pytest.raises(TagError): outer(a, variable([1], 'i'))


def test_result_that_is_an_input_or_a_view_of_it_is_copied():
    for forward in (lambda x: x, lambda x: x[::-1], lambda x: x.view()):
        same = custom_vjp(forward)
        same.vjp(lambda gy, y, x, *, needs: gy)
        t = constant([1.0, 2], 'd')
        y = same(t)
        t.value[:] = 9
        assert 9 not in y.tolist()


def test_gradients_in_float64_are_rounded():
    @custom_vjp
    def same(x): return x.copy()
    same.vjp(lambda gy, y, x, *, needs: np.float64(1) / 3 * gy.astype(np.float64))
    t = variable([1, 1], 'd')
    same(t).sum_all().backward()
    assert t.grad.dtype == 'f32' and t.grad.tolist() == [float(f32(1 / 3))] * 2


def test_custom_op_honours_no_grad_and_scopes():
    t = variable([1, 2], 'd')
    with no_grad(): assert not scaled_square(t, k=1).requires_grad
    with exec_scope(): y = scaled_square(t, k=1)
    with pytest.raises(UseAfterScopeError, match='scaled_square'): scaled_square(y, k=1)


def test_custom_op_refuses():
    with pytest.raises(TypeError, match='at least one'): scaled_square(k=1)
    with pytest.raises(TypeError, match='tensors'): scaled_square(np.ones(2, f32), k=1)
    with pytest.raises(DTypeError): scaled_square(constant([1, 2], 'd'), k=1)
    with pytest.raises(UnsupportedGradientError):
        scaled_square(variable([1], 'd', dtype='bf16'), k=1)
    t = variable([1, 2], 'd')
    with pytest.raises(DTypeError, match='float64'):
        custom_vjp(lambda x: x.astype(np.float64))(t)
    with pytest.raises(InvalidDataLengthError): custom_vjp(lambda x: x[None])(t)
    with pytest.raises(InvalidShapeError): custom_vjp(lambda x: x[:0])(t)

    @custom_vjp
    def no_backward(x): return x + 1
    assert no_backward(t.detach()).tolist() == [2, 3]
    with pytest.raises(MissingBackwardGradientError, match='no_backward'): no_backward(t)


# --- gradcheck

def test_gradcheck_counts_and_leaves_no_trace():
    x, w = variable([[0.5, -1]], 'b d'), variable([[1, 2], [0.3, 4]], 'o d')
    before = x.tolist(), w.tolist()
    r = gradcheck(lambda x, w: x.dot(w, 'd').tanh().sum_all(), x, w)
    assert r.checked == 6 and type(r.max_abs_error) is type(r.max_rel_error) is float
    assert 0 <= r.max_abs_error < 1e-3 and 0 <= r.max_rel_error <= 2
    assert (x.tolist(), w.tolist()) == before and x.grad is w.grad is None
    assert fucina.current_context().stats()['open_scopes'] == 0


def test_gradcheck_skips_constants_and_other_arguments():
    x = variable([0.5, -1], 'd')
    r = gradcheck(lambda x, c, k: (x * c).scale(k).sum_all(), x, constant([1.0, 2], 'd'), 3)
    assert r.checked == 2


def cube(factor):
    @custom_vjp
    def cube(x): return x * x * x
    cube.vjp(lambda gy, y, x, *, needs: gy * f32(factor) * x * x)
    return cube


def test_gradcheck_finds_a_wrong_factor_and_restores():
    good, bad = cube(3), cube(2.9)
    x, w = variable([0.0, 1.5], 'd'), variable([1.0], 'd')
    gradcheck(lambda x, w: good(x).sum_all() + w.sum_all(), x, w)
    with pytest.raises(GradientMismatchError, match=r'input 1, element 1 .*6\.7.*6\.5'):
        gradcheck(lambda w, x: bad(x).sum_all() + w.sum_all(), w, x)
    assert x.tolist() == [0, 1.5] and x.grad is None
    assert issubclass(GradientMismatchError, AssertionError)


def test_gradcheck_finds_a_missing_path():
    x = variable([1.5, 2], 'd')
    with pytest.raises(GradientMismatchError):
        gradcheck(lambda x: (x * x.detach()).sum_all(), x)


def test_gradcheck_restores_on_an_error_in_the_loss():
    x, calls = variable([1.5, 2], 'd'), []

    def loss(x):
        calls.append(x.tolist())
        if len(calls) == 4: raise ZeroDivisionError
        return (x * x).sum_all()
    with pytest.raises(ZeroDivisionError): gradcheck(loss, x)
    assert x.tolist() == [1.5, 2] and x.grad is None and calls[1][0] > 1.5 > calls[2][0]


def test_gradcheck_refuses():
    x = variable([1.5, 2], 'd')
    f = lambda *xs: xs[0].sum_all()
    with pytest.raises(NoVariableInputsError): gradcheck(f, constant([1.0], 'd'))
    with pytest.raises(NoVariableInputsError): gradcheck(f)
    with pytest.raises(MissingAnalyticalGradientError, match='input 1'):
        gradcheck(f, x, variable([1], 'd'))
    with pytest.raises(MissingOutputGradientError): gradcheck(lambda x: x.scale(1), x)
    with pytest.raises(DTypeError): gradcheck(f, variable([1], 'd', dtype='bf16'))
    for bad in ({'eps': 0}, {'eps': -1}, {'eps': float('nan')}, {'eps': float('inf')},
                {'abs_tol': -1}, {'rel_tol': float('nan')}):
        with pytest.raises(InvalidGradcheckOptionsError): gradcheck(f, x, **bad)


def test_gradcheck_zeroes_old_gradients():
    x = variable([1.5, 2], 'd')
    x.set_grad([100, 100])
    gradcheck(lambda x: (x * x).sum_all(), x)
    assert x.grad is None


# --- checkpoints

def layer(x, w, b):
    return (x.dot(w, 'in') + b).tanh().with_tags('batch in')


def noisy(x, w, b):
    return (x.dot(w, 'in').dropout(0.25, seed=7) + b).silu().with_tags('batch in')


def attention(x, w, b):
    s = x.dot(w, 'in').dot((x + b.with_tags('in')).with_tags('other in').with_tags(
        'other out'), 'out')
    return s.softmax('other').dot(x.with_tags('other in'), 'other').rms_norm('in', 1e-5)


@pytest.mark.parametrize('block', [layer, noisy, attention])
@pytest.mark.parametrize('scoped', [False, True])
def test_bitwise_equal_to_the_plain_graph(block, scoped):
    ws = [fucina.randn((16, 16), 'out in', k, requires_grad=True) for k in range(4)]
    bs = [fucina.randn((16,), 'out', 9 + k, requires_grad=True) for k in range(4)]
    x = fucina.randn((8, 16), 'batch in', 99, requires_grad=True)

    def run(apply):
        with ExecContext() as ctx:
            scope = ctx.open_exec_scope() if scoped else None
            h = x
            for w, b in zip(ws, bs): h = apply(block, h, w, b)
            loss = h.cross_entropy('in', [3] * 8)
            loss.backward()
            out = [bits(loss)] + [bits(v.grad) for v in ws + bs + [x]]
            if scope: ctx.close_exec_scope(scope)
        for v in ws + bs + [x]: v.zero_grad()
        return out
    plain = run(lambda f, *xs: f(*xs))
    once = run(checkpoint)
    # `attention` uses x several times: its gradient may be summed in another order.
    if block is attention:
        assert plain[0] == once[0]
        for p, q in zip(plain[1:], once[1:]):
            np.testing.assert_allclose(np.uint32(p).view(f32), np.uint32(q).view(f32), atol=1e-6)
    else: assert plain == once
    assert run(checkpoint) == once


def test_example_b3_and_a_scalar_output():
    x, w = variable([[1, 2]], 'batch in'), variable([[0.5, -0.25]], 'out in')
    for block in (lambda x, w: x.dot(w, 'in').tanh(),
                  lambda x, w: x.dot(w, 'in').tanh().sum_all()):
        with exec_scope(): checkpoint(block, x, w).sum_all().backward()
        assert w.grad.numpy().tolist() == [[1.0, 2.0]]
        w.zero_grad()


def test_block_runs_exactly_twice_and_only_once_without_backward():
    runs = []

    def block(x):
        runs.append(is_grad_enabled())
        return x * x
    x = variable([1, 2], 'd')
    y = checkpoint(block, x).sum_all()
    assert runs == [False]
    y.backward()
    assert runs == [False, True] and x.grad.tolist() == [2, 4]


def test_plain_call_when_nothing_is_tracked():
    runs = []
    def block(x):
        runs.append(is_grad_enabled())
        return x * x
    y = checkpoint(block, constant([1.0, 2], 'd'))
    assert runs == [True] and y.tolist() == [1, 4] and not y.requires_grad
    x = variable([1, 2], 'd')
    with no_grad(): y = checkpoint(block, x)
    assert not y.requires_grad and y.tolist() == [1, 4] and runs == [True, False]


def test_only_tracked_inputs_get_gradients():
    x, c = variable([1, 2], 'd'), constant([5.0, 6], 'd')
    checkpoint(lambda c, x: c * x, c, x).sum_all().backward()
    assert x.grad.tolist() == [5, 6] and c.grad is None


def test_one_tensor_as_two_inputs():
    x = variable([1, 2], 'd')
    checkpoint(lambda a, b: a * b, x, x).sum_all().backward()
    assert x.grad.tolist() == [2, 4]


def test_16_bit_weights_and_labels_as_extra():
    x = variable([[1, 2], [3, 4]], 'batch in')
    w = variable([[1, -1], [2, 0.5]], 'out in', dtype='bf16')
    block = lambda labels, x, w: x.dot(w, 'in').cross_entropy('out', labels)
    block([0, 1], x, w).backward()
    plain = bits(w.grad), bits(x.grad)
    w.zero_grad()
    x.zero_grad()
    checkpoint(block, x, w, extra=[0, 1]).backward()
    assert (bits(w.grad), bits(x.grad)) == plain and w.grad.dtype == 'f32'


def test_block_that_returns_its_input_or_a_view():
    x = variable([[1, 2], [3, 4]], 'a b')
    for block in (lambda x: x, lambda x: x.permute_to('b a'), lambda x: x.select('a', 1)):
        y = checkpoint(block, x)
        assert not np.shares_memory(y.numpy(), x.numpy())
        y.sum_all().backward()
    assert x.grad.tolist() == [[2, 2], [3, 3]]


def test_memory_of_eight_blocks():
    ws = [fucina.randn((32, 32), 'out in', k, requires_grad=True) for k in range(8)]
    x = fucina.randn((64, 32), 'batch in', 99)

    def deep(x, w):
        for _ in range(4): x = x.dot(w, 'in').tanh().with_tags('batch in')
        return x

    def live(apply):
        with ExecContext() as ctx, exec_scope():
            h = x
            for w in ws: h = apply(deep, h, w)
            return ctx.stats()['live_bytes']
    assert live(checkpoint) < live(lambda f, *xs: f(*xs)) / 2


def test_memory_without_a_scope():
    "Between forward and backward only the outputs of the blocks are alive."
    made = []

    @custom_vjp
    def seen(x):
        y = x + 1
        made.append(weakref.ref(y))
        return y
    seen.vjp(lambda gy, y, x, *, needs: gy)
    x = variable([1, 2], 'd')
    y = checkpoint(lambda x: seen(seen(x)), x)
    assert [r() for r in made] == [None, None]
    y.sum_all().backward()
    assert len(made) == 4


@pytest.mark.parametrize('use', [
    lambda x, w: x.dot(w, 'in'), lambda x, w: x * w.select('out', 0), lambda x, w: w,
    lambda x, w: x.dot(w.permute_to('in out'), 'in'), lambda x, w: w.to('bf16').to('f32'),
    lambda x, w: checkpoint(lambda x, w: x.dot(w, 'in'), x, w),
    lambda x, w: x.rms_norm('in', 1e-5, w.select('out', 0)),
    lambda x, w: fucina.concat('out', [w, w]), lambda x, w: w.gather('out', [0]),
    lambda x, w: w.cross_entropy('in', [0]), lambda x, w: scaled_square(w, k=1),
    lambda x, w: x.scale(2).maximum(w.sum('out')), lambda x, w: w.softmax('in'),
    lambda x, w: w.mean('in'), lambda x, w: w.max('in'), lambda x, w: w.variance('in')])
def test_captured_variables_are_refused_in_the_forward(use):
    x, w = variable([[1, 2]], 'batch in'), variable([[0.5, -0.25]], 'out in')
    with exec_scope():
        tracked = w.scale(1)        # a result counts as much as a variable
        for outsider in (w, tracked):
            with pytest.raises(CheckpointCapturedVariableError):
                checkpoint(lambda x, o=outsider: use(x, o), x)
            with pytest.raises(CheckpointCapturedVariableError):
                checkpoint(lambda o, x: use(x, o), x, extra=outsider)
    assert x.grad is w.grad is None


def test_detached_values_and_constants_may_be_captured():
    x, w = variable([[1, 2]], 'batch in'), variable([[0.5, -0.25]], 'out in')
    checkpoint(lambda x: x.dot(w.detach(), 'in'), x).sum_all().backward()
    assert x.grad.tolist() == [[0.5, -0.25]] and w.grad is None


@pytest.mark.parametrize('output', [
    lambda x: x.tolist(), lambda x: None, lambda x: (x, x), lambda x: x.to('bf16'),
    lambda x: x.argmax('d')])
def test_output_must_be_one_f32_tensor(output):
    x = variable([1, 2], 'd')
    with pytest.raises(CheckpointOutputNotDifferentiableError): checkpoint(output, x)


def test_output_that_does_not_depend_on_an_input():
    x, y = variable([1, 2], 'd'), variable([1, 2], 'd')
    z = checkpoint(lambda x, y: x * x, x, y).sum_all()
    with pytest.raises(CheckpointMissingInputGradientError, match='input 1'): z.backward()
    z = checkpoint(lambda x: constant([1.0, 2], 'd'), x).sum_all()
    with pytest.raises(CheckpointOutputNotDifferentiableError): z.backward()
    assert y.grad is None


def test_other_things_than_tensors_belong_into_extra():
    with pytest.raises(TypeError, match='extra'):
        checkpoint(lambda x, k: x.scale(k), variable([1], 'd'), 3)


def test_nested_checkpoints():
    x = variable([1, 2], 'd')
    inner = lambda x: checkpoint(lambda x: x * x, x).scale(3)
    y = checkpoint(inner, x)
    assert y.tolist() == [3, 12]
    z = y.sum_all()
    with pytest.raises(NestedCheckpointRecomputeError): z.backward()
    assert clear() and x.grad is None
    checkpoint(lambda x: x * x, x).sum_all().backward()
    assert x.grad.tolist() == [2, 4]


def test_checkpoint_after_checkpoint_inside_one_backward():
    x = variable([1, 2], 'd')
    y = checkpoint(lambda x: x * x, checkpoint(lambda x: x * x, x))
    y.sum_all().backward()
    assert x.grad.tolist() == [4, 32]


@pytest.mark.parametrize('late', [False, True])
def test_error_in_the_block(late):
    runs = []

    def block(x):
        runs.append(1)
        y = x * x
        if len(runs) > late: raise ZeroDivisionError
        return y
    x = variable([1, 2], 'd')
    with ExecContext() as ctx, exec_scope():
        with pytest.raises(ZeroDivisionError): checkpoint(block, x).sum_all().backward()
        assert ctx.stats()['open_scopes'] == 1 and thread_state().no_grad == 0
        assert not thread_state().recompute and is_grad_enabled()
        (x * x).sum_all().backward()
    assert x.grad.tolist() == [2, 4]


def test_released_input():
    x = variable([1, 2], 'd')
    with exec_scope(): y = x * x
    with pytest.raises(UseAfterScopeError): checkpoint(lambda x: x * x, y)


def test_steady_state_and_freed_graph():
    w = fucina.randn((16, 16), 'out in', 1, requires_grad=True)
    x = fucina.randn((8, 16), 'batch in', 2)
    block = lambda x, w: x.dot(w, 'in').tanh()
    with ExecContext() as ctx:
        fresh = []
        for _ in range(6):
            with exec_scope(): checkpoint(block, x, w).sum_all().backward()
            fresh.append(ctx.stats()['fresh'])
        assert fresh[2:] == [fresh[2]] * 4
    gc.collect()
    gc.disable()
    try:
        y = checkpoint(block, x, w)
        seen = weakref.ref(y._node)
        y.sum_all().backward()
        del y
        assert seen() is None
    finally: gc.enable()


def test_values_changed_between_forward_and_backward_are_seen_in_debug_mode():
    x = variable([1, 2], 'd')
    with ExecContext(debug=True):
        y = checkpoint(lambda x: x * x, x).sum_all()
        x.value[:] = 5
        with pytest.raises(fucina.StaleGraphError, match='checkpoint'): y.backward()


def test_a_vjp_cannot_write_into_the_gradient_it_is_given():
    @fucina.custom_vjp
    def square(x): return x * x

    @square.vjp
    def _(gy, y, x, *, needs):
        gy *= 2 * x
        return gy

    with pytest.raises(ValueError, match='read-only'): square(variable(3.0, '')).backward()
    v = variable(1.0, '')
    v.scale(1).backward()
    assert v.grad.item() == 1


def test_a_backward_inside_a_vjp_may_not_touch_the_outer_graph():
    w = variable([1, 2], 'a')
    h = w * 3
    side = (h * h).sum_all()

    @fucina.custom_vjp
    def same(x): return x + 0

    @same.vjp
    def _(gy, y, x, *, needs):
        side.backward()
        return gy

    with pytest.raises(fucina.BackwardAlreadyRunError, match='inside a VJP'):
        (same(h) + h).sum_all().backward()
    w.zero_grad()
    side.backward()  # the refused pass left it usable
    assert w.grad.tolist() == [18, 36]
