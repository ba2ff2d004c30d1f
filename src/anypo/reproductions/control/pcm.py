"""Claims of PCM (arXiv:2605.16154) on pick-and-place along a line: 60 chunks, four phases, one of which decides."""

from __future__ import annotations

import time
from collections.abc import Set
from functools import cache
from statistics import fmean, median

import torch
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.pick_place import EACH, NAME, OBSERVED, PHASES, SPREAD, STEPS, PickPlace, pretrained, success_chance
from anypo.domains.control.policy import gaussian_logp
from anypo.domains.control.tasks import GymTask
from anypo.methods.control.pcm import METHOD, KeptSteps, PhaseMaskedCredit, keep_prob, phases, sample, scores
from anypo.methods.control.rat import per_sample_scores
from anypo.policy import Policy, Signals
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.credit import group_relative
from anypo.seams.update import GradientSteps, flatten_actions

BUDGET, SEEDS = 12, range(3)


def _rollouts(run: Run, attempts: int = 16) -> Batch:
    batch = run.collect([p.but(samples=attempts) for p in run.task.prompts(2, run.rng)])
    batch.reward = run.method.reward(batch, run)
    return batch


def _fresh(seed: int, critical: int = 1) -> Run:
    """A run that nothing is trained in: the pretrained policy and its task, with a critical phase of choice."""
    return Run(METHOD, pretrained(seed), GymTask(lambda **_: PickPlace(critical=critical)), steps=1, seed=seed)


def _identity(ddof: int) -> Evidence:
    """Largest gap between the advantage-weighted mean gradient of a Gaussian's mean in each phase and the formula, and between its square and the
    score."""
    gap = 0.0
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        action = torch.randn(24, 12, 3, generator=g, dtype=torch.float64) + 2.0
        reward = (torch.arange(24) < 4 + 5 * (seed % 4)).double()
        group, phase = torch.zeros(24, dtype=torch.int64), phases(torch.ones(24, 12), 4)
        advantage = group_relative(reward, group, True, ddof, 0.0)
        p = reward.mean()
        mean = torch.randn(4, 3, generator=g, dtype=torch.float64)[phase]
        for k, score in enumerate(scores(action, reward, group, phase, 4)):
            inside = phase[0] == k
            gradient = (advantage[:, None, None] * (action - mean))[:, inside].mean((0, 1))
            formula = (p * (1 - p)).sqrt() * (action[reward > 0][:, inside].mean((0, 1)) - action[reward == 0][:, inside].mean((0, 1)))
            gap = max(gap, float((gradient - formula).abs().max()), abs(float(gradient @ gradient - score)))
    return Evidence(f"{gap:.1e}", "< 1e-9", gap < 1e-9)


@claim("A phase's score is the squared norm of the advantage-weighted mean gradient of its action mean")
def score_is_squared_gradient() -> Evidence:
    return _identity(0)


@ablation(score_is_squared_gradient, "advantages by the sample standard deviation")
def other_advantages_have_other_gradients() -> Evidence:
    return _identity(1)


def _follow(last: int) -> Evidence:
    """Probabilities of the critical phase and the largest other one after 5 updates, and 20 updates after the difficulty moved at update 50. After
    `last` updates the scores stand still (rho = 0)."""
    early: list[tuple[float, float]] = []
    late: list[tuple[float, float]] = []
    for seed in SEEDS:
        credit, before, after = PhaseMaskedCredit(), _fresh(seed), _fresh(seed, critical=3)
        for step in range(70):
            run = before if step < 50 else after
            credit.rate = credit.rate if step < last else 0.0
            credit(_rollouts(run), run)
            assert credit.state is not None
            chance = keep_prob(credit.state, credit.exploration).tolist()
            if step in (4, 69):
                own = chance.pop(1 if step < 50 else 3)
                (early if step < 50 else late).append((own, max(chance)))
    found = {name: [[round(x, 3) for x in pair] for pair in pairs] for name, pairs in (("after 5", early), ("20 after the move", late))}
    holds = all(own > 0.5 and own > 3 * other for own, other in early + late)
    return Evidence(found, "critical phase > 0.5 and > 3x any other", holds)


@claim("Five updates find the critical phase, and when the difficulty moves to another phase the keep probabilities follow within 20")
def probabilities_follow_the_difficulty() -> Evidence:
    return _follow(70)


@ablation(probabilities_follow_the_difficulty, "no online adaptation: the probabilities stand still after 5 updates")
def static_probabilities_do_not() -> Evidence:
    return _follow(5)


@cache
def _success(arm: str) -> float:
    """Mean exact success after 80 updates at a rate at which GRPO over all chunks has just about learned the grasp by then. From 5 times that rate on
    uniform dropping, too, is done after 80 updates, and the gap is gone."""
    changes = {"full": ("credit.budget", STEPS), "uniform": ("credit.exploration", 1.0), "pcm": ("credit.budget", BUDGET)}
    method = METHOD.but(update=KeptSteps(unit="row", learning_rate=2e-5, optimizer="adam")).set(*changes[arm])

    def one(seed: int) -> float:
        policy = pretrained(seed)
        train_on(method, policy, GymTask(NAME), steps=80, seed=seed, watch=lambda run, batch: None)
        return success_chance(policy)

    return fmean(one(seed) for seed in SEEDS)


def _matches(arm: str) -> Evidence:
    found = {name: round(_success(name), 3) for name in dict.fromkeys((arm, "full", "uniform"))}
    holds = _success(arm) >= _success("full") - 0.03 and _success("uniform") < _success("full") - 0.05
    return Evidence(found, "within 0.03 of all chunks; uniform dropping lower by > 0.05", holds)


