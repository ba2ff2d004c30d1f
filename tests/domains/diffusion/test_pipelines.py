"""The adapter of diffusers pipelines, on a tiny Stable Diffusion 3 with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("PIL")

from anypo import api
from anypo.domains.diffusion import setup
from anypo.domains.diffusion.pipelines import PicturePrompts, PipelinePolicy, brightness, compressibility, load, picture_reward
from anypo.domains.diffusion.sample import sample
from anypo.loops.on_policy import train
from anypo.methods.diffusion.flow_grpo import METHOD
from anypo.run import Run

PROMPTS = ["a cat", "a red dog"]
QUICK: dict[str, Any] = {"denoising_steps": 3, "evaluation_steps": 3, "evaluation_samples": 4}


def tiny_pipeline() -> Any:
    """41 thousand random weights; the tokenizers know single letters."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    text = CLIPTextConfig(
        vocab_size=54, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
        projection_dim=32, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32,
            joint_attention_dim=32, pooled_projection_dim=64, out_channels=4, pos_embed_max_size=8,
        )  # fmt: skip
        vae = diffusers.AutoencoderKL(
            in_channels=3, out_channels=3, block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, latent_channels=4, sample_size=8,
            use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5,
        )  # fmt: skip
        encoders = [CLIPTextModelWithProjection(text) for _ in range(2)]
    tokenizers = [CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=16) for _ in range(2)]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer, scheduler, vae, encoders[0], tokenizers[0], encoders[1], tokenizers[1], None, None
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_evaluation_draws_what_the_pipeline_draws(guidance: float) -> None:
    policy = PipelinePolicy(tiny_pipeline(), guidance=guidance)
    task = PicturePrompts(PROMPTS, policy, "brightness", **QUICK)
    start = torch.randn(2, policy.size, generator=torch.Generator().manual_seed(0))
    mine = policy.decode(sample(policy, start, PROMPTS, task.evaluation_schedule)[:, -1])
    theirs = policy.pipeline(
        PROMPTS, latents=start.view(2, 4, 8, 8), num_inference_steps=3, guidance_scale=guidance, output_type="pt"
    ).images
    assert float(theirs.std()) > 0.05
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_it_trains_the_transformer_alone() -> None:
    policy = PipelinePolicy(tiny_pipeline())
    before = {name: value.clone() for name, value in policy.pipeline.vae.state_dict().items()}
    task = PicturePrompts(PROMPTS, policy, "brightness", **QUICK)
    run = Run(METHOD.set("rollout.steps", 3).set("update.learning_rate", 1e-2), policy, task, steps=4, seed=0)
    policy.rows_at_once = 1000
    start = task.evaluate(run)["reward"]
    train(run)
    assert task.evaluate(run)["reward"] > start
    assert all(torch.equal(value, before[name]) for name, value in policy.pipeline.vae.state_dict().items())
    assert run.history[0]["kl"] >= 0 and run.policies["reference"].pipeline is policy.pipeline
    assert run.policies["reference"].transformer is not policy.transformer


def test_a_collected_batch_replays_and_splits() -> None:
    policy = PipelinePolicy(tiny_pipeline())
    task = PicturePrompts(PROMPTS, policy, "brightness", **QUICK)
    run = Run(METHOD, policy, task, steps=1)
    batch = run.collect([p.but(samples=2) for p in task.prompts(2, run.rng)])
    assert batch.action.shape == (4, 3, 256) and batch.signals["condition"] == task.condition(batch.signals["prompt_id"])
    policy.rows_at_once = 3
    assert len(list(policy.chunks(batch))) == 4
    torch.testing.assert_close(policy.observe(batch, {"logp"}).logp, batch.logp, rtol=1e-3, atol=1e-2)


def test_adapters_train_save_and_load(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n\na red dog\n")
    out = tmp_path / "run"
    result = api.train(
        "flow_grpo", task=f"pictures:{prompts}", model=str(saved), steps=2, out=out, lora_rank=2, reward="brightness",
        settings={"select.group_size": 4, "rollout.steps": 3}, **QUICK,
    )  # fmt: skip
    policy = result.run.policy  # type: ignore[union-attr]
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    again = load(str(out))
    start = torch.randn(1, policy.size, generator=torch.Generator().manual_seed(0))
    schedule = result.run.task.evaluation_schedule  # type: ignore[union-attr]
    torch.testing.assert_close(sample(again, start, ["a cat"], schedule), sample(policy, start, ["a cat"], schedule))
    assert not torch.allclose(sample(load(str(saved)), start, ["a cat"], schedule), sample(again, start, ["a cat"], schedule), atol=1e-5)
    assert "Pictures drawn for the prompts" in (out / "report.html").read_text()


def test_a_whole_pipeline_is_saved_and_evaluated(saved: Path, tmp_path: Path) -> None:
    policy = load(str(saved))
    policy.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat")
    found = setup.evaluate(str(tmp_path), f"pictures:{prompts}", samples=3, reward="brightness", evaluation_steps=2)
    assert 0 <= found["reward"]["low"] <= found["reward"]["value"] <= found["reward"]["high"] <= 1


def test_half_precision_trains(saved: Path) -> None:
    policy = load(str(saved), dtype="bfloat16", lora_rank=2)
    task = PicturePrompts(PROMPTS, policy, "brightness", **QUICK)
    run = Run(METHOD.set("rollout.steps", 3).set("select.group_size", 4), policy, task, steps=1)
    train(run)
    assert torch.isfinite(torch.tensor([run.history[0]["loss"], run.history[0]["grad_norm"]])).all() and run.history[0]["grad_norm"] > 0


def test_rewards_of_pictures() -> None:
    black, noise = torch.zeros(1, 3, 32, 32), torch.rand(1, 3, 32, 32)
    assert float(brightness(1 - black, ["x"])) == 1
    assert 0 > compressibility(black, ["x"])[0] > compressibility(noise, ["x"])[0]
    assert picture_reward("anypo.domains.diffusion.pipelines:brightness") is brightness


def test_bad_input_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    cases: list[tuple[str, str | None, dict[str, Any], str]] = [
        ("prompts.txt", None, {}, "name a Stable Diffusion 3 pipeline"),
        ("none.txt", str(saved), {}, "there is no file"),
        ("empty.txt", str(saved), {}, "no prompts"),
        ("prompts.txt", str(tmp_path), {}, "no diffusers pipeline"),
        ("prompts.txt", str(saved), {"reward": "beauty"}, "no picture reward 'beauty'"),
        ("prompts.txt", str(saved), {"colour": 1}, "take no such option"),
        ("prompts.txt", str(saved), {"dtype": "int8"}, "float32 or bfloat16"),
    ]
    for file, model, options, message in cases:
        with pytest.raises(ValueError, match=message):
            setup.build(f"pictures:{tmp_path / file}", model, **options)
    with pytest.raises(ValueError, match="not a flow-matching pipeline"):
        PipelinePolicy(object())
