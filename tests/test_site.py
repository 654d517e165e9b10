"""Pieces of the site: formulas, links, front matter. tools/browse.py looks at the whole."""
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from math_core import LatexError, LatexToMathML

ROOT = Path(__file__).resolve().parents[1]
DOCS = SimpleNamespace(**runpy.run_path(str(ROOT/'tools/docs.py')))
FINISH = SimpleNamespace(**runpy.run_path(str(ROOT/'tools/finish.py')))
KATEX = '<link rel="stylesheet" href="https://host/katex@1/katex.css">' \
        '<script src="https://host/katex@1/katex.js" defer></script>'


def formulas(path):
    "TeX of a notebook's markdown, outside of code, and whether it is displayed."
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        if cell['cell_type'] != 'markdown': continue
        text = re.sub(r'```.*?```|`[^`]*`', '', ''.join(cell['source']), flags=re.S)
        yield from ((tex, True) for tex in re.findall(r'\$\$(.+?)\$\$', text, re.S))
        text = re.sub(r'\$\$.+?\$\$', '', text, flags=re.S)
        yield from ((tex, False) for tex in re.findall(r'\$(\S|\S[^$]*\S)\$(?!\d)', text))


@pytest.mark.parametrize('path', sorted(ROOT.glob('nbs/*.ipynb')), ids=lambda path: path.stem)
def test_formulas_of_the_chapters_become_mathml(path):
    convert = LatexToMathML().convert_with_local_state
    for tex, display in formulas(path):
        shown = re.sub('<[^>]*>', '', convert(tex, displaystyle=display))
        assert '\\' not in shown.replace('\\_', ''), tex


def test_a_page_with_formulas():
    html = f'<head>{KATEX}</head><p><span class="math inline">\\(a &lt; \\sqrt b\\)</span> or ' \
           '<span class="math display">\\[\\sum_i x_i\\]</span>, not <code>\\(x\\)</code></p>'
    page = FINISH.mathml(html)
    assert page.startswith('<head></head><p><span class="math inline"><math><semantics>')
    assert '<span class="math display"><math display="block">' in page and '<msqrt>' in page
    assert page.endswith('</math></span>, not <code>\\(x\\)</code></p>')
    page = FINISH.mathml('<p>No (<span class="math inline">\\(x\\)</span>), but')
    assert page.startswith('<p>No <span class="text-nowrap">(<span class="math inline"><math>')
    assert page.endswith('</math></span>),</span> but')
    assert FINISH.mathml('<p>no formula</p>') == '<p>no formula</p>'
    with pytest.raises(LatexError): FINISH.mathml(html.replace('sqrt', 'sqroot'))


def site(folder, **pages):
    for name, body in pages.items(): (folder/f'{name}.html').write_text(f'<p>{body}</p>')
    return folder


def test_finish_names_the_page_of_a_bad_formula(tmp_path):
    site(tmp_path, one='<span class="math inline">\\(\\nonsense\\)</span>')
    with pytest.raises(SystemExit, match='one.html.*nonsense'): FINISH.finish(tmp_path)


def test_finish_takes_remote_fonts_out_of_style_sheets(tmp_path):
    (tmp_path/'a.css').write_text('@import url(https://fonts.org/x?a;b);p{color:red}')
    FINISH.finish(tmp_path)
    assert (tmp_path/'a.css').read_text() == 'p{color:red}'


@pytest.mark.parametrize('body, fault', [
    ('<a href="two.html#there">x</a><a href="#here">x</a><b id="here"></b>', None),
    ('<a href="two.html">x</a><img src="a%20b.png">', None),
    ('<a href="https://else.org/x">x</a><a href="mailto:a@b.c">x</a>', None),
    ('<a href="https://git/blob/main/README.md#L3">x</a>', None),
    ('<img src="data:image/png;base64,AAAA">', None),
    ('<a href="three.html">x</a>', 'one.html: three.html is not there'),
    ('<a href="two.html#where">x</a>', 'one.html: two.html#where has no such place'),
    ('<a href="#where">x</a>', 'one.html: #where has no such place'),
    ('<img src="b.png">', 'one.html: b.png is not there'),
    ('<script src="https://else.org/x.js"></script>', 'one.html: loads https://else.org/x.js'),
    ('<link rel="stylesheet" href="//else.org/x.css">', 'one.html: loads //else.org/x.css'),
    ('<a href="https://git/blob/main/gone.py">x</a>',
     'https://git/blob/main/gone.py is not in the repository'),
])
def test_links_are_followed(tmp_path, body, fault):
    (tmp_path/'a b.png').touch()
    site(tmp_path, one=body, two='<i id="there"></i>')
    wrong, external = FINISH.check(tmp_path, 'https://git/blob/main/')
    assert wrong == [fault] * bool(fault)
    assert external == sorted(re.findall(r'"(https?:[^"]*|//[^"]*)"', body))


def test_style_sheets_are_searched_too(tmp_path):
    (tmp_path/'a.css').write_text('p { src: url("https://else.org/x.woff") } q { src: url(b) }')
    assert FINISH.check(tmp_path, 'x') == (['a.css: loads https://else.org/x.woff'], [])


def test_pages_have_names_of_their_own():
    names = [DOCS.page(path.name) for path in ROOT.glob('nbs/*.ipynb')]
    assert len(names) == len(set(names))


def test_pages_link_to_their_notebook():
    config = SimpleNamespace(user='me', repo='it', branch='main')
    colab, source = yaml.safe_load(DOCS.links('02_rng.ipynb', config))['code-links']
    assert colab['href'] == \
        'https://colab.research.google.com/github/me/it/blob/main/nbs/02_rng.ipynb'
    assert source['href'] == 'https://github.com/me/it/blob/main/nbs/02_rng.ipynb'


@pytest.mark.parametrize('link, mended', [
    ('[`Adam`](adam.html#adam)', '[`Adam`](adam.html#adam)'),
    ('[`Adam.step`](adam.html#adam.step)', '[`Adam.step`](adam.html#adam)'),
    ('[`_adam`](adam.html#_adam)', '`_adam`'),
    ('[the formula](adam.html#the-formula)', '[the formula](adam.html#the-formula)'),
])
def test_links_to_names_without_a_heading(link, mended):
    assert DOCS.mend(f'See {link}.', {'adam'}) == f'See {mended}.'


def test_signatures_are_as_short_as_in_the_source():
    text = '### Adam.load\n\n```python\ndef load(\n    d:fucina.optim.moments.StateDType=' \
           '<StateDType.f32: 0>\n):\n```'
    data = {'text/markdown': text}
    nb = SimpleNamespace(cells=[{}, {'outputs': [{'text': 'x'}, {'data': data}]}])
    assert DOCS.documented(nb) == {'adam.load'}
    assert 'd:StateDType=StateDType.f32\n' in data['text/markdown']
