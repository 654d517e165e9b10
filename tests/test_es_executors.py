"""Members scored by an executor: any pool, what travels, who comes late, who dies, who differs."""
import multiprocessing
import pickle
import threading
import warnings
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from fucina.autograd import is_grad_enabled
from fucina.apps import es_digits, es_spirals, es_ternary_spirals
from fucina.es import executors
from fucina.errors import (InvalidConfigError, NonFiniteRewardError, ReplicaDivergedError,
                           ReplicaShapeMismatchError, RewardCountMismatchError, UnknownArgumentError)
from fucina.es.trainer import Trainer
from fucina.exec import ExecContext, current_context, get_gemm
from fucina.tensor import constant, variable

FLOATS = partial(es_spirals.first_search, sigma=0.1, alpha=0.1)
TRITS = partial(es_ternary_spirals.first_search, sigma=0.05, alpha=0.075, ternary_flip_rate=0.002,
                ternary_update_fraction=0.001)
SPAWN = multiprocessing.get_context('spawn')


def recipe(make, seed=42): return partial(es_spirals.replica_of, make, seed)


def weights(trainer): return b''.join(a.tobytes() for a in executors.values_of(trainer))


class Here(Executor):
    "Carries out every order at once, in this thread, and weighs what would travel."

    def __init__(self, workers=1):
        self.shelves, self.next = [dict() for _ in range(workers)], 0
        self.bytes, self.snapshots, self.orders = 0, 0, 0

    def replace(self, worker): self.shelves[worker] = {}

    def submit(self, f, order):
        sent, done = pickle.dumps((f, order)), Future()
        f, order = pickle.loads(sent)
        worker, self.next = self.next, (self.next + 1) % len(self.shelves)
        old, executors._copies.idle = executors._copies.idle, executors.OrderedDict(self.shelves[worker])
        try: done.set_result(f(order))
        except Exception as e: done.set_exception(e)
        finally:
            self.shelves[worker], executors._copies.idle = executors._copies.idle, old
        self.orders += 1
        if order.snapshot is None: self.bytes += len(sent)
        else: self.snapshots += 1
        if done.exception() is None: self.bytes += len(pickle.dumps(done.result()))
        return done


def run(search, build, iterations, executor, workers=3, **keywords):
    for _ in range(iterations):
        rewards = search.trainer.evaluate_members(build, workers=workers, executor=executor, **keywords)
        search.trainer.update(rewards)
    return weights(search.trainer)


def alone(search, iterations):
    for _ in search.run(search.trainer.iteration + iterations): pass
    return weights(search.trainer)


# --- the same bits

@pytest.mark.parametrize('make', [FLOATS, TRITS], ids=['floats', 'trits'])
@pytest.mark.parametrize('settings', [
    {}, {'antithetic': True, 'reward_norm': 'centered_ranks'}, {'noise': 'correlated', 'cache_streams': True},
    {'anchor_decay': 'l2', 'anchor_lambda': 1.0}, {'restore_mode': 'snapshot', 'ternary_update_decay': 0.5}])
def test_threads_score_what_one_worker_scores(make, settings):
    make = partial(make, population=6, **settings)
    one, many = make(7), make(7)
    if 'anchor_decay' in settings:
        for s in (one, many): s.trainer.capture_anchor()
    with ThreadPoolExecutor(3) as pool:
        assert run(many, recipe(make, 7), 4, pool, check_every=1) == alone(one, 4)


def test_processes_score_what_one_worker_scores():
    make = partial(TRITS, population=6)
    one, many = make(42), make(42)
    with ProcessPoolExecutor(2, mp_context=SPAWN) as pool:
        assert run(many, recipe(make), 3, pool, check_every=1) == alone(one, 3)


