"""The ternary product, and an iteration of the ternary spirals, against the same in NumPy.

    python benchmarks/es_ternary.py [--check] [--rounds N]

Two threads on both sides. The product takes float32 activations, rounds them to eight bits and
multiplies by packed trits; NumPy unpacks the trits, rounds in whole arrays and has BLAS multiply
the integers as float32. Bar: 0.30. `unpacked` is NumPy with trits that were float32 before, 16 times
the memory; `float` is `dot` with a float32 matrix.

An iteration of `es-ternary-spirals`: 128 members in pairs, 1026 floats and 66048 trits, 194 points;
every member is made, scored by its cross-entropy and forgotten, then floats and trits are updated.
NumPy keeps its trits unpacked, draws noise with PCG64, and has two threads score members with one
BLAS thread each; for tanh it takes `numpy.tanh`, which is faster there than the quotient that the
network is defined with. Bar: 0.30. With --check a miss is exit code 1.
"""
import argparse
import copy
import os
import sys
from concurrent.futures import ThreadPoolExecutor

# After a product OpenBLAS's second thread spins for a while, on the core of whoever runs next.
os.environ.setdefault('OPENBLAS_THREAD_TIMEOUT', '4')

from timing import interleave, limit_threads, report  # first: sets OMP_WAIT_POLICY

import numpy as np

from threadpoolctl import threadpool_limits

import fucina
from fucina import es
from fucina.data import two_spirals
from fucina.es.forward import TernaryNet
from fucina.es.ternary import TernaryMatrix, trits
from fucina.rng import gaussian_fill, uniform_fill

BAR = 0.30
SHAPES = (194, 256, 256), (1, 1024, 4096), (512, 1024, 1024)
f32 = np.float32


def rounded(x):
    "Eight bits and a scale for each 256 activations."
    x = x.reshape(len(x), -1, 256)
    size = np.abs(x)
    top = np.take_along_axis(x, size.argmax(-1)[..., None], -1)
    with np.errstate(divide='ignore'): inverse = np.where(top != 0, f32(-127) / top, f32(0))
    with np.errstate(divide='ignore'): d = np.where(top != 0, f32(1) / inverse, f32(0))
    return np.minimum(np.rint(x * inverse), f32(127)), d[..., 0]


def product(x, t, scales):
    "x times trits t (columns, blocks, 256) with their scales (columns, blocks)."
    q, d = rounded(x)
    y = np.zeros((len(x), len(t)), f32)
    for b in range(t.shape[1]): y += (d[:, b, None] * scales[:, b]) * (q[:, b] @ t[:, b].T)
    return y


def contestants(rows, columns, depth):
    w = fucina.constant(gaussian_fill(1, np.empty((columns, depth), f32), 1.0), 'out in')
    x = fucina.constant(gaussian_fill(2, np.empty((rows, depth), f32), 1.0), 'batch in')
    m, a = TernaryMatrix.encode(w), x.numpy()
    shape = columns, depth // 256
    t = trits(m.blocks).reshape(*shape, 256).astype(f32)
    scales = m.blocks['d'].reshape(shape).astype(f32)
    assert product(a, t, scales).tobytes() == m.dot_int8(x).numpy().tobytes()
    def unpack(): return trits(m.blocks).reshape(*shape, 256).astype(f32)
    return {'ours': lambda: m.dot_int8(x), 'NumPy': lambda: product(a, unpack(), scales),
            'unpacked': lambda: product(a, t, scales), 'float': lambda: x.dot(w, 'in')}


# -- an iteration -----------------------------------------------------------------------------

POPULATION, FLIPS, MOVES, SIGMA, ALPHA = 128, (131, 1), (66, 1), f32(0.05), f32(0.075)
POINTS, LABELS = two_spirals(97, 42)


def network():
    w1 = uniform_fill(1, np.empty((2, 256), f32), -0.7, 0.7)
    layers = [TernaryMatrix.encode(fucina.constant(uniform_fill(
        k, np.empty((n, 256), f32), -0.2, 0.2), 'out in'), 0.15) for k, n in ((2, 256), (3, 2))]
    biases = [fucina.zeros(n, 'out') for n in (256, 256, 2)]
    return TernaryNet(fucina.constant(w1, 'in out'), biases, layers)


