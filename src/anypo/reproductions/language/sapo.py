"""Claims of SAPO on a talking key chain: five turns, in each of which one of four letters is right; a '+' or '-' tells whether all were right so far.

The reward 1 comes at the end if every letter was right; any other symbol is an invalid action. The policy is a character GRU whose output layer has
two entries more than its vocabulary, begun by imitating demonstrations with slips. Success is exact. Settings were chosen on seeds from 100 on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.gru_policy import GruPolicy, imitate
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.sapo import METHOD as SAPO
from anypo.methods.language.sapo import targets
from anypo.reproductions.common import ShuffledCredit, train_on
from anypo.run import Run
from anypo.seams.groups import has_spread
from anypo.seams.regularize import EntropyBonus, KLPenalty
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

QUESTIONS, TURNS, LETTERS = 10, 5, 4
ALPHABET = "abcd+-0123456789"
WIDTH = 48  # of the GRU


class ReservedRows(nn.Linear):
    """An output layer with two entries beyond the vocabulary, the value basis: no distribution over tokens includes them."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states)[..., :-2]

    def basis(self, states: Tensor) -> Float[Tensor, "... 1"]:
        """z+ - z- at every state."""
        both = super().forward(states)[..., -2:]
        return both[..., :1] - both[..., 1:]


class IncludedRows(ReservedRows):
    """The mistake to avoid: the reserved entries compete with the tokens."""

    def forward(self, states: Tensor) -> Tensor:
        return nn.Linear.forward(self, states)


class ReservedGru(GruPolicy):
    """A GRU whose values are read from its output layer."""

    def __init__(self, seed: int = 0, rows: type[ReservedRows] = ReservedRows) -> None:
        super().__init__(hidden=WIDTH, alphabet=ALPHABET, seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            self.output = rows(WIDTH, self.vocabulary + 2)
        with torch.no_grad():
            self.output.weight[-2:] = 0
            self.output.bias[-2:] = 0
        self.value_head = cast(Any, self.output.basis)
        self.provides = self.provides | {"value", "action_value"}

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.parameters()), "role": "policy"}]


