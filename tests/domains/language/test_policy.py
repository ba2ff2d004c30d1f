"""LanguagePolicy: exact against plain forward passes of the Hugging Face model."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from anypo.batch import Batch
from anypo.domains.language import logprobs, tree
from anypo.domains.language.policy import LanguagePolicy
from anypo.policy import Loss, MissingSignal, Signals

torch.set_num_threads(1)
SIZE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(kind: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    more = {"max_position_embeddings": 64, "initializer_range": 0.2} | more
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=True, **more))
    if kind == "qwen2":  # biases on queries, keys and values
        model = Qwen2ForCausalLM(Qwen2Config(**SIZE, **more))
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(part.bias, std=0.2)
        return model
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=8, **more))
    return MistralForCausalLM(MistralConfig(**SIZE, sliding_window=4, max_position_embeddings=64, initializer_range=0.2))


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    words = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *"abcdefghij"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    made.chat_template = template
    return made


def policy(kind: str = "llama", **options: Any) -> LanguagePolicy:
    return LanguagePolicy(tiny(kind), tokenizer(), **options)


def batch_of(prompts: list[list[int]], completions: list[list[int]], **fields: Any) -> Batch:
    horizon = max(len(c) for c in completions)
    action = torch.tensor([c + [0] * (horizon - len(c)) for c in completions])
    valid = torch.arange(horizon) < torch.tensor([len(c) for c in completions])[:, None]
    fields = {"mask": valid, "logp": torch.zeros(action.shape), "group": torch.zeros(len(prompts), dtype=torch.int64)} | fields
    return Batch(action=action, context=[torch.tensor(p) for p in prompts], **fields)


GROUPS = batch_of(
    [[1, 5, 6, 7]] * 4 + [[1, 9]] * 3 + [[1, 5, 6]],
    [[8, 9, 2], [8, 9, 10, 11, 2], [], [2], [4, 5, 6, 7], [4, 5, 9, 2], [12], [7, 8, 2]],
)
TREE = batch_of(  # three levels: a trunk, two branches of it, and branches of the branches
    [[1, 5, 6, 7]] * 6,
    [[8, 9, 10, 11], [8, 9, 10, 12, 13], [8, 9, 14], [8, 9, 14, 15], [20, 21, 22, 2], [20, 21, 23]],
    parent=torch.tensor([-1, 0, 0, 2, -1, 4]),
    branch_at=torch.tensor([0, 3, 2, 3, 0, 2]),
)
LONE = batch_of([[1, 5], [1, 6, 7]], [[8, 9, 2], [4]])
BATCHES = {"groups": GROUPS, "tree": TREE, "lone": LONE}


def plain(model: Any, batch: Batch, temperature: Tensor | None = None) -> dict[str, Tensor]:
    """The same signals by one unpadded forward pass a row."""
    out: dict[str, list[Tensor]] = {"logp": [], "entropy": [], "hidden": []}
    for i, prompt in enumerate(batch.context):
        count = int(batch.attended[i].sum())
        action = batch.action[i, :count]
        result = model(input_ids=torch.cat([prompt, action])[None], output_hidden_states=True)
        logits = result.logits[0, len(prompt) - 1 : -1] if count else result.logits[0, :0]
        table = (logits / (1.0 if temperature is None else temperature[i])).log_softmax(-1)
        missing = batch.horizon - count
        out["logp"].append(torch.nn.functional.pad(table.gather(1, action[:, None])[:, 0], (0, missing)))
        out["entropy"].append(torch.nn.functional.pad(-(table.exp() * table).sum(-1), (0, missing)))
        out["hidden"].append(torch.nn.functional.pad(result.hidden_states[-1][0, len(prompt) :], (0, 0, 0, missing)))
    return {name: torch.stack(rows) for name, rows in out.items()}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("way", ["direct", "modules"])
@pytest.mark.parametrize("which", list(BATCHES))
def test_signals_and_gradients_equal_those_of_plain_rows(kind: str, way: str, which: str) -> None:
    batch, subject, model = BATCHES[which], policy(kind), tiny(kind)
    assert (subject.network.direct is None) == (kind == "mistral")
    if way == "modules":
        subject.network.direct = None
    weight = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    found = subject.evaluate(batch, {"logp", "entropy", "hidden"})
    expected = plain(model, batch)
    for name in ("logp", "entropy", "hidden"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=0)
    ((found.logp + 0.3 * found.entropy) * weight + found.hidden.sum(-1)).sum().backward()
    ((expected["logp"] + 0.3 * expected["entropy"]) * weight + expected["hidden"].sum(-1)).sum().backward()
    assert_same_gradients(gradients(subject.model), gradients(model))


@pytest.mark.parametrize("budget", [6, 10, 1024])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_chunked_backward_pass_is_exact_whatever_the_budget(kind: str, budget: int) -> None:
    subject, model = policy(kind, token_budget=budget), tiny(kind)
    pieces = list(subject.chunks(GROUPS))
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(GROUPS)))
    assert (len(pieces) == 1) == (budget == 1024)

    def loss(batch: Batch, new: Signals) -> Loss:
        return Loss(-(new.logp.sum(1).logsumexp(0)) + new.entropy.mean())  # couples all rows

    value = subject.backward(GROUPS, {"logp", "entropy"}, loss).value
    expected = plain(model, GROUPS)
    reference = loss(GROUPS, Signals(expected)).value
    reference.backward()
    torch.testing.assert_close(value, reference.detach(), atol=1e-4, rtol=1e-4)
    assert_same_gradients(gradients(subject.model), gradients(model))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", BATCHES)
def test_filler_tokens_change_nothing(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(batch: Batch, new: Signals) -> Loss:
        return Loss(-new.logp.sum() + new.entropy.mean())

    first, second, batch = policy(kind), policy(kind), BATCHES[name]
    first.backward(batch, {"logp", "entropy"}, loss)
    monkeypatch.setattr(tree, "ALIGNED_FROM", 1)
    sequences = [torch.cat([p, a[v]]) for p, a, v in zip(batch.context, batch.action, batch.attended, strict=True)]
    assert all(len(row.tokens) % tree.ALIGNMENT == 0 and row.node.max() < len(row.tokens) - 1 for row in tree.pack(sequences, 1024))
    second.backward(batch, {"logp", "entropy"}, loss)
    torch.testing.assert_close(second.observe(batch, {"logp"}).logp, first.observe(batch, {"logp"}).logp, atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients(second.model), gradients(first.model))


def test_recorded_values_give_the_same_gradient() -> None:
    def loss(batch: Batch, new: Signals) -> Loss:
        return Loss((new.logp.sum(1).exp() + new.entropy.square().sum(1)).mean())

    first, second = policy(), policy(token_budget=10)
    first.backward(GROUPS, {"logp", "entropy"}, loss)
    known = second.observe(GROUPS, {"logp", "entropy"})
    second.backward(GROUPS, {"logp", "entropy"}, loss, known)  # in several chunks, the read-out's gradient added in place
    assert_same_gradients(gradients(second.model), gradients(first.model))
    assert second.evaluate(GROUPS, {"logp"}).logp.abs().sum() > 0  # values are back afterwards


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gradients_added_in_place_are_those_of_autograd(kind: str, checkpointing: bool) -> None:
    """`backward` adds the weights' gradients to `.grad` itself, over chunks and calls; `evaluate` leaves that to autograd. Token 7 pads."""

    def loss(batch: Batch, new: Signals) -> Loss:
        return Loss((new.logp * torch.arange(1, 1 + batch.horizon)).sum())

    padded = lambda: LanguagePolicy(tiny(kind, pad_token_id=7), tokenizer(), token_budget=12, gradient_checkpointing=checkpointing)  # noqa: E731
    ours, by_autograd = padded(), padded()
    assert ours.network.direct is not None and len(list(ours.chunks(GROUPS))) > 1 and 7 in torch.cat(GROUPS.context)
    for _ in range(2):
        ours.backward(GROUPS, {"logp"}, loss)
        loss(GROUPS, by_autograd.evaluate(GROUPS, {"logp"})).value.backward()
    assert_same_gradients(gradients(ours.model), gradients(by_autograd.model))
    assert gradients(ours.model).keys() == {name for name, _ in ours.model.named_parameters()}
    unchanged = {name: g.clone() for name, g in gradients(ours.model).items()}
    apart = torch.autograd.grad(loss(GROUPS, ours.evaluate(GROUPS, {"logp"})).value, list(ours.model.parameters()))
    assert all(torch.equal(g, unchanged[name]) for name, g in gradients(ours.model).items())
    for gradient, once in zip(apart, unchanged.values(), strict=True):
        torch.testing.assert_close(2 * gradient, once, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("elements", [60, 1 << 20])
def test_the_read_out_in_chunks_equals_the_whole(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (7, 20))
    target, scale = torch.arange(7), torch.linspace(0.5, 2, 7)
    mixing = torch.randn(2, 7, generator=generator)

    def total(logp: Tensor, entropy: Tensor) -> Tensor:
        return (mixing[0] * logp + mixing[1] * entropy).sum()

    found = torch.autograd.grad(total(*logprobs.token_logprobs(hidden, weight, target, scale, want_entropy=True)), (hidden, weight))
    table = (hidden @ weight.T * scale[:, None]).log_softmax(1)
    expected = torch.autograd.grad(total(table.gather(1, target[:, None])[:, 0], -(table.exp() * table).sum(1)), (hidden, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_shared_tokens_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, seen = policy(), []
    subject.network.body.embed_tokens.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    subject.evaluate(TREE, {"logp"})
    assert seen == [4 + 3 + 1 + 1 + 2 + 1]  # prompt; 8 9 10; 12; 14; 20 21; 22: what predicts nothing is not read


def test_temperature_of_a_row_and_of_the_policy() -> None:
    heat = torch.linspace(0.5, 2.0, len(GROUPS))
    by_row = policy().evaluate(GROUPS.but(signals={"temperature": heat}), {"logp", "entropy"})
    expected = plain(tiny(), GROUPS, heat)
    torch.testing.assert_close(by_row.logp, expected["logp"], atol=1e-4, rtol=0)
    torch.testing.assert_close(by_row.entropy, expected["entropy"], atol=1e-4, rtol=0)
    whole = policy(temperature=0.7).evaluate(GROUPS, {"logp"})
    torch.testing.assert_close(whole.logp, plain(tiny(), GROUPS, torch.full((len(GROUPS),), 0.7))["logp"], atol=1e-4, rtol=0)


def test_logits_hold_the_logprobs() -> None:
    subject = policy(temperature=1.3)
    found = subject.evaluate(GROUPS, {"logp", "logits"})
    logp = found.logits.log_softmax(-1).gather(2, GROUPS.action[..., None])[..., 0] * GROUPS.mask
    torch.testing.assert_close(logp, found.logp, atol=1e-5, rtol=0)


def test_masked_out_tokens_are_read_but_not_scored() -> None:
    mask = GROUPS.mask.clone()
    mask[:, 1] = False
    some = policy().evaluate(GROUPS.but(mask=mask, valid=GROUPS.mask), {"logp"})
    torch.testing.assert_close(some.logp, plain(tiny(), GROUPS)["logp"] * mask, atol=1e-4, rtol=0)


def test_the_value_is_read_before_the_action() -> None:
    subject = policy(value_head=True)
    torch.nn.init.normal_(subject.value_head.weight)
    found = subject.evaluate(GROUPS, {"value", "hidden"})
    before = torch.cat([found.prompt_hidden[:, None], found.hidden[:, :-1]], dim=1)
    torch.testing.assert_close(found.value, subject.value_head(before)[..., 0] * GROUPS.mask, atol=1e-5, rtol=0)
    assert [g["role"] for g in subject.parameter_groups()] == ["policy", "value"]
    with pytest.raises(MissingSignal, match="'value'"):
        policy().evaluate(GROUPS, {"value"})


def test_another_hidden_layer() -> None:
    found = policy(hidden_layer=0).evaluate(GROUPS, {"hidden"})
    embedded = tiny().get_input_embeddings()(GROUPS.action) * GROUPS.mask[..., None]
    torch.testing.assert_close(found.hidden, embedded)


def test_a_model_with_a_window_says_that_it_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not policy("mistral").network.takes_trees
    assert "MistralForCausalLM cannot take tree attention" in caplog.text


def test_lora_trains_adapters_alone_and_its_snapshot_shares_the_base() -> None:
    subject = policy(lora_rank=2, value_head=True)
    assert [g["role"] for g in subject.parameter_groups()] == ["lora", "value"]
    before = subject.evaluate(GROUPS, {"logp"}).logp.detach()
    torch.testing.assert_close(before, plain(tiny(), GROUPS)["logp"], atol=1e-4, rtol=0)  # adapters begin as zero
    twin = subject.snapshot()
    optimizer = torch.optim.SGD(subject.parameter_groups()[0]["params"], lr=1.0)
    subject.evaluate(GROUPS, {"logp"}).logp.sum().backward()
    optimizer.step()
    assert (subject.evaluate(GROUPS, {"logp"}).logp - before).abs().max() > 1e-3
    torch.testing.assert_close(twin.evaluate(GROUPS, {"logp"}).logp, before)
    own, copied = dict(subject.named_parameters()), dict(twin.named_parameters())
    for name, parameter in own.items():
        assert (copied[name] is parameter) == (not parameter.requires_grad)


def test_a_snapshot_stays_behind() -> None:
    subject = policy()
    twin = subject.snapshot()
    before = twin.evaluate(GROUPS, {"logp"}).logp
    with torch.no_grad():
        for parameter in subject.parameters():
            parameter.mul_(1.5)
    assert torch.equal(twin.evaluate(GROUPS, {"logp"}).logp, before)
    assert not torch.allclose(subject.evaluate(GROUPS, {"logp"}).logp, before)


@pytest.mark.parametrize("way", ["direct", "modules"])
def test_gradient_checkpointing_changes_nothing(way: str) -> None:
    plainly, sparingly = policy(), policy(gradient_checkpointing=True)
    for subject in (plainly, sparingly):
        subject.network.direct = subject.network.direct if way == "direct" else None
        subject.evaluate(GROUPS, {"logp"}).logp.sum().backward()
    assert_same_gradients(gradients(sparingly.model), gradients(plainly.model))


def test_a_biased_head_is_read_with_its_bias() -> None:
    model = tiny()
    model.lm_head = torch.nn.Linear(32, 50)
    expected = plain(copy.deepcopy(model), GROUPS)
    found = LanguagePolicy(model, tokenizer()).evaluate(GROUPS, {"logp"})
    torch.testing.assert_close(found.logp, expected["logp"], atol=1e-4, rtol=0)


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = tiny()
    forward = model.forward
    model.forward = lambda **kwargs: type("Output", (), {"logits": forward(**kwargs).logits.tanh()})
    with pytest.raises(ValueError, match="does not read its logits linearly"):
        LanguagePolicy(model, tokenizer())


def test_text_to_tokens_and_back() -> None:
    subject = policy()
    assert subject.encode("abc").tolist() == [4, 5, 6]
    assert subject.decode(torch.tensor([4, 5, 2])).replace(" ", "") == "ab"
    with pytest.raises(ValueError, match="no chat template"):
        subject.encode([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="prompt is empty"):
        subject.encode("")
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}j{% endif %}"
    chat = LanguagePolicy(tiny(), tokenizer(template))
    assert chat.encode("ab").tolist() == chat.encode([{"role": "user", "content": "ab"}]).tolist() == [1, 4, 5, 13]
    assert chat.eos_ids == (2,)
    assert chat.context_limit == 64


def test_saved_models_load_again(tmp_path: Path) -> None:
    subject = policy(value_head=True)
    subject.save_pretrained(tmp_path)
    again = LanguagePolicy(LlamaForCausalLM.from_pretrained(tmp_path), tokenizer())
    torch.testing.assert_close(again.evaluate(GROUPS, {"logp"}).logp, subject.evaluate(GROUPS, {"logp"}).logp)
    assert (tmp_path / "value_head.safetensors").exists()


def test_bad_settings_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        policy(temperature=0.0)
    with pytest.raises(ValueError, match="lora_rank must be at least 1"):
        policy(lora_rank=0)
    with pytest.raises(ValueError, match="prompt 0 has 64 tokens"):
        policy().sample([torch.ones(64, dtype=torch.int64)], 1, max_tokens=4, generator=torch.Generator())
