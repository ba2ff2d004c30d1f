"""toy_arith: the small policy agrees with itself, its measurements are exact, and GRPO learns on it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo import checkpoint
from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import ALPHABET
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith, check_steps, forced_batch, forced_logp, make_toy_arith
from anypo.loops.on_policy import train
from anypo.method import Method, Paper
from anypo.policy import Loss, MissingSignal
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

torch.set_num_threads(1)
FORMS = ("{}", "0{}", "+{}")


def grpo(**update) -> Method:
    return Method(
        name="plain_grpo",
        paper=Paper("test"),
        domain="language",
        select=UniformPrompts(group_size=4),
        rollout=OnPolicy(),
        reward=TaskReward(),
        credit=GroupRelative(),
        objective=ClippedSurrogate(),
        update=GradientSteps(**update),
    )


def rollouts(policy, task, samples=4, count=10, seed=0, **prompt):
    run = Run(grpo(), policy, task, steps=1, seed=seed)
    prompts = [p.but(samples=samples, **prompt) for p in task.prompts(count, np.random.default_rng(seed))]
    return run.collect(prompts), run


@pytest.fixture(scope="module")
def warm():
    return make_toy_arith()


@given(st.text(ALPHABET, max_size=12))
@settings(max_examples=30, deadline=None)
def test_decoding_inverts_encoding_and_stops_at_the_end_token(text):
    policy = GruPolicy(hidden=4)
    assert policy.decode(torch.cat([policy.encode(text), torch.tensor([policy.eos, 3])])) == text


@pytest.mark.parametrize("temperature", [None, 0.6])
def test_sampled_log_probs_and_entropies_are_those_of_evaluate(warm, temperature):
    batch, run = rollouts(*warm, temperature=temperature)
    seen = run.policy.observe(batch, {"logp", "entropy"})
    assert torch.allclose(seen.logp, batch.logp, atol=1e-5)
    assert torch.allclose(seen.entropy[batch.mask], batch.signals["old_entropy"][batch.mask], atol=1e-5)
    assert (batch.logp[batch.mask] <= 0).all() and (batch.logp[~batch.mask] == 0).all()
    untempered = run.policy.observe(batch.but(signals={}), {"logp"}).logp
    assert torch.allclose(untempered, batch.logp, atol=1e-5) == (temperature is None)


def test_rows_do_not_feel_the_padding_of_others():
    policy = GruPolicy(seed=1)
    batch = forced_batch(policy, [("3+4=", "7"), ("13+14=", "27"), ("1+1=", "+002")])
    needs = {"logp", "entropy", "hidden", "prompt_hidden", "logits"}
    together = policy.evaluate(batch, needs)
    for i in range(len(batch)):
        row = batch[i]
        length = int(row.lengths)
        alone = policy.evaluate(row.but(action=row.action[:, :length], mask=row.mask[:, :length]), needs)
        assert torch.allclose(together.logp[i, :length], alone.logp[0], atol=1e-6)
        assert torch.allclose(together.hidden[i, :length], alone.hidden[0], atol=1e-6)
        assert torch.allclose(together.logits[i, :length], alone.logits[0], atol=1e-5)
        assert torch.allclose(together.prompt_hidden[i], alone.prompt_hidden[0], atol=1e-6)


def test_hidden_is_the_state_after_the_action():
    policy = GruPolicy(seed=1)
    short, long = forced_batch(policy, [("3+4=", "7")]), forced_batch(policy, [("3+4=7", "")])
    after_seven = policy.evaluate(short, {"hidden"}).hidden[0, 0]
    assert torch.allclose(after_seven, policy.evaluate(long, {"prompt_hidden"}).prompt_hidden[0], atol=1e-6)


def test_policy_computes_what_it_is_asked_for_and_no_more():
    policy = GruPolicy(value_head=True)
    batch = forced_batch(policy, [("3+4=", "7"), ("3+4=", "17")])
    everything = policy.evaluate(batch, policy.provides)
    names = {"logp", "entropy", "value", "action_value", "logits", "hidden", "prompt_hidden", "prompt_logp", "prompt_mask"}
    assert set(everything) == names
    assert everything.value.shape == everything.logp.shape == (2, 3)
    assert everything.hidden.shape == (2, 3, 64) and everything.prompt_hidden.shape == (2, 64)
    assert everything.logits.shape == (2, 3, policy.vocabulary)
    assert set(policy.evaluate(batch, {"value"})) == {"value"}
    with pytest.raises(MissingSignal, match="value"):
        GruPolicy().check({"value"}, "test")


def test_value_head_is_a_group_of_its_own_and_leaves_the_trunk_unchanged():
    plain, headed = GruPolicy(seed=3), GruPolicy(seed=3, value_head=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, headed.state_dict()[name])
    groups = {g["role"]: g["params"] for g in headed.parameter_groups()}
    assert len(groups["value"]) == 2
    assert sum(len(p) for p in groups.values()) == len(list(headed.parameters()))


def test_gradient_reaches_every_parameter_and_is_the_same_with_recorded_log_probs(warm):
    batch, _ = rollouts(*warm)
    policy = GruPolicy(value_head=True)
    policy.load_state_dict(warm[0].state_dict(), strict=False)

    def loss(batch, new):
        return Loss((new.logp * batch.mask).sum() + (new.value**2 - new.value).sum() + new.entropy.sum())

    needs = frozenset({"logp", "value", "entropy"})
    gradients = []
    for recorded in (None, policy.observe(batch, needs)):
        policy.zero_grad()
        policy.backward(batch, needs, loss, recorded)
        gradients.append([p.grad.clone() for p in policy.parameters()])
    assert all(bool((g != 0).any()) for g in gradients[0])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*gradients, strict=True))


def test_sampler_counts_rows_limits_and_ends(warm):
    policy, _ = warm
    prompts = [policy.encode(t) for t in ("1+1=", "9+9=", "2+3=")]
    drawn = policy.sample(prompts, [2, 0, 3], max_tokens=[1, 4, 5], temperature=1.0, generator=torch.Generator().manual_seed(0))
    assert drawn.source.tolist() == [0, 0, 2, 2, 2]
    assert drawn.tokens.shape == (5, 5)
    assert (drawn.valid[:2].sum(1) == 1).all() and not drawn.finished[:2].any()
    last = drawn.valid[2:].sum(1) - 1
    assert (drawn.tokens[2:].gather(1, last[:, None])[:, 0] == policy.eos).all() and drawn.finished[2:].all()
    greedy = [
        policy.sample(
            prompts, [1, 1, 1], max_tokens=4, temperature=1.0, generator=torch.Generator().manual_seed(s), greedy=True, want_entropy=False
        )
        for s in (0, 1)
    ]
    assert torch.equal(greedy[0].tokens, greedy[1].tokens) and greedy[0].entropy is None


def test_same_seed_same_rollouts_and_other_seed_other_rollouts(warm):
    first, again, other = (rollouts(*warm, seed=s)[0] for s in (4, 4, 5))
    assert torch.equal(first.action, again.action) and torch.equal(first.logp, again.logp)
    assert not torch.equal(first.action, other.action)


def test_factory_gives_independent_copies_of_a_warm_policy(warm):
    policy, task = warm
    twin, _ = make_toy_arith()
    assert task.expected_success(twin) == task.expected_success(policy)
    assert 0.25 < task.expected_success(policy) < 0.37
    with torch.no_grad():
        twin.output.bias += 1.0
    assert not torch.equal(make_toy_arith()[0].output.bias, twin.output.bias)


@pytest.mark.parametrize("variant", [{}, {"forms": FORMS}, {"steps": True}, {"unanswerable": 0.3}])
def test_expected_success_agrees_with_sampling(variant):
    policy, task = make_toy_arith(target=0.15, **variant)
    run = Run(grpo(), policy, task, steps=1)
    batch = run.collect([p.but(samples=60) for p in task.problems if p.columns["answerable"]])
    measured = run.score_rewards(batch).mean()
    assert abs(float(measured) - task.expected_success(policy)) < 0.025
    assert task.expected_success(policy) > 0.1
    assert task.evaluate(run)["pass@1"] == task.expected_success(policy)


def test_forced_scores_are_a_distribution():
    policy = GruPolicy(alphabet="1+=")
    texts = ["", "1", "+", "="]
    short = forced_logp(policy, [("1+1=", t) for t in texts]).exp()
    longer = policy.sample([policy.encode("1+1=")], [4000], max_tokens=2, temperature=1.0, generator=torch.Generator().manual_seed(0))
    assert abs(float(longer.finished.double().mean()) - float(short.sum())) < 0.03


def test_prompts_that_run_out_of_room_are_truncated_and_earn_nothing(warm):
    batch, run = rollouts(*warm, max_actions=1)
    assert batch.truncated.any() and torch.equal(batch.truncated, ~batch.terminated)
    assert (run.score_rewards(batch)[batch.truncated] == 0).all()


def test_held_out_problems_are_never_trained_on():
    task = ToyArith(small=True, held_out=0.25)
    drawn = {p.id for p in task.prompts(1000, np.random.default_rng(0))}
    held = {p.id for p in task.test}
    assert len(held) == 25 and drawn == {p.id for p in task.problems} - held


def test_unanswerable_prompts_are_marked_and_pay_nothing():
    policy, task = make_toy_arith(target=0.15, unanswerable=0.3)
    assert sum(not p.columns["answerable"] for p in task.problems) == 30
    batch, run = rollouts(policy, task, count=100)
    answerable, abstained = batch.signals["answerable"], batch.signals["abstained"]
    reward = run.score_rewards(batch)
    assert abstained[answerable].any() and abstained[~answerable].any()
    assert (reward[~answerable] == 0).all() and (reward[abstained] == 0).all() and (reward[answerable] == 1).any()
    assert all("?" in c["prompt"] for c, a in zip(batch.signals["columns"], answerable.tolist(), strict=True) if not a)
    assert abs(float(abstained.double().mean()) - float(task.abstain_probabilities(policy).mean())) < 0.06
    assert set(task.evaluate(run)) == {"pass@1", "abstain/answerable", "abstain/unanswerable"}


def test_every_form_of_the_answer_is_right_and_reachable():
    policy, task = make_toy_arith(target=0.15, forms=FORMS)
    columns = task.problems[34].columns
    assert [task.is_right(t, columns) for t in ("7", "07", "+7", "8", "007", "7=")] == [True, True, True, False, False, False]
    shares = task.answer_probabilities(policy).mean(0)
    assert shares[0] > shares[1] > shares[2] > 0.01
    assert torch.allclose(task.success_probabilities(policy), task.answer_probabilities(policy).sum(1))


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("5;2=7", [(1, True), (3, True)]),
        ("5;3=7", [(1, True), (3, False)]),
        ("15;2=7", [(2, False), (4, True)]),
        ("5;2", [(1, True)]),
        ("7", []),
        ("=7", []),
        ("5=;2", []),
    ],
)
def test_written_steps_are_checked_one_by_one(text, marks):
    assert check_steps(text, {"a": 3, "b": 4, "answerable": True}) == marks


def test_steps_variant_gives_process_reward_and_segments():
    policy, task = make_toy_arith(target=0.15, steps=True)
    problem = task.problems[34]
    assert (problem.content, problem.columns["solution"]) == ("3+4;", "5;2=7")
    assert [task.is_right(t, problem.columns) for t in ("5;2=7", "9;9=7", "7", "5;2=77")] == [True, True, False, False]
    batch, run = rollouts(policy, task, count=50)
    assert torch.equal(batch.signals["process"], batch.signals["process_reward"].sum(1))
    assert 0 < float(batch.signals["process"].mean()) < 1
    row = batch.signals["completion"].index(next(c for c in batch.signals["completion"] if c.count(";") == c.count("=") == 1))
    text = batch.signals["completion"][row]
    first, second = text.index(";"), text.index("=")
    assert batch.segment[row, : len(text)].tolist() == [0] * (first + 1) + [1] * (second - first) + [2] * (len(text) - second - 1)
    paid = batch.signals["process_reward"].nonzero()
    assert {policy.decode(batch.action[i, t : t + 1]) for i, t in paid.tolist()} <= {";", "="}
    reward = run.score_rewards(batch)
    assert ((batch.signals["process"] < 1) & (reward == 1)).any() or ((batch.signals["process"] == 1) & (reward == 0)).any()


def test_completions_continue_from_prefixes(warm):
    policy, task = warm
    batch, run = rollouts(policy, task, samples=2)
    depth = batch.lengths.clamp(max=1)
    rows = torch.arange(len(batch))
    prefix = [batch.action[i, : depth[i]] for i in range(len(batch))]
    prefix[0], prefix[1] = batch.action[0, : batch.lengths[0]], batch.action[1, :0]  # a whole completion, and nothing
    more = task.continue_from(batch.signals["prompt_id"], batch.group, run, prefix, parent=rows)
    for i, start in enumerate(prefix):
        assert more.action[i, : len(start)].tolist() == start.tolist() and more.branch_at[i] == len(start)
    assert torch.equal(more.parent, rows) and more.terminated[0]
    assert more.action[0].tolist() == batch.action[0].tolist() and more.signals["completion"][0] == batch.signals["completion"][0]
    assert torch.allclose(policy.observe(more, {"logp"}).logp, more.logp, atol=1e-5)
    assert torch.allclose(more.logp[0], batch.logp[0], atol=1e-5)
    assert len(Batch.concat([batch.but(parent=torch.full_like(rows, -1), branch_at=torch.zeros_like(rows)), more])) == 2 * len(batch)


def test_bad_input_is_named():
    policy = GruPolicy(hidden=4)
    with pytest.raises(ValueError, match="'x' is not in this policy's alphabet"):
        policy.encode("1+x=")
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        policy.sample([policy.encode("1"), policy.encode("")], [1, 1], max_tokens=2, temperature=1.0, generator=torch.Generator())
    with pytest.raises(ValueError, match="256 tokens of context"):
        policy.sample([policy.encode("1" * 250)], [1], max_tokens=10, temperature=1.0, generator=torch.Generator())
    with pytest.raises(ValueError, match="held_out"):
        ToyArith(held_out=1.0)


def test_grpo_learns_and_its_reward_is_what_it_learns_from(warm):
    start = warm[1].expected_success(warm[0])
    policy, task = make_toy_arith()
    train(Run(grpo(), policy, task, steps=25))
    assert task.expected_success(policy) > start + 0.15
    blind, task = make_toy_arith()
    task.score = lambda batch, run: torch.rand(len(batch), generator=run.generator)
    train(Run(grpo(), blind, task, steps=25))
    assert task.expected_success(blind) < start + 0.08


def test_a_run_resumed_from_its_state_continues_to_the_same_numbers():
    def fresh() -> Run:
        return Run(grpo(epochs=2, minibatches=2), *make_toy_arith(value_head=True), steps=6, seed=7)

    whole = train(fresh())
    half = fresh()
    half.total_steps = 3
    state = copy.deepcopy(train(half).state_dict())
    tensors: dict = {}
    packed = checkpoint.pack(state, tensors)
    resumed = fresh()
    resumed.load_state_dict(checkpoint.unpack(packed, tensors))
    train(resumed)
    assert [r["reward"] for r in resumed.history] == [r["reward"] for r in whole.history[3:]]
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)
