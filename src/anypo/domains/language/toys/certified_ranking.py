"""certified_ranking: rank candidates for a plan, and cite for each of the first K the spans that show why it belongs there.

An instance has a skeleton (S event types in order, each with the filler its role requires) and candidates, whose trajectories are mentions in time
order: type, argument, document, place in the text, in the window or not. Some follow the skeleton with the right fillers, hard negatives follow it
backwards or with wrong fillers. The policy ranks K candidates without replacement (Plackett-Luce), then cites up to m spans for each; every pick is an
action, T = K (1 + m), and with `constrained` picks that are not feasible have probability 0. The verifier aligns the cited spans alone with the
skeleton; it sees no labels. Stands in for MAVEN-ERE and RAMS with extraction fixed. Left out: text, and candidates found by a model.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.certificates import cert_ndcg, ndcg
from anypo.domains.language.toys.certified_instances import CITES, MENTIONS, ROSTER, SLOTS, TOP, Instances, audit, draw
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

STOP = ROSTER * MENTIONS  # the action that ends the citations of a position
IMPOSSIBLE = -1e9


class CitingPolicy(Policy):
    """Two small perceptrons score candidates and spans, one number the end of citing; at the start all are 0. An action is a candidate at the first K
    places, afterwards a span or STOP."""

    provides = frozenset({"logp", "entropy"})
    learning_rate, optimizer, unit = 1e-2, "adam", "picks"

    def __init__(self, hidden: int = 16, seed: int = 0, constrained: bool = True) -> None:
        super().__init__()
        self.constrained = constrained
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            width = 4 + SLOTS
            last = [nn.Linear(hidden, 1) for _ in range(2)]
            self.candidate, self.span = (nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), layer) for layer in last)
        for layer in last:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.stop = nn.Parameter(torch.zeros(1))

    def picks(
        self, context: Tensor, action: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(action, mask, logp, entropy) [N,T]: of the given actions, or of drawn ones."""
        rows = len(context)
        candidate = nn.functional.pad(self.candidate(context[:, :, 0])[..., 0], (0, STOP + 1 - ROSTER), value=IMPOSSIBLE)
        span = torch.cat([self.span(context[:, :, 1:]).flatten(1), self.stop.expand(rows, 1)], dim=1)
        listed = nn.functional.pad(context[:, :, 0, 0] > 0, (0, STOP + 1 - ROSTER))
        citable = nn.functional.pad((context[:, :, 1:, 0] > 0).flatten(1), (0, 1), value=True)
        owner = torch.arange(STOP + 1) // MENTIONS
        taken, active = torch.zeros_like(listed), torch.ones(rows, dtype=torch.bool)
        columns: list[tuple[Tensor, ...]] = []
        for t in range(TOP * (1 + CITES)):
            position, cite = divmod(t - TOP, CITES)
            if t >= TOP and cite == 0:
                taken, active = torch.zeros_like(taken), torch.ones_like(active)
            if t < TOP:
                logits, possible = candidate, listed & ~taken
            else:
                own = (owner == columns[position][0][:, None]) | (torch.arange(STOP + 1) == STOP)
                logits, possible = span, citable & own & ~taken
            log_probs = (logits.masked_fill(~possible, IMPOSSIBLE) if self.constrained else logits).log_softmax(-1)
            chosen = torch.multinomial(log_probs.exp(), 1, generator=generator) if action is None else action[:, t : t + 1]
            logp, entropy = log_probs.gather(-1, chosen)[:, 0], -(log_probs.exp() * log_probs).sum(-1)
            columns.append(
                (torch.where(active, chosen[:, 0], STOP), active, torch.where(active, logp, 0.0), torch.where(active, entropy, 0.0))
            )
            taken = taken.scatter(1, chosen, True)
            active = active & (chosen[:, 0] != STOP)
        chosen, mask, logp, entropy = (torch.stack(part, dim=1) for part in zip(*columns, strict=True))
        return chosen, mask, logp, entropy

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        _, _, logp, entropy = self.picks(batch.context, batch.action)
        return Signals({name: value for name, value in (("logp", logp), ("entropy", entropy)) if name in needs})


def outputs(action: Int[Tensor, "N T"]) -> tuple[Int[Tensor, "N K"], Bool[Tensor, "N K C*M"]]:
    """Ranking and cited spans that the actions say."""
    spans = action[:, TOP:].unflatten(1, (TOP, CITES))
    cited = torch.zeros(len(action), TOP, STOP + 1, dtype=torch.bool).scatter(2, spans, True)
    return action[:, :TOP], cited[..., :STOP]


@dataclass
class CertifiedRanking:
    """The task: rewarded by NDCG; its batches carry what the audit found. `roster`: closed, predicted or hybrid."""

    roster: str = "closed"
    seed: int = 0
    pool: int = 512  # instances for training; as many are held out
    name = "certified_ranking"
    objectives = ("reward",)
    prompts_per_step = 32

    def __post_init__(self) -> None:
        self.training, self.held_out = (draw(self.pool, 2 * self.seed + part, self.roster) for part in (0, 1))

    def policy(self, constrained: bool = True) -> CitingPolicy:
        return CitingPolicy(seed=self.seed, constrained=constrained)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(id=int(i), content=int(i)) for i in rng.integers(self.pool, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        group = torch.tensor([i for i, p in enumerate(prompts) for _ in range(p.samples)])
        rows = torch.tensor([p.content for p in prompts])[group]
        policy = cast(CitingPolicy, run.policy)
        batch = self.attempt(policy, self.training[rows], run.generator)
        batch.signals["prompt_id"] = rows
        return batch.but(group=group, version=torch.full((len(rows),), run.version))

    @torch.no_grad()
    def attempt(self, policy: CitingPolicy, instances: Instances, generator: torch.Generator) -> Batch:
        """One output for each instance. Signals: `relevance` [N,C], `trajectory` [N,C,3], `ranking`, `validity`, `support` [N,K], `feasible` [N]."""
        context = instances.context()
        action, mask, logp, entropy = policy.picks(context, generator=generator)
        ranking, cited = outputs(action)
        found = audit(instances, ranking, cited)
        over = torch.ones(len(action), dtype=torch.bool)
        signals = {"relevance": instances.relevance, "trajectory": instances.features, "ranking": ranking, "old_entropy": entropy}
        return Batch(
            action=action, mask=mask, logp=logp, group=torch.arange(len(action)), context=context, terminated=over, truncated=~over,
            signals=signals | found._asdict(),
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        return ndcg(batch.signals["relevance"], batch.signals["ranking"])

    def measures(self, policy: CitingPolicy, instances: Instances | None = None) -> dict[str, float]:
        """Means over one output for each (held-out) instance, drawn with the same random numbers every time."""
        chosen = self.held_out if instances is None else instances
        s = self.attempt(policy, chosen, torch.Generator().manual_seed(self.seed)).signals
        values = {
            "cert_ndcg": cert_ndcg(s["relevance"], s["ranking"], s["validity"], s["support"]), "ndcg": ndcg(s["relevance"], s["ranking"]),
            "validity": s["validity"], "support": s["support"], "feasible": s["feasible"],
        }  # fmt: skip
        return {name: float(value.double().mean()) for name, value in values.items()}

    def expected_success(self, policy: CitingPolicy) -> float:
        """Mean CertNDCG on the held-out instances."""
        return self.measures(policy)["cert_ndcg"]

    def evaluate(self, run: Run) -> dict[str, float]:
        return self.measures(cast(CitingPolicy, run.policy))


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    ranking = CertifiedRanking(seed=seed, **options)
    return ranking.policy(), ranking
