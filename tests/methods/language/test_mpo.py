"""MPO: the identities between turn and token estimates, PPO and StepPO as special cases, observations, and the components in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.spell_grid import SpellGrid, SpellPolicy
from anypo.loops.on_policy import train
from anypo.methods.control import ppo
from anypo.methods.language import gspo, steppo
from anypo.methods.language.mpo import METHOD, MultiscaleGAE, TurnClip, advantages, loss, token_rewards, turns_of, value_after
from anypo.run import Run
from anypo.seams.credit import gae
from tests.helpers import assert_continues, assert_trains, gradient, random_rows


def walks(seed: int, rows: int = 5, horizon: int = 12) -> dict[str, Tensor]:
    """Random turns of one to four tokens, with observations (mask 0, segment -1) between some of them and within reach of every row's end."""
    g = torch.Generator().manual_seed(seed)
    mask, segment = torch.zeros(rows, horizon, dtype=torch.bool), torch.full((rows, horizon), -1)
    for row in range(rows):
        t, turn = 0, 0
        while t < horizon - int(torch.randint(4, (1,), generator=g)):
            size = min(int(torch.randint(1, 5, (1,), generator=g)), horizon - t)
            mask[row, t : t + size], segment[row, t : t + size] = True, turn
            t, turn = t + size + int(torch.randint(3, (1,), generator=g)), turn + 1
    reward, value = torch.randn(2, rows, horizon, generator=g, dtype=torch.float64)
    return {"reward": reward, "value": value, "mask": mask, "segment": segment}


def turn_means(values: Tensor, mask: Tensor, segment: Tensor) -> tuple[Tensor, Any]:
    turns = turns_of(mask, segment)
    count = len(turns.traj)
    return steppo.sum_by_step(values, turns.number, count) / steppo.sum_by_step(torch.ones_like(values), turns.number, count), turns


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), lam_tok=st.sampled_from([0.0, 0.5, 1.0]), whiten=st.booleans())
def test_the_token_mean_of_every_turn_is_its_advantage(seed: int, lam_tok: float, whiten: bool) -> None:
    rows = walks(seed)
    found = advantages(**rows, lam_tok=lam_tok, eta=0.7, whiten=whiten)
    mean, turns = turn_means(found.advantage, rows["mask"], rows["segment"])
    torch.testing.assert_close(mean, found.turn_advantage[turns.traj, turns.segment], atol=1e-8, rtol=0)
    assert not found.advantage[~rows["mask"]].any()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_first_token_has_the_turns_td_error_and_its_target_the_turns(seed: int) -> None:
    rows = walks(seed)
    found = advantages(**rows, gamma=0.9, lam_turn=0.0, whiten=False)  # no trace: A^turn = D
    start = turns_of(rows["mask"], rows["segment"]).start
    errors = advantages(**rows, gamma=0.9, lam_turn=0.0, eta=0.0, whiten=False).advantage
    torch.testing.assert_close(found.in_turn[start], errors[start], atol=1e-12, rtol=0)
    traced = advantages(**rows, gamma=0.9, lam_turn=0.8, lam_tok=0.5, whiten=False)
    by_turn = advantages(**rows, gamma=0.9, lam_turn=0.8, eta=0.0, whiten=False).advantage
    torch.testing.assert_close(traced.returns[start], (by_turn + rows["value"])[start], atol=1e-12, rtol=0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), whiten=st.booleans())
def test_without_the_in_turn_term_it_is_steppo(seed: int, whiten: bool) -> None:
    rows = walks(seed)
    turns = turns_of(rows["mask"], rows["segment"])
    reward = steppo.sum_by_step(rows["reward"], turns.number, len(turns.traj))
    plain = steppo.returns_and_advantages(reward, rows["value"][turns.start], turns.traj, turns.order, 0.9, 0.8, whiten)
    found = advantages(**rows, gamma=0.9, lam_turn=0.8, eta=0.0, whiten=whiten)
    torch.testing.assert_close(found.advantage[rows["mask"]], plain.advantage[turns.number[rows["mask"]]])
    torch.testing.assert_close(found.returns[turns.start], plain.returns)


def test_one_token_a_turn_is_token_ppo_with_gae() -> None:
    rows = random_rows(horizon=6)
    segment = torch.arange(6).expand(8, 6)
    reward, value = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    open_end = torch.zeros_like(rows.mask)
    plain = gae(
        reward,
        value,
        open_end,
        open_end,
        rows.mask,
        0.9,
        0.8,
        next_value=torch.cat([torch.where(rows.mask, value, 0.0)[:, 1:], value[:, :1] * 0], 1),
    )
    found = advantages(reward, value, rows.mask, segment, gamma=0.9, lam_turn=0.8, lam_tok=0.3, eta=2.0, whiten=False)
    torch.testing.assert_close(found.advantage, plain.advantages)
    torch.testing.assert_close(found.returns, plain.returns)
    logp = rows.logp.requires_grad_(True)
    mine, theirs = (f(logp, rows.old_logp, found.advantage, rows.mask, *more) for f, more in ((loss, (segment,)), (ppo.policy_loss, ())))
    torch.testing.assert_close(mine.loss, theirs.loss)
    torch.testing.assert_close(gradient(mine, logp), gradient(theirs, logp))


