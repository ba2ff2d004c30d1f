"""The instances of certified_ranking: plans, candidates with their trajectories, rosters, and the audit of what was ranked and cited."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.domains.language.certificates import Matching, align, evidence_support, matching

TYPES, FILLERS, DOCUMENTS = 8, 4, 3
SLOTS, MENTIONS, TOP, CITES = 4, 8, 3, 2  # S, mentions a candidate, K, m
GOLD, PHANTOM = 8, 2  # candidates of an instance, and those that a roster made by a model may hold beside them
ROSTER = GOLD + PHANTOM
KINDS = torch.tensor(
    [0.15, 0.2, 0.25, 0.25, 0.15]
)  # follows the plan; half of its fillers; backwards; wrong fillers; has nothing to do with it


@dataclass
class Instances:
    """B instances. Mentions in time order; kind -1 where there is none in the window."""

    skeleton: Tensor  # [B,S] distinct event types
    filler: Tensor  # [B,S]
    kind: Tensor  # [B,C,M]
    argument: Tensor  # [B,C,M]
    place: Tensor  # [B,C,M] order in the text
    listed: Tensor  # [B,C] bool, the candidates on the roster
    relevance: Tensor  # [B,C] 0, 1 or 2
    features: Tensor  # [B,C,3] align, arg, graph

    def __getitem__(self, index: Tensor) -> Instances:
        return Instances(*(getattr(self, f.name)[index] for f in fields(self)))

    def trajectories(self) -> tuple[Tensor, Tensor]:
        """Features [B,8,3] of the gold candidates and their labels [B,8], to learn a reward from."""
        return self.features[:, :GOLD], self.relevance[:, :GOLD]

    def document_order(self) -> Bool[Tensor, "B C M"]:
        """The first m spans of each candidate in the text."""
        return _first(torch.where(self.kind >= 0, self.place, MENTIONS + self.place)) & (self.kind >= 0)

    def aligned(self) -> Bool[Tensor, "B C M"]:
        """Up to m of the spans that the verifier aligns."""
        used = _matched(self.skeleton, self.filler, self.kind, self.argument).used
        return _first(torch.where(used, 0, MENTIONS) + torch.arange(MENTIONS)) & used

    def context(self) -> Float[Tensor, "B C 1+M F"]:
        """What the policy reads: of each candidate whether it is listed and its features; of each span whether it can be cited, the slot its type fills,
        whether its argument fits, its place in the text and in time."""
        table = torch.zeros(*self.kind.shape[:2], 1 + MENTIONS, 4 + SLOTS)
        table[:, :, 0, 0] = self.listed.float()
        table[:, :, 0, 1:4] = self.features.float()
        table[:, :, 1:, 0] = (self.kind >= 0).float()
        hit = self.kind[..., None] == self.skeleton[:, None, None]
        table[:, :, 1:, 1 : 1 + SLOTS] = hit.float()
        table[:, :, 1:, 1 + SLOTS] = (hit & (self.argument[..., None] == self.filler[:, None, None])).any(-1).float()
        table[:, :, 1:, 2 + SLOTS] = self.place / MENTIONS
        table[:, :, 1:, 3 + SLOTS] = torch.arange(MENTIONS) / MENTIONS
        return table


def _first(order: Tensor) -> Tensor:
    return order.argsort(-1).argsort(-1) < CITES


def _matched(skeleton: Tensor, filler: Tensor, kind: Tensor, argument: Tensor) -> Matching:
    return matching(skeleton[:, None, :, None] == kind[:, :, None], filler[:, None, :, None] == argument[:, :, None])


def draw(count: int, seed: int, roster: str = "closed") -> Instances:
    """`roster`: closed (the gold candidates), predicted (a fifth of them is missing, fragments of others are on it) or hybrid (all of both). The
    instances of a seed differ in nothing else. Raises ValueError for another roster."""
    if roster not in ("closed", "predicted", "hybrid"):
        raise ValueError(f"the roster is closed, predicted or hybrid, not '{roster}'")
    g = torch.Generator().manual_seed(seed)

    def uniform(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (count, *shape), generator=g)

    types = torch.rand(count, TYPES, generator=g).argsort(-1)
    skeleton, others, filler = types[:, :SLOTS], types[:, SLOTS:], uniform(FILLERS, SLOTS)
    what = torch.multinomial(KINDS, count * GOLD, replacement=True, generator=g).view(count, GOLD, 1)
    kind = others[:, None].expand(-1, GOLD, -1).gather(-1, uniform(TYPES - SLOTS, GOLD, MENTIONS))
    argument = uniform(FILLERS, GOLD, MENTIONS)
    where = torch.rand(count, GOLD, MENTIONS, generator=g).argsort(-1)[..., :SLOTS].sort(-1).values
    spoilt = torch.where(what == 1, torch.rand(count, GOLD, SLOTS, generator=g).argsort(-1) < SLOTS // 2, what == 3)
    wrong = (filler[:, None] + 1 + uniform(FILLERS - 1, GOLD, SLOTS)) % FILLERS
    step = torch.where(what == 2, torch.arange(SLOTS).flip(0), torch.arange(SLOTS))
    plan = skeleton[:, None].expand(-1, GOLD, -1).gather(-1, step)
    fits = torch.where(spoilt, wrong, filler[:, None].expand(-1, GOLD, -1)).gather(-1, step)
    kind = torch.where(what < 4, kind.scatter(-1, where, plan), kind)
    argument = torch.where(what < 4, argument.scatter(-1, where, fits), argument)
    kind = torch.where(torch.rand(kind.shape, generator=g) < 0.1, -1, kind)  # outside the window
    source = torch.rand(count, GOLD, generator=g).argsort(-1)[:, :PHANTOM, None].expand(-1, -1, MENTIONS)
    fragment = torch.where(torch.rand(source.shape, generator=g) < 0.5, -1, kind.gather(1, source))
    kind, argument = torch.cat([kind, fragment], 1), torch.cat([argument, argument.gather(1, source)], 1)
    document = uniform(DOCUMENTS, ROSTER, MENTIONS)
    place = (document + torch.rand(kind.shape, generator=g)).argsort(-1).argsort(-1)
    listed = torch.rand(count, ROSTER, generator=g) < 0.8
    listed[:, :TOP] = True  # the candidates come in no order, and K of them can always be ranked
    gold = (torch.arange(ROSTER) < GOLD).expand(count, -1)
    listed = {"closed": gold, "predicted": listed, "hybrid": gold | listed}[roster]
    relevance, features = _labels(skeleton, filler, kind, argument, document)
    return Instances(skeleton, filler, kind, argument, place, listed, relevance * gold, features)


def _labels(skeleton: Tensor, filler: Tensor, kind: Tensor, argument: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance [B,C] by the share of slots that are matched with the right filler, and the features [B,C,3]."""
    found = _matched(skeleton, filler, kind, argument)
    exact = torch.where(kind >= 0, kind * FILLERS + argument, -1)
    full = align((skeleton * FILLERS + filler)[:, None], exact)
    linked, last = torch.zeros_like(full), torch.full(full.shape, -1)
    for j in range(MENTIONS):
        linked += found.used[..., j] & (document[..., j] == last)
        last = torch.where(found.used[..., j], document[..., j], last)
    features = [found.length / SLOTS, found.right / SLOTS, linked / (found.length - 1).clamp(min=1)]
    return (3 * full).floor().clamp(max=2).long(), torch.stack(features, dim=-1).double()


