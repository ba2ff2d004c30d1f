"""PCM: its limits, scores and draws at their edges, removed chunks, and the method on CartPole and on pick-and-place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.domains.control.pick_place import NOMINAL, pretrained, success_chance
from anypo.domains.control.tasks import GymTask
from anypo.loops import on_policy
from anypo.methods.control.pcm import METHOD, KeptSteps, PhaseMaskedCredit, gathered, keep_prob, loss, phases, sample, scores, update
from anypo.methods.language.grpo import loss as grpo_loss
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.update import GradientSteps
from tests.helpers import assert_resumes_on_cartpole, gradient, random_rows, trained_on_cartpole


def gumbel(*shape: int, seed: int = 0) -> torch.Tensor:
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniform.log()).log()


def pick_place_run(method: object = METHOD, steps: int = 1, seed: int = 0) -> Run:
    return Run(method, pretrained(seed), GymTask("PickPlace-v0"), steps=steps, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_of_the_length_is_grpo(seed: int) -> None:
    rows = random_rows(seed)
    keep = sample(
        phases(rows.mask, 4), rows.mask, torch.full((4,), 0.25, dtype=torch.float64), gumbel(*rows.mask.shape), rows.mask.shape[1]
    )
    assert torch.equal(keep.bool(), rows.mask.bool())
    logp = rows.logp.clone().requires_grad_()
    mine = loss(logp, rows.old_logp, rows.advantages, keep)
    theirs = grpo_loss(logp, rows.old_logp, rows.old_logp, rows.mask, rows.advantages, beta=0.0).loss
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gradient(mine, logp)[0], gradient(theirs, logp)[0])


def test_full_exploration_is_uniform_and_none_is_pure_concentration() -> None:
    state = torch.tensor([0.0, 3.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.equal(keep_prob(state, 1.0), torch.full((4,), 0.25, dtype=torch.float64))
    assert torch.equal(keep_prob(state, 0.0), state / 4)
    mask = torch.ones(50, 16)
    phase = phases(mask, 4)
    kept = sample(phase, mask, keep_prob(state, 0.0), gumbel(50, 16), 6)
    assert (kept[:, phase[0] == 0] == 0).all() and (kept[:, phase[0] == 3] == 0).all() and (kept.sum(1) == 6).all()
    assert (sample(phase, mask, keep_prob(state, 0.0), gumbel(50, 16), 10).sum(1) == 8).all()  # nothing else has any probability


def test_no_rate_keeps_the_probabilities_and_uninformed_phases_stay() -> None:
    state, new = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, -1.0, 0.0])
    assert torch.equal(update(state, new, 0.0), state)
    assert torch.equal(update(state, new, 1.0), torch.tensor([5.0, 2.0, 0.0]))


@pytest.mark.parametrize("lengths", [(9, 5, 1), (4, 0, 12)])
def test_draws_take_the_budget_and_stay_inside_the_mask(lengths: tuple[int, ...]) -> None:
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).double()
    kept = sample(phases(mask, 4), mask, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), gumbel(3, 12, seed=1), 4)
    assert kept.sum(1).tolist() == [min(n, 4) for n in lengths] and (kept <= mask).all()


def test_draws_follow_the_probabilities() -> None:
    """The first draw of a row falls on a phase with its probability, however many chunks the phase has."""
    phase = torch.tensor([[0, 1, 1, 1, 1, 2, 2, 2]]).repeat(20000, 1)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    kept = sample(phase, torch.ones(20000, 8), q, gumbel(20000, 8, seed=2), 1).mean(0)
    torch.testing.assert_close(torch.stack([kept[phase[0] == k].sum() for k in range(3)]), q, atol=0.015, rtol=0)


def test_scores_know_only_groups_and_phases_with_both_outcomes() -> None:
    phase = torch.tensor([[0, 1, -1], [0, 0, -1], [0, 1, 1], [0, 1, 1]])
    actions = torch.zeros(4, 3, 1, dtype=torch.float64)
    actions[0], actions[1], actions[2:, 1:] = 2.0, -1.0, 100.0
    actions[phase < 0] = torch.nan
    found = scores(actions, torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 3, 3]), phase, 3)
    torch.testing.assert_close(
        found, torch.tensor([1 / 3 * 2 / 3 * 9, -1.0, -1.0], dtype=torch.float64)
    )  # one success chunk, two failure chunks


def test_scores_of_gradual_rewards_split_at_the_mean() -> None:
    g = torch.Generator().manual_seed(3)
    actions, phase = torch.randn(6, 8, 2, generator=g, dtype=torch.float64), phases(torch.ones(6, 8), 4)
    reward, group = torch.tensor([0.1, 0.9, 0.8, 0.3, 0.2, 0.7], dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    torch.testing.assert_close(scores(actions, reward, group, phase, 4), scores(actions, (reward > 0.5).double(), group, phase, 4))


def test_dropped_chunks_get_no_gradient_and_advantages_come_from_all_rows() -> None:
    run = pick_place_run()
    batch = run.collect([p.but(samples=16) for p in run.task.prompts(1, run.rng)])
    batch.reward = run.method.reward(batch, run)
    advantage = run.method.credit(batch, run)
    torch.testing.assert_close(advantage, GroupRelative()(batch, run))
    assert batch.keep is not None and (batch.keep.sum(1) == 12).all()
    logp = batch.logp.clone().requires_grad_()
    (found,) = gradient(loss(logp, batch.logp, advantage[:, 0], batch.keep), logp)
    assert (found[~batch.keep] == 0).all() and (found[batch.keep] != 0).all()


def test_removing_chunks_gives_the_gradient_of_masking_them() -> None:
    removed, masked = (
        pick_place_run(METHOD.but(update=kind(unit="row", optimizer="sgd", learning_rate=0.01))) for kind in (KeptSteps, GradientSteps)
    )
    batch = on_policy.step(removed)
    on_policy.step(masked)
    for mine, theirs in zip(removed.policy.parameters(), masked.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.equal(next(removed.policy.parameters()), next(pretrained(0).parameters()))
    small = gathered(batch)
    assert small.mask.shape == (32, 12) and small.mask.all() and torch.equal(small.action.flatten(), batch.action[batch.counted].flatten())
    assert torch.equal(small.context.flatten(0, 1), batch.context[batch.counted]) and small.group is batch.group


def test_rows_of_different_lengths_are_padded() -> None:
    run = pick_place_run()
    batch = run.collect([p.but(samples=2) for p in run.task.prompts(1, run.rng)])
    batch.mask[1, 5:] = False
    batch.keep = torch.zeros_like(batch.mask)
    batch.keep[0, [3, 7, 50]] = True
    batch.keep[1, [0, 4, 40]] = True
    small = gathered(batch)
    assert small.mask.tolist() == [[True] * 3, [True, True, False]]
    assert torch.equal(small.logp[0], batch.logp[0, [3, 7, 50]]) and torch.equal(small.logp[1, :2], batch.logp[1, [0, 4]])


def test_scales_of_dimensions_do_not_matter() -> None:
    run = pick_place_run()
    batch = run.collect([p.but(samples=16) for p in run.task.prompts(1, run.rng)])
    batch.reward = run.method.reward(batch, run)
    states = []
    for scale in (1.0, 1000.0):
        credit = PhaseMaskedCredit()
        credit(batch.but(action=scale * batch.action, keep=None), run)
        states.append(credit.state)
    torch.testing.assert_close(*states)


def test_a_signal_names_the_phases() -> None:
    run = pick_place_run()
    batch = run.collect([p.but(samples=16) for p in run.task.prompts(1, run.rng)])
    batch.reward = run.method.reward(batch, run)
    batch.signals["phase"] = torch.zeros_like(batch.mask, dtype=torch.int64)
    credit = PhaseMaskedCredit(phases=2)
    credit(batch, run)
    assert credit.state is not None and credit.state[1] == 1.0 and credit.state[0] != 1.0


def test_the_pretrained_policy_and_its_success_chance() -> None:
    run = pick_place_run(seed=5)
    assert all(abs(success_chance(run.policy, critical) - 0.3) < 0.01 for critical in range(4))
    batch = run.collect([p.but(samples=2000) for p in run.task.prompts(1, run.rng)])
    assert abs(float(batch.signals["raw_reward"].sum(1).mean()) - success_chance(run.policy)) < 0.04
    drifting = pretrained(5)
    with torch.no_grad():
        drifting.actor_network.layers[-1].bias += 0.2  # type: ignore[operator]
    run.policy = drifting
    batch = run.collect([p.but(samples=2000) for p in run.task.prompts(1, run.rng)])
    assert abs(float(batch.signals["raw_reward"].sum(1).mean()) - success_chance(drifting)) < 0.04
    assert len(NOMINAL) == 4


def test_training_and_resuming_on_cartpole(tmp_path: Path) -> None:
    method = METHOD.set("select.group_size", 4)
    assert_resumes_on_cartpole(method, tmp_path)
    run = trained_on_cartpole(method, 2)
    assert all(0 < r["kept"] <= 1 and abs(sum(r[f"keep_{k}"] for k in range(4)) - 1) < 1e-9 for r in run.history)
