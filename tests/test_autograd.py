"""The engine: orders, accumulation, refusals, grad mode, and a graph that frees itself."""
import gc
import threading
import weakref

import fucina
import numpy as np
import pytest
from fucina import (BackwardAlreadyRunError, DTypeError, ExecContext, ExecScopeRequiredError,
                    GradientCastUnsupportedError, InvalidShapeError,
                    MissingBackwardGradientError, MissingOutputGradientError,
                    NoGradientGraphError, ShapeMismatchError, StaleGraphError, TagError,
                    UnsupportedGradientError, UseAfterScopeError, constant, custom_vjp,
                    exec_scope, is_grad_enabled, no_grad, variable)
from fucina.autograd import IN_SCOPE, Leaf, Node, backward

f32 = np.float32


def bits(a): return np.ascontiguousarray(a, f32).view(np.uint32).tolist()


def counting():
    "An identity whose VJP counts its calls and records which gradients were wanted."
    calls = []

    @custom_vjp
    def pair(a, b): return a + b

    @pair.vjp
    def _(gy, y, a, b, *, needs):
        calls.append(needs)
        return tuple(gy if n else None for n in needs)
    return pair, calls


# --- values

def test_shared_operand():
    x = variable([-1.5, 0, 2], 'd')
    (x * x + x.scale(4)).sum_all().backward()
    assert x.grad.tolist() == [1, 4, 8]


def test_one_tensor_as_both_operands_of_dot():
    x = variable([[1, 2], [3, 4]], 'a k')
    x.dot(x.with_tags('b k'), 'k').sum_all().backward()
    sums = x.numpy().sum(0)
    assert x.grad.tolist() == (2 * np.stack([sums, sums])).tolist()


def test_micro_batches_add_up_bitwise_in_order():
    w = variable(np.linspace(-1, 1, 12).reshape(3, 4), 'out in')
    batches = [fucina.randn((5, 4), 'batch in', seed=s) for s in range(6)]
    parts = []
    for x in batches:
        x.dot(w, 'in').tanh().sum_all().backward()
        parts.append(w.grad.numpy().copy())
        w.zero_grad()
    for x in batches: x.dot(w, 'in').tanh().sum_all().backward()
    total = parts[0]
    for p in parts[1:]: total = total + p
    assert bits(w.grad) == bits(total)


@pytest.mark.parametrize('scales, expected', [
    ((1e8, 1, -1e8), 0), ((1e8, -1e8, 1), 1), ((1, 1e8, -1e8), 0), ((-1e8, 1e8, 1), 1)])
def test_three_consumers_are_summed_in_the_order_of_the_walk(scales, expected):
    # ((s1·t + s2·t) + s3·t): depth first, left operand first.
    x = variable([1], 'd')
    t = x.scale(1)
    a, b, c = (t.scale(s) for s in scales)
    ((a + b) + c).backward()
    assert x.grad.item() == expected


def test_order_of_the_walk():
    # root(left(a, b), right(b, c)): left is finished before right is begun, and b waits.
    seen = []
    def node(name, *parents):
        def vjp(gy, needs):
            seen.append(name)
            return [gy] * len(parents)
        return Node(parents, vjp, name, (1,))
    leaf = Leaf((1,))
    a, b, c = (node(n, leaf) for n in 'abc')
    root = node('root', node('left', a, b), node('right', b, c))
    backward(root, np.ones(1, f32))
    assert seen == ['root', 'left', 'a', 'right', 'b', 'c'] and leaf.grad[0] == 4


def test_contributions_are_never_changed_in_place():
    # `add` hands the same array to both operands; one of them then receives a second one.
    x, y = variable([1, 2], 'd'), variable([3, 4], 'd')
    u, v = x.scale(1), y.scale(1)
    ((u + v) + (u * v) + u).sum_all().backward()
    assert x.grad.tolist() == [5, 6] and y.grad.tolist() == [2, 3]


