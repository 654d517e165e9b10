"""Iterations of `es-spirals` and `es-ternary-spirals` with one worker and with two.

One worker is our best code on one thread, update included. `--check` fails below the bar.
"""
import sys

from timing import interleave, limit_threads  # first: sets OMP_WAIT_POLICY

from statistics import median

from fucina.apps import es_spirals, es_ternary_spirals
from fucina.exec import ExecContext

BAR = 1.7  # times as fast
SEARCHES = {
    'es-spirals': lambda workers: es_spirals.first_search(
        42, workers, sigma=0.1, alpha=0.1, population=128, antithetic=True),
    'es-ternary-spirals': lambda workers: es_ternary_spirals.first_search(
        42, workers, sigma=0.05, alpha=0.075, population=128, antithetic=True,
        ternary_flip_rate=0.002, ternary_update_fraction=0.001)}


def iteration(search, threads):
    context = ExecContext(workers=threads)

    def call():
        with context: search.trainer.update(search.rewards())
    return call


def main(argv):
    missed = []
    limit_threads(2)
    for name, make in SEARCHES.items():
        times = interleave({'1': iteration(make(1), 1), '2': iteration(make(2), 2)}, rounds=25, seconds=0.2)
        one, two = (median(times[k]) / 1000 for k in '12')
        print(f'{name}: {one:.1f} ms with one worker, {two:.1f} ms with two, {one / two:.2f} times as fast')
        if one / two < BAR: missed.append(f'{name}: bar {BAR}')
    print('\n'.join(missed) if missed else 'all bars met')
    return 1 if missed and '--check' in argv else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
