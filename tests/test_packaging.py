"""Settings agree with each other, imports only point down, the wheel holds the package."""
import ast
import configparser
import re
import shutil
import subprocess
import sys
import time
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

import fucina

try: import tomllib
except ImportError: import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(set((ROOT/'fucina').rglob('*.py')) - {ROOT/'fucina/_modidx.py'})
TOML = tomllib.loads((ROOT/'pyproject.toml').read_text(encoding='utf-8'))
SITE = yaml.safe_load((ROOT/'_quarto.yml').read_text(encoding='utf-8'))

# A module may use its own floor and those below.
FLOORS = {
    0: 'errors dtypes kernels rng',
    1: 'exec autograd ops gemm tensor transforms nn',
    2: 'safetensors state_dict param_registry training_checkpoint',
    3: 'optim lora es data plot',
    4: 'gguf quant llm',
    5: 'environment apps __init__ __main__',
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names.split()}


def settings():
    parser = configparser.ConfigParser()
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


def module_name(path):
    "`fucina/optim/sgd.py` -> `optim.sgd`; a package is its `__init__`."
    return '.'.join(path.relative_to(ROOT/'fucina').with_suffix('').parts)


def test_settings_and_pyproject_agree():
    ini, project = settings(), TOML['project']
    assert project['name'] == ini['lib_name']
    assert project['description'] == ini['description']
    assert project['keywords'] == ini['keywords'].split()
    assert project['requires-python'] == f">={ini['min_python']}"
    assert project['dependencies'] == ini['requirements'].split()
    assert project['license'].lower() == ini['license']
    scripts = [f'{name}={target}' for name, target in project['scripts'].items()]
    assert scripts == ini['console_scripts'].split()
    assert fucina.__version__ == ini['version']
    assert TOML['tool']['setuptools']['dynamic']['version']['attr'] == 'fucina.__version__'
    assert f"## {ini['version']}" in (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')
    lines = [c for c in project['classifiers'] if 'Python :: 3.' in c]
    assert lines[0].endswith(ini['min_python'])


def leaves(contents):
    for entry in contents:
        if isinstance(entry, str): yield entry
        else: yield from leaves(entry['contents'])


NUMBERED = re.compile(r'nbs/[012].*')  # chapters, which build on each other
PAGES = re.compile(r'nbs/3.*')  # about them


def test_site_lists_every_notebook_and_nothing_else():
    notebooks = {f'nbs/{path.name}' for path in ROOT.glob('nbs/*.ipynb')}
    listed = list(leaves(SITE['website']['sidebar']['contents']))
    assert len(listed) == len(set(listed))
    assert set(listed) == notebooks
    pages = [re.sub(r'nbs/\d\d[a-z]*_', '', name) for name in listed]
    assert len(set(pages)) == len(pages), 'a page is called like its file, without the number'
    assert listed[0] == 'nbs/index.ipynb'
    for part in (NUMBERED, PAGES):
        found = list(filter(part.fullmatch, listed))
        assert found == sorted(found), 'the sidebar is in reading order'
    rendered = {path for glob in SITE['project']['render'] for path in ROOT.glob(glob)}
    assert rendered == {ROOT/name for name in notebooks}


def test_readme_names_every_chapter():
    chapters = {path.name for path in ROOT.glob('nbs/[0-9]*.ipynb')}
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    assert set(re.findall(r'\(nbs/(\w+\.ipynb)\)', text)) == chapters


def test_site_points_to_the_home_of_the_project():
    ini, site = settings(), SITE['website']
    assert SITE['project']['output-dir'] == ini['doc_path']
    assert site['title'] == ini['title']
    assert site['repo-url'] == ini['git_url']
    assert site['site-url'] == ini['doc_host'] + ini['doc_baseurl']
    assert (ROOT/SITE['format']['html']['css']).exists()


def test_workflows_run_what_exists():
    flows = {path.stem: path.read_text(encoding='utf-8')
             for path in ROOT.glob('.github/workflows/*.yml')}
    jobs = yaml.safe_load(flows['tests'])['jobs']
    tested = jobs['linux']['strategy']['matrix']['python']
    assert tested == [c[-4:] for c in TOML['project']['classifiers'] if 'Python :: 3.' in c]
    files = re.findall(r'tests/test_\w+\.py', flows['tests'])
    assert files and all((ROOT/name).exists() for name in files)
    targets = re.findall(r'^([a-z]+):', (ROOT/'Makefile').read_text(encoding='utf-8'), re.M)
    assert set(re.findall(r'make (\w+)', ''.join(flows.values()))) <= set(targets)


def imported(path):
    "The modules of this package that a file imports, at its top or inside a function."
    package = ['fucina', *path.relative_to(ROOT/'fucina').parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) + 1 - node.level] if node.level else []
            base = '.'.join(base + (node.module or '').split('.')).strip('.')
            names = [f'{base}.{alias.name}' for alias in node.names]
        else: continue
        for name in names:
            parts = name.split('.')
            if parts[0] == 'fucina' and len(parts) > 1: yield '.'.join(parts[1:])


