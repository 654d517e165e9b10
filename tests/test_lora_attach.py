"""Adapters in a model: the same forward pass, the same names, all of it undone or merged exactly."""
import io
import os
import signal
import threading
import warnings
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest

import fucina
from fucina import ParamRegistry, checkpoint, constant, exec_scope, gather, variable
from fucina.errors import (CheckpointConfigMismatchError, CheckpointDuplicateNameError, CheckpointMissingEntryError,
                           CheckpointShapeMismatchError, CheckpointUnknownNameError, DTypeError,
                           DuplicateParamError, ExecScopeRequiredError, FucinaError,
                           InvalidDropoutError, InvalidRankError, InvalidShapeError, LoraError,
                           NotAVariableError, ReadOnlyDataError, TagError, UnknownAdapterNameError,
                           UseAfterScopeError)
from fucina.exec import ExecContext
from fucina.lora import Adapter, attach
from fucina.lora.attach import DROPOUT, Adapted, fields
from fucina.nn import MLP, Linear
from fucina.optim import SGD, AdamW, Muon, OptimizerSet
from fucina.param_registry import walk
from fucina.rng import at, uniform_fill
from fucina.tensor import Tensor
from fucina.training_checkpoint import (ADAPTERS_STATE_FILE, TrainerState, load_trainer_state,
                                        save_checkpoint)

CONFIG = dict(rank=2, alpha=4.0, seed=7)


def uniform(shape, seed): return uniform_fill(seed, np.empty(shape, np.float32), -1, 1)


X = constant(uniform((6, 8), 1), 'batch in')
Y = np.array([0, 1, 2, 0, 1, 2])


def net(): return MLP((8, 5, 3), seed=3, tags='in h class')


def fill(adapters, seed=11):
    "Stand-in for training: B is no longer zero."
    for k, adapter in enumerate(adapters.values()):
        uniform_fill(at(seed, k), adapter.b.value, -0.5, 0.5)


class Int8:
    "A packed matrix: one scale for each row."

    def __init__(self, values, tags):
        self.tags, self.shape = tuple(tags.split()), values.shape
        self.scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
        self.codes = np.rint(values / self.scales).astype(np.int8)

    def widen(self, out=None): return np.multiply(self.codes, self.scales, out=out, dtype=np.float32)
    def rows(self, at): return self.widen()[at]
    def to(self, dtype): return constant(self.widen(), self.tags).to(dtype)


@dataclass
class Layer:
    w: object

    def __call__(self, x): return x.dot(self.w, 'in')


def bases():
    w = uniform((4, 8), 5)
    return {'f32': constant(w, 'out in'), 'f16': constant(w, 'out in', dtype='f16'),
            'bf16': constant(w, 'out in', dtype='bf16'), 'packed': Int8(w, 'out in'),
            'f32 variable': variable(w, 'out in'), 'bf16 variable': variable(w, 'out in', dtype='bf16')}


def snapshot(model):
    "All objects of a model and their bytes."
    return [(f.name, f.weight, f.place.owner,
             f.weight._data.tobytes() if isinstance(f.weight, Tensor) else f.weight.codes.tobytes())
            for f in fields(model)]


def assert_same(before, after):
    assert len(before) == len(after)
    for (name, w, owner, data), (name2, w2, owner2, data2) in zip(before, after):
        assert name == name2 and w is w2 and owner is owner2 and data == data2


# --- attached

def test_names_bytes_and_outputs_stay():
    model = net()
    names, logits = [n for n, _ in walk(model)], model(X).numpy()
    saved, again = io.BytesIO(), io.BytesIO()
    before = ParamRegistry()
    before.collect(model)
    before.save_state_dict(saved)
    adapters = attach(model, 'w', dropout_p=0.5, **CONFIG)
    after = ParamRegistry()
    after.collect(model)
    after.save_state_dict(again)
    assert [n for n, _ in walk(model)] == names and saved.getvalue() == again.getvalue()
    assert np.array_equal(model(X).numpy(), logits)
    assert not any(v.trainable for v in after)
    assert list(adapters) == ['layers.0.w', 'layers.1.w'] and len(adapters) == 2
    assert adapters['layers.1.w'] is model.layers[1].w.adapter
    for k, (name, adapter) in enumerate(adapters.items()):
        w = model.layers[k].w
        assert isinstance(w, Adapted) and w.name == name and w.dtype == 'f32'
        (out, in_), (n, m) = w.tags, w.shape
        own = Adapter(in_, out, m, n, rank=2, alpha=4, seed=at(7, k))
        assert np.array_equal(own.a.numpy(), adapter.a.numpy()) and not adapter.b.numpy().any()


def test_it_is_the_adapter_applied_by_hand():
    model, plain = net(), net()
    adapters = attach(model, 'w', dropout_p=0.5, **CONFIG)
    fill(adapters)
    first, second = adapters.values()

    def by_hand(seeds):
        l1, l2 = plain.layers
        h = (first.apply(X, X.dot(l1.w, 'in'), seeds[0]) + l1.b).tanh()
        return (second.apply(h, h.dot(l2.w, 'h'), seeds[1]) + l2.b).numpy()

    with ExecContext(gemm='pinned'):
        quiet = model(X).numpy()
        assert np.array_equal(quiet, by_hand((None, None)))
        seen = [quiet]
        for t in range(3):
            with adapters.training():
                seen.append(model(X).numpy())
                assert np.array_equal(model(X).numpy(), seen[-1])     # one micro-batch, one mask
            assert np.array_equal(seen[-1], by_hand([at(7 ^ DROPOUT, 2 * t + k) for k in (0, 1)]))
        assert np.array_equal(model(X).numpy(), quiet) and adapters.step == 3
    assert len({a.tobytes() for a in seen}) == 4


