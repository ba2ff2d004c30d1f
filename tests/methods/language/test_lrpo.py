"""LRPO: what it reduces to (GRPO, uniform and fixed routers, no calibration), routing, regions, the language gate, and the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from anypo.domains.language.toys.toy_languages import EVEN_SKILLS, LanguageTable, ToyLanguages
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.lrpo import (
    METHOD,
    ROUTER,
    CalibratedReward,
    RoutedLanguages,
    assign_languages,
    calibrated_reward,
    cell_values,
    in_language,
    ngram_cosine,
    router_probs,
    router_update,
)
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.regularize import KLPenalty
from anypo.task import Prompt
from tests.helpers import assert_continues, assert_trains, trained

PLAIN = GRPO.but(credit=GroupRelative(ddof=1, eps=0.0), regularize=(KLPenalty(beta=0.001, aggregation="token_mean"),))


def run_on(method: Method, task: ToyLanguages, steps: int, out: Path | None = None) -> Run:
    run = Run(method, task.policy(), task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def test_without_languages_it_is_grpo_of_ddof_1() -> None:
    ours, theirs = trained(METHOD.set("credit.eps", 0.0), 3), trained(PLAIN, 3)
    assert torch.equal(ours.policy.logits, theirs.policy.logits)


@pytest.mark.parametrize(("skills", "keep"), [((0.4,), 2), (EVEN_SKILLS, 8)])
def test_one_language_or_own_languages_only_is_grpo(skills: tuple[float, ...], keep: int) -> None:
    """Rewards (s + 1) / 2 are normalized to the same advantages."""
    task = ToyLanguages(skills=skills, noise=0.0)
    run = Run(METHOD.set("credit.eps", 0.0).set("rollout.keep", keep), task.policy(), task, steps=1)
    batch = step(run)
    own = task.own[batch.signals["prompt_id"]]
    assert torch.equal(batch.signals["language"], own)
    assert torch.equal(torch.bincount(batch.group), torch.full((32,), 8))
    right = (batch.action[:, 0] == task.targets[batch.signals["prompt_id"], 0, 0]).double()
    plain = batch.but(reward=right, advantage=None)
    assert batch.advantage is not None
    torch.testing.assert_close(batch.advantage, PLAIN.credit(plain, run))


def test_full_exploration_is_uniform_and_alpha_0_is_a_fixed_router() -> None:
    q = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.int64)
    torch.testing.assert_close(router_probs(q, q, torch.tensor([0, 2]), none, epsilon=1.0), torch.full((5,), 0.2, dtype=torch.float64))
    rows = torch.tensor([0, 0, 1, 2])
    assert torch.equal(router_update(q, rows, rows, torch.rand(4, dtype=torch.float64), alpha=0.0), q)


def test_equal_pair_means_and_unknown_pairs_change_nothing() -> None:
    sim = torch.tensor([-0.4, 0.0, 0.3, 0.9], dtype=torch.float64)
    counts, right = torch.tensor([3.0, 9.0], dtype=torch.float64), torch.ones(4, dtype=torch.int64)
    pair = torch.tensor([0, 1, 1, -1])
    equal = torch.tensor([0.7, 0.7], dtype=torch.float64)
    torch.testing.assert_close(calibrated_reward(sim, pair, equal, counts, right), (sim + 1) / 2)
    empty = torch.zeros(0, dtype=torch.float64)
    torch.testing.assert_close(calibrated_reward(sim, pair, empty, empty, right), (sim + 1) / 2)
    assert calibrated_reward(sim, pair, equal * 2, counts * 0, right).isfinite().all()
    assert calibrated_reward(sim, pair, equal, counts, right * 0).eq(0).all()


def test_one_language_in_a_cell_shrinks_its_value_and_unknown_languages_are_skipped() -> None:
    q = torch.ones(2, 3, dtype=torch.float64)
    topic, lang = torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, -1, -1])
    reward = torch.tensor([0.3, 0.9, 100.0, 5.0], dtype=torch.float64)
    expected = torch.tensor([[1, 0.9, 1], [1, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(router_update(q, topic, lang, reward), expected)
    with pytest.raises(ValueError, match="norm"):
        cell_values(topic, lang, reward, (2, 3), "rank")


def test_groups_need_not_be_adjacent_to_keep_their_first_members() -> None:
    group, orig, routed = torch.tensor([0, 1, 0, 1, 0, 1]), torch.zeros(6, dtype=torch.int64), torch.arange(1, 7)
    assert assign_languages(group, orig, routed, keep=2).tolist() == [0, 0, 0, 0, 5, 6]
    assert assign_languages(group, orig, routed, keep=0).tolist() == routed.tolist()


class Regional(ToyLanguages):
    """Questions of the last topic are regional; a third of all are in a language that the router does not know."""

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        def placed(prompt: Prompt) -> Prompt:
            regional = {"topics": ["t3", "Regional Knowledge"], "regions": ["south" if prompt.id % 2 else "north"]}
            known = dict(prompt.columns) | (regional if self.topic[prompt.id] == 3 else {"regions": ["nowhere"]})
            return prompt.but(columns=known | ({"language": "elvish"} if prompt.id % 3 == 0 else {}))

        return [placed(prompt) for prompt in super().prompts(count, rng)]


def test_only_regional_questions_teach_the_regions_and_unknown_languages_are_kept_for_the_policy() -> None:
    task = Regional(seed=1)
    run = Run(METHOD.set("control.0.every", 1), task.policy(), task, steps=2)
    batch = step(run)
    unknown = batch.signals["language"] == -1
    assert unknown.any() and torch.equal(unknown, torch.tensor([name is None for name in batch.signals["asked_language"]]))
    assert batch.advantage is not None and batch.advantage[unknown].abs().sum() > 0
    state = run.state[ROUTER]
    assert set(state["region"]) == {"north", "south"} and set(state["topic"]) == {"t0", "t1", "t2", "t3", "Regional Knowledge"}
    assert state["buffer"] == [] and all(values.abs().sum() > 0 for table in (state["topic"], state["region"]) for values in table.values())


def test_the_gate_gives_exactly_0_and_the_raw_score_is_untouched_otherwise() -> None:
    run = run_on(METHOD, ToyLanguages(slip=0.5), 1)
    assert 0 < run.history[-1]["wrong_language"] < 1
    with pytest.raises(ValueError, match="detected_language"):
        task = ToyLanguages()
        collect = task.collect
        task.collect = lambda prompts, run: _without(collect(prompts, run), "detected_language")  # type: ignore[method-assign]
        run_on(METHOD, task, 1)


def _without(batch, name):  # type: ignore[no-untyped-def]
    del batch.signals[name]
    return batch


class Words:
    """A task of texts, as far as a prompt is asked for a language."""

    name = "words"


def test_texts_are_asked_for_a_language_in_a_line_of_their_own() -> None:
    prompt = Prompt(0, "How are you?")
    assert in_language(prompt, "de", Words()).content == "How are you?\nAnswer in de."
    assert in_language(prompt, None, Words()) is prompt
    chat = Prompt(0, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}])
    assert in_language(chat, "fr", Words()).content == [chat.content[0], {"role": "user", "content": "Hello\nAnswer in fr."}]
    with pytest.raises(ValueError, match="in_language"):
        in_language(Prompt(0, 3), "de", Words())


def test_ngram_similarity() -> None:
    text = ["the", "quick", "brown", "fox"]
    assert ngram_cosine(text, text) == pytest.approx(1.0)
    assert ngram_cosine(text, ["zzzz", "yyyy"]) == 0.0
    assert ngram_cosine([], text) == 0.0 and ngram_cosine([], []) == 0.0
    assert 0.2 < ngram_cosine(text, ["the", "slow", "brown", "fox"]) < 1


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="prior"):
        run_on(METHOD.but(rollout=RoutedLanguages(prior=(1.0, 2.0))), ToyLanguages(), 1)
    with pytest.raises(ValueError, match="similarity"):
        run_on(METHOD.but(reward=CalibratedReward(similarity="cosine")), ToyLanguages(), 1)


def test_a_prior_is_where_the_router_starts() -> None:
    weights = (0.7, 0.1, 0.1, 0.05, 0.05, 0.0)
    run = run_on(METHOD.but(rollout=RoutedLanguages(prior=weights, keep=0)).set("control.0.alpha", 0.0), ToyLanguages(), 1)
    torch.testing.assert_close(run.state[ROUTER]["topic"]["t0"][0], torch.tensor(0.7, dtype=torch.float64).log())


def test_the_loop_trains_and_continues_after_a_stop(tmp_path: Path) -> None:
    assert_trains(METHOD)

    def run_to(out: Path, upto: int) -> Run:
        return run_on(METHOD.set("control.0.every", 3), ToyLanguages(seed=3), upto, out)

    assert_continues(run_to, tmp_path)


def test_toy_accuracy_is_exact() -> None:
    task = ToyLanguages(skills=(0.3, 0.9), noise=0.0)
    policy: LanguageTable = task.policy()
    assert task.expected_success(policy) == pytest.approx(0.6)
    chance: Tensor = policy.action_logits(torch.tensor([0, 1]), torch.zeros(2, 1, dtype=torch.int64)).softmax(-1)
    assert sorted(chance[:, 0].gather(1, task.targets[:1, 0].expand(2, 1))[:, 0].tolist()) == pytest.approx([0.3, 0.9])
