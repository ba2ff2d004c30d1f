"""Makes the models that ship: `python -m anypo.domains.diffusion.builtin.pretrain` (about eight minutes; needs scikit-learn for its digits).

Flow matching: x_s = (1-s) x_data + s eps at a random level, the network regresses on eps - x_data; what is kept is a running average of the weights.
The weights are stored in half precision, which the samples do not notice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anypo.domains.diffusion.alignment import align
from anypo.domains.diffusion.attributes import AttributeModes
from anypo.domains.diffusion.builtin import FOLDER, network
from anypo.domains.diffusion.latent_flow import LatentFlow
from anypo.domains.diffusion.patch_flow import PatchFlow
from anypo.domains.diffusion.ring import Ring
from anypo.domains.diffusion.scenes import pairs
from anypo.domains.diffusion.tasks import Gaussians
from anypo.domains.diffusion.views import ViewFlow, Views

Data = Callable[[int, torch.Generator], tuple[Tensor, Tensor | None]]  # (count, generator) -> points [N,D], conditions [N,C] or None


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 digits: pictures [N,64] in [-1,1], and which digit each is [N]."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    return torch.tensor(pictures / 8 - 1, dtype=torch.float32), torch.tensor(labels)


def digit_batches() -> Data:
    """Random digits with their class, each with a little noise between its 17 grey levels."""
    pictures, labels = digits()

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(pictures), (count,), generator=generator)
        noise = 0.03 * torch.randn(count, 64, generator=generator)
        return pictures[rows] + noise, nn.functional.one_hot(labels[rows], 10).float()

    return draw


def flow_matching_loss(model: Callable[..., Tensor], data: Tensor, condition: Tensor | None, generator: torch.Generator) -> Tensor:
    """Mean squared error of the velocity at one random level a point."""
    level = torch.rand(len(data), 1, generator=generator)
    noise = torch.randn(data.shape, generator=generator)
    predicted = model((1 - level) * data + level * noise, level[:, 0], condition)
    return ((predicted - (noise - data)) ** 2).mean()


def train_flow(
    name: str, draw: Data, steps: int, batch: int = 256, rate: float = 2e-3, seed: int = 0, model: nn.Module | None = None
) -> nn.Module:
    """A flow model from nothing (`model`: another than the built-in network of this name); the learning rate falls to 0 along a cosine."""
    generator = torch.Generator().manual_seed(seed)
    model = network(name, seed) if model is None else model
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        loss = flow_matching_loss(model, *draw(batch, generator), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        if step % 1000 == 999:
            print(f"{name}: step {step + 1}, loss {float(loss.detach()):.4f}", flush=True)
    return average.module


def small_moves() -> ViewFlow:
    """The model of camera moves up to 20 degrees, trained so briefly that chains of moves show its mistakes."""
    trained = train_flow("views", Views.data, 1_000, batch=480, model=ViewFlow())
    assert isinstance(trained, ViewFlow)
    return trained.extend()


def train_classifier() -> dict[str, Tensor]:
    """scikit-learn's perceptron on every other digit, with its accuracy on the rest printed."""
    from sklearn.neural_network import MLPClassifier

    pictures, labels = (part.numpy() for part in digits())
    pictures = (pictures + 1) / 2
    fitted = MLPClassifier((64,), alpha=0.3, max_iter=400, random_state=0).fit(pictures[::2], labels[::2])
    print(f"classifier: accuracy {fitted.score(pictures[1::2], labels[1::2]):.3f} on the other half")
    layers = zip(("first", "second"), fitted.coefs_, fitted.intercepts_, strict=True)
    return {
        f"{name}.{part}": torch.tensor(value)
        for name, weight, bias in layers
        for part, value in (("weight", weight.T.copy()), ("bias", bias))
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    models: dict[str, dict[str, Tensor]] = {
        "classifier": train_classifier(),
        "gaussians": dict(train_flow("gaussians", lambda n, g: (Gaussians.data(n, g), None), 12_000, batch=1024).state_dict()),
        "digits": dict(train_flow("digits", digit_batches(), 12_000).state_dict()),
        "attributes": dict(train_flow("attributes", AttributeModes.data, 8_000, batch=512).state_dict()),
        "patches": dict(train_flow("patches", digit_batches(), 1_000, batch=128, model=PatchFlow()).state_dict()),
        "ring": dict(train_flow("ring", Ring.data, 5_000, batch=512).state_dict()),
        "views": dict(small_moves().state_dict()),
        "scenes": dict(align(LatentFlow(), pairs, 2_500).state_dict()),
    }
    for name, weights in models.items():
        save_file({k: v.to(torch.float16).contiguous() for k, v in weights.items()}, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
