"""Fixtures of several test files."""
import gc

import pytest
from optimizers import THREADS

from fucina.exec import ExecContext
from fucina.kernels import set_workers
from fucina.optim import apollo, muon, param


@pytest.fixture(autouse=True, scope='module')
def frozen():
    "What is imported and compiled by now stays: no later collection of garbage looks at it again."
    gc.collect()
    gc.freeze()


@pytest.fixture
def pinned():
    with ExecContext(gemm='pinned') as context: yield context


@pytest.fixture(params=THREADS)
def threads(request, monkeypatch):
    "So many threads, for a small optimizer too: any size is large enough, portions are small."
    for module in (param, muon, apollo): monkeypatch.setattr(module, 'LEAST', 1)
    for name in ('SHARE', 'STRIP'): monkeypatch.setattr(apollo, name, 1)
    old = set_workers(request.param)
    yield request.param
    set_workers(old)