def test_operand_that_is_there_twice_and_needed_once():
    x, c = variable([2.0], 'd'), constant([3.0], 'd')
    (c * x * x).backward()
    assert x.grad.tolist() == [12]


# --- seeds

def test_seed_of_one_element():
    for shape, tags in (((), ''), ((1,), 'd'), ((1, 1), 'a b')):
        x = fucina.full(shape, 3, tags, requires_grad=True)
        (x * x).backward()
        assert x.grad.shape == shape and x.grad.item() == 6


def test_larger_outputs_need_a_seed_and_stay_runnable():
    x = variable([1, 2, 3], 'd')
    y = x * x
    with pytest.raises(MissingOutputGradientError, match='d=3'): y.backward()
    assert x.grad is None
    y.backward(constant([1.0, 0, -1], 'd'))
    assert x.grad.tolist() == [2, 0, -6]


def test_seed_is_checked_and_read_as_a_value():
    x = variable([[1, 2]], 'a b')
    y = x.scale(3)
    with pytest.raises(TagError): y.backward(constant([[1.0, 1]], 'b a'))
    with pytest.raises(ShapeMismatchError): y.backward(np.ones((2, 1)))
    with pytest.raises(ShapeMismatchError): y.backward(1)
    seed = np.array([[1, 10]])
    y.backward(seed)
    seed[:] = 0
    assert x.grad.tolist() == [[3, 30]]


def test_seed_replaces_the_implicit_one():
    x = variable(2, '')
    x.scale(3).backward(np.float32(5))
    assert x.grad.item() == 15


def test_seed_that_requires_grad_is_a_value():
    x, g = variable([1, 2], 'd'), variable([3, 4], 'd')
    x.scale(2).backward(g)
    assert x.grad.tolist() == [6, 8] and g.grad is None


def test_leaf_output_accumulates_its_seed_every_time():
    x = variable(2, '')
    for n in (1, 2, 3):
        x.backward()
        assert x.grad.item() == n
    y = variable([1, 2], 'd')
    y.backward([5, 6])
    y.backward([1, 1])
    assert y.grad.tolist() == [6, 7]


# --- refusals

def test_no_graph():
    for t in (constant([1.0], 'd'), constant([1.0], 'd').scale(2), variable([1], 'd').detach()):
        with pytest.raises(NoGradientGraphError): t.backward()


def test_backward_twice_is_refused_also_after_zero_grad():
    x = variable([3], 'd')
    y = x * x
    y.backward()
    for _ in range(2):
        with pytest.raises(BackwardAlreadyRunError): y.backward()
        assert x.grad is None or x.grad.tolist() == [6]
        x.zero_grad()


def test_two_outputs_over_one_trunk():
    x = variable([1, 2], 'd')
    trunk = x * x
    a, b = trunk.scale(3).sum_all(), (trunk * trunk).sum_all()
    a.backward()
    assert x.grad.tolist() == [6, 12]
    b.backward()
    assert x.grad.tolist() == [6 + 4, 12 + 32]
    with pytest.raises(BackwardAlreadyRunError): a.backward()


def test_trunk_after_its_consumer():
    x = variable([1, 2], 'd')
    trunk = x * x
    trunk.scale(3).sum_all().backward()
    trunk.backward([1, 1])
    assert x.grad.tolist() == [8, 16]
    with pytest.raises(BackwardAlreadyRunError): trunk.backward([1, 1])


def failing():
    state = {'fail': True}

    @custom_vjp
    def same(x): return x.copy()

    @same.vjp
    def _(gy, y, x, *, needs):
        if state['fail']: raise ZeroDivisionError
        return gy
    return same, state


