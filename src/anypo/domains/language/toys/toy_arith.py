"""toy_arith: sums written by a character-level GRU, the smallest language problem with shared parameters.

Prompts "a+b=", answers as digits and an end token, reward 1 for an exact match. The policy starts from a short supervised warm start at
about 30% exact match, so that most groups hold right and wrong answers. Success is found by scoring the right answers instead of sampling,
so claims compare expectations. Variants: unanswerable prompts, several valid forms of an answer, a written chain of steps. Left out: any
text but sums.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import GruPolicy, imitate
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt, Task

ABSTAIN = "?"  # the completion that declines to answer
ABSTAIN_SHARE = 0.1  # of the warm start's demonstrations when some prompts are unanswerable
CHAIN_SAMPLES = 16  # written chains a prompt over which the success of the `steps` variant is averaged
WARM_START_LIMIT = 4000  # supervised steps


class ToyArith:
    """The task: sums of two numbers below 20 (`small`: below 10), every pair one problem.

    `held_out`: share of the pairs kept for `evaluate` alone, in [0,1).
    `unanswerable`: share of the pairs posed as "a?b=", to which no answer is right. The completion "?" abstains; what that is worth is the
    method's business: the task's reward is 1 for a right sum and 0 for all else.
    `forms`: templates of the valid answers, such as ("{}", "0{}", "+{}"); the first is the usual one.
    `steps`: the prompt is "a+b;" and the completion "s1;s2=answer" with s1 = a + floor(b/2) and s2 = the rest of b. The reward judges the
    answer alone; the signals `process` [N] (share of the two steps that are right) and `process_reward` [N,T] (1/2 at the last token of each
    right step) judge the steps, and `segment` counts the steps before each token.

    Batches carry the signals `prompt_id`, `completion`, `columns` (a, b, prompt, solution, answers, answerable), `old_entropy`, and with
    unanswerable prompts `answerable` and `abstained` [N].
    """

    name = "toy_arith"
    objectives: tuple[str, ...] = ("reward",)

    def __init__(
        self,
        *,
        small: bool = False,
        held_out: float = 0.0,
        unanswerable: float = 0.0,
        forms: tuple[str, ...] = ("{}",),
        steps: bool = False,
        seed: int = 0,
    ) -> None:
        """`seed` decides which pairs are held out and which are unanswerable. Raises ValueError for shares outside [0,1)."""
        for label, share in (("held_out", held_out), ("unanswerable", unanswerable)):
            if not 0 <= share < 1:
                raise ValueError(f"{label} is a share of the problems in [0,1), not {share}")
        limit = 10 if small else 20
        self.prompts_per_step = 32 if small else 64
        # share of wrong demonstrations in the warm start; larger problems learn from noise too slowly
        self.noise = 0.5 if small else 0.2 if steps else 0.3
        self.forms, self.steps, self.some_unanswerable = forms, steps, unanswerable > 0
        rng = np.random.default_rng(seed)
        pairs = [(a, b) for a in range(limit) for b in range(limit)]
        hidden = set(rng.permutation(len(pairs))[: round(held_out * len(pairs))].tolist())
        open_ended = set(rng.permutation(len(pairs))[: round(unanswerable * len(pairs))].tolist())
        self.problems = [self._problem(i, a, b, i not in open_ended) for i, (a, b) in enumerate(pairs)]
        self.training = [p for p in self.problems if p.id not in hidden]
        self.test = [p for p in self.problems if p.id in hidden] or self.problems
        self.max_actions = max(len(p.columns["solution"]) for p in self.problems) + max(map(len, forms))

    def _problem(self, number: int, a: int, b: int, answerable: bool) -> Prompt:
        text = f"{a}{'+' if answerable else '?'}{b}{';' if self.steps else '='}"
        answers = [form.format(a + b) for form in self.forms]
        solution = f"{a + b // 2};{b - b // 2}={answers[0]}" if self.steps else answers[0]
        columns = {"a": a, "b": b, "prompt": text, "solution": solution, "answers": answers, "answerable": answerable}
        return Prompt(id=number, content=text, columns=columns)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Different training problems, or a draw with replacement when more are wanted than there are."""
        chosen = rng.choice(len(self.training), size=count, replace=count > len(self.training))
        return [self.training[i] for i in chosen]

    # -- trajectories ---------------------------------------------------------------------------------------------------------------------

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy = cast(GruPolicy, run.policy)
        contexts = [policy.encode(p.content) for p in prompts]
        limits = [p.max_actions or self.max_actions for p in prompts]
        heat = [p.temperature or 1.0 for p in prompts]
        drawn = policy.sample(contexts, [p.samples for p in prompts], max_tokens=limits, temperature=heat, generator=run.generator)
        signals: dict[str, Any] = {"old_entropy": drawn.entropy}
        if any(p.temperature for p in prompts):
            signals["temperature"] = torch.tensor(heat)[drawn.source]
        rows = drawn.source.tolist()
        batch = Batch(
            action=drawn.tokens,
            mask=drawn.valid,
            logp=drawn.logp,
            group=drawn.source,
            context=[contexts[i] for i in rows],
            version=torch.full((len(rows),), run.version),
            signals=signals,
        )
        return self._annotate(batch, [prompts[i] for i in rows], policy)

    def continue_from(
        self,
        prompt: Int[Tensor, " N"],
        group: Int[Tensor, " N"],
        run: Run,
        prefix: Sequence[Tensor],
        parent: Tensor | None = None,
        temperature: Float[Tensor, " N"] | None = None,
    ) -> Batch:
        """One completion of problem `prompt[i]` from every prefix (tokens, possibly none), as a batch of whole trajectories.

        The prefix counts as written by the policy; its log-probs are those of the policy now. `branch_at` is its length, `parent` [N] the rows
        branched from (None: -1). A prefix that has ended, or fills all `max_actions`, stays as it is.
        """
        policy = cast(GruPolicy, run.policy)
        problems = [self.problems[i] for i in prompt.tolist()]
        contexts = [policy.encode(p.content) for p in problems]
        depth = torch.tensor([len(p) for p in prefix])
        ended = torch.tensor([policy.eos in p.tolist() for p in prefix])
        room = torch.where(ended, torch.zeros_like(depth), (self.max_actions - depth).clamp(min=0))
        heat = [1.0] * len(problems) if temperature is None else temperature.tolist()
        starts = [torch.cat(pair) for pair in zip(contexts, prefix, strict=True)]
        drawn = policy.sample(
            starts, [1] * len(starts), max_tokens=room.tolist(), temperature=heat, generator=run.generator, want_entropy=False
        )
        whole = [torch.cat([head, tail[kept]]) for head, tail, kept in zip(prefix, drawn.tokens, drawn.valid, strict=True)]
        action = nn.utils.rnn.pad_sequence(whole, batch_first=True)
        action = nn.functional.pad(action, (0, max(self.max_actions - action.shape[1], 0)))
        batch = Batch(
            action=action,
            mask=torch.arange(action.shape[1]) < torch.tensor([len(w) for w in whole])[:, None],
            logp=torch.zeros(action.shape),
            group=group,
            context=contexts,
            parent=torch.full_like(depth, -1) if parent is None else parent,
            branch_at=depth,
            version=torch.full_like(depth, run.version),
            signals={} if temperature is None else {"temperature": temperature},
        )
        seen = policy.observe(batch, {"logp", "entropy"})
        batch.logp = seen.logp
        batch.signals["old_entropy"] = torch.where(batch.mask, seen.entropy, torch.zeros_like(seen.entropy))
        return self._annotate(batch, problems, policy)

    def continue_rows(self, batch: Batch, rows: Int[Tensor, " M"], depth: Int[Tensor, " M"], run: Run) -> Batch:
        """New endings of rows of a batch, row `rows[i]` after its first `depth[i]` tokens; see `anypo.task.Resumable`."""
        old = batch[rows]
        prefix = [action[:shared] for action, shared in zip(old.action, depth.tolist(), strict=True)]
        return self.continue_from(old.signals["prompt_id"], old.group, run, prefix, rows, old.signals.get("temperature"))

    def _annotate(self, batch: Batch, problems: list[Prompt], policy: GruPolicy) -> Batch:
        """Whether rows ended, their texts and columns, and the signals of the variants."""
        batch.terminated = ((batch.action == policy.eos) & batch.mask).any(1)
        batch.truncated = ~batch.terminated
        texts = [policy.decode(row[kept]) for row, kept in zip(batch.action, batch.mask, strict=True)]
        batch.signals["prompt_id"] = torch.tensor([p.id for p in problems])
        batch.signals |= {"completion": texts, "columns": [p.columns for p in problems]}
        if self.some_unanswerable:
            batch.signals["answerable"] = torch.tensor([p.columns["answerable"] for p in problems])
            batch.signals["abstained"] = torch.tensor([t == ABSTAIN for t in texts]) & batch.terminated
        if self.steps:
            ends = torch.isin(batch.action, policy.encode(";=")) & batch.mask
            batch.segment = ends.cumsum(1) - ends.long()
            batch.signals["process_reward"] = process = torch.zeros(batch.mask.shape)
            for i, (text, problem) in enumerate(zip(texts, problems, strict=True)):
                for position, right in check_steps(text, problem.columns):
                    process[i, position] = 0.5 * right
            batch.signals["process"] = process.sum(1)
        return batch

    def is_right(self, completion: str, columns: dict[str, Any]) -> bool:
        """Whether a finished completion gives a valid answer; steps, where the task asks for them, are not judged."""
        answer = completion.partition("=")[2] if self.steps else completion
        return columns["answerable"] and answer in columns["answers"]

    def score(self, batch: Batch, run: Run) -> Tensor:
        assert batch.terminated is not None
        right = [self.is_right(*pair) for pair in zip(batch.signal("completion"), batch.signal("columns"), strict=True)]
        return (torch.tensor(right) & batch.terminated).float()

    # -- exact measurements ---------------------------------------------------------------------------------------------------------------

    def answer_probabilities(self, policy: GruPolicy, problems: Sequence[Prompt] | None = None) -> Float[Tensor, "P F"]:
        """Exact probability of every form of the answer, for completions that are the answer alone. None = all problems."""
        problems = self.problems if problems is None else problems
        pairs = [(p.content, answer) for p in problems for answer in p.columns["answers"]]
        return forced_logp(policy, pairs).exp().view(len(problems), len(self.forms))

    def success_probabilities(self, policy: GruPolicy, problems: Sequence[Prompt] | None = None) -> Float[Tensor, " P"]:
        """Probability of a right completion of every problem. Exact, but with `steps` a mean over CHAIN_SAMPLES sampled chains a problem (the
        answer after each scored exactly; standard error at most 0.125 a problem, about 0.01 over 100), the same ones for the same policy."""
        problems = self.problems if problems is None else problems
        answerable = torch.tensor([p.columns["answerable"] for p in problems])
        found = self._success_after_chains(policy, problems) if self.steps else self.answer_probabilities(policy, problems).sum(1)
        return torch.where(answerable, found, torch.zeros_like(found))

    def _success_after_chains(self, policy: GruPolicy, problems: Sequence[Prompt]) -> Float[Tensor, " P"]:
        contexts = [policy.encode(p.content) for p in problems]
        generator = torch.Generator().manual_seed(0)
        counts = [CHAIN_SAMPLES] * len(problems)
        drawn = policy.sample(contexts, counts, max_tokens=self.max_actions, temperature=1.0, generator=generator, want_entropy=False)
        pairs, owner = [], []
        for source, row in zip(drawn.source.tolist(), drawn.tokens, strict=True):
            chain, equals, _ = policy.decode(row).partition("=")
            for answer in problems[source].columns["answers"]:
                if equals and len(chain) + len(answer) + 2 <= self.max_actions:
                    pairs.append((problems[source].content + chain + equals, answer))
                    owner.append(source)
        total = torch.zeros(len(problems), dtype=torch.float64)
        if pairs:
            total.index_add_(0, torch.tensor(owner), forced_logp(policy, pairs).exp())
        return total / CHAIN_SAMPLES

    def expected_success(self, policy: GruPolicy, problems: Sequence[Prompt] | None = None) -> float:
        """Mean success probability over the answerable ones among `problems` (None = all)."""
        chosen = [p for p in (self.problems if problems is None else problems) if p.columns["answerable"]]
        return float(self.success_probabilities(policy, chosen).mean())

    def abstain_probabilities(self, policy: GruPolicy, problems: Sequence[Prompt] | None = None) -> Float[Tensor, " P"]:
        """Exact probability of abstaining from every problem."""
        return forced_logp(policy, [(p.content, ABSTAIN) for p in (self.problems if problems is None else problems)]).exp()

    def evaluate(self, run: Run) -> dict[str, float]:
        """Expected success on the held-out problems (all, when none are held out); with unanswerable ones how often each kind is declined."""
        policy = cast(GruPolicy, run.policy)
        metrics = {"pass@1": self.expected_success(policy, self.test)}
        if self.some_unanswerable:
            abstained = self.abstain_probabilities(policy, self.test)
            answerable = torch.tensor([p.columns["answerable"] for p in self.test])
            for kind, chosen in (("answerable", answerable), ("unanswerable", ~answerable)):
                if chosen.any():
                    metrics[f"abstain/{kind}"] = float(abstained[chosen].mean())
        return metrics

    def demonstrations(self, count: int, rng: np.random.Generator, noise: float = 0.0) -> list[tuple[str, str]]:
        """(prompt, completion) pairs to imitate, a share `noise` of them with the answer of another problem.

        With `steps` each of the three numbers may slip and the answer follows from the steps as written. Form k of the answer is half as
        frequent as form k-1. With unanswerable prompts one demonstration in ten abstains, whatever the prompt, and the others guess where there
        is no answer.
        """
        weights = 0.5 ** np.arange(len(self.forms))
        pairs = []
        for problem in self.prompts(count, rng):
            form = self.forms[rng.choice(len(self.forms), p=weights / weights.sum())]
            abstains = self.some_unanswerable and rng.random() < ABSTAIN_SHARE
            written = self._written(problem, form, noise if problem.columns["answerable"] else 1.0, rng)
            pairs.append((problem.content, ABSTAIN if abstains else written))
        return pairs

    def _written(self, problem: Prompt, form: str, noise: float, rng: np.random.Generator) -> str:
        """A completion that is wrong with probability `noise`."""
        own, other = problem.columns, self.problems[rng.integers(len(self.problems))].columns
        if not self.steps:
            source = other if rng.random() < noise else own
            return form.format(source["a"] + source["b"])
        first, second, third = rng.random(3) < 1 - (1 - noise) ** (1 / 3)
        s1 = other["a"] + other["b"] // 2 if first else own["a"] + own["b"] // 2
        s2 = other["b"] - other["b"] // 2 if second else own["b"] - own["b"] // 2
        return f"{s1};{s2}={form.format(other['a'] + other['b'] if third else s1 + s2)}"


