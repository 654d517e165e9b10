"""Cross-entropy against the golden values, a float64 formula, and every form of labels."""
import math
from pathlib import Path

import numpy as np
import pytest

from fucina import ExecContext, constant, exec_scope, gradcheck, no_grad, randn, variable
from fucina.errors import (DTypeError, IndexOutOfBoundsError, InvalidDataLengthError, TagError,
                           UnsupportedGradientError)

GOLDENS = np.load(Path(__file__).parent / 'goldens' / 'cross_entropy.npz')
CASES = sorted(k[:-5] for k in GOLDENS if k.endswith('/loss'))
f32 = np.float32


def exact(x, labels, ignore=None, reduction='mean', eps=0.0):
    "Loss and gradient of its sum in float64, by definition; x (rows, classes)."
    x, labels = np.asarray(x, np.float64), np.asarray(labels, np.int64).ravel()
    counts = np.ones(len(x), bool) if ignore is None else labels != ignore
    m = x.max(1, keepdims=True)
    lp = x - m - np.log(np.exp(x - m).sum(1, keepdims=True))
    safe = np.where(counts, labels, 0)
    want = np.full(x.shape, eps / x.shape[1])
    want[np.arange(len(x)), safe] += 1 - eps
    loss = np.where(counts, -(want * lp).sum(1), 0)
    grad = np.where(counts[:, None], np.exp(lp) - want, 0)
    if reduction == 'none': return loss, grad
    n = max(counts.sum(), 1) if reduction == 'mean' else 1
    return loss.sum() / n, grad / n


# --- goldens

def test_the_golden_cases_are_complete():
    assert len(CASES) == 18 and {c.split('_')[0] for c in CASES} == {'mean', 'sum', 'none'}


@pytest.mark.parametrize('case', CASES)
def test_golden_cases(case):
    reduction, smoothing, kind = case.split('_')
    labels = dict(noignore=GOLDENS['labels'], ignore=GOLDENS['labels_ignore99'],
                  allignored=np.full(6, 99))[kind]
    x = variable(GOLDENS['logits'], 'batch class')
    for given in (labels, labels.tolist(), constant(labels.astype(np.int64), 'batch')):
        x.zero_grad()
        loss = x.cross_entropy('class', given, reduction=reduction,
                               ignore_index=None if kind == 'noignore' else 99,
                               label_smoothing=float(smoothing[2:]))
        loss.backward(np.ones(loss.shape))
        np.testing.assert_allclose(loss.numpy().ravel(), GOLDENS[f'{case}/loss'], rtol=0, atol=1e-5)
        np.testing.assert_allclose(x.grad.numpy(), GOLDENS[f'{case}/grad'], rtol=0, atol=1e-5)
        if kind == 'allignored':
            assert not loss.numpy().any() and x.grad.numpy().tobytes() == bytes(x.size * 4)


def test_golden_mid_axis():
    x = variable(GOLDENS['mid_axis/logits'], 'a class b')
    labels = GOLDENS['mid_axis/labels']
    loss = x.cross_entropy('class', labels)
    loss.backward()
    assert abs(loss.item() - GOLDENS['mid_axis/loss_mean'][0]) < 1e-5
    np.testing.assert_allclose(x.grad.numpy(), GOLDENS['mid_axis/grad_mean'], rtol=0, atol=1e-5)
    for given in (labels, labels.reshape(2, 3), constant(labels.reshape(2, 3), 'a b')):
        rows = x.cross_entropy('class', given, reduction='none')
        assert rows.tags == ('a', 'b')
        np.testing.assert_allclose(rows.numpy(), GOLDENS['mid_axis/loss_none'], rtol=0, atol=1e-5)


def test_golden_extreme_logits():
    x = variable(GOLDENS['extreme/logits'], 'batch class')
    labels = GOLDENS['extreme/labels']
    rows = x.cross_entropy('class', labels, reduction='none')
    np.testing.assert_allclose(rows.numpy(), GOLDENS['extreme/loss_none'], rtol=1e-6, atol=1e-5)
    x.cross_entropy('class', labels, reduction='sum').backward()
    np.testing.assert_allclose(x.grad.numpy(), GOLDENS['extreme/grad_sum'], rtol=0, atol=1e-5)


