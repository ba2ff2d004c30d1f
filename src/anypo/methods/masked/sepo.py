"""SEPO: score entropy policy optimization for discrete diffusion models (arXiv:2502.01384).

A discrete diffusion model gives concrete scores s(x)_y, estimates of pi(y) / pi(x) for the neighbours y of x that differ in one token, and no pi(x).
SEPO writes the policy gradient in scores alone: the loss A(x) sum_y pi(y) log s(x)_y lowers the scores that point away from good samples. The
ratio of new and old pi(x), read through any neighbour, gives PPO's clipping; nothing is back-propagated through the chain of denoising steps.

Against GRPO: the objective, a KL between denoisers, the update that scores neighbours; in `sepo.gf` also a corrector after sampling. Equations 1 and
2 from the paper, 3 to 5 and 8 from the authors' code. [reconstructed]: scores of a masked model (6), the one-sided rule of the weights (5), how
pi(y) is estimated (7) and the rates of the corrector (9). Left out: the entropy bonus, the KL of more than the last denoising step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.decode import end_tokens
from anypo.domains.masked.states import with_hidden
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import LOG_RATIO_LIMIT
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

FORMS = ("one_sided", "code")


class Identity(NamedTuple):
    scores: Tensor  # [V]
    pi_x: Tensor  # scalar
    score_function: Tensor  # [V], gradient of log pi(x) in the logits


class CodeLoss(NamedTuple):
    U: Tensor  # [N]
    C: Tensor  # [N]
    loss: Tensor  # scalar


class Sites(NamedTuple):
    """Every token of a batch that has neighbours, M in all, in the state in which it alone (or with others) is masked."""

    row: Tensor  # [M] int64
    place: Tensor  # [M] int64
    view: Batch  # M rows


# ---- the mathematics


def identity(logits: Float[Tensor, " V"], x: int) -> Identity:
    """Equation 1 for a softmax over V states that are all neighbours: the score function from scores, -sum_y pi(y) grad log s(x)_y."""
    logits = logits.detach().clone().requires_grad_(True)
    log_scores = logits - logits[x]
    scores = log_scores.exp()
    pi = (scores / scores.sum()).detach()  # s(x)_x = 1, so that pi(x) = 1 / (1 + sum over the others)
    (gradient,) = torch.autograd.grad(-(pi * log_scores).sum(), logits)
    return Identity(scores.detach(), pi[x], gradient)


def ratio(pi_new: Tensor, pi_old: Tensor, s_new: Tensor, s_old: Tensor) -> Tensor:
    """Equation 3: pi(x) / pi_old(x) read through each neighbour, any shape; detached."""
    return ((pi_new / pi_old) * (s_old / s_new)).detach()


def weights(adv: Tensor, rho: Tensor, eps: float) -> Tensor:
    """Equation 5's one-sided rule: rho while the step that the advantage asks for is inside 1 +- eps, else the bound."""
    free = ((adv > 0) & (rho < 1 + eps)) | ((adv < 0) & (rho > 1 - eps)) | (adv == 0)
    return torch.where(free, rho, rho.clamp(1 - eps, 1 + eps))


def loss(
    adv: Float[Tensor, " N"], pi_new: Float[Tensor, "N Y"], pi_old: Float[Tensor, "N Y"], s_new: Float[Tensor, "N Y"], s_old: Float[Tensor, "N Y"],
    eps: float = 0.2,
) -> Tensor:  # fmt: skip
    """Equation 5, to minimize: the mean over x of A sum_y pi(y) w log s(x)_y; only log s carries a gradient."""
    w = weights(adv[:, None], ratio(pi_new, pi_old, s_new, s_old), eps)
    return (adv[:, None] * pi_new.detach() * w * s_new.log()).sum(1).mean()


