"""Planning, PG vs Q: policy gradient versus Q-learning on graph planning (arXiv:2509.22613).

Planning is a path from a start to a target of a directed graph; the model is two tables, next-node logits E[cur] + O[target]. Three learners of it:
fine-tuning on demonstrations fits co-occurrence of nodes; policy gradient with an outcome reward is fine-tuning on its own correct paths, explores, and
loses diversity even at perfect accuracy (a KL to the start slows that); Q-learning with a reward that checks edges learns from anyone's moves and
ends with equal values for all correct ones, with an outcome reward it is hacked. The claims are the abstract's; equations 1-4 are standard or
[reconstructed], the rewards of 5 follow the authors' summary. Left out: the optional transformer. Baseline: none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.domains.tabular.graphs import Problems, blocks_graph, diversity, planning_problems, success
from anypo.method import Paper, Study

KINDS = ("process", "outcome")


class Expected(NamedTuple):
    gradient: Tensor  # [A]


class Drift(NamedTuple):
    before: Tensor
    after: Tensor  # expected
    drift: Tensor


class Optimum(NamedTuple):
    policy: Tensor  # [...,A]


class QTable(NamedTuple):
    q: Tensor  # [...,n,n]


class CountModel(NamedTuple):
    edge_counts: Tensor  # [n,n] moves, by current and next node
    target_counts: Tensor  # [n,n] by target and next node
    policy: Tensor  # [Q,n]


class WorldSize(NamedTuple):
    states: int
    edges: int  # ordered pairs
    degree_histogram: Tensor  # [largest degree + 1]


class Planner(NamedTuple):
    edge: Tensor  # [...,n,n] E, by current and next node
    target: Tensor  # [...,n,n] O, by target and next node

    def table(self) -> Float[Tensor, "... T n n"]:
        """Logits (or values) by target, current and next node."""
        return self.edge[..., None, :, :] + self.target[..., :, None, :]


def sft(paths: Int[Tensor, "P L"], queries: Int[Tensor, "Q 2"], nodes: int) -> CountModel:
    """Equation 1's count form: log(1 + counts) of the demonstrations' moves are the logits. `paths` padded with -1; queries are (cur, target)."""
    inside = paths[:, 1:] >= 0
    last = paths.gather(1, (paths >= 0).sum(1, keepdim=True) - 1)
    here, there, goal = paths[:, :-1][inside], paths[:, 1:][inside], last.expand_as(inside)[inside]
    edge, target = torch.zeros(2, nodes, nodes, dtype=torch.float64)
    one = torch.ones(len(here), dtype=torch.float64)
    edge.index_put_((here, there), one, accumulate=True)
    target.index_put_((goal, there), one, accumulate=True)
    return CountModel(edge, target, (edge[queries[:, 0]].log1p() + target[queries[:, 1]].log1p()).softmax(-1))


def expected_pg(theta: Float[Tensor, " A"], correct: Tensor) -> Expected:
    """Equation 2: p (r - p.r), 0 when only correct actions have probability."""
    p, r = theta.softmax(-1), correct.to(theta)
    return Expected(p * (r - p @ r))


def _entropy_of_correct(p: Float[Tensor, "... A"], correct: Bool[Tensor, " A"]) -> Float[Tensor, ...]:
    inside = p[..., correct] / p[..., correct].sum(-1, keepdim=True)
    return -torch.xlogy(inside, inside).sum(-1)


def diversity_drift(theta: Float[Tensor, " A"], correct: Tensor, lr: float, baseline: bool = False) -> Drift:
    """Equation 3: expected change of the entropy (nats) among correct actions by one sampled step; the baseline is the expected reward.

    Without it, and with correct actions only, negative for all but skewed policies (there rare actions, when sampled, add entropy)."""
    p, r = theta.softmax(-1), correct.to(theta)
    advantage = r - (p @ r if baseline else 0)
    stepped = (theta + lr * advantage[:, None] * (torch.eye(len(p)).to(theta) - p)).softmax(-1)
    before, after = _entropy_of_correct(p, correct.bool()), p @ _entropy_of_correct(stepped, correct.bool())
    return Drift(before, after, after - before)


def kl_optimum(reference: Float[Tensor, "... A"], reward: Float[Tensor, "... A"], beta: float) -> Optimum:
    """Equation 4: the policy of largest expected reward minus beta KL to the reference. `beta` > 0."""
    return Optimum((reference.log() + reward / beta).softmax(-1))


def rewards(adjacency: Float[Tensor, "... n n"], target: int | Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Equation 5: reward [...,n,n] of every move and whether it ends the path; `target` a node or nodes [G] (then [G,n,n])."""
    if kind not in KINDS:
        raise ValueError(f"unknown reward '{kind}'; use {' or '.join(KINDS)}")
    edge = adjacency.bool()
    arrives = torch.nn.functional.one_hot(torch.as_tensor(target), edge.shape[-1])[..., None, :].bool().expand(*edge.shape)
    if kind == "outcome":
        return arrives.double(), arrives
    return torch.where(edge, arrives.double(), -1.0), ~edge | arrives