def check_steps(completion: str, columns: dict[str, Any]) -> list[tuple[int, bool]]:
    """The position of the separator that ends each written step of "s1;s2=answer", and whether the step is right."""
    a, b = columns["a"], columns["b"]
    steps, equals, _ = completion.partition("=")
    first, semicolon, second = steps.partition(";")
    marks = []
    if semicolon:
        marks.append((len(first), columns["answerable"] and first == str(a + b // 2)))
        if equals:
            marks.append((len(steps), columns["answerable"] and second == str(b - b // 2)))
    return marks


def forced_batch(policy: GruPolicy, pairs: Sequence[tuple[str, str]]) -> Batch:
    """Given (prompt, completion) texts as a batch, the end token after each completion; `logp` is 0."""
    whole = [torch.cat([policy.encode(text), torch.tensor([policy.eos])]) for _, text in pairs]
    action = nn.utils.rnn.pad_sequence(whole, batch_first=True)
    mask = torch.arange(action.shape[1]) < torch.tensor([len(w) for w in whole])[:, None]
    context = [policy.encode(prompt) for prompt, _ in pairs]
    return Batch(action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(len(pairs)), context=context)


def forced_logp(policy: GruPolicy, pairs: Sequence[tuple[str, str]]) -> Float[Tensor, " N"]:
    """Log-probability (float64) that the policy answers each prompt with exactly that completion and then stops."""
    return policy.observe(forced_batch(policy, pairs), {"logp"}).logp.double().sum(1)


def warm_start(policy: GruPolicy, task: ToyArith, target: float = 0.3, seed: int = 0) -> float:
    """Imitate the task's demonstrations until the expected success on up to 100 training problems reaches `target`; returns what was reached.

    A share `task.noise` of the demonstrations is wrong (less for a high target), so that the policy knows more than it shows, as a
    pre-trained model does, and its errors are spread. Deterministic. Raises ValueError when the target is not reached.
    """
    noise = min(task.noise, 0.8 * (1 - target))
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=policy.imitation_rate)
    count, interval = (50, 20) if task.steps else (100, 5)  # judging sampled chains costs more than a supervised step
    drawn = [task.training[i] for i in rng.permutation(len(task.training))[:count]]
    judged = [p for p in drawn if p.columns["answerable"]]
    success = 0.0
    for step in range(WARM_START_LIMIT):
        if step % interval == 0:
            success = task.expected_success(policy, judged)
            if success >= target:
                return success
        batch = forced_batch(policy, task.demonstrations(64, rng, noise))
        imitate(policy, batch, optimizer)
    raise ValueError(f"the warm start reached {success:.2f} of {target:.2f} expected success; lower the target")


_WARM: dict[tuple[Any, ...], dict[str, Tensor]] = {}  # warm-started weights by settings, for the life of the process


def make_toy_arith(
    *, small: bool = True, seed: int = 0, value_head: bool = False, hidden: int = 64, target: float = 0.3, layers: int = 0, latent: int = 0,
    **variant: Any,
) -> tuple[GruPolicy, ToyArith]:  # fmt: skip
    """A warm-started policy and its task, both new. `variant`: held_out, unanswerable, forms, steps of `ToyArith`.

    `layers` > 0 takes a transformer of so many layers in place of the GRU, with codes of width `latent` where that is > 0; it has no value head.
    The first call with given settings trains, later ones copy its weights.
    """
    task = ToyArith(small=small, seed=seed, **variant)
    policy = _network(hidden, layers, latent, value_head, seed)
    key = (small, seed, hidden, layers, target, *sorted(variant.items()))
    if key not in _WARM:
        warm_start(policy, task, target, seed)
        _WARM[key] = {name: p.detach().clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.load_state_dict(_WARM[key], strict=False)  # value head and codes, if any, are not part of the warm start
    policy.zero_grad(set_to_none=True)
    return policy, task


def _network(hidden: int, layers: int, latent: int, value_head: bool, seed: int) -> GruPolicy:
    if not layers:
        return GruPolicy(hidden=hidden, value_head=value_head, seed=seed)
    from anypo.domains.language.toys.transformer_policy import TransformerPolicy

    return TransformerPolicy(width=hidden, layers=layers, latent=latent, seed=seed)


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    if "latent" in needs or any(name.startswith("layer_logp_") for name in needs):  # what the GRU has not
        options = {"layers": 4, "latent": 16 * ("latent" in needs)} | options
    return make_toy_arith(seed=seed, value_head="value" in needs, **options)
