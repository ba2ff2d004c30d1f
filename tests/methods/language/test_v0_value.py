from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step
from anypo.methods.language import grpo
from anypo.methods.language.v0_value import (
    METHOD,
    InContextHead,
    PredictedBudget,
    PromptFeatures,
    RecordSupport,
    adapter,
    allocate,
    class_weights,
    frontier,
    loss,
    route,
    value,
)
from anypo.run import Run
from anypo.task import Prompt
from tests.helpers import assert_resumes, assert_trains


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(success: list[float], samples: list[int]) -> float:
    return sum(1 - p**n - (1 - p) ** n for p, n in zip(success, samples, strict=True))


def test_an_empty_context_is_the_prior() -> None:
    found = value(normal(0, 4), normal(0), normal(3, 4), prior=0.3, strength=0.0)
    assert found.tolist() == [0.3] * 3


def test_a_strong_prior_and_a_narrow_kernel_are_limits() -> None:
    x, y = normal(6, 4), torch.tensor([1.0, 0, 1, 0, 1, 1]).double()
    torch.testing.assert_close(value(x, y, x, tau=1e-3, strength=0.0), y)  # each query finds itself alone
    torch.testing.assert_close(value(x, y, x, strength=1e12), torch.full((6,), 0.5).double())


def test_a_prompt_without_features_sees_every_label_alike() -> None:
    x, y = normal(6, 4), torch.tensor([1.0, 0, 1, 0, 1, 1]).double()
    torch.testing.assert_close(value(x, y, torch.zeros(1, 4).double(), strength=0.0), y.mean()[None])


def parts(seed: int = 0) -> dict[str, torch.Tensor]:
    shapes = {"static": (2, 3), "w1": (5, 4), "b1": (4,), "w2": (4, 6), "b2": (6,), "p_kv": (5, 3)}
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def test_without_a_generator_queries_do_not_depend_on_the_prompt() -> None:
    weights, hidden, mask = parts(), normal(6, 5, seed=9), torch.ones(6)
    weights["w2"], weights["b2"] = torch.zeros(4, 6).double(), torch.zeros(6).double()
    keys = hidden @ weights["p_kv"]
    static = ((weights["static"] @ keys.T / 3**0.5).softmax(-1) @ keys).flatten()
    torch.testing.assert_close(adapter(hidden, mask, **weights), static)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))  # the last token plays no part of its own
    torch.testing.assert_close(adapter(hidden[order], mask, **weights), static)
    assert not torch.allclose(adapter(hidden, mask, **parts()), adapter(hidden[order], mask, **parts()))


def test_padding_of_a_prompt_is_not_read() -> None:
    hidden, mask = normal(6, 5), torch.tensor([1, 1, 0, 1, 0, 0])
    dirty = torch.where(mask[:, None].bool(), hidden, torch.nan)
    torch.testing.assert_close(adapter(dirty, mask, **parts()), adapter(hidden[[0, 1, 3]], torch.ones(3), **parts()))
    with pytest.raises(ValueError, match="at least one token"):
        adapter(hidden, torch.zeros(6), **parts())


def test_balanced_classes_weigh_one_and_a_missing_class_is_not_divided_by() -> None:
    y = torch.tensor([0.9, 0.1]).double()
    assert class_weights(torch.tensor([1.0, 0.0, 0.5, 0.2]), y).tolist() == [1, 1]
    assert class_weights(torch.ones(3), y).tolist() == [1, 1] and class_weights(torch.zeros(0), y).tolist() == [1, 1]


def test_the_loss_is_its_parts() -> None:
    logits, y, weight = normal(3, 8, 2), torch.tensor([1.0, 0.0] * 4).double().expand(3, 8), torch.ones(3, 8).double()
    ranked, fitted = loss(logits, y, weight, 1.0), loss(logits, y, weight, 0.0)
    assert torch.equal(ranked.combined, ranked.pairwise) and torch.equal(fitted.combined, fitted.ce)
    torch.testing.assert_close(fitted.ce, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long()))
    torch.testing.assert_close(loss(logits + 5, y, weight).combined, loss(logits, y, weight).combined)


def test_equal_predictions_are_a_uniform_budget() -> None:
    assert allocate(torch.full((5,), 0.3), 30).tolist() == [6] * 5
    assert allocate(torch.full((5,), 0.3), 13).tolist() == [3, 3, 3, 2, 2]
    assert allocate(torch.full((5,), 0.3), 500, n_max=7).tolist() == [7] * 5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.02, 0.98), min_size=2, max_size=3), st.integers(0, 8))