def test_one_turn_a_row_is_the_return_minus_the_first_value() -> None:
    rows = walks(0)
    segment = torch.where(rows["mask"], 0, -1)
    found = advantages(rows["reward"], rows["value"], rows["mask"], segment, eta=0.0, whiten=False)
    expected = torch.where(rows["mask"], rows["reward"], 0.0).sum(1) - rows["value"][:, 0]
    torch.testing.assert_close(found.turn_advantage[:, 0], expected)
    same = random_rows()
    logp = same.logp.requires_grad_(True)
    per_token = same.advantages[:, None].expand(8, 5)
    mine = loss(logp, same.old_logp, per_token, same.mask, torch.zeros_like(same.mask, dtype=torch.int64))
    theirs = gspo.loss(logp, same.old_logp, same.mask, same.advantages, 0.2, 0.2)
    torch.testing.assert_close(
        gradient(mine, logp)[0][0] * int(same.mask.sum()), gradient(theirs, logp)[0][0] * 8 * 5
    )  # row 0 has 5 tokens


def test_flat_values_and_a_reward_at_the_end_leave_no_in_turn_term() -> None:
    rows = walks(2)
    turns = turns_of(rows["mask"], rows["segment"])
    flat = torch.randn(len(turns.traj), generator=torch.Generator().manual_seed(0), dtype=torch.float64)[turns.number.clamp(min=0)]
    last = rows["mask"] & (torch.cat([turns.number[:, 1:], torch.full((5, 1), -1)], 1) != turns.number)
    reward = torch.where(last, rows["reward"], 0.0)
    found = [advantages(reward, flat, rows["mask"], rows["segment"], eta=eta).advantage for eta in (0.0, 5.0)]
    torch.testing.assert_close(found[0], found[1])


def test_observations_and_padding_are_skipped_whatever_they_hold() -> None:
    rows = walks(5)
    noisy = rows | {name: torch.where(rows["mask"], rows[name], torch.nan) for name in ("reward", "value")}
    torch.testing.assert_close(list(advantages(**noisy)), list(advantages(**rows)))
    numbered = rows | {"segment": torch.where(rows["mask"], rows["segment"], 3)}  # agents number observations with a turn
    torch.testing.assert_close(list(advantages(**numbered)), list(advantages(**rows)))
    old = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp = torch.where(rows["mask"], old + 0.1, -torch.inf).requires_grad_(True)
    found = loss(logp, old, torch.where(rows["mask"], 1.0, torch.nan).double(), rows["mask"], rows["segment"])
    slope = gradient(found, logp)[0]
    assert torch.isfinite(found.loss) and torch.isfinite(slope).all() and not slope[~rows["mask"]].any()


def test_tokens_of_a_turn_need_not_be_adjacent() -> None:
    """A tool call's answer inside a turn does not cut the trace."""
    whole = {"reward": torch.tensor([[0.0, 0, 1]]), "value": torch.tensor([[0.2, 0.5, 0.4]]), "segment": torch.tensor([[0, 0, 0]])}
    split = {name: torch.cat([x[:, :1], x[:, :1] * 0 + 9, x[:, 1:]], 1) for name, x in whole.items()}
    split["segment"][0, 1] = -1
    plain = advantages(**whole, mask=torch.ones(1, 3), lam_tok=0.7, whiten=False).in_turn[0]
    found = advantages(**split, mask=torch.tensor([[1, 0, 1, 1]]), lam_tok=0.7, whiten=False).in_turn[0]
    torch.testing.assert_close(found[[0, 2, 3]], plain)


def test_a_missing_turn_is_skipped_and_nothing_at_all_is_zero() -> None:
    rows = walks(7)
    gap = rows | {"segment": torch.where(rows["segment"] > 0, rows["segment"] + 2, rows["segment"])}
    found, plain = advantages(**gap), advantages(**rows)
    torch.testing.assert_close(found.advantage, plain.advantage)
    assert not found.turn_advantage[:, 1:3].any()
    empty = rows | {"mask": torch.zeros_like(rows["mask"])}
    assert not any(bool(part.any()) for part in advantages(**empty))


