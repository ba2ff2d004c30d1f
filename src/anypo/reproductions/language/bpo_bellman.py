"""Claims of BPO on a token tree of depth 4 with three tokens (81 leaves), a table of logits for every prefix, and exact expectations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import fmean

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.bpo_bellman import METHOD as BPO
from anypo.methods.language.bpo_bellman import pmd_policy, residual, surrogate, weights
from anypo.reproductions.common import ShuffledCredit, plain_sgd, train_on
from anypo.seams.objective import ClippedSurrogate

TOKENS, DEPTH, ETA = 3, 4, 0.5
NODES = sum(TOKENS**level for level in range(DEPTH))
SEEDS = (0, 1, 2, 3, 4)
Residual = Callable[[Tensor, Tensor, Tensor], Tensor]  # (mu [nodes,A], pi [nodes,A], leaf rewards) -> per leaf


class TreeTokens(TabularTokens):
    """Logits [1,nodes,A] for every prefix of a token tree, nodes breadth-first; uniform at the start."""

    def __init__(self) -> None:
        super().__init__(1, TOKENS, DEPTH, autoregressive=True)
        self.logits = nn.Parameter(torch.zeros(1, NODES, TOKENS, dtype=torch.float64))

    @property
    def horizon(self) -> int:
        return DEPTH

    def action_logits(self, prompt: Int[Tensor, " N"], action: Int[Tensor, "N T"]) -> Float[Tensor, "N T V"]:
        node = [torch.zeros_like(prompt)]
        for t in range(action.shape[1] - 1):
            node.append(node[-1] * TOKENS + 1 + action[:, t])
        return self.logits[0, torch.stack(node, dim=1)]


def _random_tree(seed: int) -> tuple[Tensor, Tensor]:
    """A random sampling policy [nodes,A] and leaf rewards U(0,1)."""
    generator = torch.Generator().manual_seed(seed)
    prob = torch.randn(NODES, TOKENS, generator=generator, dtype=torch.float64).softmax(1)
    return prob, torch.rand(TOKENS**DEPTH, generator=generator, dtype=torch.float64)


def _path_sum(table: Tensor) -> Tensor:
    """Sum along the path to every leaf of numbers [nodes,A]."""
    total = table.new_zeros(1)
    for level in range(DEPTH):
        start = sum(TOKENS**k for k in range(level))
        total = (total[:, None] + table[start : start + TOKENS**level]).flatten()
    return total


def _optimum(of: Residual) -> Evidence:
    """Minimize the mean squared residual over the sampled responses, from the sampling policy, by L-BFGS."""
    distance, least = 0.0, 0.0
    for seed in range(2):
        prob, reward = _random_tree(seed)
        chance, logits = _path_sum(prob.log()).exp(), prob.log().clone().requires_grad_()
        solver = torch.optim.LBFGS([logits], max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-18, line_search_fn="strong_wolfe")

        def objective(prob: Tensor = prob, reward: Tensor = reward, chance: Tensor = chance, logits: Tensor = logits) -> Tensor:
            return (chance * of(prob, logits.softmax(1), reward) ** 2).sum() / (2 * ETA)

        def closure(solver: torch.optim.Optimizer = solver, objective: Callable[[], Tensor] = objective, logits: Tensor = logits) -> Tensor:
            logits.grad = None
            value = objective()
            value.backward()
            return value

        solver.step(closure)
        with torch.no_grad():
            distance = max(distance, float((logits.softmax(1) - pmd_policy(prob, reward, ETA, DEPTH).policy).abs().max()))
            least = max(least, float(objective()))
    found = {"distance": distance, "objective": least}
    return Evidence(found, "distance < 1e-4 at every prefix, objective < 1e-8", distance < 1e-4 and least < 1e-8)


@claim("with the prompt's value alone, the squared residual's minimum is mirror descent's improved policy at every prefix")
def unique_optimum() -> Evidence:
    return _optimum(lambda prob, policy, reward: residual(prob, policy, reward, ETA, DEPTH))


@ablation(unique_optimum, "the residual without the KL terms, which stand for the normalizers")
def without_normalizers() -> Evidence:
    def of(prob: Tensor, policy: Tensor, reward: Tensor) -> Tensor:
        gain = _path_sum(policy.log() - prob.log())
        return reward - _path_sum(prob.log()).exp() @ reward - ETA * gain

    return _optimum(of)


def _identity(weight: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """Largest difference of the gradients in the logits, 200 random pairs of distributions over 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    old, logits = torch.randn(2, 200, 6, generator=generator, dtype=torch.float64)
    mu, logits = old.softmax(1)[:, 0], logits.requires_grad_()
    logp = logits.log_softmax(1)[:, 0]
    binary_kl = mu * (mu.log() - logp) + (1 - mu) * (torch.log1p(-mu) - torch.log1p(-logp.exp()))
    exact = torch.autograd.grad((logp + binary_kl).sum(), logits, retain_graph=True)[0]
    weighted = torch.autograd.grad((weight(logp, mu.log()).detach() * logp).sum(), logits)[0]
    error = float((exact - weighted).abs().max())
    return Evidence(error, "< 1e-8", error < 1e-8)


