"""The guide from PyTorch and back, cell by cell as it is printed."""
import json
from pathlib import Path

import numpy as np
import pytest

import fucina

GUIDE = Path(__file__).parent.parent / 'nbs' / '11k_pytorch.ipynb'


def test_the_guide_runs():
    for package in ('torch', 'safetensors.torch'): pytest.importorskip(package)
    cells = json.loads(GUIDE.read_text(encoding='utf-8'))['cells']
    names: dict = {}
    with fucina.ExecContext(gemm='pinned'):
        for cell in cells:
            if cell['cell_type'] == 'code': exec(''.join(cell['source']), names)
    assert len(names['here']) == 20
    slots = names['slots_by_name'](names['our_opt'])
    for name, p in names['theirs'].named_parameters():
        state, slot = names['their_opt'].state[p], slots[names['aliases'][name]]
        assert int(state['step']) == slot.step == 60
        np.testing.assert_allclose(state['exp_avg'].numpy().ravel(), slot.m, atol=1e-5)
