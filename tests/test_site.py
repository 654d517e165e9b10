"""Pieces of the site: formulas, links, front matter. tools/browse.py looks at the whole."""
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from math_core import LatexError, LatexToMathML

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT/'tools'))
import api
import docs
import finish

import fucina

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
    page = finish.mathml(html)
    assert page.startswith('<head></head><p><span class="math inline"><math><semantics>')
    assert '<span class="math display"><math display="block">' in page and '<msqrt>' in page
    assert page.endswith('</math></span>, not <code>\\(x\\)</code></p>')
    page = finish.mathml('<p>No (<span class="math inline">\\(x\\)</span>), but')
    assert page.startswith('<p>No <span class="text-nowrap">(<span class="math inline"><math>')
    assert page.endswith('</math></span>),</span> but')
    assert finish.mathml('<p>no formula</p>') == '<p>no formula</p>'
    with pytest.raises(LatexError): finish.mathml(html.replace('sqrt', 'sqroot'))


def site(folder, **pages):
    for name, body in pages.items(): (folder/f'{name}.html').write_text(f'<p>{body}</p>')
    return folder


def test_finish_names_the_page_of_a_bad_formula(tmp_path):
    site(tmp_path, one='<span class="math inline">\\(\\nonsense\\)</span>')
    with pytest.raises(SystemExit, match='one.html.*nonsense'): finish.finish(tmp_path)


def test_finish_takes_remote_fonts_out_of_style_sheets(tmp_path):
    (tmp_path/'a.css').write_text('@import url(https://fonts.org/x?a;b);p{color:red}')
    finish.finish(tmp_path)
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
     'in the repository: https://git/blob/main/gone.py is not there'),
])
def test_links_are_followed(tmp_path, body, fault):
    (tmp_path/'a b.png').touch()
    site(tmp_path, one=body, two='<i id="there"></i>')
    wrong, external = finish.check(tmp_path, 'https://git/blob/main/')
    assert wrong == [fault] * bool(fault)
    assert external == sorted(re.findall(r'"(https?:[^"]*|//[^"]*)"', body))


def test_style_sheets_are_searched_too(tmp_path):
    (tmp_path/'a.css').write_text('p { src: url("https://else.org/x.woff") } q { src: url(b) }')
    assert finish.check(tmp_path, 'x') == (['a.css: loads https://else.org/x.woff'], [])


def test_pages_link_to_their_notebook():
    config = SimpleNamespace(user='me', repo='it', branch='main')
    colab, source = yaml.safe_load(docs.links('02_rng.ipynb', config))['code-links']
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
    assert docs.mend(f'See {link}.', {'adam'}) == f'See {mended}.'


def test_signatures_are_as_short_as_in_the_source():
    text = '### Adam.load\n\n```python\ndef load(\n    d:fucina.optim.moments.StateDType=' \
           '<StateDType.f32: 0>\n):\n```'
    data = {'text/markdown': text}
    nb = SimpleNamespace(cells=[{}, {'outputs': [{'text': 'x'}, {'data': data}]}])
    assert docs.documented(nb) == {'adam.load'}
    assert 'd:StateDType=StateDType.f32\n' in data['text/markdown']


def test_the_api_has_a_page_for_each_module_and_the_bar_a_link_to_it():
    site = yaml.safe_load((ROOT/'_quarto.yml').read_text(encoding='utf-8'))['website']
    menu, = (entry['menu'] for entry in site['navbar']['left'] if 'menu' in entry)
    assert [entry['href'] for entry in menu] == [f'nbs/api_{name}.md' for name in api.doors()]


def test_the_api_names_what_is_public_and_each_method_once():
    text = api.page(fucina.optim, lambda name: f'chapter.html#{name}')
    headings = re.findall(r'^##+ (.*)$', text, re.M)
    assert len(headings) == len(set(headings))
    assert {'AdamW', 'AdamWConfig', 'Optimizer.step', 'Optimizer.clip_grad_norm'} <= set(headings)
    assert 'Adam.step' not in headings  # its base is public
    assert not [name for name in headings if '_' in (name[0], name.partition('.')[2][:1])]
    assert '[`AdamW`](chapter.html#fucina.optim.adam.AdamW)' in text
    assert '## StateDType\n\nOne of `f32`, ' in text
    assert '    t:Named, # a variable' in text


def test_the_api_of_the_package_has_tensors_with_all_their_methods():
    headings = set(re.findall(r'^##+ (.*)$', api.page(fucina, str), re.M))
    wanted = {f'Tensor.{name}' for name in dir(fucina.Tensor) if name[0] != '_'}
    assert {'Tensor', 'variable', 'Tensor.cross_entropy', 'Tensor.backward'} <= headings
    assert len(wanted & headings) > 80
