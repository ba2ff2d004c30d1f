"""F-TIS: reductions, the filter, messages, the swarm, checkpoints and training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import step
from anypo.methods.language import grpo
from anypo.methods.language.f_tis import METHOD, Mailbox, SwarmRollout, filter_advantages, group_by_node, loss, pack, unpack, weights
from anypo.run import Run
from tests.helpers import Rows, assert_continues, assert_resumes, assert_trains, gradient, random_rows


def ours(rows: Rows, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient in logp), the generator being `old_logp`."""
    logp = rows.logp.detach().requires_grad_()
    value = loss(rows.old_logp, logp, rows.mask, rows.advantages, **options)
    return value.loss.detach(), gradient(value, logp)[0]


def test_one_node_on_its_own_policy_is_grpo() -> None:
    rows = random_rows()
    rows.old_logp = rows.logp.clone()
    logp = rows.logp.detach().requires_grad_()
    plain = grpo.loss(logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, beta=0.0)
    expected = gradient(plain, logp)[0]
    for options in ({}, {"anchor": "old", "old_logp": rows.old_logp}):
        value, slope = ours(rows, **options)
        torch.testing.assert_close(value, plain.loss.detach())
        torch.testing.assert_close(slope, expected)


def expected_slope(rows: Rows, weight: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Equation 7."""
    return -rows.mask.double() * weight * advantages[:, None] / rows.mask.sum(1, keepdim=True) / len(rows.mask)


def test_infinite_distance_is_tis_and_infinite_truncation_plain_weights() -> None:
    rows = random_rows(spread=1.5)
    ratio = (rows.logp - rows.old_logp).exp()
    assert (ratio[rows.mask] > 2).any()
    torch.testing.assert_close(ours(rows, g=math.inf)[1], expected_slope(rows, ratio.clamp(max=2.0), rows.advantages))
    torch.testing.assert_close(ours(rows, g=math.inf, C=math.inf)[1], expected_slope(rows, ratio, rows.advantages))
    torch.testing.assert_close(ours(rows, g=math.inf, weighted=False)[1], expected_slope(rows, torch.ones_like(ratio), rows.advantages))


def test_equation_7_with_the_filter() -> None:
    rows = random_rows(spread=1.5)
    found = filter_advantages(rows.old_logp, rows.logp, rows.mask, rows.advantages, g=0.5)
    assert (found.advantages != rows.advantages).any() and (found.advantages[rows.advantages < 0] != 0).any()
    slope = ours(rows, g=0.5)[1]
    torch.testing.assert_close(slope, expected_slope(rows, weights(rows.old_logp, rows.logp), found.advantages))


def test_positive_advantages_are_never_filtered() -> None:
    rows = random_rows(spread=3.0)
    rows.advantages = rows.advantages.abs()
    assert torch.equal(filter_advantages(rows.old_logp, rows.logp, rows.mask, rows.advantages, g=-1e9).advantages, rows.advantages)


def test_the_filter_is_one_sided_and_k3_two_sided() -> None:
    gen, logp = torch.full((2, 3), -1.0), torch.tensor([[-3.0] * 3, [-0.1] * 3])
    advantages, mask = torch.tensor([-1.0, -1.0]), torch.ones(2, 3)
    k1 = filter_advantages(gen, logp, mask, advantages, g=5.0)
    torch.testing.assert_close(k1.distance, torch.tensor([6.0, -2.7]))
    assert k1.advantages.tolist() == [0, -1]
    d = logp - gen
    torch.testing.assert_close(filter_advantages(gen, logp, mask, advantages, kl="k3").distance, (d.exp() - d - 1).sum(1))
    with pytest.raises(ValueError, match="k1 or k3"):
        filter_advantages(gen, logp, mask, advantages, kl="k2")


def test_per_token_advantages_are_filtered_where_they_are_negative() -> None:
    gen, logp, mask = torch.full((1, 3), -1.0), torch.full((1, 3), -4.0), torch.ones(1, 3)
    assert filter_advantages(gen, logp, mask, torch.tensor([[1.0, -1.0, 2.0]]), g=5.0).advantages.tolist() == [[1, 0, 2]]
    rows = random_rows(spread=1.5)
    by_row = ours(rows, g=0.5)
    rows.advantages = rows.advantages[:, None] * rows.mask
    for a, b in zip(ours(rows, g=0.5), by_row, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_are_cut_from_above_alone_and_detached() -> None:
    logp = torch.tensor([[-9.0, -1.0, 4.0, 900.0]]).requires_grad_()
    found = weights(torch.zeros(1, 4) - 1, logp)
    assert not found.requires_grad and found[0, 2:].tolist() == [2, 2]
    torch.testing.assert_close(found[0, :2], torch.tensor([math.exp(-8), 1.0]))


def test_padding_may_hold_anything_and_empty_rows_count_for_nothing() -> None:
    rows = random_rows()
    rows.mask[2] = False
    clean = ours(rows)
    rows.logp, rows.old_logp = rows.logp.masked_fill(~rows.mask, -math.inf), rows.old_logp.masked_fill(~rows.mask, math.nan)
    for a, b in zip(ours(rows), clean, strict=True):
        torch.testing.assert_close(a, b)
    without = Rows(**{name: value[torch.arange(8) != 2] for name, value in vars(rows).items()})
    torch.testing.assert_close(ours(without)[0], clean[0])


def test_anchor_is_checked() -> None:
    rows = random_rows()
    with pytest.raises(ValueError, match="current or old"):
        ours(rows, anchor="generator")
    with pytest.raises(ValueError, match="needs old_logp"):
        ours(rows, anchor="old")
    assert "old_logp" in METHOD.set("objective.anchor", "old").needs() and "old_logp" not in METHOD.needs()


def swarm(steps: int = 3, **settings: object) -> tuple[Mailbox, list[Run]]:
    """Two nodes with different tables on one problem set, not yet stepped."""
    mailbox, runs = Mailbox(), []
    for node in (0, 1):
        task = TokenBandit(4, 3, 4, eos=0, partial=True)
        method = METHOD.but(rollout=SwarmRollout(exchange=mailbox.join()))
        for path, value in settings.items():
            method = method.set(path.replace("__", "."), value)
        runs.append(Run(method, task.policy(scale=1.0 + node, seed=node), task, steps=steps, seed=node))
    return mailbox, runs


def test_messages_carry_tokens_and_log_probs_in_8_bytes() -> None:
    _, (run, _) = swarm()
    rows = run.collect(METHOD.select(run.task, run))
    run.score_rewards(rows)
    message = pack(rows)
    tokens = int(rows.mask.sum())
    assert sum(m.numel() * m.element_size() for m in message.values()) == 8 * tokens + 16 * len(rows) and tokens < rows.mask.numel()
    blank = rows.but(action=torch.full_like(rows.action, 2), logp=rows.logp + 5, signals=rows.signals | {"task_reward": rows.logp[:, 0]})
    back = unpack(message, blank)
    assert torch.equal(back.action[rows.mask], rows.action[rows.mask]) and torch.equal(back.mask, rows.mask)
    torch.testing.assert_close(back.logp, rows.logp, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(back.signals["task_reward"], rows.signals["task_reward"])
    with pytest.raises(ValueError, match="one turn only"):
        pack(rows.but(mask=rows.mask.roll(1, 1), valid=None))


def test_nodes_receive_what_the_others_wrote() -> None:
    mailbox, (first, second) = swarm()
    sent = step(first)  # nothing has been sent to it yet
    assert first.history[-1]["received"] == 0 and first.actions == mailbox.tokens
    got = step(second)
    peer = got.signals["node"] == 1
    assert int(peer.sum()) == 32 and second.history[-1]["received"] == 0.5
    assert mailbox.messages == 2 and second.actions == int(got.mask[~peer].sum())  # a received token was not generated here
    torch.testing.assert_close(got.signals["task_reward"][peer], sent.signals["task_reward"], atol=1e-6, rtol=0)
    initial = first.task.policy(scale=1.0, seed=0).observe(got, {"logp"}).logp  # the first node before its step
    torch.testing.assert_close(got.logp[peer], initial[peer], atol=1e-6, rtol=1e-6)
    assert got.group.unique().numel() == 8 and all(len(got.signals["node"][got.group == g].unique()) == 1 for g in got.group.unique())
    again = SwarmRollout(exchange=second.method.rollout.exchange)(METHOD.select(second.task, second), second)
    assert (again.signals["node"] == 0).all()  # a message is taken once


def test_vertical_grouping_ignores_what_peers_earned() -> None:
    node, group = torch.tensor([0, 0, 1, 1]), torch.tensor([5, 7, 5, 5])
    index = group_by_node(node, group)
    assert index[2] == index[3] and len(index[:3].unique()) == 3
    changed = {}
    for grouping in ("vertical", "horizontal"):
        _, (first, second) = swarm(rollout__grouping=grouping)
        step(first)
        got = step(second)
        reward = got.reward + 3 * (got.signals["node"] == 1) * torch.rand(len(got), dtype=torch.float64)
        own = got.signals["node"] == 0
        changed[grouping] = not torch.equal(METHOD.credit(got.but(reward=reward), second)[own], got.advantage[own])
    assert changed == {"vertical": False, "horizontal": True}


def test_old_signals_of_peers_are_those_of_the_local_policy() -> None:
    _, (first, second) = swarm(objective__anchor="old", update__epochs=2)
    step(first)
    before = second.policy.snapshot()
    got = step(second)
    torch.testing.assert_close(got.signals["old_logp"], before.observe(got, {"logp"}).logp)
    assert "old_entropy" not in got.signals and all(math.isfinite(second.history[-1][n]) for n in ("loss", "distance", "filtered"))


def test_grouping_is_checked() -> None:
    _, (first, _) = swarm(rollout__grouping="diagonal")
    with pytest.raises(ValueError, match="vertical or horizontal"):
        step(first)


def test_alone_it_learns_beside_an_older_self(tmp_path: Path) -> None:
    run = assert_trains(METHOD.set("rollout.exchange.generator.lag", 2), steps=5)
    assert all(r["received"] == 0.5 for r in run.history) and [r["lag"] for r in run.history] == [0, 1, 0, 1, 0]
    assert_resumes(METHOD.set("rollout.exchange.generator.lag", 3), tmp_path)


def test_text_rows_are_shared_and_resumed(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        policy, task = make_toy_arith(target=0.05)
        run = Run(METHOD.set("rollout.exchange.generator.lag", 3), policy, task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)


def test_gru_nodes_of_different_widths_share() -> None:
    mailbox, runs = Mailbox(), []
    for width in (64, 32):
        policy, task = make_toy_arith(target=0.05, hidden=width)
        runs.append(Run(METHOD.but(rollout=SwarmRollout(exchange=mailbox.join())), policy, task, steps=2))
    for run in [*runs, *runs]:
        step(run)
    assert all(math.isfinite(r["loss"]) for run in runs for r in run.history) and runs[0].history[-1]["received"] == 0.5
