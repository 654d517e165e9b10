"""Every optimizer in every storage: resume, threads, gradients of all kinds. A new one adds a row."""
import copy
import gc
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from optimizers import at_any_number_of_threads, load, saved, variable

import fucina
from fucina import optim
from fucina.kernels import set_workers
from fucina.optim import param
from fucina.rng import gaussian_fill, uniform_fill

f32 = np.float32
BOTH = dict(state_dtype='bf16', second_moment_dtype='bf16')
FALLBACK = dict(fallback=optim.AdamWConfig(lr=0.05, **BOTH))
ROWS = {  # name: optimizer, settings, and again for each storage of the state
    'sgd': ('SGD', dict(lr=0.1, weight_decay=0.1), {}),
    'momentum': ('SGD', dict(lr=0.1, momentum=0.9, dampening=0.1), dict(state_dtype='bf16')),
    'nesterov': ('SGD', dict(lr=0.1, momentum=0.9, nesterov=True), dict(state_dtype='bf16')),
    'adam': ('Adam', dict(lr=0.05, weight_decay=0.1), dict(state_dtype='bf16'),
             dict(second_moment_dtype='bf16'), BOTH),
    'adamw': ('AdamW', dict(lr=0.05, weight_decay=0.1), dict(state_dtype='bf16'),
              dict(second_moment_dtype='bf16'), BOTH),
    'muon': ('Muon', dict(lr=0.05, weight_decay=0.1), dict(state_dtype='bf16'), FALLBACK),
    'muon rms': ('Muon', dict(lr=0.05, momentum=0.4, nesterov=False, scale='match_rms_adamw')),
    'apollo': ('Apollo', dict(lr=0.05, rank=3, update_proj_gap=3, weight_decay=0.1)),
    'lion': ('Lion', dict(lr=0.01, weight_decay=0.1), dict(state_dtype='bf16')),  # of a guide
    'apollo tensor': ('Apollo', dict(lr=0.01, rank=1, scale_type='tensor', scale=2.0, seed=2**64 - 1)),
}
GUIDE = Path(__file__).parents[1]/'nbs'/'32e_own_optimizer.ipynb'


def written_in(guide):
    "The class that a guide builds, from its cells."
    names = {'__name__': 'guide'}
    for cell in json.loads(guide.read_text(encoding='utf-8'))['cells']:
        code = ''.join(cell['source'])
        if cell['cell_type'] == 'code' and not code.startswith('#| hide'): exec(code, names)
        if 'Lion' in names: return names['Lion']


kinds = {**vars(optim), 'Lion': written_in(GUIDE)}
CASES = {f'{name}{" " * bool(state)}{" ".join(f"{k[:6]}" for k in state)}':
         (kind, {**fields, **state}) for name, (kind, fields, *states) in ROWS.items()
         for state in ({}, *filter(None, states))}
SHAPES = {'scalar': (), 'one': (1,), 'vector': (9,), 'row': (1, 6), 'column': (6, 1), 'wide': (5, 7),
          'tall': (11, 3), 'filters': (3, 2, 4)}
every = pytest.mark.parametrize('kind, fields', list(CASES.values()), ids=list(CASES))
dtypes = pytest.mark.parametrize('dtype', ['f32', 'f16', 'bf16'])


@pytest.fixture(autouse=True)
def pinned():
    with fucina.ExecContext(gemm='pinned'): yield


def build(kind, fields, dtype='f32', shapes=SHAPES, values=None):
    "An optimizer of one parameter per shape; some have names."
    opt, ts = kinds[kind](**fields), {}
    for k, (name, shape) in enumerate(shapes.items()):
        start = uniform_fill(k, np.empty(shape, f32), -1, 1) if values is None else values[name]
        ts[name] = fucina.variable(start, len(shape), dtype=dtype) if values is None else \
            variable(start, dtype)
        opt.add_param(ts[name], name=name if k % 2 else None)
    return opt, ts


def give(ts, t, skip=()):
    for k, (name, p) in enumerate(ts.items()):
        if (t, name) in skip: p.zero_grad()
        else: p.set_grad(gaussian_fill(100 * t + k, np.empty(p.shape, f32), 1.0))


def run(opt, ts, steps, skip=(), limit=3.0):
    for t in steps:
        give(ts, t, skip)
        opt.clip_grad_norm(limit)
        opt.step()
        opt.zero_grad()


def bits_of(opt, ts):
    "All bits: parameters, masters, state."
    return [p.value.tobytes() for p in ts.values()], saved(opt)


def outcome(kind, fields, dtype, shapes, steps, limit=3.0):
    "All bits after some steps."
    opt, ts = build(kind, fields, dtype, shapes)
    run(opt, ts, range(steps), limit=limit)
    return bits_of(opt, ts)


