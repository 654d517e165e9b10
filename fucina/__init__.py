"""Train small models on a CPU and get the same bits tomorrow."""

__version__ = "0.1.0"

from . import data, errors, nn, optim, rng
from .autograd import is_grad_enabled, no_grad
from .data import Batches
from .environment import config, warmup
from .errors import *  # noqa: F403
from .exec import ExecContext, current_context, exec_scope, get_gemm, set_gemm
from .kernels import get_num_threads, set_num_threads
from .ops.contractions import einsum_many
from .ops.indexing import concat, stack
from .tensor import (Tensor, constant, empty, from_bits, from_numpy, full, gather,
                     kaiming_uniform, normal, ones, rand, randn, scalar, uniform, variable,
                     xavier_uniform, zeros)
from .transforms import GradcheckResult, checkpoint, custom_vjp, gradcheck
