"""CAPO: curvature-aware policy optimization, masking samples that make unstable updates (arXiv:2510.00819).

GRPO stays stable with small steps and large batches alone. CAPO predicts, before the update, what the step that a sample asks for would do: to the
objective (gradient and Hessian) and to the policy (Fisher information, that is KL). Restricted to the last layer, both have closed forms in the
probabilities and the hidden state, so no further backward pass is needed. Samples, down to single tokens, whose step would lower the objective or move
the policy too far are masked; the rest is an ordinary step. The last-layer model and the rejection are the paper's, all formulas and thresholds are
[reconstructed]. The mask sits in the update seam, where the step size and the optimizer's state are, and goes with any credit and any objective whose
denominator is what counts. During the warm-up the limit is the running quantile [ours]: unstable first steps are not made up for. Of a logit's scale
only the sampling temperature is taken into account. Not the CAPO of process rewards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run


class Scores(NamedTuple):
    """Predictions of a step, one number a candidate: all detached."""

    lin: Tensor  # change of the objective to first order
    hess: Tensor  # its second derivative along the step
    fisher: Tensor  # Fisher information along the step, >= 0
    m_h: Tensor  # predicted change of the objective
    m_f: Tensor  # predicted KL to the policy that acted


def logit_gradient(prob: Float[Tensor, "M V"], action: Int[Tensor, " M"]) -> Float[Tensor, "M V"]:
    """onehot(action) - prob: the gradient of log prob(action) in the logits."""
    gradient = -prob
    gradient[torch.arange(len(action), device=action.device), action] += 1
    return gradient


def predictions(
    prob: Float[Tensor, "M V"], gradient: Float[Tensor, "M V"], change: Float[Tensor, "M V"], advantages: Float[Tensor, " M"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Equation 3 for each token, before any mean: lin, fisher and hess [M] of a step that changes its logits by `change`."""
    slope = (gradient * change).sum(1)
    centred = change - (prob * change).sum(1, keepdim=True)
    fisher = (prob * centred**2).sum(1)
    return advantages * slope, fisher, advantages * (slope**2 - fisher)


def _scores(lin: Tensor, fisher: Tensor, hess: Tensor) -> Scores:
    return Scores(lin, hess, fisher, lin + hess / 2, fisher / 2)  # equation 4


@torch.no_grad()
def token_scores(
    prob: Float[Tensor, "M V"], action: Int[Tensor, " M"], hidden: Float[Tensor, "M D"], advantages: Float[Tensor, " M"], lr: float,
    preconditioner: Float[Tensor, "V D"] | None = None,
) -> Scores:  # fmt: skip
    """Equations 1-4, every token a candidate by itself -> [M] each. `lr` > 0 is the true step; `preconditioner` multiplies the gradient of the last
    layer elementwise (None: SGD). The change of a logit is lr A e_v sum_d P_vd h_d^2, so that no [V,D] is built for a token."""
    square = hidden**2
    length = square.sum(1, keepdim=True) if preconditioner is None else square @ preconditioner.T
    gradient = logit_gradient(prob, action)
    return _scores(*predictions(prob, gradient, lr * advantages[:, None] * gradient * length, advantages))


@torch.no_grad()
def subset_scores(
    prob: Float[Tensor, "M V"], action: Int[Tensor, " M"], hidden: Float[Tensor, "M D"], advantages: Float[Tensor, " M"],
    subset: Int[Tensor, " M"], lr: float, scope: str = "self", preconditioner: Float[Tensor, "V D"] | None = None,
) -> Scores:  # fmt: skip
    """Equations 1-4 for sets of tokens, the mean gradient of each a candidate step -> one number a set, in the order of its number.

    scope "self": what the step does to its own tokens; "batch": to all of them. Builds one [V,D] at a time. Raises ValueError for another scope.
    """
    if scope not in ("self", "batch"):
        raise ValueError(f"unknown scope '{scope}'; use self or batch")
    gradient, found = logit_gradient(prob, action), []
    for number in torch.unique(subset):
        own = (subset == number).nonzero().flatten()
        step = lr * (advantages[own, None] * gradient[own]).T @ hidden[own] / len(own)
        step = step if preconditioner is None else step * preconditioner
        on = own if scope == "self" else slice(None)
        parts = predictions(prob[on], gradient[on], hidden[on] @ step.T, advantages[on])
        found.append(torch.stack([part.mean() for part in parts]))
    return _scores(*torch.stack(found).T) if found else _scores(*prob.new_zeros(3, 0))


def accept(m_h: Float[Tensor, " B"], m_f: Float[Tensor, " B"], delta_h: float, delta_f: float) -> Bool[Tensor, " B"]:
    """Equation 5: the candidates whose step is predicted to raise the objective by delta_h at least and to move the policy by delta_f at most."""
    return (m_h >= delta_h) & (m_f <= delta_f)


def adaptive_step(optimizer: torch.optim.Optimizer, shape: tuple[int, int]) -> Tensor | None:
    """Equation 2: 1 / (sqrt(second moment) + eps) of Adam for the last parameter of the last layer's shape; None for SGD, before the first step and
    where there is no such parameter (a last layer that is not trained, as with LoRA, is scored as under SGD)."""
    weights = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.shape == shape]
    if not weights or "exp_avg_sq" not in optimizer.state.get(weights[-1][0], {}):
        return None
    weight, group = weights[-1]
    state = optimizer.state[weight]
    moment = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
    return 1 / (moment.sqrt() + group["eps"])


