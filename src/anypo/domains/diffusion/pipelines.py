"""Real image models: a Stable Diffusion 3 pipeline of the `diffusers` package as a policy, and prompts with picture rewards as a task.

The transformer is what is trained, whole or through low-rank adapters; text encoders and decoder stay frozen. The levels are those of the pipeline's
own scheduler, so evaluation draws exactly what the pipeline draws. Prompts are encoded once each. Batches stay on the CPU (latents are small); the
transformer works where the pipeline is, on a GPU where there is one.
Left out: other pipeline families (each calls its transformer in its own way), image prompts, and skipping layers for guidance.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anypo.domains.diffusion.policy import Condition, DenoisingPolicy
from anypo.domains.diffusion.tasks import DenoisingTask
from anypo.policy import Policy
from anypo.report import plots
from anypo.run import Run

ADAPTED = ("to_q", "to_k", "to_v", "to_out.0")  # the attention projections that low-rank adapters go to
ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter.json", "adapter.safetensors"
PictureReward = Callable[[Tensor, list[str]], Any]  # (pictures [N,3,H,W] in [0,1], their prompts) -> N numbers


class PipelinePolicy(DenoisingPolicy):
    """The transformer of a pipeline as a denoising policy over flattened latents. Conditions are prompts."""

    learning_rate = 3e-4
    optimizer = "adamw"
    rows_at_once = 32  # denoising steps in one pass; one whole chain at least

    def __init__(
        self, pipeline: Any, *, height: int | None = None, width: int | None = None, guidance: float = 1.0, lora_rank: int = 0
    ) -> None:
        """`height`, `width`: of the pictures in pixels; None = the model's own. `guidance`: scale of classifier-free guidance, in training as in
        evaluation; 1 = none. `lora_rank`: of low-rank adapters; 0 trains all weights of the transformer.

        Raises ValueError for a pipeline of another family.
        """
        super().__init__()
        if type(pipeline).__name__ != "StableDiffusion3Pipeline":
            raise ValueError(
                f"{type(pipeline).__name__} is not a flow-matching pipeline this adapter knows; give a StableDiffusion3Pipeline"
            )
        self.pipeline, self.guidance, self.lora_rank = pipeline, guidance, lora_rank
        self.name = str(getattr(pipeline, "name_or_path", "") or type(pipeline).__name__)
        scale, transformer = pipeline.vae_scale_factor, pipeline.transformer
        side = pipeline.default_sample_size * scale
        self.shape = (transformer.config.in_channels, (height or side) // scale, (width or side) // scale)
        for part in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
            if part is not None:
                part.requires_grad_(False).eval()
        transformer.requires_grad_(not lora_rank).eval()
        if lora_rank:
            transformer.add_adapter(_adapters(lora_rank))
        self.transformer = transformer
        self._encoded: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def size(self) -> int:
        """D, the numbers of one latent."""
        return int(np.prod(self.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinePolicy:
        """A copy with a transformer of its own; the frozen rest of the pipeline is shared."""
        twin = copy.copy(self)
        twin._modules = {"transformer": copy.deepcopy(self.transformer, memo)}
        return twin

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "N L E"], Float[Tensor, "N P"]]:
        """Embeddings of prompts, and their pooled form; each prompt passes the text encoders once."""
        for prompt in dict.fromkeys(prompts):
            if prompt not in self._encoded:
                embedded, _, pooled, _ = self.pipeline.encode_prompt(prompt, None, None, do_classifier_free_guidance=False)
                self._encoded[prompt] = (embedded[0], pooled[0])
        found = [self._encoded[prompt] for prompt in prompts]
        return torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])

    def velocity(self, x: Float[Tensor, "N T D"], level: Float[Tensor, "N T"], condition: Condition) -> Float[Tensor, "N T D"]:
        assert isinstance(condition, list)
        prompts = [prompt for prompt in condition for _ in range(x.shape[1])]
        latents, times = x.reshape(-1, *self.shape), level.flatten() * self.pipeline.scheduler.config.num_train_timesteps
        predicted = self._predict(latents, times, prompts)
        if self.guidance != 1.0:
            without = self._predict(latents, times, [""] * len(prompts))
            predicted = without + self.guidance * (predicted - without)
        return predicted.reshape(x.shape)

    def _predict(self, latents: Tensor, times: Tensor, prompts: list[str]) -> Tensor:
        device, kind = self.transformer.device, self.transformer.dtype
        embedded, pooled = self.encode(prompts)
        predicted = self.transformer(
            hidden_states=latents.to(device, kind), timestep=times.to(device), encoder_hidden_states=embedded.to(device, kind),
            pooled_projections=pooled.to(device, kind), return_dict=False,
        )[0]  # fmt: skip
        return predicted.float().to(latents.device)

    def levels(self, steps: int) -> Float[Tensor, " T+1"]:
        """The scheduler's own levels for this number of steps, down to 0."""
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.double()

    @torch.no_grad()
    def decode(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N 3 H W"]:
        """Pictures in [0,1] of final latents, one at a time through the decoder."""
        vae = self.pipeline.vae
        latents = x.reshape(-1, *self.shape).to(vae.device, vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0)
        drawn = [vae.decode(latent[None], return_dict=False)[0][0] for latent in latents]
        return (torch.stack(drawn).float() / 2 + 0.5).clamp(0, 1).to(x.device)

    def save_pretrained(self, folder: Path | str) -> None:
        """The whole pipeline, or with adapters their weights and where the pipeline they belong to came from."""
        folder = Path(folder)
        if not self.lora_rank:
            self.pipeline.save_pretrained(folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.transformer.save_lora_adapter(folder, weight_name=ADAPTER_WEIGHTS)
        (folder / ADAPTER_FILE).write_text(json.dumps({"base": self.name, "lora_rank": self.lora_rank}))


def _adapters(rank: int) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError('lora_rank needs peft; pip install "anypo[lora]"') from error
    return LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(ADAPTED))


def load(model: str, *, dtype: str = "float32", **options: Any) -> PipelinePolicy:
    """A pipeline by folder or hub name, or adapters that a run saved (or the run's folder), in `dtype`: float32 or bfloat16.

    Raises ValueError when there is neither, or for another dtype.
    """
    try:
        from diffusers import DiffusionPipeline
    except ImportError as error:
        raise ImportError('image pipelines need diffusers; pip install "anypo[diffusion]"') from error
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is float32 or bfloat16, not '{dtype}'")
    folder = Path(model) / "model" if (Path(model) / "model").is_dir() else Path(model)
    adapter = json.loads((folder / ADAPTER_FILE).read_text()) if (folder / ADAPTER_FILE).exists() else None
    source = adapter["base"] if adapter else str(folder)
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            source, torch_dtype=getattr(torch, dtype), **_absent(Path(source) / "model_index.json")
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"there is no diffusers pipeline at {source}; give its folder or its hub name ({str(error).splitlines()[0]})"
        ) from error
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    if not adapter:
        return PipelinePolicy(pipeline, **options)
    policy = PipelinePolicy(pipeline, **options | {"lora_rank": adapter["lora_rank"]})
    policy.transformer.delete_adapters("default")
    policy.transformer.load_lora_adapter(str(folder), weight_name=ADAPTER_WEIGHTS, adapter_name="default", prefix=None)
    return policy