class Narrow:
    "A model of 16-bit tensors, and its evaluator."
    def __init__(self):
        self.trainer = Trainer(sigma=0.5, alpha=0.5, population=4)
        self.replica = []
        for dtype in ('f16', 'bf16', 'f32'):
            t = constant(np.linspace(-1, 1, 7, dtype=np.float32), 'd').to(dtype)
            self.trainer.add_param(t, dtype)
            self.replica.append(np.empty_like(t.data_const()))

    def eval_member(self, worker, member):
        self.trainer.materialize_member(member, self.replica)
        return -np.abs(self.replica[0].astype(np.float32) + self.replica[2]).sum()


def build_narrow():
    m = Narrow()
    return m.trainer, m


def test_sixteen_bit_tensors():
    one, many = Narrow(), Narrow()
    before = weights(one.trainer)
    for _ in range(5): one.trainer.update(one.trainer.evaluate_members(one))
    assert run(many, build_narrow, 5, Here(2), check_every=1) == weights(one.trainer) != before


def test_settings_may_change_between_iterations():
    make = partial(FLOATS, population=6)
    one, many, executor = make(42), make(42), Here(2)
    for k, changes in enumerate([{}, {'sigma': 0.2}, {'population': 8}, {'reward_norm': 'none', 'alpha': None},
                                 {'noise': 'correlated', 'seed': 2**64 - 1}, {'antithetic': True}]):
        for s in (one, many):
            for name, value in changes.items(): setattr(s.trainer.config, name, value)
        assert run(many, recipe(make), 2, executor, check_every=1) == alone(one, 2), k
    assert executor.snapshots == 3                          # the first iteration, three portions


def test_updates_between_the_rounds_and_local_ones():
    make = partial(FLOATS, population=6)
    one, many, executor = make(42), make(42), Here(2)
    for _ in range(3):
        run(many, recipe(make), 1, executor, workers=2, check_every=1)
        for _ in many.run(many.trainer.iteration + 2): pass  # at home, without the executor
    assert weights(many.trainer) == alone(one, 9) and executor.snapshots == 2


def test_rewards_may_be_changed_before_the_update():
    make = partial(FLOATS, population=6)
    one, many, executor = make(42), make(42), Here(2)
    for _ in range(4):
        a = one.trainer.evaluate_members(one.score)
        b = many.trainer.evaluate_members(recipe(make), workers=2, executor=executor, check_every=1)
        assert a.tobytes() == b.tobytes()
        one.trainer.update(np.round(a, 2))
        many.trainer.update(np.round(b, 2))
    assert weights(one.trainer) == weights(many.trainer)


def test_settings_may_change_before_the_update_and_back():
    one, many, executor = Narrow(), Narrow(), Here(2)
    for _ in range(3):
        rewards = [one.trainer.evaluate_members(one), many.trainer.evaluate_members(
            build_narrow, workers=2, executor=executor, check_every=1)]
        for m, found in zip((one, many), rewards):
            m.trainer.config.alpha, m.trainer.config.noise = 2.0, 'correlated'
            m.trainer.update(found)
            m.trainer.config.alpha, m.trainer.config.noise = 0.5, 'iid'
    assert weights(one.trainer) == weights(many.trainer)


def test_worst_rewards_follow():
    def build():
        m = Narrow()
        m.trainer.config.reward_norm, m.trainer.nonfinite = 'centered_ranks', 'worst'
        return m.trainer, lambda worker, member: np.nan if member == 1 else m.eval_member(worker, member)
    (one, score), (many, _) = build(), build()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            one.update(one.evaluate_members(score))
            many.update(many.evaluate_members(build, workers=2, executor=pool, check_every=1))
    assert weights(one) == weights(many)


