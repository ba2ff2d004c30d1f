"""Environments: N Gymnasium environments stepped together, without an automatic reset.

`step` returns the true next observation of every row; whoever collects decides when to reset, so that termination, truncation and bootstrapping
never meet an observation of the next episode. Classic control is stepped as arrays (`classic`), everything else one environment at a time with
Gymnasium's thin wrappers taken off. Left out: worker processes (a step of these simulators is shorter than a message between processes).
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from anypo.domains.control import classic

OWN = {  # environments of this package, registered with Gymnasium when they are asked for
    "MalwareMaintenance-v0": "anypo.domains.control.maintenance",
    "MultiGoal-v0": "anypo.domains.control.multi_goal",
    "NoisyPoint-v0": "anypo.domains.control.noisy_point",
    "ForkedGoal-v0": "anypo.domains.control.forked_goal",
    "OrderFlow-v0": "anypo.domains.control.order_book",
    "Peg-v0": "anypo.domains.control.peg",
    "PickPlace-v0": "anypo.domains.control.pick_place",
    "PointAvoid-v0": "anypo.domains.control.point_avoid",
    "PointCircle-v0": "anypo.domains.control.point_circle",
    "SkillGrid-v0": "anypo.domains.control.skill_grid",
    "TrackCar-v0": "anypo.domains.control.track_car",
    "TwoGoals-v0": "anypo.domains.control.two_goals",
    "UavSwarm-v0": "anypo.domains.control.uav_swarm",
    "UavSwarmPreserved-v0": "anypo.domains.control.uav_swarm",
}
Maker = Callable[..., Any]  # makes a Gymnasium environment; takes `render_mode` where pictures of it are wanted


class EnvironmentFailed(ValueError):
    """An environment raised, or gave an observation or reward that is not finite, in the middle of an episode. `row` says which one."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True)
class Spaces:
    """What a policy must know of an environment."""

    name: str
    observation_size: int  # after flattening; one-hot for discrete observations
    discrete_observation: bool
    actions: int | None  # number of discrete actions; None for continuous ones
    low: NDArray[np.float32] | None  # [D] bounds of continuous actions, possibly infinite
    high: NDArray[np.float32] | None
    chunk: int = 1  # environment steps an action takes; D counts all of them
    team_size: int = 1  # agents that act at once, each by a row of its own; all else here is one agent's

    @property
    def action_size(self) -> int:
        """D of continuous actions; 1 for discrete ones."""
        return 1 if self.low is None else len(self.low)


class Step(NamedTuple):
    observation: NDArray[np.float32]  # [N,O], reached by the action, before any reset
    reward: NDArray[np.float64]  # [N]
    terminated: NDArray[np.bool_]  # [N]
    truncated: NDArray[np.bool_]  # [N]
    cost: NDArray[np.float64] | None = None  # [N], of environments that report `info["cost"]`
    failed: NDArray[np.bool_] | None = None  # [N], rows that raised and are to begin anew; None when there are none


class Environments(Protocol):
    """N environments. `rows` [n] restricts a step to some of them; results then have n rows."""

    count: int
    restorable: bool  # whether get_state and set_state bring an episode back exactly

    @property
    def failures(self) -> int:
        """Environments that were made anew after they raised."""
        ...

    def reset(self, row: int, seed: int | None = None) -> NDArray[np.float32]: ...

    def step(self, action: NDArray, rows: NDArray[np.int64] | None = None) -> Step: ...

    def get_state(self, row: int) -> dict[str, Any]: ...

    def set_state(self, row: int, state: dict[str, Any]) -> NDArray[np.float32]: ...


