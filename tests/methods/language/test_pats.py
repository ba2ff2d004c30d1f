import pytest
import torch

from anypo.domains.language.toys.household import ACTIONS, LENGTHS, LEVELS, Household, number, orders
from anypo.loops.on_policy import step, train
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.pats import METHOD, SCAFFOLD, EqualGuidance, advantages, card, decide, guided, update_estimate
from anypo.run import Run
from anypo.seams.groups import broadcast, standardize
from anypo.task import Prompt
from tests.helpers import assert_continues, assert_resumes, assert_trains, random_rows, trained

FROZEN = METHOD.but(control=())


def household_run(method=METHOD, steps=4, out=None, seed=0):
    task = Household(seed=seed)
    return Run(method, task.policy(), task, steps=steps, seed=seed, out=out, checkpoint_every=2)


def test_levels_frozen_at_0_are_grpo():
    plain = GRPO.set("credit.ddof", 1)
    assert torch.equal(trained(FROZEN, 4).policy.logits, trained(plain, 4).policy.logits)
    mine, theirs = train(household_run(FROZEN)), train(household_run(plain))
    for a, b in zip(mine.policy.parameters(), theirs.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_problems_without_guidance_stay_at_level_0():
    run = trained(METHOD, 4)
    assert run.state[SCAFFOLD]["level"].tolist() == [0] and all(r["prompt_cost"] == 0 for r in run.history)
    assert torch.equal(run.policy.logits, trained(GRPO.set("credit.ddof", 1), 4).policy.logits)


def test_frozen_at_the_highest_level_is_a_static_prompt():
    run = household_run(FROZEN.set("select.start", 9).set("select.phi", 0.0))
    batch = step(run)
    assert (batch.signal("level") == LEVELS).all() and run.history[-1]["prompt_cost"] == 80.0 * len(batch)


def test_without_probes_success_at_the_level_itself_removes():
    P = torch.tensor([[0.0, 0.8, -1.0, -1.0]]).double()  # level 0 was seen on the way up, by a former policy
    run = household_run(METHOD.set("select.phi", 0.0))
    batch = step(run)
    run.state[SCAFFOLD] |= {"P": P.expand(6, 4).clone(), "level": torch.ones(6, dtype=torch.int64)}
    batch.signals |= {"level": torch.ones_like(batch.group), "failure": torch.full_like(batch.group, -1)}
    batch.reward = torch.ones(len(batch))
    run.method.control[0](batch, run)
    assert run.state[SCAFFOLD]["level"].tolist() == [0] * 6
    assert decide(P, torch.tensor([1]), torch.tensor([0])).action == ["keep"]  # had level 0 been probed


def test_rows_are_compared_with_equal_guidance_only():
    r = random_rows(rows=12)
    level = torch.arange(12) % 2
    found = advantages(r.reward, r.group, level, r.mask)
    for g in range(3):
        for shown in range(2):
            rows = (r.group == g) & (level == shown)
            alone = broadcast(standardize(r.reward[rows], torch.zeros(int(rows.sum()), dtype=torch.int64), ddof=1), r.mask[rows])
            torch.testing.assert_close(found[rows], alone)
    shifted = advantages(r.reward + 5.0 * level, r.group, level, r.mask)
    torch.testing.assert_close(shifted, found)  # what guidance is worth does not enter


def test_lone_rows_equal_rewards_and_masked_rows_have_no_advantage():
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]]).bool()
    group, level = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 2])
    assert torch.equal(advantages(torch.tensor([1.0, 0.0, 0.3, 0.3]), group, level, mask), torch.zeros(4, 2))
    assert torch.equal(advantages(torch.tensor([1.0, 0.0, 0.3, 0.9]), group, level, mask)[3], torch.zeros(2))
    reward = torch.rand(4, requires_grad=True)
    run = household_run()
    batch = step(run)
    batch.reward = reward.detach()[torch.zeros(len(batch), dtype=torch.int64)]
    assert torch.equal(EqualGuidance()(batch, run), torch.zeros(batch.mask.shape))


def test_cards_without_failures_or_successes():
    zero = torch.zeros(2, dtype=torch.int64)
    (won,) = card(torch.ones(2), torch.tensor([3.0, 5.0]), zero - 1, zero, zero)
    (lost,) = card(torch.zeros(2), torch.tensor([3.0, 5.0]), torch.tensor([2, 1]), zero, zero)
    assert won == {"type": 0, "level": 0, "n": 2, "p": 1.0, "steps": 4.0, "variation": 0.0, "top_failure": -1}
    assert (lost["steps"], lost["top_failure"]) == (-1.0, 1)


