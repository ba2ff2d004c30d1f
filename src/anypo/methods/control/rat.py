"""RAT: randomized advantage transformation for natural gradients (arXiv:2605.18591).

The Tikhonov-regularized natural gradient (F + lam I)^-1 g is an ordinary policy gradient with a transformed advantage: by Woodbury's identity the solve
moves from the space of parameters to that of samples. The transform is refined over the minibatches of a rollout by randomized block Kaczmarz steps, one
small linear system each; no Fisher matrix, no conjugate gradient. Against PPO it changes the objective and the update. Equations of the paper,
normalization, ratio bounds and the step size that follows the KL from the authors' code (its constants [reconstructed]); the direction is accumulated over
a rollout as in the paper. Left out: shared actor-critic trunks in the component (`shared_rhs` has their equations) and `dual_sweep` as an update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Policy, Signals
from anypo.seams.credit import GAE
from anypo.seams.groups import masked_mean
from anypo.seams.natural import assign, flatten, policy_parameters, split_loss
from anypo.seams.objective import token_ratio
from anypo.seams.update import GradientSteps, flatten_actions, minibatches

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Scores = Float[Tensor, "B P"]
PerSample = Float[Tensor, " B"]
RATIO_BOUNDS = (0.1, 10.0)  # of the ratio to the policy that acted


class Transformed(NamedTuple):
    y: PerSample
    natural_gradient: Float[Tensor, " P"]


class Iterate(NamedTuple):
    g: Float[Tensor, " P"]
    last_transformed: Tensor  # [b] of the last block


class Sweep(NamedTuple):
    y: PerSample
    g: Float[Tensor, " P"]
    residual_norm: Tensor


class SharedSides(NamedTuple):
    actor: PerSample
    critic: PerSample


def normalized(advantages: Tensor) -> Tensor:
    """Centred and divided by their root mean square (after centring) + 1e-8."""
    centred = advantages - advantages.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)


def sample_solve(scores: Scores, ratio: PerSample, right: Tensor, lam: float) -> Tensor:
    """(lam I + H H^T R / B)^-1 right, for one right-hand side [B] or several [B,K]; the ratios multiply columns, so it is not symmetric."""
    gram = scores @ scores.T * (ratio / len(scores))
    return torch.linalg.solve(lam * torch.eye(len(scores), dtype=scores.dtype) + gram, right)


def ascent(scores: Scores, ratio: PerSample, transformed: PerSample) -> Float[Tensor, " P"]:
    """H^T R y / B: the policy gradient with advantages `transformed`."""
    return scores.T @ (ratio * transformed) / len(scores)


def transformed_advantages(scores: Scores, advantages: PerSample, ratio: PerSample, lam: float) -> Transformed:
    """Equations 1 and 2: the advantages whose policy gradient is the regularized natural gradient, and that gradient."""
    y = sample_solve(scores, ratio, advantages, lam)
    return Transformed(y, ascent(scores, ratio, y))


def kaczmarz(
    scores: Scores, advantages: PerSample, ratio: PerSample, blocks: Iterable[Iterable[int]] | Tensor, g0: Float[Tensor, " P"], lam: float
) -> Iterate:
    """Equation 4: for each block of samples in turn, what the direction does not explain yet is transformed and added."""
    g, transformed = g0, advantages.new_zeros(0)
    for block in blocks:
        rows = torch.as_tensor(block)
        h, r = scores[rows], ratio[rows]
        transformed, change = transformed_advantages(h, advantages[rows] - h @ g, r, lam)
        g = g + change
    return Iterate(g, transformed)


def dual_sweep(
    scores: Scores, advantages: PerSample, ratio: PerSample, blocks: Iterable[Iterable[int]] | Tensor, y0: PerSample, lam: float
) -> Sweep:
    """Equation 8 [ours]: block coordinate ascent on the transformed advantages, whose limit is the exact transform of the whole batch."""
    weight, y = ratio / len(scores), y0.clone()
    g = scores.T @ (weight * y)
    for block in blocks:
        rows = torch.as_tensor(block)
        h, w = scores[rows], weight[rows]
        residual = advantages[rows] - (h @ g + lam * y[rows])
        change = torch.linalg.solve(lam * torch.eye(len(rows), dtype=h.dtype) + h @ h.T * w, residual)
        y[rows] += change
        g = g + h.T @ (w * change)
    return Sweep(y, g, (advantages - (scores @ g + lam * y)).norm())


def step(g: Float[Tensor, " P"], eta: float, nu: float) -> float:
    """Equation 6: the step size, eta or what keeps the step's length at nu."""
    length = float(g.norm())
    return min(eta, nu / length) if length > 0 else eta


def shared_rhs(scores: Scores, advantages: PerSample, ratio: PerSample, g0: Float[Tensor, " P"], lam: float) -> SharedSides:
    """Equation 7: transforms of the actor's residual y - H g and of the critic's 1 - H g, for scores of a shared trunk."""
    explained = scores @ g0
    both = sample_solve(scores, ratio, torch.stack([advantages - explained, 1 - explained], dim=1), lam)
    return SharedSides(both[:, 0], both[:, 1])


