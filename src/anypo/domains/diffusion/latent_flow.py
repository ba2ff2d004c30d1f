"""A flow that thinks before it draws: a short sequence of continuous latent actions with fixed roles, added to the hidden state that conditions it.

The words of a prompt are encoded as c [H]. Slots have the roles plan, draft and then pairs of diagnose and refine; slot j draws z_j [d] from a
Gaussian that sees c and the latents before it, and after a refine the policy halts with a probability of its own (at the last slot in any case).
The flow is conditioned on c plus the gated latents. The variational stage that gives the roles their meaning is in
alignment.py. Source: LAC (May 2026); all equations [reconstructed], as its method file says.
A joint trajectory is J latent actions and T flow steps, padded to the wider of d and D numbers. Left out: text tokens, intermediate images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import HALF_LOG_TWO_PI, Schedule, gaussian_logp, reduced
from anypo.domains.diffusion.network import VelocityNetwork
from anypo.domains.diffusion.policy import Condition, DenoisingPolicy
from anypo.policy import Signals
from anypo.seams import regularize

ROLES = ("plan", "draft", "diagnose", "refine")
SLOTS = (0, 1, 2, 3, 2, 3)  # the role of each slot
REFINE = 3
Generator = torch.Generator


class Latents(NamedTuple):
    """What was thought: latents (0 behind the halt), which slots were used, and where the policy halted."""

    z: Float[Tensor, "N J d"]
    mask: Bool[Tensor, "N J"]
    halted: Int[Tensor, "N J"]  # 1 halted here, 0 went on, -1 no decision


def latent_logp(
    z: Float[Tensor, "N J d"], mu: Tensor, log_std: Tensor, lat_mask: Tensor, halt_prob: Float[Tensor, "N J"], halted: Int[Tensor, "N J"],
    reduce: str = "sum",
) -> Float[Tensor, "N J"]:  # fmt: skip
    """Equations 1-2: log-density of each latent (sum or mean over d) plus that of its halting decision, if it took one; 0 outside the mask."""
    inside = lat_mask.bool()
    density = reduced(-(((z.detach() - mu) * (-log_std).exp()) ** 2) / 2 - log_std - HALF_LOG_TWO_PI, reduce)
    chosen = torch.where(halted == 1, halt_prob, 1 - halt_prob)
    decision = torch.where(halted >= 0, chosen, torch.ones_like(chosen)).clamp(min=torch.finfo(chosen.dtype).tiny).log()
    return torch.where(inside, density + decision, torch.zeros_like(density))


def gaussian_kl(mu_q: Float[Tensor, "N J d"], ls_q: Tensor, mu_p: Tensor, ls_p: Tensor, lat_mask: Tensor) -> Float[Tensor, "N J"]:
    """Equation 4: KL(q || p) of diagonal Gaussians given by means and log standard deviations; 0 outside the mask."""
    kl = regularize.gaussian_kl(mu_q, ls_q, mu_p, ls_p)
    return torch.where(lat_mask.bool(), kl, torch.zeros_like(kl))


def inject(
    c: Float[Tensor, "N H"], z: Float[Tensor, "N J d"], lat_mask: Tensor, role: Int[Tensor, " J"], W: Float[Tensor, "R d H"],
    gate: Float[Tensor, " R"],
) -> Float[Tensor, "N H"]:  # fmt: skip
    """Equation 3: the hidden state plus the latents of the slots in use, each through its role's matrix and gate."""
    return c + torch.einsum("nj,njd,jdh->nh", lat_mask.to(z), z, gate[role, None, None] * W[role])


