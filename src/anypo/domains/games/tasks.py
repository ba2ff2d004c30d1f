"""Self-play: both seats of a game are played by the policy that is trained."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.games.policy import GamePolicy
from anypo.domains.games.tree import END, GameTree, compile_game
from anypo.report import plots
from anypo.run import Run
from anypo.task import Prompt

CURVE_POINTS = 50  # of the exploitability curve along a run


class SelfPlay:
    """Whole games, one row each. Rewards [N,T] are player 0's and come at the last move.

    The signal `mover_sign` [N,T] is +1 where player 0 moved, -1 where player 1 did and 0 in the padding: what is good for the mover is the sign
    times what is good for player 0. A method says that it knows by `batch_mover_sign` among its needs; others are refused.
    """

    objectives: tuple[str, ...] = ("reward",)
    prompts_per_step = 1

    def __init__(self, game: str | GameTree = "kuhn_poker") -> None:
        """Raises ValueError for a game that is unknown or too large."""
        self.tree = compile_game(game) if isinstance(game, str) else game
        self.name = self.tree.name

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """The start of the game, `count` times; the cards are dealt while playing."""
        return [Prompt(id=i, content=0) for i in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        if "batch_mover_sign" not in run.method.needs():
            raise ValueError(
                f"{run.method.name} does not know whose move it is (no 'batch_mover_sign' among its needs), so it cannot learn both seats of "
                f"{self.name}; use vrpo or its credit"
            )
        policy: GamePolicy = run.policy  # type: ignore[assignment]
        if run.step % max(1, run.total_steps // CURVE_POINTS) == 0:
            run.log(exploitability=self.tree.exploitability(policy.table))
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        batch = play(self.tree, policy.table, len(group), run.generator)
        found = policy.observe(batch, {"logp", "entropy", "logits"})
        batch.group, batch.logp = group, found["logp"]
        batch.signals |= {"prompt_id": torch.tensor([p.id for p in prompts for _ in range(p.samples)])}
        batch.signals |= {"old_entropy": found["entropy"], "old_logits": found["logits"]}
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T], player 0's."""
        return batch.signal("payoff")

    def evaluate(self, run: Run) -> dict[str, float]:
        """Exact exploitability of the policy (0 at an equilibrium; lower is better) and its value for the first seat."""
        table = run.policy.table
        return {"exploitability": self.tree.exploitability(table), "first_seat_value": float(self.tree.values(table)[0])}  # type: ignore[arg-type]

    def figures(self, run: Run) -> list[tuple[str, str]]:
        """Exact exploitability along the run, once it has begun."""
        points = [(record["step"], record["exploitability"]) for record in run.history if "exploitability" in record]
        if not points:
            return []
        points.append((run.step, self.tree.exploitability(run.policy.table)))  # type: ignore[arg-type]
        steps, values = zip(*points, strict=True)
        return [("Exploitability", plots.learning_curves([plots.Series(run.method.name, steps, values)], "step", "exploitability"))]


def play(tree: GameTree, table: Tensor, games: int, generator: torch.Generator) -> Batch:
    """Games under a policy table [I,A]: context = the node of each move, `payoff` [N,T] float32 at the last move, `mover_sign` [N,T]."""
    nodes, taken = tree.play(table, games, generator)
    moved = tree.player[nodes] >= 0
    order = (~moved).long().argsort(dim=1, stable=True)[:, : int(moved.sum(1).max())]
    mask, node, action = (x.gather(1, order) for x in (moved, nodes, taken))
    action = torch.where(mask, action, 0)
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    final = tree.child[nodes[:, -1], taken[:, -1]]
    assert bool((tree.player[final] == END).all())
    sign = torch.where(mask, 1 - 2 * tree.player[node].clamp(min=0), 0)
    return Batch(
        action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(games), context=node, terminated=last,
        truncated=torch.zeros_like(last),
        signals={"mover_sign": sign, "payoff": torch.where(last, tree.payoff[final][:, None], 0.0).float()},
    )  # fmt: skip
