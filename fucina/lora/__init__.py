"""Low-rank adapters: train a small correction of a frozen weight, save it, merge it."""
from fucina.errors import InvalidDropoutError, InvalidRankError, LoraError
from fucina.lora.adapter import RANK_TAG, Adapter, Config
from fucina.lora.attach import Adapted, Adapters, attach

__all__ = ['RANK_TAG', 'Adapter', 'Config', 'attach', 'Adapted', 'Adapters',
           'LoraError', 'InvalidDropoutError', 'InvalidRankError']
