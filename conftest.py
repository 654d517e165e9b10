"""Notebooks are tests: pytest runs every chapter of nbs/ as one item."""
import os
import signal

# Read when numpy is loaded: idle threads of the BLAS sleep instead of spinning.
os.environ.setdefault('OPENBLAS_THREAD_TIMEOUT', '4')
os.environ.pop('VIRTUAL_ENV', None)  # if the shell has activated another one, IPython warns

import pytest


def pytest_configure():
    # What a shell starts with & ignores Ctrl-C, and tests that wait for it would never end.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='run the slow tests and cells too')


def pytest_collection_modifyitems(config, items):
    if config.getoption('--slow'): return
    skip = pytest.mark.skip(reason='slow: run with --slow')
    for item in items:
        if 'slow' in item.keywords: item.add_marker(skip)


def pytest_collect_file(file_path, parent):
    if file_path.suffix == '.ipynb' and file_path.parent.name == 'nbs':
        return Chapter.from_parent(parent, path=file_path)


class Chapter(pytest.File):
    def collect(self): yield ChapterItem.from_parent(self, name=self.path.stem)


class ChapterItem(pytest.Item):
    def runtest(self):
        import matplotlib.pyplot as plt
        from nbdev.config import get_config
        from nbdev.test import test_nb
        config = get_config(path=self.path.parent)
        skip = set(config.tst_flags.split())
        if self.config.getoption('--slow'): skip.remove('slow')
        with plt.rc_context():  # chapters share the process, not each other's settings
            ok, _ = test_nb(self.path, skip_flags=skip, basepath=config.config_path)
        plt.close('all')
        assert ok, f'{self.path.name} failed (traceback above)'

    def reportinfo(self): return self.path, 0, f'notebook {self.path.name}'
