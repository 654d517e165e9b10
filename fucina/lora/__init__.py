"""Low-rank adapters: train a small correction of a frozen weight, save it, merge it."""
from fucina.errors import (DTypeError, ExecScopeRequiredError, InvalidConfigError,
                           InvalidDropoutError, InvalidRankError, LoraError,
                           MutableDataRequiresNoGradError, PeftUnsupportedError,
                           ShapeMismatchError, TagError)
from fucina.lora.adapter import RANK_TAG, Adapter, Config
from fucina.lora.attach import Adapted, Adapters, attach
from fucina.lora.peft import PeftAdapters, export_peft, import_peft

__all__ = ['RANK_TAG', 'Adapter', 'Config', 'attach', 'Adapted', 'Adapters',
           'export_peft', 'import_peft', 'PeftAdapters', 'PeftUnsupportedError',
           'LoraError', 'InvalidDropoutError', 'InvalidRankError', 'InvalidConfigError',
           'TagError', 'DTypeError', 'ShapeMismatchError', 'MutableDataRequiresNoGradError',
           'ExecScopeRequiredError']