def test_gradients_reach_the_adapters_and_the_input():
    model, x = net(), variable(X.numpy(), 'batch in')
    old = model.parameters()
    adapters = attach(model, 'w', **CONFIG)
    fill(adapters)
    with exec_scope(): model(x).cross_entropy('class', Y).backward()
    assert all(p.grad.numpy().any() for p in adapters.parameters()) and x.grad.numpy().any()
    assert all(t.grad is None for t in old)
    with pytest.raises(ExecScopeRequiredError): model(x).cross_entropy('class', Y).backward()


def test_only_a_part_is_named():
    model = net()
    old = [*model.parameters()]
    adapters = attach(model, 'layers.1.w', **CONFIG)
    assert list(adapters) == ['layers.1.w']
    assert model.layers[0].w is not old[0] and not model.layers[0].w.requires_grad
    assert np.shares_memory(model.layers[0].w.numpy(), old[0].numpy())
    adapters.detach()
    head = attach(model.layers[1], 'w', **CONFIG)
    assert list(head) == ['w'] and model.layers[0].w is old[0]


@pytest.mark.parametrize('names, found', [
    ('w', 'a.w b.0.w b.1.w'), ('0.w', 'b.0.w'), ('b.1.w', 'b.1.w'), ('b.*', 'b.0.w b.1.w'),
    (['b.1.w', 'a.w', 'a.w'], 'a.w b.1.w'), ('*w', 'a.w b.0.w b.1.w'), (('a.w', '*.1.*'), 'a.w b.1.w')])
def test_names(names, found):
    def linear(): return Linear(3, 2, seed=0, bias=False)
    assert list(attach({'a': linear(), 'b': [linear(), linear()]}, names, **CONFIG)) == found.split()