class LatentFlow(DenoisingPolicy):
    """Prompt encoder, latent policy, halting head and flow; beside them the posterior and the decoders, which training alone uses.

    Provides [N,J+T] `logp` (sums over an action's numbers, the halting decision included) and `entropy`, [N,J+T,.] `mean` and `log_std`.
    """

    provides = frozenset({"logp", "entropy", "mean", "log_std"})
    memoryless = False  # flow steps depend on the latents of their row

    def __init__(
        self, *, words: int = 12, size: int = 4, target: tuple[int, ...] = (8, 4, 4, 4), slots: int = 6, d: int = 16, hidden: int = 32,
        layer: int = 64, flow: tuple[int, ...] = (128, 128), name: str = "latent_flow", seed: int = 0,
    ) -> None:  # fmt: skip
        """`target`: numbers in each role's target; `slots`: 0 to 6 latents, 0 a plain flow conditioned on c; `layer`: width of the heads."""
        super().__init__()
        self.sizes = {"words": words, "size": size, "target": list(target), "slots": slots, "d": d, "hidden": hidden, "layer": layer}
        self.name, self.size, self.slots, self.d, self.width, self.flow_layers = name, size, slots, d, max(target), tuple(flow)
        self.register_buffer("role", torch.tensor(SLOTS[:slots], dtype=torch.int64), persistent=False)
        self.register_buffer("used", (torch.arange(max(target)) < torch.tensor(target)[:, None]).float(), persistent=False)

        def head(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, layer), nn.SiLU(), nn.Linear(layer, outputs))

        roles, memory = len(ROLES), slots * d
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Linear(words, hidden)
            self.prior, self.halting = head(hidden + memory + roles, 2 * d), head(hidden + memory, 1)
            self.posterior, self.decoder = head(hidden + self.width + roles, 2 * d), head(d + roles, self.width)
            self.W, self.gate = nn.Parameter(0.3 * torch.randn(roles, d, hidden)), nn.Parameter(torch.ones(roles))
        self.flow = VelocityNetwork(size, condition=hidden, hidden=flow, seed=seed)

    def velocity(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        assert not isinstance(condition, list)
        return self.flow(x, level, condition)

    def roles(self, count: int, slots: Tensor) -> Float[Tensor, "count K R"]:
        """The roles of some slots as one-hot features of `count` rows."""
        return functional.one_hot(self.role[slots], len(ROLES)).float().expand(count, -1, -1)

    def latent_prior(self, c: Float[Tensor, "N H"], z: Float[Tensor, "N J d"], slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations [N,K,d] of some slots' latents (None: of all), each given c and the latents before it."""
        slots = torch.arange(self.slots) if slots is None else slots
        before = (z[:, None] * (torch.arange(self.slots) < slots[:, None])[..., None].to(z)).flatten(2)
        found = self.prior(torch.cat([c[:, None].expand(-1, len(slots), -1), before, self.roles(len(c), slots)], dim=-1))
        return found[..., : self.d], found[..., self.d :].clamp(-5, 2)

    def latent_posterior(self, c: Float[Tensor, "N H"], target: Float[Tensor, "N J Y"]) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations [N,J,d] given the targets."""
        slots = torch.arange(self.slots)
        found = self.posterior(torch.cat([c[:, None].expand(-1, self.slots, -1), target, self.roles(len(c), slots)], dim=-1))
        return found[..., : self.d], found[..., self.d :].clamp(-5, 2)

    def decode(self, z: Float[Tensor, "N J d"]) -> Float[Tensor, "N J Y"]:
        """Targets as the latents have them; 0 behind a role's own width."""
        return self.decoder(torch.cat([z, self.roles(len(z), torch.arange(self.slots))], dim=-1)) * self.used[self.role]

    @property
    def decides(self) -> Bool[Tensor, " J"]:
        """The slots after which the policy may halt: every refine but the last."""
        return (self.role == REFINE) & (torch.arange(self.slots) < self.slots - 1)

    def halt_logit(self, c: Float[Tensor, "N H"], z: Float[Tensor, "N J d"]) -> Float[Tensor, "N J"]:
        """Logit of halting after each slot, from c and the latents up to it; it means something after a refine alone."""
        upto = z[:, None] * (torch.arange(self.slots) <= torch.arange(self.slots)[:, None])[..., None].to(z)
        return self.halting(torch.cat([c[:, None].expand(-1, self.slots, -1), upto.flatten(2)], dim=-1))[..., 0]

    def halt_prob(self, c: Tensor, z: Tensor) -> Float[Tensor, "N J"]:
        """Equation 2: probability of halting at the slots that may decide; 0 elsewhere."""
        return torch.where(self.decides, self.halt_logit(c, z).sigmoid(), torch.zeros(()))

    @torch.no_grad()
    def latents(self, c: Float[Tensor, "N H"], generator: Generator, replace: Mapping[str, Tensor | float] | None = None) -> Latents:
        """Draw the sequence; `replace` puts something else in the place of a role's latents, which later slots then see."""
        z, mask = c.new_zeros(len(c), self.slots, self.d), torch.zeros(len(c), self.slots, dtype=torch.bool)
        halted, alive = torch.full(mask.shape, -1), torch.ones(len(c), dtype=torch.bool)
        for j in range(self.slots):
            mean, log_std = (part[:, 0] for part in self.latent_prior(c, z, torch.tensor([j])))
            drawn = mean + log_std.exp() * torch.randn(mean.shape, generator=generator)
            name = ROLES[int(self.role[j])]
            if replace and name in replace:
                drawn = torch.as_tensor(replace[name]).to(drawn).expand_as(drawn)
            z[:, j] = torch.where(alive[:, None], drawn, torch.zeros(()))
            mask[:, j] = alive
            if bool(self.decides[j]):
                stops = torch.rand(len(c), generator=generator) < self.halt_prob(c, z)[:, j]
                halted[:, j] = torch.where(alive, stops.long(), -1)
                alive = alive & ~stops
        return Latents(z, mask, halted)

    def conditioned(self, c: Tensor, z: Tensor, mask: Tensor) -> Float[Tensor, "N H"]:
        """What the flow is told."""
        return inject(c, z, mask, self.role, self.W, self.gate)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        j, size, pad = self.slots, self.size, batch.action.shape[-1]
        c, z, mask = self.encoder(batch.signal("words")), batch.action[:, :j, : self.d], batch.attended[:, :j]
        mu, log_std = self.latent_prior(c, z)
        prob = self.halt_prob(c, z)
        keep, pull, std = batch.signal("step")[:, j:].unbind(-1)
        x, told = batch.context[:, j:, :size], self.conditioned(c, z, mask)[:, None]
        mean = keep[..., None] * x + pull[..., None] * self.velocity(x, batch.signal("level")[:, j:], told)
        noisy = std > 0
        safe = torch.where(noisy, std, torch.ones_like(std))[..., None]
        signals, zero = Signals(), mean.new_zeros(())
        if "logp" in needs:
            flow = torch.where(noisy, gaussian_logp(batch.action[:, j:, :size], mean, safe), zero)
            thought = latent_logp(z, mu, log_std, mask, prob, batch.signal("halted")[:, :j])
            signals["logp"] = torch.cat([thought, flow], dim=1)
        if "mean" in needs:
            signals["mean"] = torch.cat([functional.pad(mu, (0, pad - self.d)), functional.pad(mean, (0, pad - size))], dim=1)
        if "log_std" in needs:
            steps = safe.log().expand_as(mean)
            signals["log_std"] = torch.cat([functional.pad(log_std, (0, pad - self.d)), functional.pad(steps, (0, pad - size))], dim=1)
        if "entropy" in needs:
            thought = torch.where(mask, (log_std + 0.5 + HALF_LOG_TWO_PI).sum(-1), zero)
            flow = torch.where(noisy, size * (safe[..., 0].log() + 0.5 + HALF_LOG_TWO_PI), zero)
            signals["entropy"] = torch.cat([thought, flow], dim=1)
        return signals

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and sizes in a folder, which `load_latent_flow` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "policy.safetensors")
        sizes = self.sizes | {"flow": list(self.flow_layers), "name": self.name, "kind": "scenes"}
        (folder / "policy.json").write_text(json.dumps(sizes, indent=1))


def load_latent_flow(folder: Path) -> LatentFlow:
    """A policy that `save_pretrained` wrote."""
    sizes: dict[str, Any] = json.loads((folder / "policy.json").read_text())
    sizes.pop("kind")
    policy = LatentFlow(**sizes | {"target": tuple(sizes["target"]), "flow": tuple(sizes["flow"])})
    policy.load_state_dict({k: v.float() for k, v in load_file(folder / "policy.safetensors").items()})
    return policy


def joint_batch(
    policy: LatentFlow, words: Tensor, thought: Latents, x: Float[Tensor, "N T+1 D"], schedule: Schedule, group: Tensor, prompt_id: Tensor
) -> Batch:
    """Latent actions and flow steps as one trajectory, scored by the policy that made them. Signals: `latent` (which actions are latents),
    `numbers` (how many an action has), `halted`, `words`."""
    rows, steps, j = len(x), x.shape[1] - 1, policy.slots
    pad = max(policy.d if j else 0, policy.size)
    wide = functional.pad(x, (0, pad - policy.size))
    action = torch.cat([functional.pad(thought.z, (0, pad - policy.d)), wide[:, 1:]], dim=1) if j else wide[:, 1:]
    context = torch.cat([action.new_zeros(rows, j, pad), wide[:, :-1]], dim=1)
    step = torch.stack([part.expand(rows, steps) for part in schedule[1:]], dim=-1).to(x.dtype)
    latent = (torch.arange(j + steps) < j).expand(rows, -1)
    mask = torch.cat([thought.mask, step[..., 2] > 0], dim=1)
    signals = {
        "prompt_id": prompt_id,
        "words": words,
        "latent": latent,
        "numbers": torch.where(latent, policy.d, policy.size).to(x.dtype),
        "halted": functional.pad(thought.halted, (0, steps), value=-1),
        "step": functional.pad(step, (0, 0, j, 0)),
        "level": functional.pad(schedule.level[:-1].expand(rows, steps).to(x.dtype), (j, 0)),
    }
    batch = Batch(action=action, mask=mask, logp=torch.zeros(mask.shape), group=group, context=context, signals=signals)
    batch.terminated, batch.truncated = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    batch.valid = torch.cat([thought.mask, torch.ones(rows, steps, dtype=torch.bool)], dim=1)
    found = policy.observe(batch, frozenset({"logp", "entropy", "mean", "log_std"}))
    batch.logp = found.pop("logp")
    batch.signals |= {f"old_{name}": value for name, value in found.items()}
    return batch
