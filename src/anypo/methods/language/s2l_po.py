"""S2L-PO: small-to-large policy optimization (arXiv:2605.30789).

GRPO gets diverse attempts from random single tokens, whose errors add up along a chain. In a family of models the smaller one is diverse as a policy:
it wins at pass@k for large k, with attempts that stay coherent. S2L-PO lets a frozen small model write part of every group of the large learner, a
share that falls linearly to nothing, so that training ends as plain GRPO. Objective, advantage and optimizer are GRPO's; it changes rollout and group
size, and rollouts cost less. Equations 1-3 from the authors' page, 5 from the paper; that the ratio's denominator is the learner's own for the
explorer's rows too is [reconstructed], and so is the explorer of a run that names none: the learner as it was at the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Policy
from anypo.report import statistics
from anypo.seams.credit import group_relative
from anypo.seams.objective import aggregate, clipped, token_ratio
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

EXPLORER = "explorer"  # name of the frozen starting policy, in the run


class Cost(NamedTuple):
    """Rollout compute of a run."""

    mixed: float
    grpo: float


def schedule(step: Int[Tensor, " S"], t_mix: int) -> Float[Tensor, " S"]:
    """Equation 1: the explorer's share at steps counted from 1; from 1 down to 0 at step `t_mix` and 0 after it (a single step of mixing has share 1)."""
    share = 1 - (step.double() - 1) / max(t_mix - 1, 1)
    return torch.where(step <= t_mix, share, torch.zeros_like(share))


def split(step: Int[Tensor, " S"], t_mix: int, g: int) -> Int[Tensor, "S 2"]:
    """Equation 2: how many of `g` attempts the explorer writes, rounded up, and how many the learner."""
    explorer = (schedule(step, t_mix) * g - 1e-9).ceil().long()
    return torch.stack([explorer, g - explorer], dim=1)


def advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], eps: float = 1e-6) -> Float[Tensor, " N"]:
    """Equation 3: standardized inside the group, whoever wrote the rows."""
    return group_relative(reward, group, eps=eps)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], mask: Tensor, clip: float = 0.2
) -> Float[Tensor, ""]:
    """Equation 4: GRPO's surrogate, mean over rows of row means; both log-probs are the learner's."""
    return aggregate(-clipped(token_ratio(logp, old_logp, mask), advantages, 1 - clip, 1 + clip), mask, "seq_mean")


def pass_at_k(n: Int[Tensor, " P"], c: Int[Tensor, " P"], k: int) -> Float[Tensor, " P"]:
    """Equation 5: the chance that k of a problem's n attempts, c of them right, hold a right one."""
    return torch.tensor([statistics.pass_at_k(*counts, k) for counts in zip(n.tolist(), c.tolist(), strict=True)], dtype=torch.float64)


def rollout_cost(t: int, t_mix: int, g: int, cost_small: float, cost_large: float) -> Cost:
    """Equation 6: of `t` steps with one prompt each, at these costs an attempt."""
    explorer, learner = split(torch.arange(1, t + 1), t_mix, g).sum(0).tolist()
    return Cost(explorer * cost_small + learner * cost_large, t * g * cost_large)


@dataclass
class SmallToLarge:
    """Attempts of the explorer and of the learner at the same prompts. Every row's log-probs are the learner's own.

    Signal: `explorer` [N] bool, the rows that the explorer wrote.
    """

    explorer: str | Policy = ""  # a folder, a hub name, or a policy; empty = the learner as it was at the start
    t_mix: int | None = None  # step of the last mixed groups (the share is 0 there), >= 0; None = half of the run's steps, 0 = GRPO
    loaded: Policy | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        now, last = torch.tensor([run.step + 1]), self.last_mixed(run)
        wanted = [int(split(now, last, p.samples)[0, 0]) for p in prompts]
        parts = []
        for explores in (True, False):
            counts = [n if explores else p.samples - n for p, n in zip(prompts, wanted, strict=True)]
            chosen = [i for i, n in enumerate(counts) if n]
            if chosen:
                some = [prompts[i].but(samples=counts[i]) for i in chosen]
                part = self.explored(some, run) if explores else run.collect(some)
                part.group = torch.tensor(chosen)[part.group]
                part.signals["explorer"] = torch.full((len(part),), explores)
                parts.append(part)
        batch = Batch.concat(parts)
        run.log(explorer_share=float(batch.signals["explorer"].double().mean()))
        return batch

    def last_mixed(self, run: Run) -> int:
        """T_mix; under a budget of actions, from how many steps the run will have if it goes on as so far."""
        if self.t_mix is not None:
            return self.t_mix
        return (round(run.step / run.progress) if run.max_actions and run.step else run.total_steps) // 2

    def explored(self, prompts: list[Prompt], run: Run) -> Batch:
        """The explorer's attempts with the log-probs and entropies of the learner."""
        model = self.model(run)
        if model is None:
            batch = run.collect(prompts, EXPLORER)
        else:
            run.policies[EXPLORER] = model
            try:
                batch = run.collect(prompts, EXPLORER)
            finally:
                del run.policies[EXPLORER]  # it never changes, so the run's checkpoints need not hold it
        del batch.signals["sampled_elsewhere"]
        entropy = "old_entropy" in batch.signals
        with run.timed("score"):
            own = run.score(batch, {"logp", "entropy"} if entropy else {"logp"})
        batch.logp = own.logp.to(batch.logp)
        if entropy:
            batch.signals["old_entropy"] = torch.where(batch.mask, own.entropy, own.entropy.new_zeros(()))
        return batch

    def model(self, run: Run) -> Policy | None:
        """The explorer, loaded once; None for the learner's start. Raises ValueError when its tokens are not the learner's."""
        if isinstance(self.explorer, Policy):
            return self.explorer
        if self.explorer and self.loaded is None:
            from anypo.domains.language.models import load_companion  # transformers, which few runs of this method need

            self.loaded = load_companion(self.explorer, run.policy, "explorer")
        return self.loaded


METHOD = GRPO.but(
    name="s2l_po",
    paper=Paper("Smaller Models are Natural Explorers for Policy-Level Diversity in GRPO", "2605.30789", 2026),
    summary="a frozen small model writes a part of every group, which falls from all to none by half of the run",
    select=UniformPrompts(group_size=16),
    rollout=SmallToLarge(),
)