@every
@dtypes
def test_resume_half_way_ends_on_the_same_bits(kind, fields, dtype):
    late = {(0, 'wide'), (1, 'wide'), (2, 'vector'), (4, 'row')}  # wide gets its first gradient late
    opt, ts = build(kind, fields, dtype)
    run(opt, ts, range(4), late)
    values, raw = {k: p.value.copy() for k, p in ts.items()}, saved(opt)
    run(opt, ts, range(4, 8), late)

    resumed, again = build(kind, fields, dtype, values=values)
    load(resumed, raw)
    run(resumed, again, range(4, 8), late)
    assert bits_of(resumed, again) == bits_of(opt, ts)
    assert [p.value.tobytes() for p in ts.values()] != [v.tobytes() for v in values.values()]


@every
@dtypes
def test_threads_change_no_bit(kind, fields, dtype, monkeypatch):
    monkeypatch.setattr(param, 'LEAST', 1)
    at_any_number_of_threads(
        lambda: outcome(kind, fields, dtype, dict(SHAPES, large=(300, 130)), 3))


@every
def test_large_parameters_and_threads(kind, fields):
    "A size at which the team is woken without any help."
    shapes = {'flat': (2**17 + 5,), 'matrix': (1031, 130)}
    if kind == 'Muon': shapes['matrix'] = (2**15 + 9, 4)
    at_any_number_of_threads(lambda: outcome(kind, fields, 'f32', shapes, 2))


@every
def test_plain_addresses(kind, fields):
    """Gradients held, replaced, freed and made anew, other threads, garbage collected between steps:
    the same bits as a run in which nothing of the kind happens."""
    shapes = {'vector': (9,), 'wide': (5, 7), 'large': (400, 90)}
    plain = outcome(kind, fields, 'f32', shapes, 12, np.inf)

    opt, ts = build(kind, fields, 'f32', shapes)
    held, rng = [], np.random.default_rng(0)
    for t in range(12):
        give(ts, t)
        if t % 2: held += [p.grad for p in ts.values()]            # a snapshot: copy on write
        if t % 3 == 0:
            for p in ts.values(): p.zero_grad()                    # freed, then made anew elsewhere
            held.append([np.empty(p.shape, f32) for p in ts.values()])
            give(ts, t)
        if t % 4 == 1:
            for p in ts.values():                                  # a pass that adds to what is there
                g = p.grad.numpy().copy()
                p.zero_grad()
                (p * fucina.constant(g, len(p.shape))).sum_all().backward()
        if t == 5: held.clear()
        old = set_workers(int(rng.integers(1, 8)))
        gc.collect()
        opt.clip_grad_norm(np.inf)
        opt.step()
        set_workers(old)
        if t % 5: opt.zero_grad()
    assert bits_of(opt, ts) == plain


@every
@dtypes
def test_zero_gradients(kind, fields, dtype):
    opt, ts = build(kind, fields, dtype)
    for _ in range(3):
        for p in ts.values(): p.set_grad(np.zeros(p.shape))
        opt.step()
    decay = 'weight_decay' in fields and fields['weight_decay'] != 0
    opt2, start = build(kind, fields, dtype)
    for k, p in ts.items():
        assert np.isfinite(p.to('f32').numpy()).all()
        if not decay and kind != 'AdamW': assert p.value.tobytes() == start[k].value.tobytes()
    assert opt.grad_squared_norm() == 0 and opt.clip_grad_norm(1.0) == 0


@every
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_named_and_stays_in_its_parameter(kind, fields, bad):
    opt, ts = build(kind, fields)
    give(ts, 0)
    g = ts['wide'].grad.numpy().copy()
    g[1, 2] = bad
    ts['wide'].set_grad(g)
    report = opt.finite_report()
    assert list(report.values()) == [(int(np.isnan(bad)), int(np.isinf(bad)), 35)]
    assert 'wide' in next(iter(report)) and not np.isfinite(opt.grad_squared_norm())
    others = optim.OptimizerSet([kinds[kind](), opt])
    assert list(others.finite_report()) == [f'1.{name}' for name in report]
    opt.step()
    for k, p in ts.items(): assert np.isfinite(p.numpy()).all() == (k != 'wide') or k == 'wide'
    ts['wide'].set_grad(np.zeros((5, 7)))
    assert opt.finite_report() == {}


@every
def test_large_gradients_have_a_norm(kind, fields):
    opt, w = kinds[kind](**fields), fucina.variable(np.zeros((16, 8)), 2)
    opt.add_param(w)
    w.set_grad(np.full((16, 8), 1e19))
    assert opt.grad_squared_norm() == 128 * float(f32(1e19))**2 and opt.finite_report() == {}
    assert opt.clip_grad_norm(1.0) == pytest.approx(128**0.5 * 1e19)
    opt.step()
    assert np.isfinite(w.numpy()).all()


