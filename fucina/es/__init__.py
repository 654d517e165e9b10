"""Evolution strategies: train whatever can be scored, without gradients."""
from fucina.es import rewards, ternary
from fucina.es.replicas import Replicas
from fucina.es.rewards import AnchorDecay, Config, NoiseScheme, RestoreMode, RewardNorm, Stats
from fucina.es.ternary import BlockTQ2_0, TernaryMatrix
from fucina.es.trainer import Trainer

__all__ = ['AnchorDecay', 'BlockTQ2_0', 'Config', 'NoiseScheme', 'Replicas', 'RestoreMode',
           'RewardNorm', 'Stats', 'TernaryMatrix', 'Trainer', 'rewards', 'ternary']