def _absent(index: Path) -> dict[str, None]:
    """The parts that a saved pipeline went without (a text encoder, usually); diffusers wants to be told so."""
    parts = json.loads(index.read_text()) if index.exists() else {}
    return {name: None for name, kind in parts.items() if kind == [None, None]}


class PicturePrompts(DenoisingTask):
    """Pictures by prompt, with a reward of the decoded picture."""

    prompts_per_step = 4

    def __init__(
        self, prompts: Sequence[str], policy: PipelinePolicy, reward: str | PictureReward = "compressibility", *, name: str = "pictures",
        denoising_steps: int = 10, noise: float = 0.7, evaluation_steps: int = 40, evaluation_samples: int = 32,
    ) -> None:  # fmt: skip
        """`policy` gives the levels and the decoder. `reward`: a name from PICTURE_REWARDS, "package.module:function", or a function (pictures
        [N,3,H,W] in [0,1], prompts) -> N numbers. Raises ValueError for an unknown reward, or when there are no prompts."""
        if not prompts:
            raise ValueError("there are no prompts; give at least one")
        self._levels, self._decode = policy.levels, policy.decode
        super().__init__(
            denoising_steps=denoising_steps, noise=noise, evaluation_steps=evaluation_steps, evaluation_samples=evaluation_samples
        )  # fmt: skip
        self.texts, self.name, self.size, self.count = list(prompts), name, policy.size, len(prompts)
        self._reward = picture_reward(reward) if isinstance(reward, str) else reward
        self.reward = self._score

    def levels(self, steps: int) -> Tensor:
        return self._levels(steps)

    def condition(self, prompt: Tensor) -> list[str]:
        return [self.texts[i] for i in prompt.tolist()]

    def _score(self, x: Tensor, prompt: Tensor) -> Tensor:
        return torch.as_tensor(self._reward(self._decode(x), self.condition(prompt)), dtype=torch.float32)

    def figures(self, run: Run) -> list[tuple[str, str]]:
        """Pictures of up to six prompts, from the same noise before and after."""
        shown = torch.arange(min(self.count, 6))
        drawn = self._decode(self.samples(run.policy, shown)).permute(0, 2, 3, 1).numpy()  # type: ignore[arg-type]
        return [("Pictures drawn for the prompts", plots.image_grid([drawn], column_names=self.condition(shown)))]  # type: ignore[list-item]