REFUSED = {'label == class count': lambda x: x.cross_entropy('class', [0, 1, 2, 3, 4, 5]),
           'wrong label count': lambda x: x.cross_entropy('class', [0, 1, 2]),
           'label_smoothing 1.0': lambda x: x.cross_entropy('class', [0] * 6, label_smoothing=1.0)}
# A bad smoothing is a plain ValueError here, as every bad number without a name of its own.
ERRORS = dict(IndexOutOfBounds=IndexOutOfBoundsError, InvalidDataLength=InvalidDataLengthError,
              InvalidShape=ValueError)


@pytest.mark.parametrize('line', str(GOLDENS['errors']).strip().split('\n'))
def test_golden_errors(line):
    call, error = line.split(': ')
    with pytest.raises(ERRORS[error]): REFUSED[call](variable(GOLDENS['logits'], 'batch class'))


# --- accuracy

@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('eps', [0.0, 0.1, 0.9])
@pytest.mark.parametrize('rows, classes', [
    (1, 1), (1, 2), (7, 1), (3, 8), (64, 9), (400, 2), (1500, 10), (5, 1023), (5, 1024), (3, 1025),
    (2, 5000), (1025, 129)])
def test_against_float64(rows, classes, eps, reduction):
    g = np.random.default_rng(rows * classes)
    x = variable(3 * g.standard_normal((rows, classes)), 'batch class')
    labels = g.integers(0, classes, rows)
    ignore = int(labels[0]) if rows > 1 and eps == 0.1 else None
    loss = x.cross_entropy('class', labels, ignore_index=ignore, reduction=reduction,
                           label_smoothing=eps)
    loss.backward(np.ones(loss.shape))
    want, grad = exact(x.numpy(), labels, ignore, reduction, eps)
    many = rows if reduction == 'sum' else 1
    np.testing.assert_allclose(loss.numpy(), want, rtol=2e-6, atol=1e-6 * many)
    got = x.grad.numpy().astype(np.float64)
    scale = abs(grad).max() or 1.0
    assert abs(got - grad).max() <= 4e-7 * max(scale, 1 / (rows if reduction == 'mean' else 1))
    assert abs(got.sum(1)).max() <= 1e-6
    if ignore is not None: assert not got[labels == ignore].any()


def test_a_large_vocabulary():
    "Serial float32 sums of 151,936 exponentials would be off by 2e-4."
    classes = 151_936
    x = variable(np.random.default_rng(0).standard_normal((3, classes)), 'batch class')
    loss = x.cross_entropy('class', [0, classes - 1, 7], reduction='none')
    loss.backward(np.ones(3))
    want, grad = exact(x.numpy(), [0, classes - 1, 7], reduction='none')
    np.testing.assert_allclose(loss.numpy(), want, rtol=1e-5)
    assert abs(x.grad.numpy() - grad).max() < 1e-6
    assert abs(x.grad.numpy().sum(1, dtype=np.float64)).max() < 1e-5
    even = constant(np.full((2, classes), 3.5), 'batch class').cross_entropy('class', [0, 9])
    assert abs(even.item() - math.log(classes)) < 1e-5


@pytest.mark.parametrize('classes', [1, 2, 10, 1024])
@pytest.mark.parametrize('eps', [0, 0.3])
def test_equal_logits_cost_the_logarithm_of_their_number(classes, eps):
    for level in (0.0, -5.0, 50.0):
        x = constant(np.full((4, classes), level), 'batch class')
        loss = x.cross_entropy('class', [0, 0, classes - 1, 0], label_smoothing=eps)
        assert abs(loss.item() - math.log(classes)) < 1e-6 * max(1, abs(level))


def test_gradcheck_of_every_reduction():
    x = variable(np.random.default_rng(0).uniform(-2, 2, (3, 4)), 'batch class')
    w = constant([1.0, -2, 3], 'batch')
    for eps in (0, 0.2):
        def loss(x, eps=eps):
            kw = dict(ignore_index=3, label_smoothing=eps)
            rows = x.cross_entropy('class', [1, 3, 0], reduction='none', **kw)
            return ((rows * w).sum_all() + x.cross_entropy('class', [2, 2, 3], **kw)
                    + x.cross_entropy('class', [0, 1, 2], reduction='sum', **kw))
        assert gradcheck(loss, x).checked == 12


