"""Run notebooks, each in a fresh kernel, and keep their outputs: execute.py NOTEBOOK ..."""
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from readme import directives

WIDGET = 'application/vnd.jupyter.widget-view+json'


def execute(path):
    "Run one notebook in place; cells marked `eval: false` keep the outputs they have."
    nb = nbformat.read(path, as_version=4)
    frozen = {}
    for cell in nb.cells:
        if cell.cell_type == 'code' and 'eval: false' in directives(cell.source)[0]:
            frozen[cell.id] = cell.source, cell.outputs
            cell.source = ''
    client = NotebookClient(nb, timeout=900, kernel_name='python3',
                            store_widget_state=False,
                            resources={'metadata': {'path': str(path.parent)}})
    client.execute()
    for cell in nb.cells:
        if cell.id in frozen: cell.source, cell.outputs = frozen[cell.id]
        elif cell.cell_type == 'code':  # bars of progress need a running kernel
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get('data', {})]
    nbformat.write(nb, path)


if __name__ == '__main__':
    os.environ.setdefault('OPENBLAS_THREAD_TIMEOUT', '4')  # as in the tests
    for path in map(Path, sys.argv[1:]):
        start = time.perf_counter()
        try: execute(path)
        except CellExecutionError as error: sys.exit(f'{path}: {error}')
        seconds, size = time.perf_counter() - start, path.stat().st_size / 1000
        print(f'{path.name:<26}{seconds:6.1f} s {size:6.0f} kB')
