"""Directed acyclic graphs by discrete diffusion: noise, posterior, a small denoiser, and the policy that samples with it.

Nodes stand in topological order, so that a graph is its node types and the upper triangle of its edges. The network is symmetric, as those for
undirected graphs are; sinusoidal positions at the nodes tell it the direction (arXiv:2602.19261, on DiGress). The noise replaces a type by one
drawn from the training marginals. Left out: graphs of different sizes in one batch, structural features, time embeddings beyond t itself.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals

STATE, TIME = "state", "time"  # signals [N,A] int64 and [N] int64 in 1..T: the noisy graph at which a batch is evaluated
LEAST = 1e-12


class Ordered(NamedTuple):
    order: list[int]
    upper: Tensor  # [n,n], strictly upper triangular


class Transition(NamedTuple):
    Qbar: Tensor  # [a,a], x_0 to x_t
    Q: Tensor  # [a,a], x_{t-1} to x_t


def topo_order(adj: Int[Tensor, "n n"]) -> Ordered:
    """Kahn's order, the smallest index first, and the adjacency in it. Raises ValueError for a graph with a cycle."""
    incoming = (adj != 0).sum(0).tolist()
    ready, order = [i for i, count in enumerate(incoming) if count == 0], list[int]()
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for other in (adj[node] != 0).nonzero().flatten().tolist():
            incoming[other] -= 1
            if incoming[other] == 0:
                heapq.heappush(ready, other)
    if len(order) < len(adj):
        raise ValueError("the graph has a cycle; only directed acyclic graphs have a topological order")
    return Ordered(order, adj[order][:, order])