def loss_code(
    adv: Float[Tensor, " N"], pi_new: Float[Tensor, "N Y"], pi_old: Float[Tensor, "N Y"], s_new: Float[Tensor, "N Y"], s_old: Float[Tensor, "N Y"],
    eps: float = 0.2,
) -> CodeLoss:  # fmt: skip
    """Equations 4 and 5 as in the authors' code: the smaller of the two batch means of A U and A C, to minimize."""
    rho, terms = ratio(pi_new, pi_old, s_new, s_old), pi_new.detach() * s_new.log()
    free, bounded = (rho * terms).sum(1), (rho.clamp(1 - eps, 1 + eps) * terms).sum(1)
    return CodeLoss(free, bounded, torch.minimum((adv * free).mean(), (adv * bounded).mean()))


def mdlm_scores(probs: Float[Tensor, "*N L V"], x: Int[Tensor, "*N L"]) -> Float[Tensor, "*N L V"]:
    """Equation 6: s of x with token b at i is p_i(b) / p_i(x_i), from denoising probabilities with position i masked."""
    return probs / probs.gather(-1, x[..., None])


def group_advantages(reward: Float[Tensor, "G B"]) -> Float[Tensor, "G B"]:
    """Rewards relative to their column's mean and sample standard deviation; a constant column has 0."""
    spread = torch.where((reward == reward[:1]).all(0), 0.0, reward.std(0))
    return (reward - reward.mean(0)) * (spread > 0) / (spread + 1e-8)


def corrector_rates(scores: Float[Tensor, "N T V"], neighbour: Bool[Tensor, "N T V"]) -> Float[Tensor, "N T V"]:
    """Equation 9: rates 1 + s(x)_y to neighbours, 0 to others. Noise forwards (1) and backwards (s) together leave pi as it is, since
    pi(x) (1 + pi(y) / pi(x)) is the same for x and y; rates s alone would lead to pi squared."""
    return torch.where(neighbour, 1 + scores, 0.0)


