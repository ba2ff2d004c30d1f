import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys import registers
from anypo.domains.language.toys.registers import (
    ALPHABET,
    SLOTS,
    Calculations,
    RegisterPolicy,
    Registers,
    demonstration,
    make_registers,
)
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.ih_grpo import METHOD, HierarchySurrogate, delayed_execution, implicit_gradient, logz_non_tool, loss
from anypo.run import Run
from anypo.task import Prompt
from tests.helpers import assert_continues, assert_trains, random_rows

TOOL = 2


@pytest.fixture(autouse=True)
def quick_start(monkeypatch):
    monkeypatch.setattr(registers, "WARM_STEPS", 10)
    monkeypatch.setattr(registers, "_WARM", {})


def rows(seed=0):
    found = random_rows(seed)
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(*found.mask.shape, 6, generator=g, dtype=torch.float64)
    tokens = torch.randint(6, found.mask.shape, generator=g)
    return found, logits, tokens


def total(logits, tokens, advantages, old, mask, lam):
    leaf = logits.clone().requires_grad_(True)
    found = loss(leaf, tokens, advantages, old, mask, TOOL)
    value = found.pg_loss + lam * found.c_loss
    return value, torch.autograd.grad(value, leaf)[0]


def test_weight_0_is_grpo_with_a_dual_clip():
    found, logits, tokens = rows()
    advantages = found.advantages[:, None].expand(found.mask.shape)
    mine, slope = total(logits, tokens, advantages, found.old_logp, found.mask, 0.0)
    leaf = logits.clone().requires_grad_(True)
    logp = leaf.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    plain = grpo.loss(logp, found.old_logp, found.ref_logp, found.mask, found.advantages, 0.2, 0.28, 0.0, 3.0, agg="token_mean").loss
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(slope, torch.autograd.grad(plain, leaf)[0])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 5), st.floats(-2, 2), st.sampled_from([0.0, 0.1, 1.0]))
def test_autograd_gives_the_closed_form_and_at_weight_1_the_hierarchy(seed, token, advantage, lam):
    logits = 2 * torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens, old = torch.tensor([[token]]), logits.log_softmax(-1)[token].reshape(1, 1)
    _, slope = total(logits[None, None], tokens, torch.tensor([[advantage]], dtype=torch.float64), old, torch.ones(1, 1).bool(), lam)
    torch.testing.assert_close(slope[0, 0], implicit_gradient(logits, TOOL, token, advantage, lam), atol=1e-10, rtol=1e-8)
    if lam == 1.0:  # the explicit hierarchy: gate and low level apart
        p = logits.softmax(-1)
        q = p.clone()
        q[TOOL] = 0
        q /= q.sum()
        explicit = -q
        explicit[token] += 1
        explicit[TOOL] = -p[TOOL]
        if token == TOOL:
            explicit = torch.zeros(6, dtype=torch.float64)
            explicit[TOOL] = 1 - p[TOOL]
        torch.testing.assert_close(slope[0, 0], -advantage * explicit, atol=1e-9, rtol=1e-7)


def test_an_execute_token_out_of_reach_adds_nothing():
    found, logits, tokens = rows()
    logits[..., TOOL] = -40.0
    tokens = torch.where(tokens == TOOL, 0, tokens)
    advantages = found.advantages[:, None].expand(found.mask.shape)
    assert loss(logits, tokens, advantages, found.old_logp, found.mask, TOOL).c_item.abs().max() < 1e-12


def test_extreme_logits_stay_finite():
    for level in (60.0, torch.inf):
        logits = torch.full((1, 2, 4), -level).requires_grad_(True)
        with torch.no_grad():
            logits[..., TOOL] = 0.0
        found = loss(logits, torch.tensor([[TOOL, TOOL]]), torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2).bool(), TOOL)
        (slope,) = torch.autograd.grad(found.c_loss, logits)
        assert torch.isfinite(found.c_loss) and torch.isfinite(slope).all()
    assert torch.isfinite(logz_non_tool(torch.tensor([80.0, -80.0, 80.0]), TOOL))


def test_masks_and_advantages():
    found, logits, tokens = rows()
    advantages = found.advantages[:, None].expand(found.mask.shape)
    old = torch.where(found.mask, found.old_logp, -torch.inf)
    torch.testing.assert_close(
        total(logits, tokens, advantages, old, found.mask, 1.0), total(logits, tokens, advantages, found.old_logp, found.mask, 1.0)
    )
    nothing = loss(logits, tokens, advantages, old, torch.zeros_like(found.mask), TOOL)
    assert nothing.pg_loss == 0 and nothing.c_loss == 0
    assert loss(logits, tokens, torch.zeros_like(advantages), found.old_logp, found.mask, TOOL).c_loss == 0
    lone = METHOD.credit
    assert lone.ddof == 1 and grpo.advantages(torch.ones(1), torch.zeros(1, dtype=torch.int64), ddof=1, eps=lone.eps) == 0


