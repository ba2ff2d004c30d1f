"""Claims of gradient subspaces: PPO and SAC on Pendulum with networks of (32, 32), k = 10 directions, Hessians on 1024 states.

An update of the spec is read as a batch of 1024 actions (10 epochs, 8 minibatches); a look every 10 of 100 batches gives ten snapshots. SAC's
networks are those of its row, with ReLU, so its Hessians are blind to the kinks; its critic is both twins.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean, median

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.setup import build
from anypo.loops import off_policy
from anypo.methods.control.gradient_subspaces import METHOD, Snapshot, fraction, overlap, snapshot
from anypo.methods.control.sac import METHOD as SAC
from anypo.reproductions.common import train_on
from anypo.run import Run

SEEDS = (0, 1, 2)
SAC_SEEDS = (0, 1)
EVERY, LOOKS = 10, 10
ACTOR, CRITIC = "policy", "value"
Looks = list[dict[str, Snapshot]]


@cache
def ppo(seed: int) -> Looks:
    policy, task = build("Pendulum-v1", None, seed=seed, envs=8, horizon=128, hidden=(32, 32))
    method = METHOD.set("update.minibatches", 8).set("update.every", EVERY)
    return train_on(method, policy, task, steps=EVERY * LOOKS, seed=seed, watch=lambda run, _: run.method.update.latest)[::EVERY]  # type: ignore[attr-defined]


@cache
def sac(seed: int) -> Looks:
    """Ten looks, from the end of the warm-up (1024 actions) to action 3328, at fresh minibatches of 1024 from the buffer. Step size 1e-3."""
    policy, task = build("Pendulum-v1", None, needs=SAC.needs(), seed=seed, hidden=(32, 32))
    run = Run(SAC.set("update.learning_rate", 1e-3), policy, task, steps=52, seed=seed)
    replay, seen = run.method.rollout, []
    for i in range(run.total_steps):
        off_policy.step(run)
        if i % 4 == 3 and i > 15:
            usual, replay.batch_size = replay.batch_size, 1024  # type: ignore[attr-defined]
            batch = replay.draw(run)  # type: ignore[attr-defined]
            replay.batch_size = usual  # type: ignore[attr-defined]
            batch.advantage = run.method.credit(batch, run)
            seen.append(snapshot(batch, run.loss_fn, run.policy))
    return seen[:LOOKS]


def random_basis(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(like.shape, generator=generator, dtype=torch.float64)).Q


def in_random_spans(looks: Looks, seed: int) -> Looks:
    """The same gradients, and a random span at every look in place of the Hessian's."""
    generator, found = torch.Generator().manual_seed(1000 + seed), []
    for look in looks:
        bases = {role: random_basis(seen.basis, generator) for role, seen in look.items()}
        found.append({r: s._replace(basis=bases[r], fraction=float(fraction(bases[r], s.gradient))) for r, s in look.items()})
    return found


def share(looks: Looks, role: str) -> float:
    return median(look[role].fraction for look in looks)