def test_a_copy_takes_over_what_the_function_was_not_told():
    def build(**settings):
        m = Narrow()
        for name, value in settings.items(): setattr(m.trainer.config, name, value)
        copies.append(m.trainer)
        return m.trainer, lambda worker, member: np.nan if member == 1 else m.eval_member(worker, member)
    copies, settings = [], {'reward_norm': 'centered_ranks', 'cache_streams': True, 'noise': 'correlated'}
    (one, score), (many, _) = build(**settings), build(**settings)
    one.nonfinite = many.nonfinite = 'worst'
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            one.update(one.evaluate_members(score))
            many.update(many.evaluate_members(build, workers=2, executor=pool, check_every=1))
    assert weights(one) == weights(many) and many._kept is not None
    assert len(copies) > 2 and all([t._kept is None for t in copies[2:]])


# --- the history

def test_nothing_is_noted_before_somebody_asks():
    trainer = Narrow().trainer
    assert trainer.history.since(0) is None
    for _ in range(3): trainer.update(np.arange(4))
    assert not trainer.history.steps and trainer.history.since(3) is None


def test_a_detour_of_the_iteration_ends_a_run():
    trainer = Narrow().trainer
    history = trainer.history
    assert history.begin(0)
    for _ in range(3): trainer.update(np.arange(4))
    trainer.iteration = 1                                    # and back to 3
    for _ in range(2): trainer.update(np.arange(4))
    assert not history.run and not history.steps and history.begin(3)


def test_a_new_run_knows_nothing_of_the_old_one():
    trainer = Narrow().trainer
    history, names = trainer.history, set()
    for start in (0, 7, 2):
        trainer.iteration = start
        assert history.begin(start) and history.told == start
        names.add(history.run)
        for _ in range(4): trainer.update(np.arange(4))
        assert [step.iteration for step in history.since(start)] == [*range(start, start + 4)]
        assert len(history.steps) == 4
    assert len(names) == 3


def test_a_copied_trainer_has_a_run_of_its_own():
    trainer, executor = Narrow().trainer, Here(1)
    trainer.update(trainer.evaluate_members(build_narrow, executor=executor))
    other = deepcopy(trainer)
    other.update(np.arange(4))
    trainer.update(-np.arange(4))
    for t in (other, trainer): t.evaluate_members(build_narrow, executor=executor, check_every=1)
    assert other.history.run != trainer.history.run and executor.snapshots == 2


def test_settings_travel_as_plain_values():
    trainer = Narrow().trainer
    trainer.config.sigma, trainer.config.noise = np.float64(0.25), 'correlated'
    assert {type(v) for v in executors.settings_of(trainer)} <= {float, int, bool, str, type(None)}
    assert executors.settings_of(trainer)[0] == 0.25


# --- orders

@pytest.fixture
def shelf(monkeypatch):
    "The copies of this process: none."
    monkeypatch.setattr(executors, '_copies', found := executors.Copies())
    return found


def asked(trainer, steps=(), snapshot=None, build=build_narrow):
    return executors.Order('run', trainer.iteration, executors.settings_of(trainer), steps, 'pinned', b'',
                           (0, 4), executors.Snapshot.of(trainer, build) if snapshot else None)


def test_a_snapshot_is_for_those_behind_and_no_others(shelf):
    home = Narrow().trainer
    first = executors.perform(asked(home, snapshot=True))
    other = asked(home, snapshot=True)
    for a in other.snapshot.values: a[...] = 0               # was it taken over?
    assert executors.perform(other) == first
    for _ in range(3): home.update(np.arange(4))
    assert executors.perform(asked(home)) == (0, None)
    assert executors.perform(asked(home, snapshot=True)).iteration == 3
    assert weights(shelf.idle['run'][0].trainer) == weights(home)


def test_a_copy_that_is_ahead_does_not_answer(shelf):
    home = Narrow().trainer
    old = asked(home, snapshot=True)
    home.update(np.arange(4))
    executors.perform(asked(home, snapshot=True))
    assert executors.perform(old._replace(snapshot=None)) == (1, None)
    assert executors.perform(old).iteration == 0             # it goes back, if there is a way


