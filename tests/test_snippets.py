"""The acceptance examples of the runtime contract, word for word, with what they import."""


def test_a1_one_training_step():
    import fucina
    from fucina import optim

    w = fucina.variable([[0.1, -0.2], [0.3, 0.4]], "class in")
    b = fucina.variable([0, 0], "class")
    x = fucina.constant([[1, 2], [-1, 0.5]], "batch in")
    labels = [0, 1]

    opt = optim.AdamW(lr=0.05, weight_decay=0.01)
    opt.add_param(w)                               # the optimizer holds on to its parameters
    opt.add_param(b)

    losses = []
    for _ in range(20):
        with fucina.exec_scope():                  # the scope owns the step's graph
            logits = x.dot(w, "in") + b
            loss = logits.cross_entropy("class", labels)
            loss.backward()
            opt.clip_grad_norm(1.0)                # after backward, before step
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a2_bf16_parameters_train_through_f32_masters():
    import fucina
    from fucina import optim

    w = fucina.variable([[1, -2], [0.5, 3]], "out in", dtype="bf16")
    assert w.bits.tolist() == [[0x3F80, 0xC000], [0x3F00, 0x4040]]
    x = fucina.constant([[1.0, 2.0]], "t in")

    opt = optim.AdamW(lr=0.05)
    opt.add_param(w)                               # allocates and fills the f32 master

    with fucina.exec_scope():
        loss = x.dot(w, "in").sum_all()            # 16-bit right operand; dW arrives as f32
        loss.backward()
    assert w.grad.dtype == "f32"                   # leaf gradients outlive the scope

    opt.step()                                     # steps the master, narrows back into w
    opt.zero_grad()
    assert w.requires_grad and w.grad is None


def test_a3_warmup_cosine_endpoints():
    from fucina import optim

    f = optim.warmup_cosine_factor
    assert abs(f(0, 100, 10, 0.1) - 0.1) < 1e-12
    assert abs(f(9, 100, 10, 0.1) - 1.0) < 1e-12
    assert abs(f(100, 100, 10, 0.1) - 0.1) < 1e-9


def test_a4_parameter_groups_under_one_set_with_a_schedule():
    import fucina
    from fucina import optim

    w = fucina.variable([[0.1, -0.2], [0.3, 0.4]], "class in")
    b = fucina.variable([0, 0], "class")
    x = fucina.constant([[1, 2], [-1, 0.5]], "batch in")
    labels = [0, 1]

    decay    = optim.AdamW(lr=2e-2, weight_decay=0.1)
    no_decay = optim.AdamW(lr=2e-2, weight_decay=0)
    decay.add_param(w)                             # matrices
    no_decay.add_param(b)                          # biases and norms
    group = optim.OptimizerSet([decay, no_decay])

    sched = optim.LrSchedule()
    sched.attach(decay)                            # captures 2e-2 as the base
    sched.attach(no_decay)

    for step in range(4):
        sched.apply(optim.warmup_cosine_factor(step, 100, 10, 0.1))
        with fucina.exec_scope():
            loss = (x.dot(w, "in") + b).cross_entropy("class", labels)
            loss.backward()
            group.clip_grad_norm(1.0)              # one global norm over both groups
            group.step()
            group.zero_grad()
    assert abs(decay.config.lr - 2e-2 * 0.4) < 1e-9


def test_a5_optimizer_state_matches_by_name():
    import io

    import pytest

    import fucina
    from fucina import optim

    w = fucina.variable([1, 2, 3, 4], "d")
    b = fucina.variable([5, 6], "e")

    opt = optim.SGD(lr=0.1, momentum=0.9)
    opt.add_param(w, name="w")
    opt.add_param(b, name="b")
    with fucina.exec_scope():
        w.sum_all().backward()
        opt.step()                                 # fills w's momentum buffer; b has no gradient and is skipped
        opt.zero_grad()
    buf = io.BytesIO()
    opt.save_state(buf)

    opt2 = optim.SGD(lr=0.1, momentum=0.9)         # resume: any order of registration
    opt2.add_param(b, name="b")
    opt2.add_param(w, name="w")
    opt2.load_state(io.BytesIO(buf.getvalue()))

    opt3 = optim.SGD(lr=0.1, momentum=0.5)         # structural fields must match; lr is not one
    with pytest.raises(optim.CheckpointConfigMismatchError):
        opt3.load_state(io.BytesIO(buf.getvalue()))


def test_a6_param_registry_collect_save_load_by_name():
    import tempfile
    from dataclasses import dataclass
    from pathlib import Path

    import numpy as np

    import fucina
    from fucina import ParamRegistry, Tensor

    @dataclass
    class Model:
        w: Tensor

    model    = Model(fucina.variable([[1, 2, 3], [4, 5, 6]], "out in"))
    restored = Model(fucina.zeros((2, 3), "out in"))        # a constant: registered frozen, still loads

    with tempfile.TemporaryDirectory() as d:
        path = Path(d) / "model.safetensors"
        reg = ParamRegistry()
        reg.collect(model)                                   # names by field path: "w"
        with path.open("wb") as f: reg.save_state_dict(f)

        reg = ParamRegistry()
        reg.collect(restored)
        with path.open("rb") as f: reg.load_state_dict(f)
    assert np.array_equal(model.w.numpy(), restored.w.numpy())


