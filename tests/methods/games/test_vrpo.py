import pytest
import torch

pytest.importorskip("pyspiel")

from anypo import api
from anypo.domains.games.policy import GamePolicy
from anypo.domains.games.tasks import SelfPlay, play
from anypo.domains.games.tree import compile_game
from anypo.loops.on_policy import step, train
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.games.vrpo import METHOD, SelfPlayGAE, advantages, expected_value, gae_comparison, kuhn_payoff, q_loss
from anypo.run import Run
from anypo.seams.regularize import ValueLoss

SMALL = METHOD.set("select.group_size", 32)


@pytest.fixture(scope="module")
def kuhn():
    return compile_game("kuhn_poker")


def moves(seed=0, rows=6, horizon=5, choices=3):
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, horizon + 1, (rows,), generator=g)
    mask = (torch.arange(horizon) < length[:, None]).double()
    last = torch.arange(horizon) == length[:, None] - 1
    policy = torch.rand(rows, horizon, choices, generator=g).double()
    return {
        "reward": torch.randn(rows, horizon, generator=g).double() * last,
        "terminated": last.double(),
        "mask": mask,
        "mover_sign": torch.randint(2, (rows, horizon), generator=g) * 2 - 1,
        "q": torch.randn(rows, horizon, choices, generator=g).double(),
        "policy": policy / policy.sum(-1, keepdim=True),
        "action": torch.randint(choices, (rows, horizon), generator=g),
        "bootstrap": torch.zeros(rows).double(),
    }


def test_without_a_trace_it_is_one_step_gae():
    m = moves()
    torch.testing.assert_close(advantages(**m, gamma=0.9, lam=0.0).advantages, gae_comparison(**m, gamma=0.9, lam=0.0))


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_a_critic_that_ignores_the_action_gives_gae(lam):
    m = moves(1)
    m["q"] = m["q"][..., :1].expand(-1, -1, 3)
    torch.testing.assert_close(advantages(**m, gamma=0.97, lam=lam).advantages, gae_comparison(**m, gamma=0.97, lam=lam))


def test_a_certain_policy_gives_sarsa_lambda():
    m = moves(2)
    m["policy"] = torch.nn.functional.one_hot(m["action"], 3).double()
    gamma, lam = 0.9, 0.8
    taken = m["q"].gather(-1, m["action"][..., None])[..., 0] * m["mask"]
    after = torch.cat([taken[:, 1:], torch.zeros(6, 1)], dim=1) * (1 - m["terminated"])
    delta = (m["reward"] + gamma * after - taken) * m["mask"]
    expected = sum((gamma * lam) ** k * torch.nn.functional.pad(delta, (0, k))[:, k:] for k in range(5))
    torch.testing.assert_close(advantages(**m, gamma=gamma, lam=lam).advantages, m["mover_sign"] * expected * m["mask"])


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_an_exact_critic_leaves_no_noise_at_any_lambda(kuhn, lam):
    table = kuhn.legal / kuhn.legal.sum(1, keepdim=True).double()
    batch = play(kuhn, table, 200, torch.Generator().manual_seed(0))
    q, policy = kuhn.action_values(table)[batch.context], table[kuhn.infoset[batch.context]]
    sign = batch.signals["mover_sign"]
    found = advantages(
        batch.signals["payoff"].double(),
        batch.terminated.double(),
        batch.mask.double(),
        sign,
        q,
        policy,
        batch.action,
        torch.zeros(200).double(),
        1.0,
        lam,
    )
    taken = q.gather(-1, batch.action[..., None])[..., 0]
    torch.testing.assert_close(found.advantages, sign * (taken - expected_value(q, policy)) * batch.mask)


def test_padding_and_illegal_actions_may_hold_anything():
    m = moves(3)
    m["policy"][..., 2] = 0.0
    m["action"] = m["action"].clamp(max=1)
    clean = advantages(**m, gamma=1.0, lam=0.9)
    m["q"][..., 2] = -torch.inf
    outside = m["mask"] == 0
    m["q"][outside] = torch.nan
    m["reward"][outside] = torch.nan
    found = advantages(**m, gamma=1.0, lam=0.9)
    torch.testing.assert_close(found.advantages, clean.advantages)
    torch.testing.assert_close(found.targets, clean.targets)
    assert (found.advantages[outside] == 0).all()


