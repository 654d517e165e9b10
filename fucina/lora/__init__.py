"""Low-rank adapters: train a small correction of a frozen weight, save it, merge it."""
from fucina.errors import InvalidDropoutError, InvalidRankError, LoraError
from fucina.lora.adapter import RANK_TAG, Adapter, Config

__all__ = ['RANK_TAG', 'Adapter', 'Config', 'LoraError', 'InvalidDropoutError', 'InvalidRankError']