def test_a7_state_dict_named_round_trip():
    import io

    import numpy as np

    import fucina
    from fucina import state_dict
    from fucina.state_dict import NamedTensor, NamedTensorMut

    w   = fucina.constant([[3.0, -1.0], [4.0, 1.0]], "out in")
    dst = fucina.zeros((2, 2), "out in")
    buf = io.BytesIO()
    state_dict.save_state_dict(buf, [NamedTensor.of("enc.w", w)])
    state_dict.load_state_dict(io.BytesIO(buf.getvalue()), [NamedTensorMut.of("enc.w", dst)])
    assert np.array_equal(w.numpy(), dst.numpy())


def test_a8_lora_zero_delta_eval_and_merge():
    import numpy as np

    import fucina
    from fucina import lora, rng

    adapter = lora.Adapter("in", "out", 8, 4, rank=2, alpha=4, seed=42)
    x = fucina.constant(rng.uniform_fill(1, np.empty((2, 8), np.float32), -1, 1), "batch in")
    w = fucina.constant(rng.uniform_fill(2, np.empty((4, 8), np.float32), -1, 1), "out in")

    base = x.dot(w, "in")                          # the frozen path
    y0 = adapter.apply(x, base)                    # no dropout seed = eval; no scope needed, no backward follows
    assert np.array_equal(base.numpy(), y0.numpy())          # B is zero: bitwise the base

    rng.uniform_fill(3, adapter.b.value, -0.5, 0.5)          # stand-in for training
    y1 = adapter.apply(x, base)
    adapter.merge_into(w)                          # w += (alpha/rank)·B·A, in place
    y2 = x.dot(w, "in")
    np.testing.assert_allclose(y1.numpy(), y2.numpy(), rtol=0, atol=1e-4)   # orders differ, not bitwise


def test_a9_evolution_strategies_on_the_sphere():
    import numpy as np

    import fucina
    from fucina import es

    theta = fucina.constant([1, -2, 0.5, 3], "d")  # no gradients: a constant is a first-class parameter
    trainer = es.Trainer(sigma=0.05, population=8, seed=7)
    trainer.add_param(theta, name="theta")

    sum_sq = lambda: float((theta.numpy() ** 2).sum())
    before = sum_sq()
    rewards = np.empty(8, np.float32)
    for _ in range(200):
        for member in range(8):
            trainer.perturb(member)                # theta += sigma * eps_member
            rewards[member] = -sum_sq()            # a plain forward pass
            trainer.restore(member)
        trainer.update(rewards)                    # z-score, f32-accumulated step
    assert sum_sq() < before
    assert trainer.iteration == 200


def test_b1_named_contraction_reduction_gradient():
    import fucina

    x = fucina.variable([[2, 3]], "batch in"); w = fucina.variable([[4], [5]], "in out")
    loss = x.dot(w, "in").sum_all(); loss.backward()
    assert loss.item() == 23.0 and x.grad.numpy().tolist() == [[4.0, 5.0]]


def test_b2_what_a_scope_guarantees():
    import fucina
    import pytest

    w = fucina.variable([1, 2, 3], "d")
    with fucina.exec_scope() as s:
        y = w * w; kept = s.keep(y.scale(2.0)); row = y.numpy()
        y.sum_all().backward()
    assert kept.numpy().tolist() == [2.0, 8.0, 18.0] and not kept.requires_grad
    assert row.tolist() == [1.0, 4.0, 9.0]                   # an array taken out stays valid
    assert w.grad.numpy().tolist() == [2.0, 4.0, 6.0]
    with pytest.raises(fucina.UseAfterScopeError): y.item()


def test_b3_lora_scope_rule_and_activation_checkpointing():
    import numpy as np
    import pytest

    import fucina
    from fucina import lora

    ad = lora.Adapter("in", "out", 4, 3, rank=2, alpha=4, seed=1)
    x = fucina.constant(np.ones((2, 4), np.float32), "batch in")
    with pytest.raises(fucina.ExecScopeRequiredError): ad.delta(x).sum_all().backward()
    with fucina.exec_scope(): ad.delta(x, dropout_seed=5).sum_all().backward()

    block = lambda x, w: x.dot(w, "in").tanh()
    x = fucina.variable([[1, 2]], "batch in"); w = fucina.variable([[0.5, -0.25]], "out in")
    with fucina.exec_scope(): fucina.checkpoint(block, x, w).sum_all().backward()
    assert w.grad.numpy().tolist() == [[1.0, 2.0]]           # z = 0, tanh' = 1