def maker(environment: str | Maker) -> Maker:
    """How to make one environment of a registered id (`gym:` in front is allowed) or by a function of the user's.

    Raises ValueError with near names for an unknown id, ImportError with the command to run when a package is missing.
    """
    gymnasium = import_gymnasium()
    if not isinstance(environment, str):
        return environment
    name = environment.removeprefix("gym:")
    if name in OWN:
        importlib.import_module(OWN[name])
    if name not in gymnasium.registry and ":" not in name:  # module:Id lets Gymnasium import the module that registers it
        near = difflib.get_close_matches(name, gymnasium.registry, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "gymnasium.registry lists those that are installed"
        raise ValueError(f"unknown environment '{name}'; {hint}")

    def make(**options: Any) -> Any:
        try:
            return gymnasium.make(name, disable_env_checker=True, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            extra = "gymnasium[box2d]" if "box2d" in str(error).lower() else "anypo[control]"
            raise ImportError(f'{name} needs a package that is not here; pip install "{extra}"') from error
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"the environment '{name}' cannot be made: {error}") from error

    return make


def import_gymnasium() -> Any:
    """The gymnasium module. Raises ImportError with the command to run."""
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError('control needs Gymnasium; pip install "anypo[control]"') from error
    return gymnasium


def describe(make: Maker) -> Spaces:
    """The spaces of an environment. Raises ValueError for those a control policy cannot act in."""
    spaces = import_gymnasium().spaces
    try:
        environment = make()
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"the environment raised {type(error).__name__} when it was made: {error}") from error
    observed, acted = environment.observation_space, environment.action_space
    name = environment.spec.id if environment.spec is not None else type(environment.unwrapped).__name__
    team = int(getattr(environment.unwrapped, "team_size", 1))
    environment.close()
    if not isinstance(observed, spaces.Box | spaces.Discrete):
        raise ValueError(
            f"{name} has observations of type {type(observed).__name__}; Box and Discrete are supported, so wrap it in gymnasium's FlattenObservation"
        )
    if isinstance(acted, spaces.Discrete):
        actions, low, high = int(acted.n), None, None
        if int(acted.start) != 0:
            raise ValueError(f"{name} numbers its actions from {int(acted.start)}; wrap it so that they begin at 0")
    elif isinstance(acted, spaces.Box) and np.issubdtype(acted.dtype, np.floating):
        actions, low, high = None, acted.low.ravel().astype(np.float32), acted.high.ravel().astype(np.float32)
    else:
        kind = f"{type(acted).__name__}{f' of {acted.dtype}' if isinstance(acted, spaces.Box) else ''}"
        raise ValueError(
            f"{name} has actions of type {kind}; Discrete and continuous Box are supported, so wrap it in a gymnasium.ActionWrapper that has one of them"
        )
    size = int(observed.n) if isinstance(observed, spaces.Discrete) else int(np.prod(observed.shape))
    return Spaces(name, size, isinstance(observed, spaces.Discrete), actions, low, high, team_size=team)


def make_environments(make: Maker, spaces: Spaces, count: int, tolerant: bool = False) -> Environments:
    """The fastest form of `count` environments; `tolerant` ones report a row that raises as `failed` instead of raising EnvironmentFailed."""
    first = make()
    spec = first.spec
    plain = (
        spec is not None and not spec.kwargs and not spec.additional_wrappers and type(first.unwrapped).__module__.startswith("gymnasium.")
    )
    if plain and spec.id in classic.KNOWN:
        first.close()
        return Classic(classic.KNOWN[spec.id], count, int(spec.max_episode_steps or 10**9))
    bare, limit = _unwrap(first)
    dynamics = getattr(bare, "dynamics", None)  # of an `ArrayEnvironment`
    if dynamics is not None:
        return Classic(dynamics, count, limit)
    return Separate(first, make, spaces, count, tolerant)


class Classic:
    """N problems of one kind as arrays: classic control, and others that have such `dynamics`."""

    restorable = True
    failures = 0

    def __init__(self, dynamics: classic.Dynamics, count: int, limit: int) -> None:
        from gymnasium.utils import seeding

        self.count, self.limit = count, limit
        self.dynamics = dynamics
        self.random_stream = seeding.np_random
        self.generators = [seeding.np_random(None)[0] for _ in range(count)]
        self.elapsed = np.zeros(count, dtype=np.int64)
        first = self.dynamics.reset(self.generators[0])
        self.state = np.repeat(first[:, None], count, axis=1)

    def reset(self, row: int, seed: int | None = None) -> NDArray[np.float32]:
        if seed is not None:
            self.generators[row] = self.random_stream(seed)[0]
        self.state[:, row] = self.dynamics.reset(self.generators[row])
        self.elapsed[row] = 0
        return self.dynamics.observe(self.state[:, row : row + 1])[0]

    def step(self, action: NDArray, rows: NDArray[np.int64] | None = None) -> Step:
        if rows is None:
            moved = self.dynamics.step(self.state, action)
            self.state = moved.state
            self.elapsed += 1
            elapsed = self.elapsed
        else:
            moved = self.dynamics.step(self.state[:, rows], action)
            self.state[:, rows] = moved.state
            self.elapsed[rows] += 1
            elapsed = self.elapsed[rows]
        return Step(self.dynamics.observe(moved.state), moved.reward, moved.terminated, elapsed >= self.limit)

    def get_state(self, row: int) -> dict[str, Any]:
        return {"state": self.state[:, row].copy(), "elapsed": int(self.elapsed[row]), "random": self.generators[row].bit_generator.state}

    def set_state(self, row: int, state: dict[str, Any]) -> NDArray[np.float32]:
        self.state[:, row] = state["state"]
        self.elapsed[row] = state["elapsed"]
        self.generators[row].bit_generator.state = state["random"]
        return self.dynamics.observe(self.state[:, row : row + 1])[0]