def test_executing_after_every_block_delays_nothing():
    assert delayed_execution(torch.tensor([5, 1, 9, 1, 9]), 1, 9) == ([[0], [1]], 0, [])
    assert delayed_execution(torch.tensor([1, 1, 1, 9, 9]), 1, 9) == ([[0, 1, 2], []], 2, [])
    assert delayed_execution(torch.tensor([5]), 1, 9) == ([], 0, [])


def problem(delayed=True):
    columns = {"start": 500, "operands": [10, 20, 30, 40], "operation": "-", "answer": 400, "delayed": delayed}
    return Prompt(0, "", columns)


def test_the_machine():
    late = Registers()
    assert late.reset(problem()) == "-:" and late.stop == ("!", "#")
    assert late.step("-b;-c;!") == ("=", -0.05, False)
    state = late.save()
    assert late.step("-d;-e;!") == ("=", -0.05, False) and late.step("#") == ("", 1.0, True)
    late.restore(state)
    assert late.step("-d;!")[0] == "=" and late.step("#") == ("", 0.0, True)
    for text in ("!", "-b", ""):  # void
        late.reset(problem())
        assert late.step(text) == ("", 0.0, True)
    late.reset(problem())
    assert late.step("b-;!") == ("?", -0.05, False) and late.step("#")[1] == 0
    soon = Registers()
    soon.reset(problem(delayed=False))
    assert soon.stop == (";", "#") and soon.step("-b;") == ("=", -0.05, False) and soon.value == 490
    assert soon.step("!") == ("", 0.0, True)


def test_problems_and_demonstrations():
    problems = Calculations().training(40, np.random.default_rng(0))
    assert len({p.id for p in problems}) == 40 and all(p.columns["start"] - sum(p.columns["operands"]) > 50 for p in problems)
    policy, rng = RegisterPolicy(), np.random.default_rng(0)
    for wait, replies in ((0.0, len(SLOTS) + 1), (1.0, 2)):
        environment = Registers()
        prompt, turns = demonstration(environment, problems[0], rng, wait)
        written = [text for text, own in turns if own]
        assert len(written) == replies and environment.step(written[-1])[1] == 1.0
        text = prompt + "".join(part for part, _ in turns)
        assert policy.decode(policy.encode(text)) == text
    with pytest.raises(ValueError, match=r"share of blocks in \[0,1\]"):
        make_registers(wait=1.5)


@pytest.mark.parametrize("delayed", [True, False])
def test_conversations_follow_the_rollout(delayed):
    policy, task = make_registers(delayed=not delayed, prompts_per_step=4)
    run = Run(METHOD.set("rollout.delayed", delayed), policy, task, steps=1)
    batch = step(run)
    assert all(state.columns["delayed"] is delayed for state in batch.signals["problem"])
    assert ("delayed_share" in run.history[-1]) is delayed and 0 <= run.history[-1].get("delayed_share", 0) <= 0.75
    assert np.isfinite(run.history[-1]["hierarchy_loss"])
    ends = {ALPHABET.index(c) + 1 for c in ("!#" if delayed else ";#")}
    for row in range(len(batch)):
        last = [batch.action[row][batch.mask[row] & (batch.segment[row] == turn)][-1] for turn in range(int(batch.signals["turns"][row]))]
        assert all(int(token) in ends for token in last[:-1])
    scored = run.score(batch, {"logp"})["logp"]
    again = make_registers(delayed=not delayed)[0].evaluate(batch, {"logp"}).logp
    torch.testing.assert_close(again, batch.logp, atol=1e-4, rtol=0)
    assert scored.shape == batch.logp.shape


def test_the_component_is_the_pure_loss_and_leaves_other_tasks_alone():
    found, logits, tokens = rows()
    policy, task = make_registers(prompts_per_step=2)
    run = Run(METHOD, policy, task, steps=1)
    batch = task.collect([p.but(samples=4) for p in task.prompts(2, run.rng)], run)
    batch = batch.but(advantage=torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)))
    new = policy.evaluate(batch, {"logp", "logits"})
    pure = loss(new.logits, batch.action, batch.advantage, batch.logp, batch.mask, task.execute_token)
    torch.testing.assert_close(HierarchySurrogate(lam=0.3)(batch, new, run).value, 0.3 * pure.c_loss)
    torch.testing.assert_close(METHOD.objective(batch, new, run).value, pure.pg_loss)
    mine = assert_trains(METHOD)
    plain = assert_trains(METHOD.but(regularize=(), rollout=grpo.METHOD.rollout))
    assert torch.equal(mine.policy.logits, plain.policy.logits)
    named = assert_trains(METHOD.set("regularize.0.token", 1))
    assert any(record["hierarchy_loss"] != 0 for record in named.history)


def test_trains_and_resumes(tmp_path):
    def run_to(out, upto):
        policy, task = make_registers(prompts_per_step=4)
        run = Run(METHOD, policy, task, steps=upto, seed=0, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
