"""MInTRL: minimal intervention reinforcement learning (arXiv:2609.12419).

On-policy training learns only from what the policy finds itself, imitation of whole external traces leads far away from it. Here some attempts of
every group are repaired while they are written: after every chunk a judge keeps the text, or names its earliest wrong token; the text is cut there,
gets a short correction, and the policy goes on. The outcome reward, less the mean of the group's untouched attempts, is regressed on the
response's log-ratio, so the mixed text needs no importance weights. Against GRPO it changes rollout, credit and objective. Equations 1-6 from
notes on the paper; sizes and defaults are [reconstructed]. Left out: a judge of its own weights (any callable can be one) and conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.agents import plain_tokens
from anypo.domains.language.review import AskPolicy
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, group_mean, group_sum
from anypo.seams.regression import regression_error, row_advantage, sequence_log_ratio
from anypo.seams.reward import row_reward
from anypo.seams.rollout import as_roots, continue_rows, steps_of
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

REVIEW = "Problem:\n{problem}\n\nSolution so far, by steps:\n{steps}\n\nNumber of the first wrong step, 0 if all are right: "
HINT = "\n(The answer is {answer}.)\n"


class Spliced(NamedTuple):
    tokens: Tensor  # [L'] int64
    source: Tensor  # [L'] 1 = written by the judge


class Trace(NamedTuple):
    tokens: Tensor  # [L] int64
    source: Tensor  # [L]
    interventions: int
    intensity: float  # share of the judge's tokens, in [0,1]


class LossValue(NamedTuple):
    advantage: Tensor  # [N]
    S: Tensor  # [N]
    loss: Tensor  # scalar, differentiable in logp


def splice(tokens: Int[Tensor, " L"], source: Int[Tensor, " L"], correction: Int[Tensor, " c"], error_at: int, C: int) -> Spliced:
    """Equation 1, Revise: everything from token `error_at` on gives way to the first `C` tokens of the correction."""
    written = correction[:C]
    return Spliced(torch.cat([tokens[:error_at], written]), torch.cat([source[:error_at], torch.ones_like(written)]))


def rollout_trace(
    policy_tokens: Int[Tensor, " P"], judgements: Sequence[Sequence[int] | Tensor], chunk: int, max_reviews: int, C: int, max_len: int
) -> Trace:
    """Equations 1-2 for a policy that writes `policy_tokens` one after another, whatever stands before them, until they or `max_len` run out. A
    judgement begins with -1 (Keep) or is the error's place and the correction; a chunk that was cut short is not reviewed."""
    tokens = source = policy_tokens[:0]
    used = reviews = interventions = 0
    while used < len(policy_tokens) and len(tokens) < max_len:
        piece = policy_tokens[used : used + min(chunk, max_len - len(tokens))]
        used += len(piece)
        tokens, source = torch.cat([tokens, piece]), torch.cat([source, torch.zeros_like(piece)])
        if len(piece) == chunk and reviews < min(max_reviews, len(judgements)):
            error_at, *correction = (int(x) for x in judgements[reviews])
            reviews += 1
            if error_at >= 0:
                tokens, source = splice(tokens, source, torch.tensor(correction, dtype=torch.int64), error_at, C)
                interventions += 1
    tokens, source = tokens[:max_len], source[:max_len]
    return Trace(tokens, source, interventions, float(source.sum()) / max(len(source), 1))


def advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], control: Tensor) -> Float[Tensor, " N"]:
    """Equation 4: reward minus the mean of the group's control rows; of all its rows where there is none."""
    own = control.to(reward)
    count = group_sum(own, group)
    value = group_sum(own * reward, group) / count.clamp(min=1)
    return reward - torch.where(count > 0, value, group_mean(reward, group))