def test_a_snapshot_has_memory_of_its_own_and_graphs_hear_of_it():
    home, made = Narrow().trainer, []
    home.capture_anchor()
    snapshot = executors.Snapshot.of(home, build_narrow)
    assert not any(map(np.shares_memory, snapshot.values, executors.values_of(home)))
    def build():
        made.append(Trainer(sigma=0.5, population=4))
        made[-1].add_param(variable([0.0], 'd'))
        return made[-1], len
    trainer = build()[0]
    trainer.capture_anchor()
    copies = [executors.Copy(executors.Snapshot.of(trainer, build)) for _ in range(2)]
    assert [t.floats.table.leaves[0].version > 0 for t in made] == [False, True, True]
    anchors = [trainer.floats.anchor[0], *[c.trainer.floats.anchor[0] for c in copies]]
    assert not any([np.shares_memory(x, y) for x, y in combinations(anchors, 2)])


def test_who_evaluates_finds_the_settings_of_the_caller(shelf):
    def build():
        def score(worker, member):
            found.append((worker, get_gemm(), current_context().workers, is_grad_enabled()))
            return 0
        return Narrow().trainer, score
    found = []
    with ExecContext(workers=2): executors.perform(asked(Narrow().trainer, snapshot=True, build=build))
    assert found == 4 * [(0, 'pinned', 1, False)]


def test_the_most_advanced_copy_and_the_latest_runs(shelf):
    copies = [build_narrow()[1] for _ in range(3)]
    for m, t in zip(copies, (2, 5, 3)):
        m.trainer.iteration = t
        shelf.give_back('a', m)
    assert [shelf.borrow('a').trainer.iteration for _ in copies] == [5, 3, 2]
    assert shelf.borrow('a') is None is shelf.borrow('b')
    for run in 'abcdae': shelf.give_back(run, copies[0])
    assert list(shelf.idle) == ['c', 'd', 'a', 'e']


def test_portions_are_never_empty():
    assert [*executors.portions(2, 5)] == [(0, 1), (1, 2)]
    assert [*executors.portions(7, 3)] == [(0, 2), (2, 4), (4, 7)]


def test_what_is_sent(monkeypatch):
    class Listening(Here):
        def submit(self, f, order):
            orders.append(order)
            return super().submit(f, order)
    orders, home, executor, made, of = [], Narrow(), Listening(3), [], executors.Snapshot.of
    monkeypatch.setattr(executors.Snapshot, 'of', lambda *args: made.append(1) or of(*args))
    with ExecContext(gemm='pinned'): run(home, build_narrow, 1, executor)
    with ExecContext(gemm='blas'): run(home, build_narrow, 1, executor)
    assert [order.gemm for order in orders] == 3 * ['pinned'] + 3 * ['blas']
    assert len(made) == 1 and len({order.serial for order in orders}) == len(orders)
    for _ in range(executors.LENGTH + 6): home.trainer.update(np.arange(4))
    run(home, build_narrow, 1, executor)                     # three are too far behind
    assert len(made) == 2 and executor.snapshots == 6
    orders.clear()
    for _ in range(5): home.trainer.update(np.arange(4))     # 16 bytes each, the weights have 56
    home.trainer.history.told = home.trainer.iteration       # as if the others had heard of it
    run(home, build_narrow, 1, executor, workers=1)
    assert [(len(order.steps), order.snapshot is None) for order in orders] == [(0, True), (0, False)]


# --- what travels

@pytest.mark.parametrize('workers', [1, 3, 8])
@pytest.mark.parametrize('population', [8, 128, 1024])
def test_orders_and_answers_are_small(population, workers):
    def build():
        m = Narrow()
        m.trainer.config.population = population
        return m.trainer, lambda worker, member: member % 7
    home, executor = build()[0], Here(workers)
    executor.submit = lambda f, order, send=executor.submit: send(f, order._replace(
        snapshot=order.snapshot and order.snapshot._replace(build=build_narrow)))  # it can be pickled
    for _ in range(20):
        home.update(home.evaluate_members(build, workers=workers, executor=executor))
    assert executor.bytes / 20 <= 64 * population + 4096 * workers
    assert executor.snapshots == workers


