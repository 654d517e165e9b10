"Pictures: what is in them, what may be odd about their data, and a kernel that updates one."
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fucina
from fucina import plot
from fucina.es.rewards import Stats

nbformat = pytest.importorskip('nbformat')
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def ax(): return plot.new_figure(4, 3).subplots()


def drawn(ax):
    ax.figure.canvas.draw()
    return ax


def lines(ax): return [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]


def test_curves_of_one_run_and_of_several(ax):
    assert plot.loss_curves([4, 2, 1], ax) is ax
    assert lines(drawn(ax)) == [([0, 1, 2], [4, 2, 1])] and ax.get_yscale() == 'log' and ax.get_legend() is None
    other = plot.new_figure(4, 3).subplots()
    plot.loss_curves({'a': {0: 4.0, 10: 2.0}, 'b': np.ones(3)}, other, log=False)
    assert lines(drawn(other))[0] == ([0, 10], [4, 2]) and other.get_yscale() == 'linear'
    assert [t.get_text() for t in other.get_legend().get_texts()] == ['a', 'b']


def test_a_smooth_curve_is_the_mean_of_the_last_values(ax):
    (_, raw), (x, y) = lines(plot.loss_curves({5 * t: float(t) for t in range(6)}, ax, smooth=3))
    assert x == [10, 15, 20, 25] and y == pytest.approx([1, 2, 3, 4]) and len(raw) == 6
    short = plot.new_figure(4, 3).subplots()
    assert len(lines(plot.loss_curves([2, 1], short, smooth=3))) == 1


def test_nothing_yet_is_an_empty_picture(ax):
    drawn(plot.loss_curves([], ax))
    drawn(plot.loss_curves({}, plot.new_figure(4, 3).subplots()))
    drawn(plot.reward_bands([], plot.new_figure(4, 3).subplots()))


@pytest.mark.parametrize('classes', [2, 3, 9])
def test_a_boundary_between_any_number_of_classes(ax, classes):
    rng = np.random.default_rng(0)
    points = rng.standard_normal((60, 2)).astype(np.float32)
    w = fucina.constant(rng.standard_normal((classes, 2)), 'class in')
    labels = np.arange(60) % classes
    drawn(plot.decision_boundary(lambda x: x.dot(w, 'in'), points, labels, ax))
    marks = [c for c in ax.collections if len(c.get_offsets()) > 1]
    assert sum(len(c.get_offsets()) for c in marks) == 60


@pytest.mark.parametrize('points, labels', [(np.ones((4, 3)), np.zeros(4)), (np.ones((4, 2)), np.zeros(3))])
def test_a_boundary_of_what_is_no_plane_or_has_other_labels(ax, points, labels):
    with pytest.raises(fucina.errors.InvalidShapeError, match=r'\(4, [23]\) and'):
        plot.decision_boundary(lambda x: x, points, labels, ax)


def test_a_boundary_of_who_always_says_the_same(ax):
    bias = fucina.constant([[0.0, 1.0]] * plot.GRID**2, 'batch class')
    points = np.array([[0, 0], [1, 1]], np.float32)
    drawn(plot.decision_boundary(lambda x: bias, points, np.array([0, 1]), ax))


def test_histograms_of_what_is_constant_huge_or_not_finite(ax):
    model = {'same': fucina.variable(np.ones(5), 'd'), 'odd': fucina.variable([np.nan, np.inf, 1.0], 'd'),
             'half': fucina.variable([1.0, 2.0], 'd', dtype='bf16'),
             'lost': fucina.variable([np.nan, np.nan], 'd')}
    drawn(plot.weight_histograms(model, ax))
    assert [t.get_text() for t in ax.get_yticklabels()] == ['same', 'odd', 'half', 'lost']
    drawn(plot.weight_histograms({'lost': model['lost']}, plot.new_figure(4, 3).subplots()))


def test_many_tensors_are_cut_off_and_counted(ax):
    many = {f'w{k}': fucina.variable(np.eye(2), 'out in') for k in range(40)}
    assert len(plot.weight_histograms(many, ax).get_yticks()) == 12
    assert '28 more' in ax.get_xlabel()
    assert len(plot.singular_values(many, plot.new_figure(4, 3).subplots()).lines) == 12


def test_singular_values_of_matrices_only(ax):
    model = {'conv': fucina.variable(np.ones((4, 2, 3)), 'a b c'), 'zero': fucina.variable(np.zeros((2, 2)), 'a b'),
             'vector': fucina.variable([1.0, 2.0], 'd'), 'nan': fucina.variable([[np.nan]], 'a b')}
    (x, y), = lines(drawn(plot.singular_values(model, ax)))
    assert x == [1, 2, 3, 4] and y == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_bands_start_after_the_iterations_before_them(ax):
    history = [Stats(t, 0.5, t - 1, t + 1) for t in range(3)]
    assert lines(drawn(plot.reward_bands(history, ax, first=10))) == [([11, 12, 13], [0, 1, 2])]


def test_a_schedule_is_asked_for_every_step(ax):
    assert lines(drawn(plot.schedule(lambda t: t / 2, 4, ax))) == [([0, 1, 2, 3], [0, 0.5, 1, 1.5])]


def test_elsewhere_live_remembers_and_draws_nothing():
    code = ('import sys; from fucina.plot import Live\n'
            'with Live(every=0) as live:\n'
            '    for t in range(5): live.add(loss=1 / (t + 1))\n'
            'print(live, "matplotlib" in sys.modules, "IPython" in sys.modules)')
    done = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True)
    assert done.stdout == 'Live after 5 steps: loss 0.2 False False\n' and done.stderr == ''


def in_a_kernel(*sources):
    from nbclient import NotebookClient
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    NotebookClient(nb, timeout=120, kernel_name='python3').execute()
    return [cell.outputs for cell in nb.cells]


def test_in_a_kernel_one_picture_is_kept_up_to_date():
    pytest.importorskip('ipykernel')
    grown, _, bar = in_a_kernel(
        'from fucina.plot import Live\n'
        'shown = 0\n'
        'with Live(every=0) as live:\n'
        '    for t in range(30):\n'
        '        live.add(loss=1 / (t + 1))\n'
        '        shown += live.due != -float("inf")',
        'assert shown == 30 and live.steps == 30',
        'from fucina.apps.program import progress\n'
        'with progress(3, "train") as bar:\n'
        '    for _ in range(3): bar.update()')
    picture, = grown
    assert picture.output_type == 'display_data' and 'image/png' in picture.data
    assert 'Live after 30 steps' in picture.data['text/plain']
    assert 'Warning' not in ''.join(out.get('text', '') for out in bar)
