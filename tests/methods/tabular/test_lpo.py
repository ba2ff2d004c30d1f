import math

import pytest
import torch

from anypo import api
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.tabular.lock import CombinationLock, discounted_q
from anypo.loops.tabular import step, train
from anypo.methods.tabular.lpo import (
    METHOD,
    VARIANTS,
    bonus,
    bonus_of,
    copies_of,
    npg_step,
    online_subsample,
    sensitivity,
    switch_schedule,
)
from anypo.run import Run


def run_of(method, steps, out=None, seed=0, **options):
    task = CombinationLock(seed=seed, **options)
    run = Run(method, task.policy(), task, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_without_unknown_states_it_is_the_plain_natural_policy_gradient():
    logits, q = normal(4, 3), normal(4, 3, seed=1)
    found = npg_step(logits, q, torch.zeros(4, 3).double(), 0.5, 0.3)
    torch.testing.assert_close(found.logits, logits + 0.5 * q)
    torch.testing.assert_close(found.policy, (logits + 0.5 * q).softmax(-1))


def test_unknown_states_are_uniform_over_unknown_actions():
    width = torch.tensor([[0.5, 0.1, 0.3], [0.29, 0.0, 0.1]]).double()
    logits = normal(2, 3)
    found = npg_step(logits, normal(2, 3, seed=1), width, 0.5, 0.3)
    assert found.policy[0].tolist() == [0.5, 0.0, 0.5] and torch.equal(found.logits[0], logits[0])
    paid = bonus_of(width, 0.3, 0.9)
    assert paid.known.tolist() == [False, True]
    torch.testing.assert_close(paid.bonus, torch.tensor([[10.0, 0.0, 10.0], [0.58, 0.0, 0.2]]).double())


def test_infinite_scale_keeps_every_point_once():
    stream = normal(20, 3)
    found = online_subsample(stream, torch.rand(20, generator=torch.Generator().manual_seed(0)), math.inf, 1.0, 1.0, 80.0)
    assert found.kept.all() and (found.copies == 1).all() and (found.probability == 1).all()
    run = run_of(VARIANTS["every_episode"], 8)
    train(run)
    assert run.method.control[0].switches.tolist() == [8] * 6
    assert torch.equal(run.method.credit.gram.diagonal(dim1=-2, dim2=-1).sum(-1), torch.full((6,), 33.0 + 8).double())


def test_one_hot_features_give_the_bonus_of_counts():
    counts = torch.tensor([3.0, 0.0, 12.0, 120.0, 7.0, 1.0]).double()
    features = torch.eye(6, dtype=torch.float64).view(2, 3, 6)
    found = bonus(features, torch.eye(6).double(), counts, 1.0, 1.0, 0.3, 0.9)
    torch.testing.assert_close(found.width, (1 / (counts + 1)).sqrt().view(2, 3))
    sens = sensitivity(torch.eye(6).double(), counts, torch.eye(6).double(), 1.0, 1.0, 400.0).sensitivity
    torch.testing.assert_close(sens, 1 / (counts + 2))


def test_copies_narrow_the_width_as_repetition_does():
    data, features = normal(3, 4), normal(2, 2, 4, seed=1)
    copies = torch.tensor([2.0, 1.0, 3.0]).double()
    repeated = data.repeat_interleave(copies.long(), dim=0)
    once = bonus(features, repeated, torch.ones(6).double(), 1.0, 1.0, 0.3, 0.9)
    torch.testing.assert_close(bonus(features, data, copies, 1.0, 1.0, 0.3, 0.9).width, once.width)
    assert (bonus(features, data, torch.ones(3).double(), 1.0, 1.0, 0.3, 0.9).width > once.width).all()


def test_the_keep_probability_is_rounded_up_and_unbiased():
    sens = torch.linspace(1e-9, 1, 50).double()
    m = copies_of(sens, 1.5)
    assert (m >= 1).all() and (m == m.floor()).all() and (1 / m >= (1.5 * sens).clamp(max=1) - 1e-12).all()
    assert sensitivity(torch.zeros(0), torch.zeros(0), normal(4, 3), 1.0, 1.0, 9.0).sensitivity.max() <= 1


def test_it_switches_when_the_kept_set_grew():
    assert switch_schedule(torch.tensor([1, 1, 2, 4, 4])).update.tolist() == [True, False, True, True, False]
    run = run_of(METHOD, 60)
    kept = []
    for _ in range(60):
        before = run.policy.table
        batch = step(run)
        kept.append(batch.advantage[:, 0])
        still = kept[-1] == 0
        if run.step < 60:
            assert torch.equal(run.policy.table[still], before[still])
    grown = torch.stack(kept).cumsum(0)
    for copy in range(6):
        assert int(switch_schedule(grown[:, copy]).update.sum()) == int(run.method.control[0].switches[copy])
        assert len(run.method.rollout.cover[copy]) == 1 + int(run.method.control[0].switches[copy])


def test_the_components_are_the_online_subsample():
    run, seen, counted = run_of(METHOD, 40), [], []
    for _ in range(40):
        batch = step(run)
        seen.append(run.task.features[batch.context[0, 0], batch.action[0, 0]])
        counted.append(float(batch.advantage[0, 0]))
    luck = torch.tensor([0.0 if c else 1.0 for c in counted])  # the outcome of each draw is given
    found = online_subsample(torch.stack(seen), luck, 1.5, 1.0, 1.0, 160.0)
    assert found.copies.tolist() == [c for c in counted if c]
    torch.testing.assert_close(run.method.credit.gram[0].diagonal().sum(), torch.tensor(33.0 + sum(counted)).double())


def test_rewards_of_pairs_never_kept_are_unknown():
    run = run_of(METHOD, 30)
    for _ in range(30):
        batch = step(run)
    kept = batch.signals["kept_reward"]
    assert ((kept == 0) | (kept == run.task.reward)).all()
    counted = (run.method.credit.gram.diagonal(dim1=-2, dim2=-1) > 1).view_as(kept)
    assert torch.equal(kept, torch.where(counted, run.task.reward, torch.zeros_like(kept)))


def test_the_lock():
    task = CombinationLock(length=4, actions=2, copies=3, gamma=0.9)
    assert torch.equal(task.transition.sum(-1), torch.ones(3, 5, 2).double())
    best = 0.9**3 / (1 - 0.9**5)
    assert task.measure(task.policy())["best_return"].tolist() == pytest.approx([best] * 3)
    stay = torch.zeros(3, 5, 2).double()
    stay[torch.arange(3), :, 1 - task.right[:, 0]] = 1
    torch.testing.assert_close(task.returns(stay), torch.full((3,), 0.5).double())
    q = discounted_q(task.transition, task.reward, stay, 0.9)
    following = (stay * q).sum(-1)
    torch.testing.assert_close(q, task.reward + 0.9 * (task.transition * following[:, None, None, :]).sum(-1))
    with pytest.raises(ValueError, match="length and actions"):
        CombinationLock(length=1)


def test_roll_ins_follow_the_discounted_visits():
    task = CombinationLock(length=3, actions=2, copies=1, gamma=0.8)
    policy = task.policy()
    run = Run(METHOD, policy, task, steps=1)
    batch = task.collect([p.but(samples=20000) for p in task.prompts(1, run.rng)], run)
    chain = (0.5 * task.transition[0]).sum(1)
    visits = 0.2 * torch.linalg.inv(torch.eye(4).double() - 0.8 * chain)[0]
    found = torch.bincount(batch.context[:, 0], minlength=4).double() / 20000
    torch.testing.assert_close(found, visits, atol=0.015, rtol=0)
    assert abs(float(batch.action.double().mean()) - 0.5) < 0.015


def test_it_trains_and_resumes_to_the_same_numbers(tmp_path):
    whole = train(run_of(METHOD, 8, tmp_path / "whole"))
    train(run_of(METHOD, 4, tmp_path / "halves"))
    halves = train(run_of(METHOD, 8, tmp_path / "halves"))
    assert torch.equal(whole.policy.logits, halves.policy.logits)
    assert torch.equal(whole.method.credit.gram, halves.method.credit.gram)
    assert torch.equal(whole.method.control[0].switches, halves.method.control[0].switches)
    assert torch.isfinite(whole.policy.logits).all()


def test_what_it_cannot_learn_from_is_refused():
    task = CombinationLock(copies=2)
    with pytest.raises(ValueError, match="group_size=1"):
        train(Run(METHOD.set("select.group_size", 2), task.policy(), task, steps=1))
    with pytest.raises(ValueError, match="copies, each a prompt"):
        task.prompts(3, None)
    bandit = TokenBandit(2, 3, 2)
    with pytest.raises(ValueError, match="table"):
        train(Run(METHOD, bandit.policy(), bandit, steps=1))


def test_it_trains_by_name(tmp_path):
    result = api.train("lpo", steps=3, out=tmp_path / "run", length=4, settings={"update.exploit": 20})
    assert set(result.after) == {"return", "best_return"} and result.after["return"] <= result.after["best_return"]
