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


def test_a3_warmup_cosine_endpoints():
    from fucina import optim

    f = optim.warmup_cosine_factor
    assert abs(f(0, 100, 10, 0.1) - 0.1) < 1e-12
    assert abs(f(9, 100, 10, 0.1) - 1.0) < 1e-12
    assert abs(f(100, 100, 10, 0.1) - 0.1) < 1e-9


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


def test_b3_activation_checkpointing():
    import fucina

    block = lambda x, w: x.dot(w, "in").tanh()
    x = fucina.variable([[1, 2]], "batch in"); w = fucina.variable([[0.5, -0.25]], "out in")
    with fucina.exec_scope(): fucina.checkpoint(block, x, w).sum_all().backward()
    assert w.grad.numpy().tolist() == [[1.0, 2.0]]           # z = 0, tanh' = 1
