"""Every public callable explains itself: a docstring, a comment for each parameter, and a call in
an assertion of its own notebook. What is missing is listed by name.

A name is public if it can be reached from `fucina` or a module that it offers: functions, classes,
and the methods of these classes, inherited ones included. What else a chapter exports is shared
by chapters: it has docstring and comments too, and runs when a call that is asserted runs.

A call counts as asserted

- within an `assert`, or in the block or the arguments of an expected refusal;
- in a function or class of a cell that is used in such a place;
- in a statement whose result, or object, an assertion further down the same cell depends on;
- as a statement of its own right in front of an assertion, which is there to see its effect.

A class is called by name, its members too (`MuonScale.spectral`), or is the base of one that is.
A method may be asserted in the notebook of a class that inherits it. Errors are listed and raised
in their own chapter."""
import ast
import importlib
import inspect
import io
import json
import re
import tokenize
from functools import cache, cached_property
from pathlib import Path

import pytest

import fucina

ROOT = Path(__file__).resolve().parents[1]
SOURCE = re.compile(r'File to edit: (?:\.\./)+(nbs/\w+\.ipynb)')
RETURNED = {'exec.ExecScope', 'lora.attach.Adapters', 'transforms.CustomOp',  # by public functions
            'optim.frames.FrameInfo', 'optim.frames.SlotInfo', 'environment.Config'}
REFUSALS = {'raises', 'warns', 'refused', 'complaint'}
Def = (ast.FunctionDef, ast.ClassDef)


def decorators(node):
    return {getattr(d, 'id', getattr(d, 'attr', getattr(getattr(d, 'func', None), 'id', '')))
            for d in node.decorator_list}


class Public:
    "An exported function or class, or a method of one."

    def __init__(self, module, node, owner=None):
        self.module, self.node, self.owner, self.name = module, node, owner, node.name
        self.path = '.'.join(filter(None, (module.name, owner, node.name)))
        self.top = f'{module.name}.{owner or node.name}'

    is_class = property(lambda self: isinstance(self.node, ast.ClassDef))
    is_error = property(lambda self: self.module.name == 'errors')

    @property
    def is_called(self):
        "Whether it is for calling: no property, and no class that is only a base of others."
        return not (decorators(self.node) & {'property', 'cached_property'}
                    or self.is_error or self.is_class and self.name in bases())

    def parameters(self):
        "Names and lines of its parameters, or of the fields of a record."
        node = self.node
        if self.is_class:
            init = [f for f in node.body if getattr(f, 'name', '') == '__init__']
            if not init:
                record = 'dataclass' in decorators(node) or any(
                    getattr(b, 'id', '') in ('NamedTuple', 'Config') for b in node.bases)
                fields = [f for f in node.body if record and isinstance(f, ast.AnnAssign)]
                return [(f.target.id, f.lineno, f.end_lineno) for f in fields
                        if 'ClassVar' not in ast.dump(f.annotation)]
            node = init[0]
        a = node.args
        found = [p for p in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if p]
        if self.owner or self.is_class:
            found = [p for p in found if p.arg not in ('self', 'cls')]
        return [(p.arg, p.lineno, p.end_lineno) for p in found]

    def uncommented(self):
        "Parameters without a comment in their line or above it; a comment is of the last in line."
        found, returns = self.parameters(), getattr(self.node, 'returns', None)
        last = {line: name for name, line, _ in found}
        taken = {returns.lineno} if returns else set()
        behind, above = self.module.comments
        return [name for name, first, end in found
                if not (end in behind - taken and last[first] == name or first - 1 in above)]


