import pytest
import torch

from anypo.batch import Batch
from anypo.domains.language.toys.spell_grid import SpellGrid, SpellPolicy
from anypo.loops.on_policy import step, train
from anypo.methods.language import gspo
from anypo.methods.language.steppo import METHOD, StepGAE, loss, returns_and_advantages, step_surrogate, steps_of
from anypo.run import Run
from anypo.seams.credit import gae
from tests.helpers import assert_trains, gradient, random_rows


def walks(seed=0):
    """Step rows of three trajectories of 4, 1 and 3 steps."""
    generator = torch.Generator().manual_seed(seed)
    traj = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
    order = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2])
    reward, value = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    return reward, value, traj, order


def test_one_token_a_step_is_token_gae():
    reward, value, traj, order = walks()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[traj, order] = True
    table = torch.zeros(2, 3, 4).double()
    table[:, traj, order] = torch.stack([reward, value])
    open_end = torch.zeros_like(mask)
    plain = gae(table[0], table[1], open_end, open_end, mask, 0.9, 0.8)
    found = returns_and_advantages(reward, value, traj, order, 0.9, 0.8, whiten=False)
    torch.testing.assert_close(found.advantage, plain.advantages[traj, order])
    torch.testing.assert_close(found.returns, plain.returns[traj, order])


def test_one_step_a_trajectory_is_reward_minus_value_and_gspo():
    rows = random_rows()
    number = torch.arange(8)
    found = returns_and_advantages(rows.reward, rows.advantages, number, torch.zeros_like(number), whiten=False)
    torch.testing.assert_close(found.advantage, rows.reward - rows.advantages)
    logp = rows.logp.requires_grad_(True)
    mine = loss(logp, rows.old_logp, rows.mask, rows.advantages, 0.1, 0.2)
    plain = gspo.loss(logp, rows.old_logp, rows.mask, rows.advantages, 0.1, 0.2)
    torch.testing.assert_close(mine.loss, plain.loss)
    torch.testing.assert_close(gradient(mine, logp), gradient(plain, logp))


def test_without_critic_and_decay_it_is_the_whitened_discounted_return():
    reward, value, traj, order = walks()
    gain = torch.stack(
        [sum(0.9 ** (order[j] - order[i]) * reward[j] for j in range(8) if traj[j] == traj[i] and order[j] >= order[i]) for i in range(8)]
    )
    found = returns_and_advantages(reward, torch.zeros_like(value), traj, order, 0.9, 1.0)
    torch.testing.assert_close(found.advantage, (gain - gain.mean()) / (gain.std() + 1e-8))
    torch.testing.assert_close(found.returns, gain)


def test_gaps_are_refused_and_lone_steps_are_zero():
    reward, value, traj, order = walks()
    with pytest.raises(ValueError, match="without a gap"):
        returns_and_advantages(reward, value, traj, order + (traj == 2))
    with pytest.raises(ValueError, match="without a gap"):
        returns_and_advantages(reward, value, traj, torch.where(traj == 2, 1, order))
    assert returns_and_advantages(reward[:1], value[:1], traj[:1], order[:1]).advantage.tolist() == [0.0]
    assert len(returns_and_advantages(reward[:0], value[:0], traj[:0], order[:0]).advantage) == 0


def test_a_bootstrap_follows_the_last_step_of_truncated_walks():
    reward, value, traj, order = walks()
    after = torch.where(traj == 2, 5.0, 0.0).double()
    plain = returns_and_advantages(reward, value, traj, order, 0.9, 0.8, whiten=False).advantage
    found = returns_and_advantages(reward, value, traj, order, 0.9, 0.8, whiten=False, bootstrap=after).advantage
    expected = torch.where(traj == 2, 0.9 * 5 * 0.72 ** (2 - order).double(), 0.0)
    torch.testing.assert_close(found - plain, expected)


