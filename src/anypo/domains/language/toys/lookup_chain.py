"""lookup_chain: four turns, each of which looks the last turn's value up in a table that the prompt shows; one wrong turn spoils those after it.

A prompt is "31702465>2": table and start. The policy is a small transformer with visible attention. It has learned from transcripts of noisy solvers that
now and then end with a grade of the last step, so that it knows better than it writes whether a step follows from the one before. `labelled_turns`
gives trajectories with labels for probes. A step takes about ten milliseconds. The weights come from this module run as a script. Left out: turns of
several tokens, tools.
"""

from __future__ import annotations

import math
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

VALUES, TURNS = 8, 4
GOOD, BAD, ARROW = VALUES, VALUES + 1, VALUES + 2  # the grades, and what stands between table and start
VOCABULARY = VALUES + 3
PROMPT = VALUES + 2
SKILL = 0.36  # how often the solvers of the transcripts follow the table; else they write any value
STEADY = 0.8  # how often turns of `labelled_turns` follow it
JUDGED, JUDGED_SEED = 256, 77
WEIGHTS = Path(__file__).with_name("lookup_chain.safetensors")


class Layer(nn.Module):
    """Attention and a perceptron, each after a layer norm and added to the state."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, state: Float[Tensor, "N S D"]) -> tuple[Float[Tensor, "N S D"], Float[Tensor, "N H S S"]]:
        rows, length, width = state.shape
        query, key, value = self.project(self.before(state)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1)
        weight = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(hidden_from, -torch.inf).softmax(-1)
        state = state + self.out((weight @ value).transpose(1, 2).reshape(rows, length, width))
        return state + self.narrow(nn.functional.gelu(self.wide(self.between(state)))), weight


class ChainTransformer(Policy):
    """Gives `hidden` [N,T,D], the last layer's state after each action, and `attention_maps` [N,L,H,S,S] over prompt and actions."""

    provides = frozenset({"logp", "entropy", "logits", "hidden", "attention_maps"})
    learning_rate = 1e-3

    def __init__(self, *, layers: int = 2, width: int = 32, heads: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(PROMPT + TURNS, width)
            self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
            self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def encode(self, text: str) -> Int[Tensor, " 10"]:
        return torch.tensor([ARROW if c == ">" else int(c) for c in text])

    def read(self, tokens: Int[Tensor, "N S"]) -> tuple[Float[Tensor, "N S D"], Float[Tensor, "N L H S S"]]:
        """States of the last layer and the attention of all."""
        state, maps = self.embedding(tokens) + self.position.weight[: tokens.shape[1]], []
        for layer in self.layers:
            state, weight = layer(state)
            maps.append(weight)
        return self.norm(state), torch.stack(maps, dim=1)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """Log-probs are those among the values: grades are never actions."""
        states, maps = self.read(torch.cat([torch.stack(list(batch.context)), batch.action], dim=1))
        log_probs = self.output(states[:, PROMPT - 1 : -1])[..., :VALUES].log_softmax(-1)
        found = {
            "logits": log_probs,
            "hidden": states[:, PROMPT:],
            "attention_maps": maps,
            "logp": log_probs.gather(-1, batch.action[..., None])[..., 0],
        }
        found["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        return Signals({name: found[name] for name in needs})

    @torch.no_grad()
    def sample(self, context: Int[Tensor, "N 10"], generator: torch.Generator) -> Int[Tensor, "N 4"]:
        tokens = context
        for _ in range(TURNS):
            chance = self.output(self.read(tokens)[0][:, -1])[:, :VALUES].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chance, 1, generator=generator)], dim=1)
        return tokens[:, PROMPT:]


def follow(table: Int[Tensor, "N 8"], start: Int[Tensor, " N"], steady: float, generator: torch.Generator) -> Int[Tensor, "N 4"]:
    """Turns that follow the table with probability `steady` and else are any value."""
    turns, value = [], start
    for _ in range(TURNS):
        right = table.gather(1, value[:, None])[:, 0]
        stray = torch.randint(VALUES, right.shape, generator=generator)
        value = torch.where(torch.rand(right.shape, generator=generator) < steady, right, stray)
        turns.append(value)
    return torch.stack(turns, dim=1)


def true_chain(context: Int[Tensor, "N 10"]) -> Int[Tensor, "N 4"]:
    return follow(context[:, :VALUES], context[:, -1], 1.0, torch.Generator())


def problems(count: int, generator: torch.Generator) -> Int[Tensor, "N 10"]:
    """Prompts as tokens, table and start drawn uniformly."""
    drawn = torch.randint(VALUES, (count, VALUES + 1), generator=generator)
    return torch.cat([drawn[:, :VALUES], torch.full((count, 1), ARROW), drawn[:, VALUES:]], dim=1)


