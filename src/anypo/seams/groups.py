"""Statistics by integer group: written once, vectorized, with the paper's own `ddof` and `eps` as arguments.

Every function takes values [N] or [N,K] and a group number per row, and returns one value per row, so that results line up with the batch.
Groups are identified by their integer alone; rows of a group need not be adjacent.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import whole

Values = Float[Tensor, "N *K"]


def group_sum(values: Values, group: Int[Tensor, " N"]) -> Values:
    """Sum over the members of each row's group."""
    _, index = torch.unique(group, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    total = values.new_zeros((count, *values.shape[1:])).index_add(0, index, values)
    return total[index]


def group_size(group: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Number of members of each row's group."""
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    return counts[index]


def group_mean(values: Values, group: Int[Tensor, " N"]) -> Values:
    """Mean over the members of each row's group."""
    return group_sum(values, group) / _as_column(group_size(group), values)


def group_std(values: Values, group: Int[Tensor, " N"], ddof: int = 0) -> Values:
    """Standard deviation over each row's group with `ddof` 0 or 1; a group with no more than `ddof` members, and one whose members are all
    equal, has exactly 0."""
    size = _as_column(group_size(group), values)
    spread = group_sum((values - group_mean(values, group)) ** 2, group) / (size - ddof).clamp(min=1)
    constant = group_max(values, group) == group_min(values, group)
    return torch.where(constant, torch.zeros_like(spread), spread).sqrt()


def group_max(values: Values, group: Int[Tensor, " N"]) -> Values:
    """Largest value in each row's group."""
    return _extreme(values, group, "amax")


def group_min(values: Values, group: Int[Tensor, " N"]) -> Values:
    """Smallest value in each row's group."""
    return _extreme(values, group, "amin")


def standardize(values: Values, group: Int[Tensor, " N"], ddof: int = 0, eps: float = 1e-6) -> Values:
    """(value - group mean) / (group std + eps); exactly 0 where the group has no spread, whatever eps is."""
    deviation = group_std(values, group, ddof)
    centred = values - group_mean(values, group)
    return torch.where(deviation == 0, torch.zeros_like(values), centred / (deviation + eps).clamp(min=torch.finfo(values.dtype).tiny))


def leave_one_out_mean(values: Values, group: Int[Tensor, " N"]) -> Values:
    """Mean of the other members of each row's group; a lone member has its own value, so that value - mean is 0."""
    size = _as_column(group_size(group), values)
    others = (group_sum(values, group) - values) / (size - 1).clamp(min=1)
    return torch.where(size > 1, others, values)


def has_spread(values: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    """Whether the members of each row's group differ at all."""
    return group_max(values, group) != group_min(values, group)


def peers(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, "N G"], Bool[Tensor, "N G"]]:
    """The row numbers of each row's group, G the size of the largest one, and which of them are other members than the row itself. Places that a
    smaller group leaves over hold the row itself. Memory grows with N times G, not with N squared."""
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    own = torch.arange(len(group), device=group.device)[:, None]
    place = torch.arange(int(counts.max()) if len(counts) else 0, device=group.device)
    start = (counts.cumsum(0) - counts)[index]
    at = (start[:, None] + place).clamp(max=max(len(group) - 1, 0))
    rows = torch.where(place < counts[index][:, None], index.argsort(stable=True)[at], own)
    return rows, rows != own


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar mean over the True positions of `mask`; 0 when there are none. Values outside the mask may be anything, NaN included."""
    if values.shape == mask.shape and whole(mask):
        return values.mean()
    inside = torch.where(mask.bool(), values, torch.zeros_like(values))
    return inside.sum() / mask.sum().clamp(min=1)


def masked_std(values: Tensor, mask: Tensor, ddof: int = 0) -> Tensor:
    """Scalar standard deviation over the True positions of `mask`; 0 when there are no more than `ddof`."""
    if values.shape == mask.shape and mask.numel() > ddof and whole(mask):
        return values.std(correction=ddof)
    inside = torch.where(mask.bool(), values - masked_mean(values, mask), torch.zeros_like(values))
    return ((inside**2).sum() / (mask.sum() - ddof).clamp(min=1)).sqrt()


def broadcast(advantage: Float[Tensor, " N"], mask: Tensor) -> Float[Tensor, "N T"]:
    """One advantage a row to every action the policy wrote: [N] and mask [N,T] -> [N,T], 0 elsewhere."""
    return torch.where(mask.bool(), advantage[:, None], advantage.new_zeros(()))


def _extreme(values: Values, group: Int[Tensor, " N"], how: str) -> Values:
    _, index = torch.unique(group, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    where = _as_column(index, values).expand_as(values)
    out = values.new_zeros((count, *values.shape[1:])).scatter_reduce(0, where, values, reduce=how, include_self=False)
    return out[index]


def _as_column(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row.reshape(-1, *([1] * (like.dim() - 1)))