def test_a_card_without_rollouts_changes_nothing():
    P = torch.full((1, 2), -1.0)
    assert torch.equal(update_estimate(P, [{"type": 0, "level": 0, "n": 0, "p": 0.0}]), P)
    assert decide(P, torch.tensor([1]), torch.tensor([3])) == (["keep"], [1], [-1])


def test_types_that_were_not_rolled_out_keep_their_level():
    run = household_run(METHOD.set("select.prompts", 1), steps=3)
    train(run)
    seen = {r for r in range(6) if (run.state[SCAFFOLD]["P"][r] >= 0).any()} if len(run.state[SCAFFOLD]["P"]) else set()
    assert all(run.state[SCAFFOLD]["level"][c] == 0 for c in range(len(run.state[SCAFFOLD]["level"])) if c not in seen)


def test_a_share_of_every_group_is_given_one_level_less():
    run = household_run(FROZEN.set("select.start", 2))
    level = step(run).signal("level").view(6, 8)
    assert ((level == 2).sum(1) == 6).all() and ((level == 1).sum(1) == 2).all()
    assert run.history[-1]["prompt_cost"] == 6 * (6 * 30 + 2 * 10)
    with pytest.raises(ValueError, match=r"select\.phi in \[0,1\)"):
        step(household_run(METHOD.set("select.phi", 1.0)))


def test_guidance_is_text_before_the_problem():
    prompt = Prompt(0, "do it", {"guidance": ("hint", "plan"), "hints": {4: "mind the step"}})
    assert guided(prompt, 0, 4).content == "do it" and guided(prompt, 0, 4).columns["focus"] == -1
    assert guided(prompt, 2, -1).content == "plan\ndo it"
    assert guided(prompt, 1, 4).content == "hint\nmind the step\ndo it"
    chat = guided(prompt.but(content=[{"role": "user", "content": "do it"}]), 1, -1).content
    assert chat == [{"role": "system", "content": "hint"}, {"role": "user", "content": "do it"}]


def test_a_failing_type_at_the_highest_level_gets_a_hint():
    run = household_run(METHOD.set("select.start", 3), steps=1)
    with torch.no_grad():
        run.policy.reads.zero_()  # does not understand
        run.policy.output.bias[0] = 50.0  # and always does the same
    batch = step(run)
    stuck = [int(batch.signal("failure")[batch.signal("type") == c].mode().values) for c in range(6)]
    state = run.state[SCAFFOLD]
    assert state["focus"].tolist() == stuck and state["level"].tolist() == [3] * 6


def test_it_trains_and_resumes(tmp_path):
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)

    def run_to(out, upto):
        run = household_run(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path / "household")


@pytest.mark.parametrize("level", range(LEVELS + 1))
def test_success_on_household_is_exact(level):
    task = Household(seed=1)
    policy = task.policy(seed=1)
    with torch.no_grad():
        policy.output.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        policy.first.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(2))
    run = Run(METHOD, policy, task, steps=1)
    prompts = [guided(p, level, -1).but(samples=2000) for p in task.problems]
    batch = run.collect(prompts)
    shares = task.score(batch).view(6, 2000).mean(1).double()
    assert (shares - task.success_by_type(policy, level)).abs().max() < 0.04
    torch.testing.assert_close(policy.evaluate(batch, {"logp"}).logp, batch.logp)


def test_what_guidance_shows():
    task = Household()
    seen, order = task.policy().seen, orders()
    state = {k: torch.tensor(v) for k, v in {"kind": 5, "done": 4, "last": ACTIONS, "focus": -1}.items()}
    for level in range(LEVELS + 1):
        row = seen[number(**state, level=torch.tensor(level))]
        needed, named = row[-2 * ACTIONS : -ACTIONS], row[-ACTIONS:]
        assert needed.nonzero().flatten().tolist() == (sorted(order[5, 4:].tolist()) if level else [])
        assert named.nonzero().flatten().tolist() == ([int(order[5, 4])] if level == 3 else [])  # step 4 of 6 is in the second half
    hinted = seen[number(**(state | {"focus": torch.tensor(4)}), level=torch.tensor(1))]
    assert hinted[-ACTIONS:].argmax() == order[5, 4]
    assert [int((o >= 0).sum()) for o in order] == list(LENGTHS)