def turning(looks: Looks, role: str, lag: int, later: Looks | None = None) -> float:
    """Mean overlap between the looks 0 to 5 and those `lag` batches after them, so that every lag has the same beginnings."""
    pairs = [(looks[i][role].basis, (later or looks)[i + lag // EVERY][role].basis) for i in range(LOOKS - 4)]
    return fmean(float(overlap(*pair)) for pair in pairs)


def _above(runs: list[Looks], least: dict[str, float]) -> Evidence:
    found = {role: share([look for looks in runs for look in looks], role) for role in least}
    chance = {role: runs[0][0][role].chance for role in least}
    good = all(found[r] > max(least[r], 20 * chance[r]) for r in least)
    measured = {r: round(found[r], 3) for r in least} | {f"{r} by seed": [round(share(looks, r), 3) for looks in runs] for r in least}
    wanted = ", ".join(f"{r} above {x}" for r, x in least.items())
    return Evidence(measured, f"median of all looks: {wanted}, and 20 k/P = {[round(20 * x, 3) for x in chance.values()]}", good)


@claim("Most of the critic's gradient, and a fifth of the actor's, lies in the span of ten top eigenvectors (PPO on Pendulum)", slow=True)
def gradients_lie_in_the_span() -> Evidence:
    return _above([ppo(s) for s in SEEDS], {CRITIC: 0.5, ACTOR: 0.2})


@ablation(gradients_lie_in_the_span, "ten random directions")
def gradients_in_random_spans() -> Evidence:
    return _above([in_random_spans(ppo(s), s) for s in SEEDS], {CRITIC: 0.5, ACTOR: 0.2})


@claim("The same of SAC's critic", slow=True)
def sac_gradients_lie_in_the_span() -> Evidence:
    return _above([sac(s) for s in SAC_SEEDS], {CRITIC: 0.5})


@ablation(sac_gradients_lie_in_the_span, "ten random directions")
def sac_gradients_in_random_spans() -> Evidence:
    return _above([in_random_spans(sac(s), s) for s in SAC_SEEDS], {CRITIC: 0.5})


# On two choosing seeds the critic was ahead by 0.32 and 0.74 in the share and by 0.51 and 0.43 in the overlap, so a tenth is asked for.
def _critic_ahead(runs: list[Looks]) -> Evidence:
    ahead = {
        "share": [round(share(looks, CRITIC) - share(looks, ACTOR), 3) for looks in runs],
        "overlap at lag 10": [round(turning(looks, CRITIC, 10) - turning(looks, ACTOR, 10), 3) for looks in runs],
    }
    return Evidence(ahead, "critic minus actor above 0.1 in both, for every seed", min(map(min, ahead.values())) > 0.1)


@claim("The critic's span holds more of its gradient than the actor's does, and turns more slowly", slow=True)
def critic_before_actor() -> Evidence:
    return _critic_ahead([ppo(s) for s in SEEDS])


@ablation(critic_before_actor, "ten random directions")
def critic_before_actor_at_random() -> Evidence:
    return _critic_ahead([in_random_spans(ppo(s), s) for s in SEEDS])


# The spec's 10 k/P = 0.08 is no measure of slowness: another run's network overlaps by 0.08 (critic) and 0.10 (actor) on choosing seeds, where the
# critic's own overlap after 20 batches was 0.67. So 0.3 is asked of the critic, and of the actor 0.2, twice what another network has.
def _slow(others: list[Looks], role: str, least: float) -> Evidence:
    """Overlaps of the seeds' spans with those of `others` a lag later."""
    pairs = list(zip([ppo(s) for s in SEEDS], others, strict=True))
    found = {lag: fmean(turning(looks, role, lag, other) for looks, other in pairs) for lag in (10, 20, 40)}
    by_seed = [round(turning(looks, role, 20, other), 3) for looks, other in pairs]
    floor = max(least, 10 * ppo(SEEDS[0])[0][role].chance)
    return Evidence(
        {f"lag {lag}": round(x, 3) for lag, x in found.items()} | {"lag 20 by seed": by_seed},
        f"mean of 3 seeds: above {floor} at lag 20, falling from lag 10 to 20 to 40",
        found[20] > floor and found[10] > found[20] > found[40],
    )


@claim("The overlap of the critic's spans falls with the lag, but is far above another network's after 20 batches", slow=True)
def critic_turns_slowly() -> Evidence:
    return _slow([ppo(s) for s in SEEDS], CRITIC, 0.3)


@ablation(critic_turns_slowly, "the later span is that of another run's network")
def another_critic() -> Evidence:
    return _slow([ppo(s) for s in (*SEEDS[1:], SEEDS[0])], CRITIC, 0.3)


# On the choosing seeds 100, 101, 102: 0.25, 0.21, 0.09 at lag 20, and at lag 40 more on two of them. On seeds 0 to 2 the overlap
# falls and is 0.18 at lag 20: above the spec's 10 k/P, less than twice the 0.11 of another network.
@claim("The same of the actor's spans, at twice another network's overlap", reproduced=False, slow=True)
def actor_turns_slowly() -> Evidence:
    return _slow([ppo(s) for s in SEEDS], ACTOR, 0.2)


@ablation(actor_turns_slowly, "the later span is that of another run's network")
def another_actor() -> Evidence:
    return _slow([ppo(s) for s in (*SEEDS[1:], SEEDS[0])], ACTOR, 0.2)


def _chance(random: bool) -> Evidence:
    """Largest distance from k/P, in standard errors of 200 draws, of both measures at the last look."""
    generator, errors = torch.Generator().manual_seed(0), {}
    for role, seen in ppo(SEEDS[0])[-1].items():
        drawn = [random_basis(seen.basis, generator) for _ in range(200)]
        bases = drawn if random else [seen.basis + 1e-3 * v for v in drawn]
        for name, values in {
            "share": [float(fraction(v, seen.gradient)) for v in bases],
            "overlap": [float(overlap(seen.basis, v)) for v in bases],
        }.items():
            x = torch.tensor(values, dtype=torch.float64)
            errors[f"{role} {name}"] = round(float((x.mean() - seen.chance).abs() / x.std() * len(x) ** 0.5), 2)
    return Evidence(errors, "within 3 standard errors of k/P (200 bases)", max(errors.values()) < 3)


@claim("A random span holds k/P of a gradient, and k/P of the Hessian's span", slow=True)
def random_spans_hold_chance() -> Evidence:
    return _chance(random=True)


@ablation(random_spans_hold_chance, "the Hessian's own span, shaken a little")
def own_span() -> Evidence:
    return _chance(random=False)