def spelled(lengths, horizon=12, seed=0):
    """One walk a row, with steps of the given lengths and a value of its own for every token; rewards at the last token."""
    segment = torch.zeros(len(lengths), horizon, dtype=torch.int64)
    mask = torch.zeros_like(segment, dtype=torch.bool)
    value = torch.randn(len(lengths), horizon, generator=torch.Generator().manual_seed(seed)).double()
    for row, sizes in enumerate(lengths):
        t = 0
        for number, size in enumerate(sizes):
            segment[row, t : t + size], mask[row, t : t + size] = number, True
            value[row, t] = 0.1 * (row + 1) + 0.2 * number  # what the critic says when a step begins
            t += size
    reward = torch.ones(len(lengths)).double() * torch.arange(len(lengths))
    return Batch(action=segment, mask=mask, logp=torch.zeros(mask.shape).double(), group=torch.arange(len(lengths)), segment=segment,
                 reward=reward, signals={"old_value": value})  # fmt: skip


def test_longer_words_change_no_advantage():
    short, long = spelled([[1, 2, 1], [2, 1], [3]]), spelled([[4, 2, 5], [2, 6], [9]], seed=1)
    found = [StepGAE()(batch, None) for batch in (short, long)]
    for row, count in enumerate((3, 2, 1)):
        for number in range(count):
            values = [a[row][(b.segment[row] == number) & b.mask[row]] for a, b in zip(found, (short, long), strict=True)]
            assert len(torch.unique(torch.cat(values))) == 1
    assert all(float(a[~b.mask].abs().sum()) == 0 for a, b in zip(found, (short, long), strict=True))


def test_steps_are_found_where_observations_lie_between_them():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 1]]).bool()
    segment = torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6, [0, 0, 2, 2, 2, 3]])  # the second row wrote nothing, the third no turn 1
    steps = steps_of(Batch(action=segment, mask=mask, logp=torch.zeros(3, 6), group=torch.arange(3), segment=segment), mask)
    assert steps.number.tolist() == [[0, 0, -1, -1, 1, -1], [-1] * 6, [2, -1, 3, 3, -1, 4]]
    assert steps.order.tolist() == [0, 1, 0, 1, 2] and steps.traj.tolist() == [0, 0, 2, 2, 2]
    assert steps.start.nonzero().tolist() == [[0, 0], [0, 4], [2, 0], [2, 2], [2, 5]]


def test_a_row_of_several_steps_is_the_same_loss_as_rows_of_one_step():
    rows = random_rows()
    index = torch.where(rows.mask, torch.arange(8)[:, None], -1)
    advantage = rows.advantages[:, None].expand(8, 5)
    one = loss(rows.logp, rows.old_logp, rows.mask, rows.advantages)
    joined = step_surrogate(*(x.reshape(2, 20) for x in (rows.logp, rows.old_logp, index, advantage)), 8, 0.2, 0.2)
    torch.testing.assert_close(joined.loss, one.loss)
    torch.testing.assert_close(joined.log_ratio, one.log_ratio)


def grid_run(steps, folder=None):
    run = Run(
        METHOD.set("select.prompts", 4).set("select.group_size", 2), SpellPolicy(), SpellGrid(), steps=steps, out=folder, checkpoint_every=2
    )
    if folder is not None:
        run.resume()
    return train(run)


def test_it_trains_on_the_grid_and_on_tasks_without_steps():
    run = grid_run(3)
    assert all(torch.isfinite(torch.tensor([r["loss"], r["explained_variance"]])).all() for r in run.history)
    assert_trains(METHOD)


def test_four_steps_equal_two_and_two_more(tmp_path):
    whole = grid_run(4, tmp_path / "whole")
    grid_run(2, tmp_path / "halves")
    halves = grid_run(4, tmp_path / "halves")
    for mine, other in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_grid_measures_what_it_samples():
    policy, task = SpellPolicy(), SpellGrid()
    run = Run(METHOD.set("select.prompts", 500).set("select.group_size", 8), policy, task, steps=1)
    batch = step(run)
    fresh = SpellPolicy()
    assert abs(float(batch.outcome.mean()) - task.expected_success(fresh)) < 0.03
    words = steps_of(batch, batch.mask)
    assert abs(len(words.traj) * (task.mean_word(fresh) + 1) / int(batch.mask.sum()) - 1) < 0.03  # and a space
    assert bool((batch.outcome <= 1).all()) and int(batch.segment[batch.mask].max()) == 11
