"""isbjssp: PPO over a graph of operations that dispatches a job shop with blocking, swaps and interruptions (arXiv:2302.02506).

There are no buffers: a finished operation holds its machine until the job can move on, jobs that block one another in a cycle swap, and machines shut
down at random, so that no plan made beforehand holds. Whenever several jobs could move, the policy picks one. It sees the operations that are still to
be done as a graph, passes messages along it, and is trained by PPO on random instances.
That the problem is such a graph, changing as operations end, and the use of PPO are the paper's; simulator, features, network and reward are
[reconstructed] (the simulator is domains/combinatorial/blocking_shop.py). A lone candidate moves without being asked for: there is nothing to choose.

What differs from the digest, by measurement: few moves of a schedule are real choices (about four in a shop of six jobs) and the luck of an instance is
far more than what they change, so a schedule is compared with others of the same instance under the same shutdowns; no critic. With the critic of the
digest (`isbjssp.critic`) the same time buys less. The network also sees which waiting jobs block a machine and which machines are held, which the
digest's list of features leaves out.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.combinatorial.blocking_policy import gathered
from anypo.domains.combinatorial.blocking_shop import BlockingShop, Instance, by_rule, run_by
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.seams.credit import GAE, GroupRelative
from anypo.seams.regularize import EntropyBonus, ValueLoss
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

Routes = Int[Tensor, "J O"]  # or lists of unequal length


class Simulation(NamedTuple):
    completion: list[int]  # [J], -1 for never
    makespan: int  # -1 when the shop is stuck
    start: list[list[int]]  # [J][O], -1 for never
    deadlock: bool


class Graph(NamedTuple):
    nodes: list[list[int]]  # [job, operation] of the operations that are not completed
    predecessor: list[list[int]]  # pairs of node numbers: an operation and the next one of its job; reversed, the successor edges
    disjunctive: list[list[int]]  # pairs i < k on the same machine


def simulate(machine: Routes, duration: Routes, shutdown: Int[Tensor, "S 3"], rule: str, swap: bool = True) -> Simulation:
    """Steps (a)-(e): a shop under a priority rule of equation 1, with shutdowns (machine, from, for how long)."""
    done = run_by(_instance(machine, duration, shutdown), lambda shop, found: by_rule(shop, found, rule), swap)
    return Simulation(done.completion, done.makespan, done.start, done.deadlock)


def candidates(machine: Routes, duration: Routes, shutdown: Int[Tensor, "S 3"], rule: str, time: int) -> list[int]:
    """The jobs that may move at the beginning of step (c) at `time`, the rule having decided until then."""
    shop = BlockingShop(_instance(machine, duration, shutdown))
    while shop.time < time and not shop.ended:
        found = shop.candidates()
        if found:
            shop.move(by_rule(shop, found, rule))
        else:
            shop.pass_time()
    return shop.candidates()


def graph(machine: Routes, duration: Routes, completed: Int[Tensor, " J"]) -> Graph:
    """Equation 2: what is left of the disjunctive graph when of each job the first `completed` operations are deleted."""
    routes, gone = _lists(machine), _lists(completed)
    nodes = [[j, o] for j, route in enumerate(routes) for o in range(gone[j], len(route))]
    pairs = list(combinations(range(len(nodes)), 2))
    chain = [[i, k] for i, k in pairs if nodes[i][0] == nodes[k][0] and nodes[k][1] == nodes[i][1] + 1]
    on = [routes[j][o] for j, o in nodes]
    return Graph(nodes, chain, [[i, k] for i, k in pairs if on[i] == on[k]])


def messages(h: Float[Tensor, "n d"], pred: Int[Tensor, "E 2"], disj: Int[Tensor, "D 2"]) -> Float[Tensor, "n 5d"]:
    """Equation 3: beside each node its predecessors', its successors', its rivals' and everyone's mean; 0 where there is none."""
    before, rivals = h.new_zeros(len(h), len(h)), h.new_zeros(len(h), len(h))
    for edges, matrix in ((pred, before), (disj, rivals)):
        if len(edges):
            matrix[edges[:, 1], edges[:, 0]] = 1.0
    adjacency = torch.stack([before, before.T, rivals + rivals.T])
    return gathered(h[None, None], adjacency[None], h.new_ones(1, 1, len(h)))[0, 0]


def _lists(values: Tensor | list) -> list:
    return values.tolist() if isinstance(values, Tensor) else values


def _instance(machine: Routes, duration: Routes, shutdown: Tensor | list) -> Instance:
    return Instance(_lists(machine), _lists(duration), [(int(m), int(s), int(d)) for m, s, d in _lists(shutdown)])


METHOD = PPO.but(
    name="isbjssp",
    paper=Paper("Interrupting swap-allowed blocking job shop by GNN and PPO", "2302.02506", 2023),
    domain="combinatorial",
    kind="system",
    task="blocking:random",
    summary="PPO over a message-passing network on the operations still to be done, asked whenever several jobs of a blocking shop could move",
    select=UniformPrompts(group_size=6),
    credit=GroupRelative(std=False),
    regularize=(EntropyBonus(coefficient=0.01),),
    update=GradientSteps(epochs=4, minibatches=4, learning_rate=1e-3, optimizer="adam", max_grad_norm=0.5),
)

VARIANTS = {
    "critic": METHOD.but(
        name="isbjssp.critic",
        summary="isbjssp with the critic and the generalized advantages of PPO in place of comparisons on the same instance",
        select=UniformPrompts(group_size=1),
        credit=GAE(gamma=1.0, lam=0.95),
        regularize=(ValueLoss(coefficient=0.5), EntropyBonus(coefficient=0.01)),
    )
}