# --- late, dead, different

def test_replaced_workers_catch_up():
    make = partial(FLOATS, population=6)
    one, many, executor = make(42), make(42), Here(3)
    for t in range(9):
        if t % 2: executor.replace(t % 3)
        run(many, recipe(make), 1, executor, check_every=1)
    assert weights(many.trainer) == alone(one, 9)
    assert 3 < executor.snapshots < 12 and executor.orders < 9 * 3 + 12


def test_a_copy_that_missed_something_gets_rewards_or_a_snapshot():
    make = partial(FLOATS, population=6)
    one, many, executor = make(42), make(42), Here(2)
    for missed, snapshots in ((1, 0), (executors.LENGTH - 2, 0), (executors.LENGTH + 1, 1)):
        run(many, recipe(make), 2, executor, workers=2)
        before, executor.next = executor.snapshots, 0
        for _ in range(missed):
            run(many, recipe(make), 1, executor, workers=1)
            executor.next = 0                                # the second has nothing to do
        assert executor.snapshots == before
        run(many, recipe(make), 1, executor, workers=2, check_every=1)
        assert executor.snapshots - before == snapshots, missed
    assert weights(many.trainer) == alone(one, many.trainer.iteration)


def test_an_answer_does_not_look_at_a_copy_that_was_given_back(monkeypatch):
    answers, submit = [], Here.submit
    class Listening(Here):
        def submit(self, f, order):
            done = submit(self, f, order)
            answers.append(done.result().iteration)
            return done
    def give_back(run, copy):
        kept(run, copy)
        copy.trainer.iteration += 40                         # another thread was quick
    kept = executors._copies.give_back
    monkeypatch.setattr(executors._copies, 'give_back', give_back)
    run(Narrow(), build_narrow, 1, Listening(1), workers=1)
    assert answers == [0]


@pytest.mark.parametrize('change', ['restore_state', 'capture_anchor', 'add_param', 'iteration'])
def test_what_no_reward_explains_begins_a_new_run(change):
    home, executor = Narrow(), Here(1)
    run(home, build_narrow, 2, executor, workers=1)
    t = home.trainer
    if change == 'restore_state': t.restore_state(t.state_fields())
    if change == 'capture_anchor': t.capture_anchor()
    if change == 'iteration': t.iteration = 9
    if change == 'add_param':
        t.add_param(constant([0.5], 'd'))
        with pytest.raises(ReplicaShapeMismatchError, match='float32'):
            run(home, build_narrow, 1, executor, workers=1)
    else:
        run(home, build_narrow, 1, executor, workers=1, check_every=1)
        assert executor.snapshots == 2


@pytest.mark.parametrize('mode, snapshots', [('regenerate', 4), ('snapshot', 1)])
def test_members_in_the_weights_leave_rounding_that_travels(mode, snapshots):
    one, many, executor = Narrow(), Narrow(), Here(1)
    for t in range(8):
        for m in (one, many):
            m.trainer.config.restore_mode = mode
            if t % 2: m.trainer.step(lambda k: k % 3)         # moves the weights, member by member
        if t % 2: continue
        one.trainer.update(one.trainer.evaluate_members(one))
        run(many, build_narrow, 1, executor, workers=1, check_every=1)
    assert weights(one.trainer) == weights(many.trainer) and executor.snapshots == snapshots


def test_members_in_a_genome_leave_nothing():
    search = TRITS(42, population=4)
    trits = Trainer(search.trainer.config)
    for s in search.trainer.genomes.slots: trits.add_ternary_param(s.blocks)
    trits.history.begin(0)
    trits.step(lambda member: member)
    assert trits.history.since(0) and not len(trits.floats)


