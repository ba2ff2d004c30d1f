"""SPG: sequential policy gradient for hyper-parameters (arXiv:2506.15051).

Instead of one model for each value of a hyper-parameter, T temporary replicas stand in a row behind the base model. Each applies the next value (more
dropout, or one more block) to the output of the one before and predicts the same label with the shared head, so a single forward pass gives a trajectory
of T predictions an example, which ends at the first mistake. REINFORCE on these trajectories joins the cross-entropy of the base model; afterwards the
replicas are dropped. Baselines: lambda_pg = 0 (plain fine-tuning), and dropout in the base model. Equations are numbered as in the row's specification,
1 to 3 from a digest of the paper; the absorbing pad, the reward, the batch baseline and the total loss are [reconstructed]. Left out: large models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.method import Paper, Study

TARGETS = (0.1, 0.2, 0.3, 0.4, 0.5)


class Trajectory(NamedTuple):
    observed: Int[Tensor, "B T"]  # before the prediction: 1 running, 0 right after the first mistake, -1 padding
    mask: Int[Tensor, "B T"]  # 1 where running; the failing step is the last of them
    reward: Int[Tensor, "B T"]  # 1 right, -1 wrong, 0 where not running


def rates(cumulative: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Equation 2: rates p_t of dropouts in a row whose first t together drop P_t. Raises ValueError unless 0 <= P_1 <= ... <= P_T < 1."""
    before = torch.cat([0 * cumulative[:1], cumulative[:-1]])
    if len(cumulative) and not ((cumulative >= before).all() and cumulative[-1] < 1):
        raise ValueError(f"cumulative dropout rates must not fall and lie in [0,1), not {[round(float(p), 4) for p in cumulative]}")
    return 1 - (1 - cumulative) / (1 - before)


def hidden_replicas(
    hidden: Float[Tensor, "B H"], keep: Float[Tensor, "T B H"], p: Float[Tensor, " T"], linear: Float[Tensor, "T H H"]
) -> Float[Tensor, "B T H"]:
    """Equation 1: h' = h keep / (1 - p), h = h' + h' linear_t, each replica on the output of the one before."""
    states = [hidden]
    for t in range(len(linear)):
        dropped = states[-1] * keep[t] / (1 - p[t])
        states.append(dropped + dropped @ linear[t])
    return torch.stack(states, 1)[:, 1:]


def replicas(
    hidden: Float[Tensor, "B H"], keep: Float[Tensor, "T B H"], p: Float[Tensor, " T"], linear: Float[Tensor, "T H H"],
    head: Float[Tensor, "H C"],
) -> Float[Tensor, "B T C"]:  # fmt: skip
    """Equation 1: class probabilities of every replica through the shared head."""
    return (hidden_replicas(hidden, keep, p, linear) @ head).softmax(-1)


def trajectory(correct: Tensor) -> Trajectory:
    """Equations 3 and 5 of right (1) and wrong (0) predictions [B,T]."""
    right = correct.long()
    first = torch.ones_like(right[:, :1])
    running = torch.cat([first, right.cumprod(1)[:, :-1]], 1)
    before = torch.cat([first, running[:, :-1]], 1)
    return Trajectory(running + before - 1, running, running * (2 * right - 1))


def advantages(correct: Tensor, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """Equation 6: return-to-go less its mean over the running examples of the step, 0 where not running. No gradient."""
    found = trajectory(correct)
    dtype = correct.dtype if correct.is_floating_point() else torch.get_default_dtype()
    mask, reward = found.mask.to(dtype), found.reward.to(dtype)
    ahead = torch.arange(correct.shape[1], device=correct.device)
    ahead = ahead[:, None] - ahead  # [k,t] steps from t to k
    returns = reward @ torch.where(ahead >= 0, gamma ** ahead.clamp(min=0).to(dtype), 0.0)
    baseline = (mask * returns).sum(0) / mask.sum(0).clamp(min=1)
    return mask * (returns - baseline)


def loss(
    logp: Float[Tensor, "B T"], correct: Tensor, base_logp: Float[Tensor, " B"], gamma: float = 1.0, lambda_pg: float = 0.1
) -> Float[Tensor, ""]:
    """Equation 7: cross-entropy of the base model plus lambda_pg times the policy loss.

    `logp` is of the replicas' actions and may hold anything, -inf or NaN too, where a trajectory has ended; `base_logp` is of the labels.
    """
    advantage = advantages(correct, gamma).to(logp)
    ended = trajectory(correct).mask == 0
    policy = -(advantage * logp.masked_fill(ended, 0.0)).sum(1).mean()
    return lambda_pg * policy - base_logp.mean()


def select(accuracy: Float[Tensor, " T"], cumulative: Float[Tensor, " T"]) -> float:
    """Equation 8: the cumulative rate of the replica of most `accuracy` on validation examples; ties go to the smallest."""
    return float(cumulative[int(accuracy.argmax())])


class DropoutReplicas(nn.Module):
    """Replicas of growing dropout: [B,H] -> [B,T,H]. Linear maps start at zero, have no bias, and in eval mode nothing is dropped."""

    p: Tensor

    def __init__(self, width: int, cumulative: Sequence[float] = TARGETS) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.zeros(len(cumulative), width, width))
        self.register_buffer("p", rates(torch.tensor(cumulative, dtype=torch.float64)).float())

    def forward(self, hidden: Float[Tensor, "B H"]) -> Float[Tensor, "B T H"]:
        p = self.p if self.training else torch.zeros_like(self.p)
        keep = torch.rand(len(p), *hidden.shape, device=hidden.device) >= p[:, None, None]
        return hidden_replicas(hidden, keep.to(hidden), p, self.linear)