def test_the_sign_is_the_movers():
    m = moves(4)
    found, turned = (advantages(**m | {"mover_sign": s * m["mover_sign"]}).advantages for s in (1, -1))
    torch.testing.assert_close(found, -turned)


def test_a_row_without_moves_is_zero():
    m = moves(5)
    m["mask"][0] = 0
    assert (advantages(**m).advantages[0] == 0).all()


def test_targets_carry_no_gradient():
    q, targets = torch.randn(2, 3, 2, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    q_loss(q, torch.zeros(2, 3, dtype=torch.int64), targets, torch.ones(2, 3)).backward()
    assert targets.grad is None and (q.grad[..., 1] == 0).all() and (q.grad[..., 0] != 0).all()


def test_unfinished_games_have_no_payoff():
    with pytest.raises(ValueError, match="no finished game"):
        kuhn_payoff([0, 1], "pb")


def run_of(tree, method, steps, out=None):
    policy = GamePolicy(tree, {n.removeprefix("old_") for n in method.needs()}, hidden=(16,))
    run = Run(method, policy, SelfPlay(tree), steps=steps, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def test_it_trains_and_resumes_to_the_same_numbers(kuhn, tmp_path):
    whole = run_of(kuhn, SMALL, 4, tmp_path / "whole")
    run_of(kuhn, SMALL.set("regularize.1.last", 0.01), 2, tmp_path / "halves")
    halves = run_of(kuhn, SMALL.set("regularize.1.last", 0.01), 4, tmp_path / "halves")
    steady = run_of(kuhn, SMALL.set("regularize.1.last", 0.01), 4, tmp_path / "steady")
    assert all(torch.equal(a, b) for a, b in zip(steady.policy.parameters(), halves.policy.parameters(), strict=True))
    start = run_of(kuhn, SMALL, 0)
    assert all(not torch.equal(a, b) for a, b in zip(whole.policy.parameters(), start.policy.parameters(), strict=True))
    assert all(torch.isfinite(torch.tensor(r[name])) for r in whole.history for name in ("loss", "q_loss", "entropy", "clip_fraction"))


def test_the_actor_does_not_see_hidden_cards(kuhn):
    policy = GamePolicy(kuhn, {"q"})
    run = Run(SMALL, policy, SelfPlay(kuhn), steps=1)
    batch = step(run)
    logits, infoset = batch.signals["old_logits"][batch.mask], kuhn.infoset[batch.context[batch.mask]]
    for value in torch.unique(infoset).tolist():
        assert len(torch.unique(logits[infoset == value], dim=0)) == 1
    q = run.policy.observe(batch, {"q"}).q[batch.mask]
    assert len(torch.unique(q, dim=0)) > len(torch.unique(infoset))


def test_ppo_with_a_central_critic_trains_too(kuhn):
    run = run_of(kuhn, SMALL.but(credit=SelfPlayGAE(), regularize=(ValueLoss(),)), 2)
    assert all(torch.isfinite(torch.tensor(r["value_loss"])) for r in run.history)


def test_methods_that_do_not_know_the_mover_are_refused(kuhn):
    with pytest.raises(ValueError, match="whose move it is"):
        run_of(kuhn, PPO.set("select.group_size", 8), 1)


def test_it_trains_by_name(tmp_path):
    result = api.train("vrpo", steps=2, out=tmp_path / "run", settings={"select.group_size": 16}, hidden=8)
    assert list(result.after) == ["exploitability", "first_seat_value"]
    found = api.evaluate(str(tmp_path / "run"), hidden=8)
    assert found["exploitability"]["value"] == pytest.approx(result.after["exploitability"])
    with pytest.raises(ValueError, match="layers of another size"):
        api.evaluate(str(tmp_path / "run"))
    swapped = api.train("ppo", task="kuhn_poker", steps=1, seams={"credit": "vrpo"}, settings={"select.group_size": 16})
    assert swapped.steps == 1
