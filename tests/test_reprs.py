"What objects show in Jupyter: bounded, escaped, well-formed; and a plain text beside it."
from html.parser import HTMLParser

import numpy as np
import pytest

import fucina
from fucina import es, lora, nn, optim
from fucina.apps.inspect import inspect
from fucina.training_checkpoint import TrainerState, save_checkpoint

EVIL = '<script>alert("&")</script>'
ALLOWED = {'div', 'b', 'code', 'small', 'table', 'tr', 'th', 'td', 'br', 'span', 'svg', 'rect'}


class Reader(HTMLParser):
    "Notes tags that are not allowed or not closed, and collects the text."

    def __init__(self, html):
        super().__init__()
        self.open, self.text = [], ''
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED
        if tag != 'br': self.open.append(tag)

    def handle_endtag(self, tag): assert self.open.pop() == tag
    def handle_data(self, data): self.text += data


def model(n=100): return {f'{k} {EVIL}': fucina.variable(np.zeros((2, 2)), 'out in') for k in range(n)}


def tensor(): return fucina.variable(np.arange(1e6).reshape(1000, 1000), 'out in')
def tag(): return fucina.variable([1, 2], [EVIL])
def registry():
    found = fucina.ParamRegistry()
    found.collect(model())
    return found
def optimizer():
    opt = optim.AdamW()
    registry().add_params_to(opt)
    return opt
def fallback():
    opt = optim.Muon()
    registry().add_params_to(opt)
    return opt
def optimizers(): return optim.OptimizerSet([optimizer() for _ in range(30)])
def no_optimizers(): return optim.OptimizerSet([])
def schedule():
    found = optim.LrSchedule()
    for _ in range(50): found.attach(optim.SGD(lr=0.1))
    return found
def trainer():
    found = es.Trainer(population=8)
    found.add_registry(registry())
    return found
def adapters():
    return lora.attach(nn.MLP((2, 3, 2), seed=1, tags='in h out'), ['layers.0.w'], rank=1, alpha=1.0, seed=1)
def state(): return TrainerState(step=3, es_sigma=0.5)
def config(): return fucina.config()


MAKERS = [tensor, tag, registry, optimizer, fallback, optimizers, no_optimizers, schedule, trainer, adapters,
          state, config]


def check(thing):
    html, text = thing._repr_html_(), repr(thing)
    assert len(html) < 100_000 and len(text) < 50_000
    Reader(html)
    assert 'script>alert' not in html
    assert '<td' not in text and text.isprintable() or '\n' in text
    return Reader(html).text, text


@pytest.mark.parametrize('make', MAKERS, ids=lambda f: f.__name__)
def test_what_jupyter_shows_is_bounded_escaped_and_well_formed(make):
    html, text = check(make())
    assert text.split()[0].split('(')[0].split('[')[0] in html.replace('\n', ' ') + text


def test_what_is_left_out_is_counted():
    assert '… 88 more' in repr(registry()) and '… 88 more' in registry()._repr_html_()
    assert '… 18 more' in repr(optimizers()) and '… 18 more' in optimizers()._repr_html_()
    assert '… 38 more' in repr(schedule()) and '… 38 more' in schedule()._repr_html_()


def test_a_state_shows_what_it_has():
    assert repr(state()) == 'TrainerState(step=3, seed=0, es_sigma=0.5)'
    assert repr(TrainerState()) == 'TrainerState(step=0, seed=0)'
    assert check(state())[0] == 'TrainerStatenamevaluestep3seed0es_sigma0.5version 1'


def test_a_checkpoint_shows_what_is_in_it(tmp_path):
    opt = optimizer()
    save_checkpoint(tmp_path, {'w': fucina.variable([1, 2], 'd')}, opt, TrainerState(step=7))
    html, text = check(inspect(tmp_path))
    for word in ('trainer_state.json', 'model.safetensors', 'optimizer.fucina', 'AdamW'):
        assert word in html and word in text
