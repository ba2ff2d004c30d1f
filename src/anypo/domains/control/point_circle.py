"""Point-Circle: a point that is paid for running around a circle and charged for leaving a corridor (after the task of arXiv:1705.10528).

The circle is wider than the corridor, so the best unconstrained behaviour breaks the constraint. From the command line:
`--env PointCircle-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

STEPS = 60  # of an episode
INTERVAL = 0.1  # seconds between actions
RADIUS = 1.5  # of the circle
CORRIDOR = 0.7  # largest |x| without a cost
SPEED = 2.0  # largest speed in each direction


class PointCircle(gymnasium.Env):
    """Observation (x, y, vx, vy); action: a force in [-1,1]^2; `info["cost"]` is 1 outside the corridor. Episodes of 60 steps are cut, not ended."""

    metadata = {"render_modes": []}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.state, self.elapsed = np.zeros(4), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.state, self.elapsed = np.concatenate([0.1 * self.np_random.standard_normal(2), np.zeros(2)]), 0
        return self.state.astype(np.float32), {}

    def step(self, action: NDArray) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        x, y, vx, vy = self.state.tolist()
        fx, fy = (min(1.0, max(-1.0, float(f))) for f in action)
        vx, vy = (min(SPEED, max(-SPEED, v + 2 * f * INTERVAL)) for v, f in ((vx, fx), (vy, fy)))
        x, y = x + vx * INTERVAL, y + vy * INTERVAL
        self.state = np.array([x, y, vx, vy])
        self.elapsed += 1
        reward = (vy * x - vx * y) / (1 + abs((x * x + y * y) ** 0.5 - RADIUS))
        return self.state.astype(np.float32), reward, False, self.elapsed >= STEPS, {"cost": float(abs(x) > CORRIDOR)}

    def get_state(self) -> dict[str, Any]:
        return {"state": self.state.copy(), "elapsed": self.elapsed}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.state, self.elapsed = np.array(state["state"]), int(state["elapsed"])


if "PointCircle-v0" not in gymnasium.registry:
    gymnasium.register("PointCircle-v0", entry_point="anypo.domains.control.point_circle:PointCircle")
