"""Claims of CRPO on toy_roles: 6 roles in 4 scenes, 12 tokens, responses of 6."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.toy_roles import ToyRoles
from anypo.methods.language.crpo import METHOD as CRPO
from anypo.methods.language.crpo import ROLE_KL, AdaptRoleKL, advantages, role_scaler
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import standardize
from anypo.seams.rollout import OnPolicy

SEEDS = (0, 1, 2)
STEP = 72.0  # SGD step for a loss averaged over 24 prompts: 3 for each prompt
LONG, STEPS = 288.0, 100  # step and steps with which both methods solve the task


def _anchor_effect(with_anchor: bool) -> Evidence:
    """Three replies with style scores 0.4, 0.5, 0.6, joined by a generic one of 0.1; no task reward."""
    replies = torch.tensor([0.4, 0.5, 0.6], dtype=torch.float64)
    style = torch.cat([replies, torch.tensor([0.1], dtype=torch.float64)]) if with_anchor else replies
    group = torch.zeros(len(style), dtype=torch.int64)
    found = advantages(torch.zeros_like(style), style, group, 0.0, 1.0)
    centred = (style - style.mean())[:3] - (replies - replies.mean())
    measured = {"mean of the replies": round(float(found[:3].mean()), 4), "anchor": round(float(found[3:].sum()), 4)}
    holds = float(found[:3].mean()) > 0.01 and float(found[3:].sum()) < 0 and bool((centred > 0).all())
    return Evidence(
        measured, "replies above 0 on average, anchor below, every reply's distance from the mean higher than without it", holds
    )


@claim("a bland generic answer in the group has a negative style advantage, and lifts the replies with the character above 0 on average")
def anchors_lift_replies() -> Evidence:
    return _anchor_effect(with_anchor=True)


@ablation(anchors_lift_replies, "without the anchor")
def no_anchor() -> Evidence:
    return _anchor_effect(with_anchor=False)


def _scale_free(decoupled: bool) -> Evidence:
    """600 batches of 64 random replies of two roles in groups of 8, after which the statistics are burnt in; then the style rewards of role 1 count 100
    times from the beginning. Largest change of an advantage, for advantages of standard deviation about 1."""
    g = torch.Generator().manual_seed(0)
    style = torch.rand(600, 64, 1, generator=g, dtype=torch.float64)
    task = torch.bernoulli(torch.full((64,), 0.5, dtype=torch.float64), generator=g)
    group = torch.arange(64) // 8
    role = (group % 2).expand(600, 64)
    larger = style * torch.where(role == 1, 100.0, 1.0)[..., None]

    def credit(rewards: Tensor) -> Tensor:
        if decoupled:
            return advantages(task, role_scaler(rewards, role).scaled[:, 0], group)
        return standardize(task + rewards[-1, :, 0], group, ddof=1)

    change = float((credit(larger) - credit(style)).abs().max())
    return Evidence(round(change, 6), "below 0.01", change < 0.01)


@claim("style rewards of a role that are 100 times as large leave the advantages as they are")
def scale_free() -> Evidence:
    return _scale_free(decoupled=True)


@ablation(scale_free, "rewards are summed before they are normalized, as in GRPO")
def summed_rewards_follow_the_scale() -> Evidence:
    return _scale_free(decoupled=False)


@dataclass
class SummedCredit(GroupRelative):
    """GRPO on the plain sum of task and style, as in CRPO with unbiased deviations; anchors count as members."""

    ddof: int = 1


GRPO_ON_SUM = CRPO.but(rollout=OnPolicy(), credit=SummedCredit()).set("select.group_size", 8)
METHODS = {"crpo": CRPO, "sum": GRPO_ON_SUM}


@cache
def trained(method: str, seed: int) -> tuple[float, float]:
    """Exact distinctiveness and task success after training."""
    task = ToyRoles(seed=seed)
    policy = task.policy(scale=0.1, seed=seed)
    train_on(plain_sgd(METHODS[method], LONG), policy, task, steps=STEPS, seed=seed, watch=lambda run, batch: None)
    return task.distinctiveness(policy), task.expected_success(policy)


def _distinct(method: str) -> Evidence:
    found = {name: [round(fmean(trained(name, s)[i] for s in SEEDS), 3) for i in (0, 1)] for name in (method, "sum")}
    apart, success = (found[method][i] - found["sum"][i] for i in (0, 1))
    expected = (
        "[distinctiveness, task success]: the first higher by more than 0.03 than GRPO on the sum, the second within 0.05 of it or above"
    )
    return Evidence(found, expected, apart > 0.03 and success > -0.05)


# Not reproduced on this stand-in. Once the task is solved, the sum's advantage is that of style alone at full size, while CRPO gives style its half:
# at equal steps GRPO is ahead on style (at equal task success, early on, CRPO is). Every prompt has a table of its own here, so that nothing drifts to a
# common style in the first place.
@claim(
    "CRPO's characters are further apart than those of GRPO on the sum of the rewards, at a task success within 0.05",
    slow=True,
    reproduced=False,
)
def more_distinct() -> Evidence:
    return _distinct("crpo")


def _by_role(exponent: float) -> Evidence:
    """40 batches in which every role is 0.1 away from the reference (k3 of 0.4833), as far as the target; the reference is surer in the first three
    roles (logits of standard deviation 2) than in the others (uniform)."""
    task = ToyRoles()
    policy = task.policy(scale=2.0)
    with torch.no_grad():
        policy.logits[task.count // 2 :] = 0
    run = Run(CRPO.but(control=AdaptRoleKL(exponent=exponent)), policy, task, steps=1)
    prompts = [p.but(samples=8) for p in task.prompts(task.count, run.rng)]
    run.state[ROLE_KL] = {"coef": {str(role): 0.01 for role in range(6)}, "entropy": {}, "overall": None}
    for _ in range(40):
        batch = run.collect(prompts)
        batch.signals |= {"ref_logp": batch.logp - 0.4833, "ref_entropy": batch.signals["old_entropy"]}
        run.method.control[0](batch, run)
    kept = run.state[ROLE_KL]["coef"]
    sure, unsure = (fmean(kept[str(r)] for r in roles) for roles in ((0, 1, 2), (3, 4, 5)))
    found = {"sure roles": round(sure, 5), "unsure roles": round(unsure, 5)}
    return Evidence(found, "coefficients of the two kinds of roles differ by more than 20%", abs(sure / unsure - 1) > 0.2)


@claim("roles of which the reference is unequally sure end with different KL coefficients, though their KL is the same")
def coefficients_by_role() -> Evidence:
    return _by_role(exponent=1.5)


@ablation(coefficients_by_role, "targets do not depend on the entropy (exponent = 0)")
def equal_targets() -> Evidence:
    return _by_role(exponent=0.0)


def _directions(target: float) -> Evidence:
    """Coefficients, 0.01 at the start, after 40 steps of training; mean over roles."""
    found = {}
    for name, sign in {"as released": -1, "usual sign": 1}.items():
        task = ToyRoles()
        method = plain_sgd(CRPO.but(control=AdaptRoleKL(target=target, sign=sign)), STEP)
        logged = train_on(method, task.policy(), task, steps=40, watch=lambda run, batch: fmean(run.state[ROLE_KL]["coef"].values()))
        found[name] = round(logged[-1], 5)
    expected = "as released below 0.0095, with the usual sign above 0.0105"
    return Evidence(found, expected, found["as released"] < 0.0095 and found["usual sign"] > 0.0105)


@claim("when the KL exceeds its target the released controller lowers the coefficients, and the one of the usual sign raises them")
def direction_of_the_controller() -> Evidence:
    return _directions(target=0.001)


@ablation(direction_of_the_controller, "the KL is below its target")
def below_target() -> Evidence:
    return _directions(target=100.0)
