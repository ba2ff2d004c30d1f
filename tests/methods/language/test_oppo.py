"""OPPO: when it is distillation and when outcome minus prior, the exact tree, odd rows, the oracle's prompts, and the component in the loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.setup import build
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith, forced_batch
from anypo.loops.on_policy import train
from anypo.methods.language.oppo import (
    METHOD,
    VARIANTS,
    AnswerInPrompt,
    Opinion,
    OracleValue,
    advantages,
    evidence,
    exact_tree,
    prior,
    scaled,
    values,
)
from anypo.run import Run
from anypo.seams.credit import last_action
from tests.helpers import assert_resumes, assert_trains, trained


@dataclass
class Noise:
    """An oracle of random evidence."""

    size: float = 1.0

    def __call__(self, batch: Batch, run: Run) -> Opinion:
        return Opinion(batch.logp + self.size * torch.randn(batch.logp.shape, generator=run.generator, dtype=torch.float64), batch.logp)


def rows(seed: int = 0, spread: float = 2.0) -> dict[str, Tensor]:
    """Eight ragged rows of up to five tokens, one of them empty."""
    g = torch.Generator().manual_seed(seed)
    oracle, base = -spread * torch.rand(2, 8, 5, generator=g, dtype=torch.float64)
    mask = torch.arange(5) < torch.randint(1, 6, (8, 1), generator=g)
    mask[1] = False
    return {
        "oracle_logp": oracle, "base_logp": base, "mask": mask, "prior": 0.05 + 0.9 * torch.rand(8, generator=g, dtype=torch.float64),
        "reward": torch.randint(2, (8,), generator=g).double(),
    }  # fmt: skip


def test_without_weight_and_anchor_it_is_the_distillation_reward() -> None:
    r = rows()
    found = advantages(**r, clip=50.0, close=False, anchor=False, state_weight=False)
    torch.testing.assert_close(found, torch.where(r["mask"], r["oracle_logp"] - r["base_logp"], 0.0))


@pytest.mark.parametrize("anchor", [False, True])
def test_without_evidence_the_last_token_gets_outcome_minus_prior(anchor: bool) -> None:
    r = rows() | {"oracle_logp": rows()["base_logp"]}
    expected = last_action(r["mask"]) * (r["reward"] - r["prior"])[:, None]
    torch.testing.assert_close(advantages(**r, anchor=anchor), expected)


def test_exact_factors_on_a_tree_give_its_values() -> None:
    g = torch.Generator().manual_seed(0)
    first, second = torch.rand(3, generator=g).double().softmax(0), torch.rand(3, 4, generator=g).double().softmax(1)
    success = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0]])
    tree = exact_tree(first, second, success)
    a, b = (x.flatten() for x in torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"))
    outcome = success[a, b].double()
    by_outcome = []
    for mass in (success.double(), 1 - success.double()):  # P(token | prefix, outcome)
        after = (second * mass).sum(1)
        ends = (second * mass / after[:, None])[a, b]
        by_outcome.append(torch.stack([(first * after / (first @ after))[a], ends], 1).log().clamp(min=-40))
    mask, start = torch.ones(12, 2, dtype=torch.bool), tree.V0.expand(12)
    found = values(*by_outcome, mask, start, clip=80.0)
    torch.testing.assert_close(found, torch.stack([tree.V1[a], outcome], 1))
    steps = advantages(*by_outcome, mask, start, outcome, clip=80.0)
    torch.testing.assert_close(steps[outcome == 1], torch.stack([tree.A1[a], tree.A2[a, b]], 1)[outcome == 1].clamp(min=0))
    plain = advantages(*by_outcome, mask, start, outcome, clip=80.0, close=False, anchor=False)
    torch.testing.assert_close(plain, torch.stack([tree.A1[a], tree.A2[a, b]], 1))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000))
def test_steps_telescope(seed: int) -> None:
    r = rows(seed)
    inputs = {name: r[name] for name in ("oracle_logp", "base_logp", "mask", "prior")}
    some = r["mask"].any(1)
    open_ended = advantages(**r, close=False, anchor=False).sum(1)
    torch.testing.assert_close(open_ended, values(**inputs)[:, -1] - r["prior"])
    torch.testing.assert_close(advantages(**r, anchor=False).sum(1)[some], (r["reward"] - r["prior"])[some])
    anchored = advantages(**r)
    assert bool((anchored * (2 * r["reward"] - 1)[:, None] >= 0).all()) and anchored[~r["mask"]].eq(0).all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_first_order_is_at_most_a_quarter_of_the_evidence_and_close_to_small_steps(seed: int) -> None:
    r = rows(seed, spread=8.0)
    found = evidence(r["oracle_logp"], r["base_logp"], r["mask"])
    linear = advantages(**r, close=False, anchor=False, first_order=True)
    assert bool((linear.abs() <= found.abs() / 4 + 1e-12).all()) and torch.equal(linear.sign(), found.sign())
    small = rows(seed, spread=1e-3)
    exact = advantages(**small, close=False, anchor=False)
    torch.testing.assert_close(advantages(**small, close=False, anchor=False, first_order=True), exact, atol=1e-6, rtol=0)


def test_evidence_is_clipped_and_detached_and_padding_may_hold_anything() -> None:
    r = rows()
    dirty = {
        n: torch.where(r["mask"], r[n], bad).requires_grad_(True) for n, bad in (("oracle_logp", torch.nan), ("base_logp", -torch.inf))
    }
    found = advantages(**(r | dirty))
    assert torch.equal(found, advantages(**r)) and not found.requires_grad
    assert float(evidence(r["oracle_logp"] * 100, r["base_logp"], r["mask"]).abs().max()) == 2.0
    never = torch.full_like(r["oracle_logp"], -torch.inf)
    assert torch.isfinite(advantages(**(r | {"oracle_logp": never}))).all()
    assert advantages(**{n: v[:, :0] if v.dim() == 2 else v for n, v in r.items()}).shape == (8, 0)


def test_an_empty_row_keeps_its_prior_and_gets_no_credit() -> None:
    r = rows()
    inputs = {name: r[name] for name in ("oracle_logp", "base_logp", "mask", "prior")}
    torch.testing.assert_close(values(**inputs)[1], r["prior"][1].expand(5))
    assert advantages(**r)[1].eq(0).all()


def test_the_prior_is_the_groups_success_within_bounds() -> None:
    success, group = torch.tensor([1.0, 0, 1, 1, 0, 0]), torch.tensor([5, 5, 2, 2, 9, 9])
    torch.testing.assert_close(prior(success, group, 0.1), torch.tensor([0.5, 0.5, 0.9, 0.9, 0.1, 0.1]))
    for p0 in (0.0, 0.6):
        with pytest.raises(ValueError, match="p0"):
            prior(success, group, p0)


def test_scaling_gives_root_mean_square_one_over_what_is_not_zero() -> None:
    a = advantages(**rows())
    found = scaled(a)
    assert float(found[a != 0].square().mean()) == pytest.approx(1) and torch.equal(found == 0, a == 0)
    assert torch.equal(scaled(0 * a), 0 * a)


# -- the oracle ------------------------------------------------------------------------------------------------------------------------------


def collected(task: ToyArith, policy: GruPolicy, method=METHOD) -> tuple[Run, Batch]:
    run = Run(method, policy, task, steps=2)
    return run, task.collect([p.but(samples=2) for p in task.prompts(4, run.rng)], run)


def test_the_oracle_reads_the_prompt_with_its_answer() -> None:
    task, policy = ToyArith(small=True), GruPolicy(hidden=16)
    run, batch = collected(task, policy)
    oracle = AnswerInPrompt()
    columns = batch.signals["columns"]
    told = [policy.decode(context) for context in oracle.contexts(batch, run)]
    assert told == [f"{c['prompt']}{c['solution']};{c['prompt']}" for c in columns]
    found = oracle(batch, run)
    assert torch.equal(found.base_logp, batch.logp)
    i = int(batch.terminated.long().argmax()) if bool(batch.terminated.any()) else 0
    direct = policy.observe(forced_batch(policy, [(told[i], batch.signals["completion"][i])]), {"logp"}).logp[0]
    inside = batch.mask[i] & (torch.arange(batch.horizon) < len(batch.signals["completion"][i]))
    torch.testing.assert_close(found.oracle_logp[i][inside], direct[: int(inside.sum())])
    policy.context_limit = 12  # the answer leaves no room
    crowded = oracle(batch, run)
    torch.testing.assert_close(crowded.oracle_logp, batch.logp)


def test_responses_of_another_policy_are_scored_anew() -> None:
    task, policy = ToyArith(small=True), GruPolicy(hidden=16)
    run, batch = collected(task, policy)
    batch.signals["sampled_elsewhere"] = torch.ones(len(batch), dtype=torch.bool)
    batch.logp = batch.logp - 1.0
    torch.testing.assert_close(AnswerInPrompt()(batch, run).base_logp[batch.mask], batch.logp[batch.mask] + 1.0)


def test_a_chat_gets_the_answer_in_its_last_message() -> None:
    chat = [{"role": "system", "content": "{}"}, {"role": "user", "content": "2{x}"}]
    told = AnswerInPrompt("{prompt} ({answer})").told(chat, 4)
    assert told == [chat[0], {"role": "user", "content": "2{x} (4)"}] and chat[1]["content"] == "2{x}"


def test_a_task_without_known_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="oppo shows the policy the answer, but 'token_bandit'"):
        trained(METHOD, 1)
    run, batch = collected(ToyArith(small=True), GruPolicy(hidden=16))
    batch.signals["columns"] = [{"prompt": "1+1="} for _ in range(len(batch))]
    with pytest.raises(ValueError, match="column 'answer'"):
        AnswerInPrompt()(batch, run)


def test_a_teacher_of_the_same_weights_is_the_self_oracle_and_one_of_other_tokens_is_refused() -> None:
    policy, task = build("arithmetic", None)
    run = Run(METHOD, policy, task, steps=1)
    batch = run.collect([p.but(samples=2) for p in task.prompts(2, run.rng)])
    mine, teacher = AnswerInPrompt()(batch, run), AnswerInPrompt(teacher="builtin")(batch, run)
    torch.testing.assert_close(teacher.oracle_logp, mine.oracle_logp, atol=1e-4, rtol=0)
    torch.testing.assert_close(teacher.base_logp, mine.base_logp, atol=1e-4, rtol=0)
    assert "policies" not in run.state and not run.policies
    run, batch = collected(ToyArith(small=True), GruPolicy(hidden=16))
    with pytest.raises(ValueError, match="does not write the policy.s tokens"):
        AnswerInPrompt(teacher="builtin")(batch, run)


# -- in the loop -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda m: m.name)
def test_the_loop_trains_shared_parameters(method) -> None:
    task, policy = ToyArith(small=True), GruPolicy(hidden=16)
    before = policy.output.weight.detach().clone()
    run = train(Run(method.set("select.prompts", 4), policy, task, steps=3))
    assert all(torch.isfinite(p).all() for p in policy.parameters()) and not torch.equal(before, policy.output.weight)
    assert all(0 <= record["brier"] <= 1 and 0 <= record["brier_prior"] <= 1 for record in run.history)


@pytest.mark.parametrize("changes", [{}, {"first_order": True}, {"rms": False}, {"state_weight": False}, {"close": False}])
def test_any_oracle_and_any_flag_trains(changes: dict[str, bool]) -> None:
    assert_trains(METHOD.but(credit=OracleValue(oracle=Noise(), **changes)), eos=0, horizon=4)


def test_an_oracle_that_foretells_worse_than_the_success_rate_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    trained(METHOD.but(credit=OracleValue(oracle=Noise(0.0))), 2)
    assert not caplog.records
    trained(METHOD.but(credit=OracleValue(oracle=Noise(2.0))), 3)
    assert ["does harm" in record.getMessage() for record in caplog.records] == [True]


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD.but(credit=OracleValue(oracle=Noise())), tmp_path)
