"""Optimizers: five of them, groups, clipping, learning-rate schedules and saved state."""
from fucina.errors import (CheckpointConfigMismatchError, CheckpointDtypeMismatchError,
                           CheckpointDuplicateNameError, CheckpointInvalidNameError,
                           CheckpointMagicMismatchError, CheckpointMissingEntryError,
                           CheckpointShapeMismatchError, CheckpointTooManyEntriesError,
                           CheckpointUnknownNameError, CheckpointUnsupportedDtypeError,
                           DTypeError, DuplicateParamError, EndOfStreamError,
                           GradShapeMismatchError, InvalidConfigError, InvalidShapeError,
                           NonContiguousParamError, NotAVariableError, OptimError)
from fucina.kernels import sum_squares
from fucina.optim.adam import Adam, AdamConfig, AdamW, AdamWConfig
from fucina.optim.apollo import Apollo, ApolloConfig, ApolloScaleType
from fucina.optim.frames import Optimizer, inspect_state, load_tensors, save_tensors
from fucina.optim.group import AnyOptimizer, OptimizerSet, any_optimizer
from fucina.optim.moments import Config, StateDType
from fucina.optim.muon import Muon, MuonConfig, MuonScale, newton_schulz5
from fucina.optim.param import Param
from fucina.optim.schedule import LrSchedule, warmup_cosine_factor
from fucina.optim.sgd import SGD, SgdConfig
from fucina.state_dict import (LoadOptions, NamedTensor, NamedTensorMut,
                               load_state_dict, save_state_dict)

__all__ = ['SGD', 'Adam', 'AdamW', 'SgdConfig', 'AdamConfig', 'AdamWConfig', 'Apollo',
           'ApolloConfig', 'ApolloScaleType', 'Muon', 'MuonConfig', 'MuonScale',
           'newton_schulz5', 'StateDType', 'Param', 'Config', 'Optimizer',
           'OptimizerSet', 'AnyOptimizer', 'any_optimizer',
           'LrSchedule', 'warmup_cosine_factor', 'sum_squares', 'inspect_state',
           'save_tensors', 'load_tensors', 'NamedTensor', 'NamedTensorMut', 'LoadOptions',
           'save_state_dict', 'load_state_dict',
           'OptimError', 'DTypeError', 'DuplicateParamError', 'GradShapeMismatchError',
           'InvalidConfigError', 'InvalidShapeError', 'NonContiguousParamError',
           'NotAVariableError', 'EndOfStreamError', 'CheckpointConfigMismatchError',
           'CheckpointDtypeMismatchError', 'CheckpointDuplicateNameError',
           'CheckpointInvalidNameError', 'CheckpointMagicMismatchError',
           'CheckpointMissingEntryError', 'CheckpointShapeMismatchError',
           'CheckpointTooManyEntriesError', 'CheckpointUnknownNameError',
           'CheckpointUnsupportedDtypeError']
