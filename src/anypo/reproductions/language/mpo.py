"""Claims of MPO: the identities of its two scales, the token that decides a word, and learning on spell_grid (moves spelled with one to six letters).

Training: 32 walks a batch, four epochs of two minibatches, 20 updates, Adam 3e-3, discounts and traces as the methods have them; all succeed in the
end, so methods are compared by exact success averaged over the updates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from statistics import fmean, pstdev, stdev

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.spell_grid import SpellGrid, SpellPolicy
from anypo.method import Method
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.language.mpo import METHOD as MPO
from anypo.methods.language.mpo import advantages
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.credit import gae
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

SEEDS = range(8)
UPDATES = 20
GAMMA, LAM_TURN = 0.99, 0.95

Row = tuple[Tensor, Tensor, Tensor]  # reward, value and segment [T] of one trajectory
Estimator = Callable[
    [Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]
]  # reward, value, mask, segment -> advantages and in-turn estimates


def _turn_gae(reward: Tensor, value: Tensor, borders: list[int]) -> tuple[list[float], list[float]]:
    """TD errors and advantages of the turns of one row, as written in the definition; turn k has the tokens borders[k] to borders[k+1] - 1."""
    errors, found, advantage, after = list[float](), list[float](), 0.0, 0.0
    for first, end in reversed(list(pairwise(borders))):
        error = float(reward[first:end].sum()) + GAMMA * after - float(value[first])
        advantage, after = error + GAMMA * LAM_TURN * advantage, float(value[first])
        errors.insert(0, error)
        found.insert(0, advantage)
    return errors, found


def _identity(estimate: Estimator) -> Evidence:
    """The largest |token mean - turn advantage| and |first token - turn's TD error| of 100 rows of turns of one to six tokens."""
    generator, gaps = torch.Generator().manual_seed(0), [0.0, 0.0]
    for _ in range(100):
        lengths = torch.randint(1, 7, (5,), generator=generator)
        borders = [0, *lengths.cumsum(0).tolist()]
        reward, value = torch.randn(2, 1, borders[-1], generator=generator, dtype=torch.float64)
        segment = torch.arange(5).repeat_interleave(lengths)[None]
        found, in_turn = estimate(reward, value, torch.ones_like(segment, dtype=torch.bool), segment)
        errors, turns = _turn_gae(reward[0], value[0], borders)
        for k, (first, end) in enumerate(pairwise(borders)):
            gaps[0] = max(gaps[0], abs(float(found[0, first:end].mean()) - turns[k]))
            gaps[1] = max(gaps[1], abs(float(in_turn[0, first]) - errors[k]))
    return Evidence({"token mean": gaps[0], "first token": gaps[1]}, "both below 1e-8", max(gaps) < 1e-8)