@claim("the gradient of log-prob plus binary KL is the log-prob's, weighted by the ratio of complementary probabilities")
def complementary_weight() -> Evidence:
    return _identity(lambda logp, old: torch.expm1(old) / torch.expm1(logp))


@ablation(complementary_weight, "the importance ratio as weight")
def importance_weight() -> Evidence:
    return _identity(lambda logp, old: (logp - old).exp())


def _share_of_best(method: Method) -> float:
    """Exact expected reward over the best leaf's after 300 batches of 16, 4 epochs, SGD 1.0; mean over seeds."""
    shares = []
    for seed in SEEDS:
        _, leaf = _random_tree(seed)
        place = TOKENS ** torch.arange(DEPTH - 1, -1, -1)

        def reward(prompt: Tensor, action: Tensor, mask: Tensor, leaf: Tensor = leaf, place: Tensor = place) -> Tensor:
            return leaf[(action * place).sum(1)]

        task, policy = TokenBandit(1, TOKENS, DEPTH, reward=reward), TreeTokens()
        train_on(plain_sgd(method, 1.0, epochs=4, group_size=16), policy, task, steps=300, seed=seed, watch=lambda run, batch: None)
        shares.append(float(task.expected_reward(policy).detach()[0] / leaf.max()))
    return fmean(shares)


@cache
def _clipped_surrogate() -> float:
    return _share_of_best(BPO.but(objective=ClippedSurrogate()))


def _practical(method: Method) -> Evidence:
    # Above 0.9, not 0.95: how near the second best leaves come to the best differs from tree to tree, and other sets of five trees gave 0.948 and
    # 0.955 for both losses alike.
    ours, clipped = _share_of_best(method), _clipped_surrogate()
    found = {"bpo": round(ours, 4), "clipped surrogate": round(clipped, 4)}
    return Evidence(found, "above 0.9, within 0.01 of the surrogate", ours > 0.9 and abs(ours - clipped) < 0.01)


@claim("the practical loss reaches above 0.9 of the best leaf's reward, as the clipped surrogate with the same advantages does", slow=True)
def practical_loss() -> Evidence:
    return _practical(BPO)


@ablation(practical_loss, "advantages dealt to the wrong responses")
def practical_shuffled() -> Evidence:
    return _practical(BPO.but(credit=ShuffledCredit(BPO.credit)))


def _saturation(weight: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """A sampled token of probability mu with advantage 1 is pushed 3,000 times on the same batch: how far it gets, and whether a push is left."""
    mu = torch.tensor([[0.8], [0.85], [0.9], [0.95]], dtype=torch.float64)
    logit, push = torch.logit(mu), torch.ones_like(mu)
    for _ in range(3000):
        logit = logit.detach().requires_grad_()
        logp = nn.functional.logsigmoid(logit)
        value = surrogate(logp, weight(logp, mu.log()), torch.ones_like(mu), torch.ones_like(mu)).loss
        push = torch.autograd.grad(value, logit)[0]
        logit = logit - push
    reached = logit.detach().sigmoid()
    limit = float(weight(torch.zeros_like(mu), mu.log())[2])  # at mu = 0.9
    found = {"probabilities": [round(p, 4) for p in reached.flatten().tolist()], "weight at probability 1, mu 0.9": limit}
    stopped = not bool(push.any()) and float(reached.max()) < 0.99
    return Evidence(found, "every push is exactly 0 below probability 0.99; the weight's limit is 2", stopped and math.isclose(limit, 2.0))


@claim("a likely token that was rewarded is pushed no further once its weight passes the bound, well before it saturates")
def saturated_is_masked() -> Evidence:
    return _saturation(weights)


@ablation(saturated_is_masked, "the importance ratio, which is at most 1/mu and never reaches the bound")
def saturated_by_ratio() -> Evidence:
    return _saturation(lambda logp, old: (logp - old).exp())