def state_before(batch: Batch, subset: str) -> Float[Tensor, "N T D"]:
    """What the last layer reads before each action: the state after the action before it, and after the prompt; over the sampling temperature. A
    policy without a state after the prompt is a table, whose actions have logits of their own (one feature of size 1). Raises ValueError for rows of
    a table."""
    after = batch.signal("old_hidden")
    if "old_prompt_hidden" in batch.signals:
        before = torch.cat([batch.signals["old_prompt_hidden"][:, None], after[:, :-1]], dim=1)
    elif subset == "token":
        before = torch.ones_like(after[..., :1])
    else:
        raise ValueError("update.subset=row compares hidden states of tokens, which a table of logits has not; use update.subset=token")
    temperature = batch.signals.get("temperature")
    return before if temperature is None else before / temperature.to(before)[:, None, None]


@dataclass
class CurvatureSteps(GradientSteps):
    """Optimizer steps on the accepted samples alone. Without `delta_f` the limit is a quantile of the predicted KLs so far, fixed after the warm-up."""

    subset: str = "token"  # what is accepted or rejected as one: token or row
    scope: str = "self"  # for rows: predicted on the row itself, or on the whole batch (self or batch)
    delta_h: float | None = None  # least predicted change of the objective; None = -inf for tokens, 0 for rows
    delta_f: float | None = None  # > 0, largest predicted KL; None = a quantile of the first batches
    quantile: float = 0.95  # in (0,1], of the predicted KL where the advantage is not 0
    warm_up: int = 10  # batches, >= 1
    seen: list[Tensor] = field(default_factory=list, init=False, repr=False)  # predicted KLs so far, until the limit is fixed
    batches: int = field(default=0, init=False, repr=False)  # that the limit was found from
    limit: float | None = field(default=None, init=False, repr=False)  # the delta_f found

    needs = frozenset({"old_logits", "old_hidden"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if self.subset not in ("token", "row"):
            raise ValueError(f"update.subset is token or row, not '{self.subset}'")
        counted = batch.counted
        accepted, scores, active = self.judge(batch, run)
        kept = counted.clone()
        kept[counted] = accepted
        metrics = {
            "rejected": 1 - float(kept.sum() / counted.sum().clamp(min=1)),
            "predicted_kl": float(scores.m_f[active].mean()) if active.any() else 0.0,
        }
        if not kept.any():
            return metrics | {"skipped": 1.0}
        return super().__call__(batch.but(keep=kept), loss_fn, run) | metrics

    @property
    def bound(self) -> float:
        given = self.delta_f if self.delta_f is not None else self.limit
        return math.inf if given is None else given

    @torch.no_grad()
    def judge(self, batch: Batch, run: Run) -> tuple[Tensor, Scores, Tensor]:
        """Which of the M counted tokens are accepted [M], the scores of the candidates, and which of those ask for a step."""
        assert batch.advantage is not None
        counted = batch.counted
        optimizer = run.optimizer(self.build)
        lr = float(optimizer.param_groups[0]["lr"])
        prob = batch.signal("old_logits")[counted].softmax(-1)
        hidden = state_before(batch, self.subset)[counted].to(prob)
        advantage = batch.advantage[counted].to(prob)
        scale = adaptive_step(optimizer, (prob.shape[1], hidden.shape[1]))
        scale = None if scale is None else scale.to(prob)
        action = batch.action[counted]
        index: Any
        if self.subset == "token":
            scores, index, active = token_scores(prob, action, hidden, advantage, lr, scale), slice(None), advantage != 0
        else:
            rows = counted.nonzero()[:, 0]
            scores = subset_scores(prob, action, hidden, advantage, rows, lr, self.scope, scale)
            index = torch.unique(rows, return_inverse=True)[1]
            active = advantage.new_zeros(len(scores.lin)).index_add(0, index, advantage.abs()) > 0
        least = self.delta_h if self.delta_h is not None else -math.inf if self.subset == "token" else 0.0
        unknown = "betas" in optimizer.param_groups[0] and not optimizer.state  # Adam before its first step: nothing is rejected
        if self.delta_f is None and self.batches < self.warm_up and not unknown:
            self.watch(scores.m_f[active])
        most = math.inf if unknown else self.bound
        return accept(scores.m_h, scores.m_f, least, most)[index], scores, active

    def watch(self, predicted: Tensor) -> None:
        """Take a batch's predicted KLs into the quantile. The batch itself is judged by it already: an unstable first step is not made up for."""
        self.seen.append(predicted.double())
        self.batches += 1
        together = torch.cat(self.seen).sort().values
        if len(together):
            self.limit = float(together[max(math.ceil(self.quantile * len(together)) - 1, 0)])
        if self.batches >= self.warm_up:
            self.seen = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "batches": self.batches, "limit": self.limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.batches, self.limit = list(state["seen"]), state["batches"], state["limit"]


METHOD = GRPO.but(
    name="capo_curvature",
    paper=Paper("Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM Reasoning", "2510.00819", 2025),
    summary="tokens whose step, by a second-order model of the last layer, would move the policy too far are masked",
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    update=CurvatureSteps(),
)
