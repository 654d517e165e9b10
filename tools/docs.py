"""Stage the site for Quarto or smalldocs: docs.py FOLDER.

A renderer does not know nbdev's directives. The folder gets the processed chapters, under
the names that their links use, and a _quarto.yml that lists them by these names.
"""
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

os.environ['IN_TEST'] = '1'  # the last cell of a chapter must not export

from execnb.nbio import nb2str
from nbdev.config import get_config
from nbdev.process import NBProcessor
from nbdev.processors import FilterDefaults, exec_show_docs

ROOT = Path(__file__).resolve().parents[1]


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


def processed(path, home, source):
    "A chapter without hidden cells, with rendered signatures and links within the site."
    procs = FilterDefaults().procs()
    processor = NBProcessor(path, [Document if p is exec_show_docs else p for p in procs])
    processor.process()
    for cell in processor.nb.cells:
        text = cell.source
        if cell.cell_type == 'raw': text = re.sub(r'output-file: .*\n', '', text)
        if cell.cell_type == 'markdown':
            text = re.sub(r'\]\((\w+\.ipynb)', lambda m: f']({page(m[1])}', text)
            text = text.replace('](../', f']({source}')
        cell.source = text
    return nb2str(processor.nb).replace(home, '')


def stage(folder):
    "Fill `folder` with a site that any renderer of Quarto projects can read."
    config = get_config(path=ROOT)
    home = f'{config.doc_host}{config.doc_baseurl}/'
    source = f'{config.git_url}/blob/{config.branch}/'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(ROOT.glob('nbs/*.ipynb')):
        target = folder/page(path.name)
        target.write_text(processed(path, home, source), encoding='utf-8')
    shutil.copy(ROOT/'nbs/styles.css', folder)
    site = (ROOT/'_quarto.yml').read_text(encoding='utf-8')
    site = re.sub(r'nbs/([\w*]+\.\w+)', lambda m: page(m[1]), site)
    (folder/'_quarto.yml').write_text(site, encoding='utf-8')


if __name__ == '__main__':
    target = Path(sys.argv[1]).resolve()
    os.chdir(ROOT)  # nbdev looks for its settings here
    stage(target)
