"""PBPO: its exact reductions, its pitfalls, and training through the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.states import VIEW_ANSWER, VIEW_PROMPT
from anypo.domains.masked.tasks import make_split_sum
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.cispo import METHOD as CISPO
from anypo.methods.language.gspo import METHOD as GSPO
from anypo.methods.language.gspo import ratio as sequence_ratio
from anypo.methods.masked.pbpo import METHOD, BlockClipped, FreshViews, block_objective, block_ratio, clip_fraction, state, token_objective
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.update import GradientSteps
from tests.helpers import gradient, random_rows


def run_of(method: Method, steps: int = 2, seed: int = 0, out: Path | None = None, **task) -> Run:
    return Run(method.set("select.prompts", 4), load_policy(), make_split_sum(**task), steps=steps, seed=seed, out=out, checkpoint_every=2)


def weights(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def segments(rows: int, horizon: int, width: int) -> Tensor:
    return (torch.arange(horizon) // width).expand(rows, horizon)


# ---- reductions


def test_blocks_of_one_token_make_both_objectives_one() -> None:
    rows = random_rows(1)
    logp = rows.logp.requires_grad_(True)
    arguments = (logp, rows.old_logp, rows.mask, segments(8, 5, 1), rows.advantages, 0.2)
    token, block = token_objective(*arguments), block_objective(*arguments)
    torch.testing.assert_close(token, block, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient(token, logp), gradient(block, logp))
    assert clip_fraction(*arguments).token == clip_fraction(*arguments).block


def test_one_block_with_the_geometric_mean_is_gspo() -> None:
    rows = random_rows(2)
    found = block_ratio(rows.logp, rows.old_logp, rows.mask, segments(8, 5, 5), geometric=True)
    torch.testing.assert_close(found[:, 0], sequence_ratio(rows.logp, rows.old_logp, rows.mask))


def test_the_components_are_minus_the_objectives() -> None:
    rows, segment = random_rows(3), segments(8, 5, 2)
    run = run_of(METHOD)
    batch = Batch(action=segment, mask=rows.mask, logp=rows.old_logp, group=rows.group, segment=segment,
                  advantage=rows.advantages[:, None] * rows.mask)  # fmt: skip
    new = type("New", (), {"logp": rows.logp})
    for component, objective in ((METHOD.objective, token_objective), (BlockClipped(), block_objective)):
        wanted = objective(rows.logp, rows.old_logp, rows.mask, segment, rows.advantages, 0.2)
        torch.testing.assert_close(component(batch, new, run).value, -wanted)


def test_blocks_of_one_with_clean_views_are_grpo_of_an_autoregressive_model() -> None:
    """The state of a token shows the tokens before it alone, as a causal model does, and training is GRPO's."""
    clean = METHOD.set("update.mask_prompt", 0.0).set("update.mask_prefix", 0.0)
    plain = clean.but(update=GradientSteps(epochs=4))
    runs = [train(run_of(method, steps=3, block=1)) for method in (clean, plain)]
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    run = run_of(clean, block=1)
    batch = run.collect(clean.select(run.task, run))
    prompt, action = batch.context[0], batch.action[0]
    for t in range(4):
        ids = torch.cat([prompt, action[:t], torch.tensor([run.policy.mask_id])])[None]
        logits = run.policy.network(ids, torch.ones_like(ids, dtype=torch.bool))[0, -1]
        logits[run.policy.mask_id] = -torch.inf
        torch.testing.assert_close(logits.log_softmax(-1)[action[t]], batch.logp[0, t], atol=1e-5, rtol=0)


def test_without_masking_every_view_is_the_batch() -> None:
    clean = FreshViews(mask_prompt=0.0, mask_prefix=0.0, first_clean=False)
    for block in (2, 4):
        runs = [train(run_of(METHOD.but(update=update), steps=3, block=block)) for update in (clean, GradientSteps(epochs=4))]
        assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_one_block_is_the_one_step_estimate_of_the_fully_masked_answer() -> None:
    """diffu-GRPO's: prompt and an answer of masks, whatever the tail."""
    for tail in ("drop", "mask"):
        policy, task = load_policy(tail=tail), make_split_sum(block=4)
        batch = task.attempt(policy, task.held_out(2), torch.Generator().manual_seed(0))
        ids = torch.cat([torch.stack(batch.context), torch.full((len(batch), 4), policy.mask_id)], dim=1)
        logits = policy.network(ids, torch.ones_like(ids, dtype=torch.bool))[:, 3:]
        logits[..., policy.mask_id] = -torch.inf
        wanted = logits.log_softmax(-1).gather(-1, batch.action[..., None])[..., 0]
        torch.testing.assert_close(policy.evaluate(batch, {"logp"}).logp, wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(batch.logp, wanted, atol=1e-5, rtol=0)


def test_every_ratio_is_one_in_every_view_before_a_step() -> None:
    run = run_of(METHOD)
    batch = run.collect(METHOD.select(run.task, run))
    run.prepare_signals(batch, METHOD.needs())
    for _ in range(4):
        view = METHOD.update.view(batch, run)
        again = run.score(view, {"logp"}).logp
        assert torch.equal(block_ratio(again, view.logp, view.mask, view.segment), torch.ones_like(again))
        assert torch.equal(view.signals["ref_logp"], view.logp)
        assert not torch.equal(view.logp, batch.logp)


# ---- views


def test_a_view_masks_with_the_chances_given_and_leaves_the_block_alone() -> None:
    update = FreshViews(mask_prompt=0.3, mask_prefix=0.6)
    run = run_of(METHOD.but(update=update))
    batch = run.collect([p.but(samples=64) for p in run.task.prompts(16, run.rng)])
    view = update.view(batch, run)
    assert abs(float(view.signals[VIEW_PROMPT].float().mean()) - 0.3) < 0.03
    assert abs(float(view.signals[VIEW_ANSWER].float().mean()) - 0.6) < 0.03
    rest = state(torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6]), 2, 1, 9, "drop", torch.tensor([0, 1]), torch.tensor([1, 0, 1, 0]))
    assert rest == [1, 9, 9, 4, 9, 9]
    assert torch.equal(view.action, batch.action) and torch.equal(view.mask, batch.mask)
    # with a whole prompt the first block looks the same, hidden or not
    prefix_only = FreshViews(mask_prompt=0.0, mask_prefix=1.0).view(batch, run)
    torch.testing.assert_close(prefix_only.logp[:, :2], batch.logp[:, :2], atol=1e-5, rtol=0)
    assert not torch.isclose(prefix_only.logp[:, 2:], batch.logp[:, 2:]).all()


