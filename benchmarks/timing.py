"""Interleaved timing: contestants take turns in one process, and medians are compared."""
import os

# Spinning OpenMP threads would slow down whoever runs next; too late once torch is imported.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import statistics
import time
from collections.abc import Callable


def limit_threads(n: int) -> None:
    "The same number of threads for NumPy's BLAS, our kernels and torch."
    import numpy  # noqa: F401  (a BLAS can only be limited once it is loaded)
    from threadpoolctl import threadpool_limits

    import fucina
    threadpool_limits(n)
    fucina.set_num_threads(n)
    try: import torch
    except ImportError: return
    torch.set_num_threads(n)


def interleave(
    contestants: dict[str, Callable[[], object]],
    rounds: int = 40,
    seconds: float = 0.004,  # about how long each turn lasts
    clock: Callable[[], float] = time.perf_counter,  # thread_time: this thread's CPU time
) -> dict[str, list[float]]:  # microseconds per call, one entry a round
    "Let every contestant have a turn in each round, in rotating order."
    calls = {}
    for name, f in contestants.items():
        for _ in range(5): f()
        start = clock()
        f()
        calls[name] = max(1, round(seconds / max(clock() - start, 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for k in range(rounds):
        for name in names[k % len(names):] + names[:k % len(names)]:
            f, n = contestants[name], calls[name]
            start = clock()
            for _ in range(n): f()
            times[name].append((clock() - start) / n * 1e6)
    return times


def report(title: str, times: dict[str, list[float]], ours: str) -> dict[str, float]:
    "Print medians and the ratio of ours to each; return the ratios."
    median = {name: statistics.median(t) for name, t in times.items()}
    ratios = {name: median[ours] / m for name, m in median.items() if name != ours}
    print(title)
    for name, m in median.items():
        tail = '' if name == ours else f'   ours / this = {ratios[name]:.2f}'
        print(f'  {name:24} {m:10.1f} us  (min {min(times[name]):.1f}){tail}')
    return ratios