@pytest.mark.parametrize('scoped', [False, True])
def test_failed_pass_can_be_repeated(scoped):
    same, state = failing()
    x, w = variable([1, 2], 'd'), variable([5, 6], 'd')
    with ExecContext() as ctx:
        scope = ctx.open_exec_scope() if scoped else None
        y = (w * x).sum_all() + same(x * x).sum_all()
        with pytest.raises(ZeroDivisionError): y.backward()
        x.zero_grad()
        w.zero_grad()
        state['fail'] = False
        y.backward()
        assert x.grad.tolist() == [7, 10] and w.grad.tolist() == [1, 2]
        with pytest.raises(BackwardAlreadyRunError): y.backward()
        if scope: ctx.close_exec_scope(scope)


@pytest.mark.parametrize('answer, error, text', [
    ((None,), MissingBackwardGradientError, 'same'), (None, MissingBackwardGradientError, 'same'),
    ((), MissingBackwardGradientError, '0 gradients for 1'),
    ((np.ones(3, f32),), ShapeMismatchError, r'\(3,\).*\(2,\)'),
    ((np.ones((1, 2), f32),), ShapeMismatchError, 'same')])
def test_bad_vjp(answer, error, text):
    @custom_vjp
    def same(x): return x.copy()
    same.vjp(lambda gy, y, x, *, needs: answer)
    x = variable([1, 2], 'd')
    with pytest.raises(error, match=text): same(x).sum_all().backward()


def test_contract_of_a_composite_is_checked_before_anything_moves():
    x = variable([1, 2], 'd')
    y = x * x
    y._node.flags |= IN_SCOPE
    z = (x.scale(2) + y).sum_all()
    with pytest.raises(ExecScopeRequiredError, match='with fucina.exec_scope'): z.backward()
    assert x.grad is None


# --- pruning and interior gradients

def test_constants_get_no_gradient_and_their_vjp_is_pruned():
    pair, calls = counting()
    x, c = variable([1, 2], 'd'), constant([3.0, 4], 'd')
    (pair(x, c) + pair(c, x)).sum_all().backward()
    pair(c, c)
    assert sorted(calls) == [(False, True), (True, False)]
    assert c.grad is None and x.grad.tolist() == [2, 2]


def test_untracked_branches_are_never_visited():
    pair, calls = counting()
    x, c = variable([1, 2], 'd'), constant([3.0, 4], 'd')
    (x * pair(c, c) + pair(x.detach(), c)).sum_all().backward()
    assert calls == [] and x.grad.tolist() == [6, 8]


def test_detach_stops_the_gradient():
    x = variable([3.0], 'd')
    (x * (x * x).detach()).backward()
    assert x.grad.item() == 9


def test_interior_gradients_are_dropped_unless_retained():
    x = variable([1, 2], 'd')
    y, z = x * x, None
    y.retain_grad()
    z = y.scale(5)
    z.sum_all().backward()
    assert z.grad is None and y.grad.tolist() == [5, 5] and y.grad.tags == ('d',)
    assert not y.grad.requires_grad
    with pytest.raises(NoGradientGraphError): constant([1.0], 'd').retain_grad()


def test_retained_gradient_in_a_scope_stays_intact():
    x = variable(np.ones(64), 'd')
    with ExecContext() as ctx:
        with exec_scope():
            y = x.scale(2)
            y.retain_grad()
            (y * y).sum_all().backward()
            held = y.grad.numpy()
        for _ in range(5):
            with exec_scope(): (x * x).scale(9).sum_all().backward()
        assert held.tolist() == [4] * 64 and ctx.stats()['open_scopes'] == 0


# --- leaves

def test_zero_grad_only_clears_and_nothing_else_does():
    x = variable([1, 2], 'd')
    for k in range(1, 4):
        with exec_scope(): x.scale(1).sum_all().backward()
        assert x.grad.tolist() == [k, k]
    x.zero_grad()
    assert x.grad is None