class LookupChain:
    """The task: reward 1 when the last value is that of the true chain and all before it are."""

    name = "lookup_chain"
    objectives = ("reward",)
    prompts_per_step = 8

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        texts = ["".join(map(str, row[:VALUES])) + f">{row[VALUES]}" for row in rng.integers(VALUES, size=(count, VALUES + 1)).tolist()]
        return [Prompt(int(text.replace(">", "")), text) for text in texts]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        context = torch.stack([run.policy.encode(p.content) for p in prompts])[group]
        batch = self.batch(context, run.policy.sample(context, run.generator), group)
        seen = run.policy.observe(batch, {"logp", "entropy"})
        batch.logp, batch.signals["old_entropy"] = seen.logp, seen.entropy
        batch.signals["prompt_id"] = torch.tensor([p.id for p in prompts])[group]
        batch.version = torch.full((len(batch),), run.version)
        return batch

    def batch(self, context: Int[Tensor, "N 10"], action: Int[Tensor, "N 4"], group: Int[Tensor, " N"]) -> Batch:
        """Given turns as a batch, without log-probs."""
        done = torch.ones(len(action), dtype=torch.bool)
        return Batch(
            action=action, mask=torch.ones_like(action, dtype=torch.bool), logp=torch.zeros(action.shape), group=group, context=list(context),
            segment=torch.arange(TURNS).expand(action.shape).clone(), terminated=done, truncated=~done,
        )  # fmt: skip

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        return (batch.action == true_chain(torch.stack(list(batch.context)))).all(1).float()

    def labelled_turns(self, count: int, run: Run) -> tuple[Batch, Tensor]:
        """Every other row is contaminated: see `labelled`."""
        batch, label, replaced = self.labelled(count, run.generator)
        return batch, torch.where(replaced, -1, label)

    def labelled(self, count: int, generator: torch.Generator) -> tuple[Batch, Int[Tensor, "N 4"], Tensor]:
        """Turns that mostly follow the table, label 1 where they are on the true chain; in every other row one of the first three is replaced by a
        wrong value, which those after it follow. The last [N,4]: the replaced turns."""
        context = problems(count, generator)
        table = context[:, :VALUES]
        action, true = follow(table, context[:, -1], STEADY, generator), true_chain(context)
        where = torch.randint(TURNS - 1, (count,), generator=generator)
        replaced = (torch.arange(TURNS) == where[:, None]) & (torch.arange(count) % 2 == 1)[:, None]
        wrong = (true + torch.randint(1, VALUES, true.shape, generator=generator)) % VALUES
        for t in range(TURNS - 1):
            chosen = torch.where(replaced[:, t], wrong[:, t], action[:, t])
            after = follow(table, chosen, STEADY, generator)[:, : TURNS - 1 - t]
            action = torch.where(replaced[:, t, None], torch.cat([action[:, :t], chosen[:, None], after], dim=1), action)
        return self.batch(context, action, torch.arange(count)), (action == true).long(), replaced

    @torch.no_grad()
    def measure(self, policy: Any) -> dict[str, float]:
        """Exact success: the probability of the true chain, mean over the same 256 problems; and of a single turn after right ones."""
        context = problems(JUDGED, torch.Generator().manual_seed(JUDGED_SEED))
        logp = policy.observe(self.batch(context, true_chain(context), torch.arange(JUDGED)), {"logp"}).logp.double()
        return {"pass@1": float(logp.sum(1).exp().mean()), "turn": float(logp.exp().mean())}

    def expected_success(self, policy: Any) -> float:
        return self.measure(policy)["pass@1"]

    def evaluate(self, run: Run) -> dict[str, float]:
        return self.measure(run.policy)


def make_lookup_chain(seed: int = 0) -> tuple[ChainTransformer, LookupChain]:
    """The task and the transformer that comes with the library; `seed` plays no part in either."""
    policy = ChainTransformer()
    policy.load_state_dict(load_file(WEIGHTS))
    return policy, LookupChain()


def pretrain(steps: int = 2400, rows: int = 128, peak: float = 3e-3, seed: int = 0) -> ChainTransformer:
    """Next-token prediction; at half of the places of turns the transcript ends with the grade of the last step. About a minute."""
    policy, generator = ChainTransformer(seed=seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=peak)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    for _ in range(steps):
        context = problems(rows, generator)
        action = follow(context[:, :VALUES], context[:, -1], SKILL, generator)
        before = torch.cat([context[:, -1:], action[:, :-1]], dim=1)
        grade = torch.where(action == context[:, :VALUES].gather(1, before), GOOD, BAD)
        ends = torch.rand(action.shape, generator=generator) < 0.5
        ends[:, -1] = True
        coming = torch.cat([action, grade[:, -1:]], dim=1)  # after the start and after every turn
        coming[:, 1:] = torch.where(ends, grade, coming[:, 1:])
        states, _ = policy.read(torch.cat([context, action], dim=1))
        loss = nn.functional.cross_entropy(policy.output(states[:, PROMPT - 1 :]).flatten(0, 1), coming.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return policy


if __name__ == "__main__":
    trained = pretrain()
    save_file(trained.state_dict(), WEIGHTS)
    print(LookupChain().measure(trained))


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    return make_lookup_chain(seed=seed, **options)