def test_old_log_probs_of_all_views_are_the_rollouts() -> None:
    """Seen from the last epoch: the batch was scored before the first step, not after three."""
    seen = []

    class Watching(ClippedSurrogate):
        def __call__(self, batch, new, run):
            seen.append((run.version, batch))
            return super().__call__(batch, new, run)

    run = run_of(METHOD.but(objective=Watching()))
    before = run.policy.snapshot()
    step(run)
    assert [version for version, _ in seen] == [0, 1, 2, 3]
    for _, batch in seen:
        torch.testing.assert_close(before.observe(batch, {"logp"}).logp, batch.logp, atol=1e-5, rtol=0)
    views = [batch.signals.get(VIEW_ANSWER) for _, batch in seen]
    assert views[0] is None and not torch.equal(views[1], views[2])


def test_the_first_view_may_be_fresh_too() -> None:
    run = run_of(METHOD.set("update.first_clean", False))
    state_before = run.generator.get_state()
    step(run)
    assert not torch.equal(state_before, run.generator.get_state())
    assert run.history[0]["loss"] == run.history[0]["loss"]


# ---- pitfalls


def test_a_product_of_many_ratios_stays_finite() -> None:
    logp = torch.full((1, 64), 5.0, dtype=torch.float64, requires_grad=True)
    old, mask, segment = torch.zeros(1, 64, dtype=torch.float64), torch.ones(1, 64, dtype=torch.bool), segments(1, 64, 64)
    for adv in (1.0, -1.0):
        value = block_objective(logp, old, mask, segment, torch.tensor([adv], dtype=torch.float64), 0.2)
        assert torch.isfinite(value) and all(torch.isfinite(g).all() for g in gradient(value, logp))


def test_padding_may_hold_anything_and_empty_rows_count_for_nothing() -> None:
    rows, segment = random_rows(4), segments(8, 5, 2)
    mask = rows.mask.clone()
    mask[3] = False
    logp = torch.where(mask, rows.logp, -torch.inf)
    old = torch.where(mask, rows.old_logp, torch.nan)
    kept = torch.arange(8) != 3
    for objective in (token_objective, block_objective):
        whole = objective(logp, old, mask, segment, rows.advantages, 0.2)
        part = objective(rows.logp[kept], rows.old_logp[kept], mask[kept], segment[kept], rows.advantages[kept], 0.2)
        torch.testing.assert_close(whole, part)
        assert objective(logp, old, torch.zeros_like(mask), segment, rows.advantages, 0.2) == 0


def test_tokens_after_the_end_do_not_count_in_a_block() -> None:
    rows, segment = random_rows(5, ragged=False), segments(8, 5, 5)
    mask = torch.arange(5) < 3
    short = block_ratio(rows.logp[:, :3], rows.old_logp[:, :3], rows.mask[:, :3], segment[:, :3])
    torch.testing.assert_close(block_ratio(rows.logp, rows.old_logp, mask.expand(8, 5), segment)[:, :3], short)


def test_batches_of_another_policy_and_bad_chances_are_refused() -> None:
    run = run_of(METHOD)
    batch = run.collect(METHOD.select(run.task, run), "old")
    with pytest.raises(ValueError, match="under the policy that acted"):
        METHOD.update(batch, run.loss_fn, run)
    with pytest.raises(ValueError, match="is a chance"):
        step(run_of(METHOD.set("update.mask_prompt", 1.5)))
    with pytest.raises(ValueError, match="names no blocks"):
        BlockClipped()(batch.but(segment=None, advantage=batch.logp), type("New", (), {"logp": batch.logp}), run)


# ---- in the loop


@pytest.mark.parametrize("name", ["pbpo", "block product", "geometric", "cispo", "gspo", "minibatches", "threshold"])
def test_it_trains(name: str) -> None:
    changed = {
        "block product": METHOD.but(objective=BlockClipped()),
        "geometric": METHOD.but(objective=BlockClipped(geometric=True)),
        "cispo": METHOD.but(objective=CISPO.objective),
        "gspo": METHOD.but(objective=GSPO.objective),
        "minibatches": METHOD.set("update.minibatches", 2),
    }.get(name, METHOD)
    run = run_of(changed, steps=2, threshold=0.5 if name == "threshold" else 0.0)
    start = weights(run)
    train(run)
    assert torch.isfinite(weights(run)).all() and not torch.equal(start, weights(run))
    for record in run.history:
        assert all(torch.isfinite(torch.tensor(v)) for v in record.values() if isinstance(v, float))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    whole = train(run_of(METHOD, steps=4))
    train(run_of(METHOD, steps=2, out=tmp_path))
    halves = run_of(METHOD, steps=4, out=tmp_path)
    assert halves.resume()
    train(halves)
    assert torch.equal(weights(whole), weights(halves))
