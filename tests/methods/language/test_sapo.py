"""SAPO: what it reduces to, where values are read and targets lie, and the components in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import step, train
from anypo.methods.language.sapo import METHOD, BoundaryValueLoss, SharedValueGAE, advantages, policy_loss, targets, value_loss, value_read
from anypo.policy import MissingSignal, Signals
from anypo.reproductions.common import CoinReward
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.regularize import ValueLoss
from anypo.seams.steps import steps_of
from tests.helpers import assert_continues, trained

TRAJ = torch.tensor([0, 2, 0, 1, 0, 2, 0, 2])  # 4, 1 and 3 turns, mixed


def turns(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    reward, value, q_value = torch.randn(3, 8, generator=g, dtype=torch.float64)
    return reward, value, q_value, torch.zeros(8)


def later(i: int) -> list[int]:
    """The turns of the same trajectory from i on."""
    return [j for j in range(i, 8) if TRAJ[j] == TRAJ[i]]


def test_without_values_and_decay_the_advantage_is_the_standardized_discounted_return() -> None:
    reward, value, q_value, done = turns()
    gain = torch.stack([sum(0.9**n * reward[j] for n, j in enumerate(later(i))) for i in range(8)])
    found = targets(reward, 0 * value, q_value, done, TRAJ, 0.9, 1.0)
    torch.testing.assert_close(found.raw_advantage, gain)
    torch.testing.assert_close(
        advantages(reward, 0 * value, q_value, done, TRAJ, torch.zeros(8), 0.9, 1.0), (gain - gain.mean()) / (gain.std() + 1e-8)
    )


def test_lambda_zero_is_the_td_error_and_one_turn_reward_minus_value() -> None:
    reward, value, q_value, done = turns()
    after = torch.stack([value[later(i)[1]] if len(later(i)) > 1 else torch.zeros(()).double() for i in range(8)])
    torch.testing.assert_close(targets(reward, value, q_value, done, TRAJ, 0.9, 0.0).raw_advantage, reward + 0.9 * after - value)
    one = targets(reward, value, q_value, done, torch.arange(8), 0.9, 0.95)
    torch.testing.assert_close(one.raw_advantage, reward - value)
    torch.testing.assert_close(one.y_q, reward)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_advantage_plus_value_is_the_lambda_return_computed_forward(lam: float) -> None:
    reward, value, q_value, done = turns(1)
    found = targets(reward, value, q_value, done, TRAJ, 0.9, lam)
    for i in range(8):
        rest = later(i)
        n_step = []
        for n in range(1, len(rest) + 1):
            tail = 0.9**n * value[rest[n]] if n < len(rest) else 0.0
            n_step.append(sum(0.9**k * reward[j] for k, j in enumerate(rest[:n])) + tail)
        weights = [(1 - lam) * lam ** (n - 1) for n in range(1, len(rest))] + [lam ** (len(rest) - 1)]
        forward = sum(w * g for w, g in zip(weights, n_step, strict=True))
        assert float(found.raw_advantage[i] + value[i] - forward) == pytest.approx(0, abs=1e-9)
        assert float(found.y_v[i] - forward) == pytest.approx(0, abs=1e-9)


def test_a_done_turn_cuts_and_a_bootstrap_follows_a_cut_row() -> None:
    reward, value, q_value, done = turns(2)
    ended = done.clone()
    ended[2] = 1  # the second turn of trajectory 0
    found = targets(reward, value, q_value, ended, TRAJ, 0.9, 0.8)
    assert float(found.raw_advantage[2]) == pytest.approx(float(reward[2] - value[2]))
    assert float(found.y_q[2]) == pytest.approx(float(reward[2]))
    after = torch.where(TRAJ == 2, 5.0, 0.0).double()
    plain, cut = (targets(reward, value, q_value, done, TRAJ, 0.9, 0.8, b) for b in (None, after))
    distance = torch.tensor([len(later(i)) - 1 for i in range(8)])
    torch.testing.assert_close(cut.raw_advantage - plain.raw_advantage, torch.where(TRAJ == 2, 4.5 * 0.72**distance, 0.0).double())
    torch.testing.assert_close(cut.y_q - plain.y_q, torch.where((TRAJ == 2) & (distance == 0), 4.5, 0.0).double())


def test_q_never_reaches_the_advantage_and_an_invalid_turn_costs() -> None:
    reward, value, q_value, done = turns(3)
    one, other = (advantages(reward, value, q, done, TRAJ, torch.zeros(8)) for q in (q_value, -q_value))
    assert torch.equal(one, other)
    invalid = (torch.arange(8) == 3).double()
    assert float(advantages(reward, value, q_value, done, TRAJ, invalid)[3]) < float(one[3])
    assert len(advantages(*(x[:0] for x in (reward, value, q_value, done, TRAJ, invalid)))) == 0


def test_the_read_out_ignores_a_common_shift_and_has_no_gradient_where_clipped() -> None:
    plus = torch.tensor([-30.0, 1.0, 2.0, 30.0], requires_grad=True)
    minus = torch.tensor([0.0, 0.5, 4.0, 1.0])
    value = value_read(plus, minus, 5.0, 2.0)
    torch.testing.assert_close(value, torch.tensor([-2.0, 0.2, -0.8, 2.0]))
    assert torch.equal(value, value_read(plus + 8, minus + 8, 5.0, 2.0))
    (gradient,) = torch.autograd.grad(value.sum(), plus)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.4, 0.4, 0.0]))


def talk(seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Two conversations with observations between the replies, and a row that wrote nothing."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [0] * 6, [1, 0, 1, 1, 0, 1]]).bool()
    segment = torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6, [0, 0, 1, 1, 1, 2]])
    value, q_value = torch.randn(2, 3, 6, generator=g, dtype=dtype)
    return Batch(
        action=segment, mask=mask, logp=torch.zeros(3, 6, dtype=dtype), group=torch.arange(3), segment=segment, valid=torch.ones(3, 6).bool(),
        reward=torch.tensor([1.0, 0.0, 2.0], dtype=dtype), signals={"old_value": value, "old_action_value": q_value},
    )  # fmt: skip


def test_targets_lie_at_the_boundaries_and_advantages_on_all_tokens_of_a_turn() -> None:
    batch = talk()
    credit = SharedValueGAE(gamma=0.9, lam=0.8, tau_v=4.0, R_max=3.0)
    found = credit(batch, None)
    value = value_read(batch.signals["old_value"], 0 * batch.logp, 4.0, 3.0)
    q_value = value_read(batch.signals["old_action_value"], 0 * batch.logp, 4.0, 3.0)
    starts, ends = [(0, 0), (0, 4), (2, 0), (2, 2), (2, 5)], [(0, 1), (0, 4), (2, 0), (2, 3), (2, 5)]
    read = [torch.stack([x[at] for at in places]) for x, places in ((value, starts), (q_value, ends))]
    reward, traj = torch.tensor([0, 1.0, 0, 0, 2.0]).double(), torch.tensor([0, 0, 2, 2, 2])
    expected = targets(reward, *read, torch.zeros(5), traj, 0.9, 0.8)
    advantage = advantages(reward, *read, torch.zeros(5), traj, torch.zeros(5), 0.9, 0.8)
    for places, name, target in ((starts, "returns", expected.y_v), (ends, "action_returns", expected.y_q)):
        torch.testing.assert_close(torch.stack([batch.signals[name][at] for at in places]), target)
        assert int((batch.signals[name] != 0).sum()) == 5
    torch.testing.assert_close(found[0], torch.stack([advantage[0], advantage[0], *[0 * advantage[0]] * 2, advantage[1], 0 * advantage[0]]))
    assert found[~batch.mask].eq(0).all() and float(found[2, 2]) == float(found[2, 3]) != float(found[2, 5])
    turn_id = torch.where(batch.mask, steps_of(batch, batch.mask).number, -1)
    batch.advantage = found
    logp = 0.3 * torch.randn(3, 6, dtype=torch.float64)
    component = ClippedSurrogate(aggregation="token_mean")(batch, Signals(logp=logp), None)
    torch.testing.assert_close(component.value, policy_loss(logp, batch.logp, batch.mask, turn_id, advantage))


def test_a_truncated_row_takes_the_value_that_follows() -> None:
    batch = talk()
    plain = SharedValueGAE(tau_v=4.0)(batch, None)
    cut = batch.but(truncated=torch.tensor([False, False, True]), next_value=torch.full((3, 6), 2.0).double())
    other = SharedValueGAE(tau_v=4.0, normalize=False)
    before, after = other(batch, None), other(cut, None)
    assert torch.equal(before[0], after[0]) and float(after[2, 5] - before[2, 5]) == pytest.approx(0.99 * 0.5)
    assert torch.equal(plain, SharedValueGAE(tau_v=4.0)(batch.but(next_value=cut.next_value), None))  # nothing was cut


def test_without_q_and_with_one_token_a_turn_the_loss_is_ppos_critic_loss() -> None:
    batch = talk()
    batch.segment = torch.arange(6).expand(3, 6)
    SharedValueGAE(tau_v=10.0, R_max=10.0)(batch, None)  # the read-out is the identity
    new = Signals(value=0.5 * torch.randn(3, 6).double(), action_value=torch.randn(3, 6).double())
    loss = BoundaryValueLoss(action_coefficient=0.0)(batch, new, None).value
    torch.testing.assert_close(loss, ValueLoss(0.25, 0.2)(batch, new, None).value)
    assert BoundaryValueLoss(action_coefficient=0.0).needs == {"value"}


def test_value_and_action_value_are_trained_at_their_boundaries_alone() -> None:
    batch = talk()
    SharedValueGAE()(batch, None)
    leaves = {n: batch.signals[f"old_{n}"].clone().requires_grad_(True) for n in ("value", "action_value")}
    BoundaryValueLoss()(batch, Signals(leaves), None).value.backward()
    assert leaves["value"].grad.nonzero().tolist() == [[0, 0], [0, 4], [2, 0], [2, 2], [2, 5]]
    assert leaves["action_value"].grad.nonzero().tolist() == [[0, 1], [0, 4], [2, 0], [2, 3], [2, 5]]
    assert float(value_loss(*[torch.zeros(0)] * 3)) == 0


def test_q_of_a_turn_is_read_after_its_reply() -> None:
    policy = GruPolicy(value_head=True)
    torch.nn.init.normal_(policy.value_head.weight)
    action = torch.randint(1, 15, (3, 6), generator=torch.Generator().manual_seed(0))
    context = [policy.encode(text) for text in ("1+2=", "9", "12")]
    one = Batch(action=action, mask=torch.ones(3, 6).bool(), logp=torch.zeros(3, 6), group=torch.arange(3), context=context)
    found = policy.evaluate(one, {"value", "action_value"})
    torch.testing.assert_close(found.action_value[:, :-1], found.value[:, 1:])
    changed = action.clone()
    changed[:, 3] = 16 - changed[:, 3].clamp(max=14)
    other = policy.evaluate(one.but(action=changed), {"value", "action_value"})
    moved = changed[:, 3] != action[:, 3]
    assert moved.any() and torch.equal(found.value[:, :4], other.value[:, :4])
    assert bool((found.action_value[moved, 3] != other.action_value[moved, 3]).all())


def sums(folder: Path | None, upto: int) -> Run:
    policy, task = make_toy_arith(steps=True, value_head=True, target=0.05)  # three turns a row
    method = METHOD.but(reward=CoinReward(0.5)).set("select.prompts", 16).set("credit.tau_v", 5.0)
    run = Run(method, policy, task, steps=upto, out=folder, checkpoint_every=2)
    if folder is not None:
        run.resume()
    return train(run)


def test_it_trains_on_written_sums() -> None:
    run = sums(None, 3)
    assert all(torch.isfinite(torch.tensor([v for v in r.values() if isinstance(v, float)])).all() for r in run.history)
    assert bool((run.policy.value_head.weight != 0).any()) and run.history[0]["action_value_loss"] > 0


def test_four_steps_equal_two_and_two_more(tmp_path: Path) -> None:
    assert_continues(lambda out, upto: sums(out, upto), tmp_path)


def test_a_policy_without_action_values_is_refused() -> None:
    with pytest.raises(MissingSignal, match="action_value"):
        trained(METHOD, 1)


def test_the_built_in_model_reads_both_values_from_one_row() -> None:
    from anypo.domains.language.setup import build

    policy: Any
    policy, task = build("calculator", None, needs=METHOD.needs() | {"value"}, max_tokens=12)
    torch.nn.init.normal_(policy.value_head.weight, std=0.1)
    run = Run(METHOD.set("select.prompts", 3), policy, task, steps=1)
    batch = step(run)
    new = policy.observe(batch, {"value", "action_value"})
    both = batch.attended[:, :-1] & batch.attended[:, 1:]
    torch.testing.assert_close(new.action_value[:, :-1][both], new.value[:, 1:][both], atol=1e-4, rtol=1e-4)
    assert torch.isfinite(batch.advantage).all() and bool((batch.signals["old_action_value"] != 0).any())