def test_held_gradient_is_a_snapshot():
    x = variable([1, 2], 'd')
    x.scale(3).sum_all().backward()
    tensor, array, piece, view = x.grad, x.grad.numpy(), x.grad.numpy()[1:], np.asarray(x.grad).T
    x.scale(10).sum_all().backward()
    assert x.grad.tolist() == [13, 13]
    x.zero_grad()
    x.scale(100).sum_all().backward()
    x.set_grad([7, 7])
    assert tensor.tolist() == array.tolist() == view.tolist() == [3, 3] and piece.tolist() == [3]
    assert x.grad.tolist() == [7, 7]


def test_gradient_is_read_only():
    x = variable([1, 2], 'd')
    x.scale(3).sum_all().backward()
    with pytest.raises(ValueError, match='read-only'): x.grad.numpy()[0] = 1


def test_gradient_is_never_the_array_of_an_operation():
    x = variable([1, 2], 'd')
    seed = np.array([1, 1], f32)
    x.scale(1).backward(seed)
    seed[:] = 9
    assert x.grad.tolist() == [1, 1]


def test_buffer_keeps_its_address_unless_somebody_holds_it():
    x = variable(np.ones(1000), 'd')
    leaf, seen = x._node, set()
    for _ in range(10):
        with exec_scope(): (x * x).sum_all().backward()
        seen.add(leaf.address)
        assert leaf.address == leaf.grad.ctypes.data
        x.zero_grad()
    assert len(seen) == 1
    with exec_scope(): (x * x).sum_all().backward()
    held = x.grad
    x.zero_grad()
    with exec_scope(): x.scale(3).sum_all().backward()
    assert leaf.address not in seen and leaf.address == leaf.grad.ctypes.data
    assert held.numpy()[0] == 2 and leaf.grad[0] == 3


def test_writable_grad_copies_only_what_is_seen():
    x = variable([1, 2], 'd')
    x.scale(3).sum_all().backward()
    leaf = x._node
    at = leaf.address
    leaf.writable_grad()[:] = 4
    assert leaf.address == at and x.grad.tolist() == [4, 4]
    held = x.grad
    leaf.writable_grad()[:] = 5
    assert held.tolist() == [4, 4] and x.grad.tolist() == [5, 5]
    assert leaf.address == leaf.grad.ctypes.data != at


def test_set_grad():
    x = variable([[1, 2]], 'a b')
    for g in ([[3, 4]], np.array([[3, 4]]), constant([[3.0, 4]], 'a b')):
        x.set_grad(g)
        assert x.grad.tolist() == [[3, 4]] and x.grad.dtype == 'f32'
        x.zero_grad()
    with pytest.raises(ShapeMismatchError): x.set_grad([3, 4])
    with pytest.raises(DTypeError): x.set_grad([[1j, 2]])
    with pytest.raises(NoGradientGraphError): constant([1.0], 'd').set_grad([1])
    with pytest.raises(NoGradientGraphError): x.scale(2).set_grad([[1, 2]])


@pytest.mark.parametrize('dtype', ['f16', 'bf16'])
def test_16_bit_leaf_gets_f32_gradients(dtype):
    w = variable([[1, -2], [0.5, 3]], 'out in', dtype=dtype)
    x = constant([[1 + 2**-20, 2.0]], 't in')
    x.dot(w, 'in').sum_all().backward()
    assert w.grad.dtype == 'f32' and w.grad.tolist() == [[1 + 2**-20, 2]] * 2
    w.zero_grad()
    (w.to('f32') * w.to('f32')).sum_all().backward()
    assert w.grad.tolist() == [[2, -4], [1, 6]]


@pytest.mark.parametrize('dtype', ['f16', 'bf16'])
@pytest.mark.parametrize('op', [
    lambda w: w + w, lambda w: w.tanh(), lambda w: w.sum_all(), lambda w: w.scale(2),
    lambda w: w.softmax('in'), lambda w: w.with_tags('a b'), lambda w: w.dot(w, 'in'),
    lambda w: w.select('in', 0), lambda w: w.max('in'), lambda w: w.materialize(),
    lambda w: w.cross_entropy('in', [0, 1])])
