"""model_tracking_pg: Model-derivative policy gradient with embedded tracking controller (arXiv:2307.08168).

Learns from a few real trajectories with a crude model, of which two things are used: its Jacobians at the real states and inputs, through which the
gradient of the real cost is propagated back, and a tracking controller designed on it, which is part of the policy. The controller's feedback makes the
closed loop contract, so that the errors of the Jacobians do not grow with the horizon. Against likelihood-ratio gradients it changes the rollout, the
credit and the objective. Equations of the paper; the design of the gains (a linear-quadratic regulator), the car and all sizes are [reconstructed]. The
simulator and the policy are `domains/control/tracking.py`. Left out: corrections of the gains; the legged robot.

With exploration, `seams.objective.SequenceReinforce` in place of the objective is the likelihood-ratio baseline: the credit hands it centred returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.tracking import Model, model_of
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run
    from anypo.task import Prompt


def input_gradients(
    a: Float[Tensor, "*B T n n"], b: Float[Tensor, "*B T n m"], dpi_dx: Float[Tensor, "*B T m n"], dl_dx: Float[Tensor, "*B T1 n"],
    dl_du: Float[Tensor, "*B T m"],
) -> Float[Tensor, "*B T m"]:  # fmt: skip
    """Equation 3, the adjoint: dl_t/du + B_t^T p_{t+1}, what a small change of the input at t costs in all, backward through the closed loop.
    T1 is T + 1 states."""
    pulls, p = [], dl_dx[..., -1, :]
    for t in reversed(range(a.shape[-3])):
        pull = dl_du[..., t, :] + _transposed(b[..., t, :, :], p)
        pulls.append(pull)
        p = dl_dx[..., t, :] + _transposed(dpi_dx[..., t, :, :], pull) + _transposed(a[..., t, :, :], p)
    return torch.stack(pulls[::-1], dim=-2)


def _transposed(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix.mT @ vector.unsqueeze(-1)).squeeze(-1)


def model_gradient(
    a: Float[Tensor, "T n n"], b: Float[Tensor, "T n m"], dpi_dx: Float[Tensor, "T m n"], dpi_dtheta: Float[Tensor, "T m P"],
    dl_dx: Float[Tensor, "T1 n"], dl_du: Float[Tensor, "T m"],
) -> Float[Tensor, " P"]:  # fmt: skip
    """Equation 3: the sum over t of dpi_t/dtheta^T times the input gradient; equal to the forward form, equation 2."""
    return torch.einsum("tmp,tm->p", dpi_dtheta, input_gradients(a, b, dpi_dx, dl_dx, dl_du))


def pathwise_loss(mean: Float[Tensor, "N T m"], pull: Float[Tensor, "N T m"], mask: Float[Tensor, "N T"]) -> Tensor:
    """Equation 4 as a loss: its gradient, the states being constants, is the mean over trajectories of the model gradient."""
    value = (pull.detach() * mean).sum(-1)
    return torch.where(mask.bool(), value, torch.zeros_like(value)).sum(1).mean()


@dataclass
class WholeEpisodes:
    """Every environment takes one whole episode a step."""

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        steps = _model(run).steps
        return run.collect([prompt.but(max_actions=steps) for prompt in prompts])


@dataclass
class ModelAdjoint:
    """Propagates the gradient of the real cost back through the model's Jacobians: signal `input_gradient` [N,T,m].

    The advantages are the rows' returns minus their mean. Raises ValueError for rows that are no whole episodes, or without a model.
    """

    needs = frozenset({"old_feedback", "batch_next_context"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        model = _model(run)
        n, context = model.size, batch.context
        if batch.horizon != model.steps or not batch.mask.all() or bool((context[:, 0, n] != 0).any()):
            raise ValueError(
                f"the model gradient is that of whole episodes of {model.steps} steps; leave rollout as it is and select.group_size at 1"
            )
        state = torch.cat([context[..., :n], batch.signal("next_context")[:, -1:, :n]], dim=1).double().numpy()
        action = batch.action.double().numpy()
        parts = (*model.jacobians(state[:, :-1], action), *model.cost_gradients(state, action))
        a, b, dl_dx, dl_du = (torch.from_numpy(x) for x in parts)
        pull = input_gradients(a, b, batch.signal("old_feedback").double(), dl_dx, dl_du)
        batch.signals["input_gradient"] = pull.to(batch.logp.dtype)
        cost = -batch.signal("raw_reward").double().sum(1)
        run.log(cost=float(cost.mean()), input_gradient_norm=float(pull.square().sum((1, 2)).sqrt().mean()))
        return broadcast((cost.mean() - cost).to(batch.logp.dtype), batch.mask)


@dataclass
class FollowModel:
    """Actions move against the input gradients that the credit left."""

    needs = frozenset({"mean"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return Loss(pathwise_loss(new.mean, batch.signal("input_gradient"), batch.counted))


def _model(run: Run) -> Model:
    return model_of(run.task.make(), run.task.name)  # type: ignore[attr-defined]


METHOD = Method(
    name="model_tracking_pg",
    paper=Paper("Model-derivative policy gradient with embedded tracking controller", "2307.08168", 2023),
    domain="control",
    task="TrackCar-v0",
    summary="the real cost's gradient through a crude model's Jacobians, for a policy that corrects what a tracking controller tracks",
    select=UniformPrompts(prompts=3, group_size=1),
    rollout=WholeEpisodes(),
    reward=TaskReward(),
    credit=ModelAdjoint(),
    objective=FollowModel(),
    update=GradientSteps(learning_rate=3e-4, optimizer="sgd", max_grad_norm=None),  # Adam at 1e-3 to 1e-2 falls slower or wanders
)