class Certificates(NamedTuple):
    """What the audit of N outputs says of each of their K positions, and whether the whole output is feasible [N]."""

    validity: Tensor
    support: Tensor
    feasible: Tensor


def audit(instances: Instances, ranking: Int[Tensor, "N K"], cited: Bool[Tensor, "N K C*M"]) -> Certificates:
    """Equations 5 and 6. A span is valid if it is in the window and belongs to the position's candidate; the verifier reads valid spans only."""
    own = torch.arange(ROSTER)[:, None] == ranking[..., None, None]
    exists = (instances.kind >= 0)[:, None] & own
    valid = cited & exists.flatten(2)
    picked = ranking[..., None].expand(-1, -1, MENTIONS)
    kind = instances.kind.gather(1, picked)
    chosen = valid.unflatten(2, (ROSTER, MENTIONS)).any(2)
    count = cited.sum(-1)
    support = evidence_support(
        align(instances.skeleton[:, None], kind), align(instances.skeleton[:, None], torch.where(chosen, kind, -1)), count > 0
    )
    different = ranking.sort(-1).values.diff(dim=-1).ne(0).all(-1) & instances.listed.gather(1, ranking).all(-1)
    return Certificates(valid.sum(-1) / count.clamp(min=1), support, different & (valid == cited).flatten(1).all(-1))
