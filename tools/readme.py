"""Write README.md from nbs/index.ipynb; with --check only say whether it is up to date."""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTIVE = re.compile(r'#\|\s*(.+)')


def directives(source):
    "The `#|` lines a cell opens with, and the lines below them."
    lines = source.split('\n')
    n = next((i for i, line in enumerate(lines) if not DIRECTIVE.match(line)), len(lines))
    return [DIRECTIVE.match(line)[1].strip() for line in lines[:n]], '\n'.join(lines[n:])


def from_top(text):
    "Links of a page in nbs/, as seen from the top of the repository."
    return re.sub(r'\]\((?![a-z]+:|#)([^)]+)\)',
                  lambda m: f'](nbs/{m[1]})'.replace('nbs/../', ''), text)


def outputs(cell):
    for out in cell['outputs']:
        text = out.get('text') or out.get('data', {}).get('text/plain', [])
        if text: yield '```\n' + ''.join(text).rstrip('\n') + '\n```'


def readme(notebook):
    "The Markdown of a notebook: prose, shown code and its printed results."
    parts = []
    for cell in json.loads(notebook.read_text(encoding='utf-8'))['cells']:
        flags, source = directives(''.join(cell['source']).strip('\n'))
        if 'hide' in flags: continue
        if cell['cell_type'] == 'markdown': parts.append(from_top(source)); continue
        if 'echo: false' not in flags: parts.append(f'```python\n{source}\n```')
        parts.extend(outputs(cell))
    return '\n\n'.join(parts) + '\n'


if __name__ == '__main__':
    text, target = readme(ROOT/'nbs/index.ipynb'), ROOT/'README.md'
    if '--check' not in sys.argv: target.write_text(text, encoding='utf-8')
    elif target.read_text(encoding='utf-8') != text:
        sys.exit('README.md is not what nbs/index.ipynb gives: run make readme')