def test_the_upstream_gradient_weighs_rows():
    x = variable(np.random.default_rng(0).standard_normal((3, 4)), 'batch class')
    x.cross_entropy('class', [1, 2, 3], reduction='none').backward([1, 0, -2])
    _, grad = exact(x.numpy(), [1, 2, 3], reduction='none')
    np.testing.assert_allclose(x.grad.numpy(), grad * [[1], [0], [-2]], rtol=0, atol=1e-6)
    x.zero_grad()
    x.cross_entropy('class', [1, 2, 3]).scale(6).backward()
    np.testing.assert_allclose(x.grad.numpy(), grad * 2, rtol=0, atol=1e-6)


# --- special logits

def test_ignored_rows_may_hold_anything():
    bad = np.float32([[1, 2, 3], [np.nan, np.inf, -np.inf], [np.nan] * 3, [0, 0, 1]])
    for reduction in ('mean', 'sum', 'none'):
        x = variable(bad, 'batch class')
        loss = x.cross_entropy('class', [0, -100, -100, 2], ignore_index=-100, reduction=reduction,
                               label_smoothing=0.1)
        loss.backward(np.ones(loss.shape))
        assert np.isfinite(loss.numpy()).all() and np.isfinite(x.grad.numpy()).all()
        assert x.grad.numpy()[1:3].tobytes() == bytes(24)
        want, _ = exact(bad[[0, 3]], [0, 2], reduction=reduction, eps=0.1)
        got = loss.numpy()[[0, 3]] if reduction == 'none' else loss.numpy()
        np.testing.assert_allclose(got, want, rtol=2e-6)


def test_nan_and_infinite_logits_are_not_hidden():
    x = constant([[0, np.nan], [1, 2]], 'batch class')
    rows = x.cross_entropy('class', [0, 1], reduction='none').numpy()
    assert np.isnan(rows[0]) and np.isfinite(rows[1]) and np.isnan(
        x.cross_entropy('class', [0, 1]).item())
    masked = variable([[0, -np.inf, 1]], 'batch class')
    loss = masked.cross_entropy('class', [0])
    loss.backward()
    assert abs(loss.item() - math.log(1 + math.e)) < 1e-6 and masked.grad.numpy()[0, 1] == 0
    assert masked.detach().cross_entropy('class', [1]).item() == np.inf


def test_large_losses_stay_finite():
    x = variable([[3e38, -3e38], [1e4, 0]], 'batch class')
    loss = x.cross_entropy('class', [0, 1], reduction='none')
    loss.backward([1, 1])
    assert loss.tolist() == [0, 1e4] and x.grad.tolist() == [[0, 0], [1, -1]]


# --- labels

def fresh(): return variable(np.random.default_rng(1).standard_normal((2, 3, 4)), 'a b class')


FLAT = [0, 3, 1, 2, 2, 0]
FORMS = {
    'list': FLAT, 'tuple': tuple(FLAT), 'range': range(0, 4), 'nested': [[0, 3, 1], [2, 2, 0]],
    'int8': np.int8(FLAT), 'uint64': np.uint64(FLAT), 'big-endian': np.array(FLAT, '>i4'),
    'matrix': np.reshape(FLAT, (2, 3)), 'strided': np.repeat(FLAT, 2)[::2],
    'fortran': np.asfortranarray(np.reshape(FLAT, (2, 3))), 'numpy ints': list(np.int64(FLAT)),
    'tensor': constant(FLAT, 'n'), 'named': constant(np.reshape(FLAT, (2, 3)), 'a b'),
    'column': np.reshape(FLAT, (6, 1))}