class Module:
    def __init__(self, path):
        self.text = path.read_text(encoding='utf-8')
        self.tree = ast.parse(self.text)
        self.name = '.'.join(path.relative_to(ROOT/'fucina').with_suffix('').parts)
        self.notebook = ROOT/SOURCE.search(self.text)[1]
        exported, = [n.value for n in self.tree.body if isinstance(n, ast.Assign)
                     and getattr(n.targets[0], 'id', '') == '__all__']
        tops = [n for n in self.tree.body
                if isinstance(n, Def) and n.name in ast.literal_eval(exported)]
        self.publics = {p.path: p for p in self._publics(tops)}.values()  # the last definition

    def _publics(self, tops):
        for node in tops:
            yield Public(self, node)
            for f in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(f, ast.FunctionDef) and f.name[0] != '_' and 'setter' not in decorators(f):
                    yield Public(self, f, node.name)

    @cached_property
    def comments(self):
        "Lines that carry a comment, and lines that hold nothing else."
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        lines = {t.start[0]: t.line.lstrip()[0] == '#' for t in tokens if t.type == tokenize.COMMENT
                 and not t.string.startswith(('# type:', '# %%', '# pyright'))}
        return set(lines), {line for line, alone in lines.items() if alone}


@cache
def modules():
    return [Module(path) for path in sorted((ROOT/'fucina').rglob('*.py'))
            if SOURCE.search(path.read_text(encoding='utf-8'))]


@cache
def publics(): return [p for m in modules() for p in m.publics]


@cache
def bases():
    "Names of the classes that others of the package derive from."
    classes = [n for m in modules() for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)]
    return {getattr(b, 'id', getattr(getattr(b, 'value', None), 'id', ''))
            for n in classes for b in n.bases}


def doors(package):
    "A package, and the modules that it offers."
    yield package
    for thing in map(package.__dict__.get, package.__all__):
        if inspect.ismodule(thing) and thing.__name__.startswith('fucina.'): yield from doors(thing)


@cache
def reached():
    "`module.name` of what can be reached from the doors; of a class, all it is made of."
    found = set(RETURNED)
    for module in (*doors(fucina), fucina.param_registry):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing): continue
            for t in thing.__mro__ if isinstance(thing, type) else (thing,):
                home = getattr(t, '__module__', None) or module.__name__
                found.add(f'{home}.{getattr(t, "__name__", name)}'.removeprefix('fucina.'))
    return found


@cache
def heirs():
    "For each class, the notebooks of the modules in which others derive from it."
    found = {}
    for m in modules():
        loaded = importlib.import_module(f'fucina.{m.name}')
        for thing in vars(loaded).values():
            if isinstance(thing, type) and thing.__module__ == loaded.__name__:
                for base in thing.__mro__:
                    key = f'{base.__module__}.{base.__name__}'.removeprefix('fucina.')
                    found.setdefault(key, {m.notebook}).add(m.notebook)
    return found


@cache
def class_names(): return {p.name for p in publics() if p.is_class}


@cache
def words(node):
    "Names that a piece of code calls or decorates with, and all that it mentions."
    calls, seen = set(), set()
    for n in ast.walk(node):
        if isinstance(n, ast.Name): seen.add(n.id)
        elif isinstance(n, ast.Attribute): seen.add(n.attr)
        elif isinstance(n, ast.Call): calls.add(getattr(n.func, 'attr', getattr(n.func, 'id', None)))
        elif isinstance(n, Def): calls |= decorators(n)
    return calls | seen & class_names(), seen


def called(node): return words(node)[0]


def mentioned(node): return words(node)[1]


def refusal(node):
    return isinstance(node, ast.Call) and getattr(
        node.func, 'attr', getattr(node.func, 'id', '')) in REFUSALS


def closure(names, bodies):
    "What these names call, and what that calls, as far as it is written in `bodies`."
    found, todo = set(), set(names)
    while todo:
        name = todo.pop()
        if name in found: continue
        found.add(name)
        todo |= bodies.get(name, set())
    return found


