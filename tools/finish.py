"""Finish a rendered site: site.py FOLDER.

TeX becomes MathML, which browsers draw by themselves, and what the theme would fetch from other
hosts goes: a page asks nobody but its own server. Then every link is followed.
"""
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from math_core import LatexError, LatexToMathML

ROOT = Path(__file__).resolve().parents[1]
TEX = re.compile(r'(<span class="math (inline|display)">)\\[(\[](.*?)\\[)\]](?=</span>)', re.S)
KATEX = re.compile(r'<link [^>]*/katex@[^>]*>|<script [^>]*/katex@[^>]*></script>')
REMOTE_CSS = re.compile(r'@import url\(["\']?https?:[^)]*\);')
LOADS = {'link', 'script', 'img', 'source', 'iframe', 'video', 'audio', 'embed', 'object'}


def mathml(page):
    "The page with MathML where a script would have had to read TeX."
    convert = LatexToMathML(fancy_error=False, annotation=True).convert_with_local_state

    def formula(match):
        opening, kind, tex = match.groups()
        return opening + convert(unescape(tex), displaystyle=kind == 'display')
    return TEX.sub(formula, KATEX.sub('', page))


def finish(folder):
    "Rewrite pages and style sheets so that they need no other host."
    for path in sorted(folder.rglob('*.html')):
        try: page = mathml(path.read_text(encoding='utf-8'))
        except LatexError as error: sys.exit(f'{path.name}: {error}')
        path.write_text(page, encoding='utf-8')
    for path in folder.rglob('*.css'):
        path.write_text(REMOTE_CSS.sub('', path.read_text(encoding='utf-8')), encoding='utf-8')


class Page(HTMLParser):
    "What a page calls itself by (`ids`), where it leads (`links`) and what it needs (`loads`)."
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get('id'): self.ids.add(attrs['id'])
        for key in ('href', 'src'):
            if attrs.get(key): (self.loads if tag in LOADS else self.links).append(attrs[key])


def check(folder, source=''):
    "What is wrong with the links of a site, and the external ones: two lists."
    pages = {path: Page(path) for path in sorted(folder.rglob('*.html'))}
    wrong, external = [], set()
    for path, page in pages.items():
        where = path.relative_to(folder).as_posix()
        for url in page.loads + page.links:
            parts = urlsplit(url)
            file = (path.parent/unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme in ('data', 'mailto'): continue
            if parts.scheme or parts.netloc:
                external.add(url)
                if url in page.loads: wrong.append(f'{where} loads {url} from another host')
                ours = source and url.startswith(source)
                if ours and not (ROOT/urlsplit(url[len(source):]).path).exists():
                    wrong.append(f'{where} links to {url}, which is not in the repository')
            elif not file.is_file(): wrong.append(f'{where} links to {url}, which is not there')
            elif file in pages and parts.fragment and unquote(parts.fragment) not in pages[file].ids:
                wrong.append(f'{where} links to {url}, which has no such place')
    for path in sorted(folder.rglob('*.css')):
        for url in re.findall(r'url\(["\']?(https?:[^)]*)\)', path.read_text(encoding='utf-8')):
            wrong.append(f'{path.relative_to(folder).as_posix()} loads {url} from another host')
    return sorted(set(wrong)), sorted(external)


def main(folder):
    "Finish the site in `folder`; list its external links, and fail if an internal one is broken."
    from nbdev.config import get_config
    config = get_config(path=ROOT)
    source = f'{config.git_url}/blob/{config.branch}/'
    finish(folder)
    wrong, external = check(folder.resolve(), source)
    own = [url for url in external if url.startswith(source)]
    print(f'{len(own)} links to files of the repository, and to other hosts:')
    print(*(f'  {url}' for url in external if url not in own), sep='\n')
    if wrong: sys.exit('\n'.join(wrong))


if __name__ == '__main__': main(Path(sys.argv[1]))
