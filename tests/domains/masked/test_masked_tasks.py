"""split_sum, the built-in masked model, and runs of other methods on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo import api
from anypo.domains import owner
from anypo.domains.masked.builtin import PATH
from anypo.domains.masked.builtin.pretrain import masked_loss
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.setup import build
from anypo.domains.masked.tasks import SplitSum, adds_up, digits, exact_accuracy, make_split_sum
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.seams.rollout import continue_rows
from anypo.task import Resumable


@pytest.mark.parametrize(
    ("completion", "total", "right"),
    [
        ("7310", 38, 1),
        ("0102", 30, 1),
        ("8900", 98, 1),
        ("7310", 37, 0),
        ("731", 37, 0),
        ("73100", 38, 0),
        ("73+0", 37, 0),
        ("7_10", 38, 0),
    ],
)
def test_what_adds_up(completion: str, total: int, right: int) -> None:
    assert adds_up(completion, total) == right
    assert digits(37) == "73" and digits(5) == "50"


def test_the_splits_share_no_prompt_and_demonstrations_are_right() -> None:
    source, rng = SplitSum(), np.random.default_rng(0)
    trained, kept = ({p.content for p in prompts} for prompts in (source.trained, source.kept))
    assert len(trained) + len(kept) == 99 and not trained & kept and len(kept) > 8
    by_prompt = {p.content: p.columns["total"] for p in source.trained}
    for prompt, answer in source.demonstrations(200, rng):
        assert adds_up(answer, by_prompt[prompt]) == 1
    assert len(source.training(200, rng)) == 200


def test_the_shipped_model_leaves_room_and_is_small() -> None:
    source, policy = SplitSum(), load_policy()
    for prompts in (source.trained, source.kept):
        assert 0.2 < exact_accuracy(policy, 2, prompts) < 0.5
    assert sum(f.stat().st_size for f in PATH.iterdir()) < 1_000_000


@pytest.mark.parametrize("block", [1, 2, 4])
def test_exact_accuracy_is_the_frequency_of_right_samples(block: int) -> None:
    task, policy = make_split_sum(block=block), load_policy()
    prompts = [p.but(samples=200) for p in task.source.kept]
    batch = task.attempt(policy, prompts, torch.Generator().manual_seed(0))
    exact = exact_accuracy(policy, block, task.source.kept)
    assert abs(float(task.score(batch).mean()) - exact) < 4 * (exact * (1 - exact) / len(batch)) ** 0.5


def test_pretraining_masks_what_it_says() -> None:
    policy, seen = load_policy(), []
    forward = policy.network.forward
    policy.network.forward = lambda ids, attention: (seen.append(ids), forward(ids, attention))[1]
    ids = torch.randint(10, (400, 7), generator=torch.Generator().manual_seed(0))
    loss = masked_loss(policy, ids, 3, torch.Generator().manual_seed(1))
    masked = seen[0] == policy.mask_id
    assert torch.isfinite(loss) and not masked[:200, :3].any()
    assert torch.equal(seen[0][~masked], ids[~masked])
    assert abs(float(masked[200:].float().mean()) - 0.5) < 0.05 and abs(float(masked[:200, 3:].float().mean()) - 0.5) < 0.05


def test_endings_go_on_from_the_middle_of_a_block() -> None:
    task, policy = make_split_sum(), load_policy()
    run = Run(GRPO, policy, task, steps=1)
    assert isinstance(task, Resumable)
    batch = run.collect([p.but(samples=4) for p in task.prompts(4, run.rng)])
    before = run.actions
    rows, depth = torch.tensor([0, 0, 5, 9, 15]), torch.tensor([0, 1, 2, 3, 4])
    found = continue_rows(batch, rows, depth, run)
    assert torch.equal(found.parent, rows) and torch.equal(found.branch_at, depth) and torch.equal(found.group, batch.group[rows])
    for i, (row, shared) in enumerate(zip(rows.tolist(), depth.tolist(), strict=True)):
        assert torch.equal(found.action[i, :shared], batch.action[row, :shared])
    assert torch.equal(found.action[4], batch.action[15]) and found.mask.all()
    assert run.actions - before == int((4 - depth).sum())
    torch.testing.assert_close(found.logp, policy.observe(found, {"logp"}).logp)
    torch.testing.assert_close(found.logp[4], batch.logp[15], atol=1e-5, rtol=0)


def test_an_on_policy_batch_brings_its_own_log_probs() -> None:
    for threshold in (0.0, 0.5, 1.0):
        task, policy = make_split_sum(threshold=threshold), load_policy()
        run = Run(GRPO, policy, task, steps=1)
        batch = run.collect([p.but(samples=8) for p in task.prompts(8, run.rng)])
        torch.testing.assert_close(batch.logp, policy.observe(batch, {"logp"}).logp, atol=1e-5, rtol=0)
        assert batch.segment is not None and batch.segment[0].tolist() == [0, 0, 1, 1]


def test_names_and_options() -> None:
    assert owner("split_sum", "language") == "masked"
    policy, task = build("split_sum", None, block=4, threshold=0.5, tail="mask")
    assert (policy.tail, task.block, task.threshold) == ("mask", 4, 0.5)
    with pytest.raises(ValueError, match="no setting 'blocks'"):
        build("split_sum", None, blocks=4)
    with pytest.raises(ValueError, match="unknown task"):
        build("split_product", None)


@pytest.mark.parametrize("slug", ["grpo", "gspo", "dapo"])
def test_methods_for_text_run_on_it(slug: str, tmp_path: Path) -> None:
    found = api.train(slug, task="split_sum", steps=2, out=tmp_path / "run", settings={"select.prompts": 4})
    assert found.run is not None and all(torch.isfinite(p).all() for p in found.run.policy.parameters())
    assert 0.2 < found.before["pass@1"] < 0.6
    measured = api.evaluate(str(tmp_path / "run"), k=(1, 4))
    assert measured["pass@4"]["value"] >= measured["pass@1"]["value"]


def test_a_method_for_masked_models_refuses_another_kind_of_model() -> None:
    with pytest.raises(ValueError, match="pbpo needs the signal 'views'"):
        api.train("pbpo", task="token_bandit", steps=1)