class TalkingChain:
    """The task. A row is letter, sign, letter, sign, ..., letter; the signs are read, not written."""

    name, objectives, prompts_per_step = "talking_chain", ("reward",), 64

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed + 1000)
        self.right = 1 + torch.randint(LETTERS, (QUESTIONS, TURNS), generator=generator)  # tokens
        self.environment_steps = 0

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        chosen = rng.choice(QUESTIONS, size=count, replace=count > QUESTIONS)
        return [Prompt(id=int(i), content=int(i)) for i in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy = cast(GruPolicy, run.policy)
        group = torch.tensor([i for i, p in enumerate(prompts) for _ in range(p.samples)])
        question = torch.tensor([p.content for p in prompts])[group]
        context = self.contexts(policy, question)

        def write(written: Tensor) -> Tensor:
            starts = [torch.cat(pair) for pair in zip(context, written, strict=True)]
            return policy.sample(starts, [1] * len(starts), max_tokens=1, temperature=1.0, generator=run.generator).tokens[:, 0]

        batch = self.batch(policy, question, group, write)
        batch.version = torch.full((len(group),), run.version)
        self.environment_steps += len(group) * TURNS
        return batch

    def contexts(self, policy: GruPolicy, question: Int[Tensor, " N"]) -> list[Tensor]:
        return [policy.encode(str(q)) for q in question.tolist()]

    def batch(self, policy: GruPolicy, question: Tensor, group: Tensor, write: Callable[[Tensor], Tensor]) -> Batch:
        """Play with `write(tokens so far [N,t]) -> letters [N]`; log-probs are the policy's."""
        rows = len(question)
        written, invalid = torch.zeros(rows, 0, dtype=torch.int64), []
        intact = torch.ones(rows, dtype=torch.bool)
        for turn in range(TURNS):
            letter = write(written)
            intact = intact & (letter == self.right[question, turn])
            invalid.append((letter < 1) | (letter > LETTERS))
            sign = torch.where(intact, LETTERS + 1, LETTERS + 2)
            written = torch.cat([written, letter[:, None], sign[:, None]], dim=1)
        action = written[:, :-1]
        place = torch.arange(action.shape[1]).expand(action.shape)
        turn_reward = torch.zeros(rows, TURNS)
        turn_reward[:, -1] = intact.float()
        batch = Batch(
            action=action, mask=place % 2 == 0, logp=torch.zeros(action.shape), group=group, context=self.contexts(policy, question),
            valid=torch.ones_like(action, dtype=torch.bool), segment=place // 2, terminated=torch.ones(rows, dtype=torch.bool),
            truncated=torch.zeros(rows, dtype=torch.bool),
            signals={"prompt_id": question, "turn_reward": turn_reward, "invalid_turn": torch.stack(invalid, dim=1)},
        )  # fmt: skip
        batch.logp = policy.observe(batch, {"logp"}).logp
        return batch

    def flawless(self, policy: GruPolicy) -> Batch:
        """The one successful conversation of every question."""
        question = torch.arange(QUESTIONS)
        return self.batch(policy, question, question, lambda written: self.right[question, written.shape[1] // 2])

    def score(self, batch: Batch, run: Run) -> Tensor:
        return batch.signals["turn_reward"].sum(1)

    def successes(self, policy: GruPolicy) -> Float[Tensor, " Q"]:
        """Exact probability of success at every question."""
        return self.flawless(policy).logp.double().sum(1).exp()

    def expected_success(self, policy: GruPolicy) -> float:
        return float(self.successes(policy).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        return {"pass@1": self.expected_success(cast(GruPolicy, run.policy))}


_WARM: dict[tuple[int, tuple[float, float]], dict[str, Tensor]] = {}  # for the life of the process


def talking_chain(seed: int, skill: tuple[float, float] = (0.5, 0.5)) -> tuple[ReservedGru, TalkingChain]:
    """A policy that has imitated demonstrations whose letters are right with a probability from `skill[0]` (question 0) to `skill[1]` (the last), else
    any of the four; and its task."""
    task, policy = TalkingChain(seed), ReservedGru(seed)
    key = (seed, skill)
    if key not in _WARM:
        generator = torch.Generator().manual_seed(seed)
        chance = torch.linspace(*skill, QUESTIONS)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        for _ in range(150):
            question = torch.randint(QUESTIONS, (128,), generator=generator)

            def demonstrate(written: Tensor, question: Tensor = question) -> Tensor:
                slip = torch.rand(len(question), generator=generator) > chance[question]
                other = 1 + torch.randint(LETTERS, (len(question),), generator=generator)
                return torch.where(slip, other, task.right[question, written.shape[1] // 2])

            batch = task.batch(policy, question, question, demonstrate)
            imitate(policy, batch, optimizer)
        _WARM[key] = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.load_state_dict(_WARM[key])
    policy.zero_grad(set_to_none=True)
    return policy, task


# Both methods: 64 conversations of five turns a batch, two epochs of two minibatches, the same learning rate and regularizers.
UPDATE = GradientSteps(epochs=2, minibatches=2, learning_rate=2e-3)
METHODS: dict[str, Method] = {
    "sapo": SAPO.but(select=UniformPrompts(prompts=64, group_size=1), update=UPDATE).set("credit.tau_v", 5.0),
    "grpo": GRPO.but(
        select=UniformPrompts(prompts=8, group_size=8),
        update=UPDATE,
        regularize=(KLPenalty(beta=0.01, aggregation="token_mean"), EntropyBonus(coefficient=0.001)),
    ),
}
METHODS["sapo, values off"] = METHODS["sapo"].set("regularize.0.coefficient", 0.0).set("regularize.0.action_coefficient", 0.0)
METHODS["sapo, shuffled"] = METHODS["sapo"].but(credit=ShuffledCredit(METHODS["sapo"].credit))


def _forward(raw: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    """The largest distance of advantage + value from the lambda-return computed forward, over 20 trajectories of 1 to 9 turns."""
    generator, worst, gamma, lam = torch.Generator().manual_seed(0), 0.0, 0.97, 0.9
    for length in [*range(1, 10), *range(1, 10), 5, 6]:
        reward, value, q_value = torch.randn(3, length, generator=generator, dtype=torch.float64)
        found = raw(reward, value, q_value, torch.zeros(length, dtype=torch.int64)) + value
        for t in range(length):
            steps, target = length - t, 0.0
            for n in range(1, steps + 1):
                tail = gamma**n * float(value[t + n]) if n < steps else 0.0
                n_step = sum(gamma**k * float(reward[t + k]) for k in range(n)) + tail
                target += (lam ** (n - 1) * (1 - lam) if n < steps else lam ** (n - 1)) * n_step
            worst = max(worst, abs(float(found[t]) - target))
    return Evidence(worst, "below 1e-9", worst < 1e-9)


@claim("a turn's advantage plus its value is its lambda-return, computed forward")
def lambda_return() -> Evidence:
    return _forward(lambda reward, value, q, traj: targets(reward, value, q, 0 * reward, traj, 0.97, 0.9).raw_advantage)


@ablation(lambda_return, "Q - V as the advantage")
def q_minus_v() -> Evidence:
    return _forward(lambda reward, value, q, traj: q - value)


def _size(critic: bool) -> Evidence:
    """Parameters with values over parameters without; an own critic is a second backbone with one output."""
    plain = GruPolicy(hidden=WIDTH, alphabet=ALPHABET)
    alone, backbone = (sum(p.numel() for p in m.parameters()) for m in (plain, nn.ModuleList([plain.embedding, plain.gru])))
    with_values = alone + backbone + WIDTH + 1 if critic else sum(p.numel() for p in ReservedGru().parameters())
    found = {"policy": alone, "with values": with_values, "ratio": round(with_values / alone, 3)}
    return Evidence(found, "exactly two output rows more", with_values == alone + 2 * (WIDTH + 1))


@claim("values cost two rows of the output layer; a critic of its own nearly doubles the parameters")
def size() -> Evidence:
    return _size(critic=False)


@ablation(size, "a critic of its own, as in PPO")
def size_of_ppo() -> Evidence:
    return _size(critic=True)


def _causality(state_value: str) -> Evidence:
    """Other letters in every reply: V of the same turn must stay, Q must change. The basis rows are random."""
    policy, task = talking_chain(0)
    with torch.no_grad():
        cast(nn.Linear, policy.output).weight[-2:] = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    batch, needs = task.flawless(policy), {"value", "action_value"}
    one, v_moves, q_moves = policy.observe(batch, needs), 0.0, float("inf")
    for turn in range(TURNS):
        at, action = 2 * turn, batch.action.clone()
        action[:, at] = 1 + action[:, at] % LETTERS
        other = policy.observe(batch.but(action=action), needs)
        v_moves = max(v_moves, float((other[state_value] - one[state_value])[:, at].abs().max()))
        q_moves = min(q_moves, float((other.action_value - one.action_value)[:, at].abs().min()))
    found = {"largest change of V": v_moves, "smallest change of Q": round(q_moves, 5)}
    return Evidence(found, "V never changes, Q always does", v_moves == 0 and q_moves > 0)


@claim("another reply leaves the turn's V unchanged and changes its Q")
def causality() -> Evidence:
    return _causality("value")


@ablation(causality, "V read behind the reply")
def value_behind_the_reply() -> Evidence:
    return _causality("action_value")


def _never_written(rows: type[ReservedRows]) -> Evidence:
    """10,000 letters drawn from the first distribution while the reserved entries have by far the largest logits."""
    policy = ReservedGru(rows=rows)
    with torch.no_grad():
        cast(nn.Linear, policy.output).bias[-2:] = 20.0
        chances = policy.output(policy.states([policy.encode("0")], torch.empty(1, 0, dtype=torch.int64))[0, -1]).softmax(-1)
    drawn = torch.multinomial(chances, 10_000, replacement=True, generator=torch.Generator().manual_seed(0))
    reserved = int((drawn >= policy.vocabulary).sum())
    return Evidence({"reserved entries drawn": reserved}, "none drawn", reserved == 0)


@claim("the reserved entries are never drawn, even where their logits are the largest by far")
def never_written() -> Evidence:
    return _never_written(ReservedRows)


@ablation(never_written, "a softmax over the whole output layer")
def written() -> Evidence:
    return _never_written(IncludedRows)


def _equal_rewards(name: str) -> Evidence:
    """Share of rows with an advantage other than 0 among those whose task has one reward for all its attempts, in the fifth batch: a first one may
    hold no success at all, and values that nothing has moved yet tell nothing apart."""
    shares = []
    for seed in range(3):
        policy, task = talking_chain(seed)
        run = Run(METHODS[name], policy, task, steps=5, seed=seed)
        batch = [step(run) for _ in range(5)][-1]
        assert batch.advantage is not None
        alike = ~has_spread(batch.outcome, batch.group)
        shares.append(float((batch.advantage[alike] != 0).any(1).double().mean()))
    return Evidence([round(share, 3) for share in shares], "every such row, in every seed", min(shares) == 1)


@claim("tasks whose attempts all earned the same still have advantages, a single attempt included")
def equal_rewards() -> Evidence:
    return _equal_rewards("sapo")


@ablation(equal_rewards, "GRPO's advantages")
def equal_rewards_of_grpo() -> Evidence:
    return _equal_rewards("grpo")


UPDATES = 30


@cache
def _reached(name: str) -> tuple[float, int]:
    """Exact success after 30 updates from a warm start near 0.05, mean of 3 seeds; environment steps of a seed."""
    found, spent = [], 0
    for seed in range(3):
        policy, task = talking_chain(seed)
        found.append(train_on(METHODS[name], policy, task, steps=UPDATES, seed=seed)[-1])
        spent = task.environment_steps
    return fmean(found), spent


def _as_good(name: str) -> Evidence:
    (mine, spent), (its, allowed) = _reached(name), _reached("grpo")
    found = {"success": round(mine, 3), "grpo": round(its, 3), "environment steps": spent, "grpo's": allowed}
    return Evidence(found, "at most 0.05 below GRPO with no more environment steps", mine > its - 0.05 and spent <= allowed)


@claim("with one rollout a task it learns as much as GRPO with eight from the same environment steps", slow=True)
def as_good() -> Evidence:
    return _as_good("sapo")


@ablation(as_good, "advantages dealt to the wrong conversations")
def as_good_shuffled() -> Evidence:
    return _as_good("sapo, shuffled")