def test_turns_without_spread_get_exactly_nothing() -> None:
    one = advantages(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.3, 0.6]]), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int64))
    assert one.advantage.tolist() == [[0.0, 0.0]] and one.turn_advantage.tolist() == [[0.0]]


def test_a_bootstrap_follows_the_last_turn() -> None:
    rows = walks(3)
    after = torch.arange(5).double()
    found = [advantages(**rows, gamma=0.9, lam_turn=0.8, eta=0.0, whiten=False, last_value=v).advantage for v in (after, None)]
    turns = turns_of(rows["mask"], rows["segment"])
    to_end = torch.bincount(turns.traj)[turns.traj] - 1 - turns.order
    expected = 0.9 * after[turns.traj] * 0.72 ** to_end.double()
    torch.testing.assert_close((found[0] - found[1])[rows["mask"]], expected[turns.number[rows["mask"]]])


def as_batch(rows: dict[str, Tensor], **more: Any) -> Batch:
    signals = {"old_value": rows["value"]} | more.pop("signals", {})
    return Batch(action=rows["segment"], mask=rows["mask"], logp=torch.zeros(rows["mask"].shape).double(), group=torch.arange(len(rows["mask"])),
                 segment=rows["segment"], reward=rows["reward"], signals=signals, **more)  # fmt: skip


def test_rewards_of_turns_stand_at_their_last_tokens() -> None:
    rows = walks(4)
    given = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = as_batch(rows, signals={"turn_reward": given})
    found, turns = token_rewards(batch, rows["segment"]), turns_of(rows["mask"], rows["segment"])
    torch.testing.assert_close(steppo.sum_by_step(found, turns.number, len(turns.traj)), given[turns.traj, turns.segment])
    assert int((found != 0).sum()) == len(turns.traj)
    row, place = (found != 0).nonzero(as_tuple=True)
    assert not (turns.number[row, place] == torch.cat([turns.number, torch.full((5, 1), -1)], 1)[row, place + 1]).any()


def test_the_credit_leaves_targets_and_uses_the_value_after_a_cut() -> None:
    rows = walks(6)
    cut, after = torch.tensor([True, False, True, False, False]), torch.randn(5, 12, generator=torch.Generator().manual_seed(2)).double()
    batch = as_batch(rows, truncated=cut, next_value=after)
    last = torch.stack([after[i][rows["mask"][i]][-1] for i in range(5)]) * cut
    torch.testing.assert_close(value_after(batch), last)
    expected = advantages(**rows, last_value=last)
    torch.testing.assert_close(MultiscaleGAE()(batch, None), expected.advantage)  # type: ignore[arg-type]
    torch.testing.assert_close(batch.signals["returns"], expected.returns)


def test_no_gradient_through_advantages_and_the_clip_stops_it() -> None:
    rows = random_rows()
    segment = torch.zeros_like(rows.mask, dtype=torch.int64)
    advantage = rows.advantages[:, None].expand(8, 5).clone().requires_grad_(True)
    logp = (rows.old_logp + 1.0).requires_grad_(True)
    found = loss(logp, rows.old_logp, advantage, rows.mask, segment)
    slope, through = torch.autograd.grad(found.loss, [logp, advantage], allow_unused=True)
    assert through is None
    assert torch.equal(slope != 0, rows.mask & (advantage.detach() < 0))


def grid_run(steps: int, folder: Path | None = None) -> Run:
    method = METHOD.set("select.prompts", 4).set("select.group_size", 2)
    run = Run(method, SpellPolicy(), SpellGrid(), steps=steps, out=folder, checkpoint_every=2)
    if folder is not None:
        run.resume()
    return train(run)


def test_it_trains_on_the_grid_and_on_tasks_without_turns() -> None:
    run = grid_run(3)
    assert all(torch.isfinite(torch.tensor([r["loss"], r["explained_variance"], r["approx_kl"]])).all() for r in run.history)
    assert_trains(METHOD)
    assert_trains(METHOD.but(credit=ppo.METHOD.credit))
    assert_trains(ppo.METHOD.but(credit=METHOD.credit, domain="language"))


def test_four_steps_equal_two_and_two_more(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        return grid_run(upto, out)

    assert_continues(run_to, tmp_path)


def test_the_clip_has_two_sides() -> None:
    batch = as_batch(walks(1)).but(advantage=torch.ones(5, 12).double())
    new: Any = type("New", (), {"logp": torch.full((5, 12), 0.25).double()})
    wide, narrow = (TurnClip(clip_high=high)(batch, new, None) for high in (0.5, 0.2))  # type: ignore[arg-type]
    assert float(wide.value) == pytest.approx(-(2.718281828459045**0.25)) and float(narrow.value) == pytest.approx(-1.2)
    assert (wide.metrics["clip_fraction"], narrow.metrics["clip_fraction"]) == (0.0, 1.0)
