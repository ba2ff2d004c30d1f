"""Make a small recording for offline learning: whole Pendulum (or other) episodes of an untrained, a half-trained and a trained SAC policy, a third of
each, as one .npz file. The untrained part matters: a learner without a constraint of its own needs to see what bad actions lead to.

    python benchmarks/make_offline.py pendulum.npz --env Pendulum-v1 --medium-steps 3000 --expert-steps 10000 --episodes 90

Then `anypo train sac --env Pendulum-v1 --option data=pendulum.npz` learns from that file alone.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np

from anypo import catalogue
from anypo.domains.control.replay import joined, record_episodes, write
from anypo.domains.control.setup import build
from anypo.loops import off_policy
from anypo.run import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--medium-steps", type=int, default=3000, help="environment steps after which the medium policy is taken")
    parser.add_argument("--expert-steps", type=int, default=10000)
    parser.add_argument("--episodes", type=int, default=90, help="a third of them by each policy")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    method = catalogue.get("sac").set("update.learning_rate", 1e-3).set("rollout.batch_size", 128)
    policy, task = build(asked.env, None, needs={"q_new"}, seed=asked.seed, hidden=(64, 64))
    run = Run(method, policy, task, steps=10**9, seed=asked.seed, max_actions=asked.expert_steps)
    untrained, medium = copy.deepcopy(policy), None
    while not run.finished:
        off_policy.step(run)
        if medium is None and run.actions >= asked.medium_steps:
            medium = copy.deepcopy(policy)
    rng, each = np.random.default_rng(asked.seed), asked.episodes // 3
    parts = [
        record_episodes(acting, task.environments(each), list(range(i * each, (i + 1) * each)), rng)
        for i, acting in enumerate((untrained, medium or policy, policy))
    ]
    write(asked.file, joined(parts))
    for name, part in zip(("untrained", "medium", "expert"), parts, strict=True):
        print(f"{name}: {len(part.reward)} steps, mean return {part.reward.sum() / each:.1f}")


if __name__ == "__main__":
    main()
