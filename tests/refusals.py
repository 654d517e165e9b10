"""Errors of the package by name."""
import pytest

from fucina import errors


def error(name): return getattr(errors, name + 'Error')


def fails(name, f, *args, **keywords):
    "Exactly this class, and what it says."
    with pytest.raises(error(name)) as e: f(*args, **keywords)
    assert type(e.value) is error(name)
    return str(e.value)