@pytest.mark.parametrize('form', FORMS)
def test_any_integers_are_labels(form):
    x = fresh()
    if form == 'range': x = variable(x.numpy()[:1, :1].repeat(4, 1), 'a b class')
    flat = list(range(4)) if form == 'range' else FLAT
    want, grad = exact(x.numpy().reshape(-1, 4), flat)
    for _ in range(2):  # the second time a list is remembered
        x.zero_grad()
        loss = x.cross_entropy('class', FORMS[form])
        loss.backward()
        assert abs(loss.item() - want) < 1e-6
        np.testing.assert_allclose(x.grad.numpy().reshape(-1, 4), grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize('labels, error, says', [
    ([0] * 5, InvalidDataLengthError, '5 labels for 6'), ([], InvalidDataLengthError, '0 labels'),
    (np.int64([]), InvalidDataLengthError, '0 labels'), (3, InvalidDataLengthError, '1 labels'),
    ([0, 1, 2, 3, 4, 0], IndexOutOfBoundsError, 'label 4 at position 4 with 4 classes'),
    ([0, -1, 0, 0, 0, 0], IndexOutOfBoundsError, '-1 at position 1'),
    ([-2**63] * 6, IndexOutOfBoundsError, 'position 0'),
    (np.uint64([2**63] * 6), IndexOutOfBoundsError, str(2**63)),
    ([2**70] * 6, DTypeError, 'object'), ([0.0] * 6, DTypeError, 'float64'),
    ([True] * 6, DTypeError, 'bool'), (['0'] * 6, DTypeError, '<U1'),
    ([None] * 6, DTypeError, 'object'), (constant([0.0] * 6, 'n'), DTypeError, 'float32'),
    (constant(np.zeros((3, 2), int), 'b a'), TagError, r'\[b=3, a=2\]'),
    (constant(np.zeros((2, 3), int), 'a c'), TagError, r'\[a=2, c=3\]')])
def test_bad_labels_are_named_before_anything_is_computed(labels, error, says):
    x = fresh()
    for _ in range(2):
        with exec_scope() as s:
            with pytest.raises(error, match=says): x.cross_entropy('class', labels)
            assert s.stats['results'] == 0 and s.stats['bytes'] == 0
    assert x.grad is None


def test_ragged_labels():
    with pytest.raises(ValueError): fresh().cross_entropy('class', [[0, 1], [2, 3, 0, 1]])


@pytest.mark.parametrize('options, error, says', [
    (dict(reduction='max'), ValueError, "'max'"), (dict(reduction=None), ValueError, 'None'),
    (dict(label_smoothing=-0.1), ValueError, '-0.1'), (dict(label_smoothing=1), ValueError, '1'),
    (dict(label_smoothing=math.nan), ValueError, 'nan'),
    (dict(label_smoothing='a'), TypeError, 'label_smoothing'),
    (dict(ignore_index=0.5), TypeError, 'integer'), (dict(ignore_index=2**64), ValueError, 'int64')])
def test_bad_options(options, error, says):
    with pytest.raises(error, match=says): fresh().cross_entropy('class', FLAT, **options)
    with pytest.raises(TypeError): fresh().cross_entropy('class', FLAT, None)  # keywords only


def test_ignore_index_may_be_any_integer():
    x = fresh()
    want, _ = exact(x.numpy().reshape(-1, 4), FLAT, 2)
    assert abs(x.cross_entropy('class', FLAT, ignore_index=2).item() - want) < 1e-6
    for odd in (-100, 99, 2**62, np.int8(-3)):
        labels = np.where(np.array(FLAT) == 2, odd, FLAT)
        assert abs(x.cross_entropy('class', labels, ignore_index=odd).item() - want) < 1e-6
        assert abs(x.cross_entropy('class', labels.tolist(), ignore_index=odd).item() - want) < 1e-6
    plain, _ = exact(x.numpy().reshape(-1, 4), FLAT)
    assert abs(x.cross_entropy('class', FLAT, ignore_index=99).item() - plain) < 1e-6


def test_a_changed_list_is_noticed():
    x = fresh()
    def loss(labels, **kw): return x.cross_entropy('class', labels, **kw).item()
    def want(labels): return exact(x.numpy().reshape(-1, 4), labels)[0]
    flat, nested = list(FLAT), [[0, 3, 1], [2, 2, 0]]
    boxed = [np.array(v) for v in FLAT]
    for change in (1, 2, 3):
        for labels in (flat, nested, boxed):
            assert abs(loss(labels) - want(np.ravel(labels))) < 1e-6
            assert abs(loss(labels) - want(np.ravel(labels))) < 1e-6
        flat[2], nested[1][0] = change, change
        boxed[5][...] = change
    flat[0] = 7
    for _ in range(2):
        with pytest.raises(IndexOutOfBoundsError, match='7 at position 0'): loss(flat)
    assert abs(loss(flat, ignore_index=7) - exact(x.numpy().reshape(-1, 4), flat, 7)[0]) < 1e-6
    with pytest.raises(IndexOutOfBoundsError): loss(flat)  # remembered with another ignore_index
    few = variable(x.numpy()[..., :3], 'a b class')
    loss(FLAT)
    with pytest.raises(IndexOutOfBoundsError): few.cross_entropy('class', FLAT)


def test_labels_changed_after_the_forward_pass_do_not_matter():
    for labels in (np.array(FLAT), list(FLAT), np.array(FLAT, np.int32)):
        x = fresh()
        loss = x.cross_entropy('class', labels)
        labels[:] = [10**9] * 6 if isinstance(labels, list) else 10**9
        loss.backward()
        np.testing.assert_allclose(x.grad.numpy().reshape(-1, 4),
                                   exact(x.numpy().reshape(-1, 4), FLAT)[1], rtol=0, atol=1e-6)


def test_many_different_lists():
    x = randn((3, 4), 'batch class', seed=0)
    for n in range(1, 200):
        row = randn((n, 4), 'batch class', seed=n)
        labels = [k % 4 for k in range(n)]
        assert abs(row.cross_entropy('class', labels).item() - exact(row.numpy(), labels)[0]) < 2e-6
    assert abs(x.cross_entropy('class', [0, 1, 2]).item() - exact(x.numpy(), [0, 1, 2])[0]) < 1e-6


def test_a_single_row_of_logits():
    x = variable([0.5, 2, -1], 'class')
    for labels in ([1], 1, np.int64(1), constant(1, ''), constant([1], 'n')):
        for reduction in ('mean', 'sum', 'none'):
            x.zero_grad()
            loss = x.cross_entropy('class', labels, reduction=reduction)
            loss.backward()
            want, grad = exact(x.numpy()[None], [1])
            assert loss.shape == () and abs(loss.item() - want) < 1e-6
            np.testing.assert_allclose(x.grad.numpy(), grad[0], rtol=0, atol=1e-6)


# --- rules shared with other operations

def test_16_bit_logits_are_read_in_float32():
    x = fresh().detach()
    for dtype in ('f16', 'bf16'):
        h = x.to(dtype)
        assert h.cross_entropy('class', FLAT).dtype == 'f32'
        assert h.cross_entropy('class', FLAT).item() == h.to('f32').cross_entropy(
            'class', FLAT).item()
    w = variable(x.numpy(), x.tags, dtype='bf16')
    with pytest.raises(UnsupportedGradientError, match='cross_entropy'): w.cross_entropy('class', FLAT)
    w.to('f32').cross_entropy('class', FLAT).backward()
    assert w.grad.dtype == 'f32'
    with pytest.raises(DTypeError): x.to('i64').cross_entropy('class', FLAT)


def test_results_do_not_depend_on_workers_layout_or_scope():
    g = np.random.default_rng(0)
    a, labels = g.standard_normal((300, 501)), g.integers(0, 501, 300)
    seen = set()
    for workers in (1, 2, 7):
        for layout in ('batch class', 'class batch'):
            x = variable(a if layout == 'batch class' else a.T, layout)
            with ExecContext(workers=workers), exec_scope():
                loss = x.cross_entropy('class', labels, label_smoothing=0.1)
                loss.backward()
                grad = x.grad.numpy() if layout == 'batch class' else x.grad.numpy().T
                seen.add((loss.item(), grad.tobytes()))
    with no_grad(): assert variable(a, 'batch class').cross_entropy(
        'class', labels, label_smoothing=0.1).item() in dict(seen)
    assert len(seen) == 1


def test_a_remembered_list_does_not_admit_other_types():
    x = variable(np.zeros((2, 2)), 'batch class')
    x.cross_entropy('class', [0, 1])
    for labels in ([0.0, 1.0], [False, True]):
        with pytest.raises(DTypeError): x.cross_entropy('class', labels)


def test_the_least_int64_can_be_ignored_like_any_other_label():
    x = variable(np.zeros((2, 2)), 'batch class')
    least = [-2**63] * 2
    assert x.cross_entropy('class', least, ignore_index=-2**63).item() == 0
    for labels in (least, [-1, 0]):
        with pytest.raises(IndexOutOfBoundsError): x.cross_entropy('class', labels)
