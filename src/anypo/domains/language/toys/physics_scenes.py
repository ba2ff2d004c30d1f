"""physics_scenes: a planner calls tools that say what a scene's text leaves out, then a generator that cannot be changed, and a verifier scores the draft.

A scene is thrown, dropped or rolled; its text names some of the numbers that fix its path and some of what has to be shown. The generator fills in the
rest from habit (a weak gravity, bounces without loss). Tools of a turn: `compute` solves for all numbers, `keyframe` draws five positions
from what is known, which the generator's path is bent through, `refine` writes out what has to be shown. A turn is one yes or no a tool, a draft and its
scores, and a yes or no to stopping. A batch's context is what the planner sees at every such token [N,T,F]; `segment` is the turn. Left out:
pictures. A "video" is the path of one point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

KINDS, MATERIALS, TOOLS = ("throw", "drop", "roll"), {"rubber": 0.8, "wood": 0.5, "clay": 0.1}, ("compute", "keyframe", "refine")
PARAMETERS, PRIOR = ("h0", "v0", "u", "g", "e"), {"h0": 1.0, "v0": 0.0, "u": 1.0, "g": 3.0, "e": 1.0}
GRAVITY, FRAMES, SECONDS, AT = 9.8, 24, 0.1, (0, 6, 12, 18, 23)
ROLL, SLOTS, CALL_COST = 2, 4, 0.03
JUDGED_SEED, JUDGED = 77, 2048  # scenes over which a planner is judged
Known = dict[str, Any]  # parameters by name, numbers or tensors [N]; missing ones are absent or NaN


class Scores(NamedTuple):
    rmse: Tensor  # [...]
    pc: Tensor  # [...] physical commonsense, in [1,5]
    sa: Tensor  # [...] semantic adherence, in [1,5]
    joint: Tensor  # [...] int64: 1 if both reach the threshold


def simulate(h0: Any, v0: Any, u: Any, g: Any, e: Any, frames: int = FRAMES, dt: float = SECONDS) -> Float[Tensor, "... F 2"]:
    """Positions (x, y) at every frame: a flight from height h0 with speeds u and v0, and bounces that keep the share e of the vertical speed."""
    h0, v0, u, g, e = torch.broadcast_tensors(*(torch.as_tensor(value, dtype=torch.float64) for value in (h0, v0, u, g, e)))
    x, y, vy, path = torch.zeros_like(h0), h0, v0, []
    for _ in range(frames):
        path.append(torch.stack([x, y], dim=-1))
        x, vy = x + u * dt, vy - g * dt
        y = y + vy * dt
        below = y < 0
        y, vy = torch.where(below, -e * y, y), torch.where(below, -e * vy, vy)
    return torch.stack(path, dim=-2)


def parameter(known: Known, name: str, otherwise: float | Tensor | None = None) -> Tensor:
    """A known parameter, or `otherwise` (None: its prior) where it is missing."""
    value = torch.as_tensor(known.get(name, math.nan), dtype=torch.float64)
    return torch.where(value.isnan(), torch.as_tensor(PRIOR[name] if otherwise is None else otherwise, dtype=torch.float64), value)


def generate(
    known: Known, keyframes: Float[Tensor, "... K 3"], frames: int = FRAMES, dt: float = SECONDS, gravity: Any = PRIOR["g"]
) -> Float[Tensor, "... F 2"]:
    """The frozen generator: it reads h0, v0 and u, cannot read g and e, and adds to its path what keyframes (frame, x, y) say it is off by, between
    frames in proportion. Raises ValueError unless the keyframes, the same frames in all rows, ascend within the video."""
    path = simulate(parameter(known, "h0"), parameter(known, "v0"), parameter(known, "u"), gravity, PRIOR["e"], frames, dt)
    return bend(path, keyframes) if keyframes.numel() else path


def bend(path: Float[Tensor, "... F 2"], keyframes: Float[Tensor, "... K 3"]) -> Float[Tensor, "... F 2"]:
    """Add what keyframes say a path is off by, between them in proportion, constant outside. Raises ValueError as `generate` does."""
    frames, at = path.shape[-2], keyframes[..., 0].reshape(-1, keyframes.shape[-2])[0].long()
    if int(at[0]) < 0 or int(at[-1]) >= frames or not bool((at[1:] > at[:-1]).all()):
        raise ValueError(f"keyframes must be at ascending frames between 0 and {frames - 1}, not {at.tolist()}")
    between = [np.interp(np.arange(frames), at.numpy(), column) for column in np.eye(len(at))]
    return path + torch.tensor(np.stack(between, axis=1)) @ (keyframes[..., 1:] - path[..., at, :])


def tool_keyframe(known: Known, at: Int[Tensor, " K"], frames: int = FRAMES, dt: float = SECONDS) -> Float[Tensor, "... K 3"]:
    """Frame, x and y at the frames `at`, simulated from what is known and the prior."""
    h0, v0, u, g, e = (parameter(known, name) for name in PARAMETERS)
    found = simulate(h0, v0, u, g, e, frames, dt)[..., at, :]
    return torch.cat([at.to(found).expand(found.shape[:-1])[..., None], found], dim=-1)


def scores(
    path: Float[Tensor, "... F 2"],
    truth: Float[Tensor, "... F 2"],
    slots: Tensor,
    required: Tensor,
    tol: float = 2.0,
    threshold: float = 4.0,
) -> Scores:
    """The verifier: distance from the true path, and the share of the `required` [...,S] of 0/1 that `slots` fills."""
    rmse = (path - truth).pow(2).sum(-1).mean(-1).sqrt()
    pc = 1 + 4 * (1 - (rmse / tol).clamp(max=1))
    needed = required.double().sum(-1)
    sa = 1 + 4 * (slots * required).double().sum(-1) / needed.clamp(min=1)
    return Scores(rmse, pc, sa, ((pc >= threshold) & (sa >= threshold)).long())


class Scenes(NamedTuple):
    kind: Tensor  # [N] int64
    material: Tensor  # [N] int64
    true: Tensor  # [N,5] by PARAMETERS
    stated: Tensor  # [N,2] bool: the text says h0, says u
    filled: Tensor  # [N,4] bool: what the text says has to be shown


def scenes(ids: list[int]) -> Scenes:
    """The scenes of these numbers, each drawn from its own."""
    rows = []
    for number in ids:
        rng = np.random.default_rng(number)
        kind, material = rng.integers(3), rng.integers(3)
        h0, v0, u = rng.uniform(0.5, 3), rng.uniform(0, 4), rng.uniform(0.3, 2)
        moving = {0: (h0, v0, u, GRAVITY), 1: (h0, 0.0, u, GRAVITY), 2: (0.0, 0.0, u, 0.0)}[int(kind)]
        rows.append([kind, material, *moving, list(MATERIALS.values())[material], *(rng.random(6) < 0.5)])
    table = torch.tensor(np.array(rows, dtype=float))
    return Scenes(table[:, 0].long(), table[:, 1].long(), table[:, 2:7], table[:, 7:9].bool(), table[:, 9:].bool())


class Draft:
    """What N planners have found out and made so far."""

    def __init__(self, found: Scenes) -> None:
        self.scenes, n, roll = found, len(found.kind), found.kind == ROLL
        self.truth = simulate(*found.true.T)
        self.known = torch.full((n, 5), math.nan, dtype=torch.float64)
        self.known[:, [0, 2]] = torch.where(found.stated, found.true[:, [0, 2]], math.nan)
        self.known[:, [0, 1, 3]] = torch.where(roll[:, None], 0.0, self.known[:, [0, 1, 3]])  # on the ground, and said to stay there
        self.gravity = torch.where(roll, 0.0, PRIOR["g"])
        self.keyframes = tool_keyframe({}, torch.tensor(AT)).expand(n, -1, -1)  # until the tool is used, not looked at
        self.slots, self.used = found.filled, torch.zeros(n, 3, dtype=torch.bool)
        self.score = torch.zeros(n, 2, dtype=torch.float64)  # PC and SA of the last draft, 0 before the first
        self.joint = torch.zeros(n, dtype=torch.int64)

    def turn(self, calls: Tensor, rows: Tensor) -> None:
        """Call tools [N,3] (those that do not fail), then draft and verify, in the rows [N] that go on."""
        calls = calls & rows[:, None]
        self.known = torch.where(calls[:, :1], self.scenes.true, self.known)
        known = dict(zip(PARAMETERS, self.known.T, strict=True))
        self.keyframes = torch.where(calls[:, 1, None, None], tool_keyframe(known, torch.tensor(AT)), self.keyframes)
        self.slots, self.used = self.slots | calls[:, 2:], self.used | calls
        path = generate(known, torch.zeros(0), gravity=self.gravity)
        path = torch.where(self.used[:, 1, None, None], bend(path, self.keyframes), path)
        found = scores(path, self.truth, self.slots, torch.ones_like(self.slots))
        self.score = torch.where(rows[:, None], torch.stack([found.pc, found.sa], dim=1), self.score)
        self.joint = torch.where(rows, found.joint, self.joint)

    def features(self, turn: int, turns: int, place: int, calls: Tensor) -> Float[Tensor, "N F"]:
        """What the planner sees before token `place` of a turn: the scene's text, what was done, rounded scores, the turn, this turn's choices."""
        n, clock = len(self.joint), torch.tensor([turn / turns])
        parts = [
            nn.functional.one_hot(self.scenes.kind, 3), nn.functional.one_hot(self.scenes.material, 3), self.scenes.stated, self.slots,
            self.used, (2 * self.score).round() / 10, self.score[:, :1] > 0, clock.expand(n, 1), calls,
            nn.functional.one_hot(torch.tensor(place), 4).expand(n, 4),
        ]  # fmt: skip
        return torch.cat([part.float() for part in parts], dim=1)


FEATURES = 3 + 3 + 2 + SLOTS + 3 + 2 + 1 + 1 + 3 + 4


class PlannerPolicy(Policy):
    """Yes (1) or no (0) from what is seen, by a layer of tanh units."""

    provides = frozenset({"logp", "entropy", "logits"})
    learning_rate, optimizer = 3e-3, "adam"
    memoryless, vocabulary = True, 2

    def __init__(self, hidden: int = 64, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        logits = self.network(batch.context)
        log_probs = logits.log_softmax(-1)
        logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
        signals = {
            "logits": logits,
            "logp": torch.where(batch.mask, logp, torch.zeros_like(logp)),
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
        }
        return Signals({name: signals[name] for name in needs})


Choose = Callable[[Tensor, int], Tensor]  # what is seen [N,F] and the token's place in its turn (3: stop?) -> logits [N,2]


class PhysicsScenes:
    """The task. Its score is 1 for a draft that passes the verifier, less 0.03 a tool call. `fail`: chance that a call has no effect.

    `signals` of its batches: `prompt_id`, `kind` and `joint` [N], `calls` [N,3] the calls of each tool, `old_entropy`.
    """

    name, objectives = "physics_scenes", ("reward",)

    def __init__(self, *, turns: int = 3, fail: float = 0.0, prompts_per_step: int = 8) -> None:
        if turns < 1 or not 0 <= fail < 1:
            raise ValueError(f"physics_scenes needs turns of at least 1 and a chance to fail in [0,1), not {turns} and {fail}")
        self.turns, self.fail, self.prompts_per_step = turns, fail, prompts_per_step

    def policy(self, **options: Any) -> PlannerPolicy:
        return PlannerPolicy(**options)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(id=int(i), content=int(i)) for i in rng.integers(1 << 30, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        ids = [p.id for p in prompts for _ in range(p.samples)]
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        policy = cast(PlannerPolicy, run.policy)
        return self.attempt(lambda seen, place: policy.network(seen), ids, run.generator, group, run.version)

    @torch.no_grad()
    def attempt(self, choose: Choose, ids: list[int], generator: torch.Generator, group: Tensor | None = None, version: int = 0) -> Batch:
        """One attempt at each scene by any planner."""
        found = scenes(ids)
        draft, n = Draft(found), len(ids)
        alive, total = torch.ones(n, dtype=torch.bool), torch.zeros(n, 3, dtype=torch.int64)
        seen, actions, mask, logits, segment = [], [], [], [], []
        for turn in range(self.turns):
            calls = torch.zeros(n, 3, dtype=torch.bool)
            for place in range(3 if turn == self.turns - 1 else 4):
                if place == 3:
                    draft.turn(self._working(calls, generator), alive)
                seen.append(draft.features(turn, self.turns, place, calls))
                logits.append(choose(seen[-1], place))
                actions.append(torch.multinomial(logits[-1].softmax(-1), 1, generator=generator)[:, 0])
                mask.append(alive)
                segment.append(torch.full((n,), turn))
                if place < 3:
                    calls[:, place] = actions[-1].bool()
            total += calls & alive[:, None]
            if turn < self.turns - 1:
                alive = alive & (actions[-1] == 0)
        draft.turn(self._working(calls, generator), alive)
        action, exists = torch.stack(actions, dim=1), torch.stack(mask, dim=1)
        log_probs = torch.stack(logits, dim=1).log_softmax(-1)
        logp = log_probs.gather(-1, action[..., None])[..., 0]
        every, ids_ = torch.ones(n, dtype=torch.bool), torch.tensor(ids)
        return Batch(
            action=action, mask=exists, logp=torch.where(exists, logp, torch.zeros_like(logp)), context=torch.stack(seen, dim=1),
            group=torch.arange(n) if group is None else group, segment=torch.stack(segment, dim=1), terminated=every, truncated=~every,
            version=torch.full((n,), version),
            signals={
                "prompt_id": ids_, "kind": found.kind, "joint": draft.joint, "calls": total,
                "old_entropy": -(log_probs.exp() * log_probs).sum(-1),
            },
        )  # fmt: skip

    def _working(self, calls: Tensor, generator: torch.Generator) -> Tensor:
        return calls & (torch.rand(calls.shape, generator=generator) >= self.fail) if self.fail else calls

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        return batch.signal("joint").float() - CALL_COST * batch.signal("calls").sum(1)

    def judge(self, choose: Choose) -> Batch:
        """Attempts of a planner at the held-out scenes, with the same random numbers every time."""
        return self.attempt(choose, [(1 << 31) + i for i in range(JUDGED)], torch.Generator().manual_seed(JUDGED_SEED))

    def expected_success(self, policy: PlannerPolicy) -> float:
        """Joint accuracy over the held-out scenes."""
        return float(self.judge(lambda seen, place: policy.network(seen)).signal("joint").double().mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        batch = self.judge(lambda seen, place: cast(PlannerPolicy, run.policy).network(seen))
        return {"joint": float(batch.signal("joint").double().mean()), "reward": float(self.score(batch).mean())}


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    task = PhysicsScenes(**options)
    return task.policy(seed=seed), task
