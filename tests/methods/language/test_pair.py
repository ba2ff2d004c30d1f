"""PAIR: its limits, the probes, turns of several tokens, and runs on lookup_chain."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from anypo.batch import Batch
from anypo.domains.language.toys.lookup_chain import TURNS, LookupChain, make_lookup_chain, problems, true_chain
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.methods.language import pair
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.pair import METHOD, STATE, InternalReward, TurnReinforce
from anypo.policy import MissingSignal, Signals
from anypo.run import Run
from anypo.seams.groups import standardize
from tests.helpers import gradient, random_rows

FAST = METHOD.set("prepare.0.rows", 60).set("select.prompts", 2)


def random_turns(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(4) < torch.tensor([4, 3, 1, 2, 4, 0])[:, None]
    return torch.rand(6, 4, generator=g, dtype=torch.float64), mask, torch.tensor([0, 1, 0, 1, 0, 1])


def test_without_momentum_the_score_is_the_reward() -> None:
    s, mask, _ = random_turns()
    assert torch.equal(pair.momentum(s, mask, 0.0), torch.where(mask, s, 0.0))
    torch.testing.assert_close(pair.momentum(s, mask, 1e-9), torch.where(mask, s, 0.0), atol=1e-6, rtol=0)


def test_momentum_pays_progress_over_the_turns_before() -> None:
    s, mask, _ = random_turns(1)
    got = pair.momentum(s, mask, 5.0)
    for n in range(6):
        for t in range(int(mask[n].sum())):
            want = s[n, t] if t == 0 else torch.sigmoid(s[n, t].logit() + 5.0 * (s[n, t] - s[n, :t].mean()))
            torch.testing.assert_close(got[n, t], want)


def test_one_turn_a_row_is_grpo_on_the_internal_reward() -> None:
    s, _, group = random_turns(2)
    got = pair.turn_advantages(s[:, :1], torch.ones(6, 1, dtype=torch.bool), group)
    torch.testing.assert_close(got[:, 0], standardize(s[:, 0], group, ddof=0, eps=0.0))


def test_equal_totals_are_only_centred_and_masked_turns_stay_zero() -> None:
    reward = torch.tensor([[0.5, 0.25], [0.25, 0.5], [0.7, 0.9]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    got = pair.turn_advantages(reward.masked_fill(~mask, torch.nan), mask, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(got, torch.tensor([[0.125, -0.125], [-0.125, 0.125], [0.0, 0.0]], dtype=torch.float64))


def test_a_second_probe_that_looks_at_s_bc_alone_keeps_its_order() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, attn = torch.randn(20, 5, generator=g, dtype=torch.float64), torch.randn(20, 8, generator=g, dtype=torch.float64)
    w1, w2 = torch.randn(5, generator=g, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    w2[-1] = 3.0
    found = pair.score(hidden, attn, w1, w2, temp=2.0, clip=0.0)
    assert torch.equal(found.s_bc.argsort(), found.s_final.argsort())


def test_temperature_one_and_no_clip_are_raw_probabilities() -> None:
    p = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    torch.testing.assert_close(pair.softened(p, 1.0, 0.0), p)
    assert torch.isfinite(pair.softened(torch.tensor([0.0, 1.0]), 2.0, 0.05)).all()


def test_the_probe_is_the_minimum_of_its_penalized_loss() -> None:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(200, 6, generator=g, dtype=torch.float64)
    y = (x[:, 0] + torch.randn(200, generator=g, dtype=torch.float64) > 0.3).long()
    w, b = (v.requires_grad_() for v in pair.logistic_regression(x, y, 0.01))
    objective = 0.01 * torch.nn.functional.binary_cross_entropy_with_logits(x @ w + b, y.double(), reduction="sum") + 0.5 * w.square().sum()
    assert all(g.abs().max() < 1e-6 for g in gradient(objective, w, b))


def test_probed_is_score_of_standardized_features() -> None:
    g = torch.Generator().manual_seed(5)
    hidden, attn = 3 + 2 * torch.randn(90, 5, generator=g, dtype=torch.float64), torch.rand(90, 8, generator=g, dtype=torch.float64)
    label = (hidden[:, 0] > 3).long()
    p = pair.fit_probes(hidden, attn, label, 0.01, 2.0, 0.05)
    found = pair.probed(p, hidden, attn, 2.0, 0.05)
    assert float(pair.auroc(found.s_bc, label)) > 0.95
    stacked = (torch.cat([attn, found.s_bc[:, None]], 1) - p.stacked_mean) / p.stacked_std
    torch.testing.assert_close(found.s_final, pair.softened((stacked @ p.w2 + p.b2).sigmoid(), 2.0, 0.05))
    with pytest.raises(ValueError, match="labelled only one kind"):
        pair.fit_probes(hidden, attn, torch.ones(90), 0.01, 2.0, 0.05)


def test_features_by_turn_are_those_of_single_turns() -> None:
    policy, task = make_lookup_chain()
    context = problems(3, torch.Generator().manual_seed(6))
    batch = task.batch(context, true_chain(context), torch.arange(3))
    batch.segment = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
    batch.mask[1, 3] = False
    seen = policy.observe(batch, {"hidden", "attention_maps"})
    found = pair.turn_features(batch, seen.hidden, seen.attention_maps)
    assert found.mask.tolist() == [[True, True], [True, True], [True, False]]
    prompt = context.shape[1]
    for n, k, start, end in ((0, 0, 0, 2), (0, 1, 2, 4), (1, 1, 1, 3), (2, 0, 0, 4)):
        torch.testing.assert_close(found.attn[n, k], pair.attn_features(seen.attention_maps[n], prompt + start, prompt + end))
        torch.testing.assert_close(found.hidden[n, k], seen.hidden[n, end - 1])


def test_auroc_counts_pairs() -> None:
    g = torch.Generator().manual_seed(7)
    s, y = torch.randint(5, (40,), generator=g).double(), torch.randint(2, (40,), generator=g)
    gap = s[y == 1][:, None] - s[y == 0][None]
    torch.testing.assert_close(pair.auroc(s, y), ((gap > 0).double() + 0.5 * (gap == 0)).mean())
    assert float(pair.auroc(s, torch.ones(40))) == 0.5


def test_the_loss_ignores_what_is_masked_and_has_no_gradient_through_advantages() -> None:
    rows = random_rows(8)
    segment = torch.arange(rows.mask.shape[1]).expand(rows.mask.shape) // 2
    logp = rows.logp.masked_fill(~rows.mask, -torch.inf).requires_grad_()
    advantage = torch.randn(len(rows.mask), 3, dtype=torch.float64, requires_grad=True)
    value = pair.loss(logp, rows.ref_logp, advantage, segment, rows.mask)
    assert torch.isfinite(value) and not advantage.grad and torch.isfinite(gradient(value, logp)[0]).all()
    batch = Batch(
        action=segment, mask=rows.mask, logp=rows.old_logp, group=rows.group, segment=segment, signals={"ref_logp": rows.ref_logp}
    )
    batch.advantage = torch.where(rows.mask, advantage.detach().gather(1, segment), 0.0)
    torch.testing.assert_close(TurnReinforce()(batch, Signals(logp=logp), None).value, value)  # type: ignore[arg-type]


def test_no_ground_truth_is_read_at_reward_time() -> None:
    for function in (pair.score, pair.probed, pair.momentum, pair.turn_features, pair.attn_features):
        assert not {"label", "answer", "outcome", "task"} & set(inspect.signature(function).parameters)

    class Sealed(LookupChain):
        def score(self, batch, run=None):  # type: ignore[no-untyped-def]
            raise AssertionError("the task was asked")

    policy, _ = make_lookup_chain()
    run = Run(FAST.but(control=()), policy, Sealed(), steps=1)
    assert torch.isfinite(step(run).reward).all()


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        policy, task = make_lookup_chain()
        run = Run(FAST, policy, task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    whole = run_to(tmp_path / "whole", 4)
    run_to(tmp_path / "parts", 2)
    parts = run_to(tmp_path / "parts", 4)
    assert all(torch.equal(a, b) for a, b in zip(whole.policy.parameters(), parts.policy.parameters(), strict=True))
    assert torch.equal(whole.state[STATE]["w2"], parts.state[STATE]["w2"])
    assert whole.history[-1]["turns_without_internals"] == 0 and "outcome" in whole.history[-1]


def test_turns_without_internals_earn_nothing_and_are_counted() -> None:
    policy, task = make_lookup_chain()
    run = Run(FAST, policy, task, steps=1)
    batch = step(run)
    batch.signals["old_hidden"][0, 2] = torch.nan
    reward = InternalReward()(batch, run)
    assert float(reward[0, 2]) == 0 and torch.isfinite(reward).all() and run._logged["turns_without_internals"] == 1
    assert reward.shape == batch.mask.shape and len(reward[1]) == TURNS


def test_credit_and_objective_serve_other_rewards() -> None:
    task = TokenBandit(prompts=2)
    policy = task.policy(scale=0.1)
    train(Run(GRPO.but(credit=METHOD.credit, objective=METHOD.objective, regularize=()), policy, task, steps=5))
    assert torch.isfinite(policy.logits).all()


def test_what_cannot_be_probed_is_refused() -> None:
    task = TokenBandit(prompts=2)
    with pytest.raises(MissingSignal, match="attention_maps"):
        Run(METHOD, task.policy(), task, steps=1)
    policy, chain = make_lookup_chain()
    with pytest.raises(ValueError, match="put FitProbes among its"):
        step(Run(FAST.but(prepare=()), policy, chain, steps=1))
    run = Run(FAST, policy, task, steps=1)
    with pytest.raises(ValueError, match="does not offer"):
        step(run)
