"""What DSRL must show, on Forked-Goal: demonstrations go to two goals alike and one of them pays.

Networks (64,64), flows of 5 steps cloned in 1500, minibatches of 64, 5 for every step, 20 steps at a time after 100 of the imitating policy, Adam 2e-3,
targets that follow at 0.02, discount 0.9 (with 0.99 the goal is worth hardly more than the way past it, since a time limit is no end). Success is that
of 200 held-out episodes with sampled actions.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.collect import Trajectories, episodes
from anypo.domains.control.forked_goal import NAME, ForkedGoal
from anypo.domains.control.replay import Recording, as_batch
from anypo.domains.control.setup import build
from anypo.domains.control.tasks import EVALUATION_SEED, GymTask
from anypo.loops import off_policy
from anypo.method import Method
from anypo.methods.control.sac import METHOD as SAC
from anypo.methods.diffusion.dsrl import METHOD, VARIANTS
from anypo.run import Run

SEEDS = (0, 1)
MORE_SEEDS = (0, 1, 2, 3)  # a critic that knows nothing of the noise still commits to some, which is right by chance in half of the seeds
ITERATIONS = 15  # of 20 steps each: 300 in all
OFFLINE = 12  # iterations of 100 minibatches
EPISODES = 200


def sized(method: Method) -> Method:
    for path, value in {
        "rollout.batch_size": 64, "rollout.steps": 20, "rollout.warmup": 100, "rollout.updates_per_action": 5.0, "update.learning_rate": 2e-3,
        "update.tau": 0.02, "credit.gamma": 0.9,
    }.items():  # fmt: skip
        method = method.set(path, value)
    return method.set("prepare.0.steps", 1500) if method.prepare else method


STEERED, ALIASED, PLAIN = sized(METHOD), sized(VARIANTS["na"]), sized(SAC)


def started(method: Method, seed: int, iterations: int, task: Any = NAME) -> Run:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"hidden": (64, 64), "initial_temperature": 0.1}
    if method is not PLAIN:
        options["sampling_steps"] = 5
    built = GymTask(task, envs=1) if isinstance(task, str) else task
    policy, _ = build(built, None, needs=method.needs(), seed=seed, **options)
    return Run(method, policy, built, steps=iterations, seed=seed)


@cache
def cloned(seed: int) -> Run:
    """A run that has done nothing but imitate."""
    run = started(STEERED, seed, ITERATIONS)
    run.begin_step()
    return run


def steered(method: Method, seed: int, iterations: int, task: Any = NAME) -> Run:
    """A run that goes on from the cloned policy of the seed."""
    run = started(method, seed, iterations, task)
    run.policy.load_state_dict(cloned(seed).policy.state_dict())
    return run


def attempts(run: Run) -> Trajectories:
    policy, rng = run.policy, np.random.default_rng(0)
    seeds = list(range(EVALUATION_SEED, EVALUATION_SEED + EPISODES))
    environments = run.task.environments(EPISODES)  # type: ignore[attr-defined]
    return episodes(environments, seeds, policy.actor(), policy.for_environment, lambda n: policy.noise(rng, (n,)))


def success(run: Run) -> float:
    return round(float(attempts(run).reward.sum(1).mean()), 3)


def identity(observation: NDArray, noise: NDArray) -> NDArray:
    return noise.clip(-1, 1)


@cache
def online(seed: int, through_the_flow: bool = True) -> Run:
    run = steered(STEERED, seed, ITERATIONS)
    if not through_the_flow:
        run.policy.black_box = identity  # type: ignore[assignment]
    return off_policy.train(run)


def _reaches(through_the_flow: bool, seeds: tuple[int, ...], factor: int = 3) -> Evidence:
    imitating = [success(cloned(seed)) for seed in seeds]
    found = [success(online(seed, through_the_flow)) for seed in seeds]
    scratch = [success(off_policy.train(started(PLAIN, seed, factor * ITERATIONS))) for seed in seeds] if through_the_flow else []
    measured = {"imitating": imitating, "steered, 300 steps": found, "SAC from scratch, 900 steps": scratch}
    holds = all(0.35 <= s <= 0.65 for s in imitating) and min(found) >= 0.9 and all(s < 0.9 for s in scratch)
    return Evidence(
        measured, "imitating 0.35 to 0.65, steered at least 0.9, SAC below 0.9 with three times the steps, in every seed", holds
    )


@claim(
    "Steering lifts an imitating policy that succeeds in about half of its attempts to 90% in a third of the steps in which SAC from scratch fails to",
    slow=True,
)
def half_becomes_ninety_percent() -> Evidence:
    return _reaches(True, SEEDS)


@ablation(half_becomes_ninety_percent, "the noise itself is the action (the map is the identity): SAC with another name")
def without_the_flow() -> Evidence:
    return _reaches(False, SEEDS[:1])


class _Watched:
    """The cloned flow behind a function of two arrays, which counts its calls."""

    def __init__(self, policy: Any) -> None:
        self.inside, self.calls, self.arrays = policy.frozen_map(), 0, True

    def __call__(self, observation: NDArray, noise: NDArray) -> NDArray:
        self.calls += 1
        self.arrays &= type(observation) is np.ndarray and type(noise) is np.ndarray
        return self.inside(observation, noise)


class _KeepsImitating:
    """Fine-tuning of the weights: after every iteration a step of flow matching on the steps of the buffer."""

    def __call__(self, batch: Batch, run: Run) -> None:
        rows = run.method.rollout.buffer.take(torch.arange(len(run.method.rollout.buffer)))  # type: ignore[attr-defined]
        run.policy.clone(rows["context"], rows["action"], run.generator, steps=1)


def _black_box(method: Method, iterations: int = 8) -> Evidence:
    """The aliased form, which calls the map while it learns too: once with the flow inside, once behind a function of arrays."""
    before = cloned(0).policy.base_network.state_dict()
    inside, outside = (steered(method, 0, iterations) for _ in range(2))
    watched = _Watched(cloned(0).policy)
    outside.policy.black_box = watched  # type: ignore[assignment]
    for run in (inside, outside):
        off_policy.train(run)
    unchanged = all(
        torch.equal(before[name], value) for run in (inside, outside) for name, value in run.policy.base_network.state_dict().items()
    )
    alike = all(
        torch.equal(a, b) for a, b in zip(inside.policy.actor_network.parameters(), outside.policy.actor_network.parameters(), strict=True)
    )
    moved = not torch.equal(inside.policy.actor_network.layers[0].weight, cloned(0).policy.actor_network.layers[0].weight)
    measured = {"base unchanged": unchanged, "same actor through a function of arrays": alike, "actor moved": moved, "calls": watched.calls}
    return Evidence(
        measured, "all true, with calls on arrays alone", unchanged and alike and moved and watched.calls > 0 and watched.arrays
    )


@claim(
    "The imitating policy is a black box: its weights stay bitwise as they are, and training is the same when it can only be called with arrays",
    slow=True,
)
def the_base_is_a_black_box() -> Evidence:
    return _black_box(ALIASED)


@ablation(the_base_is_a_black_box, "the flow's weights are fine-tuned beside the steering")
def weights_are_tuned() -> Evidence:
    return _black_box(ALIASED.but(control=_KeepsImitating()), iterations=6)


class Recorded(GymTask):
    """The demonstrations as a fixed buffer. `noise`: stand-in noise beside their actions, drawn at random."""

    def __init__(self, noise: bool) -> None:
        super().__init__(NAME, envs=1, data="in memory")
        self.noise = noise

    def demonstrations(self, rng: np.random.Generator) -> Recording:
        return ForkedGoal().demonstrate(rng)

    def dataset(self, run: Run) -> Batch:
        batch = as_batch(self.demonstrations(np.random.default_rng(run.seed)), run.policy)  # type: ignore[arg-type]
        if self.noise:
            drawn = torch.randn(len(batch), 1, 2, generator=run.generator) / run.policy.noise_bound
            batch.action[..., :2] = drawn.clamp(-0.999, 0.999)
        return batch


def _offline(method: Method, seeds: tuple[int, ...]) -> Evidence:
    found = [success(off_policy.train(steered(method, seed, OFFLINE, Recorded(method is not ALIASED)))) for seed in seeds]
    return Evidence(found, "success of at least 0.9 in every seed", min(found) >= 0.9)


@claim("The noise-aliased form learns from recorded steps that hold actions and no noise: 90% success without a step of its own", slow=True)
def aliased_learns_offline() -> Evidence:
    return _offline(ALIASED, MORE_SEEDS)


@ablation(aliased_learns_offline, "no critic of actions: the other form, with noise drawn at random where the recording has none")
def noise_critic_alone() -> Evidence:
    return _offline(STEERED, MORE_SEEDS)


def off_manifold(run: Run, seed: int) -> float:
    """Mean distance of 200 episodes' (observation, action) pairs to the nearest demonstrated pair."""
    shown, seen = ForkedGoal().demonstrate(np.random.default_rng(seed)), attempts(run)
    taken = run.policy.for_environment(seen.action[seen.mask])
    mine, theirs = np.concatenate([seen.observation[seen.mask], taken], 1), np.concatenate([shown.observation, shown.action], 1)
    return float(torch.cdist(torch.from_numpy(mine).double(), torch.from_numpy(theirs).double()).min(1).values.mean())


def _stays(through_the_flow: bool, seeds: tuple[int, ...]) -> Evidence:
    pairs = [(off_manifold(online(seed, through_the_flow), seed), off_manifold(cloned(seed), seed)) for seed in seeds]
    share = [round(mine / imitating, 3) for mine, imitating in pairs]
    distance = round(fmean(imitating for _, imitating in pairs), 4)
    return Evidence(
        {"share": share, "imitating": distance}, "at most 1.2 times the imitating policy's distance, in every seed", max(share) <= 1.2
    )


@claim(
    "Steered actions stay among the demonstrated ones: their distance to the nearest is at most 1.2 times the imitating policy's", slow=True
)
def stays_on_the_manifold() -> Evidence:
    return _stays(True, SEEDS)


@ablation(stays_on_the_manifold, "the noise itself is the action (the map is the identity)")
def leaves_without_the_flow() -> Evidence:
    return _stays(False, SEEDS[:1])