def test_axes_in_front_and_behind():
    for tags in ('a b in', 'in a b', 'a in b'):
        shape = [{'a': 2, 'b': 3, 'in': 8}[t] for t in tags.split()]
        x, model = constant(uniform(shape, 4), tags), Layer(bases()['f32'])
        adapters = attach(model, 'w', **CONFIG)
        fill(adapters)
        y = model(x)
        assert y.tags == (*[t for t in tags.split() if t != 'in'], 'out')
        adapters.merge()
        np.testing.assert_allclose(model(x).numpy(), y.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize('rank, p', [(1, 0.0), (4, 0.0), (1, 0.999), (4, 0.999)])
def test_extreme_ranks_and_rates(rank, p):
    model, opt = Layer(variable(uniform((4, 8), 5), 'out in')), SGD(lr=0.01)
    adapters = attach(model, 'w', rank=rank, alpha=1, dropout_p=p, seed=0)
    adapters.register_params(opt)
    for _ in range(3):
        with exec_scope(), adapters.training(): model(X).sum_all().backward()
        opt.step()
    assert all(np.isfinite(t.numpy()).all() for t in adapters.parameters())


# --- where weights lie

class Slotted:
    __slots__ = ('w', 'b')
    def __init__(self): self.w, self.b = bases()['f32 variable'], variable(np.zeros(4), 'out')

class Stored:
    "Names its weight in its own way."
    def __init__(self): self._active = bases()['f32 variable']
    def __fucina_children__(self): yield None, self._active

@dataclass
class Record:
    w: Tensor


class SlottedStored:
    "The same, without a dictionary; the second name is that of an attribute."
    __slots__ = ('_first', 'second')
    def __init__(self): self._first, self.second = bases()['f32 variable'], bases()['f16']
    def __fucina_children__(self): yield 'first', self._first; yield 'second', self.second

class Both:
    "One tensor in two attributes, each under its own name."
    def __init__(self): self.a = self.b = bases()['f32 variable']
    def __fucina_children__(self): yield 'a', self.a; yield 'b', self.b


def test_places_of_children_by_name():
    for model, names in ((SlottedStored(), ('first', 'second')), (Both(), ('a', 'b'))):
        before = snapshot(model)
        attach(model, names, **CONFIG).detach()
        assert_same(before, snapshot(model))
        adapters = attach(model, names, **CONFIG)
        assert all(isinstance(w, Adapted) for _, w in model.__fucina_children__())
        fill(adapters)
        adapters.merge()
        assert [w is old for (_, w), (_, old, *_) in zip(model.__fucina_children__(), before)] == [True, True]
    assert model.a is model.b


def test_places():
    model = {'slots': Slotted(), 'stored': Stored(), 'record': Record(bases()['f16']), 7: bases()['bf16'],
             'list': [bases()['f32 variable'], (Layer(bases()['packed']),)]}
    before = snapshot(model)
    names = ['slots.w', 'stored', 'record.w', '7', 'list.0', 'list.1.0.w']
    adapters = attach(model, names, **CONFIG)
    assert list(adapters) == names
    assert all(isinstance(w, Adapted) for w in (
        model['slots'].w, model['stored']._active, model['record'].w, model[7], model['list'][0],
        model['list'][1][0].w))
    assert not model['slots'].b.requires_grad
    assert [n for n, _ in walk(model)] == [n for n, w, *_ in before if isinstance(w, Tensor)
                                           for n in [n] if n != 'list.1.0.w']
    adapters.detach()
    assert_same(before, snapshot(model))


@pytest.mark.parametrize('kind', list(bases()))
def test_bases(kind, monkeypatch):
    model = Layer(bases()[kind])
    before = snapshot(model)
    plain = model(X).numpy()
    adapters = attach(model, 'w', **CONFIG)
    assert np.array_equal(model(X).numpy(), plain)
    opt, losses = AdamW(lr=0.05), []
    adapters.register_params(opt)
    for _ in range(5):
        with exec_scope():
            y = model(X)
            loss = (y * y).sum_all()
            loss.backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    assert losses[-1] < losses[0]
    learned, whole = model(X).numpy(), model.w.to('f32')
    np.testing.assert_allclose(X.dot(whole, 'in').numpy(), learned, rtol=0, atol=1e-4)
    assert whole.requires_grad is False and model.w.dtype == ('Int8' if kind == 'packed' else kind.split()[0])
    if kind == 'packed':
        with pytest.raises(DTypeError, match=r'w. is a Int8.*to\("f32"\)'): adapters.merge()
        assert isinstance(model.w, Adapted) and np.array_equal(model(X).numpy(), learned)
        adapters.detach()
        return assert_same(before, snapshot(model))
    adapter, base = adapters['w'], bases()[kind].detach()
    if model.w.dtype == 'f32': adapter.merge_into(base)
    else: base = (adapter.merge_f16 if model.w.dtype == 'f16' else adapter.merge_bf16)(base)
    version = before[0][1]._version
    adapters.merge()
    assert model.w is before[0][1] and model.w.is_leaf == kind.endswith('variable')
    assert model.w.data_const().tobytes() == base.data_const().tobytes()
    assert not kind.endswith('variable') or model.w._version > version
    atol = {'f32': 1e-4, 'f16': 0.05, 'bf16': 0.3}[model.w.dtype]
    np.testing.assert_allclose(model(X).numpy(), learned, rtol=0, atol=atol)


def test_tied_weights():
    w = variable(uniform((4, 4), 5), 'out in')
    model = {'first': Layer(w), 'again': [w], 'other': variable(np.ones((4, 4)), 'out in')}
    with pytest.raises(LoraError, match="'again.0' is the same tensor as 'first.w'"):
        attach(model, 'w', **CONFIG)
    assert model['first'].w is w
    adapters = attach(model, ['again.0', 'w', 'other'], **CONFIG)
    assert list(adapters) == ['first.w', 'other'] and model['again'][0] is model['first'].w
    assert np.array_equal(adapters['other'].a.numpy(),
                          Adapter('in', 'out', 4, 4, rank=2, alpha=4, seed=at(7, 1)).a.numpy())
    assert '32 parameters train, 32 are frozen' in repr(adapters)
    assert [n for n, _ in walk(model)] == ['first.w', 'again.0', 'other']
    fill(adapters)
    x = constant(uniform((2, 4), 3), 'batch in')
    with exec_scope():
        (x.dot(model['first'].w, 'in') + x.dot(model['again'][0], 'in')).sum_all().backward()
    tied = adapters['first.w'].a.grad.numpy()
    with exec_scope(): x.dot(model['first'].w, 'in').sum_all().backward()
    np.testing.assert_allclose(adapters['first.w'].a.grad.numpy(), 1.5 * tied, rtol=1e-5)
    expected = model['first'].w.to('f32').numpy()
    adapters.merge()
    assert model['first'].w is w and model['again'][0] is w and np.array_equal(w.numpy(), expected)


def test_a_shared_layer_is_one_place_with_two_names():
    layer = Linear(3, 2, seed=0)
    model, w = [layer, layer], layer.w
    with pytest.raises(LoraError, match="'1.w' is the same tensor as '0.w'"): attach(model, '0.w', **CONFIG)
    adapters = attach(model, 'w', **CONFIG)
    assert list(adapters) == ['0.w']
    adapters.detach()
    assert layer.w is w


def test_a_copy_of_the_model_has_its_own_adapters():
    model = net()
    adapters = attach(model, 'w', dropout_p=0.5, **CONFIG)
    fill(adapters)
    other, others = deepcopy((model, adapters))
    assert np.array_equal(other(X).numpy(), model(X).numpy())
    others['layers.0.w'].b.value[:] = 9
    assert not np.array_equal(other(X).numpy(), model(X).numpy())
    quiet = model(X).numpy()
    with others.training():
        assert np.array_equal(model(X).numpy(), quiet)
        masked = other(X).numpy()
    assert not np.array_equal(other(X).numpy(), masked)
    learned = other(X).numpy()
    others.merge()
    np.testing.assert_allclose(other(X).numpy(), learned, rtol=0, atol=1e-4)
    assert isinstance(model.layers[0].w, Adapted) and other.layers[0].w.is_leaf
    other, others = deepcopy((model, adapters))
    others.detach()
    assert_equal([p.numpy() for p in other.parameters()], [p.numpy() for p in net().parameters()])


# --- what the weight does not do

def test_uses_that_are_refused():
    model = net()
    attach(model, 'w', **CONFIG)
    w = model.layers[0].w
    with pytest.raises(TagError, match="'layers.0.w' has an adapter that sums over 'in', its input, not 'h'"):
        constant(np.ones((2, 5)), 'batch h').dot(w, 'h')
    with pytest.raises(TagError, match="'layers.0.w' makes an axis 'h'"):
        constant(np.ones((5, 8)), 'h in').dot(w, 'in')
    with pytest.raises(TypeError, match='Adapted'): X.einsum(w, 'batch h')
    with pytest.raises(TypeError, match='Adapted'): gather(w, 'h', [0, 1])
    with pytest.raises(TypeError, match='Adapted'): AdamW().add_param(w)
    assert w.to('f16').dtype == 'f16' and w.size == 40
    assert 'layers.0.w' in repr(w) and 'Linear(in=8 -> h=5)' in repr(model)


# --- undone

def test_detach_gives_the_same_objects_back():
    model = net()
    with exec_scope(): model(X).cross_entropy('class', Y).backward()
    before, grads = snapshot(model), [p.grad.numpy() for p in model.parameters()]
    adapters = attach(model, 'w', **CONFIG)
    fill(adapters)
    adapters.detach()
    assert_same(before, snapshot(model))
    assert all(np.array_equal(p.grad.numpy(), g) for p, g in zip(model.parameters(), grads))
    for call in (adapters.detach, adapters.merge, adapters.training().__enter__):
        with pytest.raises(LoraError, match='in no model'): call()
    assert 'no longer attached' in repr(adapters)
    attach(model, 'w', **CONFIG)


def test_a_field_replaced_meanwhile_is_noticed():
    model = net()
    adapters = attach(model, 'w', **CONFIG)
    own, model.layers[1].w = model.layers[1].w, variable(np.ones((3, 5)), 'class h')
    for call in (adapters.detach, adapters.merge):
        with pytest.raises(LoraError, match='layers.1.w. was replaced'): call()
    model.layers[1].w = own
    last = model.layers.pop()
    adapters.detach()                                          # the layer itself is still there
    assert last.w.is_leaf and model.layers[0].w.is_leaf


# --- refused before any change

@dataclass(frozen=True)
class Fixed:
    w: Tensor

class Stubborn:
    def __init__(self): self.__dict__['w'] = bases()['f32 variable']
    def __setattr__(self, name, value): raise AttributeError('not mine')


def mistakes():
    var = bases()['f32 variable']
    one = Layer(var)
    yield {'a': one, 'b': Layer(var)}, 'a.w', {}, LoraError, "'b.w' is the same tensor as 'a.w'"
    yield [one, Fixed(bases()['bf16'])], 'w', {}, LoraError, "'1.w': a Fixed"
    yield [one, (bases()['f16'],)], ['w', '1.0'], {}, LoraError, "'1.0': a tuple"
    yield [one, (bases()['bf16 variable'],)], 'w', {}, LoraError, "'1.0': a tuple"
    yield [one, MappingProxyType({'w': bases()['f16']})], 'w', {}, LoraError, "'1.w': a mappingproxy"
    yield [one, Stubborn()], 'w', {}, LoraError, "'1.w': a Stubborn"
    yield [one], 'v', {}, UnknownAdapterNameError, "'v'.*0.w"
    yield [one], ['w', '0'], {}, UnknownAdapterNameError, "'0'"
    yield [one], 'x*', {}, UnknownAdapterNameError, r"'x\*'"
    yield [one], [], {}, UnknownAdapterNameError, 'no target'
    yield [], 'w', {}, UnknownAdapterNameError, 'none'
    yield [one], [3], {}, TypeError, 'int'
    yield net(), 'b', {'rank': 1}, InvalidShapeError, 'layers.0.b'
    yield net(), '*', {}, InvalidShapeError, 'layers.0.b'
    yield [one, variable(np.ones((2, 2, 2)), 'a b c')], ['w', '1'], {}, InvalidShapeError, "'1' "
    yield [one, constant([[1, 2]], 'out in')], ['w', '1'], {}, DTypeError, "'1' "
    yield [one, var * 2.0], ['w', '1'], {}, NotAVariableError, "'1' "
    yield [one, Linear(1, 9, seed=0)], 'w', {}, InvalidRankError, "'1.w': "
    yield [one], 'w', {'rank': 0}, InvalidRankError, "'0.w': "
    yield [one], 'w', {'rank': 5}, InvalidRankError, "'0.w': "
    yield [one], 'w', {'dropout_p': 1.0}, InvalidDropoutError, "'0.w': "
    yield [one], 'w', {'dropout_p': float('nan')}, InvalidDropoutError, "'0.w': "
    yield [one], 'w', {'rank': 1.5}, TypeError, 'rank'
    yield [one], 'w', {'seed': 'x'}, TypeError, 'str'
    yield [one, variable(np.ones((2, 3)), 'lora_r in')], ['w', '1'], {}, TagError, "'1': "
    yield var, '*', {}, TypeError, 'Tensor alone'
    twice = CheckpointDuplicateNameError
    yield {'a.b': one, 'a': {'b': Layer(bases()['f32'])}}, 'w', {}, twice, "two weights are called 'a.b.w'"
    yield {1: one, '1': Layer(bases()['f32'])}, 'w', {}, twice, "two weights are called '1.w'"
    yield {'w': var, 'x.y': bases()['f16'], 'x': {'y': bases()['f16']}}, 'w', {}, twice, "'x.y'"
    shared = Layer(var.detach())
    for names in ('w', '0.w', '1.w'):
        yield [one, shared], names, {}, LoraError, "'(0|1).w' and '(0|1).w' are two tensors over one memory"
    yield [one, Layer(var.detach().narrow('out', 1, 2))], '0.w', {}, LoraError, "'1.w' and '0.w' are two"


@pytest.mark.parametrize('case', range(33))
def test_mistakes_change_nothing(case):
    model, targets, config, error, said = list(mistakes())[case]
    before = snapshot(model)
    with pytest.raises(error, match=said): attach(model, targets, **CONFIG | config)
    assert_same(before, snapshot(model))
    assert len(list(mistakes())) == 33


def test_halves_of_one_memory_are_apart():
    whole = constant(uniform((8, 8), 5), 'out in')
    model = [Layer(whole.narrow('out', 0, 4)), Layer(whole.narrow('out', 4, 4))]
    with exec_scope(): gone = bases()['f32'].scale(2)
    adapters = attach([*model, gone], '*.w', **CONFIG)         # not a target: nobody asks
    fill(adapters)
    assert list(adapters) == ['0.w', '1.w']
    learned = [layer(X).numpy() for layer in model]
    adapters.merge()
    for layer, y in zip(model, learned): np.testing.assert_allclose(layer(X).numpy(), y, rtol=0, atol=1e-4)


def test_a_released_target():
    with exec_scope(): gone = bases()['f32'].scale(2)
    model = [Layer(bases()['f32 variable']), Layer(gone)]
    held = model[0].w
    with pytest.raises(UseAfterScopeError, match='1.w'): attach(model, 'w', **CONFIG)
    assert model[0].w is held and model[1].w is gone


def test_a_model_with_adapters_gets_no_more():
    model = net()
    adapters = attach(model, 'layers.0.w', **CONFIG)
    before = [model.layers[0].w, model.layers[1].w]
    for targets in ('w', 'layers.1.w'):
        with pytest.raises(LoraError, match='layers.0.w. has an adapter'): attach(model, targets, **CONFIG)
    assert before == [model.layers[0].w, model.layers[1].w]
    adapters.merge()
    attach(model, 'w', **CONFIG)


def test_merge_changes_all_or_nothing():
    read_only = uniform((4, 8), 6)
    read_only.flags.writeable = False
    for last, error in ((constant(read_only, 'out in', copy=False), ReadOnlyDataError),
                        (Int8(uniform((4, 8), 6), 'out in'), DTypeError)):
        model = [Layer(bases()['f32']), Layer(bases()['bf16']), Layer(last)]
        before = snapshot(model)
        adapters = attach(model, 'w', **CONFIG)
        fill(adapters)
        held = [layer.w for layer in model]
        with pytest.raises(error, match='2.w'): adapters.merge()
        assert held == [layer.w for layer in model]
        adapters.detach()
        assert_same(before, snapshot(model))


@pytest.mark.parametrize('bad', ['memory', 'shape', 'owner'])
def test_merge_that_fails_at_the_second_weight(bad, monkeypatch):
    class Once(Layer):
        "Does not take back what it gave away."
        stuck = False
        def __setattr__(self, name, value):
            if self.stuck: raise AttributeError('stuck')
            super().__setattr__(name, value)

    model = [Layer(bases()['f32 variable']), Once(bases()['f16']), Layer(bases()['bf16'])]
    before = snapshot(model)
    adapters = attach(model, 'w', **CONFIG)
    fill(adapters)
    held, learned, own = [layer.w for layer in model], model[0](X).numpy(), adapters['1.w'].b
    with monkeypatch.context() as patch:
        if bad == 'shape': adapters['1.w'].b = variable(np.ones((3, 2)), 'out lora_r')
        elif bad == 'owner': patch.setattr(Once, 'stuck', True)
        else:
            def full(w): raise MemoryError
            patch.setattr(adapters['1.w'], 'merge_f16', full)
        for call in (adapters.merge, *[adapters.detach] * (bad == 'owner')):
            with pytest.raises((MemoryError, ValueError, LoraError)): call()
            assert all(layer.w is w for layer, w in zip(model, held))
            assert np.array_equal(model[0](X).numpy(), learned)
    adapters['1.w'].b = own
    adapters.detach()
    assert_same(before, snapshot(model))


class Signalled(Layer):
    "A Ctrl-C comes whenever its weight is exchanged."
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if 'fires' in self.__dict__: os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize('last', [0, 2])
def test_interrupted(last):
    model = [Signalled(bases()['f32 variable']) for _ in range(3)]
    before = snapshot(model)
    model[last].__dict__['fires'] = True
    with pytest.raises(KeyboardInterrupt): attach(model, 'w', **CONFIG)
    assert_same(before, snapshot(model))                       # nobody has the adapters, and no field
    del model[last].fires
    for call in ('detach', 'merge'):
        adapters = attach(model, 'w', **CONFIG)
        fill(adapters)
        expected = [(layer.w.to('f32') if call == 'merge' else layer.w.base).numpy().copy() for layer in model]
        for layer in model: layer.__dict__['fires'] = True
        with pytest.raises(KeyboardInterrupt): getattr(adapters, call)()
        assert [layer.w for layer in model] == [w for _, w, *_ in before]
        assert_equal([layer.w.numpy() for layer in model], expected)
        with pytest.raises(LoraError, match='in no model'): adapters.detach()
        for layer in model: del layer.fires


def test_interrupted_again_on_the_way_back():
    class Late(Signalled):
        "The first Ctrl-C comes with the last weight, more of them on the way back."
        def __setattr__(self, name, value):
            if isinstance(value, Tensor): self.__dict__['fires'] = True
            super().__setattr__(name, value)
    model = [Late.__new__(Late) for _ in range(3)]
    for layer in model: layer.__dict__['w'] = bases()['f32 variable']
    model[2].__dict__['fires'] = True
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt): attach(model, 'w', **CONFIG)
    assert_same(before, snapshot(model))


