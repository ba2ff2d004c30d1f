"""F-TIS: filtered truncated importance sampling for heterogeneous decentralized GRPO (arXiv:2605.22537).

Different models train on the same problems and share what they write, so that each needs fewer completions of its own. To the receiver the others'
completions are far off-policy, above all the bad ones that it would never write itself. F-TIS weights every token by the truncated ratio of the local
policy to the generator, and drops completions of negative advantage whose generator is too far away. Advantages compare completions of one generator
(vertical grouping); nodes exchange tokens, their log-probs and rewards. Against GRPO it changes rollout and objective (no KL).
Equations from a digest of the paper; the estimate of the distance (2) is [reconstructed]. Left out: a network. A run by itself learns beside an older
copy of its own policy; `Mailbox` joins several runs of one process into a swarm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, aggregate, clipped, log_ratio, token_ratio
from anypo.seams.rollout import LaggedRollout, OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


class Filtered(NamedTuple):
    distance: Tensor  # [N], how much more likely the generator finds the completion than the local policy, in nats
    advantages: Tensor  # as given, 0 where filtered


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


@torch.no_grad()
def filter_advantages(
    gen_logp: Float[Tensor, "N T"], logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, g: float = 50.0, kl: str = "k1"
) -> Filtered:
    """Equations 2-3, detached: advantages [N] or [N,T] that are not positive become 0 in rows at a distance of `g` or more.

    `kl`: the distance is the sum over tokens of gen_logp - logp ("k1") or of exp(d) - d - 1 with d = logp - gen_logp ("k3"). Raises ValueError.
    """
    far = -log_ratio(logp, gen_logp, mask)
    if kl not in ("k1", "k3"):
        raise ValueError(f"unknown distance '{kl}'; use k1 or k3")
    distance = far.sum(1) if kl == "k1" else (torch.exp(-far) + far - 1).sum(1)
    near = (distance < g).reshape(-1, *([1] * (advantages.dim() - 1)))
    return Filtered(distance, torch.where((advantages > 0) | near, advantages, torch.zeros_like(advantages)))


@torch.no_grad()
def weights(gen_logp: Float[Tensor, "N T"], logp: Float[Tensor, "N T"], C: float = 2.0) -> Float[Tensor, "N T"]:
    """Equation 4, detached: the ratio of the local policy to the generator, truncated from above alone. Not masked."""
    return (logp - gen_logp).clamp(max=LOG_RATIO_LIMIT).exp().clamp(max=C)


def loss(
    gen_logp: Float[Tensor, "N T"], logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, old_logp: Tensor | None = None, C: float = 2.0,
    g: float = 50.0, eps: float = 0.2, anchor: str = "current", kl: str = "k1", weighted: bool = True,
) -> LossValue:  # fmt: skip
    """Equations 2-7: the weighted, clipped surrogate of the filtered advantages [N] or [N,T], mean over rows of row means; filtered rows count.

    `anchor`: the clipped ratio is to logp itself ("current": 1, with its gradient) or to `old_logp`, the local policy at the start of the inner steps
    ("old"). `weighted` False: every token weighs 1. Raises ValueError for another anchor.
    """
    if anchor not in ("current", "old"):
        raise ValueError(f"unknown anchor '{anchor}'; use current or old")
    if anchor == "old" and old_logp is None:
        raise ValueError("anchor 'old' needs old_logp, the log-probs of the local policy at the start of the inner steps")
    inside = mask.bool()
    advantage = broadcast(advantages, mask) if advantages.dim() == 1 else advantages
    advantage = filter_advantages(gen_logp, logp, mask, advantage, g, kl).advantages
    ratio = token_ratio(logp, logp.detach() if anchor == "current" or old_logp is None else old_logp, mask)
    value = clipped(ratio, advantage, 1 - eps, 1 + eps)
    if weighted:
        value = value * torch.where(inside, weights(gen_logp, logp, C), torch.zeros_like(value))
    return LossValue(aggregate(-value, mask, "seq_mean"))


def group_by_node(node: Int[Tensor, " N"], group: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Group numbers that tell (node, group) pairs apart: an advantage is relative to completions of one generator."""
    return torch.unique(torch.stack([node, group]), dim=1, return_inverse=True)[1]


def pack(batch: Batch) -> dict[str, Tensor]:
    """What a node sends of scored rows [N] with M tokens in all: token ids and log-probs (4 bytes each a token), length, prompt number, group and
    reward (4 bytes each a row). Raises ValueError for rows whose tokens are not one piece from the start (several turns)."""
    length = batch.lengths
    if not bool((batch.attended == (torch.arange(batch.horizon) < length[:, None])).all()):
        raise ValueError("nodes share completions of one turn only; take a task whose responses are one piece of text")
    whole = {"token": batch.action[batch.mask], "length": length, "prompt": batch.signal("prompt_id"), "group": batch.group}
    real = {"logp": batch.logp[batch.mask], "reward": batch.signal("task_reward")}
    return {n: v.to(torch.int32) for n, v in whole.items()} | {n: v.to(torch.float32) for n, v in real.items()}


def unpack(message: dict[str, Tensor], problems: Batch) -> Batch:
    """The rows of a message. `problems` [N] gives what every node knows or finds by itself: the prompts and the texts that the tokens spell."""
    mask = torch.arange(problems.horizon) < message["length"][:, None]
    action, logp = torch.zeros_like(problems.action), torch.zeros_like(problems.logp)
    action[mask], logp[mask] = message["token"].to(action.dtype), message["logp"].to(logp.dtype)
    reward = message["reward"].to(problems.signal("task_reward").dtype)
    signals = problems.signals | {"task_reward": reward, "prompt_id": message["prompt"].long()}
    return problems.but(action=action, logp=logp, mask=mask, group=message["group"].long(), signals=signals)


