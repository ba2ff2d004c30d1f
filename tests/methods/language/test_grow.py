import numpy as np
import pytest
import torch

from anypo.domains.language.toys.errands import ACTIONS, TAKE, WORLDS, Errands, tables
from anypo.loops.on_policy import train
from anypo.methods.language.grow import (
    METHOD,
    SampleGroups,
    SampleSurrogate,
    advantages,
    by_turn,
    decompose,
    loss,
    sample_rewards,
    subsample,
)
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.grpo import loss as grpo_loss
from anypo.policy import Signals
from anypo.run import Run
from anypo.seams.groups import broadcast, group_sum
from anypo.seams.steps import steps_of
from tests.helpers import assert_continues, assert_resumes, assert_trains, gradient, random_rows


def test_equal_lengths_are_grpo():
    rows = random_rows(ragged=False)
    found = advantages(sample_rewards(rows.reward, rows.mask, rows.mask, w_format=0.0), rows.mask, rows.group)
    torch.testing.assert_close(found, broadcast(grpo_advantages(rows.reward, rows.group), rows.mask))


def test_one_step_is_grpo_with_its_loss():
    rows = random_rows(1, horizon=1, ragged=False)
    found = advantages(sample_rewards(rows.reward, rows.mask, rows.mask, w_format=0.0), rows.mask, rows.group)
    expected = grpo_advantages(rows.reward, rows.group)
    torch.testing.assert_close(found[:, 0], expected)
    plain = grpo_loss(rows.logp, rows.old_logp, rows.ref_logp, rows.mask, expected, beta=0.0).loss
    torch.testing.assert_close(loss(rows.logp, rows.old_logp, found, rows.mask), plain)


def test_unequal_lengths_take_the_length_weighted_mean():
    rows = random_rows(2)
    reward = (rows.reward > 0).double()
    length = rows.mask.sum(1)
    mean = group_sum(length * reward, rows.group) / group_sum(length, rows.group)
    found = advantages(sample_rewards(reward, rows.mask, rows.mask, w_format=0.0), rows.mask, rows.group)
    spread = (mean * (1 - mean)).sqrt()
    expected = torch.where(spread > 0, (reward - mean) / (spread + 1e-6), 0.0)
    torch.testing.assert_close(found, broadcast(expected, rows.mask))


def test_equal_outcomes_and_lone_samples_have_no_advantage():
    rows = random_rows(3)
    for value in (0.1, 1 / 3):
        reward = torch.full_like(rows.reward, value)
        assert not advantages(sample_rewards(reward, rows.mask, rows.mask), rows.mask, rows.group).any()
    lone = torch.tensor([[True, False], [True, True]])
    found = advantages(torch.tensor([[3.0, 9.0], [1.0, 2.0]]), lone, torch.tensor([0, 1]))
    assert found[0].tolist() == [0.0, 0.0] and found[1].abs().min() > 0.9


def test_padding_never_enters():
    rows = random_rows(4)
    samples = torch.where(rows.mask, torch.randn(rows.mask.shape, dtype=torch.float64), torch.nan)
    found = advantages(samples, rows.mask, rows.group).masked_fill(~rows.mask, 0)
    assert torch.equal(found, advantages(samples.nan_to_num(), rows.mask, rows.group))
    old = rows.old_logp.masked_fill(~rows.mask, -torch.inf)
    logp = rows.logp.masked_fill(~rows.mask, -torch.inf).requires_grad_()
    (slope,) = gradient(loss(logp, old, found, rows.mask), logp)
    assert torch.isfinite(slope).all() and not slope[~rows.mask].any()


def test_rows_without_samples_change_nothing():
    rows = random_rows(5)
    empty, cut = rows.mask.clone(), torch.arange(8) != 3
    empty[3] = False
    value = broadcast(rows.advantages, rows.mask)
    torch.testing.assert_close(
        loss(rows.logp, rows.old_logp, value, empty), loss(rows.logp[cut], rows.old_logp[cut], value[cut], rows.mask[cut])
    )
    assert float(loss(rows.logp, rows.old_logp, value, torch.zeros_like(empty))) == 0


def test_discount_and_format():
    mask = torch.tensor([[True, True, True, False]])
    fine = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    assert sample_rewards(torch.tensor([2.0]), mask, fine, 0.5, 0.25).tolist() == [[0.75, 1.0, 2.25, 0.0]]
    assert decompose(mask, torch.tensor([7])) == [[0, 0, 7], [0, 1, 7], [0, 2, 7]]