class Separate:
    """N environments stepped one after another.

    Gymnasium's order and time-limit wrappers are replaced by a counter where nothing else is wrapped around. With `tolerant`, an environment that
    raises ends its episode (`failed`), and the next reset of that row makes a new one with a seed of its own.
    """

    def __init__(self, first: Any, make: Maker, spaces: Spaces, count: int, tolerant: bool = False) -> None:
        self.make, self.spaces, self.count, self.tolerant = make, spaces, count, tolerant
        made = [first, *(make() for _ in range(count - 1))]
        self.limits, self.environments = [], []
        for environment in made:
            bare, limit = _unwrap(environment)
            self.environments.append(bare)
            self.limits.append(limit)
        self.elapsed = [0] * count
        self.last = [np.zeros(spaces.observation_size, dtype=np.float32) for _ in range(count)]
        self.action_shape = first.action_space.shape
        self.action_dtype = first.action_space.dtype
        self.restorable = all(_keeper(e) is not None for e in self.environments)
        self.seeds, self.broken = [0] * count, [False] * count
        self.failures = 0

    def reset(self, row: int, seed: int | None = None) -> NDArray[np.float32]:
        if self.broken[row]:
            self.environments[row], self.limits[row] = _unwrap(self.make())
            self.broken[row] = False
            self.failures += 1
            seed = self.seeds[row] + self.failures if seed is None else seed
        self.seeds[row] = self.seeds[row] if seed is None else seed
        self.elapsed[row] = 0
        try:
            self.last[row] = self._flat(self.environments[row].reset(seed=seed)[0])
        except Exception as error:
            raise EnvironmentFailed(
                f"{self.spaces.name} raised {type(error).__name__} when an episode was to begin: {error}", row
            ) from error
        if not np.isfinite(self.last[row]).all():
            raise EnvironmentFailed(f"{self.spaces.name} began an episode with an observation that is not finite", row)
        return self.last[row]

    def step(self, action: NDArray, rows: NDArray[np.int64] | None = None) -> Step:
        chosen = range(self.count) if rows is None else rows.tolist()
        size = len(chosen)
        observation = np.empty((size, self.spaces.observation_size), dtype=np.float32)
        reward, terminated, truncated = np.empty(size), np.empty(size, dtype=bool), np.empty(size, dtype=bool)
        costs: NDArray[np.float64] | None = None
        failed: NDArray[np.bool_] | None = None
        discrete = self.spaces.actions is not None
        acts = action.tolist() if discrete else action.astype(self.action_dtype, copy=False).reshape(size, *self.action_shape)
        for i, row in enumerate(chosen):
            try:
                observation[i], reward[i], terminated[i], truncated[i], info = self._one(row, acts[i])
            except EnvironmentFailed:
                if not self.tolerant:
                    raise
                failed = np.zeros(size, dtype=bool) if failed is None else failed
                observation[i], reward[i], terminated[i], truncated[i], failed[i] = self.last[row], 0.0, False, True, True
                self.broken[row] = True
                continue
            self.last[row] = observation[i]
            if "cost" in info:
                costs = np.zeros(size) if costs is None else costs
                costs[i] = info["cost"]
        return Step(observation, reward, terminated, truncated, costs, failed)

    def _one(self, row: int, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        try:
            seen, reward, terminated, truncated, info = self.environments[row].step(action)
            observation = self._flat(seen)
            fine = math.isfinite(reward) and math.isfinite(observation.sum())
        except Exception as error:
            raise EnvironmentFailed(self._said(f"raised {type(error).__name__}: {error}", row), row) from error
        if not fine:
            raise EnvironmentFailed(self._said("gave an observation or a reward that is not finite", row), row)
        self.elapsed[row] += 1
        return observation, reward, terminated, truncated or self.elapsed[row] >= self.limits[row], info

    def get_state(self, row: int) -> dict[str, Any]:
        keep = _keeper(self.environments[row])
        inner = keep.read(self.environments[row].unwrapped) if keep else None
        random = self.environments[row].unwrapped.np_random.bit_generator.state
        return {"inner": inner, "elapsed": self.elapsed[row], "last": self.last[row].copy(), "random": random, "seed": self.seeds[row]}

    def set_state(self, row: int, state: dict[str, Any]) -> NDArray[np.float32]:
        """Bring an episode back; without a way to do so (`restorable` is False) the episode starts anew, from the kept random stream."""
        environment = self.environments[row]
        keep = _keeper(environment)
        self.seeds[row] = state["seed"]
        environment.reset(seed=0)
        environment.unwrapped.np_random.bit_generator.state = state["random"]
        if keep is None or state["inner"] is None:
            return self.reset(row)
        keep.write(environment.unwrapped, state["inner"])
        self.elapsed[row], self.last[row] = state["elapsed"], np.asarray(state["last"], dtype=np.float32)
        return self.last[row]

    def _flat(self, observation: Any) -> NDArray[np.float32]:
        if self.spaces.discrete_observation:
            out = np.zeros(self.spaces.observation_size, dtype=np.float32)
            out[int(observation)] = 1.0
            return out
        return np.asarray(observation, dtype=np.float32).ravel()

    def _said(self, what: str, row: int) -> str:
        return f"{self.spaces.name} {what} after {self.elapsed[row]} steps of an episode; set the option on_env_error=restart to go on with a new episode"


class Keeper(NamedTuple):
    """How the inside of one kind of environment is read and written back exactly."""

    read: Callable[[Any], dict[str, Any]]
    write: Callable[[Any, Mapping[str, Any]], None]


def _keeper(environment: Any) -> Keeper | None:
    """A way to keep an environment's state: its own `get_state`/`set_state` pair, MuJoCo's integration state, or the `state` of classic control."""
    inner = environment.unwrapped
    module = type(inner).__module__
    if environment is not inner:
        return None  # an unknown wrapper may hold state of its own
    if hasattr(inner, "get_state") and hasattr(inner, "restore_state"):
        return Keeper(lambda e: e.get_state(), lambda e, state: e.restore_state(state))
    if module.startswith("gymnasium.envs.mujoco"):
        return Keeper(_read_mujoco, _write_mujoco)
    if module.startswith("gymnasium.envs.classic_control"):
        return Keeper(_read_classic, _write_classic)
    return None


def _read_mujoco(inner: Any) -> dict[str, Any]:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(inner.model, kind))
    mujoco.mj_getState(inner.model, inner.data, state, kind)
    return {"integration": state, "xpos": inner.data.xpos.copy()}


