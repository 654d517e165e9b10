"""Stage the site for Quarto or smalldocs: docs.py FOLDER.

A renderer does not know nbdev's directives. The folder gets the processed chapters, under
the names that their links use, and a _quarto.yml that lists them by these names.
"""
import os
import re
import shutil
import sys
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path

import api
from execnb.nbio import nb2str
from fontTools import subset
from nbdev.config import get_config
from nbdev.process import NBProcessor
from nbdev.processors import FilterDefaults, exec_show_docs

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(r'^### (\w[\w.]*)$', re.M)
QUALIFIED = re.compile(r'\bfucina\.(?:\w+\.)+(?=[A-Z])')
MEMBER = re.compile(r'<(\w+\.\w+): [^<>]*>')
SYMBOL_LINK = re.compile(r'\[(`[^`\]]+`)\]\((\w+\.html#)([\w.]+)\)')
# Latin and Greek letters, operators, arrows, fences, and the italics that <mi> stands for
MATH = [(0x20, 0x7e), (0xa0, 0xff), (0x391, 0x3f5), (0x2016, 0x2061), (0x2100, 0x22ff),
        (0x2308, 0x230b), (0x27e6, 0x27ff), (0x1d434, 0x1d467), (0x1d49c, 0x1d4cf),
        (0x1d538, 0x1d551), (0x1d6e2, 0x1d71b)]


def page(name):
    "`02_rng.ipynb` -> `rng.ipynb`: the page is called like the module."
    return re.sub(r'^\d\d[a-z]*_', '', name)


class Document(exec_show_docs):
    "Runs what is exported and what documents it, with the module's names at hand."
    def begin(self):
        super().begin()
        for cell in self.nb.cells:  # an annotation may name a class of a later cell
            for name in cell.directives_.get('default_exp', ()):
                module = vars(import_module(f'fucina.{name}'))
                self.k.user_ns.update({k: module[k] for k in module if k[:2] != '__'})

    def __call__(self, cell):
        exported = cell.directives_.keys() & {'export', 'exports', 'exporti'}
        if exported or re.search(r'^show_doc\(', cell.source, re.M): super().__call__(cell)


def links(name, config):
    "Front matter for the margin of a page: its notebook, to run and to read."
    path = f'{config.user}/{config.repo}/blob/{config.branch}/nbs/{name}'
    return ('code-links:\n'
            f'  - {{text: Open in Colab, icon: play-circle, '
            f'href: "https://colab.research.google.com/github/{path}"}}\n'
            f'  - {{text: Notebook, icon: journal-code, href: "https://github.com/{path}"}}\n')


def processed(path, config):
    "A chapter without hidden cells, with rendered signatures and links within the site."
    procs = FilterDefaults().procs()
    processor = NBProcessor(path, [Document if p is exec_show_docs else p for p in procs])
    processor.process()
    source = f'{config.git_url}/blob/{config.branch}/'
    for cell in processor.nb.cells:
        text = cell.source
        if cell.cell_type == 'raw':
            text = re.sub(r'output-file: .*\n', '', text)
            text = text.replace('---\n', '---\n' + links(path.name, config), 1)
        if cell.cell_type == 'markdown':
            text = re.sub(r'\]\((\w+\.ipynb)', lambda m: f']({page(m[1])}', text)
            text = text.replace('](../', f']({source}')
        cell.source = text
    return processor.nb


def short(text):
    "Signatures as short as in the source."
    return MEMBER.sub(r'\1', QUALIFIED.sub('', text))


def documented(nb):
    "Names that have a heading of their own in a chapter, whose signatures become short."
    names = set()
    outputs = [out for cell in nb.cells for out in cell.get('outputs', ())]
    for data in (out.get('data', {}) for out in outputs):
        if 'text/markdown' not in data: continue
        text = short(''.join(data['text/markdown']))
        data['text/markdown'] = text
        names.update(name.lower() for name in HEADING.findall(text))
    return names


def mend(text, names):
    "A link to a method without a heading leads to its class; without that it is no link."
    def mended(match):
        code, target, name = match.groups()
        while name and name not in names: name = name.rpartition('.')[0]
        return f'[{code}]({target}{name})' if name else code
    return SYMBOL_LINK.sub(mended, text)


def math_font(path):
    "STIX Two Math, as far as formulas use it; other fonts do not know how a root grows."
    options = subset.Options(flavor='woff', layout_features=['*'])
    with as_file(files('ziamath')/'fonts'/'STIXTwoMath-Regular.ttf') as whole:
        font = subset.load_font(whole, options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[u for first, last in MATH for u in range(first, last + 1)])
    subsetter.subset(font)
    subset.save_font(font, path, options)


def stage(folder):
    "Fill `folder` with a site that any renderer of Quarto projects can read."
    config = get_config(path=ROOT)
    home = f'{config.doc_host}{config.doc_baseurl}/'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chapters = {p.name: processed(p, config) for p in sorted(ROOT.glob('nbs/*.ipynb'))}
    names = set().union(*map(documented, chapters.values()))
    for name, nb in chapters.items():
        text = mend(nb2str(nb).replace(home, ''), names)
        (folder/page(name)).write_text(text, encoding='utf-8')
    for name, text in api.pages().items():
        text = mend(short(text).replace(home, ''), names)
        (folder/name).write_text(text, encoding='utf-8')
    for name in ('styles.css', 'favicon.svg'): shutil.copy(ROOT/'nbs'/name, folder)
    math_font(folder/'math.woff')
    site = (ROOT/'_quarto.yml').read_text(encoding='utf-8')
    site = re.sub(r'nbs/([\w*]+\.\w+)', lambda m: page(m[1]), site)
    (folder/'_quarto.yml').write_text(site, encoding='utf-8')


if __name__ == '__main__':
    target = Path(sys.argv[1]).resolve()
    os.chdir(ROOT)  # nbdev looks for its settings here
    os.environ['IN_TEST'] = '1'  # the last cell of a chapter must not export
    stage(target)