def test_the_budget_is_uniform_and_counts_by_group():
    rows, count = random_rows(6), torch.zeros(8, 5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        kept = subsample(rows.mask, rows.group, torch.rand(rows.mask.shape, generator=generator, dtype=torch.float64), 2)
        assert all(float(kept[rows.group == g].sum()) == 2 for g in range(3)) and not kept[~rows.mask].any()
        count += kept
    for g in range(3):
        share = count[rows.group == g][rows.mask[rows.group == g]] / 400
        assert (share - 2 / len(share)).abs().max() < 0.1
    assert torch.equal(subsample(rows.mask, rows.group, torch.rand(8, 5, dtype=torch.float64), 100), rows.mask.double())


def collected(seed=0, **settings):
    task = Errands("rooms", horizon=6)
    run = Run(METHOD, task.policy(), task, steps=1, seed=seed)
    batch = run.collect([p.but(samples=4) for p in task.problems])
    batch.reward = run.score_rewards(batch)
    batch.advantage = SampleGroups(**settings)(batch, run)
    return run, batch


def test_components_are_the_functions_where_an_action_is_one_number():
    run, batch = collected()
    samples = sample_rewards(batch.reward, batch.mask, batch.mask)
    torch.testing.assert_close(batch.advantage, advantages(samples, batch.mask, batch.group))
    new = Signals(logp=batch.logp + 0.3 * torch.randn(batch.logp.shape, generator=run.generator))
    expected = loss(new.logp, batch.logp, batch.advantage, batch.mask)
    for ratio in ("action", "token"):
        torch.testing.assert_close(SampleSurrogate(ratio=ratio)(batch, new, run).value, expected)


def test_the_budget_is_kept_after_the_comparison():
    run, batch = collected(budget=3)
    _, full = collected()
    assert torch.equal(batch.advantage, full.advantage)
    assert [int(batch.counted[batch.group == g].sum()) for g in range(4)] == [3] * 4
    assert torch.isfinite(SampleSurrogate()(batch, Signals(logp=batch.logp.clone()), run).value)


def test_a_sample_of_several_tokens_has_one_ratio_and_one_advantage():
    run, batch = collected()
    batch.segment = batch.segment // 2  # two actions are one sample
    batch.advantage = SampleGroups()(batch, run)
    steps = steps_of(batch, batch.mask)
    table = by_turn(torch.ones(len(steps.traj)), steps, len(batch))
    expected = advantages(sample_rewards(batch.reward, table, table), table, batch.group)
    assert torch.equal(batch.advantage[:, ::2], torch.where(batch.mask[:, ::2], expected, 0.0))
    new = Signals(logp=batch.logp - 0.1 * batch.mask)
    tokens = by_turn(torch.ones(len(steps.traj)), steps, len(batch))
    tokens[:, : batch.mask[:, 1::2].shape[1]] += batch.mask[:, 1::2]
    ratio = torch.exp(-0.1 * tokens)
    per_sample = -torch.minimum(ratio * expected, ratio.clamp(0.8, 1.2) * expected)
    torch.testing.assert_close(SampleSurrogate()(batch, new, run).value, per_sample[table > 0].mean(), check_dtype=False)
    by_token = -torch.minimum(torch.exp(torch.tensor(-0.1)) * expected, expected * 0.9048374)
    torch.testing.assert_close(SampleSurrogate(ratio="token")(batch, new, run).value, by_token[table > 0].mean(), check_dtype=False)


def test_settings_that_do_not_exist_are_refused():
    run, batch = collected()
    with pytest.raises(ValueError, match=r"credit\.budget must be at least 1"):
        SampleGroups(budget=0)(batch, run)
    with pytest.raises(ValueError, match=r"objective\.ratio is action or token"):
        SampleSurrogate(ratio="turn")(batch, Signals(logp=batch.logp), run)
    with pytest.raises(ValueError, match="unknown world 'house'"):
        Errands("house")


def test_it_trains_and_resumes(tmp_path):
    assert_trains(METHOD)
    assert_resumes(METHOD.set("credit.budget", 4), tmp_path)

    def run_to(out, upto):
        task = Errands("rooms", horizon=8)
        run = Run(METHOD, task.policy(), task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path / "errands")


@pytest.mark.parametrize("world", sorted(WORLDS))
def test_the_worlds_can_be_solved_and_success_is_exact(world):
    task = Errands(world, horizon=40)
    best = task.best_actions()
    for starts in task.tables.starts:
        assert (best[starts].amax(1) > 1 / ACTIONS).all(), "a start from which no way leads to success"
    policy = task.policy(seed=1)
    with torch.no_grad():
        policy.output.weight.normal_(generator=torch.Generator().manual_seed(0))
    sampled = task.attempt(policy, [p.but(samples=2000) for p in task.problems], torch.Generator().manual_seed(1))
    shares = task.score(sampled).view(-1, 2000).mean(1).double()
    assert (shares - task.success_by_text(policy)).abs().max() < 0.05


def test_locks_keys_and_wrong_things():
    found = tables("rooms")
    state = {tuple(s): i for i, s in enumerate(found.places.tolist())}
    right = 3
    locked, opened = state[3, 3, 0, 10], state[3, 3, 9, 10]
    assert int(found.following[locked, right]) == locked and int(found.following[opened, right]) == state[3, 4, 9, 10]
    wrong, fine = state[1, 5, 2, 5], state[2, 5, 2, 5]
    assert bool(found.over[wrong, TAKE]) and not bool(found.won[wrong, TAKE]) and bool(found.won[fine, TAKE])


def test_a_policy_with_memory_scores_what_it_sampled():
    task = Errands(horizon=10)
    policy = task.policy(history=True)
    with torch.no_grad():
        policy.output.weight.normal_(generator=torch.Generator().manual_seed(0))
    batch = task.attempt(policy, [p.but(samples=3) for p in task.prompts(4, np.random.default_rng(0))], torch.Generator().manual_seed(0))
    seen = policy.evaluate(batch, {"logp", "entropy"})
    torch.testing.assert_close(seen.logp, batch.logp, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.entropy * batch.mask, batch.signals["old_entropy"], rtol=1e-4, atol=1e-5)
    length = batch.lengths
    assert policy.context_read(batch) == int((length * (length + 1) // 2).sum())
    assert task.policy().context_read(batch) == int(length.sum())
