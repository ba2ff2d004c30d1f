"""FBOS-RL: feedback-guided exploration with two objectives, EPA and ECC (arXiv:2605.20256).

GRPO draws all attempts from the same prompt; where none succeeds there is nothing to learn. Here a part of the same budget is drawn after the prompt, a
failed attempt and the environment's feedback on it. EPA pulls the policy that reads the plain prompt towards the good attempts of both kinds, ECC trains
the use of feedback. A guided attempt is in the batch twice: under the plain prompt (EPA, in the prompt's group) and under the feedback prompt (ECC, in a
group of its own), so that the group-relative credit of GRPO, or any other, gives both advantages, and each copy keeps a log-prob of its own. The
objectives' names are the paper's, their formulas [reconstructed]. The feedback of a task that offers none of its own is that the attempt was wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast
from anypo.seams.objective import aggregate, clipped, ratio_metrics, token_ratio
from anypo.seams.reward import row_reward
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

BEHAVIOURS = ("plain", "guided")


@runtime_checkable
class Commenting(Protocol):
    """A task whose environment says more about a failed attempt than that it failed."""

    def commented(self, prompt: Prompt, batch: Batch, row: int) -> Prompt:
        """The prompt with the attempt `row` of the batch and feedback on it in its content; never the answer."""
        ...


class LossValue(NamedTuple):
    epa: Tensor  # scalar
    ecc: Tensor  # scalar, 0 without guided rows
    loss: Tensor  # epa + lam ecc


def pick_feedback(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], u: Float[Tensor, " G"], solved: float = 1.0) -> Int[Tensor, " G"]:
    """Equation 1: the row of a failed attempt (reward below `solved`) of each prompt, prompts ascending, -1 where none failed. `u` in [0,1]."""
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    failed = reward < solved
    order = (index * 2 + ~failed).argsort(stable=True)  # by prompt, its failed rows first
    count = torch.zeros_like(size).index_add(0, index, failed.long())
    place = torch.minimum((u * count).floor().long(), count - 1)
    first = size.cumsum(0) - size
    return torch.where(count > 0, order[first + place.clamp(min=0)], -1)


def epa_advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], eps: float = 1e-6) -> Float[Tensor, " N"]:
    """Equation 3: relative to all attempts at the prompt, plain and guided; population standard deviation."""
    return group_relative(reward, group, True, 0, eps)


def ecc_advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], guided: Tensor, eps: float = 1e-6) -> Float[Tensor, " N"]:
    """Equation 5: relative to the prompt's guided attempts; 0 on plain rows and for a lone guided attempt."""
    apart = group * 2 + guided.long()
    return torch.where(guided.bool(), group_relative(reward, apart, True, 0, eps), torch.zeros_like(reward))


