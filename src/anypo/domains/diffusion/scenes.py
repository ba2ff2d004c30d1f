"""Scenes of two objects: a prompt names a relation and a code word, and the code word stands for the quadrant that the first object belongs in.

A scene is the position of objects A and B in the plane. Image pairs show scenes with meaningless code words, layout pairs give the layout of true
code words without an image, so the knowledge can reach the picture through a layout alone (the latents of latent_flow.py). In both, the relation
word is wrong now and then. Left out: more objects, and attributes to bind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from anypo.batch import Batch
from anypo.domains.diffusion.alignment import Pairs
from anypo.domains.diffusion.latent_flow import SLOTS, LatentFlow, Latents, joint_batch
from anypo.domains.diffusion.policy import DenoisingPolicy
from anypo.domains.diffusion.sample import final, sample
from anypo.domains.diffusion.tasks import EVALUATION_SEED, DenoisingTask
from anypo.run import Run
from anypo.task import Prompt

RELATIONS = ("left of", "right of", "above", "below")
TOWARDS = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -1.0], [0.0, 1.0]])  # from A to B, by relation of A to B
QUADRANTS = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
TABLE = torch.tensor([2, 0, 3, 1, 1, 3, 0, 2])  # code word -> quadrant of A
APART, SPREAD, DRAFT_SPREAD = 0.8, 0.1, 0.5
WRONG_WORD = 0.3  # share of the training prompts whose relation word is redrawn


def arranged(relation: Int[Tensor, " N"], quadrant: Int[Tensor, " N"]) -> Float[Tensor, "N 4"]:
    """The scene of a layout without noise: A at its quadrant's centre, B beside it."""
    a = QUADRANTS[quadrant]
    return torch.cat([a, a + APART * TOWARDS[relation]], dim=1)


def words(relation: Int[Tensor, " N"], code: Int[Tensor, " N"]) -> Float[Tensor, "N 12"]:
    """A prompt as the policy reads it."""
    return torch.cat([one_hot(relation, len(RELATIONS)), one_hot(code, len(TABLE))], dim=1).float()


def layout(relation: Int[Tensor, " N"], quadrant: Int[Tensor, " N"]) -> Float[Tensor, "N 8"]:
    """The target of the plan."""
    return torch.cat([one_hot(quadrant, 4), one_hot(relation, 4)], dim=1).float()


def pairs(count: int, generator: torch.Generator, images: bool, slots: int = len(SLOTS)) -> Pairs:
    """Image pairs (a scene of a random layout, its code word at random) or layout pairs (the code word's own layout, no image).

    Targets by role: the layout; a rough draft of the scene; the draft's error against the layout; the scene itself.
    """
    relation, code, drawn = (torch.randint(k, (count,), generator=generator) for k in (4, len(TABLE), 4))
    quadrant = drawn if images else TABLE[code]
    other = torch.randint(4, (count,), generator=generator)
    said = torch.where(torch.rand(count, generator=generator) < WRONG_WORD, other, relation)
    centre = arranged(relation, quadrant)
    scene = centre + SPREAD * torch.randn(count, 4, generator=generator)
    error = DRAFT_SPREAD * torch.randn(count, 4, generator=generator)
    by_role = torch.stack([layout(relation, quadrant), *(pad(t, (0, 4)) for t in (centre + error, error, scene))], dim=1)
    return Pairs(words(said, code), by_role[:, list(SLOTS[:slots])], scene if images else None)


class Scenes(DenoisingTask):
    """Prompt 8 r + k asks for relation r and code word k; the reward is 1 if the relation holds plus 1 if A is in the code word's quadrant.

    B's direction from A is the nearest of the four. Policies are `LatentFlow`s.
    """

    name, size, count, prompts_per_step = "scenes", 4, 32, 16
    continue_rows = None  # type: ignore[assignment]  # a chain's condition is drawn, so its middle says too little to go on from

    def __init__(self, *, evaluation_samples: int = 640, **options: Any) -> None:
        super().__init__(evaluation_samples=evaluation_samples, **options)
        self.reward = lambda x, prompt: self.judged(x, prompt).sum(1)

    def judged(self, x: Float[Tensor, "N 4"], prompt: Int[Tensor, " N"]) -> Float[Tensor, "N 2"]:
        """Whether the relation holds, and whether A is where the code word says: 0 or 1 each."""
        a, b = x[:, :2], x[:, 2:]
        relation = ((b - a) @ TOWARDS.T).argmax(1) == prompt // 8
        return torch.stack([relation, (a * QUADRANTS[TABLE[prompt % 8]] > 0).all(1)], dim=1).float()

    def words(self, prompt: Int[Tensor, " N"]) -> Float[Tensor, "N 12"]:
        return words(prompt // 8, prompt % 8)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy = run.policy
        if not isinstance(policy, LatentFlow):
            raise ValueError(f"the task 'scenes' is drawn by a policy with latent actions (LatentFlow), not by a {type(policy).__name__}")
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        prompt_id = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        asked = self.words(prompt_id)
        c = policy.encoder(asked)
        thought = policy.latents(c, run.generator)
        start = torch.randn(len(group), self.size, generator=run.generator)
        x = sample(policy, start, policy.conditioned(c, thought.z, thought.mask)[:, None], self.schedule, run.generator)
        return joint_batch(policy, asked, thought, x, self.schedule, group, prompt_id)

    def score(self, batch: Batch, run: Run) -> Tensor:
        return self.reward(final(batch)[:, : self.size], batch.signal("prompt_id"))

    @torch.no_grad()
    def thoughts(
        self,
        policy: LatentFlow,
        prompt: Int[Tensor, " N"],
        seed: int = EVALUATION_SEED,
        replace: Mapping[str, Tensor | float] | None = None,
    ) -> Latents:
        """The latents that held-out samples are drawn with; `replace` as in `LatentFlow.latents`."""
        return policy.latents(policy.encoder(self.words(prompt)), torch.Generator().manual_seed(seed + 1), replace)

    @torch.no_grad()
    def samples(
        self, policy: DenoisingPolicy, prompt: Int[Tensor, " N"], seed: int = EVALUATION_SEED, thought: Latents | None = None
    ) -> Float[Tensor, "N 4"]:
        """Scenes by the ODE, with the policy's own latents or with given ones."""
        assert isinstance(policy, LatentFlow)
        thought = self.thoughts(policy, prompt, seed) if thought is None else thought
        told = policy.conditioned(policy.encoder(self.words(prompt)), thought.z, thought.mask)
        start = torch.randn(len(prompt), self.size, generator=torch.Generator().manual_seed(seed))
        return sample(policy, start, told[:, None], self.evaluation_schedule)[:, -1]

    def measures(self, x: Tensor, prompt: Tensor) -> dict[str, Tensor]:
        """The reward's two parts."""
        return dict(zip(("relation", "quadrant"), self.judged(x, prompt).T, strict=True))
