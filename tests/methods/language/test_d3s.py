import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.methods.language.d3s import METHOD, loss, schedule, select_samples, select_tokens
from anypo.run import Run


def trained(method, steps=4):
    task = TokenBandit(4, 3, 2)
    return train(Run(method.set("update.learning_rate", 4.0), task.policy(), task, steps=steps, seed=1))


def test_shares_of_one_are_the_base_algorithm():
    everything = METHOD.set("credit.rows", 1.0).set("credit.tokens", 1.0)
    base = METHOD.but(credit=METHOD.credit.inner)
    assert torch.equal(trained(everything).policy.logits, trained(base).policy.logits)


def test_token_share_one_keeps_whole_rows_and_row_share_one_keeps_tokens_of_all():
    entropy, mask = torch.rand(4, 3).double(), torch.ones(4, 3, dtype=torch.bool)
    advantages, rows = torch.tensor([1.0, -1.0, 0.5, 0.0]).double(), torch.tensor([1, 0, 1, 0])
    assert torch.equal(select_tokens(advantages, entropy, mask, rows, 1.0), rows[:, None].expand(4, 3))
    keep = select_tokens(advantages, entropy, mask, torch.ones(4, dtype=torch.int64), 0.5)
    score = (advantages.abs()[:, None] * entropy).flatten()
    assert set(keep.flatten().nonzero().flatten().tolist()) == set(score.argsort(descending=True)[:6].tolist())


@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))
def test_binary_rewards_keep_half_of_each_kind(right, wrong, half):
    m = 2 * min(half, right, wrong)
    advantages = torch.cat([torch.full((right,), 0.7), torch.full((wrong,), -0.7)]).double()
    keep = select_samples(advantages, torch.zeros(right + wrong, dtype=torch.int64), "cross", m).keep.bool()
    assert int((advantages[keep] > 0).sum()) == m // 2 == int((advantages[keep] < 0).sum())


def test_no_variance_takes_the_first_rows_and_m_one_the_largest():
    group = torch.zeros(4, dtype=torch.int64)
    assert select_samples(torch.zeros(4).double(), group, "cross", 2).keep.tolist() == [1, 1, 0, 0]
    assert select_samples(torch.tensor([0.0, 3.0, -5.0, 1.0]).double(), group, "cross", 1).keep.tolist() == [0, 1, 0, 0]
    assert select_samples(torch.tensor([0.0, 3.0]).double(), group[:2], "cross", 9).keep.tolist() == [1, 1]


def test_intra_scope_keeps_a_share_of_each_group():
    group = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    keep = select_samples(torch.randn(8, generator=torch.Generator().manual_seed(0)).double(), group, "intra", ratio=0.5).keep
    assert [int(keep[group == g].sum()) for g in (0, 1)] == [2, 2]


def test_other_scopes_are_refused():
    with pytest.raises(ValueError, match="cross or intra"):
        select_samples(torch.zeros(2), torch.zeros(2, dtype=torch.int64), "both", 1)


def test_schedule_rises_linearly_to_one():
    assert schedule(torch.tensor([0, 25, 50, 100]), 100, 0.2, 0.5).tolist() == pytest.approx([0.2, 0.6, 1.0, 1.0])


def test_padding_may_hold_anything():
    keep = torch.tensor([[1, 0], [1, 1]])
    logp = torch.tensor([[-1.0, float("-inf")], [-0.5, -0.2]]).double().requires_grad_()
    old = torch.tensor([[-1.0, float("nan")], [-0.6, -0.2]]).double()
    value = loss(logp, old, torch.tensor([1.0, -1.0]).double(), keep, 0.2, 0.28)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(logp.grad).all() and logp.grad[0, 1] == 0


def test_the_component_keeps_a_quarter_of_the_rows_at_first_and_all_later():
    task = TokenBandit(8, 3, 2, partial=True)
    run = Run(METHOD, task.policy(), task, steps=10, seed=0)
    first = step(run)
    assert int(first.counted.any(1).sum()) <= 16 and run.history[0]["kept_rows"] == 16 and run.history[0]["kept_tokens"] == 7
    for _ in range(9):
        last = step(run)
    assert torch.equal(last.counted, last.mask)
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in run.history)
