"""One iteration of an evolution strategy, ask and tell, against packages; a population of 32.

Ours writes every member into a replica (ask) and makes the update (tell). Theirs hand out all
members as arrays and are told the values. Nothing is evaluated on either side. evosax runs on a
million weights, compiled by JAX; pycma with a diagonal covariance, and nevergrad, on ten thousand.
Two threads on both sides, the process is bound to two cores. What is not installed is left out.
`--check` fails where ours is not ahead.
"""
import os
import sys

if hasattr(os, 'sched_setaffinity'):  # JAX takes as many threads as there are cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

from importlib.util import find_spec

from timing import interleave, limit_threads, report

import numpy as np

import fucina
from fucina import es

POPULATION, SIGMA = 32, 0.01
VALUES = np.random.default_rng(0).standard_normal(POPULATION).astype(np.float32)


def ours(size):
    w, replica = fucina.constant(np.zeros(size, np.float32), 'd'), np.empty(size, np.float32)
    trainer = es.Trainer(sigma=SIGMA, population=POPULATION)
    trainer.add_param(w)

    def call():
        for member in range(POPULATION): trainer.materialize_member(member, [replica])
        trainer.update(VALUES)
    return call


def evosax_open_es(size):
    import jax
    from evosax.algorithms import Open_ES
    strategy = Open_ES(population_size=POPULATION, solution=jax.numpy.zeros(size))
    params, values = strategy.default_params, jax.numpy.asarray(VALUES)
    ask, tell = jax.jit(strategy.ask), jax.jit(strategy.tell)
    key = jax.random.key(0)
    state = strategy.init(key, jax.numpy.zeros(size), params)

    def call():
        nonlocal key, state
        key, one, two = jax.random.split(key, 3)
        members, state = ask(one, state, params)
        state, _ = tell(two, members, values, state, params)
        jax.block_until_ready(state)
    return call


def pycma_diagonal(size):
    import cma
    options = {'CMA_diagonal': True, 'popsize': POPULATION, 'verbose': -9, 'seed': 1}
    strategy, values = cma.CMAEvolutionStrategy(np.zeros(size), SIGMA, options), VALUES.tolist()

    def call(): strategy.tell(strategy.ask(), values)
    return call


def nevergrad_es(size):
    import nevergrad as ng
    family = ng.families.EvolutionStrategy(popsize=POPULATION, offsprings=POPULATION)
    strategy = family(parametrization=ng.p.Array(shape=(size,)), budget=10**9)

    def call():
        members = [strategy.ask() for _ in range(POPULATION)]
        for member, value in zip(members, VALUES.tolist()): strategy.tell(member, value)
    return call


ROWS = {'evosax': (10**6, 'evosax, Open_ES', evosax_open_es),
        'cma': (10**4, 'pycma, CMA_diagonal', pycma_diagonal),
        'nevergrad': (10**4, 'nevergrad, ES', nevergrad_es)}


def main(argv):
    missed = []
    limit_threads(2)
    for package, (size, name, make) in ROWS.items():
        if find_spec(package) is None:
            print(f'{package} is not installed')
            continue
        times = interleave({'fucina': ours(size), name: make(size)}, rounds=15, seconds=0.05)
        ratios = report(f'ask and tell, {size:,} weights, population {POPULATION}', times, 'fucina')
        missed += [f'{other}: {x:.2f}' for other, x in ratios.items() if x >= 1]
    print('behind: ' + ', '.join(missed) if missed else 'ahead of all')
    return 1 if missed and '--check' in argv else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
