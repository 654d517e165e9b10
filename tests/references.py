"""Reference implementations that do not import by themselves."""
import importlib
import os
import sys
from importlib.util import find_spec
from types import ModuleType


def apollo_torch():
    """The optimizer class of apollo-torch, or None where it is not installed.

    The package imports two libraries that this optimizer does not need: of transformers it wants
    a check of versions, of bitsandbytes nothing. So its `__init__` is passed over.
    """
    spec = find_spec('apollo_torch')
    if spec is None or find_spec('torch') is None: return None
    package, check = ModuleType('apollo_torch'), ModuleType('transformers.utils.versions')
    package.__path__, check.require_version = spec.submodule_search_locations, lambda *args: None
    names = 'apollo_torch', 'transformers', 'transformers.utils', 'transformers.utils.versions'
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    try:
        sys.modules.update(zip(names, (package, ModuleType(''), ModuleType(''), check)))
        return importlib.import_module('apollo_torch.apollo').AdamW
    finally:
        for name in names: sys.modules.pop(name, None)
        sys.modules.update(before)


def peft():
    "The package peft, told not to look for a network, or None where it is not installed."
    if find_spec('peft') is None or find_spec('torch') is None: return None
    os.environ['HF_HUB_OFFLINE'] = '1'
    return importlib.import_module('peft')