@every
def test_gradients_of_every_memory_layout(kind, fields):
    g, found = gaussian_fill(3, np.empty((6, 4), f32), 1.0), []
    frozen = g.copy()
    frozen.flags.writeable = False
    for grad in (g, np.asfortranarray(g), frozen, np.repeat(g, 2, 1)[:, ::2], g.astype(float), g.tolist()):
        opt, ts = build(kind, fields, shapes={'m': (6, 4)})
        for _ in range(2):
            ts['m'].set_grad(grad)
            opt.clip_grad_norm(0.5)
            opt.step()
        found.append(bits_of(opt, ts))
    assert found[1:] == found[:-1] and (frozen == g).all()


@every
def test_a_misfit_at_the_last_slot_stops_everything(kind, fields):
    opt, ts = build(kind, fields)
    give(ts, 0)
    before = bits_of(opt, ts)
    ts['vector']._node.grad = np.ones(5, f32)
    for call in (opt.step, optim.OptimizerSet([opt]).step, partial(opt.clip_grad_norm, 1.0)):
        with pytest.raises(optim.GradShapeMismatchError, match='vector|param'): call()
    assert bits_of(opt, ts) == before


@every
def test_settings_of_every_number_type(kind, fields):
    found = []
    for make in (float, f32, np.float64, np.array):
        numbers = {k: make(v) if isinstance(v, float) else v for k, v in fields.items()}
        opt, ts = build(kind, {**numbers, 'lr': make(f32(fields['lr']))})
        run(opt, ts, range(2))
        found.append(bits_of(opt, ts))
    assert found[1:] == found[:-1]
    config = type(opt.config)
    for name in config._kinds:
        wrong = ('0.1', None, 1j, [1], object()) + (() if config._kinds[name] is bool else (True,))
        for bad in wrong:
            if config._kinds[name] in (float, int, bool) or not isinstance(bad, str):
                with pytest.raises(TypeError, match=name): kinds[kind](**{**fields, name: bad})
    with pytest.raises(TypeError, match='bogus'): kinds[kind](bogus=1)


@every
@pytest.mark.parametrize('limit, error', [(-1, ValueError), (np.nan, ValueError), (-np.inf, ValueError),
                                          ('1', TypeError), (None, TypeError), (True, TypeError)])
def test_limits_that_are_refused(kind, fields, limit, error):
    opt, ts = build(kind, fields)
    give(ts, 0)
    before = [p.grad.numpy().copy() for p in ts.values()]
    with pytest.raises(error, match='max_norm'): opt.clip_grad_norm(limit)
    assert all((p.grad.numpy() == g).all() for p, g in zip(ts.values(), before))
    norm = opt.clip_grad_norm(np.inf)
    assert all((p.grad.numpy() == g).all() for p, g in zip(ts.values(), before))
    assert opt.clip_grad_norm(0) == norm and opt.grad_squared_norm() == 0


@every
def test_a_duplicate_is_refused_with_both_names(kind, fields):
    opt, ts = build(kind, fields)
    known = {slot.param.tensor: name for _, name, slot in opt._named()}
    adders = [opt.add_param, *([opt.add_fallback_param] if hasattr(opt, 'add_fallback_param') else [])]
    for t in ts.values():
        for add in adders:
            with pytest.raises(optim.DuplicateParamError, match=f'as {known[t]}, .* as again'):
                add(t, name='again')
    other = kinds[kind]()
    other.add_param(ts['wide'], name='second')
    with pytest.raises(optim.DuplicateParamError, match='second of .* as .* of'):
        optim.OptimizerSet([opt]).add(other)
    assert len(list(opt._named())) == len(SHAPES)


@every
def test_tables_tell_settings_paths_and_state(kind, fields):
    opt, ts = build(kind, fields)
    give(ts, 0)
    opt.step()
    size = sum(a.nbytes for _, _, slot in opt._named() for a in slot.arrays())
    for text in (repr(opt), opt._repr_html_(), repr(optim.OptimizerSet([opt]))):
        assert kind in text and f'lr={opt.lr!s}' in text and f'{size:,} bytes of state' in text
        assert all(name in text for _, name, _ in opt._named())
        assert all(path in text for path in opt._paths)


@every
@dtypes
def test_copies_go_their_own_way(kind, fields, dtype):
    opt, ts = build(kind, fields, dtype)
    run(opt, ts, range(2))
    ts2, opt2 = copy.deepcopy((ts, opt))
    before = bits_of(opt, ts)
    run(opt2, ts2, range(2, 5))
    after = bits_of(opt2, ts2)
    assert bits_of(opt, ts) == before != after
    run(opt, ts, range(2, 5))
    assert bits_of(opt, ts) == after