@pytest.mark.parametrize('path', SOURCES, ids=module_name)
def test_an_import_never_points_up(path):
    room = module_name(path).split('.')[0]
    assert room in FLOOR, f'{room} has no floor yet: enter it in FLOORS'
    for name in imported(path):
        other = name.split('.')[0]
        if other in FLOOR:
            assert FLOOR[other] <= FLOOR[room], f'{room} imports fucina.{name} from above'
        else: assert room == '__init__' or other == '__version__', f'{room} imports {name}'


def test_a_chapter_uses_only_chapters_before_it():
    source = re.compile(r'File to edit: (?:\.\./)+nbs/(\w+)\.ipynb')
    found = {path: source.search(path.read_text(encoding='utf-8')) for path in SOURCES}
    chapter = {module_name(path): m[1] for path, m in found.items() if m}
    def known(name):
        while name and name not in chapter: name = name.rpartition('.')[0]
        return name
    ahead = {(mine, chapter[name]) for path in SOURCES
             if (mine := chapter.get(module_name(path)))
             for name in map(known, imported(path)) if name and chapter[name] >= mine}
    assert not ahead


def test_no_module_needs_itself():
    "Imports within functions and by way of a package's `__init__` count too."
    modules = {module_name(path).removesuffix('__init__').rstrip('.'): path for path in SOURCES}
    def home(name):
        while name not in modules: name = name.rpartition('.')[0]
        return name
    graph = {name: {home(other) for other in imported(path) if other != '__version__'}
             for name, path in modules.items()}
    assert {*TopologicalSorter(graph).static_order()} == modules.keys()  # CycleError names a cycle


def test_no_parallel_numba_and_no_fastmath():
    for path in SOURCES:
        text = path.read_text(encoding='utf-8')
        for word in ('prange', 'parallel=True', 'fastmath=True'):
            assert word not in text, f'{word} in {path.name}'


def python(code, cwd=ROOT):
    return subprocess.run([sys.executable, '-c', code], cwd=cwd, check=True, text=True,
                          stdout=subprocess.PIPE).stdout


def test_import_is_light():
    heavy = ('torch matplotlib sklearn pandas jupyter_client IPython nbdev '
             'fastcore safetensors').split()
    loaded = python('import sys, fucina; print(*sys.modules)').split()
    assert set(heavy) & set(loaded) == set()
    start = time.perf_counter()
    python('import fucina')
    print(f'import fucina, interpreter included: {time.perf_counter() - start:.2f} s')


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    shutil.copytree(ROOT/'fucina', tmp_path/'fucina', ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('pyproject.toml', 'README.md', 'LICENSE'): shutil.copy(ROOT/name, tmp_path)
    python('import setuptools.build_meta as b; b.build_wheel("dist")', cwd=tmp_path)
    wheel, = (tmp_path/'dist').glob('fucina-*-py3-none-any.whl')
    with zipfile.ZipFile(wheel) as z: names = z.namelist()
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT/'fucina').rglob('*')
            if path.suffix == '.py' or path.name == 'py.typed'}
    info = f'fucina-{fucina.__version__}.dist-info/'
    assert {name for name in names if not name.startswith(info)} == ours
    assert info + 'licenses/LICENSE' in names
    assert info + 'entry_points.txt' in names
