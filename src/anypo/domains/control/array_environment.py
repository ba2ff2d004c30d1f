"""A Gymnasium environment from equations for many rows at once (`classic.Dynamics`).

One set of equations serves both ways of stepping: as an ordinary environment, and, because `make_environments` looks for `dynamics`, as one array
for all rows. Left out: rendering.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.classic import Dynamics


class ArrayEnvironment(gymnasium.Env):
    """Subclasses set `dynamics` and, in their constructor, the spaces. Episodes are cut by the registered number of steps."""

    dynamics: ClassVar[Dynamics]
    metadata = {"render_modes": []}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.state = np.zeros(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = self.dynamics.reset(self.np_random)
        return self.dynamics.observe(self.state[:, None])[0], {}

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        moved = self.dynamics.step(self.state[:, None], np.asarray(action)[None])
        self.state = moved.state[:, 0]
        return self.dynamics.observe(moved.state)[0], float(moved.reward[0]), bool(moved.terminated[0]), False, {}

    def get_state(self) -> dict[str, Any]:
        return {"state": self.state.copy()}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.state = np.array(state["state"])
