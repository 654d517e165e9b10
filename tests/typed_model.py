"""Not run but type-checked: what an editor and a type checker know about a user's program."""
import numpy as np
from typing_extensions import assert_type

import fucina
from fucina import Tensor, nn, optim, rng
from fucina.data import Batches

x = fucina.constant([[1, 2], [-1, 0.5]], 'batch in', dtype='f32')
w = fucina.variable([[0.1, -0.2], [0.3, 0.4]], 'class in')
model = nn.MLP((2, 8, 2), seed=1, tags='in h class')
opt = optim.AdamW(lr=0.05, weight_decay=0.01)
opt.add_param(w)
schedule = optim.LrSchedule()
schedule.attach(opt)

for batch in Batches(2, 1, seed=0): assert_type(batch, np.ndarray)
schedule.apply(optim.warmup_cosine_factor(0, 100, 10, 0.1))
with fucina.exec_scope() as scope:
    logits = x.dot(w, 'in').tanh() + model(x)
    loss = logits.cross_entropy('class', [0, 1])
    loss.backward()
    opt.clip_grad_norm(1.0)
    opt.step()
    opt.zero_grad()
    scope.keep(logits)

assert_type(logits, Tensor)
assert_type(loss, Tensor)
assert_type(loss.item(), float | int)
assert_type(logits.tags, tuple[str, ...])
assert_type(logits.shape, tuple[int, ...])
assert_type(logits.numpy(), np.ndarray)
assert_type(logits.softmax('class').argmax('class'), Tensor)
assert_type(w.scale(2.0).sum_all().mean_all(), Tensor)
assert_type(w.grad, Tensor | None)
assert_type(rng.uniform_fill(1, np.empty(3, np.float32), -1, 1), np.ndarray)