def q_iteration(adjacency: Tensor, target: int, kind: str = "process", sweeps: int = 12, gamma: float = 1.0) -> QTable:
    """Equation 6 on all moves at once with a full step, from 0; `sweeps` times."""
    reward, ends = rewards(adjacency, target, kind)
    q = torch.zeros_like(reward)
    for _ in range(sweeps):
        q = reward + torch.where(ends, 0.0, gamma * q.amax(-1)[..., None, :])
    return QTable(q)


def q_learning(
    adjacency: Tensor, transitions: Int[Tensor, "K 2"], target: int | Tensor, kind: str = "process", lr: float = 0.1, gamma: float = 1.0
) -> QTable:
    """Equation 6 as a table, move (cur, nxt) after move, from 0; `target` a node, or nodes [G] that learn from the same moves (q [G,n,n])."""
    goals = torch.as_tensor(target).reshape(-1)
    reward, ends = rewards(adjacency.expand(len(goals), *adjacency.shape), goals, kind)
    going_on = gamma * (~ends).double()
    q = torch.zeros_like(reward)
    for here, there in transitions.tolist():
        cell = q[:, here, there]
        cell += lr * (reward[:, here, there] + going_on[:, here, there] * q[:, there].amax(-1) - cell)
    return QTable(q if isinstance(target, Tensor) and target.dim() else q[0])


def blocksworld(blocks: int) -> WorldSize:
    """Equation 8: how large the graph of `blocks` blocks is."""
    states, adjacency = blocks_graph(blocks)
    return WorldSize(len(states), int(adjacency.sum()), adjacency.sum(-1).bincount())


def fine_tune(problems: Problems, steps: int = 400, lr: float = 0.05) -> Planner:
    """Equation 1: cross entropy on the demonstrations from zero logits, full batches, Adam; every graph its own tables."""
    tables = Planner(*(torch.zeros(problems.adjacency.shape, dtype=torch.float64, requires_grad=True) for _ in range(2)))
    optimizer = torch.optim.Adam(tables, lr=lr)
    share = problems.demos / problems.demos.sum((1, 2, 3), keepdim=True)
    for _ in range(steps):
        optimizer.zero_grad()
        (-(share * tables.table().log_softmax(-1)).sum()).backward()
        optimizer.step()
    return Planner(*(t.detach() for t in tables))


