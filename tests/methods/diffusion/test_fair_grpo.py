"""Fair-GRPO and the HoloFair measures: what they reduce to, their pitfalls, and that they train, resume and refuse."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from anypo.domains.diffusion.attributes import AttributeModes, normalized_entropy
from anypo.domains.diffusion.setup import build
from anypo.domains.diffusion.spafreq import SpaFreq, haar_bands
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion.fair_grpo import METHOD, FairReward, diversity, fair_reward, mgbi, reward_hacking, total_reward
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.run import Run
from tests.helpers import assert_continues

CLASSES = (2, 3)


def rows(seed: int = 0, count: int = 24, invalid: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    attr = torch.stack([torch.randint(k, (count,), generator=g) for k in CLASSES], dim=1)
    attr[torch.rand(count, 2, generator=g) < invalid] = -1
    return attr, torch.randint(4, (count,), generator=g)


def attributes_run(method=METHOD, steps: int = 4, out: Path | None = None) -> Run:
    policy, task = build("attributes", None, evaluation_steps=4, evaluation_samples=50)
    return Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def test_a_balanced_group_leaves_the_quality_alone() -> None:
    attr = torch.cartesian_prod(torch.arange(2), torch.arange(3)).repeat(2, 1)
    group = torch.tensor([0] * 6 + [1] * 6)
    fair = fair_reward(attr, group, CLASSES, lam=0.0)
    assert torch.equal(fair, torch.zeros(12, dtype=torch.float64))
    quality = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(total_reward(fair, quality, 1.0, 1.0), (quality - quality.mean()) / quality.std(correction=0))


def test_without_fairness_it_is_flow_grpo_but_for_the_scale_of_the_reward() -> None:
    ours = attributes_run(METHOD.but(reward=FairReward(fairness=0.0, quality=1.0)).set("credit.eps", 0.0), steps=2)
    theirs = attributes_run(FLOW_GRPO.set("select.group_size", 24).set("credit.eps", 0.0), steps=2)
    train(ours), train(theirs)
    for a, b in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_one_attribute_gives_its_entropy_and_equal_triggers_the_intrinsic_diversity() -> None:
    attr, _ = rows(1, invalid=0.0)
    found = diversity(attr[:, 1:], (3,))
    share = torch.bincount(attr[:, 1], minlength=3).double() / len(attr)
    torch.testing.assert_close(found.div, -(share * share.log()).sum() / math.log(3))
    index = mgbi(attr, attr.repeat(3, 1), torch.arange(3).repeat_interleave(len(attr)), CLASSES)
    for value in (index.ca_q, index.ca_mean, index.mgbi):
        torch.testing.assert_close(value, index.intrinsic)


def test_a_target_equal_to_the_shares_asks_for_nothing() -> None:
    attr = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0]])
    target = [[0.75, 0.25], [0.5, 0.25, 0.25]]
    torch.testing.assert_close(fair_reward(attr, torch.zeros(4, dtype=torch.int64), CLASSES, target, lam=0.0), torch.zeros(4).double())


def test_shares_are_those_of_the_own_group_and_rows_may_come_in_any_order() -> None:
    attr, group = rows(2)
    whole = fair_reward(attr, group, CLASSES)
    for g in range(4):
        torch.testing.assert_close(whole[group == g], fair_reward(attr[group == g], group[group == g], CLASSES))
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(fair_reward(attr[order], group[order], CLASSES), whole[order])


def test_centred_before_it_is_clipped() -> None:
    """Nineteen of one class and one of the other: the rare one reaches the clip, and the sum of the clipped rewards is not 0."""
    attr = torch.tensor([[0]] * 19 + [[1]])
    group = torch.zeros(20, dtype=torch.int64)
    free, clipped = (fair_reward(attr, group, (2,), clip=c) for c in (1e9, 1.0))
    torch.testing.assert_close(free.sum(), torch.tensor(0.0).double(), atol=1e-9, rtol=0)
    assert float(clipped[-1]) == 1.0
    torch.testing.assert_close(clipped, free.clamp(-1, 1))


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_groups_without_a_valid_reading_and_lone_members(lam: float) -> None:
    attr = torch.tensor([[-1, -1], [-1, -1], [1, 2]])
    found = fair_reward(attr, torch.tensor([0, 0, 1]), CLASSES, lam=lam, clip=0.7)
    torch.testing.assert_close(found, torch.tensor([-1.4, -1.4, 0.0], dtype=torch.float64))


def test_entropies_of_single_and_unread_attributes() -> None:
    assert normalized_entropy(torch.tensor([[4.0], [0.0]])).tolist() == [1.0, 0.0]
    assert float(diversity(torch.tensor([[0, -1], [1, -1]]), CLASSES).div) == 0
    assert float(diversity(torch.zeros(0, 2, dtype=torch.int64), CLASSES).div) == 0


def test_constant_quality_counts_for_nothing() -> None:
    fair = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert torch.equal(total_reward(fair, torch.full((2,), 3.3, dtype=torch.float64)), fair)


def test_hacking_is_a_rise_here_and_a_fall_there() -> None:
    assert reward_hacking((0.5, 0.9), (0.5, 0.4))
    assert not reward_hacking((0.5, 0.9), (0.5, 0.6)) and not reward_hacking((0.5, 0.4), (0.5, 0.4))


def test_bad_targets_and_tasks_are_refused() -> None:
    attr, group = rows()
    with pytest.raises(ValueError, match="classes, the attributes have"):
        fair_reward(attr, group, CLASSES, [[0.5, 0.5]])
    with pytest.raises(ValueError, match="above 0"):
        fair_reward(attr, group, CLASSES, [[1.0, 0.0], [0.5, 0.3, 0.2]])
    with pytest.raises(ValueError, match="one number of classes"):
        fair_reward(attr, group, (2,))
    policy, task = build("gaussians:0", None)
    with pytest.raises(ValueError, match="take --task attributes"):
        step(Run(METHOD, policy, task, steps=1))


def test_it_trains_and_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = attributes_run(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    run = attributes_run()
    train(run)
    assert all(torch.isfinite(torch.tensor([r["loss"], r["fairness"], r["quality"], r["valid"]])).all() for r in run.history)


def test_the_classifier_is_sure_near_a_mode_alone() -> None:
    task = AttributeModes()
    x = torch.tensor([[-2.0, -2.0], [2.0, 2.0], [2.0, 0.5], [0.0, 1.0]])
    read = task.attributes(x, torch.zeros(4, dtype=torch.int64))
    assert read.confident(0.6).tolist() == [[0, 0], [1, 2], [1, 1], [-1, -1]]
    points, _ = task.data(2000, torch.Generator().manual_seed(0))
    assert float(task.distances(points).amin(1).mean()) == pytest.approx(0.2 * math.sqrt(math.pi / 2), rel=0.1)


def test_haar_bands_keep_the_energy() -> None:
    picture = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    low, high = haar_bands(picture)
    assert low.shape == (3, 4, 4) and high.shape == (3, 3, 4, 4)
    torch.testing.assert_close((low**2).sum((1, 2)) + (high**2).sum((1, 2, 3)), (picture**2).sum((1, 2)))
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(1, 8, 8)
    _, high = haar_bands(stripes)
    assert high[0].abs().sum((1, 2)).count_nonzero() == 1  # one direction alone


def test_spafreq_learns_a_texture_that_only_the_frequency_branch_is_told() -> None:
    """Class of the first attribute: fine stripes or none, of a random sign, so that the mean picture says nothing."""
    g = torch.Generator().manual_seed(0)
    label = torch.randint(2, (256,), generator=g)
    stripes = torch.tensor([1.0, -1.0]).repeat(4) * torch.where(torch.rand(256, 1, 1, generator=g) < 0.5, 1.0, -1.0)
    picture = 0.3 * torch.randn(256, 8, 8, generator=g) + label[:, None, None] * stripes
    model = SpaFreq((8, 8), (2, 3), hidden=16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(picture)[0], label).backward()
        optimizer.step()
    read = model.read(picture)
    assert float((read.attr[:, 0] == label).double().mean()) > 0.95
    assert read.attr.shape == read.confidence.shape == (256, 2) and bool((read.confidence >= 1 / 3 - 1e-6).all())