def test_other_uses_of_a_tracked_16_bit_tensor_are_refused(dtype, op):
    w = variable([[1, -2], [0.5, 3]], 'out in', dtype=dtype)
    with pytest.raises(UnsupportedGradientError): op(w)


def test_cast_off_the_floats():
    with pytest.raises(GradientCastUnsupportedError): variable([1, 2], 'd').to('i64')


# --- grad mode

def test_no_grad_nests_and_decorates():
    x = variable([1, 2], 'd')

    @no_grad()
    def inside(depth):
        assert not is_grad_enabled()
        if depth: inside(depth - 1)
        return x * x

    with no_grad():
        with no_grad(): assert not (x * x).requires_grad
        assert not is_grad_enabled() and not x.scale(2).requires_grad
    assert is_grad_enabled() and (x * x).requires_grad
    y = inside(3)
    assert not y.requires_grad and is_grad_enabled() and y.tolist() == [1, 4]


def test_no_grad_object_is_reusable_and_survives_errors():
    off = no_grad()
    for _ in range(3):
        with off:
            with off: assert not is_grad_enabled()
            assert not is_grad_enabled()
        with pytest.raises(ZeroDivisionError), off, off: 1 / 0  # noqa: B018
        assert is_grad_enabled()
    assert off._entries == []


def test_no_grad_in_a_generator_that_is_left_early():
    def inside():
        with no_grad(): yield is_grad_enabled()
    g = inside()
    assert next(g) is False
    with no_grad():
        g.close()
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_no_grad_is_per_thread():
    answers = []
    with no_grad():
        t = threading.Thread(target=lambda: answers.append(is_grad_enabled()))
        t.start()
        t.join()
    assert answers == [True]


def test_backward_runs_under_no_grad():
    x = variable([1, 2], 'd')
    y = (x * x).sum_all()
    with no_grad(): y.backward()
    assert x.grad.tolist() == [2, 4]


def test_leaves_stay_leaves_under_no_grad():
    with no_grad(): x = variable([1], 'd')
    (x * x).backward()
    assert x.grad.tolist() == [2]


# --- the graph frees itself

@pytest.fixture
def nodes(monkeypatch):
    "Weak references to every node made during the test, with the cycle collector off."
    made, init = [], Node.__init__
    def watched(self, *args):
        init(self, *args)
        made.append(weakref.ref(self))
    monkeypatch.setattr(Node, '__init__', watched)
    gc.collect()
    gc.disable()
    yield lambda: sum(r() is not None for r in made)
    gc.enable()


def model(x, w, v):
    h = (x.dot(w, 'in') + v).tanh().rms_norm('out', 1e-5).softmax('out')
    h = h.gather('batch', [0, 1, 1]) * h.gather('batch', [1, 0, 1]).mean('out').exp()
    h = fucina.checkpoint(lambda h: h.silu().dropout(0.3, seed=1), h)
    h = fucina.concat('batch', [h, h.scale(2)]).narrow('batch', 1, 3)
    return (h.einsum(v, 'batch out').variance('batch').sum_all()
            + h.cross_entropy('out', [0, 1, 0]) + h.max('out').sum_all())


@pytest.mark.parametrize('run', [False, True])
def test_dropping_the_loss_frees_every_node(nodes, run):
    w, v = fucina.randn((3, 4), 'out in', 1, requires_grad=True), variable([1, 2, 3], 'out')
    x = fucina.randn((2, 4), 'batch in', 2)
    loss = model(x, w, v)
    assert nodes() > 20
    if run: loss.backward()
    del loss
    assert nodes() == 2             # the leaves of w and v


def test_a_scope_frees_every_node_though_the_loss_is_held(nodes):
    w, v = fucina.randn((3, 4), 'out in', 1, requires_grad=True), variable([1, 2, 3], 'out')
    x = fucina.randn((2, 4), 'batch in', 2)
    with exec_scope():
        loss = model(x, w, v)
        loss.backward()
    assert nodes() == 2 and 'released' in repr(loss)


