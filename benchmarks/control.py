"""PPO and SAC against Stable-Baselines3, side by side in one run: environment steps a second, seconds to a threshold, and final returns.

    python benchmarks/control.py [--seeds 5] [--tasks CartPole-v1,Acrobot-v1,...] [--fraction 1.0] [--json]

Both libraries get the same environments, networks, hyper-parameters and number of steps, one process and one thread each, and take turns seed by
seed, so that a busy machine slows both. Learning is timed by CPU seconds; evaluations (mean return over 20 held-out episodes, likeliest action) are
not timed. Returns are interquartile means over seeds with 95% stratified bootstrap intervals. Needs `pip install "anypo[control,bench]"`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anypo import catalogue, loops
from anypo.domains.control.setup import build
from anypo.report.statistics import iqm, stratified_bootstrap
from anypo.run import Run

EVALUATIONS = 20  # points on a learning curve
EPISODES = 20  # held-out episodes an evaluation


@dataclass(frozen=True)
class Setting:
    """One algorithm on one task, the same for both libraries. `threshold`: the mean return that counts as solved."""

    algorithm: str
    task: str
    steps: int
    threshold: float
    learning_rate: float
    gamma: float = 0.99
    lam: float = 0.95
    envs: int = 8
    horizon: int = 256
    batch: int = 64
    epochs: int = 10
    normalize: bool = False  # observations and rewards by running statistics
    hidden: int = 64

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.task}"


SETTINGS = (
    Setting("ppo", "CartPole-v1", 60_000, 475, 3e-4),
    Setting("ppo", "Acrobot-v1", 100_000, -100, 3e-4, normalize=True),
    Setting("ppo", "Pendulum-v1", 200_000, -250, 1e-3, gamma=0.9, normalize=True),
    Setting("ppo", "Hopper-v5", 300_000, 1500, 3e-4, normalize=True),
    Setting("sac", "Pendulum-v1", 10_000, -250, 1e-3, batch=256, hidden=64),
)
Evaluate = Callable[[], float]


class Curve:
    """Mean returns at equal distances in steps, and the CPU seconds of learning up to each."""

    def __init__(self, steps: int) -> None:
        self.every, self.next, self.seconds, self.started = steps / EVALUATIONS, steps / EVALUATIONS, 0.0, time.process_time()
        self.points: list[tuple[int, float, float]] = []  # steps, seconds, return

    def watch(self, steps: int, evaluate: Evaluate, last: bool = False) -> None:
        """Evaluate when it is time, with the clock stopped."""
        if steps < self.next and not last:
            return
        self.seconds += time.process_time() - self.started
        if not last or not self.points or self.points[-1][0] < steps:
            self.points.append((steps, self.seconds, evaluate()))
        self.next = (steps // self.every + 1) * self.every
        self.started = time.process_time()

    def result(self, threshold: float) -> dict[str, float]:
        steps, seconds, final = self.points[-1]
        reached = next((s for _, s, value in self.points if value >= threshold), math.inf)
        return {"return": final, "steps_per_second": steps / seconds, "seconds_to_threshold": reached}


def run_anypo(setting: Setting, seed: int) -> dict[str, float]:
    method = catalogue.get(setting.algorithm, "control")
    options: dict[str, Any] = {"hidden": setting.hidden, "envs": setting.envs, "horizon": setting.horizon}
    method = method.set("update.learning_rate", setting.learning_rate).set("credit.gamma", setting.gamma)
    if setting.algorithm == "ppo":
        parts = setting.envs * setting.horizon // setting.batch
        method = method.set("credit.lam", setting.lam).set("update.minibatches", parts).set("update.epochs", setting.epochs)
        options |= {"normalize_observations": setting.normalize, "normalize_rewards": setting.normalize, "reward_gamma": setting.gamma}
    else:
        method = method.set("rollout.batch_size", setting.batch)
    needs = {name.removeprefix("old_") for name in method.needs()}
    policy, task = build(setting.task, None, needs=needs, seed=seed, evaluation_episodes=EPISODES, **options)
    run = Run(method, policy, task, steps=10**9, seed=seed, max_actions=setting.steps)
    curve = Curve(setting.steps)
    evaluate = lambda: task.evaluate(run)["return"]  # noqa: E731
    run.on_step.append(lambda record: curve.watch(run.actions, evaluate))
    loops.named(method.loop)(run)
    curve.watch(run.actions, evaluate, last=True)
    return curve.result(setting.threshold)


def run_stable_baselines(setting: Setting, seed: int) -> dict[str, float]:
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    shared: dict[str, Any] = {"seed": seed, "device": "cpu", "gamma": setting.gamma, "learning_rate": setting.learning_rate}
    shared["policy_kwargs"] = {"net_arch": [setting.hidden, setting.hidden]}
    environments = make_vec_env(setting.task, n_envs=setting.envs if setting.algorithm == "ppo" else 1, seed=seed)
    held_out = make_vec_env(setting.task, n_envs=1, seed=1_000_000)
    if setting.normalize:
        environments = VecNormalize(environments, gamma=setting.gamma)
        held_out = VecNormalize(held_out, training=False, norm_reward=False)
    if setting.algorithm == "ppo":
        model: Any = PPO("MlpPolicy", environments, n_steps=setting.horizon, batch_size=setting.batch, n_epochs=setting.epochs,
                         gae_lambda=setting.lam, **shared)  # fmt: skip
    else:
        model = SAC("MlpPolicy", environments, batch_size=setting.batch, learning_starts=1000, train_freq=64, gradient_steps=64, **shared)
    curve = Curve(setting.steps)

    def evaluate() -> float:
        if setting.normalize:
            held_out.obs_rms = environments.obs_rms
        return float(evaluate_policy(model, held_out, EPISODES, deterministic=True)[0])

    class Watch(BaseCallback):
        """Evaluates between rollouts, when the policy of the last update is the one that will act."""

        def _on_rollout_start(self) -> None:
            if self.num_timesteps:
                curve.watch(self.num_timesteps, evaluate)

        def _on_step(self) -> bool:
            return True

    model.learn(setting.steps, callback=Watch())
    curve.watch(model.num_timesteps, evaluate, last=True)
    return curve.result(setting.threshold)


LIBRARIES = {"anypo": run_anypo, "stable-baselines3": run_stable_baselines}


def measure(setting: Setting, seeds: int) -> dict[str, Any]:
    """Both libraries over the seeds, in turns; {setting, anypo: {...}, stable-baselines3: {...}, ratio: {...}}."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in LIBRARIES}
    for seed in range(seeds):
        for name in list(LIBRARIES)[:: 1 if seed % 2 == 0 else -1]:
            runs[name].append(LIBRARIES[name](setting, seed))
    found: dict[str, Any] = {"setting": setting.name, "steps": setting.steps, "threshold": setting.threshold, "seeds": seeds}
    for name, results in runs.items():
        returns = np.array([[r["return"]] for r in results])
        low, high = stratified_bootstrap(returns, iqm)
        times = [r["seconds_to_threshold"] for r in results]
        found[name] = {
            "return": float(iqm(returns)), "low": low, "high": high, "returns": [r["return"] for r in results],
            "steps_per_second": float(np.median([r["steps_per_second"] for r in results])),
            "seconds_to_threshold": float(np.median(times)), "reached": sum(map(math.isfinite, times)),
        }  # fmt: skip
    ours, theirs = found["anypo"], found["stable-baselines3"]
    found["ratio"] = {"steps_per_second": ours["steps_per_second"] / theirs["steps_per_second"]}
    both = ours["seconds_to_threshold"], theirs["seconds_to_threshold"]
    found["ratio"]["seconds_to_threshold"] = both[1] / both[0] if all(map(math.isfinite, both)) else None
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{found['setting']}: {found['steps']:,} steps, threshold {found['threshold']:g}, {found['seeds']} seeds")
    for name in LIBRARIES:
        r = found[name]
        reached = f"{r['seconds_to_threshold']:8.1f} s" if math.isfinite(r["seconds_to_threshold"]) else "   never  "
        print(
            f"  {name:<18} return {r['return']:8.1f} [{r['low']:8.1f}, {r['high']:8.1f}]  {r['steps_per_second']:9,.0f} steps/s  "
            f"to threshold {reached} ({r['reached']}/{found['seeds']})"
        )
    speed, reach = found["ratio"]["steps_per_second"], found["ratio"]["seconds_to_threshold"]
    print(
        f"  ratio              {speed:.2f}x steps/s, "
        + (f"{reach:.2f}x sooner at the threshold" if reach else "threshold not reached by both")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", default="", help="settings whose name holds one of these words, e.g. CartPole or 'sac Pendulum'")
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the steps, for a quick look")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    chosen = [s for s in SETTINGS if not asked.tasks or any(word in s.name for word in asked.tasks.split(","))]
    results = []
    for setting in chosen:
        scaled = Setting(**vars(setting) | {"steps": int(setting.steps * asked.fraction)})
        results.append(measure(scaled, asked.seeds))
        if not asked.json:
            show(results[-1])
    if asked.json:
        print(json.dumps(results).replace("Infinity", "null"))


if __name__ == "__main__":
    main()
