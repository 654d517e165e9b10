"""Train small models on a CPU and get the same bits tomorrow."""

__version__ = "0.1.0"

from . import (data, errors, es, lora, nn, optim, plot, rng, safetensors, state_dict,
               training_checkpoint)
from .autograd import is_grad_enabled, no_grad
from .data import Batches
from .environment import config, warmup
from .errors import *  # noqa: F403
from .exec import ExecContext, current_context, exec_scope, get_gemm, set_gemm
from .kernels import get_num_threads, set_num_threads
from .ops.contractions import einsum_many
from .ops.indexing import concat, stack
from .param_registry import ParamRegistry, load, save
from .tensor import (Tensor, constant, empty, from_bits, from_numpy, full, gather,
                     kaiming_uniform, normal, ones, rand, randn, scalar, uniform, variable,
                     xavier_uniform, zeros)
from .transforms import GradcheckResult, checkpoint, custom_vjp, gradcheck

# The error classes are reachable as `fucina.TagError` too; they are listed in `fucina.errors`.
__all__ = [
    'data', 'errors', 'es', 'lora', 'nn', 'optim', 'plot', 'rng', 'safetensors', 'state_dict',
    'training_checkpoint',
    'Tensor', 'variable', 'constant', 'from_numpy', 'from_bits', 'zeros', 'ones', 'full', 'empty',
    'scalar', 'uniform', 'rand', 'normal', 'randn', 'kaiming_uniform', 'xavier_uniform',
    'gather', 'concat', 'stack', 'einsum_many',
    'exec_scope', 'ExecContext', 'current_context', 'no_grad', 'is_grad_enabled',
    'ParamRegistry', 'save', 'load',
    'checkpoint', 'custom_vjp', 'gradcheck', 'GradcheckResult', 'Batches',
    'set_gemm', 'get_gemm', 'set_num_threads', 'get_num_threads', 'config', 'warmup',
]


def __dir__() -> list[str]: return [*__all__, '__version__']
