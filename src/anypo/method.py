"""Method and Study: what a paper is in anypo.

A method is its base *but* for what changes: `METHOD = GRPO.but(name="dvao", credit=DvaoCredit())`. Every seam holds a component: a small
dataclass whose fields are hyper-parameters and whose `__call__` does the work. A component may declare `needs`, a set of signal names:
plain names (`logp`, `entropy`, `value`, `hidden`, `logits`) are computed under the current policy at every optimizer step and handed over as
`new`; names that begin with `old_` are computed once per batch under the policy that acted, names that begin with `ref_` under the frozen
reference; both are found in `batch.signals`. A component that keeps state between steps implements `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from anypo.batch import Batch
    from anypo.policy import Loss, Signals
    from anypo.run import MethodLoss, Run
    from anypo.task import Prompt, Task

Metrics = dict[str, float]
SEAMS = ("prepare", "select", "rollout", "reward", "credit", "objective", "regularize", "update", "control")
PLURAL = ("prepare", "regularize", "control")  # seams that hold any number of components


class Prepare(Protocol):
    def __call__(self, run: Run) -> None: ...


class Select(Protocol):
    def __call__(self, task: Task, run: Run) -> list[Prompt]: ...


class Rollout(Protocol):
    def __call__(self, prompts: list[Prompt], run: Run) -> Batch: ...


class Reward(Protocol):
    def __call__(self, batch: Batch, run: Run) -> Tensor: ...  # [N], [N,K] or [N,T]


class Credit(Protocol):
    def __call__(self, batch: Batch, run: Run) -> Tensor: ...  # advantages [N,T]


class Objective(Protocol):
    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss: ...


class Update(Protocol):
    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> Metrics: ...


class Control(Protocol):
    def __call__(self, batch: Batch, run: Run) -> None: ...


@dataclass(frozen=True)
class Paper:
    """Where a method comes from."""

    title: str
    arxiv: str = ""  # identifier such as "2402.03300", empty when unknown
    year: int | None = None

    def __str__(self) -> str:
        return f"{self.title} (arXiv:{self.arxiv})" if self.arxiv else self.title


@dataclass(frozen=True)
class Stage:
    """One phase of a method that runs several: a method and its share of the steps."""

    method: Method
    share: float  # of the run's steps, in (0,1]; the shares of a method's stages sum to 1


@dataclass(frozen=True)
class Method:
    """A choice at every seam. Immutable; a run works on its own deep copy, so state never leaks between runs."""

    name: str
    paper: Paper
    domain: str
    select: Select
    rollout: Rollout
    reward: Reward
    credit: Credit
    objective: Objective
    update: Update
    prepare: tuple[Prepare, ...] = ()
    regularize: tuple[Objective, ...] = ()
    control: tuple[Control, ...] = ()
    loop: str = "on_policy"  # the module in loops/ that runs it
    kind: str = "method"  # or system: it comes with problems of its own
    task: str = ""  # what it trains on when nothing is named; empty = its domain's default
    summary: str = ""  # one sentence: what it changes
    base: Method | None = field(default=None, repr=False)
    stages: tuple[Stage, ...] = ()  # when set, the stages run one after another and the seams above describe the first

    def but(self, **changes: Any) -> Method:
        """This method with some seams replaced. Raises TypeError, naming the seams, for a field that does not exist."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise TypeError(f"a method has no field '{name}'; its seams are {', '.join(SEAMS)}")
        for name in PLURAL:
            if name in changes and not isinstance(changes[name], tuple):
                changes[name] = (changes[name],)
        changes.setdefault("base", self)
        return replace(self, **changes)

    def set(self, path: str, value: Any) -> Method:
        """This method with one hyper-parameter changed, e.g. `set("objective.clip_high", 0.28)`.

        `path` is seam.field, seam.field.field for nested components, or regularize.0.field for a plural seam. Raises ValueError with the names
        that exist.
        """
        seam, _, rest = path.partition(".")
        if self.stages:
            return self._set_in_stages(path, seam, rest, value)
        if seam not in SEAMS:
            raise ValueError(f"unknown seam '{seam}' in '{path}'; the seams are {', '.join(SEAMS)}")
        if not rest:
            raise ValueError(f"'{path}' names a whole seam; write {seam}.<field>=<value>")
        return replace(self, **{seam: _set(getattr(self, seam), rest.split("."), value, seam)})

    def _set_in_stages(self, path: str, seam: str, rest: str, value: Any) -> Method:
        """`stages.1.update.epochs` in one stage; a plain path in every stage that has the field."""
        chosen = range(len(self.stages))
        if seam == "stages":
            number, _, path = rest.partition(".")
            if not number.isdigit() or int(number) >= len(self.stages):
                raise ValueError(f"{self.name} has {len(self.stages)} stages; write stages.<number>.<seam>.<field>, numbers from 0")
            chosen = range(int(number), int(number) + 1)
        changed, refusals = list(self.stages), []
        for i in chosen:
            try:
                changed[i] = replace(self.stages[i], method=self.stages[i].method.set(path, value))
            except ValueError as refusal:
                refusals.append(refusal)
        if len(refusals) == len(chosen):
            raise refusals[0]
        return replace(self, stages=tuple(changed))

    def components(self) -> Iterator[tuple[str, Any]]:
        """Every component with its path ("credit", "regularize.0", "rollout.inner"), nested ones after their owner."""
        for seam in SEAMS:
            value = getattr(self, seam)
            if isinstance(value, tuple):
                for i, item in enumerate(value):
                    yield from _walk(item, f"{seam}.{i}")
            else:
                yield from _walk(value, seam)

    def needs(self, *seams: str) -> frozenset[str]:
        """The signals that the components of these seams (all by default) declare."""
        chosen = seams or SEAMS
        if self.stages:
            return frozenset(n for stage in self.stages for n in stage.method.needs(*seams))
        return frozenset(n for path, c in self.components() if path.split(".")[0] in chosen for n in getattr(c, "needs", ()))

    def diff(self, other: Method | None = None) -> list[tuple[str, str, str]]:
        """What differs from `other` (default: the base): (path, other's value, this one's value)."""
        other = other or self.base
        if other is None:
            return []
        stages = [(f"stages.{i}", "-", f"{s.method.name} for {s.share:.0%} of the steps") for i, s in enumerate(self.stages)]
        return [d for seam in SEAMS for d in _diff(seam, getattr(other, seam), getattr(self, seam))] + stages

    def describe(self) -> str:
        """The method as plain text: paper, base, every seam with its hyper-parameters, and what changed."""
        changed = {path.split(".")[0] for path, _, _ in self.diff()}
        lines = [f"{self.name}: {self.summary}".rstrip(": "), f"  paper   {self.paper}"]
        if self.base is not None:
            lines.append(f"  base    {self.base.name}")
        for seam in SEAMS:
            value = getattr(self, seam)
            if value not in ((), None):
                lines.append(f"  {'*' if seam in changed else ' '} {seam:<11}{_show(value)}")
        if self.stages:
            lines = lines[: 3 if self.base is not None else 2]
        for i, stage in enumerate(self.stages):
            inside = stage.method.describe().replace("\n", "\n    ")
            lines.append(f"    stage {i}, {stage.share:.0%} of the steps\n    {inside}")
        return "\n".join(lines)

    def fresh(self) -> Method:
        """A deep copy, with components that no other run shares."""
        return copy.deepcopy(self)