def test_a_micro_batch_under_way(tmp_path):
    model = net()
    adapters = attach(model, 'w', dropout_p=0.5, **CONFIG)
    with pytest.raises(ZeroDivisionError), adapters.training():
        for call in (adapters.merge, adapters.detach, adapters.training().__enter__,
                     lambda: adapters.load(tmp_path / 'a'), lambda: adapters.resume(tmp_path),
                     lambda: model.layers[0].w.to('f32')):
            with pytest.raises(LoraError, match='under way'): call()
        seen = model(X).numpy()
        raise ZeroDivisionError
    assert adapters.step == 0                                  # it has not happened
    with adapters.training(): assert np.array_equal(model(X).numpy(), seen) or fill(adapters)
    assert adapters.step == 1
    assert model.layers[0].w.to('f32').shape == (5, 8)


def test_dropout_is_on_for_one_thread_and_one_model():
    model = net()
    adapters = attach(model, 'w', dropout_p=0.5, **CONFIG)
    fill(adapters)
    quiet, seen = model(X).numpy(), []
    with adapters.training():
        other, others = deepcopy((model, adapters))
        thread = threading.Thread(target=lambda: seen.append(model(X).numpy()))
        thread.start()
        thread.join()
        masked = model(X).numpy()
    assert np.array_equal(seen[0], quiet) and not np.array_equal(masked, quiet)
    assert np.array_equal(other(X).numpy(), quiet) and others.step == 0
    with others.training(): assert np.array_equal(other(X).numpy(), masked)
    others.detach()


