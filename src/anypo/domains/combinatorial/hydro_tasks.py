"""HydroTask and HydroPolicy: target levels for reservoirs as a task of the common loop. A trajectory is an inflow path, an action a month's targets."""

from __future__ import annotations

import json
import math
from collections.abc import Set
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.combinatorial.hydro import SETTINGS, Dispatch, HydroSetting, follow_plan, plan_on_grid, residual, roll_out, solve
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt

TEST_SEED = 1_000_000  # held-out paths have seeds from here on; training seeds are drawn below it
PENALTY_MULTIPLIER = "hydro.penalty_multiplier"  # in a run's state: what the penalty is multiplied by in this step; 1 where nobody says
BODIES = ("lstm", "affine")


class HydroPolicy(Policy):
    """Targets [N,T,R] from the inflows up to each month: an LSTM with a sigmoid layer, or a_t + b_t w_t (a linear decision rule).

    Provides `target` [N,T,R], differentiable in the weights, for a batch whose context is its inflows [N,T,R]. With `sigma` > 0 it acts with Gaussian
    noise and provides `logp` and `entropy` [N,T] of a batch's actions, the targets after the noise.
    """

    optimizer = "adam"
    learning_rate = 1e-2

    def __init__(self, setting: HydroSetting, body: str = "lstm", *, hidden: int = 32, sigma: float = 0.0, seed: int = 0) -> None:
        """`sigma`: of the noise, in units of water, >= 0. Weights depend on `seed` alone. Raises ValueError for an unknown body."""
        super().__init__()
        if body not in BODIES or sigma < 0:
            raise ValueError(f"a hydro policy is {' or '.join(BODIES)} with sigma of 0 or more, not '{body}' with {sigma}")
        self.setting, self.kind, self.hidden, self.sigma = setting, body, hidden, float(sigma)
        size = setting.reservoirs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if body == "lstm":
                self.memory, self.out = nn.LSTM(size, hidden, batch_first=True), nn.Linear(hidden, size)
            else:
                self.constant = nn.Parameter(torch.full((setting.months, size), 0.5))
                self.slope = nn.Parameter(torch.zeros(setting.months, size))
        self.provides = frozenset({"target"} | ({"logp", "entropy"} if sigma else set()))
        self.name = f"{body} targets"

    def targets(self, inflow: Float[Tensor, "N T R"]) -> Float[Tensor, "N T R"]:
        """Causal: month t sees the inflows of months 1 to t."""
        relative = inflow / (6 / self.setting.reservoirs)
        if self.kind == "lstm":
            return self.setting.capacity * self.out(self.memory(relative - 1)[0]).sigmoid()
        return self.setting.capacity * (self.constant + self.slope * (relative - 1))

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        target = self.targets(batch.context)
        signals = Signals(target=target)
        if self.sigma:
            scale = 0.5 * math.log(2 * math.pi) + math.log(self.sigma)
            signals["logp"] = -(0.5 * ((batch.action - target) / self.sigma) ** 2 + scale).sum(-1)
            signals["entropy"] = torch.full(batch.mask.shape, (0.5 + scale) * self.setting.reservoirs)
        return Signals({name: value for name, value in signals.items() if name in needs})

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and settings in a folder, which `load_hydro_policy` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        options = {"body": self.kind, "hidden": self.hidden, "sigma": self.sigma}
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "policy.safetensors")
        saved = {"setting": self.setting.name, "months": self.setting.months, "options": options}
        (folder / "hydro.json").write_text(json.dumps(saved, indent=1))


def load_hydro_policy(folder: Path, setting: HydroSetting) -> HydroPolicy:
    """A saved policy: a run's folder or its model/ folder. Raises ValueError when there is none, or when it is for another setting."""
    folder = folder if (folder / "hydro.json").exists() else folder / "model"
    if not (folder / "hydro.json").exists():
        raise ValueError(f"{folder} holds no saved hydro policy (no hydro.json); give the folder of a run or its model/ folder")
    saved = json.loads((folder / "hydro.json").read_text())
    if (saved["setting"], saved["months"]) != (setting.name, setting.months):
        raise ValueError(
            f"the policy in {folder} was trained for {saved['months']} months of {saved['setting']}; give the task it was trained on"
        )
    policy = HydroPolicy(setting, **saved["options"])
    policy.load_state_dict(load_file(folder / "policy.safetensors"))
    return policy


