"""A model as an object: copied, refused by pickle, the same bits in every process."""
import copy
import pickle

import fucina
import numpy as np
import pytest
from processes import printed, python
from fucina import UseAfterScopeError, exec_scope, optim, variable
from fucina.nn import MLP, Linear


def digest(net): return [p.numpy().tobytes() for p in net.parameters()]


def train(net, steps=5):
    opt = optim.AdamW(lr=0.05)
    for p in net.parameters(): opt.add_param(p)
    x = fucina.randn((12, 2), 'batch in', seed=4)
    for _ in range(steps):
        with exec_scope():
            net(x).cross_entropy('out', [0, 1, 2] * 4).backward()
            opt.step()
            opt.zero_grad()
    return digest(net)


# --- copies

def test_deepcopy_of_a_model():
    net = MLP((2, 8, 3), seed=1)
    train(net)
    twin = copy.deepcopy(net)
    assert digest(twin) == digest(net) and repr(twin) == repr(net)
    for a, b in zip(net.parameters(), twin.parameters()):
        assert b.is_leaf and b.grad is None and a.tags is b.tags and a is not b
        assert not np.shares_memory(a.value, b.value)
    before = digest(net)
    after = train(twin)
    assert digest(net) == before != after
    assert train(net) == after                   # the copy trains like the original


def test_deepcopy_keeps_ties_between_layers():
    net = MLP((4, 4, 4), seed=1)
    net.layers[1].w = net.layers[0].w
    twin = copy.deepcopy(net)
    assert twin.layers[1].w is twin.layers[0].w is not net.layers[0].w


def test_deepcopy_does_not_touch_gradients():
    net = MLP((2, 3), seed=1)
    net(fucina.ones((1, 2), 'batch in')).sum_all().backward()
    held = [p.grad.tolist() for p in net.parameters()]
    twin = copy.deepcopy(net)
    twin(fucina.ones((1, 2), 'batch in')).sum_all().backward()
    twin(fucina.ones((1, 2), 'batch in')).sum_all().backward()
    assert [p.grad.tolist() for p in net.parameters()] == held


@pytest.mark.parametrize('dtype', ['f32', 'f16', 'bf16'])
@pytest.mark.parametrize('clone', [copy.copy, copy.deepcopy])
def test_copies_of_tensors(clone, dtype):
    w = variable([[1, 2], [3, 4]], 'a b', dtype=dtype)
    for t in (w, w.detach(), fucina.constant([1, 2], 'd')):
        c = clone(t)
        assert (c.dtype, c.tags, c.shape, c.is_leaf) == (t.dtype, t.tags, t.shape, t.is_leaf)
        assert c.tolist() == t.tolist() and not np.shares_memory(c.value, t.value)
    y = variable([[1, 2], [3, 4]], 'a b').permute_to('b a')
    c = clone(y)
    assert not c.requires_grad and c.is_contiguous and c.tolist() == y.tolist()


def test_copy_of_a_released_tensor():
    with exec_scope(): y = variable([1], 'd').scale(2)
    with pytest.raises(UseAfterScopeError): copy.deepcopy(y)


def test_copy_of_borrowed_read_only_memory_is_writable():
    a = np.ones(3, np.float32)
    a.flags.writeable = False
    c = copy.deepcopy(fucina.from_numpy(a, 'd'))
    c.data()[:] = 2
    assert a.tolist() == [1, 1, 1]


# --- pickle

@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_says_what_to_use(protocol):
    for thing in (variable([1], 'd'), fucina.constant([1], 'd'), Linear(2, 3, seed=1),
                  MLP((2, 3), seed=1), [variable([1], 'd').scale(2)]):
        with pytest.raises(TypeError, match=r'numpy\.save.*deepcopy') as e:
            pickle.dumps(thing, protocol)
        assert 'constant' in str(e.value) and 'variable' in str(e.value)


# --- processes

TRACE = '''
import hashlib, sys
import numpy as np
import fucina
from fucina import optim
from fucina.data import two_spirals
from fucina.nn import MLP
assert "torch" not in sys.modules and "matplotlib" not in sys.modules

points, labels = two_spirals(100, seed=3)
net = MLP((2, 64, 64, 2), seed=1)
opt = optim.AdamW(lr=0.01, weight_decay=0.01)
for p in net.parameters(): opt.add_param(p)
x, trace = fucina.constant(points, "batch in"), hashlib.sha256()
for step in range(50):
    with fucina.exec_scope():
        loss = net(x).cross_entropy("out", labels)
        loss.backward()
        opt.clip_grad_norm(1.0)
        opt.step()
        opt.zero_grad()
        last = loss.item()
    trace.update(np.float32(last).tobytes())
for p in net.parameters(): trace.update(p.numpy().tobytes())
print(trace.hexdigest(), last)
'''


def test_two_fresh_processes_give_one_trace():
    first = python(TRACE, PYTHONHASHSEED='1')
    second = python(TRACE, PYTHONHASHSEED='4242', FUCINA_MAX_THREADS='1')
    assert first == second and float(first.split()[1]) < 0.69


WITHOUT_JIT = '''
import numpy as np, fucina
from fucina import optim
from fucina.nn import MLP

net = MLP((2, 4, 3), seed=1)
opt = optim.AdamW(lr=0.05)
for p in net.parameters(): opt.add_param(p)
x = fucina.randn((6, 2), "batch in", seed=2)
for _ in range(4):
    with fucina.exec_scope():
        loss = fucina.checkpoint(lambda x, w: x.dot(w, "in").dropout(0.1, seed=3).gelu(), x,
                                 net.layers[0].w).sum_all().scale(0.01)
        loss = loss + net(x).softmax("out").rms_norm("out", 1e-5).cross_entropy(
            "out", [0, 1, 2] * 2)
        loss.backward()
        opt.clip_grad_norm(0.1)
        opt.step()
        opt.zero_grad()
print(*[float(v).hex() for p in net.parameters() for v in p.numpy().ravel()])
'''


def test_without_compiled_kernels():
    compiled = printed(WITHOUT_JIT)
    assert python(WITHOUT_JIT, NUMBA_DISABLE_JIT='1') == compiled and len(compiled.split()) == 12 + 15