def brightness(pictures: Float[Tensor, "N 3 H W"], prompts: list[str]) -> Tensor:
    """Mean of all pixels, in [0,1]."""
    return pictures.mean((1, 2, 3))


def compressibility(pictures: Float[Tensor, "N 3 H W"], prompts: list[str]) -> list[float]:
    """Minus the kilobytes of the picture as JPEG at quality 95 (arXiv:2305.13301, section 5.1)."""
    from PIL import Image

    sizes = []
    for picture in (pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, format="JPEG", quality=95)
        sizes.append(-buffer.tell() / 1000)
    return sizes


PICTURE_REWARDS: dict[str, PictureReward] = {"brightness": brightness, "compressibility": compressibility}


def picture_reward(name: str) -> PictureReward:
    """A reward by name or as "package.module:function". Raises ValueError when there is no such function."""
    if name in PICTURE_REWARDS:
        return PICTURE_REWARDS[name]
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(PICTURE_REWARDS)
        raise ValueError(f"there is no picture reward '{name}'; there are {known}, or give package.module:function") from error


def build_pictures(prompts: str, model: str | None, **options: Any) -> tuple[Policy, DenoisingTask]:
    """Policy and task for a file with one prompt a line. `options`: `guidance`, `lora_rank`, `height`, `width`, `dtype` of the policy, the rest of the task.

    Raises ValueError without a model, for a file that is not there, or for an unknown option.
    """
    if model is None:
        raise ValueError("pictures need a model; name a Stable Diffusion 3 pipeline (a folder or a hub name) with --model")
    file = Path(prompts)
    if not file.is_file():
        raise ValueError(f"there is no file {file}; pictures:<file> names a text file with one prompt a line")
    texts = [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    own = {name: options.pop(name) for name in ("guidance", "lora_rank", "height", "width", "dtype") if name in options}
    policy = load(model, **own)
    try:
        return policy, PicturePrompts(texts, policy, name=f"pictures:{file.name}", **options)
    except TypeError as error:
        raise ValueError(f"pictures take no such option ({error})") from error
