import numpy as np
import pytest
import torch

from anypo.domains.language.toys import event_video
from anypo.domains.language.toys.event_video import (
    BUDGETS,
    CALLS,
    FRAMES,
    EventVideo,
    Videos,
    WordPolicy,
    demonstrated,
    demonstration,
    make_event_video,
    overview_hits,
)  # fmt: skip
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.para_grpo import (
    METHOD,
    REWARDS,
    VARIANTS,
    BudgetedPrompts,
    advantages,
    format_reward,
    frame_budget,
    judged_texts,
    parts,
    structural,
    structural_tokens,
    tool_gap,
    tool_reward,
)  # fmt: skip
from anypo.run import Run
from tests.helpers import assert_continues, assert_trains, random_rows

CALL = f"<tool_call>{CALLS[0]}</tool_call>"
THOUGHT = "<think>a thought long enough</think>"


@pytest.fixture(autouse=True)
def quick_start(monkeypatch):
    monkeypatch.setattr(event_video, "WARM_STEPS", 10)
    monkeypatch.setattr(event_video, "_WARM", {})


def rows(seed=0):
    found = random_rows(seed)
    tags = torch.rand(found.mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return found.reward, found.advantages, found.group, tags, found.mask


def test_no_weight_is_grpo_and_sequence_is_grpo_of_the_sum():
    task, form, group, tags, mask = rows()
    plain = grpo.advantages(task, group)[:, None] * mask
    for placement in ("structural", "sequence"):
        torch.testing.assert_close(advantages(task, form, group, tags, mask, placement, weight=0.0), plain)
    summed = grpo.advantages(task + 0.5 * form, group)[:, None] * mask
    torch.testing.assert_close(advantages(task, form, group, tags, mask, "sequence", weight=0.5), summed)
    with pytest.raises(ValueError, match="'structural' or 'sequence'"):
        advantages(task, form, group, tags, mask, "everywhere")


def test_tags_everywhere_and_one_constant_reward_make_the_placements_equal():
    task, form, group, _, mask = rows()
    level = group.double()
    for first, second in ((task, level), (level, form)):
        both = [advantages(first, second, group, mask, mask, placement) for placement in ("structural", "sequence")]
        torch.testing.assert_close(*both)
    for placement in ("structural", "sequence"):
        assert (advantages(level, level, group, mask, mask, placement) == 0).all()


def test_format_advantage_stays_on_tags_inside_the_mask():
    task, form, group, tags, mask = rows()
    found = advantages(task, form, group, tags, mask) - advantages(task, form, group, tags, mask, weight=0.0)
    assert (found[~tags | ~mask] == 0).all() and (found[tags & mask] != 0).any() and torch.isfinite(found).all()


def test_parts_of_a_response():
    whole = parts(THOUGHT + CALL + "<tool_response>A</tool_response><answer>A</answer>")
    assert all(whole)
    assert not parts("<think>short</think>").think and not parts("<think></think><answer> </answer>").answer
    loose = parts("<think>a thought long enough<answer>A</answer>")
    assert loose.think and loose.opened and not loose.closed and not loose.balanced
    assert parts("<tool_call>" + CALLS[1]).tool and not parts('<tool_call>["name"]</tool_call>').tool
    assert not parts(CALL + THOUGHT).thought_first and not parts(THOUGHT).thought_first
    deep = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert not parts(deep).tool


def test_rewards_are_capped_and_an_unclosed_thought_pays_although_the_answer_is_right():
    full = THOUGHT + CALL + "<answer>A</answer>"
    assert format_reward(full, anchor_weight=5.0) == 1.0 and format_reward("") == 0.0
    assert format_reward("<think>a thought long enough<answer>A</answer>") < format_reward(THOUGHT + "<answer>A</answer>") - 0.3
    assert format_reward("<think></think><answer> </answer>") == 0.0
    assert (tool_reward(full, 0.0), tool_reward(full, 1.0), tool_reward(THOUGHT, 1.0)) == (0.1, 0.6, 0.0)


def test_budgets_are_drawn_once_a_prompt():
    policy, task = make_event_video()
    run = Run(METHOD, policy, task, steps=1)
    prompts = METHOD.select(task, run)
    assert {p.columns["frames"] for p in prompts} <= set(BUDGETS) and len({p.columns["frames"] for p in prompts}) > 1
    batch = task.collect(prompts, run)
    for group in range(len(prompts)):
        texts = {batch.signals["prompt_text"][i] for i in (batch.group == group).nonzero().flatten().tolist()}
        assert len(texts) == 1 and f"<video {prompts[group].columns['frames']}>" in texts.pop()
    fixed = BudgetedPrompts(choices=(64,))(task, run)
    assert {p.columns["frames"] for p in fixed} == {64}
    drawn = frame_budget(torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64), BUDGETS)
    assert torch.bincount(drawn)[list(BUDGETS)].min() > 850
    assert frame_budget(torch.tensor([0.0, 1.0]), BUDGETS).tolist() == [4, 64]


