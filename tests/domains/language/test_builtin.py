"""The shipped model: loads without a network, is small, can write every problem, and is as good as its purpose wants, no better."""

from __future__ import annotations

import re
import socket

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from anypo.domains.language.builtin import PATH
from anypo.domains.language.builtin.pretrain import (
    KIND_SHARES,
    SHARES,
    accuracy,
    build_model,
    build_tokenizer,
    corpus_rows,
    isolating_mask,
    learning_rate,
    noisy_completion,
    weighted_loss,
    wrong_completion,
)
from anypo.domains.language.problems import PROBLEMS, held_out_problems, is_held_out, training_problems


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(PATH, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(PATH, local_files_only=True)


def test_the_model_is_a_small_llama(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert 600_000 <= sum(p.numel() for p in model.parameters()) <= 1_200_000
    assert model.config.max_position_embeddings >= 256
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert sum(file.stat().st_size for file in PATH.iterdir()) <= 4 * 2**20
    assert not [file for file in PATH.iterdir() if file.suffix not in (".json", ".safetensors")]


def test_it_loads_with_the_network_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("loading the built-in model opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    AutoTokenizer.from_pretrained(PATH)
    AutoModelForCausalLM.from_pretrained(PATH)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_tokenizer_round_trips_every_problem(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    kind = PROBLEMS[name]
    for problem in training_problems(kind, 100, np.random.default_rng(0)):
        for text in (problem.prompt, kind.solve(problem)):
            ids = tokenizer(text)["input_ids"]
            assert ids[0] == tokenizer.bos_token_id and tokenizer.unk_token_id not in ids
            assert len(ids) == len(text) + 1  # a token a character, digits too
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_tokenizer_keeps_white_space_and_marks_the_unknown(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "  two  lines\n it 's , ok . \n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer("é", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "1+1="


def test_the_shipped_files_are_what_the_script_builds(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
    shapes = {name: parameter.shape for name, parameter in build_model(tokenizer).named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes


def test_arithmetic_is_known_but_noisy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    assert 0.2 <= accuracy(model, tokenizer, "arithmetic", count=200) <= 0.55


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "arithmetic"])
def test_every_other_kind_is_begun_and_not_finished(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    torch.manual_seed(0)
    assert 0.03 <= accuracy(model, tokenizer, name, count=200) <= 0.65


def test_the_model_can_do_more_than_it_shows(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Right digits in the right form are the likeliest ones: that is what reinforcement learning brings out."""
    torch.manual_seed(0)
    assert accuracy(model, tokenizer, "arithmetic", count=200, temperature=0.05) > accuracy(model, tokenizer, "arithmetic", count=200) + 0.2


def test_the_corpus_has_no_held_out_prompt_and_its_stated_noise() -> None:
    assert sum(SHARES.values()) == pytest.approx(1) and sum(KIND_SHARES.values()) == pytest.approx(1)
    assert set(KIND_SHARES) == set(PROBLEMS)
    tokenizer = build_tokenizer()
    ids, weights = corpus_rows(tokenizer, rows=64, length=128, noisy=True, rng=np.random.default_rng(0))
    assert ids.shape == weights.shape == (64, 128)
    text = tokenizer.decode(ids.flatten())
    prompts = [re.split("(?<=[=:])", example)[0] for example in text.split("<bos>")[1:-1]]  # a prompt ends at its first = or :
    assert len(prompts) > 200 and not any(is_held_out(prompt) for prompt in prompts)

    rng = np.random.default_rng(0)
    kind, problems = PROBLEMS["arithmetic"], training_problems("arithmetic", 2000, rng)
    right = np.mean([kind.check(noisy_completion(kind, problem, rng), **problem.columns) for problem in problems])
    assert right == pytest.approx(SHARES["right"], abs=0.04)


@pytest.mark.parametrize("name", PROBLEMS)
def test_wrong_completions_are_wrong(name: str) -> None:
    kind, rng = PROBLEMS[name], np.random.default_rng(0)
    for problem in held_out_problems(kind, 50):
        wrong = wrong_completion(kind, problem, rng)
        assert kind.check(wrong, **problem.columns) == 0.0 and len(wrong) == len(kind.solve(problem))


def test_the_loss_is_the_weighted_mean_of_single_tokens(model: LlamaForCausalLM) -> None:
    ids = torch.randint(4, 99, (2, 9), generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(2, 9)
    weights[0, 3], weights[1, 8] = 1.0, 3.0
    with torch.no_grad():
        log_probability = model(input_ids=ids).logits.log_softmax(-1)
        expected = -(log_probability[0, 2, ids[0, 3]] + 3 * log_probability[1, 7, ids[1, 8]]) / 4
        assert weighted_loss(model, ids, weights) == pytest.approx(expected.item(), rel=1e-4)


def test_an_isolated_example_does_not_see_its_neighbours(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    alone = tokenizer("47+38=85<eos>", return_tensors="pt")["input_ids"]
    row = torch.cat([tokenizer("12+34=46", return_tensors="pt")["input_ids"], alone], dim=1)
    with torch.no_grad():
        masked = model(input_ids=row, attention_mask=isolating_mask(row, tokenizer.bos_token_id)).logits[:, -alone.shape[1] :]
        assert torch.allclose(masked, model(input_ids=alone).logits, atol=1e-4)
        assert not torch.allclose(model(input_ids=row).logits[:, -alone.shape[1] :], masked, atol=1e-2)


def test_the_textbook_stage_has_only_right_examples() -> None:
    tokenizer = build_tokenizer()
    ids, _ = corpus_rows(tokenizer, rows=8, length=128, noisy=False, rng=np.random.default_rng(0))
    examples = [text.removesuffix("<eos>") for text in tokenizer.decode(ids.flatten()).split("<bos>")[1:-1]]
    sums = [text.split("=") for text in examples if "=" in text]
    assert len(sums) > 10
    for prompt, answer in sums:
        a, sign, b = prompt[:2], prompt[2], prompt[3:]
        assert int(answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(share, peak=1.0) for share in np.linspace(0, 1, 101)]
    assert rates[0] == 0 and rates[3] == pytest.approx(1) and rates[-1] == pytest.approx(0.05)
    assert rates[3:] == sorted(rates[3:], reverse=True)