class BlockReplicas(nn.Module):
    """Replicas of growing depth, for architecture search: each adds a residual block that starts at zero. [B,H] -> [B,T,H].

    Fresh blocks predict alike, so by argmax their trajectories do not differ and only the first block learns: use `action="sample"`.
    """

    def __init__(self, width: int, blocks: int = 5) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.outer = nn.Parameter(torch.zeros(blocks, width, width))

    def forward(self, hidden: Float[Tensor, "B H"]) -> Float[Tensor, "B T H"]:
        states = [hidden]
        for inner, outer in zip(self.inner, self.outer, strict=True):
            states.append(states[-1] + inner(states[-1]).relu() @ outer)
        return torch.stack(states, 1)[:, 1:]


@dataclass(frozen=True)
class Spg:
    """The loss of a batch by one forward pass of `body` [B,...] -> [B,H]; `head` maps [...,H] to logits [...,C]."""

    gamma: float = 1.0  # discount from a replica to the next, in [0,1]
    lambda_pg: float = 0.1  # weight of the policy loss, >= 0; 0 = plain cross-entropy
    action: str = "argmax"  # the replica's likeliest label, off-policy for a policy gradient; or "sample" from its distribution

    def __post_init__(self) -> None:
        if self.action not in ("argmax", "sample") or not 0 <= self.gamma <= 1 or self.lambda_pg < 0:
            raise ValueError(f"use action argmax or sample, gamma in [0,1] and lambda_pg >= 0, not {self}")

    def correct(self, action: Int[Tensor, "B T"], label: Int[Tensor, " B"]) -> Tensor:
        """Which actions are right."""
        return action == label[:, None]

    def __call__(self, body: nn.Module, head: nn.Module, temporary: nn.Module, x: Tensor, label: Int[Tensor, " B"]) -> Tensor:
        hidden = body(x)
        base_logp = -nn.functional.cross_entropy(head(hidden), label, reduction="none")
        logp = head(temporary(hidden)).log_softmax(-1)  # [B,T,C]
        noise = torch.empty_like(logp).exponential_().log() if self.action == "sample" else 0.0  # Gumbel: argmax becomes a sample
        action = (logp.detach() - noise).argmax(-1)
        taken = logp.gather(2, action[..., None])[..., 0]
        return loss(taken, self.correct(action, label), base_logp, self.gamma, self.lambda_pg)


def retrain(
    body: nn.Module, head: nn.Module, temporary: nn.Module, x: Tensor, label: Tensor, spg: Spg, epochs: int, learning_rate: float = 1e-3,
    batch: int = 32,
) -> Iterator[float]:  # fmt: skip
    """Adam on all three modules; the loss of every step. Drop `temporary` afterwards."""
    optimizer = torch.optim.Adam([p for module in (body, head, temporary) for p in module.parameters()], lr=learning_rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            (value := spg(body, head, temporary, x[rows], label[rows])).backward()
            optimizer.step()
            yield float(value.detach())


@torch.no_grad()
def accuracy(hidden: Float[Tensor, "B H"], head: nn.Module, label: Int[Tensor, " B"], rate: float = 0.0, draws: int = 20) -> float:
    """Of the head on `hidden` dropped at `rate`, mean over `draws`."""
    logits = head(nn.functional.dropout(hidden.repeat(draws, 1), rate))
    return float((logits.argmax(1) == label.repeat(draws)).float().mean())


def run(seed: int = 0, epochs: int = 20, examples: int = 200) -> dict[str, Any]:
    """Accuracy on noisy prototypes of 10 classes, whole and with half of the last hidden layer dropped: {plain, spg: {clean, dropped}}."""
    found: dict[str, Any] = {}
    for name, spg in (("plain", Spg(lambda_pg=0.0)), ("spg", Spg())):
        torch.manual_seed(seed)
        label, prototypes = torch.arange(2 * examples) % 10, torch.randn(10, 32)
        x = prototypes[label] + 2 * torch.randn(2 * examples, 32)
        body, head = nn.Sequential(nn.Linear(32, 64), nn.ReLU()), nn.Linear(64, 10)
        list(retrain(body, head, DropoutReplicas(64), x[:examples], label[:examples], spg, epochs))
        tested = body(x[examples:]), head, label[examples:]
        found[name] = {"clean": accuracy(*tested), "dropped": accuracy(*tested, 0.5)}
    return found


STUDY = Study(
    name="spg",
    paper=Paper("Sequential Policy Gradient for Adaptive Hyperparameter Optimization", "2506.15051", 2025),
    domain="optim",
    run=run,
    kind="component",
    summary="one forward pass through temporary replicas of growing dropout gives a trajectory an example, and REINFORCE on it joins the cross-entropy",
)