class Chapter:
    "What the assertions of a notebook call."

    def __init__(self, path):
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        sources = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
        self.cells = [ast.parse(s) for s in sources
                      if not re.search(r'^#\|\s*(exports?i?|eval: false)\b', s, re.M)]
        self.helpers, self.mine = {}, set()
        for n in (n for cell in self.cells for n in ast.walk(cell)):
            if isinstance(n, Def): self._helper(n.name, n)
            elif isinstance(n, ast.Assign) and isinstance(n.value, ast.Lambda):
                self._helper(getattr(n.targets[0], 'id', ''), n.value)
            elif isinstance(n, ast.alias) and n.asname: self.helpers[n.asname] = {n.name}
            elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store): self.mine.add(n.id)
        self.calls, self.passed = set(), set()
        for cell in self.cells: self._read(cell)

    def _helper(self, name, node):
        self.helpers.setdefault(name, set()).update(called(node) | mentioned(node))

    def _read(self, cell):
        "From the last statement to the first: which of them do the assertions depend on?"
        own, wanted, before_claim = self.mine | self.helpers.keys(), set(), False
        for node in reversed(cell.body):
            if isinstance(node, Def):
                for d in node.decorator_list:  # `@op.vjp` works on `op`
                    if mentioned(d) & wanted: self.calls |= decorators(node)
                continue
            claims = any(isinstance(n, ast.Assert) or refusal(n) for n in ast.walk(node))
            alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            shown = alone and getattr(node.value.func, 'id', '') == 'print'
            helped = closure(mentioned(node) & self.helpers.keys(), self.helpers)
            used = (mentioned(node) | helped) & own
            counts = claims or not shown and (alone and before_claim or used & wanted)
            if counts:
                self.calls |= called(node) | helped
                self.passed |= mentioned(node)
                wanted |= used
            for n in ast.walk(node) if claims else ():
                if refusal(n): self.calls |= set().union(*map(mentioned, n.args))
            before_claim = claims or alone and before_claim


chapter = cache(Chapter)


@cache
def bodies():
    "What the functions, methods, classes and tables of the package call and pass on, by name."
    found = {}
    for n in (n for m in modules() for n in ast.walk(m.tree)):
        name = n.name if isinstance(n, Def) else ''
        if isinstance(n, (ast.Assign, ast.AnnAssign)):
            name = getattr(n.targets[0] if isinstance(n, ast.Assign) else n.target, 'id', '')
        if name not in ('', '__all__'): found.setdefault(name, set()).update(called(n) | mentioned(n))
    return found


@cache
def run(notebook):
    "What the assertions of a notebook call, also by way of the package."
    return closure(chapter(notebook).calls | chapter(notebook).passed, bodies())


def asserted(p):
    homes = heirs().get(p.top, {p.module.notebook}) if p.owner else {p.module.notebook}
    return any(p.name in (chapter(home).calls if p.top in reached() else run(home))
               for home in homes)


def test_every_public_callable_has_a_docstring():
    assert [p.path for p in publics() if ast.get_docstring(p.node) is None] == []


def test_every_parameter_has_a_comment():
    found = {p.path: names for p in publics() if (names := p.uncommented())}
    assert found == {}


def test_every_public_callable_is_asserted_in_its_notebook():
    missing = {}
    for p in publics():
        if p.is_called and not asserted(p):
            missing.setdefault(p.module.notebook.stem, []).append(p.path)
    assert missing == {}


@pytest.mark.parametrize('cell, calls', [
    ('assert f(g(1)) == 2', 'f g'), ('x = f(1)\nassert x == 2', 'f'), ('f(1)\nprint(g(2))', ''),
    ('with pytest.raises(E): f(1)', 'f'), ('refused(E, f, 1)', 'f'),
    ('x.f(1)\nassert x.g() == 2', 'f g'), ('f(1)\nassert g() == 2', 'f g'),
    ('def h(): return f(1)\nassert h() == 2', 'f h'), ('assert f(1)\ng(2)', 'f'),
    ('f = h(1)\n@f.g\ndef _(): pass\nassert f == 2', 'g h'), ('@h\ndef f(): pass\nassert f()', 'f h'),
    ('x = f(1)\ny = g(x)\nassert y == 2', 'f g'), ('x = f(1)\nassert z == 2', '')])
def test_which_calls_are_asserted(cell, calls, tmp_path):
    path = tmp_path/'chapter.ipynb'
    path.write_text(json.dumps({'cells': [{'cell_type': 'code', 'source': [cell]}]}))
    assert Chapter(path).calls & set('fgh') == set(calls.split())
