"""IIB-LPO: what it reduces to, codes inside a policy, how branches grow and stay, and the method in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.latents import Codes
from anypo.domains.language.toys.toy_arith import ToyArith, forced_batch
from anypo.domains.language.toys.transformer_policy import INJECTIONS, TransformerPolicy
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.iib_lpo import (
    CODES,
    METHOD,
    InformationBonus,
    LearnCodes,
    branch_candidates,
    ib_score,
    ib_term,
    kept,
    shaped_reward,
)
from anypo.policy import MissingSignal, Signals
from anypo.run import Run
from anypo.seams.objective import aggregate
from anypo.seams.regularize import EntropyBonus
from tests.helpers import assert_continues, random_rows, trained

QUICK = METHOD.but(prepare=(LearnCodes(rounds=1, steps=3, injection_steps=2),))
OFF = METHOD.set("rollout.branches", 0).set("reward.eta", 0.0).set("regularize.0.alpha", 0.0).but(prepare=())


class Even(ToyArith):
    """Right is what begins with an even token, which an untrained policy finds."""

    def score(self, batch: Batch, run: Run) -> Tensor:
        return (batch.action[:, 0] % 2 == 0).float()


def tiny(injection: str = "attention", seed: int = 0) -> TransformerPolicy:
    return TransformerPolicy(width=16, layers=2, heads=2, latent=4, injection=injection, seed=seed)


def run_of(method: Method, steps: int, out: Path | None = None) -> Run:
    task = Even(small=True)
    task.prompts_per_step = 3
    run = Run(method, tiny(), task, steps=steps, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def parameters(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def test_without_branches_self_reward_and_term_it_is_grpo() -> None:
    plain = train(run_of(GRPO.but(select=METHOD.select, regularize=()), 3))
    assert torch.equal(parameters(train(run_of(OFF, 3))), parameters(plain))


def test_the_term_with_advantage_one_is_an_entropy_bonus() -> None:
    rows = random_rows(1)
    entropy = rows.logp.abs()
    ones = torch.ones_like(entropy)
    torch.testing.assert_close(ib_term(entropy, ones, rows.mask, "token_mean"), entropy[rows.mask].mean())
    batch = Batch(action=rows.mask.long(), mask=rows.mask, logp=rows.logp, group=rows.group, advantage=ones)
    mine = InformationBonus(0.01, "token_mean")(batch, Signals(entropy=entropy), None).value  # type: ignore[arg-type]
    torch.testing.assert_close(mine, EntropyBonus(0.01)(batch, Signals(entropy=entropy), None).value)  # type: ignore[arg-type]


def test_the_term_has_a_gradient_in_the_entropy_alone() -> None:
    rows = random_rows(2)
    advantage = rows.reward[:, None].expand_as(rows.logp).clone().requires_grad_()
    entropy = torch.where(rows.mask, rows.logp.abs(), torch.tensor(float("nan")).double()).requires_grad_()
    slope, none = torch.autograd.grad(ib_term(entropy, advantage, rows.mask), (entropy, advantage), allow_unused=True)
    torch.testing.assert_close(slope, torch.where(rows.mask, rows.reward[:, None] / rows.mask.sum(1, keepdim=True) / 8, 0.0))
    assert none is None
    torch.testing.assert_close(ib_term(entropy, advantage, rows.mask), aggregate(advantage * entropy, rows.mask, "seq_mean"))


def test_rows_without_actions_and_without_spread() -> None:
    entropy, mask = torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool)
    assert ib_score(entropy, torch.ones(2, 3), mask).eq(0).all() and branch_candidates(entropy, mask) == [[], []]
    group, base = torch.tensor([1, 0, 1, 0, 0, 1]), torch.tensor([1, 1, 0, 0, 0, 0]).bool()
    assert kept(torch.zeros(6), group, base, 2).tolist() == [True, True, True, True, False, False]  # the first ones
    assert kept(torch.randn(6), group, base, 1).tolist() == base.tolist()
    reward = torch.tensor([1.0, 0.0, 1.0])
    assert torch.equal(shaped_reward(reward, torch.ones(3), torch.zeros(3, dtype=torch.int64)), reward)
    assert torch.equal(shaped_reward(reward, torch.randn(3), torch.arange(3)), reward)  # lone members


def test_base_rows_stay_whatever_their_score() -> None:
    g = torch.Generator().manual_seed(0)
    group, base = torch.randint(3, (20,), generator=g), torch.rand(20, generator=g) < 0.3
    score = torch.randn(20, generator=g)
    stays = kept(score, group, base, 4)
    assert stays[base].all()
    for k in range(3):
        mine, others = stays & (group == k) & ~base, ~stays & (group == k)
        assert int((stays & (group == k)).sum()) == min(max(4, int((base & (group == k)).sum())), int((group == k).sum()))
        if mine.any() and others.any():
            assert score[mine].min() >= score[others].max()


@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_code_acts_on_its_row_alone(injection: str) -> None:
    policy = tiny(injection)
    batch = forced_batch(policy, [("1+2=", "3"), ("4+4=", "8"), ("9+9=", "18")])
    plain = policy.evaluate(batch, {"logp"}).logp
    batch.signals |= {
        "latent": 20 * torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),
        "has_latent": torch.tensor([False, True, False]),
    }
    coded = policy.evaluate(batch, {"logp"}).logp
    torch.testing.assert_close(coded[[0, 2]], plain[[0, 2]])
    assert (coded[1] - plain[1]).abs().max() > 1e-3
    assert all(p.grad is None for p in policy.injection_parameters())
    coded.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.injection_parameters())


def test_a_zero_code_leaves_the_gain_and_adds_one_empty_key() -> None:
    policy = tiny()
    block, x = policy.blocks[0], torch.randn(2, 1, 16)
    has = torch.ones(2, dtype=torch.bool)
    plain, zero = block.attend(x, None, None), block.attend(x, torch.zeros(2, 4), has)
    _, key, value = block._heads(block.mixed(torch.nn.functional.rms_norm(x, (16,)) * block.gain1))
    query, _, _ = block._heads(block.mixed(torch.nn.functional.rms_norm(x, (16,)) * block.gain1))
    share = torch.sigmoid((query * key).sum(-1) / 8**0.5)[..., None]  # softmax over its own logit and one of 0
    torch.testing.assert_close(zero, block.joined((share * value).transpose(1, 2).reshape(2, 1, 16)))
    assert not torch.allclose(plain, zero)


def test_the_codes_learn_and_their_kl_is_zero_for_equal_gaussians() -> None:
    g = torch.Generator().manual_seed(0)
    prefix, kind = torch.randn(64, 3, generator=g), torch.randint(2, (64, 1), generator=g).float()
    rest = prefix + 4 * kind - 2
    codes = Codes(3, 2, 16)
    optimizer = torch.optim.Adam(codes.parameters(), lr=1e-2)
    losses = []
    for _ in range(200):
        loss = codes.loss(prefix, rest, torch.randn(64, 2, generator=g), 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(Codes.of(dict(codes.state_dict())).prior(prefix), codes.prior(prefix))


def branched() -> tuple[Run, Batch]:
    run = run_of(QUICK.set("rollout.n_keep", None).set("rollout.top_share", 0.5), 1)
    run.begin_step()
    return run, run.method.rollout(run.method.select(run.task, run), run)


def test_branches_share_their_beginning_and_count_from_there_on() -> None:
    run, batch = branched()
    assert len(batch) == 3 * 4 * (1 + 3) and batch.parent is not None and batch.branch_at is not None and batch.keep is not None
    base = batch.signals["base"]
    assert torch.equal(base, batch.parent < 0) and torch.equal(base, ~batch.signals["has_latent"]) and int(base.sum()) == 12
    for i in (~base).nonzero().flatten().tolist():
        parent, shared = int(batch.parent[i]), int(batch.branch_at[i])
        assert torch.equal(batch.action[i, :shared], batch.action[parent, :shared]) and batch.group[i] == batch.group[parent]
        assert not batch.keep[i, :shared].any() and torch.equal(batch.keep[i, shared:], batch.mask[i, shared:])
    assert int(batch.branch_at[~base].max()) > 0 and batch.counted.any(1).all()


def test_branches_are_scored_under_their_codes() -> None:
    run, batch = branched()
    torch.testing.assert_close(run.policy.evaluate(batch, {"logp"}).logp, batch.logp, atol=1e-5, rtol=1e-4)
    chosen = torch.tensor([40, 3, 17])
    torch.testing.assert_close(run.policy.evaluate(batch[chosen], {"logp"}).logp, batch.logp[chosen], atol=1e-5, rtol=1e-4)
    for parameter in run.policy.injection_parameters():
        parameter.data *= 30
    moved = (run.policy.evaluate(batch, {"logp"}).logp - batch.logp).abs().amax(1) > 1e-3
    assert not moved[batch.signals["base"]].any() and moved[~batch.signals["base"]].any()


def test_learning_codes_moves_the_injection_alone_and_keeps_right_rollouts_once() -> None:
    run = run_of(QUICK, 1)
    before = {name: p.detach().clone() for name, p in run.policy.named_parameters()}
    found = LearnCodes(rounds=2).right_rollouts(run)
    rows = {(int(i), tuple(a)) for i, a in zip(found.signals["prompt_id"], (found.action * found.mask).tolist(), strict=True)}
    assert len(rows) == len(found) > 0 and (found.action[:, 0] % 2 == 0).all()
    run.begin_step()
    moved = {name for name, p in run.policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".inject." in name} and run.version == 1 and "prior.0.weight" in run.state[CODES]


def test_nothing_right_is_no_failure() -> None:
    run = run_of(QUICK, 1)
    run.task.score = lambda batch, run: torch.zeros(len(batch))  # type: ignore[method-assign]
    batch = step(run)
    assert batch.advantage is not None and batch.advantage.eq(0).all() and len(batch) == 3 * 8


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = run_of(QUICK, 4, out)
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)
    run = run_of(QUICK, 2)
    start = parameters(run)
    train(run)
    assert torch.isfinite(parameters(run)).all() and not torch.equal(parameters(run), start)


def test_a_policy_without_codes_is_refused() -> None:
    with pytest.raises(MissingSignal, match="latent"):
        trained(METHOD, 1)
    with pytest.raises(ValueError, match="unknown injection 'prefix'"):
        tiny("prefix")
    policy = tiny()
    with policy.injected(torch.randn(2, 4)), pytest.raises(ValueError, match="2 latent codes for 1 rows"):
        policy.evaluate(forced_batch(policy, [("1+2=", "3")]), {"logp"})