class HydroTask:
    """Fresh inflow paths. The reward is minus the cost of following the targets in hindsight, the whole path in one program.

    A batch's signals: `dual` [N,T,R], the derivative of the cost in each target; `cost` [N]; `noise` [N,T,R], what the policy added to its targets. A
    prompt is the seed of a path.
    """

    objectives: tuple[str, ...] = ("reward",)

    def __init__(self, setting: HydroSetting | None = None, *, paths: int = 8, test_paths: int = 64) -> None:
        """`paths`: of a step. Raises ValueError for counts below 1."""
        if min(paths, test_paths) < 1:
            raise ValueError("a hydro task needs at least 1 path")
        self.setting = setting or SETTINGS["one_reservoir"]
        self.name = f"hydro:{self.setting.name}"
        self.prompts_per_step, self.test_paths = paths, test_paths

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` paths, named by their seeds."""
        return [Prompt(id=int(seed), content=int(seed)) for seed in rng.integers(TEST_SEED, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: HydroPolicy = run.policy  # type: ignore[assignment]
        owner = torch.tensor([i for i, prompt in enumerate(prompts) for _ in range(prompt.samples)])
        inflow = self.setting.draw([prompt.content for prompt in prompts])[owner.numpy()]
        context = torch.from_numpy(inflow).float()
        noise = policy.sigma * torch.randn(context.shape, generator=run.generator)
        target = policy.targets(context) + noise
        done = self.hindsight(inflow, target, run.state.get(PENALTY_MULTIPLIER, 1.0))
        mask = torch.ones(target.shape[:2], dtype=torch.bool)
        run.log(cost=float(done.cost.mean()), thermal_cost=float(done.thermal_cost.mean()))
        batch = Batch(
            action=target, mask=mask, logp=torch.zeros(mask.shape), group=owner, context=context,
            terminated=torch.ones(len(owner), dtype=torch.bool), truncated=torch.zeros(len(owner), dtype=torch.bool),
            version=torch.full((len(owner),), run.version),
            signals={
                "prompt_id": torch.tensor([prompt.id for prompt in prompts])[owner], "noise": noise,
                "dual": torch.from_numpy(done.dual).float(), "cost": torch.from_numpy(done.cost).float(),
            },
        )  # fmt: skip
        if policy.sigma:
            found = policy.observe(batch, {"logp", "entropy"})
            batch.logp, batch.signals["old_entropy"] = found["logp"], found["entropy"]
        return batch

    def hindsight(self, inflow: Float[np.ndarray, "S T R"], target: Tensor, multiplier: float = 1.0) -> Dispatch:
        """Equation 2 of given paths and targets."""
        start = np.full(inflow[:, 0].shape, self.setting.start)
        return solve(self.setting, start, inflow, target.detach().double().numpy(), multiplier * self.setting.penalty)

    def score(self, batch: Batch, run: Run) -> Tensor:
        return -batch.signal("cost")

    def evaluate(self, run: Run) -> dict[str, float]:
        """On held-out paths, month by month: thermal cost, the penalties' share of all cost, the largest violation of a constraint; of one reservoir,
        beside the thermal cost of stochastic dynamic programming."""
        done = self.executed(run.policy)  # type: ignore[arg-type]
        shares = {"cost": float(done.thermal_cost.mean()), "penalty_share": float(1 - done.thermal_cost.sum() / max(done.cost.sum(), 1e-9))}
        best = {"dynamic_programming_cost": self.best} if self.setting.reservoirs == 1 and not self.setting.correlation else {}
        return shares | {"violation": residual(self.setting, self.test_inflow, done)} | best

    def costs(self, policy: HydroPolicy) -> Float[Tensor, " S"]:
        """Thermal cost of every held-out path, month by month."""
        return torch.from_numpy(self.executed(policy).thermal_cost)

    @torch.no_grad()
    def executed(self, policy: HydroPolicy) -> Dispatch:
        """Equation 6 on the held-out paths, without noise."""
        target = policy.targets(torch.from_numpy(self.test_inflow).float())
        return roll_out(self.setting, self.test_inflow, target.double().numpy())

    @cached_property
    def test_inflow(self) -> np.ndarray:
        """The same for every policy and run."""
        return self.setting.draw(list(range(TEST_SEED, TEST_SEED + self.test_paths)))

    @cached_property
    def best(self) -> float:
        """Mean thermal cost of stochastic dynamic programming on the held-out paths."""
        return float(follow_plan(self.setting, plan_on_grid(self.setting), self.test_inflow).mean())