def move(x: Int[Tensor, "N T"], rates: Float[Tensor, "N T V"], dt: float, generator: torch.Generator) -> Int[Tensor, "N T"]:
    """A step of length `dt` of the chain that jumps from x to the string with letter v at t at the rate [.,t,v]; one jump at the most."""
    flat = rates.flatten(1)
    total = flat.sum(1)
    jumps = torch.rand(len(x), generator=generator) < 1 - (-dt * total).exp()
    rows = jumps.nonzero().flatten()
    moved = x.clone()
    if len(rows):
        chosen = torch.multinomial((flat / total[:, None])[rows], 1, generator=generator)[:, 0]
        vocabulary = rates.shape[-1]
        moved[rows, chosen // vocabulary] = chosen % vocabulary
    return moved


# ---- scores and neighbours of a batch


def sites(batch: Batch, run: Run, also: Tensor | None = None) -> Sites:
    """The batch's counted tokens other than end tokens, each with itself masked, and with the tokens `also` [N,T] where given."""
    row, place = (batch.counted & ~end_tokens(batch.action, run.policy.eos_ids)).nonzero(as_tuple=True)
    hidden = torch.nn.functional.one_hot(place, batch.horizon).bool()
    return Sites(row, place, with_hidden(batch[row], hidden if also is None else hidden | also[row]))


def letters(policy: object, vocabulary: int) -> Bool[Tensor, " V"]:
    """The tokens that a neighbour may have: all but the mask and the end tokens."""
    ids = [policy.mask_id, *policy.eos_ids]  # type: ignore[attr-defined]
    return torch.ones(vocabulary, dtype=torch.bool).index_fill(0, torch.tensor(ids), False)


def log_scores(found: Sites, log_probs: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
    """Log of equation 6 at every site."""
    own = found.view.action.gather(1, found.place[:, None])
    return log_probs - log_probs.gather(1, own)


def neighbours(found: Sites, policy: object, vocabulary: int) -> Bool[Tensor, "M V"]:
    """Which tokens at a site make a neighbour."""
    own = found.view.action.gather(1, found.place[:, None])
    return letters(policy, vocabulary).expand(len(own), -1) & (torch.arange(vocabulary) != own)


def neighbour_probs(batch: Batch, run: Run) -> Float[Tensor, "N T V"]:
    """Equation 7: pi(y) under the current policy, normalized over x and its neighbours, 0 for what is no neighbour.

    pi(y) / pi(x) is a ratio of two sums over the corruptions in the signal `corrupted` [N,M,T], each with the changed token masked too: of the products
    of the probabilities that the masked tokens of y, and of x, have in it.
    """
    above, below = [], []
    for corrupted in batch.signal("corrupted").unbind(1):
        found = sites(batch, run, also=corrupted)
        log_probs = run.score(found.view, {"logits"}).logits.log_softmax(-1)
        each = log_probs.gather(-1, found.view.action[..., None])[..., 0]
        at = torch.arange(len(found.row)), found.place
        rest = torch.where(found.view.mask, each, 0.0).sum(1) - each[at]
        above.append(rest[:, None] + log_probs[at])
        below.append(rest + each[at])
    log_odds = torch.stack(above).logsumexp(0) - torch.stack(below).logsumexp(0)[:, None]
    vocabulary = log_odds.shape[-1]
    log_odds = log_odds.masked_fill(~neighbours(found, run.policy, vocabulary), -torch.inf)
    table = log_odds.new_full((*batch.mask.shape, vocabulary), -torch.inf).index_put((found.row, found.place), log_odds)
    odds = torch.cat([table.new_zeros(len(batch), 1), table.flatten(1)], 1).softmax(1)[:, 1:]  # x itself has log-odds 0
    return odds.view_as(table)


def site_log_probs(batch: Batch, run: Run) -> Float[Tensor, "N T V"]:
    """Log-probs of every token at every site that is masked alone, under the current policy; 0 where there is no site."""
    found = sites(batch, run)
    logits = run.score(found.view, {"logits"}).logits
    at_site = logits[torch.arange(len(found.row)), found.place].log_softmax(-1)
    return at_site.new_zeros((*batch.mask.shape, at_site.shape[-1])).index_put((found.row, found.place), at_site)


# ---- components


def _site_view(view: Batch, run: Run, who: str) -> Sites:
    if "neighbour_probs" not in view.signals:
        raise ValueError(
            f"{run.method.name}: {who} looks at tokens that are masked alone, which the update of sepo does; use --update sepo"
        )
    return Sites(view.signals["row"], view.signals["place"], view)


@dataclass
class ScoreEntropy:
    """The policy gradient in scores, with per-token advantages."""

    eps: float = 0.2  # the ratio counts up to 1 - eps and 1 + eps, in [0,1]
    form: str = "one_sided"  # or code: the smaller of two batch means, as the authors have it

    needs = frozenset({"logits"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        if self.form not in FORMS:
            raise ValueError(f"unknown form '{self.form}' of the score entropy loss; use {' or '.join(FORMS)}")
        found = _site_view(batch, run, "the objective")
        log_probs = new.logits[batch.mask].log_softmax(-1)
        pair = neighbours(found, run.policy, log_probs.shape[-1])
        log_new, log_old = (log_scores(found, p)[pair] for p in (log_probs, batch.signals["old_site_logp"]))
        pi_new, pi_old = (batch.signals[name][pair] for name in ("neighbour_probs", "old_neighbour_probs"))
        adv = batch.advantage[batch.mask][:, None].expand(pair.shape)[pair]
        tiny = torch.finfo(pi_new.dtype).tiny
        log_rho = pi_new.clamp(min=tiny).log() - pi_old.clamp(min=tiny).log() + log_old - log_new.detach()
        rho = log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        term, bounded, rows = adv * pi_new * log_new, rho.clamp(1 - self.eps, 1 + self.eps), len(torch.unique(found.row))
        if self.form == "code":
            total = torch.minimum((rho * term).sum(), (bounded * term).sum())
        else:
            total = (weights(adv, rho, self.eps) * term).sum()
        left = float((rho != bounded).double().mean()) if len(rho) else 0.0
        return Loss(total / max(rows, 1), {"clip_fraction": left})


@dataclass
class DenoiserKL:
    """beta times the KL from the current denoiser to the one that acted, mean over the tokens that are masked alone (equation 8, last step)."""

    beta: float = 1e-4  # >= 0

    needs = frozenset({"logits"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        _site_view(batch, run, "the KL")
        log_probs = new.logits[batch.mask].log_softmax(-1)
        kl = (log_probs.exp() * (log_probs - batch.signals["old_site_logp"])).sum(-1).sum() / max(len(log_probs), 1)
        return Loss(self.beta * kl, {"kl": float(kl.detach())})


@dataclass
class ScoreSteps(GradientSteps):
    """Optimizer steps on losses of scores: every token of an answer is masked alone in a row of its own, and the probabilities of the neighbours are
    those of the policy at that step, from corruptions drawn once a batch."""

    epochs: int = 5  # passes over the batch, >= 1
    corruptions: int = 2  # of every answer, for pi(y), >= 1; each token masked with a chance drawn uniformly

    needs = frozenset({"views", "logits"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if self.corruptions < 1:
            raise ValueError(f"update.corruptions must be at least 1, not {self.corruptions}")
        if "sampled_elsewhere" in batch.signals:
            raise ValueError(
                f"{run.method.name} scores neighbours under the policy that acted, which is the current one; use --rollout grpo"
            )
        shape = (len(batch), self.corruptions, batch.horizon)
        level = torch.rand((*shape[:2], 1), generator=run.generator)
        batch = batch.but(signals=batch.signals | {"corrupted": torch.rand(shape, generator=run.generator) < level})
        known = {"acting_site_logp": site_log_probs(batch, run), "acting_neighbour_probs": neighbour_probs(batch, run)}
        batch.signals.update(known)
        return super().__call__(batch, loss_fn, run)

    def backward(self, part: Batch, loss_fn: MethodLoss, run: Run) -> Loss:
        old_logp, old_probs = part.signals["acting_site_logp"], part.signals["acting_neighbour_probs"]
        fresh = part.version is not None and bool((part.version == run.version).all())
        probs = old_probs if fresh else neighbour_probs(part, run)
        row, place, view = sites(part, run)
        view.signals |= {"row": row, "place": place, "neighbour_probs": probs[row, place]}
        view.signals |= {"old_site_logp": old_logp[row, place], "old_neighbour_probs": old_probs[row, place]}
        own = old_logp.gather(-1, part.action[..., None])[..., 0]
        return run.backward(view.but(logp=torch.where(view.mask, own[row], 0.0)), loss_fn)


@dataclass
class Corrected:
    """Attempts under the current policy, then moves of a chain in the model's scores; log-probs are those of the answers after them."""

    moves: int = 10  # steps of the chain, >= 0
    dt: float = 0.002  # length of each, > 0; small against 1 over the number of neighbours

    needs = frozenset({"views", "logits", "entropy"})

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = run.collect(prompts)
        for _ in range(self.moves):
            log_probs = site_log_probs(batch, run)
            found = sites(batch, run)
            scores = log_scores(found, log_probs[found.row, found.place]).clamp(max=LOG_RATIO_LIMIT).exp()
            rates = corrector_rates(scores, neighbours(found, run.policy, scores.shape[-1]))
            rates = torch.zeros_like(log_probs).index_put((found.row, found.place), rates)
            batch = batch.but(action=move(batch.action, rates, self.dt, run.generator))
        seen = run.score(batch, {"logp", "entropy"})
        signals = {name: value for name, value in batch.signals.items() if not name.startswith("reveal_")}
        signals["completion"] = [run.policy.decode(tokens[kept]) for tokens, kept in zip(batch.action, batch.mask, strict=True)]
        return batch.but(logp=seen.logp, signals=signals | {"old_entropy": seen.entropy})


METHOD = GRPO.but(
    name="sepo",
    paper=Paper("Fine-Tuning Discrete Diffusion Models with Policy Gradient Methods", "2502.01384", 2025),
    domain="masked",
    summary="policy gradient of the written text in concrete scores of its one-token neighbours, with ratios clipped neighbour by neighbour",
    credit=GroupRelative(std=True, ddof=1, eps=1e-8),
    objective=ScoreEntropy(),
    regularize=(DenoiserKL(),),
    update=ScoreSteps(),
)
VARIANTS = {
    "gf": METHOD.but(
        name="sepo.gf",
        summary="samples pass through a corrector, a chain of jumps to neighbours that leaves the model's distribution as it is",
        rollout=Corrected(),
    )
}
