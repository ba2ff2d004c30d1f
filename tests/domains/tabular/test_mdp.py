import itertools

import pytest
import torch

from anypo.domains.tabular.mdp import evaluate, from_start, occupancy, optimum
from anypo.domains.tabular.tasks import EpisodicLosses
from anypo.loops.on_policy import train
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.run import Run


def problem(seed=0, copies=4, horizon=3, states=2, actions=2):
    generator = torch.Generator().manual_seed(seed)
    transition = torch.rand(copies, horizon, states, actions, states, generator=generator).double()
    policy = torch.rand(copies, horizon, states, actions, generator=generator).double()
    start = torch.rand(copies, states, generator=generator).double()
    reward = torch.randn(copies, horizon, states, actions, generator=generator).double()
    return transition / transition.sum(-1, keepdim=True), policy / policy.sum(-1, keepdim=True), start / start.sum(-1, keepdim=True), reward


def test_occupancy_and_values_agree_on_what_a_policy_is_worth():
    transition, policy, start, reward = problem()
    visits = occupancy(transition, policy, start)
    torch.testing.assert_close(visits.sum(-1), torch.ones(4, 3).double())
    torch.testing.assert_close(
        (visits[..., None] * policy * reward).sum((1, 2, 3)), from_start(evaluate(transition, policy, reward).v, start)
    )


def test_values_equal_a_sum_over_all_paths():
    transition, policy, start, reward = (x[0] for x in problem())
    total = 0.0
    for path in itertools.product(range(2), repeat=6):
        states, actions = path[:3], path[3:]
        chance, gain = start[states[0]], 0.0
        for h in range(3):
            chance = chance * policy[h, states[h], actions[h]]
            gain += reward[h, states[h], actions[h]]
            if h < 2:
                chance = chance * transition[h, states[h], actions[h], states[h + 1]]
        total += chance * gain
    torch.testing.assert_close(from_start(evaluate(transition, policy, reward).v, start), total)


def test_the_optimum_beats_every_deterministic_policy_and_is_one():
    transition, _, start, reward = (x[0] for x in problem(copies=1))
    best = optimum(transition, reward)
    values = []
    for choice in itertools.product(range(2), repeat=6):
        table = torch.nn.functional.one_hot(torch.tensor(choice).view(3, 2), 2).double()
        values.append(float(from_start(evaluate(transition, table, reward).v, start)))
    assert max(values) == pytest.approx(float(from_start(best.v, start)), abs=1e-12)
    torch.testing.assert_close(evaluate(transition, best.policy, reward).v, best.v)


def test_regret_is_counted_from_exact_losses():
    task = EpisodicLosses(copies=3, switch=0.5)
    run = Run(RLOO, task.policy(), task, steps=4)
    uniform = task.policy().table
    expected = torch.zeros(3).double()
    for _ in range(4):
        loss = task.mean_loss(run)
        expected += from_start(evaluate(task.transition, uniform, loss).v, task.start)
        task.collect(task.prompts(3, run.rng), run)
        run.step += 1
    both = 2 * (task.mean_losses[0] + task.mean_losses[1])
    torch.testing.assert_close(task.regret(), expected + from_start(optimum(task.transition, -both).v, task.start))


def test_episodes_follow_the_policy_and_the_transitions():
    task = EpisodicLosses(copies=1, seed=3)
    policy = task.policy()
    run = Run(RLOO, policy, task, steps=1)
    batch = task.collect([task.prompts(1, run.rng)[0].but(samples=20_000)], run)
    visits = occupancy(task.transition, policy.table, task.start)[0]
    seen = torch.stack([(batch.context == s).double().mean(0) for s in range(2)], dim=1)
    assert (seen - visits).abs().max() < 0.02
    chance = torch.stack([batch.signals["loss"][(batch.context[:, 0] == 0) & (batch.action[:, 0] == a), 0].mean() for a in range(3)])
    assert (chance - task.mean_losses[0][0, 0, 0]).abs().max() < 0.03


def test_a_method_of_the_on_policy_loop_trains_on_it():
    task = EpisodicLosses(copies=2)
    policy = task.policy()
    run = train(Run(RLOO.set("update.learning_rate", 2.0), policy, task, steps=60))
    found = task.evaluate(run)
    assert found["return"] > -1.0 > task.evaluate(Run(RLOO, task.policy(), task, steps=1))["return"]


@pytest.mark.parametrize("options", [{"copies": 0}, {"good": 1.5}, {"switch": 1.0}])
def test_bad_sizes_are_refused(options):
    with pytest.raises(ValueError):
        EpisodicLosses(**options)
