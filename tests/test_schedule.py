"""Schedules: golden factors, bases that stay put, refusals."""
from pathlib import Path

import numpy as np
import pytest

from fucina import optim
from fucina.errors import InvalidConfigError

f32, f64 = np.float32, np.float64
factor = optim.warmup_cosine_factor


@pytest.fixture(scope='module')
def golden():
    with np.load(Path(__file__).parent / 'goldens' / 'optim_misc.npz') as d: return dict(d)


def test_golden_factors(golden):
    rows = zip(golden['warmup_cosine/step_total_warmup'], golden['warmup_cosine/min_factor'],
               golden['warmup_cosine/out'])
    for (step, total, warmup), low, out in rows:
        ours = factor(int(step), int(total), int(warmup), float(low))
        assert type(ours) is float and abs(ours - out) <= 1e-15
        assert ours == factor(step, total, warmup, low)  # NumPy numbers


def test_anchors():
    for (step, total, warmup, low), out in {
            (0, 100, 10, .1): 0.1, (3, 100, 10, .1): 0.4, (9, 100, 10, .1): 1.0, (10, 100, 10, .1): 1.0,
            (55, 100, 10, .1): float.fromhex('0x1.199999999999ap-1'), (99, 100, 10, .1): 0.10027412784140691,
            (100, 100, 10, .1): 0.1, (5000, 100, 10, .1): 0.1, (0, 100, 0, .1): 1.0, (0, 0, 0, .25): .25,
            (5, 5, 10, .25): 0.6, (12, 5, 10, .25): .25}.items():
        assert abs(factor(step, total, warmup, low) - out) <= 1e-15


def test_bad_arguments():
    for error, args in ((ValueError, (-1, 10, 1, 0.1)), (ValueError, (1, -10, 1, 0.1)),
                        (ValueError, (1, 10, -1, 0.1)), (ValueError, (1, 10, 1, np.nan)),
                        (TypeError, (1.0, 10, 1, 0.1)), (TypeError, (1, '10', 1, 0.1)),
                        (TypeError, (1, 10, None, 0.1)), (TypeError, (1, 10, 1, '0.1')),
                        (TypeError, (1, 10, 1, None)), (TypeError, (1, 10, 1, True))):
        with pytest.raises(error): factor(*args)


def test_golden_trace(golden):
    a, b = optim.AdamW(lr=f32(0.02)), optim.AdamW(lr=f32(3e-4))
    sched, trace = optim.LrSchedule(), []
    for opt in (a, b): sched.attach(opt)
    for k in (0.1, 0.35, 1, 0):
        sched.apply(k)
        trace.append((a.lr, b.lr))
    sched.apply(0.5)
    sched.attach(a)
    sched.apply(0.5)
    trace.append((a.lr, b.lr))
    assert np.array_equal(np.array(trace, f32).view(np.uint32), golden['lr_schedule/trace'].view(np.uint32))


def test_base_times_factor_once():
    opt, sched = optim.SGD(lr=2e-2), optim.LrSchedule()
    sched.attach(opt)
    sched.apply(0.4)
    sched.apply(0.4)
    assert opt.lr.view(np.uint32) == 0x3c03126e
    opt.lr = 77  # never derived from the current value
    sched.apply(f32(1))
    assert opt.lr == f32(2e-2)


def test_targets():
    class Thing:
        lr = 0.5
    thing, opt, sched = Thing(), optim.AdamW(lr=0.5), optim.LrSchedule()
    for t in (thing, opt, opt.config, optim.any_optimizer(opt), opt): sched.attach(t)
    sched.apply(0.5)
    assert thing.lr == opt.lr == 0.25 and Thing.lr == 0.5
    assert repr(sched).count('  0.5   0.25') == 2
    for bad in (optim.OptimizerSet(), object(), None):
        with pytest.raises(TypeError): sched.attach(bad)
    for name in ('x', None):
        thing.lr = name
        with pytest.raises(TypeError): sched.attach(thing)
    thing.lr = np.nan
    with pytest.raises(InvalidConfigError): sched.attach(thing)


def test_a_bad_factor_changes_nothing():
    a, b, sched = optim.SGD(lr=1e-30), optim.SGD(lr=1), optim.LrSchedule()
    for opt in (a, b): sched.attach(opt)
    for error, bad in ((ValueError, np.nan), (TypeError, '1'), (TypeError, None), (TypeError, True),
                       (TypeError, 1j), (InvalidConfigError, 1e39)):
        with pytest.raises(error): sched.apply(bad)
        assert (a.lr, b.lr) == (f32(1e-30), 1)
    optim.LrSchedule().apply(0.5)  # nothing attached, nothing to do
