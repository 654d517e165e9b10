"""Pages of the API for tools/docs.py: public names of each module, and their methods."""
import inspect
import json
from enum import Enum
from types import ModuleType

import fucina
from nbdev.doclinks import NbdevLookup
from nbdev.showdoc import BasicMarkdownRenderer, show_doc


def doors():
    "What users import names from: the package and the modules it offers, by name."
    offered = {name: getattr(fucina, name) for name in fucina.__all__}
    modules = {name: m for name, m in offered.items() if isinstance(m, ModuleType)}
    return {'fucina': fucina} | modules


def ours(owner, *kinds):
    "Public members of some kinds that a chapter defines, by name."
    def fits(obj):
        defined = (getattr(obj, '__module__', None) or '').startswith('fucina.')
        return defined and any(is_kind(obj) for is_kind in kinds)
    names = sorted(getattr(owner, '__all__', dir(owner)))
    found = {name: getattr(owner, name, None) for name in names if name[0] != '_'}
    return {name: obj for name, obj in found.items() if fits(obj)}


def methods(cls, public):
    "What a class does, but for what it has from another public class."
    def inherited(name):
        definer = next(base for base in cls.__mro__ if name in vars(base))
        return any(base in public and issubclass(base, definer) for base in cls.__mro__[1:])
    found = ours(cls, inspect.isroutine)
    return {name: f for name, f in found.items() if not inherited(name)}


def entry(obj, name, level):
    "Heading, signature with a comment for each parameter, and docstring."
    if inspect.isclass(obj) and issubclass(obj, (Enum, Exception)):  # not much of a call
        values = ', '.join(f'`{value}`' for value in getattr(obj, '__members__', ()))
        choice = f'One of {values}.\n\n' if values else ''
        return f'---\n\n{"#" * level} {name}\n\n{choice}*{inspect.getdoc(obj)}*'
    doc = show_doc(obj, name=name, title_level=level, renderer=BasicMarkdownRenderer)
    return doc._repr_markdown_().replace('#LNone', '')


def page(module, chapter):
    "The markdown of a page; `chapter` says where a dotted name is explained."
    public = ours(module, inspect.isclass, inspect.isroutine)
    title, about = module.__name__, json.dumps(inspect.getdoc(module))
    parts = [f'---\ntitle: {title}\ndescription: {about}\n---']
    for known, obj in public.items():
        parts.append(entry(obj, known, 2))
        where = chapter(f'{obj.__module__}.{obj.__qualname__}')
        if where: parts.append(f'How it is built: [`{known}`]({where})')
        if not inspect.isclass(obj): continue
        bases = [f'[`{name}`](#{name.lower()})' for name, base in public.items()
                 if base in obj.__mro__[1:]]
        if bases: parts.append(f'Inherits from {", ".join(bases)}')
        for name, f in methods(obj, public.values()).items():
            parts.append(entry(f, f'{known}.{name}', 3))
    return '\n\n'.join(parts) + '\n'


def pages():
    "`api_NAME.md` and its text for each door."
    chapter = NbdevLookup().doc
    return {f'api_{name}.md': page(door, chapter) for name, door in doors().items()}