def surrogate(
    logp: Float[Tensor, "N T"],
    old_logp: Float[Tensor, "N T"],
    advantage: Float[Tensor, "N T"],
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Minus the clipped surrogate, mean over the rows with actions of their token means."""
    ratio = token_ratio(logp, old_logp, mask)
    return aggregate(-clipped(ratio, advantage, 1 - clip_low, 1 + clip_high), mask, "seq_mean")


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], logp_feedback: Float[Tensor, "N T"], old_logp_feedback: Float[Tensor, "N T"],
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], guided: Tensor, mask: Tensor,
    lam: float = 0.5, clip_low: float = 0.2, clip_high: float = 0.2, eps: float = 1e-6,
) -> LossValue:  # fmt: skip
    """Equations 3-6 [reconstructed]: EPA over all rows under the plain prompt, ECC over the guided rows under the feedback prompt."""
    inside = mask.bool()
    epa = surrogate(logp, old_logp, broadcast(epa_advantages(reward, group, eps), mask), inside, clip_low, clip_high)
    guided_mask = inside & guided.bool()[:, None]
    second = broadcast(ecc_advantages(reward, group, guided, eps), mask)
    ecc = surrogate(logp_feedback, old_logp_feedback, second, guided_mask, clip_low, clip_high)
    return LossValue(epa, ecc, epa + lam * ecc)


@dataclass
class FeedbackGuided:
    """Plain attempts, then the others after a failed one and the feedback on it; more plain ones where none failed. Guided attempts come back twice, the
    copy under the feedback prompt with the signal `refining` [N] and a group of its own. Needs a task that is `Commenting`, or prompts of text."""

    inner: Rollout = field(default_factory=OnPolicy)
    plain: int = 4  # attempts at each prompt without feedback, >= 1; the other `select.group_size` - plain are guided
    solved: float = 1.0  # an attempt with less reward than this has failed
    behaviour: str = (
        "plain"  # guided copies under the plain prompt start from ratio 1; "guided": from the log-prob they were drawn with (high variance)
    )
    template: str = "{prompt}{attempt}\nThis is wrong.\n{prompt}"  # feedback on text where the task says no more

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.plain < 1 or self.behaviour not in BEHAVIOURS:
            raise ValueError(f"rollout.plain must be at least 1 and rollout.behaviour {' or '.join(BEHAVIOURS)}")
        first = marked(self.inner([p.but(samples=min(self.plain, p.samples)) for p in prompts], run), False)
        left = [p.samples - self.plain for p in prompts]
        if max(left) < 1:
            return first
        reward = scored(first, run)
        u = torch.rand(len(prompts), generator=run.generator, dtype=torch.float64)
        chosen = pick_feedback(reward, first.group, u, self.solved)
        going_on = [i for i, n in enumerate(left) if n > 0]
        again = [self.told(prompts[i], first, int(chosen[i]), run).but(samples=left[i]) for i in going_on]
        second = marked(self.inner(again, run), False)
        second.group = torch.tensor(going_on)[second.group]
        home = (second.group[:, None] == first.group).long().argmax(1)  # a plain row of the same prompt
        for name in ("prompt", "prompt_text"):
            if name in first.signals:
                second.signals[name] = first[home].signals[name]
        result = scored(second, run)
        guided = chosen[second.group] >= 0
        run.log(plain_reward=float(reward.double().mean()), guided_share=float(guided.double().mean()))
        if not bool(guided.any()):
            return Batch.concat([first, second])
        run.log(guided_reward=float(result[guided].double().mean()))
        refining = marked(second[guided], True)
        refining.group = refining.group + len(prompts)
        parts = [first, second[~guided], self.distilled(second[guided], first[home[guided]].context, run), refining]
        whole = Batch.concat([p for p in parts if len(p)])
        if self.behaviour == "guided":
            whole.signals["sampled_elsewhere"] = torch.ones(len(whole), dtype=torch.bool)
        return whole

    def told(self, prompt: Prompt, batch: Batch, row: int, run: Run) -> Prompt:
        """The prompt with the failed attempt and the feedback; itself where there is none. Raises ValueError for problems that are no text."""
        if row < 0:
            return prompt
        if isinstance(run.task, Commenting):
            return run.task.commented(prompt, batch, row)
        content, attempt = prompt.content, batch.signals.get("completion")
        if attempt is None or not isinstance(content, str | list):
            raise ValueError(
                f"{run.method.name} shows the policy feedback on failed attempts, which '{run.task.name}' cannot do; give the task a method "
                "commented(prompt, batch, row), or take one of text"
            )
        if isinstance(content, str):
            return prompt.but(content=self.template.format(prompt=content, attempt=attempt[row]))
        return prompt.but(content=[*content, {"role": "assistant", "content": attempt[row]}, {"role": "user", "content": "This is wrong."}])

    def distilled(self, guided: Batch, context: Any, run: Run) -> Batch:
        """Guided attempts under the plain prompt."""
        guided = guided.but(context=context, signals=dict(guided.signals))
        wanted = {"logp"} | ({"entropy"} if "old_entropy" in guided.signals else set())
        seen = run.score(guided, wanted)
        if "entropy" in wanted:
            guided.signals["old_entropy"] = seen.entropy
        return guided.but(logp=guided.logp if self.behaviour == "guided" else seen.logp)


def marked(batch: Batch, refining: bool) -> Batch:
    return batch.but(signals=batch.signals | {"refining": torch.full((len(batch),), refining)})


def scored(batch: Batch, run: Run) -> Float[Tensor, " N"]:
    """One number a row; the task's rewards stay in the batch's signals, so that nothing is scored twice."""
    return row_reward(batch.but(reward=run.score_rewards(batch)))


@dataclass
class TwoObjectives:
    """The clipped surrogate of the rows under the plain prompt plus `lam` that of the rows under the feedback prompt, each a mean over its rows."""

    lam: float = 0.5  # weight of ECC, >= 0; 0: EPA alone
    alignment: float = 1.0  # weight of EPA, >= 0; 0: only the use of feedback is trained
    clip_low: float = 0.2  # the ratio stays above 1 - clip_low, in (0,1)
    clip_high: float = 0.2  # and below 1 + clip_high, > 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        refining = batch.signals.get("refining", torch.zeros(len(batch), dtype=torch.bool)).to(batch.mask.device)[:, None]
        epa, ecc = (
            surrogate(new.logp, batch.logp, batch.advantage, batch.counted & side, self.clip_low, self.clip_high)
            for side in (~refining, refining)
        )
        metrics = ratio_metrics(token_ratio(new.logp, batch.logp, batch.counted), 1 - self.clip_low, 1 + self.clip_high, batch.counted)
        return Loss(self.alignment * epa + self.lam * ecc, metrics | {"epa": float(epa.detach()), "ecc": float(ecc.detach())})


METHOD = GRPO.but(
    name="fbos_rl",
    paper=Paper("FBOS-RL: feedback-guided exploration (EPA, ECC)", "2605.20256", 2026),
    summary="half of the attempts follow a failed one and feedback on it; they teach the plain policy (EPA) and the use of feedback (ECC)",
    rollout=FeedbackGuided(),
    objective=TwoObjectives(),
    regularize=(),
    task="lock",
)
