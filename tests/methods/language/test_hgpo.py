import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.methods.language.hgpo import METHOD, advantages, base_group, depth_advantages, mixture, returns
from anypo.reproductions.language.hgpo import Corridor, CorridorPolicy
from anypo.run import Run
from anypo.seams.groups import standardize


def steps(seed=0, trajectories=6, length=4, states=3):
    generator = torch.Generator().manual_seed(seed)
    traj = torch.arange(trajectories).repeat_interleave(length)
    return (
        torch.rand(len(traj), generator=generator).double(),
        traj % 2,
        traj,
        torch.randint(states, (len(traj),), generator=generator),
    )


def test_no_memory_is_same_state_groups():
    gain, group, traj, obs = steps()
    plain = standardize(gain, group * 10 + obs, ddof=0, eps=1e-6)
    torch.testing.assert_close(advantages(gain, group, traj, obs, K=0), plain * 2 / (2 + 1e-6))


def test_equal_histories_give_the_same_value_at_every_alpha():
    gain, group, traj, _ = steps()
    obs = torch.arange(4).repeat(6)
    found = [advantages(gain, group, traj, obs, K=2, alpha=a) for a in (0.0, 1.0, 5.0)]
    first = depth_advantages(gain, group, traj, obs, K=2).A[:, 0]
    for value in found:
        torch.testing.assert_close(value, first, rtol=1e-5, atol=1e-6)


def test_alpha_chooses_between_plain_mean_and_the_deepest_group():
    items = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 3.0], [0.0, 0.0, 0.0]]).double()
    depth = torch.arange(1, 4)
    torch.testing.assert_close(mixture(items, depth, 0.0), torch.tensor([7 / 3, 2.0, 0.0]).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixture(items, depth, 200.0), torch.tensor([4.0, 3.0, 0.0]).double(), rtol=1e-5, atol=1e-6)


def test_unique_states_give_zero_or_the_base_item_alone():
    gain, group, traj, _ = steps()
    obs = torch.arange(len(gain))
    assert torch.equal(advantages(gain, group, traj, obs), torch.zeros_like(gain))
    total = torch.rand(6).double()[traj]
    plain = standardize(total, group, ddof=1, eps=1e-6)
    torch.testing.assert_close(base_group(gain, group, traj, obs, total), plain, rtol=1e-5, atol=1e-6)


def test_equal_returns_are_exactly_zero_for_any_number():
    _, group, traj, obs = steps()
    for value in (0.1, 0.3, 1 / 3):
        for mode in ("mean_norm", "mean_std_norm"):
            assert torch.equal(advantages(torch.full((24,), value).double(), group, traj, obs, mode=mode), torch.zeros(24).double())


def test_rows_of_different_trajectories_may_be_interleaved():
    gain, group, traj, obs = steps()
    order = torch.arange(24).view(6, 4).T.flatten()  # time order within each trajectory is kept
    shuffled = advantages(gain[order], group[order], traj[order], obs[order])
    torch.testing.assert_close(shuffled, advantages(gain, group, traj, obs)[order])
    torch.testing.assert_close(returns(gain[order], traj[order], 0.9), returns(gain, traj, 0.9)[order])


def test_returns_are_discounted_sums():
    reward = torch.tensor([1.0, 2.0, 3.0, 5.0]).double()
    assert returns(reward, torch.tensor([0, 0, 0, 1]), 0.5).tolist() == [2.75, 3.5, 3.0, 5.0]


def test_other_modes_and_tasks_without_turns_are_refused():
    with pytest.raises(ValueError, match="mean_std_norm or mean_norm"):
        depth_advantages(*steps(), mode="rank")
    task = TokenBandit(4, 3, 2)
    with pytest.raises(ValueError, match="hgpo compares turns"):
        train(Run(METHOD, task.policy(), task, steps=1))


def test_it_trains_through_the_loop():
    run = train(Run(METHOD.but(regularize=()), CorridorPolicy(), Corridor(), steps=3))
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in run.history)