def transformed_loss(logp: Tensor, ratio: Tensor, transformed: Tensor, mask: Tensor) -> Tensor:
    """Equation 3: minus the mean of ratio * advantage * log pi; only log pi carries a gradient."""
    return -masked_mean(ratio.detach() * transformed.detach() * logp, mask)


class _ActionLogp(nn.Module):
    """log pi of one action, as a module that torch.func can call with other parameters."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, context: Tensor, action: Tensor) -> Tensor:
        one = torch.ones(1, 1, dtype=torch.bool)
        batch = Batch(action[None], one, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), context=context[None])
        return self.policy.evaluate(batch, {"logp"}).logp.sum()


def per_sample_scores(policy: Policy, batch: Batch) -> Scores:
    """Gradients [B,P] of log pi of every action, for a batch of B trajectories of one action. Raises ValueError for policies with a memory."""
    if not (policy.memoryless and isinstance(batch.context, Tensor)):
        raise ValueError("rat needs the score of every single action, which only policies without memory have; use it on an environment")
    module, wanted = _ActionLogp(policy), {id(p): i for i, p in enumerate(policy_parameters(policy))}
    named = {name: p.detach() for name, p in module.named_parameters() if id(p) in wanted}
    order = sorted(named, key=lambda name: wanted[id(module.get_parameter(name))])

    def logp(parameters: dict[str, Tensor], context: Tensor, action: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (context, action))

    found = torch.func.vmap(torch.func.grad(logp), in_dims=(None, 0, 0))(named, batch.context, batch.action)
    return torch.cat([found[name].flatten(1) for name in order], dim=1)


@dataclass
class TransformedGradient:
    """Minus the mean of ratio * advantage * log pi (equation 3); the ratio, bounded, carries no gradient."""

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        ratio = token_ratio(new.logp.detach(), batch.logp, batch.counted).clamp(*RATIO_BOUNDS)
        return Loss(transformed_loss(new.logp, ratio, batch.advantage, batch.counted))


@dataclass
class TransformedSteps(GradientSteps):
    """Block Kaczmarz steps over the minibatches, each followed by a step along the direction; then the critic's regression by ordinary steps."""

    lam: float = 0.1  # damping, in units of squared scores, > 0
    eta: float = 0.05  # largest step size at the start, > 0
    nu: float = 0.5  # largest length of a step in parameter space, > 0
    target_kl: float | None = 0.01  # nats a batch; eta shrinks above twice, grows below half of it; None = eta stays

    needs = frozenset({"kl_old"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        policy_loss, critic_loss = split_loss(loss_fn)
        with run.timed("update"):
            metrics = self.policy_steps(flatten_actions(batch) if run.policy.memoryless else batch, policy_loss, run)
        return metrics | ({} if critic_loss is None else super().__call__(batch, critic_loss, run))

    def policy_steps(self, batch: Batch, policy_loss: MethodLoss, run: Run) -> dict[str, float]:
        assert batch.advantage is not None
        parameters, eta = policy_parameters(run.policy), run.state.get("rat.eta", self.eta)
        batch = batch.but(advantage=normalized(batch.advantage))
        g, moved = torch.zeros_like(flatten(parameters)), 0.0
        for _ in range(self.epochs):
            for part in minibatches(batch, self.minibatches, "row", run.generator):
                g = g + self.direction(part, g, policy_loss, run)
                length = step(g, eta, self.nu)
                assign(parameters, flatten(parameters) + length * g)
                moved += length * float(g.norm())
                run.advance_version()
        kl = float(masked_mean(run.policy.observe(batch, {"kl_old"}).kl_old, batch.counted))
        if self.target_kl is not None:
            run.state["rat.eta"] = eta / 1.5 if kl > 2 * self.target_kl else eta * 1.5 if kl < self.target_kl / 2 else eta
        return {"kl": kl, "eta": eta, "path": moved, "direction_norm": float(g.norm())}

    def direction(self, part: Batch, g: Tensor, policy_loss: MethodLoss, run: Run) -> Tensor:
        """What the minibatch adds to the direction: minus the gradient of the loss, with what g leaves unexplained, transformed, as advantage."""
        assert part.advantage is not None
        scores = per_sample_scores(run.policy, part)
        ratio = token_ratio(run.policy.observe(part, {"logp"}).logp, part.logp, part.counted).clamp(*RATIO_BOUNDS).flatten()
        transformed = sample_solve(scores, ratio, part.advantage.flatten() - scores @ g, self.lam)
        run.policy.zero_grad(set_to_none=True)
        run.policy.backward(part.but(advantage=transformed[:, None]), policy_loss.needs, policy_loss)
        added = [torch.zeros_like(p) if p.grad is None else -p.grad for p in policy_parameters(run.policy)]
        run.policy.zero_grad(set_to_none=True)
        return flatten(added)


METHOD = PPO.but(
    name="rat",
    paper=Paper(
        "Randomized Advantage Transformation (RAT): Computing Natural Policy Gradients via Direct Backpropagation", "2605.18591", 2026
    ),
    summary="natural gradients as policy gradients with transformed advantages, by block Kaczmarz steps over minibatches",
    credit=GAE(gamma=0.99, lam=0.95, normalize=False),
    objective=TransformedGradient(),
    update=TransformedSteps(epochs=4, minibatches=8, learning_rate=1e-3, optimizer="adam", max_grad_norm=0.5),
)
