"""Evolution strategies: train whatever can be scored, without gradients."""
from fucina.es import ternary
from fucina.es.ternary import BlockTQ2_0, TernaryMatrix

__all__ = ['BlockTQ2_0', 'TernaryMatrix', 'ternary']
