"""The numbered examples as tests: the text that runs is that of the cells of the training chapter."""
import ast
import json
import re
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parents[1]/'nbs'
NUMBERS = [*(f'A{n}' for n in range(1, 10)), *(f'B{n}' for n in range(1, 4))]


def cells(path, kind):
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        if cell['cell_type'] == kind: yield ''.join(cell['source'])


def only_imports(text):
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(text).body)


def examples():
    "Number and program of each: the imports at the top of its page, and the cell."
    for path in sorted(NBS.glob('*.ipynb')):
        code = list(cells(path, 'code'))
        for text in code:
            if number := re.match(r'# ([A-Z]\d): ', text):
                yield number[1], f'{next(filter(only_imports, code))}\n{text}'


EXAMPLES = list(examples())


def test_each_example_stands_in_one_place():
    assert sorted(number for number, _ in EXAMPLES) == NUMBERS


@pytest.mark.parametrize('number, program', EXAMPLES, ids=[number for number, _ in EXAMPLES])
def test_example(number, program):
    exec(compile(program, number, 'exec'), {'__name__': '__main__'})


def test_all_sections_of_the_chapter_are_headings():
    text = '\n'.join(text for path in sorted(NBS.glob('30*.ipynb')) for text in cells(path, 'markdown'))
    assert re.findall(r'^## (11\.\d+) ', text, re.M) == [f'11.{n}' for n in range(1, 12)]