def anchors(
    old_logp: Float[Tensor, "N T"], source: Int[Tensor, "N T"], anchor: str = "const", kappa: float | Tensor = 0.5
) -> Float[Tensor, "N T"]:
    """Equation 3: what each token's log-probability is compared with. Raises ValueError for another anchor."""
    if anchor not in ("const", "proxy"):
        raise ValueError(f"objective.anchor must be const or proxy, not '{anchor}'")
    return torch.where(source.bool(), torch.as_tensor(kappa).to(old_logp).log(), old_logp) if anchor == "const" else old_logp


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], source: Int[Tensor, "N T"], mask: Tensor, reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"], control: Tensor, beta: float = 0.1, anchor: str = "const", kappa: float | Tensor = 0.5,
) -> LossValue:  # fmt: skip
    """Equations 3-5: mean over rows of (beta S - A)^2."""
    advantage = advantages(reward, group, control)
    log_ratio = sequence_log_ratio(logp, anchors(old_logp, source, anchor, kappa), mask)
    return LossValue(advantage, log_ratio, regression_error(log_ratio, advantage, beta).mean())


class Revision(NamedTuple):
    """A judge's objection."""

    error_at: int  # place of the earliest wrong token, >= 0
    correction: Tensor  # [c] int64, what is written there


Judge = Callable[[Batch, Tensor, list[Tensor], "Run"], list[Revision | None]]  # (batch, rows [M], their tokens so far, run); None = Keep


