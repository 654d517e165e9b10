"Every command explains itself: a sentence, and a word about every flag."
import pytest

from fucina.apps import cli
from fucina.apps.program import Parser

CALLS = [[name] for name in cli.COMMANDS] + [['digits', '--lora']]


class Shown(BaseException):
    "Ends a program where it reads its flags."


@pytest.mark.parametrize('call', CALLS, ids=' '.join)
def test_every_flag_has_a_help(call, monkeypatch):
    seen = []
    def stop(parser, *args):
        seen.append(parser)
        raise Shown
    monkeypatch.setattr(Parser, 'parse_args', stop)
    with pytest.raises(Shown): cli.run(call)
    parser, = seen
    assert parser.prog == f'fucina {" ".join(call)}' and parser.description.endswith('.')
    for action in parser._actions:
        assert action.help and '  ' not in action.help, action
        assert action.choices or action.nargs == 0 or action.metavar, f'{action} shows its own name as a value'
    text = parser.format_help()
    assert all(flag in text for action in parser._actions for flag in action.option_strings)
    assert '%(' not in text and 'None' not in text


def test_the_help_names_every_command(capsys):
    assert cli.main(['--help']) == 0
    text = capsys.readouterr().out
    assert all(f'  {name} ' in text and purpose in text for name, purpose in cli.COMMANDS.items())
    assert max(map(len, text.splitlines())) <= 92