@claim("the tokens of a turn have the turn's advantage as their mean, and its first token the turn's TD error")
def identity() -> Evidence:
    def both(reward: Tensor, value: Tensor, mask: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        found = advantages(reward, value, mask, segment, GAMMA, LAM_TURN, whiten=False)
        return found.advantage, found.in_turn

    return _identity(both)


@ablation(identity, "GAE over tokens")
def tokens_lose_the_turn() -> Evidence:
    def plain(reward: Tensor, value: Tensor, mask: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        open_end = torch.zeros_like(mask)
        found = gae(reward, value, open_end, open_end, mask, GAMMA, LAM_TURN).advantages
        return found, found

    return _identity(plain)


TURNS, WORD, DECIDER = 3, 5, 2


def _words(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Outcome [4000] of random words over two letters, and what is known before each letter [4000, turns * word]: a number for the turn, whether
    it is decided, and how many were decided well. A turn is decided by its third letter alone; the outcome is 1 when two of the three went well."""
    well = torch.randint(2, (4000, TURNS), generator=generator)
    so_far = torch.cat([torch.zeros(4000, 1, dtype=torch.int64), well.cumsum(1)], dim=1)
    place = torch.arange(TURNS * WORD)
    turn, decided = place // WORD, (place % WORD > DECIDER).long()
    return (so_far[:, -1] >= 2).double(), (2 * turn + decided) * (TURNS + 1) + so_far[:, turn + decided]


def _stands_out(lam_tok: float, eta: float) -> Evidence:
    """With a critic fitted to 4000 words (the mean discounted outcome of every state): the deciding letter against the largest other one."""
    generator = torch.Generator().manual_seed(0)
    segment = (torch.arange(TURNS * WORD) // WORD).expand(4000, -1)
    outcome, state = _words(generator)
    target = (outcome[:, None] * GAMMA ** (TURNS - 1 - segment)).flatten()
    states = 2 * TURNS * (TURNS + 1)
    total = torch.zeros(2, states, dtype=torch.float64).index_add(1, state.flatten(), torch.stack([target, torch.ones_like(target)]))
    critic = total[0] / total[1].clamp(min=1)
    outcome, state = _words(generator)
    reward = torch.zeros(4000, TURNS * WORD, dtype=torch.float64)
    reward[:, -1] = outcome
    mask = torch.ones_like(segment, dtype=torch.bool)
    found = advantages(reward, critic[state], mask, segment, GAMMA, LAM_TURN, lam_tok, eta)
    ratios = {}
    for name, values in (("in-turn estimate", found.in_turn), ("advantage", found.advantage)):
        size = values.abs().view(-1, TURNS, WORD).mean((0, 1))
        others = torch.cat([size[:DECIDER], size[DECIDER + 1 :]])
        ratios[name] = round(float(size[DECIDER] / others.max()), 3)
    return Evidence(
        ratios, "in-turn estimate above 1.5 and advantage above 1.05 times the largest other letter's",
        ratios["in-turn estimate"] > 1.5 and ratios["advantage"] > 1.05,
    )  # fmt: skip


@claim("with a fitted critic and lambda 0.5 inside turns, the letter that decides a word has the largest in-turn estimate and advantage")
def stands_out() -> Evidence:
    return _stands_out(lam_tok=0.5, eta=0.5)


@ablation(stands_out, "lambda 1 inside turns: the letters before it share its TD error")
def shared_before() -> Evidence:
    return _stands_out(lam_tok=1.0, eta=0.5)


@ablation(stands_out, "no in-turn term (eta = 0)")
def none_stands_out() -> Evidence:
    return _stands_out(lam_tok=0.5, eta=0.0)


METHODS: dict[str, Method] = {
    "mpo": MPO,
    "eta 0": MPO.set("credit.eta", 0.0),
    "token ratio": MPO.but(objective=PPO.objective),
    "token ppo": PPO.but(domain="language"),
}


@cache
def _trained(name: str, seed: int) -> tuple[float, list[float]]:
    """Exact success averaged over the updates, and the KL that each update logged."""
    method = METHODS[name].but(select=UniformPrompts(prompts=32, group_size=1), update=GradientSteps(epochs=4, minibatches=2))
    policy, task, kl = SpellPolicy(seed=seed), SpellGrid(), list[float]()

    def watch(run: Run, batch: Batch) -> float:
        kl.append(run.history[-1]["approx_kl"])
        return task.expected_success(policy)

    return fmean(train_on(method, policy, task, steps=UPDATES, seed=seed, watch=watch)), kl


def _faster(name: str, other: str) -> Evidence:
    """The gain of the first over the second in mean success, by seed and in standard errors."""
    gains = [_trained(name, seed)[0] - _trained(other, seed)[0] for seed in SEEDS]
    gain, error = fmean(gains), stdev(gains) / len(gains) ** 0.5
    found = {
        "success": {who: round(fmean(_trained(who, seed)[0] for seed in SEEDS), 4) for who in (name, other)},
        "gain by seed": [round(g, 4) for g in gains],
        "standard errors": round(gain / error, 2) if error else 0.0,
    }
    return Evidence(found, "a mean gain above two standard errors", gain > 2 * error)


@claim("with MPO's advantages, one ratio a turn learns faster than one ratio a token", slow=True)
def turn_ratio_helps() -> Evidence:
    return _faster("mpo", "token ratio")


@ablation(turn_ratio_helps, "one ratio a token: PPO's objective")
def token_ratio_does_not() -> Evidence:
    return _faster("token ratio", "token ratio")


# Ahead in the mean of a few seeds, but the gain is of the size of the differences between seeds.
@claim("MPO learns to walk faster than token PPO", slow=True, reproduced=False)
def beats_tokens() -> Evidence:
    return _faster("mpo", "token ppo")


# With one advantage a turn the same task is learned no more slowly, so what MPO gains here is not due to sharing inside turns.
@claim("sharing a turn's advantage among its tokens learns faster than one advantage a turn", slow=True, reproduced=False)
def beats_turns() -> Evidence:
    return _faster("mpo", "eta 0")


def _steady(name: str) -> Evidence:
    """In absolute terms: relative to its own mean, which is smaller too, the turn's KL varies no less."""
    spread = {who: fmean(pstdev(_trained(who, seed)[1]) for seed in SEEDS) for who in (name, "token ratio")}
    relative = {who: fmean(pstdev(_trained(who, seed)[1]) / fmean(_trained(who, seed)[1]) for seed in SEEDS) for who in spread}
    found = {"deviation": {k: round(v, 5) for k, v in spread.items()}, "relative": {k: round(v, 2) for k, v in relative.items()}}
    return Evidence(found, "deviation over updates at most 0.85 of the token ratio's", spread[name] <= 0.85 * spread["token ratio"])


# Smaller on average, by about as much as it differs between seeds.
@claim("from update to update the KL of the turn's ratio varies less than that of the token ratio", slow=True, reproduced=False)
def steady() -> Evidence:
    return _steady("mpo")


@ablation(steady, "one ratio a token")
def not_steady() -> Evidence:
    return _steady("token ratio")