# --- training

def start(p=0.3, model=None):
    model = net() if model is None else model
    adapters, opt = attach(model, 'w', dropout_p=p, **CONFIG), AdamW(lr=0.02)
    adapters.register_params(opt)
    return model, adapters, opt


def steps(model, adapters, opt, n, window=1, x=X, forward=None):
    "`n` optimizer steps of `window` micro-batches."
    losses, forward = [], forward or model
    for _ in range(n):
        for _ in range(window):
            with exec_scope(), adapters.training():
                loss = forward(x).cross_entropy('class', Y).scale(1 / window)
                loss.backward()
                losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses


def values(adapters): return [p.numpy().copy() for p in adapters.parameters()]


def assert_equal(a, b):
    assert len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def test_resume_in_the_middle_is_exact(tmp_path):
    with ExecContext(gemm='pinned'):
        model, adapters, opt = start()
        losses = steps(model, adapters, opt, 5, window=2)
        save_checkpoint(tmp_path, adapters, opt, adapters.state(learning_rate=0.02, accum_steps=2),
                        tensor_file=ADAPTERS_STATE_FILE, durable=False)
        rest = steps(model, adapters, opt, 5, window=2)
        other, others, opt2 = start()
        state = others.resume(tmp_path, opt2)
        assert (state.step, state.seed, state.accum_steps, others.step) == (10, 7, 2, 10)
        assert steps(other, others, opt2, 5, window=2) == rest and rest[0] < losses[0]
    assert_equal(values(adapters), values(others))
    a, b = io.BytesIO(), io.BytesIO()
    opt.save_state(a)
    opt2.save_state(b)
    assert a.getvalue() == b.getvalue()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        'adapters.safetensors', 'optimizer.fucina', 'trainer_state.json']