def test_tensors_of_one_size_are_not_mixed_up():
    def build(names):
        trainer = Trainer(sigma=0.5, population=4)
        for name in names: trainer.add_param(constant([0.5], 'd'), name)
        return trainer, lambda worker, member: 0
    home = build('ab')[0]
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ReplicaShapeMismatchError, match="'a'.*'b'.*built with.*'b'.*'a'"):
            home.evaluate_members(partial(build, 'ba'), executor=pool)
        home.evaluate_members(partial(build, 'ab'), executor=pool)


def test_weights_that_differ_are_found():
    make = partial(FLOATS, population=6)
    search, executor = make(42), Here(3)
    run(search, recipe(make), 2, executor)
    search.trainer.floats.slots[0].data[3] += 1
    with pytest.raises(ReplicaDivergedError, match='iteration 2'):
        run(search, recipe(make), 1, executor, workers=1, check_every=2)
    run(search, recipe(make), 3, executor, check_every=1)   # all three begin anew
    assert executor.snapshots == 6


def test_how_often_is_asked_for():
    search, executor = FLOATS(42, population=6), Here(1)
    digests, submit = [], executor.submit
    executor.submit = lambda f, order: digests.append(bool(order.digest)) or submit(f, order)
    run(search, recipe(partial(FLOATS, population=6)), 7, executor, workers=1, check_every=3)
    assert digests == [True, False, False, True, False, False, True]


def test_checks_are_made_though_iterations_were_scored_at_home():
    home, executor, digests = Narrow(), Here(1), []
    home.trainer.iteration, submit = 1, executor.submit
    executor.submit = lambda f, order: digests.append(bool(order.digest)) or submit(f, order)
    for _ in range(6):                                       # iterations 1, 3, 5, ...
        run(home, build_narrow, 1, executor, workers=1, check_every=4)
        home.trainer.update(np.arange(4))
    assert digests == [False, False, True, False, True, False]


# --- errors

def test_errors_of_evaluators_arrive_and_the_run_goes_on():
    class Lost(Exception): pass
    broken = []
    def build():
        m = Narrow()
        def score(worker, member):
            if broken and member == 2: raise Lost(member)
            return m.eval_member(worker, member)
        return m.trainer, score
    (home, _), (one, local) = build(), build()
    with ThreadPoolExecutor(2) as pool:
        for t in range(4):
            if t == 2:
                broken.append(True)
                with pytest.raises(Lost): home.evaluate_members(build, workers=2, executor=pool)
                broken.clear()
            home.update(home.evaluate_members(build, workers=2, executor=pool, check_every=1))
    for _ in range(4): one.update(one.evaluate_members(local))
    assert weights(home) == weights(one)


def build_nothing(): return None
def build_half(): return Narrow().trainer


class Elsewhere(Executor):
    "Like the client of a cluster: its futures are others."
    def submit(self, f, order): return object()


@pytest.mark.parametrize('build', [build_nothing, build_half])
def test_what_a_build_function_returns(build):
    home = Narrow().trainer
    with pytest.raises(TypeError, match='returns a trainer and an evaluator'):
        home.evaluate_members(build, executor=Here(1))


def test_a_client_is_no_executor():
    home = Narrow().trainer
    with pytest.raises(TypeError, match=r'Elsewhere.submit returns.*get_executor\(\)'):
        home.evaluate_members(build_narrow, executor=Elsewhere())
    assert len(home.evaluate_members(build_narrow, executor=Here(1))) == home.config.population


def test_refusals_come_first():
    home, executor = Narrow().trainer, Here(1)
    ask = partial(home.evaluate_members, build_narrow, executor=executor)
    with pytest.raises(InvalidConfigError): ask(workers=0)
    with pytest.raises(InvalidConfigError): ask(check_every=0)
    with pytest.raises(RewardCountMismatchError): ask([0.0])
    with pytest.raises(TypeError): home.evaluate_members(7, executor=executor)
    assert executor.orders == 0
    rewards = ask()
    rewards[1] = np.nan
    with pytest.raises(NonFiniteRewardError): home.update(rewards)
    assert home.history.next == 0 and not home.history.steps


