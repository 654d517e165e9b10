"""Write README.md from nbs/index.ipynb; with --check only say whether it is up to date."""
import base64
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


def outputs(cell, flags, images):
    "Printed results as fenced text, figures as links; their bytes are added to `images`."
    alt = next((flag[9:] for flag in flags if flag.startswith('fig-alt: ')), '')
    for out in cell['outputs']:
        data = out.get('data', {})
        if 'image/png' in data:
            name = f'images/readme-{len(images) + 1}.png'
            images[name] = base64.b64decode(data['image/png'])
            yield f'![{alt}]({name})'
        elif text := out.get('text') or data.get('text/plain'):
            yield '```\n' + ''.join(text).rstrip('\n') + '\n```'


def readme(notebook):
    "What a notebook gives: README.md with its prose, shown code and results; its figures."
    parts, images = [], {}
    for cell in json.loads(notebook.read_text(encoding='utf-8'))['cells']:
        flags, source = directives(''.join(cell['source']).strip('\n'))
        if 'hide' in flags: continue
        if cell['cell_type'] == 'markdown':
            parts.append(from_top(source))
            continue
        if 'echo: false' not in flags: parts.append(f'```python\n{source}\n```')
        parts.extend(outputs(cell, flags, images))
    text = '\n\n'.join(parts) + '\n'
    return {'README.md': text.encode(), **images}


if __name__ == '__main__':
    for name, content in readme(ROOT/'nbs/index.ipynb').items():
        path = ROOT/name
        if '--check' not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        elif not path.exists() or path.read_bytes() != content:
            sys.exit(f'{name} is not what nbs/index.ipynb gives: run make readme')