def test_resume_of_other_adapters_changes_nothing(tmp_path):
    model, adapters, opt = start(0.1)
    steps(model, adapters, opt, 2)
    save_checkpoint(tmp_path, adapters, opt, adapters.state(), tensor_file=ADAPTERS_STATE_FILE)
    state = load_trainer_state(tmp_path)
    assert state == TrainerState(step=2, seed=7, lora_rank=2, lora_alpha=4.0,
                                 lora_dropout_p=float(np.float32(0.1)))
    for wrong, name in (({'rank': 1}, 'lora_rank'), ({'alpha': 3}, 'lora_alpha'),
                        ({'dropout_p': 0.2}, 'lora_dropout_p'), ({'seed': 8}, 'seed')):
        other = net()
        others, opt2 = attach(other, 'w', **{**CONFIG, 'dropout_p': 0.1, **wrong}), AdamW()
        others.register_params(opt2)
        before = values(others)
        with pytest.raises(CheckpointConfigMismatchError, match=f'{name} is'): others.resume(tmp_path, opt2)
        assert_equal(before, values(others))
        assert others.step == 0 and not opt2.slots[0].m.any()
    _, others, opt2 = start(0.1)
    with warnings.catch_warnings(), pytest.raises(CheckpointConfigMismatchError, match='1e.300'):
        warnings.simplefilter('error')
        others.check_state(TrainerState(step=2, seed=7, lora_rank=2, lora_alpha=1e300, lora_dropout_p=0.1))
    short = TrainerState(step=2, seed=7, lora_rank=2, lora_alpha=4, lora_dropout_p=0.1)
    others.check_state(short)                                  # written by hand, not from float32
    for gone in ('lora_rank', 'lora_alpha', 'lora_dropout_p'):
        with pytest.raises(CheckpointConfigMismatchError, match=f'{gone} is None'):
            others.check_state(TrainerState(**{**vars(short), gone: None}))
    save_checkpoint(tmp_path, adapters, SGD(), adapters.state(), tensor_file=ADAPTERS_STATE_FILE)
    before = values(others)
    with pytest.raises(FucinaError): others.resume(tmp_path, opt2)
    assert others.step == 0
    assert_equal(before, values(others))