def ours(net):
    trainer = es.Trainer(sigma=SIGMA, alpha=ALPHA, population=POPULATION, antithetic=True,
                         ternary_flip_rate=0.002, ternary_update_fraction=0.001)
    for p in (net.first, *net.biases): trainer.add_param(p)
    for m in net.layers: trainer.add_ternary_param(m, m.size)
    replicas = [copy.deepcopy(net) for _ in range(2)]
    places = [([p.data() for p in (r.first, *r.biases)], r.layers) for r in replicas]
    def score(worker, member):
        floats, genomes = places[worker]
        trainer.materialize_member(member, floats)
        trainer.materialize_ternary_member(member, genomes)
        return -replicas[worker].cross_entropy(POINTS, LABELS)[0]
    return lambda: trainer.update(trainer.evaluate_members(score, workers=2))


class InNumPy:
    "The same algorithm in whole arrays."

    def __init__(self, net):
        self.theta = np.concatenate([p.numpy().reshape(-1) for p in (net.first, *net.biases)])
        self.trits = [trits(m.blocks).astype(f32).reshape(-1) for m in net.layers]
        self.scales = [m.blocks['d'].astype(f32)[:, None] for m in net.layers]
        self.pool, self.iteration = ThreadPoolExecutor(2), 0

    def noise(self, pair):
        g = np.random.default_rng((self.iteration, pair))
        eps = g.standard_normal(self.theta.size, f32)
        return eps, [(g.integers(t.size, size=n), g.integers(0, 2, n) * f32(2) - f32(1))
                     for t, n in zip(self.trits, FLIPS)]

    def score(self, member):
        eps, flips = self.noise(member // 2)
        sign = f32(1 - member % 2 * 2)
        theta = self.theta + sign * SIGMA * eps
        w1, b1, b2, b3 = np.split(theta, (512, 768, 1024))
        layers = []
        for t, (places, deltas) in zip(self.trits, flips):
            t = t.copy()
            np.add.at(t, places, sign * deltas)
            t[places] = np.clip(t[places], -1, 1)
            layers.append(t.reshape(-1, 1, 256))
        a = np.tanh(POINTS @ w1.reshape(2, 256) + b1)
        a = np.tanh(product(a, layers[0], self.scales[0]) + b2)
        logits = product(a, layers[1], self.scales[1]) + b3
        top = logits.max(1, keepdims=True)
        sums = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
        return -(sums - logits[np.arange(len(LABELS)), LABELS]).mean()

    def __call__(self):
        with threadpool_limits(1):
            rewards = np.array(list(self.pool.map(self.score, range(POPULATION))))
        shaped = ((rewards - rewards.mean()) / (rewards.std() + 1e-8)).astype(f32)
        weights, acc = shaped[::2] - shaped[1::2], np.zeros_like(self.theta)
        votes = [np.zeros_like(t) for t in self.trits]
        for pair, c in enumerate(weights):
            eps, flips = self.noise(pair)
            acc += c * eps
            for v, (places, deltas) in zip(votes, flips): np.add.at(v, places, c * deltas)
        self.theta += ALPHA / f32(POPULATION) * acc
        for t, v, n in zip(self.trits, votes, MOVES):
            best = np.argpartition(-np.abs(v), n)[:n]
            t[best] = np.clip(t[best] + np.sign(v[best]), -1, 1)
        self.iteration += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='exit with 1 above the bar')
    parser.add_argument('--rounds', type=int, default=15)
    args = parser.parse_args()
    limit_threads(2)
    missed = False
    for shape in SHAPES:
        name = ' x '.join(map(str, shape))
        ratios = report(f'product {name}', interleave(contestants(*shape), args.rounds), 'ours')
        missed |= ratios['NumPy'] > BAR
    iterations = {'ours': ours(network()), 'NumPy': InNumPy(network())}
    ratios = report('iteration of es-ternary-spirals', interleave(iterations, args.rounds), 'ours')
    missed |= ratios['NumPy'] > BAR
    return int(args.check and missed)


if __name__ == '__main__': sys.exit(main())
