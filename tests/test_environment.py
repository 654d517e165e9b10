"""The label of a result, and the check of subnormals."""
import subprocess
import sys

import numpy as np
import pytest

import fucina.environment as environment
from fucina.environment import Config, config, keeps_subnormals


def test_config_names_what_computes():
    label = config()
    assert label.python == '.'.join(map(str, sys.version_info[:3]))
    assert label.numpy == np.__version__ and label.subnormals == 'kept'
    assert label.cores >= 1 and label.threads >= 1 and label.gemm in ('blas', 'pinned')
    assert label.processor and label.blas
    lines = repr(label).splitlines()
    assert len(lines) == len(Config.__dataclass_fields__) and 'blas threads' in repr(label)
    assert label._repr_html_().count('<tr>') == len(lines)


def test_config_without_threadpoolctl(monkeypatch):
    monkeypatch.setitem(sys.modules, 'threadpoolctl', None)
    label = config()
    assert label.blas_threads is None and 'blas threads  unknown' in repr(label)


def test_config_without_proc(monkeypatch):
    def missing(*args, **kwargs): raise FileNotFoundError
    monkeypatch.setattr('builtins.open', missing)
    monkeypatch.setattr(environment.platform, 'system', lambda: 'Darwin')
    monkeypatch.setattr(environment.subprocess, 'run', missing)
    assert environment._processor()


def test_flushed_subnormals_are_seen():
    pytest.importorskip('torch')
    code = ('import torch\nfrom fucina.environment import config, keeps_subnormals\n'
            'assert keeps_subnormals()\n'
            'if not torch.set_flush_denormal(True): raise SystemExit(77)\n'
            'assert not keeps_subnormals() and "flushed" in config().subnormals\n')
    code = subprocess.run([sys.executable, '-c', code], timeout=120).returncode
    if code == 77: pytest.skip('this processor cannot flush')
    assert code == 0 and keeps_subnormals()
