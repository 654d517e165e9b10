"""Layers: shapes and tags, seeds, refusals, and a network that learns."""
import copy

import numpy as np
import pytest

from fucina import constant, exec_scope, gradcheck, optim, rng
from fucina.errors import InvalidShapeError, ShapeMismatchError, TagError
from fucina.nn import ACTIVATIONS, MLP, Linear


def test_a_layer_replaces_its_input_axis():
    layer = Linear(3, 4, seed=1)
    assert layer.w.tags == ('out', 'in') and layer.w.shape == (4, 3) and layer.w.is_leaf
    assert layer.b.tags == ('out',) and layer.b.tolist() == [0] * 4 and layer.b.is_leaf
    assert layer.parameters() == [layer.w, layer.b]
    layer.b.value[:] = [1, 2, 3, 4]
    a = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    for tags, x in (('n in t', a), ('in n t', a.transpose(1, 0, 2)), ('n t in', a.transpose(0, 2, 1))):
        y = layer(constant(x, tags))
        assert y.tags == ('n', 't', 'out')
        want = np.einsum('nit,oi->nto', a, layer.w.numpy()) + layer.b.numpy()
        np.testing.assert_allclose(y.numpy(), want, atol=1e-5)
    assert layer(constant([1.0, 2, 3], 'in')).shape == (4,)
    bare = Linear(3, 4, seed=1, in_tag='x', out_tag='y', bias=False)
    assert bare.b is None and bare.parameters() == [bare.w] and bare.w.tags == ('y', 'x')
    assert np.array_equal(bare.w.numpy(), layer.w.numpy())
    assert repr(layer) == 'Linear(in=3 -> out=4)' and 'no bias' in repr(bare)


def test_seeds_decide_everything():
    a, b, c = MLP((2, 8, 8, 3), seed=5), MLP((2, 8, 8, 3), seed=5), MLP((2, 8, 8, 3), seed=6)
    for p, q, r in zip(a.parameters(), b.parameters(), c.parameters()):
        assert np.array_equal(p.numpy(), q.numpy())
        assert p.ndim == 1 or not np.array_equal(p.numpy(), r.numpy())
    first = rng.kaiming_uniform_fill(rng.at(5, 0), np.empty((8, 2), np.float32), 2)
    assert np.array_equal(a.layers[0].w.numpy(), first)
    assert abs(a.layers[1].w.numpy()).max() <= 1 / np.sqrt(8)


def test_the_parts_of_a_network():
    net = MLP((2, 8, 4, 3), seed=0, tags='pixel a b class', activation='gelu')
    assert [p.tags for p in net.parameters()] == [
        ('a', 'pixel'), ('a',), ('b', 'a'), ('b',), ('class', 'b'), ('class',)]
    assert '24' not in repr(net) and 'gelu' in repr(net) and '75 parameters' in repr(net)
    assert MLP((2, 3), seed=0).layers[0].w.tags == ('out', 'in')
    assert [layer.w.tags[0] for layer in MLP((2, 3, 4, 5), seed=0).layers] == ['h1', 'h2', 'out']
    twin = copy.deepcopy(net)
    twin.layers[0].w.value[:] = 0
    assert net.layers[0].w.numpy().any() and twin.layers[0].w.is_leaf


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_activations_stand_between_layers(activation):
    net = MLP((2, 3, 3, 1), seed=3, activation=activation)
    x = constant([[0.5, -1.0], [2, 1]], 'batch in')
    h = x
    for layer in net.layers[:-1]: h = getattr(layer(h), activation)()
    assert np.array_equal(net(x).numpy(), net.layers[-1](h).numpy())
    if activation != 'relu':
        assert gradcheck(lambda *ps: net(x).tanh().sum_all(), *net.parameters()).checked == 25


@pytest.mark.parametrize('make, error, says', [
    (lambda: MLP((3,), seed=0), InvalidShapeError, 'two sizes'),
    (lambda: MLP((), seed=0), InvalidShapeError, 'two sizes'),
    (lambda: MLP((2, 0, 1), seed=0), InvalidShapeError, 'size 0'),
    (lambda: MLP((2, 3), seed=0, activation='swish'), ValueError, "'swish'"),
    (lambda: MLP((2, 3), seed=0, tags='a b c'), TagError, '3 tags'),
    (lambda: MLP((2, 3), seed=0, tags='a a'), TagError, 'duplicate'),
    (lambda: Linear(2, 3, seed=0, in_tag='x', out_tag='x'), TagError, 'duplicate'),
    (lambda: Linear(0, 3, seed=0), InvalidShapeError, 'size 0'),
    (lambda: Linear(2.5, 3, seed=0), TypeError, 'integer'),
    (lambda: Linear(2, 3, seed=0)(constant([1.0, 2, 3], 'in')), ShapeMismatchError, 'in=3.*in=2'),
    (lambda: Linear(2, 3, seed=0)(constant([1.0, 2], 'x')), TagError, "'in'")])
def test_refusals(make, error, says):
    with pytest.raises(error, match=says): make()


def test_a_network_learns_a_parity_that_no_line_separates():
    x = constant([[0.0, 0], [0, 1], [1, 0], [1, 1]], 'batch in')
    net, opt = MLP((2, 8, 2), seed=1), optim.AdamW(lr=0.05)
    for p in net.parameters(): opt.add_param(p)
    for _ in range(200):
        with exec_scope():
            loss = net(x).cross_entropy('out', [0, 1, 1, 0])
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert net(x).argmax('out').tolist() == [0, 1, 1, 0]
