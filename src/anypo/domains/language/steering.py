"""SteeredPolicy: stands for a policy while a task collects, and steers the replies it samples before the task sees them.

A `Steering` reads the policy's distributions at every token of a reply. It may cut the thinking and have a queue of forced tokens put there, after
which the policy goes on; and it may have a whole reply drawn again in the light of the conversation's turn before. Whole replies are drawn first and
cut afterwards, which is the same in distribution as watching token by token when the steering looks back only. Left out: any particular steering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from anypo.batch import Batch
from anypo.domains.language.agents import plain_tokens


class Steering(Protocol):
    """What decides. `own` [N,T] are the tokens that the policy chose."""

    def measure(self, log_prob: Float[Tensor, "N T V"]) -> tuple[Tensor, Tensor]:
        """Two numbers [N,T] for every distribution."""
        ...

    def signal(self, measured: tuple[Tensor, Tensor], own: Tensor) -> Float[Tensor, "N T"]:
        """One number a token, from what was measured so far in the reply."""
        ...

    def cut(self, signal: Float[Tensor, "N T"], length: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        """The place, at most `length`, where thinking of that length is cut; -1 = nowhere."""
        ...

    def turn(self, signal: Float[Tensor, "N T"], own: Tensor) -> Float[Tensor, " N"]:
        """One number a reply."""
        ...

    def again(self, turn: Float[Tensor, " N"], previous: Float[Tensor, " N"]) -> Bool[Tensor, " N"]:
        """Which replies are drawn again; `previous` is NaN for first turns."""
        ...


@dataclass
class Drawn:
    """N replies of T tokens; `forced` are those the policy did not choose."""

    tokens: Tensor
    valid: Tensor
    logp: Tensor
    entropy: Tensor
    finished: Tensor
    forced: Tensor
    turn: Tensor  # [N] the steering's number

    def put(self, rows: Tensor, new: Drawn) -> Drawn:
        """These replies with `rows` replaced."""
        width = max(self.tokens.shape[1], new.tokens.shape[1])
        merged = {}
        for name, old in vars(self).items():
            fresh = getattr(new, name)
            if old.dim() == 2:
                old, fresh = pad(old, (0, width - old.shape[1])), pad(fresh, (0, width - fresh.shape[1]))
            merged[name] = old.index_copy(0, rows, fresh.to(old.dtype))
        return Drawn(**merged)


@dataclass
class Turn:
    """The newest turn of a conversation."""

    row: int  # number of the conversation
    text: Tensor  # all tokens, context included, up to the end of the reply
    turn: float
    forced: list[int]  # places of all forced tokens in the text


@dataclass
class Request:
    """How the rows of one call are drawn."""

    starts: list[Tensor]
    limit: Tensor  # [N] tokens
    heat: Tensor  # [N] temperature, NaN for the policy's own
    source: Tensor  # [N] number of the caller's prompt
    generator: torch.Generator
    options: dict[str, Any]

    def of(self, rows: Tensor) -> Request:
        return Request(
            [self.starts[i] for i in rows.tolist()], self.limit[rows], self.heat[rows], self.source[rows], self.generator, self.options
        )

    def draw(self, policy: Any, heads: list[Tensor] | None = None) -> Any:
        """One reply a row, which goes on after `heads` where there are any."""
        starts, limit, options = self.starts, self.limit, dict(self.options)
        if heads is not None:
            starts = [torch.cat(pair) for pair in zip(starts, heads, strict=True)]
            limit = limit - torch.tensor([len(head) for head in heads])
        stop = options.get("stop")
        if stop is not None:
            options["stop"] = lambda tokens, source: stop(tokens, self.source[source])
        heat = None if bool(self.heat.isnan().any()) else self.heat.tolist()
        return policy.sample(starts, [1] * len(starts), max_tokens=limit.tolist(), temperature=heat, generator=self.generator, **options)


class SteeredPolicy:
    """One call of `sample` is one turn of every conversation still going on; conversations are recognized by how their prompts begin, and keep their
    order. `tags`: what thinking opens with (empty: a reply begins in thought), the queue that ends it, and what follows in the queue."""

    def __init__(self, policy: Any, steering: Steering, tags: tuple[str, str, str], max_try: int) -> None:
        self.policy, self.steering, self.max_try = policy, steering, max_try
        self.turns, self.newest = list[Turn](), dict[int, Turn]()
        self.discarded = self.resampled = self.interventions = self.replies = 0  # tokens, draws, cuts, turns
        opening, closing, after = tags
        self.opening, self.closing, self.queue = (self._tokens(text) for text in (opening, closing, closing + after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def _tokens(self, text: str) -> Tensor | None:
        """None for what the policy cannot write."""
        try:
            tokens = torch.tensor(plain_tokens(self.policy, text), dtype=torch.int64)
        except ValueError:
            return None
        return tokens if self.policy.decode(tokens) == text else None

    def sample(
        self, prompts: Sequence[Tensor], samples: int | Sequence[int], *, max_tokens: Any, generator: torch.Generator, **options: Any
    ) -> Any:
        """As the policy's own `sample`; the very same draws where nothing is steered."""
        out = self.policy.sample(prompts, samples, max_tokens=max_tokens, generator=generator, **options)
        limit, heat = (_each(value, len(prompts))[out.source] for value in (max_tokens, options.pop("temperature", None)))
        request = Request([prompts[i] for i in out.source.tolist()], limit.long(), heat.float(), out.source, generator, options)
        found = self.steer(_drawn(out), request)
        before = self.recall(request.starts)
        last = torch.tensor([float("nan") if turn is None else turn.turn for turn in before])
        for _ in range(self.max_try):
            rows = self.steering.again(found.turn, last).nonzero().flatten()
            if len(rows) == 0:
                break
            self.discarded += int((found.valid & ~found.forced)[rows].sum())
            self.resampled += len(rows)
            again = request.of(rows)
            found = found.put(rows, self.steer(_drawn(again.draw(self.policy)), again))
        self.remember(request.starts, before, found)
        entropy = None if out.entropy is None else found.entropy
        return type(out)(
            tokens=found.tokens, valid=found.valid, logp=found.logp, entropy=entropy, finished=found.finished, source=out.source
        )

    def steer(self, found: Drawn, request: Request) -> Drawn:
        """Replies with their thinking cut where the steering wants it, finished by the policy, and their numbers."""
        signal = self.watch(found, request)
        at = self.places(signal, found, request.limit)
        rows = (at >= 0).nonzero().flatten()
        if len(rows):
            assert self.queue is not None
            chosen, cut = request.of(rows), at[rows]
            heads = [torch.cat([found.tokens[row, :t], self.queue]) for row, t in zip(rows.tolist(), cut.tolist(), strict=True)]
            self.interventions += len(rows)
            self.discarded += int((found.valid[rows].sum(1) - cut).clamp(min=0).sum())
            found = found.put(rows, self.joined(found, rows, cut, _drawn(chosen.draw(self.policy, heads))))
            signal = self.watch(found, request)
        found.turn = self.steering.turn(signal, found.valid & ~found.forced).to(found.turn.dtype)
        return found

    def joined(self, found: Drawn, rows: Tensor, cut: Tensor, tail: Drawn) -> Drawn:
        """Replies made of a beginning, the queue and the policy's ending."""
        assert self.queue is not None
        size, ends = len(self.queue), tail.valid.sum(1).tolist()
        between = {
            "tokens": self.queue,
            "valid": torch.ones(size),
            "logp": torch.zeros(size),
            "entropy": torch.zeros(size),
            "forced": torch.ones(size),
        }

        def joint(name: str) -> Tensor:
            old, new = getattr(found, name), getattr(tail, name)
            pieces = zip(rows.tolist(), cut.tolist(), new, ends, strict=True)
            return pad_sequence(
                [torch.cat([old[row, :t], between[name].to(old.dtype), tip[:n]]) for row, t, tip, n in pieces], batch_first=True
            )

        return Drawn(**{name: joint(name) for name in between}, finished=tail.finished, turn=tail.turn)

    @torch.no_grad()
    def watch(self, found: Drawn, request: Request) -> Float[Tensor, "N T"]:
        """The steering's number at every token."""
        signals = {} if bool(request.heat.isnan().any()) else {"temperature": request.heat}
        batch = Batch(
            action=found.tokens, mask=found.valid, valid=found.valid, logp=found.logp, group=torch.arange(len(found.tokens)), context=request.starts,
            signals=dict(signals),
        )  # fmt: skip
        measured = (torch.zeros_like(found.logp), torch.zeros_like(found.logp))
        for rows in self.policy.chunks(batch) if batch.horizon else ():
            log_prob = self.policy.evaluate(batch[rows], {"logits"}).logits.log_softmax(-1)
            for whole, part in zip(measured, self.steering.measure(log_prob), strict=True):
                whole[rows] = part.to(whole.dtype)
        return self.steering.signal(measured, found.valid & ~found.forced)

    def places(self, signal: Tensor, found: Drawn, limit: Tensor) -> Int[Tensor, " N"]:
        """Where the queue begins in each reply; -1 for one that does not think or has no room left for an action."""
        nowhere = torch.full_like(limit, -1)
        if self.opening is None or self.closing is None or self.queue is None or signal.shape[1] <= len(self.opening):
            return nowhere
        skip, width = len(self.opening), len(self.closing)
        end = found.valid.sum(1) - found.finished.long()
        if signal.shape[1] >= width:
            closes = (found.tokens.unfold(1, width, 1) == self.closing).all(-1)
            end = torch.where(closes.any(1), torch.minimum(end, closes.long().argmax(1)), end)
        at = self.steering.cut(signal[:, skip:], (end - skip).clamp(min=0)) + skip
        thinks = (found.tokens[:, :skip] == self.opening).all(1)
        return torch.where(thinks & (at >= skip) & (at + len(self.queue) < limit), at, nowhere)

    def recall(self, starts: list[Tensor]) -> list[Turn | None]:
        """The turn before of every conversation; None for a first turn."""
        found: list[Turn | None] = []
        waiting = 0
        for start in starts:
            match = next((k for k in range(waiting, len(self.turns)) if _begins(start, self.turns[k].text)), None)
            found.append(None if match is None else self.turns[match])
            waiting = waiting if match is None else match + 1
        return found

    def remember(self, starts: list[Tensor], before: list[Turn | None], found: Drawn) -> None:
        self.turns = []
        self.replies += len(starts)
        for i, (start, turn) in enumerate(zip(starts, before, strict=True)):
            row = len(self.newest) if turn is None else turn.row
            forced = ([] if turn is None else turn.forced) + (len(start) + found.forced[i].nonzero().flatten()).tolist()
            self.newest[row] = Turn(row, torch.cat([start, found.tokens[i][found.valid[i]]]), float(found.turn[i]), forced)
            self.turns.append(self.newest[row])

    def forced(self, batch: Batch) -> Bool[Tensor, "N T"]:
        """The forced tokens of the batch that was collected. Raises ValueError when its rows are not in the order they were sampled in."""
        forced = torch.zeros_like(batch.mask)
        for row, turn in self.newest.items():
            if turn.forced:
                if not _begins(torch.cat([batch.context[row], batch.action[row][batch.attended[row]]]), turn.text):
                    raise ValueError("steering needs a task whose rows come in the order in which it samples them")
                forced[row, torch.tensor(turn.forced) - len(batch.context[row])] = True
        return forced


def _drawn(out: Any) -> Drawn:
    entropy = torch.zeros_like(out.logp) if out.entropy is None else out.entropy
    return Drawn(out.tokens, out.valid, out.logp, entropy, out.finished, torch.zeros_like(out.valid), torch.zeros(len(out.tokens)))


def _each(value: Any, count: int) -> Tensor:
    return torch.as_tensor(float("nan") if value is None else value).expand(count)


def _begins(text: Tensor, beginning: Tensor) -> bool:
    return len(text) >= len(beginning) and torch.equal(text[: len(beginning)], beginning)
