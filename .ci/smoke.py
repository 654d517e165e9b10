"""Train with the installed package, from a folder it cannot write to."""
import numpy as np

import fucina
from fucina import optim, rng

labels = np.arange(64) % 2
noise = rng.gaussian_fill_at_fast(7, 0, np.empty((64, 2), np.float32), 1.0)
x = fucina.constant(noise + labels[:, None], 'batch in')
w, b = fucina.variable(np.zeros((2, 2)), 'class in'), fucina.variable([0, 0], 'class')
opt = optim.AdamW(lr=0.05)
opt.add_param(w)
opt.add_param(b)

losses = []
for _ in range(50):
    with fucina.exec_scope():
        loss = (x.dot(w, 'in') + b).cross_entropy('class', labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(f'{fucina.__file__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}')