@dataclass(frozen=True)
class Study:
    """A paper whose content is an experiment rather than a training method: theory, an application, a component."""

    name: str
    paper: Paper
    domain: str
    run: Callable[..., dict[str, Any]]  # run(seed=0, **settings) -> measurements by name
    kind: str = "component"  # theory, system or component
    summary: str = ""

    def describe(self) -> str:
        return f"{self.name}: {self.summary}\n  paper   {self.paper}\n  run     {inspect.signature(self.run)}"


def _walk(component: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, component
    if is_dataclass(component) and not isinstance(component, type):
        for f in fields(component):
            value = getattr(component, f.name)
            if callable(value) and is_dataclass(value):
                yield from _walk(value, f"{path}.{f.name}")


def _set(component: Any, path: list[str], value: Any, where: str) -> Any:
    if isinstance(component, tuple):
        if not path[0].isdigit() or int(path[0]) >= len(component):
            raise ValueError(f"{where} holds {len(component)} components; write {where}.<number>.<field>, numbers from 0")
        i = int(path[0])
        changed = _set(component[i], path[1:], value, f"{where}.{i}")
        return (*component[:i], changed, *component[i + 1 :])
    names = [f.name for f in fields(component) if f.init] if is_dataclass(component) else []
    if not path or path[0] not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"{where} ({type(component).__name__}) has no field '{'.'.join(path)}'; its fields are: {known}")
    current = getattr(component, path[0])
    if len(path) > 1:
        return replace(component, **{path[0]: _set(current, path[1:], value, f"{where}.{path[0]}")})
    kind = type(component).__dataclass_fields__[path[0]].type
    return replace(component, **{path[0]: _coerce(value, str(kind), current, f"{where}.{path[0]}")})


def _coerce(value: Any, kind: str, current: Any, where: str) -> Any:
    """`value` as the field's type; text from the command line is read as a Python literal first."""
    import ast

    if isinstance(value, str) and not kind.startswith("str"):
        try:
            value = (
                {"true": True, "false": False, "none": None, "inf": float("inf")}.get(value.lower(), ...)
                if value.lower() in ("true", "false", "none", "inf")
                else ast.literal_eval(value)
            )
        except (ValueError, SyntaxError):
            if "str" not in kind:
                raise ValueError(f"{where} takes {kind}, not '{value}'") from None
    options = [k.strip() for k in kind.split("|")]
    if value is None:
        if "None" in options:
            return None
    elif isinstance(value, bool):
        if "bool" in options:
            return value
    elif isinstance(value, int) and "float" in options and "int" not in options:
        return float(value)
    elif isinstance(value, float) and value.is_integer() and "int" in options and "float" not in options:
        return int(value)
    elif any(type(value).__name__ == option.split("[")[0] for option in options) or isinstance(value, type(current)):
        return value
    elif isinstance(value, list | tuple) and any(option.startswith("tuple") for option in options):
        return tuple(value)
    raise ValueError(f"{where} takes {kind}, not {value!r}")


def _diff(path: str, old: Any, new: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(old, tuple) and isinstance(new, tuple) and path in PLURAL:
        for i in range(max(len(old), len(new))):
            before, after = (side[i] if i < len(side) else None for side in (old, new))
            yield from _diff(f"{path}.{i}", before, after)
    elif type(old) is type(new) and is_dataclass(old) and not isinstance(old, type):
        for f in fields(old):
            if f.repr:
                yield from _diff(f"{path}.{f.name}", getattr(old, f.name), getattr(new, f.name))
    elif old is not new and old != new:
        yield path, _show(old), _show(new)


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_show(v) for v in value) or "-"
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={_show(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{type(value).__name__}({inside})"
    return "-" if value is None else getattr(value, "__name__", None) or repr(value)