def pe(n: int, d: int) -> Float[Tensor, "n d"]:
    """Sinusoidal positions: sin(p / 10000^(2i/d)) in the even columns, cosines in the odd ones. `d` is even."""
    angle = torch.arange(n, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def transition(alpha_bar: float, beta: float, marginals: Float[Tensor, " a"]) -> Transition:
    """Rows: keep the type with chance abar (1 - beta in one step), else draw one from the marginals."""
    eye, drawn = torch.eye(len(marginals), dtype=marginals.dtype), marginals.expand(len(marginals), -1)
    return Transition(alpha_bar * eye + (1 - alpha_bar) * drawn, (1 - beta) * eye + beta * drawn)


def posterior(
    x_t: Int[Tensor, " *N"] | int, p0: Float[Tensor, "*N a"], marginals: Float[Tensor, " a"], beta_t: Any, abar_prev: Any, abar_t: Any
) -> Float[Tensor, "*N a"]:
    """p(x_{t-1} | x_t): the sum over x_0 of q(x_{t-1} | x_t, x_0) p0(x_0)."""
    now = nn.functional.one_hot(torch.as_tensor(x_t), len(marginals)).to(p0.dtype)
    of_now = (now * marginals).sum(-1, keepdim=True)
    share = p0 / (abar_t * now + (1 - abar_t) * of_now + LEAST)
    before = abar_prev * share + (1 - abar_prev) * marginals * share.sum(-1, keepdim=True)
    return ((1 - beta_t) * now + beta_t * of_now) * before


def cosine_schedule(steps: int) -> Float[Tensor, " T+1"]:
    """abar_0 = 1 ... abar_T = 0, nearly."""
    angle = (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2
    return ((angle.cos() / angle[0].cos()) ** 2).clamp(0, 1)


class Denoiser(nn.Module):
    """Messages between all pairs of nodes, which see the pair's noisy edge; logits of the true node types and edges. `configuration` rebuilds it."""

    def __init__(self, nodes: int, types: int, edges: int = 2, width: int = 48, layers: int = 2, positions: int = 8, seed: int = 0) -> None:
        """`positions`: columns of the positional encoding, even; 0 leaves the nodes without an order. Weights depend on `seed` alone."""
        super().__init__()
        self.configuration = {"nodes": nodes, "types": types, "edges": edges, "width": width, "layers": layers, "positions": positions}
        self.types, self.edges = types, edges
        self.register_buffer("place", pe(nodes, positions).float() if positions else torch.zeros(nodes, 0), persistent=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.begin = nn.Linear(types + 1 + positions, width)
            self.sent, self.seen = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))
            self.along = nn.ModuleList(nn.Linear(edges, width) for _ in range(layers + 1))
            self.taken = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
            self.of_node, self.of_pair, self.of_edge = nn.Linear(width, types), nn.Linear(width, width), nn.Linear(width, edges)

    def forward(
        self, x: Int[Tensor, "N n"], e: Int[Tensor, "N n n"], share: Float[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N n a"], Float[Tensor, "N n n b"]]:
        """`e` is symmetric, `share` = t/T in (0,1]. The logits of edges are symmetric too."""
        rows, n = x.shape
        hot = nn.functional.one_hot(e, self.edges).float()
        place: Any = self.place
        given = [nn.functional.one_hot(x, self.types).float(), share[:, None, None].expand(rows, n, 1).float(), place.expand(rows, -1, -1)]
        h = self.begin(torch.cat(given, -1)).relu()
        for sent, seen, along, taken, norm in zip(self.sent, self.seen, self.along, self.taken, self.norms, strict=False):
            message = (sent(h)[:, :, None] + seen(h)[:, None] + along(hot)).relu().mean(2)
            h = norm(h + taken(message).relu())
        pair = self.of_pair(h)
        return self.of_node(h), self.of_edge((pair[:, :, None] + pair[:, None] + self.along[-1](hot)).relu())


class Sampled(NamedTuple):
    graph: Tensor  # [N,A] int64
    states: Tensor  # [N,T,A] int64: the noisy graphs at t = T ... 1


class GraphPolicy(Policy):
    """Graphs as rows of A entries: n node types, then the n(n-1)/2 edges of the upper triangle, unless the wiring is given.

    The signal `logp` [N,A] is that of every entry of `batch.action` in the denoiser's guess of the clean graph at the noisy graph `state`, `time`.
    """

    provides = frozenset({"logp", STATE})
    learning_rate = 1e-3
    optimizer = "adam"
    unit = "graphs"
    temperature = 1.0

    def __init__(self, network: Denoiser, steps: int = 25, wiring: Tensor | None = None) -> None:
        """`wiring` [n(n-1)/2] int64: edges that all graphs have. Marginals are uniform until `set_marginals`."""
        super().__init__()
        self.network, self.steps = network, steps
        self.nodes, self.types, self.edges = (network.configuration[name] for name in ("nodes", "types", "edges"))
        self.upper = torch.triu_indices(self.nodes, self.nodes, 1)
        self.wiring = wiring
        self.abar = cosine_schedule(steps)
        self.register_buffer("node_marginals", torch.full((self.types,), 1 / self.types))
        self.register_buffer("edge_marginals", torch.full((self.edges,), 1 / self.edges))

    @property
    def width(self) -> int:
        """A, the entries of a graph."""
        return self.nodes + (0 if self.wiring is not None else self.upper.shape[1])

    @torch.no_grad()
    def set_marginals(self, graphs: Int[Tensor, "M A"]) -> None:
        """Frequencies of the node types and edges of training graphs."""
        for buffer, part in ((self.node_marginals, graphs[:, : self.nodes]), (self.edge_marginals, graphs[:, self.nodes :])):
            if part.numel():
                buffer.copy_(part.flatten().bincount(minlength=len(buffer)) / part.numel())  # type: ignore[operator, arg-type]

    def read(self, state: Int[Tensor, "M A"], time: Int[Tensor, " M"]) -> list[Tensor]:
        """Log-probs of the clean graph: nodes [M,n,a] and, where edges are drawn, [M,P,b]."""
        edges = self.wiring.expand(len(state), -1) if self.wiring is not None else state[:, self.nodes :]
        full = torch.zeros(len(state), self.nodes, self.nodes, dtype=torch.int64)
        full[:, self.upper[0], self.upper[1]] = edges
        of_node, of_edge = self.network(state[:, : self.nodes], full + full.transpose(1, 2), time / self.steps)
        parts = [of_node.log_softmax(-1)]
        return parts if self.wiring is not None else [*parts, of_edge[:, self.upper[0], self.upper[1]].log_softmax(-1)]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """Log-probs of the batch's graphs at their signals `state` and `time`."""
        parts = self.read(batch.signal(STATE), batch.signal(TIME))
        kinds = batch.action.split([p.shape[1] for p in parts], dim=1)
        return Signals(logp=torch.cat([p.gather(-1, k[..., None])[..., 0] for p, k in zip(parts, kinds, strict=True)], 1))

    def noised(self, graph: Int[Tensor, "M A"], time: Int[Tensor, " M"], generator: torch.Generator) -> Int[Tensor, "M A"]:
        """A draw of x_t given x_0."""
        kept = torch.rand(graph.shape, generator=generator) < self.abar[time][:, None]
        return torch.where(kept, graph, self.noise(len(graph), generator))

    def noise(self, count: int, generator: torch.Generator) -> Int[Tensor, "M A"]:
        """Graphs of independent entries from the marginals."""
        marginals: list[Any] = [self.node_marginals, self.edge_marginals]
        sizes = (self.nodes, self.width - self.nodes)
        drawn = [torch.multinomial(m.expand(count, -1), k, True, generator=generator) for m, k in zip(marginals, sizes, strict=True) if k]
        return torch.cat(drawn, 1)

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator) -> Sampled:
        """Graphs from pure noise, T denoising steps each."""
        state, seen = self.noise(count, generator), []
        marginals: list[Any] = [self.node_marginals, self.edge_marginals]
        for t in range(self.steps, 0, -1):
            seen.append(state)
            parts = self.read(state, torch.full((count,), t))
            beta, drawn = float(1 - self.abar[t] / self.abar[t - 1]), []
            for log_probs, now, m in zip(parts, state.split([p.shape[1] for p in parts], 1), marginals, strict=False):
                chance = posterior(now, log_probs.exp(), m, beta, float(self.abar[t - 1]), float(self.abar[t]))
                drawn.append(torch.multinomial(chance.flatten(0, 1), 1, generator=generator).view(now.shape))
            state = torch.cat(drawn, 1)
        return Sampled(state, torch.stack(seen, 1))

    def freeze(self, share: float) -> None:
        """Take the first `share` of the layers (the embedding and the first layer are one) out of training."""
        for i in range(math.floor(share * len(self.network.taken))):
            for part in (
                self.network.begin,
                *(m[i] for m in (self.network.sent, self.network.seen, self.network.along, self.network.taken)),
            ):
                part.requires_grad_(False)

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and marginals as safetensors, and what rebuilds the policy."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.detach().contiguous() for name, value in self.state_dict().items()}, folder / "model.safetensors")
        wiring = self.wiring.tolist() if self.wiring is not None else None
        (folder / "config.json").write_text(json.dumps({"graph": self.network.configuration, "steps": self.steps, "wiring": wiring}))


def load_graph_policy(folder: Path | str) -> GraphPolicy:
    """A policy that `save_pretrained` wrote. Raises ValueError for a folder without one."""
    path = Path(folder)
    described = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
    if "graph" not in described:
        raise ValueError(f"{folder} holds no graph model; give the model/ folder of a run on a task of cells")
    wiring = torch.tensor(described["wiring"]) if described["wiring"] is not None else None
    policy = GraphPolicy(Denoiser(**described["graph"]), described["steps"], wiring)
    policy.load_state_dict(load_file(path / "model.safetensors"))
    return policy


def graph_loss(
    policy: GraphPolicy, graphs: Int[Tensor, "M A"], generator: torch.Generator, node_weight: float = 1.0, edge_weight: float = 5.0
) -> Tensor:
    """The pre-training loss: cross-entropy of clean nodes and edges at uniform times."""
    time = torch.randint(1, policy.steps + 1, (len(graphs),), generator=generator)
    parts = policy.read(policy.noised(graphs, time, generator), time)
    kinds = graphs.split([p.shape[1] for p in parts], dim=1)
    terms = [-p.gather(-1, k[..., None]).mean() for p, k in zip(parts, kinds, strict=True)]
    return sum((w * term for w, term in zip((node_weight, edge_weight), terms, strict=False)), torch.zeros(()))


def pretrain(
    policy: GraphPolicy, graphs: Int[Tensor, "M A"], steps: int, seed: int = 0, rows: int = 128, learning_rate: float = 2e-3
) -> list[float]:
    """Marginals and `steps` optimizer steps on training graphs; the losses."""
    policy.set_marginals(graphs)
    generator, losses = torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.Adam(policy.network.parameters(), lr=learning_rate)
    for _ in range(steps):
        chosen = graphs[torch.randint(len(graphs), (rows,), generator=generator)]
        loss = graph_loss(policy, chosen, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