def test_ctrl_c_at_home_cancels_what_waits():
    class Never(Executor):
        def submit(self, f, order):
            futures.append(Future())
            return futures[-1]
    futures, home = [], Narrow().trainer
    threading.Timer(0.2, lambda: futures[1].set_exception(KeyboardInterrupt())).start()
    with pytest.raises(KeyboardInterrupt):
        home.evaluate_members(build_narrow, workers=3, executor=Never())
    assert [f.cancelled() for f in futures] == [True, False, True]
    assert weights(home) == weights(Narrow().trainer)


def test_a_process_forgets_old_runs():
    executor = Here(1)
    for _ in range(executors.RUNS + 3): run(Narrow(), build_narrow, 1, executor, workers=1)
    assert len(executor.shelves[0]) == executors.RUNS


@pytest.mark.skipif(not hasattr(executors.os, 'fork'), reason='no fork here')
def test_a_fork_while_a_thread_puts_a_copy_back():
    with executors._copies.lock, warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # fork beside threads, 3.12
        pid = executors.os.fork()
        if pid == 0: executors.os._exit(0 if executors._copies.lock.acquire(timeout=5) else 1)
    assert executors.os.waitpid(pid, 0)[1] == 0


# --- a cluster

@pytest.fixture(scope='module')
def cluster():
    distributed = pytest.importorskip('distributed')
    with distributed.LocalCluster(n_workers=3, threads_per_worker=1, processes=True,
                                  dashboard_address=':0') as found, distributed.Client(found) as client:
        yield client


def test_a_cluster_of_which_one_process_is_killed(cluster):
    make = partial(TRITS, population=12)
    one, search = make(42), make(42)
    search.client, search.build = cluster, recipe(make)
    pids = cluster.run(executors.os.getpid)
    for k in search.run(9):
        if k == 4: executors.os.kill(next(iter(pids.values())), 9)
    assert weights(search.trainer) == alone(one, 9)
    again = cluster.run(executors.os.getpid)
    assert len(set(again.values()) - set(pids.values())) <= 1


@pytest.mark.parametrize('app', [es_spirals, es_ternary_spirals, es_digits], ids=['floats', 'trits', 'digits'])
def test_programs_on_a_cluster(app, cluster, tmp_path, capsys):
    argv = ['--iterations=6', '--population=10', '--target=0', '--save-every=3']
    address = cluster.scheduler.address
    assert app.main([*argv, '--save', str(tmp_path / 'here')]) == 0
    assert app.main([*argv, '--save', str(tmp_path / 'there'), '--cluster', address]) == 0
    assert f'scored on {address}' in capsys.readouterr().out
    resumed = ['--resume', str(tmp_path / 'there' / 'checkpoint-iter-3'), '--save', str(tmp_path / 'more')]
    assert app.main(['--iterations=6', '--target=0', *resumed, '--cluster', address]) == 0
    here, there, more = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.is_file()}
                         for name in ('here', 'there', 'more')]
    assert here == there == more


def test_no_cluster_there():
    dask = pytest.importorskip('dask')
    with dask.config.set({'distributed.comm.timeouts.connect': '1s'}):
        with pytest.raises(ConnectionError, match='--cluster: nobody answers.*127.0.0.1'):
            with es_spirals.cluster_at('tcp://127.0.0.1:1'): pass


@pytest.mark.parametrize('address', ['nobody', 'nobody:port', 'carrier-pigeon://there:1'])
def test_no_address_of_a_cluster(address):
    pytest.importorskip('distributed')
    with pytest.raises(UnknownArgumentError, match='--cluster: expected an address'):
        with es_spirals.cluster_at(address): pass