def test_state_does_not_contradict_the_adapters():
    model, adapters, opt = start(0.1)
    steps(model, adapters, opt, 2)
    assert adapters.state(step=2, seed=7, lora_rank=2, learning_rate=0.5).learning_rate == 0.5
    for wrong in ({'step': 1}, {'seed': 8}, {'lora_rank': 9}, {'lora_alpha': 1}, {'lora_dropout_p': 0.5}):
        with pytest.raises(CheckpointConfigMismatchError, match=f'{[*wrong][0]} is'): adapters.state(**wrong)
    with pytest.raises(TypeError): adapters.state(rank=2)
    for seed in (-1, 2**64 - 1, 2**65 - 1):                    # a file has 64 bits
        state = attach(net(), 'w', **{**CONFIG, 'seed': seed}).state()
        assert state.seed == 2**64 - 1


def test_accumulation_over_four_micro_batches():
    parts = [constant(X.numpy() * (k + 1), 'batch in') for k in range(4)]
    with ExecContext(gemm='pinned'):
        model, adapters, _ = start()
        fill(adapters)
        single = []
        for x in parts:
            with exec_scope(), adapters.training(): model(x).cross_entropy('class', Y).backward()
            single.append([p.grad.numpy().copy() for p in adapters.parameters()])
            for p in adapters.parameters(): p.zero_grad()
        model, adapters, _ = start()
        fill(adapters)
        for x in parts:
            with exec_scope(), adapters.training(): model(x).cross_entropy('class', Y).backward()
    for k, p in enumerate(adapters.parameters()):
        total = single[0][k]
        for g in single[1:]: total = total + g[k]
        assert np.array_equal(p.grad.numpy(), total)


def block(x, w, b): return (x.dot(w, 'in') + b).tanh()


@pytest.mark.parametrize('inside', [True, False])
def test_checkpointed_recompute_sees_the_same_masks(inside):
    def gradients(apply):
        model, adapters, _ = start(0.5)
        fill(adapters)
        l1, l2 = model.layers
        with ExecContext(gemm='pinned'), exec_scope():
            losses = []
            for _ in range(2):                   # both forward passes before the first backward
                with adapters.training():
                    h = apply(block, X, l1.w, l1.b)
                    losses.append((h.dot(l2.w, 'h') + l2.b).cross_entropy('class', Y))
                    if inside: losses[-1].backward()
            if not inside:
                for loss in losses: loss.backward()
            return [loss.item() for loss in losses], [p.grad.numpy().copy() for p in adapters.parameters()]

    plain, g1 = gradients(lambda f, *xs: f(*xs))
    again, g2 = gradients(checkpoint)
    assert plain == again and plain[0] != plain[1]
    assert_equal(g1, g2)
    with pytest.raises(fucina.errors.CheckpointCapturedVariableError), exec_scope():
        model, *_ = start()
        checkpoint(lambda x: x.dot(model.layers[0].w, 'in'), variable(X.numpy(), 'batch in'))
    with pytest.raises(TypeError, match='takes tensors'): checkpoint(block, X, 'w', 'b')


