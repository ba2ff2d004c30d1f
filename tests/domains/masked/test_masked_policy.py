"""MaskedPolicy: its log-probs against the network called by hand, sampling against evaluation, and what becomes of bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.network import Bidirectional
from anypo.domains.masked.policy import Characters, MaskedPolicy
from anypo.domains.masked.states import VIEW_ANSWER, VIEW_PROMPT
from anypo.policy import Loss

MASK = 6


def policy(tail: str = "drop", end: str = "", **options) -> MaskedPolicy:
    return MaskedPolicy(
        Bidirectional(7, width=16, layers=2, heads=2, positions=24, seed=1), Characters("012345", end), tail=tail, **options
    )


def some_batch(block: int = 2, seed: int = 0) -> Batch:
    """Five rows with prompts of 1 to 4 tokens and answers of 5, of which the third ends after 3."""
    g = torch.Generator().manual_seed(seed)
    action = torch.randint(6, (5, 5), generator=g)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2, 3:] = False
    valid = mask.clone()
    valid[2, 3] = True
    context = [torch.randint(6, (n,), generator=g) for n in (3, 1, 4, 2, 3)]
    segment = (torch.arange(5) // block).expand(5, 5)
    return Batch(action=action, mask=mask, logp=torch.zeros(5, 5), group=torch.zeros(5, dtype=torch.int64), context=context, valid=valid,
                 segment=segment, signals={"limit": torch.full((5,), 5)})  # fmt: skip


def by_hand(p: MaskedPolicy, batch: Batch, row: int, t: int) -> Tensor:
    """log p of action t of a row: the network called on the state of its block, written out."""
    block = int(batch.segment[row, t])
    kept = batch.valid[row]
    width = int(((batch.segment[row] == block) & kept).sum())
    finished = batch.action[row][(batch.segment[row] < block) & kept]
    tail = int(batch.signals["limit"][row]) - len(finished) - width if p.tail == "mask" else 0
    prompt = batch.context[row]
    ids = torch.cat([prompt, finished, torch.full((width + tail,), MASK)])[None]
    logits = p.network(ids, torch.ones_like(ids, dtype=torch.bool))[0, len(prompt) + t].clone()
    logits[MASK] = -torch.inf
    return logits.log_softmax(-1)[batch.action[row, t]]


@pytest.mark.parametrize("tail", ["drop", "mask"])
@pytest.mark.parametrize("block", [1, 2, 5])
def test_log_probs_are_those_of_the_states(tail: str, block: int) -> None:
    p, batch = policy(tail), some_batch(block)
    found = p.evaluate(batch, {"logp", "entropy", "logits"})
    assert (found.logp[~batch.mask] == 0).all() and (found.entropy[~batch.mask] == 0).all()
    for row, t in batch.mask.nonzero().tolist():
        torch.testing.assert_close(found.logp[row, t], by_hand(p, batch, row, t), atol=1e-5, rtol=0)
    log_probs = found.logits.log_softmax(-1)
    torch.testing.assert_close(log_probs.gather(-1, batch.action[..., None])[..., 0][batch.mask], found.logp[batch.mask])
    assert log_probs[batch.mask][:, MASK].max() < -100


def test_later_blocks_do_not_matter_and_finished_ones_do() -> None:
    p, batch = policy("mask"), some_batch()
    before = p.evaluate(batch, {"logp"}).logp
    for t in range(5):
        action = batch.action.clone()
        action[:, t] = (action[:, t] + 1) % 6
        after = p.evaluate(batch.but(action=action), {"logp"}).logp
        same = (batch.segment <= t // 2) & (torch.arange(5) != t)
        assert torch.equal(before[same], after[same])
        assert not torch.isclose(before[0, batch.segment[0] > t // 2], after[0, batch.segment[0] > t // 2]).any()


def test_a_view_changes_what_it_may() -> None:
    p, batch = policy(), some_batch()
    clean = p.evaluate(batch, {"logp"}).logp
    nothing = {VIEW_PROMPT: torch.zeros(5, 4, dtype=torch.bool), VIEW_ANSWER: torch.zeros(5, 5, dtype=torch.bool)}
    assert torch.equal(clean, p.evaluate(batch.but(signals=batch.signals | nothing), {"logp"}).logp)
    view = nothing | {VIEW_ANSWER: torch.ones(5, 5, dtype=torch.bool)}
    hidden = p.evaluate(batch.but(signals=batch.signals | view), {"logp"}).logp
    assert torch.equal(clean[:, :2], hidden[:, :2])  # the first block has no finished block before it
    masked = p.evaluate(batch.but(action=torch.where(batch.segment < 2, MASK, batch.action)), {"logits"}).logits
    shown = p.evaluate(batch.but(signals=batch.signals | view), {"logits"}).logits
    torch.testing.assert_close(shown[0, 4], masked[0, 4])


def test_temperature_and_entropy() -> None:
    p, batch = policy(), some_batch()
    hot = batch.but(signals=batch.signals | {"temperature": torch.full((5,), 2.0)})
    plain, warm = p.evaluate(batch, {"logits", "entropy"}), p.evaluate(hot, {"logits", "entropy", "logp"})
    torch.testing.assert_close(plain.logits[..., :MASK] / 2, warm.logits[..., :MASK])
    assert (warm.entropy >= plain.entropy - 1e-6).all()
    everywhere = policy(temperature=2.0).evaluate(batch, {"logp"})
    torch.testing.assert_close(everywhere.logp, warm.logp)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", ["drop", "mask"])
def test_sampled_log_probs_are_those_of_evaluation(threshold: float, tail: str) -> None:
    p = policy(tail, end="5")
    prompts = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    out = p.sample(prompts, [30, 30], max_tokens=[6, 5], generator=torch.Generator().manual_seed(0), block=2, threshold=threshold)
    assert out.finished.any() and not out.finished.all()
    assert (out.tokens[out.valid] != MASK).all()
    batch = Batch(
        action=out.tokens, mask=out.valid, logp=out.logp, group=out.source, context=[prompts[i] for i in out.source.tolist()],
        valid=out.decoded.valid, segment=(torch.arange(6) // 2).expand(60, 6), signals={"limit": torch.tensor([6, 5])[out.source]},
    )  # fmt: skip
    found = p.observe(batch, {"logp", "entropy"})
    torch.testing.assert_close(found.logp, out.logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy, out.entropy, atol=1e-5, rtol=0)
    if threshold == 0.0:
        torch.testing.assert_close(out.decoded.reveal_logp[out.valid], out.logp[out.valid])


def test_equal_generators_give_equal_samples() -> None:
    draws = [
        policy().sample([torch.tensor([1])], [8], max_tokens=[4], generator=torch.Generator().manual_seed(3), block=2) for _ in range(2)
    ]
    assert torch.equal(draws[0].tokens, draws[1].tokens) and torch.equal(draws[0].logp, draws[1].logp)


def test_small_chunks_give_the_same_gradient() -> None:
    gradients = []
    for budget in (65536, 30):
        p, batch = policy(token_budget=budget), some_batch()
        assert len(list(p.chunks(batch))) == (1 if budget > 30 else 5)
        weights = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
        p.backward(batch, {"logp"}, lambda b, new, w=weights: Loss((w * new.logp.exp()).sum()))
        gradients.append(torch.cat([q.grad.flatten() for q in p.parameters() if q.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)


def test_a_hugging_face_masked_model_is_a_network() -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=24
        )
    ).eval()
    p = MaskedPolicy(bert, Characters("012345"))
    out = p.sample([torch.tensor([0, 1])], [4], max_tokens=[4], generator=torch.Generator().manual_seed(0), block=2, threshold=1.0)
    batch = some_batch()
    logp = p.evaluate(batch, {"logp"}).logp
    alone = p.evaluate(batch[1], {"logp"}).logp
    torch.testing.assert_close(logp[1:2], alone, atol=1e-5, rtol=0)
    assert out.valid.all() and torch.isfinite(logp).all()


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    p, batch = policy("mask", end="5"), some_batch()
    p.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path))
    assert (again.tail, again.eos_ids, again.context_limit) == ("mask", (5,), 24)
    assert torch.equal(p.evaluate(batch, {"logp"}).logp, again.evaluate(batch, {"logp"}).logp)
    with pytest.raises(ValueError, match="holds no masked model"):
        load_policy(str(tmp_path / "elsewhere"))


def test_bad_input_is_named() -> None:
    p = policy()
    with pytest.raises(ValueError, match="alphabet"):
        p.encode("hello")
    with pytest.raises(ValueError, match="segment"):
        p.evaluate(some_batch().but(segment=None), {"logp"})
    with pytest.raises(ValueError, match="do not fit"):
        p.sample([torch.zeros(32, dtype=torch.int64)], [1], max_tokens=[1], generator=torch.Generator(), block=1)
    with pytest.raises(ValueError, match="unknown tail"):
        policy("keep")
    with pytest.raises(ValueError, match="temperature"):
        policy(temperature=0.0)
    with pytest.raises(ValueError, match="positions"):
        p.network(torch.zeros(1, 25, dtype=torch.int64), torch.ones(1, 25, dtype=torch.bool))
