"""Sampler: what it draws has the right distribution, and what it records is what the policy evaluates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from anypo.batch import Batch
from anypo.domains.language import cache, decoder, sampler
from anypo.domains.language.policy import LanguagePolicy
from anypo.domains.language.sampler import Samples, draw_by_weight, nucleus, sample

torch.set_num_threads(1)
SIZE = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPTS = [torch.tensor(p) for p in ([1, 5, 6, 7, 8], [1, 9], [1, 5, 6], [1, 9])]


def tiny(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZE, max_position_embeddings=64, initializer_range=0.3)).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=8, max_position_embeddings=64, initializer_range=0.3)).eval()
    return MistralForCausalLM(MistralConfig(**SIZE, sliding_window=4, max_position_embeddings=64, initializer_range=0.3)).eval()


class NoTokenizer:
    """A policy that is never asked for text."""

    chat_template, eos_token_id, pad_token_id, model_max_length = None, 2, 0, 64


def draw(model: Any, seed: int = 0, **settings: Any) -> Samples:
    defaults = {"samples": [3, 2, 4, 1], "max_tokens": 12, "eos_ids": (2, 3, 4), "want_entropy": True}
    return sample(model, PROMPTS, **(defaults | settings), generator=torch.Generator().manual_seed(seed))


def as_batch(found: Samples, temperature: Tensor) -> Batch:
    context = [PROMPTS[i] for i in found.source.tolist()]
    return Batch(found.tokens, found.valid, found.logp, found.source, context, signals={"temperature": temperature})


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_recorded_logprobs_are_those_the_policy_evaluates(kind: str) -> None:
    policy = LanguagePolicy(tiny(kind), NoTokenizer())
    heats = [1.0, 0.7, 1.4, 1.0]
    found = draw(policy.network, temperature=heats)
    assert found.source.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    lengths = found.valid.sum(1)
    assert lengths.min() < lengths.max(), "the seed must give rows that end early, else compaction is not tested"
    signals = policy.evaluate(as_batch(found, torch.tensor(heats)[found.source]), {"logp", "entropy"})
    torch.testing.assert_close(signals.logp.detach(), found.logp, atol=1e-4, rtol=0)
    torch.testing.assert_close(signals.entropy.detach(), found.entropy, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("samples", [[3, 2, 4, 1], [4, 4, 4, 4], [1, 1, 9, 0]])
def test_a_prompt_kept_once_for_its_samples_changes_nothing(kind: str, samples: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(kind)
    apart = draw(model, samples=samples)
    assert apart.finished.any() and not apart.finished.all(), "rows must end early, and prompts run out of rows"
    used: list[int] = []
    attend = cache.Shared.attend
    monkeypatch.setattr(cache.Shared, "attend", lambda self, *a: used.append(self.asked) or attend(self, *a))
    monkeypatch.setattr(cache, "SHARED_BYTES", 0)
    together = draw(model, samples=samples)
    assert used and (min(used) < max(used) or samples == [4, 4, 4, 4])
    assert torch.equal(apart.tokens, together.tokens)
    assert torch.equal(apart.valid, together.valid)
    torch.testing.assert_close(together.logp, apart.logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(together.entropy, apart.entropy, atol=1e-5, rtol=0)


def test_prompts_are_kept_once_where_that_spares_much() -> None:
    network = sampler.Network(tiny())
    assert network.direct is not None
    made_of_calls = decoder.Decoder(network.direct, network.head, 16)
    long, short = torch.tensor([4096, 4096]), torch.tensor([10, 10])
    assert cache.Shared.pays(network, made_of_calls, long, rows=16)
    assert not cache.Shared.pays(network, made_of_calls, long, rows=2)
    assert not cache.Shared.pays(network, made_of_calls, short, rows=16)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_rows_end_with_their_end_token_and_not_after(kind: str) -> None:
    found = draw(tiny(kind))
    for tokens, valid, finished in zip(found.tokens, found.valid, found.finished, strict=True):
        count = int(valid.sum())
        assert valid[:count].all()
        is_end = torch.isin(tokens[:count], torch.tensor([2, 3, 4]))
        assert not is_end[:-1].any()
        assert bool(is_end[-1]) == bool(finished)
        assert finished or count == 12
        assert (tokens[count:] == 0).all()
    assert (found.logp[~found.valid] == 0).all()


def test_equal_generators_give_equal_samples() -> None:
    model = tiny()
    first, again, other = draw(model, 5), draw(model, 5), draw(model, 6)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logp, again.logp)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_greedy_decoding_equals_that_of_transformers(kind: str) -> None:
    model = tiny(kind)
    found = draw(model, samples=1, greedy=True, max_tokens=10, eos_ids=())
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        expected = model.generate(prompt[None], max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert tokens.tolist() == expected[0, len(prompt) :].tolist()


def test_frequencies_follow_the_tempered_distribution() -> None:
    model, prompt = tiny(), PROMPTS[0]
    found = sample(model, [prompt], 20_000, max_tokens=1, temperature=2.0, generator=torch.Generator().manual_seed(0), eos_ids=())
    expected = (model(prompt[None]).logits[0, -1] / 2.0).softmax(0).detach()
    observed = torch.bincount(found.tokens[:, 0], minlength=30) / 20_000
    assert (observed - expected).abs().max() < 4 * (0.25 / 20_000) ** 0.5


def test_a_prompt_is_read_once_for_all_its_samples() -> None:
    network = sampler.Network(tiny())
    assert network.direct is not None
    sizes: list[int] = []
    network.body.embed_tokens.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    sample(network, PROMPTS, 4, max_tokens=3, generator=torch.Generator(), eos_ids=())
    assert sizes == [6, 16, 16]  # 1 5 6 7 8 and 9: common beginnings are read once as well


def test_finished_rows_are_not_computed() -> None:
    network, sizes = sampler.Network(tiny()), []
    assert network.direct is not None
    network.body.embed_tokens.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    found = draw(network)
    running = [int(found.valid[:, t].sum()) for t in range(1, found.valid.shape[1])]
    assert sizes[1:] == running
    assert running[-1] < running[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_direct_step_and_the_model_itself_draw_the_same(kind: str) -> None:
    direct, by_modules = sampler.Network(tiny(kind)), sampler.Network(tiny(kind))
    by_modules.direct = None
    assert direct.direct is not None
    first, second = draw(direct), draw(by_modules)
    assert torch.equal(first.tokens, second.tokens)
    torch.testing.assert_close(first.logp, second.logp, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_with_reordered_weights_are_the_plain_ones(
    bias: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    weight, shift, x, other = (torch.randn(*shape, generator=g).to(dtype) for shape in ((48, 32), (48,), (5, 32), (5, 48)))
    plain = decoder.Product(weight, shift if bias else None, decoder.Layout([weight], 5, 16))  # too small to be worth it
    monkeypatch.setattr(decoder, "SMALL", 1)
    packed = decoder.Product(weight, shift if bias else None, decoder.Layout([weight], 5, 16))
    assert packed.packed and not plain.packed
    for mine, theirs in ((packed(x), plain(x)), (packed.silu(x), plain.silu(x)), (packed.times(x, other.clone()), plain.times(x, other.clone())),
                         (packed.plus(x, other.clone()), plain.plus(x, other.clone()))):  # fmt: skip
        torch.testing.assert_close(mine, theirs, atol=tolerance * float(theirs.abs().max()), rtol=tolerance)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_reordered_weights_draw_what_plain_ones_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = draw(tiny(kind))
    monkeypatch.setattr(decoder, "SMALL", 1)
    packed = draw(tiny(kind))
    assert torch.equal(packed.tokens, plain.tokens)
    torch.testing.assert_close(packed.logp, plain.logp, atol=1e-5, rtol=1e-5)


def test_adapters_are_sampled_with() -> None:
    policy = LanguagePolicy(tiny(), NoTokenizer(), lora_rank=2)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    assert policy.network.direct is None
    found = draw(policy.network)
    signals = policy.evaluate(as_batch(found, torch.ones(10)), {"logp"})
    torch.testing.assert_close(signals.logp.detach(), found.logp, atol=1e-4, rtol=0)
    assert not torch.equal(found.logp, draw(tiny()).logp[:, : found.logp.shape[1]])


def test_limits_and_stops_of_single_rows() -> None:
    model = tiny()
    found = draw(model, max_tokens=[0, 1, 5, 3], eos_ids=())
    assert found.valid.sum(1).tolist() == [0, 0, 0, 1, 1, 5, 5, 5, 5, 3]
    assert not found.finished.any()
    stopped = draw(model, eos_ids=(), stop=lambda tokens, source: tokens.shape[1] == 2 + source)
    assert stopped.valid.sum(1).tolist() == [2, 2, 2, 3, 3, 4, 4, 4, 4, 5]
    assert stopped.finished.all()
    assert draw(model, max_tokens=0).tokens.shape == (10, 0)


def test_waves_cover_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CACHE_BYTES", 40_000)
    policy = LanguagePolicy(tiny(), NoTokenizer())
    found = draw(policy.network, samples=5)
    assert found.valid[:, 0].all()
    signals = policy.evaluate(as_batch(found, torch.ones(20)), {"logp"})
    torch.testing.assert_close(signals.logp.detach(), found.logp, atol=1e-4, rtol=0)


def test_continuing_a_greedy_prefix_gives_the_same_tokens() -> None:
    model = tiny()
    whole = draw(model, samples=1, greedy=True, eos_ids=(), max_tokens=8)
    prefixes = [torch.cat([p, t[:5]]) for p, t in zip(PROMPTS, whole.tokens, strict=True)]
    rest = sample(model, prefixes, 1, max_tokens=3, generator=torch.Generator(), eos_ids=(), greedy=True)
    assert torch.equal(rest.tokens, whole.tokens[:, 5:])
    torch.testing.assert_close(rest.logp, whole.logp[:, 5:], atol=1e-4, rtol=0)


def test_inversion_over_a_large_vocabulary() -> None:
    weight = torch.zeros(3, 700)
    weight[:, [3, 299, 699]] = torch.tensor([1.0, 2.0, 1.0])
    uniform = torch.tensor([0.0, 0.5, 0.999999], dtype=torch.float64)
    assert draw_by_weight(weight, uniform).tolist() == [3, 299, 699]
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    counts = torch.bincount(draw_by_weight(weight[:1].expand(4000, -1), grid), minlength=700)
    assert counts[[3, 299, 699]].tolist() == [1000, 2000, 1000]


def test_nucleus_keeps_the_smallest_set_that_is_heavy_enough() -> None:
    weight = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    assert nucleus(weight, 0.6).tolist() == [[0.0, 4.0, 3.0, 0.0]]
    assert nucleus(weight, 0.7).tolist() == [[0.0, 4.0, 3.0, 0.0]]
    assert nucleus(weight, 0.71).tolist() == [[0.0, 4.0, 3.0, 2.0]]
    assert nucleus(weight, 0.01).tolist() == [[0.0, 4.0, 0.0, 0.0]]
    found = draw(tiny(), top_p=1e-6, eos_ids=())
    assert torch.equal(found.tokens, draw(tiny(), greedy=True, eos_ids=()).tokens)


def test_bad_input_is_one_sentence() -> None:
    model, generator = tiny(), torch.Generator()
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        sample(model, [torch.tensor([], dtype=torch.int64)], 1, max_tokens=1, generator=generator, eos_ids=())
    with pytest.raises(ValueError, match="temperatures must be positive"):
        draw(model, temperature=0.0)
    with pytest.raises(ValueError, match="top_p"):
        draw(model, top_p=0.0)