@claim(
    "With 12 of 60 chunks an attempt, success after 80 updates is that of GRPO over all chunks; dropping chunks uniformly is worse",
    slow=True,
)
def a_fifth_of_the_chunks_is_enough() -> Evidence:
    return _matches("pcm")


@ablation(a_fifth_of_the_chunks_is_enough, "no concentration: chunks are dropped uniformly")
def uniform_dropping_is_not() -> Evidence:
    return _matches("uniform")


class TransformerActor(Policy):
    """A Gaussian whose mean comes from six transformer layers over the numbers of the observation; counts the chunks it has looked at."""

    memoryless = True

    def __init__(self, seed: int = 0, width: int = 32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.scale, self.place = (nn.Parameter(torch.randn(OBSERVED, width)) for _ in range(2))
            layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
            self.head = nn.Linear(width, 1)
        self.looked_at = 0

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        self.looked_at += int(batch.mask.numel())
        tokens = batch.context.flatten(0, 1)[..., None] * self.scale + self.place
        mean = self.head(self.encoder(tokens).mean(1)).view(*batch.mask.shape, 1)
        return Signals(logp=gaussian_logp(batch.action, mean, torch.tensor([SPREAD]).log()) * batch.mask)


def _saving(update: GradientSteps) -> Evidence:
    """Share of the chunks that the transformer looks at in an update, and its time over that of an update with all chunks."""
    source, policy = _fresh(0), TransformerActor()
    batch = _rollouts(source)
    batch.advantage = PhaseMaskedCredit(budget=BUDGET)(batch, source)
    batch.logp = policy.observe(batch, {"logp"}).logp
    run, counts = Run(METHOD, policy, source.task, steps=1), [0, 0]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        for i, keep in enumerate((batch.keep, batch.mask)):
            fixed = batch.but(keep=keep, version=torch.full_like(batch.group, run.version))
            policy.looked_at, start = 0, time.process_time()
            (update if i == 0 else KeptSteps(unit="row"))(fixed, run.loss_fn, run)
            times[i].append(time.process_time() - start)
            counts[i] = policy.looked_at
    share, ratio = counts[0] / batch.mask.numel(), median(times[0]) / median(times[1])
    holds = share <= 0.2 and ratio < 0.6 and counts[1] == batch.mask.numel()
    return Evidence({"chunks": round(share, 3), "time": round(ratio, 3)}, "at most 0.2 of the chunks, less than 0.6 of the time", holds)


@claim("At most a fifth of the chunks enter the forward and backward pass, and an update of a transformer takes less than 60% of the time")
def updates_are_cheaper() -> Evidence:
    return _saving(KeptSteps(unit="row"))


@ablation(updates_are_cheaper, "the other chunks are not removed: their loss is multiplied by 0")
def zeros_save_nothing() -> Evidence:
    return _saving(GradientSteps(unit="row"))


def _draws(seed: int, exploration: float) -> Tensor:
    """For fixed rollouts: variance over squared mean of the masked gradient, and its mean cosine with the gradient of all chunks, [2,2]: without and
    with importance weights."""
    run, credit = _fresh(seed), PhaseMaskedCredit(exploration=exploration)
    for _ in range(10):
        batch = _rollouts(run)
        advantage = credit(batch, run)
    assert credit.state is not None
    batch.keep = None
    gradients = advantage.flatten()[:, None] * per_sample_scores(run.policy, flatten_actions(batch))
    full, rows, g = gradients.mean(0), len(batch), torch.Generator().manual_seed(seed)
    phase, chance = phases(batch.mask, PHASES), keep_prob(credit.state, exploration)

    def masks(count: int) -> Tensor:
        noise = -torch.empty(count * rows, STEPS, dtype=torch.float64).exponential_(generator=g).log()
        drawn = sample(phase.repeat(count, 1), batch.mask.repeat(count, 1), chance, noise, BUDGET)
        return drawn.view(count, -1).to(gradients.dtype)

    by_phase = masks(400).view(-1, PHASES, EACH).mean((0, 2))  # the chance of being kept is the same for all chunks of a phase
    included = by_phase[phase.flatten()]
    kept = masks(400)
    found = []
    for weight in (torch.full_like(included, 1 / (rows * BUDGET)), 1 / (included * rows * STEPS)):
        drawn = kept * weight @ gradients
        spread = drawn.var(0).sum() / drawn.mean(0).square().sum()
        found.append(torch.stack([spread, torch.cosine_similarity(drawn, full[None]).mean()]))
    return torch.stack(found, dim=1)


def _estimators(exploration: float) -> Evidence:
    spread, cosine = torch.stack([_draws(seed, exploration) for seed in SEEDS]).mean(0).tolist()
    found = {"variance/mean^2": [round(x, 3) for x in spread], "cosine": [round(x, 3) for x in cosine]}
    holds = spread[0] < 0.9 * spread[1] and cosine[0] > cosine[1] + 0.01
    return Evidence(found | {"order": "biased, weighted"}, "variance lower by > 10%, cosine higher by > 0.01, without weights", holds)


@claim(
    "At the same budget the masked gradient without importance weights varies less for its size, and lies closer to the full gradient in a single draw"
)
def bias_pays() -> Evidence:
    return _estimators(0.2)


@ablation(bias_pays, "no concentration, so that all weights are alike")
def without_concentration_weights_change_nothing() -> Evidence:
    return _estimators(1.0)
