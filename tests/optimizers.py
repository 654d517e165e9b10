"""What the tests of optimizers share: bits, parameters, golden runs, numbers of threads."""
import io
import json
from pathlib import Path

import numpy as np

import fucina
from fucina import optim
from fucina.kernels import set_workers
from fucina.rng import gaussian_fill

f32 = np.float32
GOLDENS = Path(__file__).parent / 'goldens'
INPUTS, MISC, SGD, ADAM, MUON, APOLLO = (
    dict(np.load(GOLDENS / f'optim_{name}.npz')) for name in ('inputs', 'misc', 'sgd', 'adam', 'muon', 'apollo'))
SHAPES = {'wide': (5, 7), 'tall': (33, 8), 'vec': (9,), 'conv': (3, 2, 4)}
THREADS = 1, 2, 3, 7


def bits(a):
    a = np.asarray(a)
    return a.reshape(-1).view({2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def hexa(a):
    a = bits(a)
    return ' '.join(f'{b:0{2 * a.itemsize}x}' for b in a)


def same(a, b):
    "Equal bits, except that any NaN equals any NaN."
    a, b = np.asarray(a, f32).ravel(), np.asarray(b, f32).ravel()
    nan = np.isnan(a) & np.isnan(b)
    return np.array_equal(bits(np.where(nan, f32(0), a)), bits(np.where(nan, f32(0), b)))


def noise(seed, shape): return gaussian_fill(seed, np.empty(shape, f32), 1.0)


def variable(values, dtype='f32'):
    "A parameter; for a 16-bit type the values are its bits."
    values = np.asarray(values)
    if dtype == 'f32': return fucina.variable(values, values.ndim)
    return fucina.from_bits(values.view(np.uint16), values.ndim, dtype, requires_grad=True)


def saved(opt):
    stream = io.BytesIO()
    opt.save_state(stream)
    return stream.getvalue()


def load(opt, raw):
    "Load from these bytes; how many were read."
    stream = io.BytesIO(raw)
    opt.load_state(stream)
    return stream.tell()


def at_any_number_of_threads(work):
    "What `work()` returns, which has to be equal at any number of threads."
    found = []
    for workers in THREADS:
        old = set_workers(workers)
        try: found.append(work())
        finally: set_workers(old)
    assert found[1:] == found[:-1]
    return found[0]


# -- golden runs ------------------------------------------------------------------------------

def golden_cases(d): return [key[:-7] for key in d if key.endswith('/config')]


def configured(member):
    "The optimizer that a golden file describes."
    fields = dict(member['config'])
    if 'fallback' in fields: fields['fallback'] = optim.AdamWConfig(**fields['fallback'])
    return getattr(optim, member['optimizer'])(**fields)


def fresh(d, case, row=None):
    "The optimizer of a case, its parameters before the first step or after `row`, the description."
    c = json.loads(str(d[f'{case}/config']))
    dtype, opt, params = c['param_dtype'], configured(c), {}
    names = {'wide': 'w_wide', 'vec': 'b'} if c['named'] else {}
    for k, s in SHAPES.items():
        values = INPUTS[f'init_{dtype}/{k}'] if row is None else d[f'{case}/{k}'][row]
        params[k] = variable(values.reshape(s), dtype)
        aside = k == 'tall' and c['fallback_tall']
        (opt.add_fallback_param if aside else opt.add_param)(params[k], name=names.get(k))
    return opt, params, c


def give_gradients(params, t):
    for k, s in SHAPES.items():
        if INPUTS[f'has_grad/{k}'][t]: params[k].set_grad(INPUTS[f'grad/{k}'][t].reshape(s))


def golden_steps(opt, params, c):
    "Take the seven steps of a golden run; the number of each, once it is taken."
    for t in range(7):
        give_gradients(params, t)
        if c['clip_max_norm'] is not None: opt.clip_grad_norm(c['clip_max_norm'])
        opt.step()
        opt.zero_grad()
        yield t
