"""Finish a rendered site: finish.py FOLDER.

TeX becomes MathML, which browsers draw by themselves, and what the theme would fetch from
elsewhere goes: a page asks nobody but its own server. Then every link is followed.
"""
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from math_core import LatexError, LatexToMathML

ROOT = Path(__file__).resolve().parents[1]
TEX = re.compile(
    r'(?<=<span class="math )(inline|display)">\\[(\[](.*?)\\[)\]](?=</span>)', re.S)
# a formula counts as a picture: a line may end before the comma that follows it
GLUED = re.compile(r'([(\[]*)(<span class="math inline">.*?</span>)([-)\].,:;!?’]*)', re.S)
KATEX = re.compile(r'<link [^>]*/katex@[^>]*>|<script [^>]*/katex@[^>]*></script>')
REMOTE_CSS = re.compile(r'@import url\(["\']?https?:[^)]*\);')
REMOTE_URL = re.compile(r'url\(\s*["\']?(https?:[^"\')]*)')
LOADING = {'link', 'script', 'img', 'source', 'iframe', 'video', 'audio', 'embed', 'object'}


def mathml(html):
    "The page with MathML where a script would have had to read TeX."
    convert = LatexToMathML(fancy_error=False, annotation=True).convert_with_local_state

    def formula(match):
        kind, tex = match.groups()
        return f'{kind}">{convert(unescape(tex), displaystyle=kind == "display")}'

    def glued(match):
        before, math, after = match.groups()
        return f'<span class="text-nowrap">{match[0]}</span>' if before or after else math
    return GLUED.sub(glued, TEX.sub(formula, KATEX.sub('', html)))


def finish(folder):
    "Rewrite pages and style sheets so that they need no other host."
    for path in sorted(folder.rglob('*.html')):
        try: html = mathml(path.read_text(encoding='utf-8'))
        except LatexError as error: sys.exit(f'{path.name}: {error}')
        path.write_text(html, encoding='utf-8')
    for path in folder.rglob('*.css'):
        css = path.read_text(encoding='utf-8')
        path.write_text(REMOTE_CSS.sub('', css), encoding='utf-8')


class Page(HTMLParser):
    "The places of a page (`ids`), where it leads (`links`) and what it needs (`loads`)."
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), set(), set()
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get('id'))
        urls = self.loads if tag in LOADING else self.links
        urls.update(attrs[key] for key in ('href', 'src') if attrs.get(key))


def broken(url, path, pages):
    "Why the page at `path` cannot follow a link within the site, or None."
    parts = urlsplit(url)
    file = (path.parent/unquote(parts.path)).resolve() if parts.path else path
    if not file.is_file(): return f'{url} is not there'
    if file in pages and parts.fragment and unquote(parts.fragment) not in pages[file].ids:
        return f'{url} has no such place'


def check(folder, source):
    "What is wrong with the links of a site, and the URLs of other hosts it leads to."
    folder = folder.resolve()
    pages = {path: Page(path) for path in sorted(folder.rglob('*.html'))}
    wrong, external = {}, set()
    for path, page in pages.items():
        name = path.relative_to(folder).as_posix()
        for url in sorted(page.loads | page.links):
            if not re.match(r'\w+:|//', url):
                fault = broken(url, path, pages)
                if fault: wrong.setdefault(fault, name)  # one page will do
            elif not url.startswith(('data:', 'mailto:')):
                external.add(url)
                if url in page.loads: wrong.setdefault(f'loads {url}', name)
    for path in sorted(folder.rglob('*.css')):
        for url in REMOTE_URL.findall(path.read_text(encoding='utf-8')):
            wrong[f'loads {url}'] = path.relative_to(folder).as_posix()
    for url in sorted(external):
        if url.startswith(source) and not (ROOT/urlsplit(url[len(source):]).path).exists():
            wrong[f'{url} is not there'] = 'in the repository'
    return [f'{name}: {fault}' for fault, name in wrong.items()], sorted(external)


def main(folder):
    "Finish the site, list its external links, fail if a link of its own leads nowhere."
    from nbdev.config import get_config
    config = get_config(path=ROOT)
    source = f'{config.git_url}/blob/{config.branch}/'
    finish(folder)
    wrong, external = check(folder, source)
    own = [url for url in external if f'/{config.user}/{config.repo}/' in url]
    print(f'{len(own)} links to files of the repository and to Colab; to other hosts:')
    for url in external:
        if url not in own: print(' ', url)
    if wrong: sys.exit('\n'.join(wrong))


if __name__ == '__main__': main(Path(sys.argv[1]))