def test_no_other_split_of_the_budget_is_better(success: list[float], extra: int) -> None:
    budget = 2 * len(success) + extra
    found = allocate(torch.tensor(success, dtype=torch.float64), budget, 2, 6).tolist()
    assert sum(found) == min(budget, 6 * len(success)) and all(2 <= n <= 6 for n in found)
    splits = torch.cartesian_prod(*[torch.arange(2, 7)] * len(success)).tolist()
    best = max(mixed(success, s) for s in splits if sum(s) == sum(found))
    assert mixed(success, found) == pytest.approx(best, abs=1e-12)


def test_a_hopeless_prompt_gets_the_least() -> None:
    assert allocate(torch.tensor([0.0, 0.5, 1.0]).double(), 12).tolist() == [2, 8, 2]


@pytest.mark.parametrize(("budget", "n_min", "words"), [(5, 2, "too few"), (9, 0, "n_min")])
def test_impossible_budgets_are_refused(budget: int, n_min: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        allocate(torch.full((3,), 0.5), budget, n_min)


def test_the_price_moves_the_router_from_the_best_to_the_cheapest() -> None:
    predicted, truth, cost = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)), normal(50, 3), torch.tensor([0.1, 0.4, 1.0])
    assert torch.equal(route(predicted, cost), predicted.argmax(1))
    assert route(predicted, cost, 100.0).eq(0).all()
    spent = frontier(predicted.double(), truth, cost.double(), torch.tensor([0.0, 0.2, 0.5, 1.0, 100.0]))[:, 1]
    assert (spent[1:] <= spent[:-1]).all()


def test_the_head_reads_the_support_as_a_set_and_queries_alone() -> None:
    torch.manual_seed(0)
    head = InContextHead(4).double()
    x, y, q = normal(2, 6, 4), (normal(2, 6, seed=1) > 0).double(), normal(2, 3, 4, seed=2)
    whole, order = head(x, y, q), torch.tensor([3, 1, 0, 5, 4, 2])
    torch.testing.assert_close(head(x[:, order], y[:, order], q), whole)
    torch.testing.assert_close(torch.cat([head(x, y, q[:, i : i + 1]) for i in range(3)], dim=1), whole)
    assert not torch.allclose(head(x, 1 - y, q), whole)
    assert torch.isfinite(head(x[:, :0], y[:, :0], q)).all()


def test_features_come_from_the_task_or_from_the_text() -> None:
    features = PromptFeatures(size=32)
    text = [Prompt(0, "12+3="), Prompt(1, "12+3="), Prompt(2, "")]
    found = features(text)
    assert found.shape == (3, 32) and torch.equal(found[0], found[1]) and found[2].eq(0).all()
    assert found[0].sum() == 5 + 4 + 3
    given = [Prompt(0, "a", {"features": [1.0, 2.0]}), Prompt(1, "b", {"features": [3.0, 4.0]})]
    assert features(given).tolist() == [[1, 2], [3, 4]]


def test_the_support_holds_the_past_alone_and_slides() -> None:
    task = TokenBandit(4)
    run = Run(METHOD.but(control=RecordSupport(window=6)), task.policy(), task, steps=3)
    assert all(p.samples == 8 for p in METHOD.select(task, run)) and run.state["v0"]["predicted"].tolist() == [0.5] * 4
    batches = [step(run) for _ in range(3)]
    means = [torch.stack([b.reward[b.group == g].mean() for g in range(4)]) for b in batches]
    assert torch.equal(run.state["v0"]["y"], torch.cat(means)[-6:])
    assert run.state["v0"].keys() == {"x", "y"} and len(run.state["v0"]["x"]) == 6
    assert sum(len(b) for b in batches) == 3 * 4 * 8


def test_a_dropped_group_leaves_no_pair() -> None:
    task = TokenBandit(4)
    run = Run(METHOD, task.policy(), task, steps=1)
    prompts = METHOD.select(task, run)
    batch = METHOD.rollout(prompts, run)
    batch.reward = torch.ones(len(batch)).double()
    METHOD.control[0](batch[batch.group != 2], run)
    assert run.state["v0"]["y"].tolist() == [1, 1, 1] and len(run.state["v0"]["x"]) == 3


def test_without_choice_it_is_grpo() -> None:
    """n_min = n_max: every prompt gets the same, and the run is GRPO's to the last bit."""
    task = TokenBandit(4)
    equal = METHOD.but(select=PredictedBudget(group_size=8, n_min=8, n_max=8))
    runs = [Run(m, task.policy(scale=0.1), task, steps=3) for m in (equal, grpo.METHOD)]
    for run in runs:
        for _ in range(3):
            step(run)
    assert torch.equal(runs[0].policy.logits, runs[1].policy.logits)


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)