Exchange = Callable[[Batch, list[Prompt], "Run"], list[Batch]]  # a node's own scored rows -> the rows of every peer


@dataclass
class OlderSelf:
    """The peer of a run by itself: an older copy of its policy attempts the same prompts."""

    generator: LaggedRollout = field(default_factory=LaggedRollout)

    def __call__(self, own: Batch, prompts: list[Prompt], run: Run) -> list[Batch]:
        return [self.generator(prompts, run)]


class Mailbox:
    """A swarm in one process: every run whose `rollout.exchange` is `mailbox.join()` sends its rows and takes the last ones of all others that it has
    not seen. Shared by the runs, and no part of their checkpoints."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Tensor], Batch] | None] = []  # by node, the last message with its number
        self.messages = self.bytes = self.tokens = self.rows = 0  # sent so far

    def join(self) -> Node:
        self.sent.append(None)
        return Node(self, len(self.sent) - 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mailbox:
        return self

    def send(self, node: int, rows: Batch) -> None:
        message = pack(rows)
        self.messages += 1
        self.sent[node] = (self.messages, message, rows)
        self.bytes += sum(part.numel() * part.element_size() for part in message.values())
        self.tokens, self.rows = self.tokens + len(message["token"]), self.rows + len(rows)


@dataclass
class Node:
    """One run's place at a mailbox."""

    mailbox: Mailbox
    number: int
    seen: int = field(default=0, init=False, repr=False)  # number of the last message that was there when it looked

    def __call__(self, own: Batch, prompts: list[Prompt], run: Run) -> list[Batch]:
        self.mailbox.send(self.number, own)
        others = [last for peer, last in enumerate(self.mailbox.sent) if peer != self.number and last is not None]
        received = [unpack(message, rows) for number, message, rows in others if number > self.seen]
        self.seen = self.mailbox.messages
        return received


@dataclass
class SwarmRollout:
    """Own attempts and those of the peers. Signal: `node` [N], 0 for own rows; `logp` is everywhere that of the policy that wrote the row."""

    grouping: str = "vertical"  # vertical: rows of one node are compared, horizontal: all rows of a prompt
    own: Rollout = field(default_factory=OnPolicy)
    exchange: Exchange = field(default_factory=OlderSelf)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.grouping not in ("vertical", "horizontal"):
            raise ValueError(f"rollout.grouping is vertical or horizontal, not '{self.grouping}'")
        own = self.own(prompts, run)
        run.score_rewards(own)
        parts = [own, *self.exchange(own, prompts, run)]
        for part in parts:
            run.score_rewards(part)
        # a peer's `old_` signals belong to the peer's policy; where one is needed it is computed for all rows under the local one
        names = [n for n in own.signals if n != "sampled_elsewhere" and not n.startswith("old_") and all(n in p.signals for p in parts)]
        marked = []
        for node, part in enumerate(parts):
            rows = torch.full((len(part),), node)
            extra = {"node": rows, "sampled_elsewhere": torch.ones_like(rows, dtype=torch.bool)}
            marked.append(part.but(signals={n: part.signals[n] for n in names} | extra))
        batch = Batch.concat(marked)
        batch.group = group_by_node(batch.signals["node"], batch.group) if self.grouping == "vertical" else batch.signal("prompt_id")
        run.log(received=float((batch.signals["node"] > 0).double().mean()))
        return batch


@dataclass
class FilteredSurrogate:
    """The clipped surrogate with truncated weights, without bad completions of far generators."""

    truncation: float = 2.0  # C, largest weight of a token, > 0
    distance: float = 50.0  # g, nats at which negative advantages are dropped, > 0; about 5 for completions of up to 8 tokens
    clip: float = 0.2  # the ratio to the anchor stays in [1 - clip, 1 + clip]
    anchor: str = "current"  # current, or old: the local policy at the start of the batch's steps
    kl: str = "k1"  # estimate of the distance, k1 or k3
    weighted: bool = True  # False: every token weighs 1 (the paper's baselines without importance sampling)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp", "old_logp"}) if self.anchor == "old" else frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, gen, old = batch.counted, batch.logp, batch.signals.get("old_logp")
        value = loss(
            gen, new.logp, mask, batch.advantage, old, self.truncation, self.distance, self.clip, self.anchor, self.kl, self.weighted
        ).loss
        found = filter_advantages(gen, new.logp, mask, batch.advantage, self.distance, self.kl)
        dropped = (found.advantages != batch.advantage).any(1)
        truncated = masked_mean((log_ratio(new.logp.detach(), gen, mask).exp() > self.truncation).to(gen.dtype), mask)
        metrics = {"filtered": float(dropped.double().mean()), "truncated": float(truncated), "distance": float(found.distance.mean())}
        return Loss(value, metrics)


METHOD = GRPO.but(
    name="f_tis",
    paper=Paper("F-TIS: Harnessing Diverse Models in Collaborative GRPO", "2605.22537", 2026),
    summary="completions of other models are trained on with truncated token weights; bad ones that the model would never write are dropped",
    rollout=SwarmRollout(),
    objective=FilteredSurrogate(),
    regularize=(),
)
