"""Linear systems whose graph is a forest, solved by message passing in linear time, and forests chosen greedily."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


def _forest_order(size: int, edges: Sequence[tuple[int, int, float]]) -> tuple[list[int], list[int], list[float]]:
    """Nodes with parents before children, each node's parent (-1 for a root) and the entry that joins them. Raises ValueError for a cycle."""
    near: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    for i, j, value in edges:
        near[i].append((j, value))
        near[j].append((i, value))
    order: list[int] = []
    parent, joint, seen = [-1] * size, [0.0] * size, [False] * size
    trees = 0
    for root in range(size):
        if seen[root]:
            continue
        trees, seen[root], waiting = trees + 1, True, [root]
        while waiting:
            node = waiting.pop()
            order.append(node)
            for child, value in near[node]:
                if not seen[child]:
                    seen[child], parent[child], joint[child] = True, node, value
                    waiting.append(child)
    if len(edges) > size - trees:
        raise ValueError("message passing needs a forest, and this block has a cycle; choose it with forest_block or solve it densely")
    return order, parent, joint


def message_passing(diagonal: Sequence[float], edges: Sequence[tuple[int, int, float]], right: Sequence[float]) -> list[float]:
    """d with M d = `right` for a positive definite M of this diagonal and the off-diagonal entries (i, j, value), each pair once."""
    order, parent, joint = _forest_order(len(diagonal), edges)
    pivot, rest = list(diagonal), list(right)
    for node in reversed(order):
        above = parent[node]
        if above >= 0:
            share = joint[node] / pivot[node]
            pivot[above] -= joint[node] * share
            rest[above] -= share * rest[node]
    solution = [0.0] * len(diagonal)
    for node in order:
        above = parent[node]
        known = joint[node] * solution[above] if above >= 0 else 0.0
        solution[node] = (rest[node] - known) / pivot[node]
    return solution


def forest(order: Iterable[int], adjacent: Tensor, most: int) -> list[int]:
    """The first `most` indices of `order` that close no cycle with those before, by union-find over [n,n] bool `adjacent`; sorted."""
    root: dict[int, int] = {}

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i in order:
        if len(root) >= most:
            break
        trees = [find(j) for j in adjacent[i].nonzero().flatten().tolist() if j != i and j in root]
        if len(set(trees)) == len(trees):
            root[i] = i
            for tree in trees:
                root[tree] = i
    return sorted(root)


def colour_blocks(adjacent: Tensor) -> list[list[int]]:
    """A partition into blocks without inner edges (red and black on a grid), by the first free colour in the order of index."""
    blocks: list[list[int]] = []
    for i, row in enumerate(adjacent.tolist()):
        free = next((block for block in blocks if not any(row[j] for j in block)), None)
        if free is None:
            blocks.append([i])
        else:
            free.append(i)
    return blocks