def test_muon_trunk_and_adamw_adapters(tmp_path):
    def begin():
        model = MLP((8, 6, 5, 3), seed=3, tags='in h1 h2 class')
        head = attach(model.layers[2], 'w', dropout_p=0.3, **CONFIG)
        muon, adamw = Muon(lr=0.02), AdamW(lr=0.02)
        for k, layer in enumerate(model.layers[:2]):
            muon.add_param(layer.w, name=f'layers.{k}.w')
            adamw.add_param(layer.b, name=f'layers.{k}.b')
        head.register_params(adamw)
        run = ParamRegistry()
        for k in (0, 1): run.collect_prefixed(f'layers.{k}', model.layers[k])
        run.collect_prefixed('head', head)
        return model, head, OptimizerSet([muon, adamw]), run

    with ExecContext(gemm='pinned'):
        model, head, opt, run = begin()
        losses = steps(model, head, opt, 6)
        save_checkpoint(tmp_path, run, opt, head.state(), durable=False)
        rest = steps(model, head, opt, 4)
        model2, head2, opt2, run2 = begin()
        assert head2.resume(tmp_path, opt2, model=run2).step == head2.step == 6
        assert steps(model2, head2, opt2, 4) == rest and rest[-1] < losses[0]
    for a, b in zip(run, run2): assert np.array_equal(a.array, b.array)
    assert 'head.w.lora_a' in [v.name for v in run]


# --- files and optimizers

def test_save_and_load(tmp_path):
    path = tmp_path / 'a.safetensors'
    model, adapters, opt = start()
    steps(model, adapters, opt, 2)
    adapters.save(path)
    names = [n for n, _ in walk(adapters)]
    assert names == [f'layers.{k}.w.lora_{ab}' for k in (0, 1) for ab in 'ab']
    with fucina.safetensors.File.load_mmap(path) as file: assert sorted(file.names()) == sorted(names)
    other, others, _ = start()
    others.load(path)
    assert_equal(values(adapters), values(others))
    assert np.array_equal(other(X).numpy(), model(X).numpy())
    registry = ParamRegistry()
    registry.collect(adapters)
    assert [v.name for v in registry] == names and all(v.trainable for v in registry)

    for targets, rank, error in (('layers.0.w', 2, CheckpointUnknownNameError),
                                 ('w', 1, CheckpointShapeMismatchError)):
        few = attach(net(), targets, rank=rank, alpha=4, seed=1)
        before = values(few)
        with pytest.raises(error): few.load(path)
        assert_equal(before, values(few))
    few.save(path)
    attach(net(), 'layers.0.w', rank=2, alpha=4, seed=1).save(path)
    before = values(others)
    with pytest.raises(CheckpointMissingEntryError): others.load(path)
    assert_equal(before, values(others))
    one = attach([Layer(variable(np.ones((5, 8)), 'h in'))], 'w', rank=2, alpha=4, seed=2)
    one.load(path, aliases={f'layers.0.w.lora_{ab}': f'0.w.lora_{ab}' for ab in 'ab'})


def test_files_of_detached_adapters(tmp_path):
    model, adapters, opt = start()
    save_checkpoint(tmp_path, adapters, opt, adapters.state(), tensor_file=ADAPTERS_STATE_FILE, durable=False)
    before = values(adapters)
    adapters.detach()
    for call in (lambda: adapters.load(tmp_path / ADAPTERS_STATE_FILE), lambda: adapters.resume(tmp_path, opt)):
        with pytest.raises(LoraError, match='in no model'): call()
    assert_equal(values(adapters), before)
    fucina.save(tmp_path / 'again', adapters)                   # writing is harmless
    assert (tmp_path / 'again').read_bytes() == (tmp_path / ADAPTERS_STATE_FILE).read_bytes()


def test_two_sets_in_one_optimizer():
    model = net()
    sets, opt = [attach(layer, 'w', **CONFIG) for layer in model.layers], AdamW()
    sets[0].register_params(opt)
    with pytest.raises(CheckpointDuplicateNameError, match="'w.lora_a'.*prefix"): sets[1].register_params(opt)
    assert len(opt.slots) == 2
    sets[1].register_params(opt, 'layers.1')
    assert [slot.param.name for slot in opt.slots] == ['w.lora_a', 'w.lora_b', 'layers.1.w.lora_a', 'layers.1.w.lora_b']


def test_layers_list_what_trains():
    model = net()
    old = model.parameters()
    shown = repr(model)
    adapters = attach(model, 'layers.0.w', **CONFIG)
    assert model.parameters() == [] and repr(model) == shown
    adapters.detach()
    assert all(a is b for a, b in zip(model.parameters(), old)) and len(old) == 4


def test_optimizers_get_all_or_none():
    model, adapters, opt = start()
    assert [s.param.name for s in opt.slots] == [n for n, _ in walk(adapters)]
    late = AdamW()
    late.add_param(adapters['layers.1.w'].b)
    with pytest.raises(DuplicateParamError): adapters.register_params(late)
    assert len(late.slots) == 1
    registry = ParamRegistry()
    registry.collect(adapters)
    other = AdamW()
    registry.add_params_to(other)
    assert len(other.slots) == 4 and len(adapters.parameters()) == 4


def test_table():
    model = net()
    adapters = attach(model, 'w', dropout_p=0.25, **CONFIG)
    text, html = repr(adapters), adapters._repr_html_()
    for word in ('Adapters of 2 weights', 'layers.0.w', 'in=8 -> h=5', '26', '40', '65.0%', '42 parameters train',
                 '63 are frozen', 'rank 2', 'alpha 4', 'dropout 0.25'):
        assert word in text, word
        assert word.replace('>', '&gt;') in html, word
    assert 'dropout' not in repr(attach(net(), 'w', **CONFIG))
    assert adapters.get('layers.9.w') is None and 'layers.0.w' in adapters
