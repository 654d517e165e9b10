"""What is generated equals what its source gives."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob('nbs/*.ipynb'))


def command(name): return str(Path(sys.executable).with_name(name))


def tree(root):
    return {path.relative_to(root).as_posix(): path.read_bytes()
            for folder in ('nbs', 'fucina') for path in (root/folder).rglob('*')
            if path.suffix in ('.py', '.ipynb') and '.ipynb_checkpoints' not in path.parts}


def test_cleaning_and_exporting_change_nothing(tmp_path):
    for name in ('nbs', 'fucina'):
        shutil.copytree(ROOT/name, tmp_path/name, ignore=shutil.ignore_patterns(
            '__pycache__', '.ipynb_checkpoints'))
    for name in ('settings.ini', 'pyproject.toml'): shutil.copy(ROOT/name, tmp_path)
    for name in ('nbdev_clean', 'nbdev_export'):
        subprocess.run([command(name)], cwd=tmp_path, check=True)
    ours, theirs = tree(ROOT), tree(tmp_path)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_every_module_has_a_notebook():
    by_hand = {'__init__.py', '__main__.py', '_modidx.py'}
    modules = [path for path in (ROOT/'fucina').rglob('*.py') if path.name not in by_hand]
    source = re.compile(r'File to edit: (?:\.\./)+(nbs/\w+\.ipynb)')
    for path in modules:
        found = source.search(path.read_text(encoding='utf-8'))
        assert found, f'{path.name} was not exported from a notebook'
        assert (ROOT/found[1]).exists(), f'{path.name} comes from {found[1]}, which is gone'


def test_readme_is_made_from_the_index():
    check = subprocess.run([sys.executable, ROOT/'tools/readme.py', '--check'],
                           capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_notebooks_stay_small_and_keep_their_outputs():
    for path in NOTEBOOKS:
        assert path.stat().st_size < 600_000, f'{path.name} has {path.stat().st_size} bytes'
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        outputs = [out for cell in cells for out in cell.get('outputs', [])]
        assert not [o for o in outputs if o['output_type'] == 'error'], path.name
        assert not [o for o in outputs if o.get('name') == 'stderr'], path.name