def reinforce(
    start: Planner, adjacency: Bool[Tensor, "B n n"], prompts: Bool[Tensor, "B n n"], episodes: int, generator: torch.Generator, *,
    lr: float = 0.1, beta: float | Float[Tensor, " B"] = 0.0, baseline: Bool[Tensor, " B"] | None = None, longest: int = 12,
) -> Planner:  # fmt: skip
    """Equation 2 on one sampled path an episode from uniform `prompts` [start,target]; reward 1 for a valid path to the target.

    `beta`: weight of the KL to `start` at every node visited, >= 0. `baseline`: where True, the run's mean reward (rate 0.01) is taken off.
    """
    edge, target = (t.clone() for t in start)
    count, nodes = edge.shape[:2]
    run, rate = torch.arange(count), torch.as_tensor(beta, dtype=edge.dtype).expand(count)
    held = bool((rate > 0).any())
    drawn = torch.multinomial(prompts.flatten(1).double(), episodes, replacement=True, generator=generator).T
    luck = torch.rand(episodes, longest, count, 1, generator=generator, dtype=edge.dtype)
    mean = torch.zeros(count, dtype=edge.dtype)
    with_mean = torch.zeros_like(mean) if baseline is None else baseline.to(edge)
    for e in range(episodes):
        here, goal = drawn[e] // nodes, drawn[e] % nodes
        won, alive = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
        score, pull, where = [], [], []
        for k in range(longest):
            logp = (edge[run, here] + target[run, goal]).log_softmax(-1)
            p = logp.exp()
            there = (p.cumsum(-1) < luck[e, k]).sum(-1).clamp(max=nodes - 1)
            score.append((torch.nn.functional.one_hot(there, nodes) - p) * alive[:, None])
            if held:
                away = logp - (start.edge[run, here] + start.target[run, goal]).log_softmax(-1)
                pull.append(p * (away - (p * away).sum(-1, keepdim=True)) * alive[:, None])
            where.append(here)
            valid = adjacency[run, here, there] & alive
            won = won | (valid & (there == goal))
            alive, here = valid & (there != goal), there
            if not alive.any():
                break
        gain = won.to(edge) - with_mean * mean
        push = gain[:, None] * torch.stack(score)
        if held:
            push = push - rate[:, None] * torch.stack(pull)
        move = lr * push
        edge.index_put_((run.expand(len(where), -1), torch.stack(where)), move, accumulate=True)
        target[run, goal] += move.sum(0)
        mean = mean + 0.01 * (won.to(edge) - mean)
    return Planner(edge, target)


def q_linear(
    adjacency: Bool[Tensor, "B n n"], pairs: Bool[Tensor, "B n n"], updates: int, generator: torch.Generator, kind: str = "process", lr: float = 0.1
) -> Planner:  # fmt: skip
    """Equation 6 in the form W[cur,nxt] + M[target,nxt], off-policy: moves uniform over nodes, targets those of uniform `pairs`."""
    count, nodes = adjacency.shape[:2]
    run = torch.arange(count)
    goals = torch.multinomial(pairs.flatten(1).double(), updates, replacement=True, generator=generator).T % nodes
    moves = torch.randint(nodes, (updates, 2, count), generator=generator)
    tables = [rewards(adjacency, goal, kind) for goal in range(nodes)]
    reward, ends = (torch.stack([t[i] for t in tables]) for i in range(2))  # [T,B,n,n]
    paid, on = reward[goals, run, moves[:, 0], moves[:, 1]], (~ends[goals, run, moves[:, 0], moves[:, 1]]).double()
    edge, target = torch.zeros(2, count, nodes, nodes, dtype=torch.float64)
    for k in range(updates):
        goal, (here, there) = goals[k], moves[k]
        best = (edge[run, there] + target[run, goal]).amax(-1)
        step = lr * (paid[k] + on[k] * best - edge[run, here, there] - target[run, goal, there])
        edge[run, here, there] += step
        target[run, goal, there] += step
    return Planner(edge, target)


def measure(policy: Float[Tensor, "B T n n"], problems: Problems) -> dict[str, Float[Tensor, " B"]]:
    """Exact success on training and test pairs, and diversity on the training pairs, of every graph."""
    found = success(policy, problems.adjacency)
    shares = {name: (found * pairs).sum((1, 2)) / pairs.sum((1, 2)) for name, pairs in (("train", problems.train), ("test", problems.test))}
    return {**shares, "diversity": diversity(policy, problems.adjacency, problems.train)}


def run(seed: int = 0, episodes: int = 2000, updates: int = 20000, temperature: float = 0.05) -> dict[str, Any]:
    """Success on training and test pairs and diversity of the three learners on one random graph."""
    problems, generator = planning_problems([seed]), torch.Generator().manual_seed(seed)
    demos = fine_tune(problems)
    pg = reinforce(demos, problems.adjacency, problems.train, episodes, generator)
    q = q_linear(problems.adjacency, problems.train, updates, generator)
    logits = {"sft": demos.table(), "pg": pg.table(), "q": q.table() / temperature}
    return {f"{name}_{k}": float(v) for name, x in logits.items() for k, v in measure(x.softmax(-1), problems).items()}


STUDY = Study(
    name="planning_pg_q",
    paper=Paper(
        "Benefits and Pitfalls of Reinforcement Learning for Language Model Planning: A Theoretical Perspective", "2509.22613", 2025
    ),
    domain="tabular",
    run=run,
    kind="theory",
    summary="fine-tuning, policy gradient and Q-learning on paths in graphs: what generalizes, what keeps diversity, and which reward is hacked",
)