@dataclass
class SelfJudge:
    """The policy reviews itself: it names the first wrong step, and writes the correction from a prompt to which the answer is added, where the task
    tells one. Keeps what it cannot be asked about (no text, no room in the context). The wording is [reconstructed]."""

    question: str = REVIEW
    hint: str = HINT
    tokens: int = 8  # written for a correction, >= 1

    def __call__(self, batch: Batch, rows: Tensor, written: list[Tensor], run: Run) -> list[Revision | None]:
        verdicts: list[Revision | None] = [None] * len(rows)
        if "prompt_text" not in batch.signals:
            return verdicts
        seen = torch.tensor([len(text) for text in written])
        steps = steps_of(batch, run, max(int(seen.min()) // 2, 1))[rows]
        steps = torch.where(torch.arange(batch.horizon) < seen[:, None], steps, -1)
        named = AskPolicy(self.question)(batch[rows], torch.arange(len(rows)), steps, run)
        for i in ((named >= 0) & (named <= steps.amax(1))).nonzero().flatten().tolist():
            error_at = int((steps[i] == named[i]).long().argmax())
            correction = self.correction(batch, int(rows[i]), written[i][:error_at], run)
            verdicts[i] = Revision(error_at, correction) if len(correction) else None
        return verdicts

    def correction(self, batch: Batch, row: int, prefix: Tensor, run: Run) -> Tensor:
        answer = batch.signals["columns"][row].get("answer") if "columns" in batch.signals else None
        hint = "" if answer is None else self.hint.format(answer=answer)
        start = torch.cat([run.policy.encode(batch.signals["prompt_text"][row] + hint), prefix])
        if len(start) + self.tokens > run.policy.context_limit:
            return prefix[:0]
        drawn = run.policy.sample([start], [1], max_tokens=self.tokens, temperature=1.0, generator=run.generator)
        return drawn.tokens[0][drawn.valid[0]]


@dataclass
class CompareWithSolution:
    """An exact checker, for tasks with one right response a problem: the first token that differs, and how the solution goes on from there."""

    def __call__(self, batch: Batch, rows: Tensor, written: list[Tensor], run: Run) -> list[Revision | None]:
        return [self.verdict(self.target(batch, row, run), text) for row, text in zip(rows.tolist(), written, strict=True)]

    def target(self, batch: Batch, row: int, run: Run) -> Tensor:
        """The right tokens, end token included. Raises ValueError for a task that does not tell them."""
        columns = batch.signals["columns"][row] if "columns" in batch.signals else {}
        text = columns.get("solution", columns.get("answer"))
        if text is None:
            raise ValueError(
                "this judge compares with a known response; the task needs a column 'solution' or 'answer', or use another judge"
            )
        return torch.tensor([*plain_tokens(run.policy, str(text)), *end_tokens(run)[:1]])

    def verdict(self, target: Tensor, text: Tensor) -> Revision | None:
        common = min(len(target), len(text))
        wrong = (target[:common] != text[:common]).nonzero().flatten()
        return Revision(int(wrong[0]), target[int(wrong[0]) :]) if len(wrong) else None


def end_tokens(run: Run) -> list[int]:
    """The tokens that end a response, where policy or task know them."""
    if hasattr(run.policy, "eos_ids"):
        return list(run.policy.eos_ids)
    eos = getattr(run.policy, "eos", getattr(run.task, "eos", None))
    return [] if eos is None else [int(eos)]


@dataclass
class Interventions:
    """Attempts of which all but the control rows are reviewed after every chunk and repaired where the judge objects; later pure on-policy attempts.

    Drawing an attempt to its end before the review, and again from the correction on, is the same in distribution as stopping at every chunk.
    Signals: `source` [N,T], 1 for the judge's tokens; `control` [N] bool. Log-probs are those of the present policy on the final text.
    """

    chunk: int = 16  # tokens of the policy between two reviews, >= 1
    max_reviews: int = 3  # a row, >= 0
    longest: int = 8  # C, most tokens of a correction, >= 0
    control_share: float = 0.5  # of a group's rows that nobody touches, rounded up, in [0,1]
    until: float = 0.5  # share of the run with interventions, in [0,1]
    judge: Judge = field(default_factory=SelfJudge)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = as_roots(run.collect(prompts))
        if not torch.equal(batch.attended, batch.mask):
            raise ValueError(
                f"{run.method.name} repairs single responses, and this task's conversations cannot be; take a task of one turn"
            )
        active = run.progress < self.until
        control = control_rows(batch.group, self.control_share) if active else torch.ones(len(batch), dtype=torch.bool)
        source, due, interventions = torch.zeros_like(batch.action), torch.full((len(batch),), self.chunk), 0
        for _ in range(self.max_reviews):
            rows = (~control & (batch.lengths >= due)).nonzero().flatten()
            if len(rows) == 0:
                break
            written = [batch.action[row, :seen] for row, seen in zip(rows.tolist(), due[rows].tolist(), strict=True)]
            due[rows] += self.chunk
            verdicts = zip(rows.tolist(), self.judge(batch, rows, written, run), strict=True)
            revisions = {row: verdict for row, verdict in verdicts if verdict is not None}
            if revisions:
                batch, source, depth = self.repair(batch, source, revisions, run)
                due[list(revisions)] = depth + self.chunk
                interventions += len(revisions)
        batch.signals |= {"source": source, "control": control}
        if interventions:
            rescore(batch, run)
        touched = source[~control]
        run.log(interventions=interventions, intensity=float(touched.sum()) / max(int(batch.mask[~control].sum()), 1))
        return batch

    def repair(self, batch: Batch, source: Tensor, revisions: dict[int, Revision], run: Run) -> tuple[Batch, Tensor, Tensor]:
        """The batch with the revised rows spliced and continued by the policy, its `source`, and where the policy took over again [M]."""
        limit = batch.signals.get("limit", torch.full_like(batch.group, batch.horizon))
        ends = torch.tensor(end_tokens(run), dtype=torch.int64)
        spliced, ended = [], []
        for row, (error_at, correction) in revisions.items():
            stop = torch.isin(correction, ends).nonzero().flatten()
            correction = correction[: int(stop[0]) + 1] if len(stop) else correction
            cut = splice(batch.action[row], source[row], correction, error_at, min(self.longest, int(limit[row]) - error_at))
            spliced.append(cut)
            ended.append(len(cut.tokens) > 0 and bool(torch.isin(cut.tokens[-1], ends)))
        rows, depth = torch.tensor(list(revisions)), torch.tensor([len(cut.tokens) for cut in spliced])
        edited = widened(batch, int(depth.max()))
        action, mask, terminated = edited.action.clone(), edited.mask.clone(), torch.as_tensor(edited.terminated).clone()
        for row, cut in zip(rows.tolist(), spliced, strict=True):
            action[row, : len(cut.tokens)] = cut.tokens
        mask[rows] = torch.arange(edited.horizon) < depth[:, None]
        terminated[rows] = torch.tensor(ended)
        edited = edited.but(action=action, mask=mask, valid=mask if batch.valid is not None else None, terminated=terminated)
        grown = as_roots(continue_rows(edited, rows, depth, run))
        order = torch.arange(len(batch))
        order[rows] = len(batch) + torch.arange(len(rows))
        batch = Batch.concat([batch, grown])[order]
        source = torch.nn.functional.pad(source, (0, batch.horizon - source.shape[1]))
        for row, cut in zip(rows.tolist(), spliced, strict=True):
            source[row] = 0
            source[row, : len(cut.source)] = cut.source
        return batch, source, depth


def control_rows(group: Int[Tensor, " N"], share: float) -> Bool[Tensor, " N"]:
    """The first rows of every group, `share` of them, rounded up."""
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    order = index.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(group)) - (counts.cumsum(0) - counts)[index[order]]
    return rank < (share * counts[index]).ceil()


def widened(batch: Batch, horizon: int) -> Batch:
    """The batch with room for `horizon` actions a row."""
    own, extra = batch.horizon, horizon - batch.horizon
    if extra <= 0:
        return batch

    def pad(value: Any) -> Any:
        per_action = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == own
        return torch.nn.functional.pad(value, (0, extra)) if per_action else value

    state = {name: pad(value) for name, value in batch.state_dict().items()}
    return Batch(**state | {"signals": {name: pad(value) for name, value in batch.signals.items()}})


def rescore(batch: Batch, run: Run) -> None:
    """Log-probs, and entropies where the batch carries them, of the final text under the present policy."""
    needs = {"logp", "entropy"} if "old_entropy" in batch.signals else {"logp"}
    seen, zero = run.score(batch, needs), batch.logp.new_zeros(())
    batch.logp = torch.where(batch.mask, seen.logp, zero)
    if "entropy" in needs:
        batch.signals["old_entropy"] = torch.where(batch.mask, seen.entropy, zero)


@dataclass
class ControlBaseline:
    """Reward minus the mean of the group's untouched rows."""

    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        control = batch.signals.get("control", torch.ones_like(batch.group))
        return broadcast(advantages(reward, batch.group, control), batch.mask)


@dataclass
class AnchoredRegression:
    """Mean over rows of the squared error of beta times the response's log-ratio to its anchors against its advantage."""

    beta: float = 0.1  # > 0, in units of reward
    anchor: str = "const"  # for the judge's tokens; const: log kappa, proxy: the old log-probability, as for all others
    kappa: float = 0.5  # in (0,1]

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        source = batch.signals.get("source", torch.zeros_like(mask, dtype=torch.int64))
        log_ratio = sequence_log_ratio(new.logp, anchors(batch.logp, source, self.anchor, self.kappa), mask)
        error = regression_error(log_ratio, row_advantage(batch.advantage, mask), self.beta)
        return Loss(error.mean(), {"sequence_log_ratio": float(log_ratio.detach().abs().mean())})


METHOD = GRPO.but(
    name="mintrl",
    paper=Paper("MInTRL: minimal intervention reinforcement learning", "2609.12419", 2026),
    summary="a judge repairs attempts by short corrections while they are written; the outcome is regressed on the response's log-ratio",
    select=UniformPrompts(group_size=8),
    rollout=Interventions(),
    credit=ControlBaseline(),
    objective=AnchoredRegression(),
    regularize=(),
    update=GradientSteps(epochs=2),
)

VARIANTS = {
    "checker": METHOD.but(
        name="mintrl.checker", summary="the judge compares with the known solution", rollout=Interventions(judge=CompareWithSolution())
    )
}