def test_an_error_in_a_step_keeps_no_cycle(nodes):
    w, v = fucina.randn((3, 4), 'out in', 1, requires_grad=True), variable([1, 2, 3], 'out')
    x = fucina.randn((2, 4), 'batch in', 2)
    for _ in range(3):
        try: model(x, w, v).dot(w, 'nowhere')
        except TagError: pass
    assert nodes() == 2


@pytest.mark.parametrize('scoped', [False, True])
def test_chain_of_100_000_operations(scoped):
    x = variable([1], 'd')
    with ExecContext() as ctx:
        scope = ctx.open_exec_scope() if scoped else None
        y = x
        for _ in range(100_000): y = y.scale(1)
        y.backward()
        assert x.grad.tolist() == [1]
        if scope: ctx.close_exec_scope(scope)
        del y                       # freed without recursion


# --- stale graphs and released ones

@pytest.mark.parametrize('write', [
    lambda w: w.value.fill(2), lambda w: np.copyto(w.value, 3)])
def test_debug_finds_a_parameter_changed_too_early(write):
    w = variable([1, 2], 'd')
    with ExecContext(debug=True):
        y = (w * w).with_tags('e').sum_all()
        write(w)
        with pytest.raises(StaleGraphError, match=r'\(2,\).*mul'): y.backward()
        assert w.grad is None
        (w * w).sum_all().backward()
        assert w.grad is not None
    y = (w * w).sum_all()
    write(w)
    y.backward()                    # outside debug mode nobody looks


def test_debug_finds_an_optimizer_step_before_backward():
    w = variable([1, 2], 'd')
    opt = fucina.optim.SGD(lr=0.1)
    opt.add_param(w)
    with ExecContext(debug=True):
        (w * w).sum_all().backward()
        late = fucina.checkpoint(lambda w: w * w, w).sum_all()
        opt.step()
        with pytest.raises(StaleGraphError): late.backward()


def test_backward_into_a_closed_inner_scope():
    x = variable([1, 2], 'd')
    with exec_scope():
        outer = x.scale(3)
        with exec_scope():
            inner = outer.scale(2)
            inner.sum_all().backward()
            assert x.grad.tolist() == [6, 6]
        with pytest.raises(UseAfterScopeError): inner.sum_all()
        outer.sum_all().backward()
        assert x.grad.tolist() == [9, 9]


def test_backward_that_meets_a_cut_node_moves_nothing():
    x = variable([1, 2], 'd')
    with exec_scope():
        y = x * x
        node = y._node
    leaf = x._node
    root = Node((leaf, node), lambda gy, needs: (gy, gy), 'join', (2,))
    with pytest.raises(UseAfterScopeError, match='mul'): backward(root, np.ones(2, f32))
    assert leaf.grad is None


def test_invalid_item():
    with pytest.raises(InvalidShapeError): (variable([1, 2], 'd') * variable([1, 2], 'd')).item()


def test_pieces_of_a_stack_of_scalars_are_arrays():
    w = fucina.variable([1, 2], 'a')
    a, b = w.sum_all(), (w * 2).sum_all()
    a.retain_grad()
    fucina.stack('k', 0, [a, b]).sum_all().backward()
    assert a.grad.item() == 1 and w.grad.tolist() == [3, 3]


def test_set_grad_checks_tags_and_never_loses_the_old_gradient():
    w = fucina.variable(np.ones((2, 2)), 'a b')
    w.set_grad(np.full((2, 2), 5))
    with pytest.raises(fucina.TagError): w.set_grad(fucina.ones((2, 2), 'b a'))
    assert (w.grad.numpy() == 5).all()
    with np.errstate(all='raise'): w.set_grad(np.full((2, 2), 1e300))
    assert np.isinf(w.grad.numpy()).all()