def _write_mujoco(inner: Any, state: Mapping[str, Any]) -> None:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.asarray(state["integration"])
    mujoco.mj_setState(inner.model, inner.data, integration, kind)
    mujoco.mj_forward(inner.model, inner.data)
    mujoco.mj_setState(inner.model, inner.data, integration, kind)  # the forward pass touches the solver's warm start
    inner.data.xpos[:] = state["xpos"]  # of the last substep, which some environments read before they step


def _read_classic(inner: Any) -> dict[str, Any]:
    return {"state": np.array(inner.state, dtype=np.float64), "beyond": getattr(inner, "steps_beyond_terminated", None)}


def _write_classic(inner: Any, state: Mapping[str, Any]) -> None:
    inner.state = np.array(state["state"])
    if hasattr(inner, "steps_beyond_terminated"):
        inner.steps_beyond_terminated = state["beyond"]


def _unwrap(environment: Any) -> tuple[Any, int]:
    """The environment without Gymnasium's order and time-limit wrappers, and its limit; unchanged when anything else is wrapped around it."""
    from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

    layers, limit = environment, 10**9
    while isinstance(layers, OrderEnforcing | PassiveEnvChecker | TimeLimit):
        if isinstance(layers, TimeLimit):
            limit = min(limit, layers._max_episode_steps)
        layers = layers.env
    return (layers, limit) if layers is layers.unwrapped else (environment, 10**9)