def test_tags_are_found_whole_or_in_characters():
    assert structural_tokens(["<think>", "word", "</think>", ""]) == [True, False, True, False]
    text = "a<b</answer>c"
    assert structural_tokens(list(text)) == [3 <= i < 12 for i in range(len(text))]
    policy, task = make_event_video()
    run = Run(METHOD, policy, task, steps=1)
    batch = task.collect([p.but(samples=4) for p in task.prompts(4, run.rng)], run)
    tags = structural(batch, run)
    written = {policy.decode(token[None]) for token in batch.action[tags].unique()}
    assert written and all(word.startswith("<") and "response" not in word for word in written)
    assert not (tags & ~batch.mask).any() and all(text.startswith("<think>") for text in judged_texts(batch))


def test_videos_and_crops():
    start = torch.arange(FRAMES - 6)
    shown = [overview_hits(start, 6, FRAMES, k).double().mean() for k in BUDGETS]
    assert shown == sorted(shown) and shown[-1] == 1 and shown[0] < 0.5
    problem = Videos().training(1, np.random.default_rng(0))[0]
    problem = problem.but(columns={"start": 14, "length": 4, "answer": "B", "frames": 4})
    world = EventVideo(parallel=2, miss=0.0)
    assert world.reset(problem) == "<video 4>none<think>"
    every = "".join(f"<tool_call>{call}</tool_call>" for call in CALLS)
    assert world.step(every) == ("<tool_response>BB</tool_response>", 0.0, False)
    assert world.step(f"<tool_call>{CALLS[3]}</tool_call>")[0] == "<tool_response>none</tool_response>"
    assert world.step("<answer>B</answer>")[1:] == (1.0, True) and world.step("<answer>B")[1:] == (0.0, True)
    blind = EventVideo(miss=1.0)
    blind.reset(problem)
    assert "B" not in blind.step(every)[0]


def test_words_and_demonstrations():
    policy = WordPolicy()
    rng, problems = np.random.default_rng(0), Videos().training(32, np.random.default_rng(1), BUDGETS)
    shown = [demonstration(EventVideo(), p, rng, prior=0.5, spoilt=0.0) for p in problems]
    for prompt, turns in shown:
        text = prompt + "".join(part for part, _ in turns)
        assert policy.decode(policy.encode(text)) == text and format_reward(text) == 1.0
    batch = demonstrated(policy, shown)
    assert torch.isfinite(policy.evaluate(batch, {"logp"}).logp).all() and 0 < sum(len(turns) == 3 for _, turns in shown) < 32
    with pytest.raises(ValueError, match="not made of the words"):
        policy.encode("hello")
    with pytest.raises(ValueError, match="at least 1 call"):
        make_event_video(parallel=0)


def test_the_necessity_gap_closes_with_the_budget():
    seen = torch.tensor([0.1, 0.5, 1.0])
    gap = tool_gap(seen, 0.95, 0.25, 0.9)
    assert (gap.diff() < 0).all() and gap[-1] < 0 < tool_gap(seen, 0.95, 0.25, 0.9, bonus=0.3)[-1]


def test_on_a_task_without_text_it_is_grpo():
    mine = assert_trains(METHOD.but(regularize=()))
    plain = assert_trains(grpo.METHOD.but(regularize=(), select=BudgetedPrompts()))
    assert torch.equal(mine.policy.logits, plain.policy.logits)


def test_trains_and_resumes(tmp_path):
    def run_to(out, upto):
        policy, task = make_event_video(prompts_per_step=4)
        run = Run(METHOD, policy, task, steps=upto, seed=0, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    policy, task = make_event_video(prompts_per_step=4)
    batch = step(Run(VARIANTS["sequence"], policy, task, steps=1))
    assert batch.objectives == REWARDS and torch.isfinite(batch.advantage).all()
