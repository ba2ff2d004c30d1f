"""IB-TPO: what it reduces to, how its tree grows, and the components in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.ib_tpo import METHOD, balance, budget, ib_score, information_gain, select, step_advantage, success
from anypo.run import Run
from anypo.seams.groups import broadcast
from anypo.seams.trees import forest, fresh_nodes, step_logp
from tests.helpers import assert_resumes, assert_trains, random_rows

PARENT, LEAF = torch.tensor([-1, 0, 0, 1, 1, 2, 2, 3, 3]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
CHAINS = METHOD.set("rollout.rounds", 1)


def grown(method: Method = METHOD, prompts: int = 3, steps: int = 5, seed: int = 0) -> tuple[Run, Batch]:
    policy, task = make_key_chain(prompts, steps, seed=seed)
    run = Run(method, policy, task, steps=1, seed=seed)
    batch = method.rollout(method.select(task, run), run)
    run.prepare_signals(batch, {"ref_logp"})
    return run, batch


def rewards(seed: int = 0) -> Tensor:
    return torch.randint(2, (9,), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("deep", [False, True])
def test_without_the_local_term_chains_are_grpo(deep: bool) -> None:
    rows = random_rows(1, rows=9)
    steps = torch.where(rows.mask, torch.arange(5) if deep else 0, -1)
    trees = forest(fresh_nodes(steps), rows.logp, rows.mask, rows.group)
    earned = torch.zeros(len(trees.parent)).double().index_copy(0, trees.leaf, rows.reward)
    value = step_advantage(trees.parent, trees.is_leaf, earned, torch.zeros_like(earned), lam=0.0)
    torch.testing.assert_close(
        torch.where(rows.mask, value[trees.node], 0.0), broadcast(grpo.advantages(rows.reward, rows.group), rows.mask)
    )


def test_one_round_is_independent_attempts() -> None:
    run, batch = grown(CHAINS.set("credit.lam", 0.0))
    assert torch.equal(batch.action, grown(grpo.METHOD.set("select.group_size", 4))[1].action)
    batch.reward = torch.rand(len(batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = broadcast(grpo.advantages(batch.reward, batch.group), batch.mask)
    torch.testing.assert_close(run.method.credit(batch, run), expected)
    del batch.signals["node"]
    torch.testing.assert_close(run.method.credit(batch, run), expected)


def test_all_right() -> None:
    ref = -torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = ib_score(PARENT, LEAF, torch.ones(9).double(), ref, 4.0)
    assert torch.equal(found.eta1[1:], torch.full((8,), -0.25, dtype=torch.float64)) and found.eta1[0] == 0
    torch.testing.assert_close(step_advantage(PARENT, LEAF, torch.ones(9).double(), ref, 4.0, 0.1)[1:], -0.025 * ref[1:].exp())


def test_no_price_on_information_leaves_the_ratio() -> None:
    chance = success(PARENT, LEAF, rewards())
    gain = information_gain(PARENT, chance, float("inf"))
    torch.testing.assert_close(gain[1:], (chance[1:] + 1e-6) / (chance[PARENT[1:]] + 1e-6) - 1)


def test_success_is_the_mean_of_the_leaves_below() -> None:
    reward = rewards(3)
    below = {0: [4, 5, 6, 7, 8], 1: [4, 7, 8], 2: [5, 6], 3: [7, 8], **{i: [i] for i in range(4, 9)}}
    expected = torch.stack([reward[below[i]].mean() for i in range(9)])
    torch.testing.assert_close(success(PARENT, LEAF, reward), expected)
    turned = torch.arange(8, -1, -1)  # children before their parents
    parent = torch.where(PARENT < 0, -1, 8 - PARENT)[turned]
    torch.testing.assert_close(success(parent, LEAF[turned], reward[turned]), expected[turned])
    assert success(torch.tensor([-1]), torch.tensor([False]), torch.ones(1)).tolist() == [0.0]  # a tree without leaves


def test_trees_do_not_see_each_other() -> None:
    first, second = rewards(0), rewards(5)
    parent, leaf = torch.cat([PARENT, torch.where(PARENT < 0, -1, PARENT + 9)]), torch.cat([LEAF, LEAF])
    ref = -torch.rand(18, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = [step_advantage(PARENT, LEAF, reward, part) for reward, part in ((first, ref[:9]), (second, ref[9:]))]
    torch.testing.assert_close(step_advantage(parent, leaf, torch.cat([first, second]), ref), torch.cat(alone))
    chosen = select(parent, leaf, torch.cat([first, second]), ref, K=2)
    assert torch.equal(chosen[:2], select(PARENT, LEAF, first, ref[:9], K=2))
    assert torch.equal(chosen[2:] - 9, select(PARENT, LEAF, second, ref[9:], K=2))


def test_equal_rewards_have_no_global_term() -> None:
    found = step_advantage(PARENT, LEAF, torch.full((9,), 0.1), torch.zeros(9), lam=0.0)
    assert torch.equal(found, torch.zeros(9))


def test_a_lone_child_changes_nothing() -> None:
    parent, leaf = torch.tensor([-1, 0, 1, 1]), torch.tensor([0, 0, 1, 1])
    assert information_gain(parent, success(parent, leaf, torch.tensor([0.0, 0.0, 1.0, 0.0])), 5.0)[1] == pytest.approx(-0.2)


def test_balance_is_a_covariance_over_siblings() -> None:
    eta1, eta2 = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    families = [torch.tensor(c) for c in ([1, 2], [3, 4], [5, 6], [7, 8])]
    expected = torch.stack([(eta1[c] * eta2[c]).mean() - eta1[c].mean() * eta2[c].mean() for c in families])
    torch.testing.assert_close(balance(PARENT, eta1, eta2), expected)
    assert len(balance(torch.tensor([-1, 0, 1]), eta1[:3], eta2[:3])) == 0  # no siblings


def test_the_tree_grows_from_inner_nodes() -> None:
    run, batch = grown(METHOD.set("rollout.nodes", 2).set("rollout.branches", 2).set("rollout.rounds", 3))
    assert len(batch) == 3 * budget(4, 3, 2, 2) == 36 and batch.parent is not None and batch.branch_at is not None
    node = batch.signals["node"]
    for row in range(12, 36):
        origin, shared = int(batch.parent[row]), int(batch.branch_at[row])
        assert batch.group[row] == batch.group[origin] and shared < batch.horizon
        assert torch.equal(batch.action[row, :shared], batch.action[origin, :shared])
        assert torch.equal(node[row, :shared], node[origin, :shared]) and not torch.isin(node[row, shared:], node[:row]).any()


def test_what_is_shared_has_one_advantage_and_may_count_once() -> None:
    run, batch = grown(METHOD)
    batch.reward = run.score_rewards(batch)
    advantage = run.method.credit(batch, run)
    for number in torch.unique(batch.signals["node"]):
        assert len(torch.unique(advantage[batch.signals["node"] == number])) == 1
    assert batch.keep is None
    again = run.method.set("credit.dedupe", True).credit(batch, run)
    assert torch.equal(again, advantage)
    assert len(torch.unique(batch.signals["node"])) == int(batch.counted.sum())


def test_a_steps_log_prob() -> None:
    node, mask = torch.tensor([[0, 0, 1], [0, 0, 2], [3, -1, -1]]), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    logp = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -torch.inf], [-4.0, torch.nan, torch.nan]])
    assert step_logp(node, logp, mask, 5).tolist() == [-1.5, -3.0, 0.0, -4.0, 0.0]
    assert step_logp(node, logp, mask, 5, "sum").tolist() == [-3.0, -3.0, 0.0, -4.0, 0.0]
    with pytest.raises(ValueError, match="mean or the sum"):
        step_logp(node, logp, mask, 5, "max")


def test_rows_without_actions_and_padding_are_harmless() -> None:
    run, batch = grown(CHAINS)
    batch.reward = run.score_rewards(batch)
    batch.mask[0], batch.mask[1, 2:] = False, False
    batch.signals["node"] = torch.where(batch.mask, batch.signals["node"], -1)
    for values in (batch.logp, batch.signals["ref_logp"]):
        values[~batch.mask] = -torch.inf
    advantage = run.method.credit(batch, run)
    assert torch.isfinite(advantage).all() and advantage[~batch.mask].eq(0).all() and not advantage.requires_grad


def test_negative_rewards_are_refused() -> None:
    run, batch = grown(CHAINS)
    batch.reward = -torch.ones(len(batch))
    with pytest.raises(ValueError, match="rewards of at least 0"):
        run.method.credit(batch, run)


def test_a_tree_needs_rounds() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        grown(METHOD.set("rollout.nodes", 0))


def test_trains_on_chains_of_steps() -> None:
    policy, task = make_key_chain(4, 4)
    run = train(Run(METHOD, policy, task, steps=3))
    assert torch.isfinite(policy.logits).all() and all("ib_balance" in record for record in run.history)
    assert all(record["actions"] > 0 for record in run.history)


def test_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)
