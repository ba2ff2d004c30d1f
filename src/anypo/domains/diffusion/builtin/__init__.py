"""Models that ship: small flow models and a classifier of 8x8 digits. `pretrain.py` beside this file makes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from anypo.domains.diffusion.network import VelocityNetwork
from anypo.domains.diffusion.policy import FlowPolicy

if TYPE_CHECKING:
    from anypo.domains.diffusion.latent_flow import LatentFlow
    from anypo.domains.diffusion.patch_flow import PatchFlow
    from anypo.domains.diffusion.views import ViewFlow

FOLDER = Path(__file__).parent
SIZES = {
    "digits": (64, 10, (256, 256)),
    "gaussians": (2, 0, (128, 128)),
    "attributes": (2, 5, (128, 128)),
    "ring": (2, 8, (128, 128)),
}  # by name: D, length of the condition, hidden layers


def network(name: str, seed: int = 0) -> VelocityNetwork:
    """An untrained network of a built-in model's shape."""
    size, condition, hidden = SIZES[name]
    return VelocityNetwork(size, condition=condition, hidden=hidden, seed=seed)


def flow(name: str) -> FlowPolicy:
    """The pre-trained model `digits`, `gaussians`, `attributes` or `ring`."""
    trained = network(name)
    trained.load_state_dict({k: v.float() for k, v in load_file(FOLDER / f"{name}.safetensors").items()})
    return FlowPolicy(trained, f"builtin:{name}")


def views() -> ViewFlow:
    """The model of small camera moves around point clouds (see views.py)."""
    from anypo.domains.diffusion.views import ViewFlow

    policy = ViewFlow(name="builtin:views")
    policy.load_state_dict({k: v.float() for k, v in load_file(FOLDER / "views.safetensors").items()})
    return policy


def scenes() -> LatentFlow:
    """The model of two-object scenes whose latent actions are aligned and not yet rewarded (see latent_flow.py)."""
    from anypo.domains.diffusion.latent_flow import LatentFlow

    policy = LatentFlow(name="builtin:scenes")
    policy.load_state_dict({k: v.float() for k, v in load_file(FOLDER / "scenes.safetensors").items()})
    return policy


def patches() -> PatchFlow:
    """The transformer that draws digits patch by patch (see patch_flow.py)."""
    from anypo.domains.diffusion.patch_flow import PatchFlow

    policy = PatchFlow(name="builtin:patches")
    policy.load_state_dict({k: v.float() for k, v in load_file(FOLDER / "patches.safetensors").items()})
    return policy


class Classifier(nn.Module):
    """Logits [N,10] of digit pictures [N,64] with values in [0,1]."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, hidden), nn.Linear(hidden, 10)

    def forward(self, picture: Float[Tensor, "N 64"]) -> Float[Tensor, "N 10"]:
        return self.second(self.first(picture).relu())


def classifier() -> Classifier:
    """The classifier that scikit-learn fitted to half of its digits."""
    found = Classifier()
    found.load_state_dict({k: v.float() for k, v in load_file(FOLDER / "classifier.safetensors").items()})
    return found.requires_grad_(False).eval()
