"""GAE against a plain double loop and the golden cases; whitening; where one reward a row lands; ends by row and by action."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.seams.credit import GAE, GroupRelative, dense_reward, gae, group_relative, last_action, per_action_ends, whiten

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "cases" / "gae_sac.json").read_text())["cases"]


def cases(quantity: str) -> list[Any]:
    return [pytest.param(c, id=c["name"]) for c in GOLDEN if c["quantity"] == quantity]


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    inputs = {k: torch.tensor(v, dtype=torch.float64) for k, v in case["inputs"].items() if v is not None}
    return inputs | case["params"]


@pytest.mark.parametrize("case", cases("advantages"))
def test_gae_golden(case: dict[str, Any]) -> None:
    found = gae(**arguments(case))
    for name in ("advantages", "returns"):
        expected = torch.tensor(case["expected"][name], dtype=torch.float64)
        torch.testing.assert_close(getattr(found, name), expected, atol=case["atol"], rtol=0)


@pytest.mark.parametrize("case", cases("normalized_advantages"))
def test_whiten_golden(case: dict[str, Any]) -> None:
    found = whiten(**arguments(case))
    torch.testing.assert_close(found, torch.tensor(case["expected"], dtype=torch.float64), atol=case["atol"], rtol=0)


def naive_gae(
    reward: Tensor, value: Tensor, ended: Tensor, cut: Tensor, mask: Tensor, gamma: float, lam: float, following: Tensor
) -> Tensor:
    """A_t as the written-out sum over l of (gamma lam)^l delta_{t+l}, which stops behind the first end, cut or gap."""
    out = torch.zeros_like(reward)
    for n in range(reward.shape[0]):
        for t in range(reward.shape[1]):
            if not mask[n, t]:
                continue
            for k, weight in enumerate((gamma * lam) ** i for i in range(reward.shape[1] - t)):
                s = t + k
                if not mask[n, s]:
                    break
                out[n, t] += weight * (reward[n, s] + gamma * (0 if ended[n, s] else following[n, s]) - value[n, s])
                if ended[n, s] or cut[n, s]:
                    break
    return out


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.7, 1.0]))
def test_gae_equals_the_written_out_sum(seed: int, gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(seed)
    reward, value, following = (torch.randn(3, 6, generator=g, dtype=torch.float64) for _ in range(3))
    ended, cut, mask = (torch.rand(3, 6, generator=g) < p for p in (0.2, 0.2, 0.8))
    found = gae(reward, value, ended, cut, mask, gamma, lam, next_value=following)
    torch.testing.assert_close(found.advantages, naive_gae(reward, value, ended, cut, mask, gamma, lam, following))
    torch.testing.assert_close(found.returns, (found.advantages + value) * mask)


def simple(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(2, 5, generator=g, dtype=torch.float64) for _ in range(2))
    none = torch.zeros(2, 5, dtype=torch.bool)
    return {
        "reward": reward,
        "value": value,
        "terminated": none,
        "truncated": none,
        "mask": ~none,
        "bootstrap_value": torch.randn(2, generator=g).double(),
    }


def test_lambda_zero_is_the_one_step_error_and_gamma_zero_the_immediate_one() -> None:
    x = simple()
    following = torch.cat([x["value"][:, 1:], x["bootstrap_value"][:, None]], dim=1)
    torch.testing.assert_close(gae(**x, gamma=0.9, lam=0.0).advantages, x["reward"] + 0.9 * following - x["value"])
    torch.testing.assert_close(gae(**x, gamma=0.0, lam=0.7).advantages, x["reward"] - x["value"])


def test_lambda_one_is_the_discounted_return() -> None:
    x = simple()
    steps = torch.arange(5)
    discount = 0.9 ** (steps[None] - steps[:, None]).clamp(min=0) * (steps[None] >= steps[:, None])
    monte_carlo = x["reward"] @ discount.double().T + 0.9 ** (5 - steps) * x["bootstrap_value"][:, None]
    torch.testing.assert_close(gae(**x, gamma=0.9, lam=1.0).returns, monte_carlo)


def test_cut_with_a_worthless_next_state_is_termination() -> None:
    x = simple()
    end = torch.zeros(2, 5, dtype=torch.bool)
    end[:, 2] = True
    following = torch.randn(2, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    following[:, 2] = 0
    ended = gae(**(x | {"terminated": end}), gamma=0.9, lam=0.9, next_value=following)
    cut = gae(**(x | {"truncated": end}), gamma=0.9, lam=0.9, next_value=following)
    torch.testing.assert_close(ended.advantages, cut.advantages)


def test_padding_never_reaches_an_advantage() -> None:
    x = simple()
    mask = torch.tensor([[True, True, True, False, False], [False] * 5])
    wild = torch.where(mask, x["reward"], torch.full_like(x["reward"], float("nan")))
    found = gae(**(x | {"reward": wild, "value": torch.where(mask, x["value"], float("nan")), "mask": mask}), gamma=0.9, lam=0.9,
                next_value=torch.zeros(2, 5, dtype=torch.float64))  # fmt: skip
    assert torch.isfinite(found.advantages).all() and torch.isfinite(found.returns).all()
    assert found.advantages[~mask].eq(0).all()


def test_whitening_has_mean_zero_and_deviation_one_and_keeps_a_constant_at_zero() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 2
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    found = whiten(torch.where(mask, x, float("nan")), mask)
    assert found[mask].mean().abs() < 1e-12 and abs(found[mask].std(correction=0) - 1) < 1e-6
    assert found[~mask].eq(0).all()
    assert whiten(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool)).eq(0).all()
    assert whiten(x, torch.zeros(4, 6, dtype=torch.bool)).eq(0).all()


def batch_of(mask: list[list[int]], **fields: Any) -> Batch:
    inside = torch.tensor(mask, dtype=torch.bool)
    return Batch(
        action=torch.zeros(inside.shape, dtype=torch.int64),
        mask=inside,
        logp=torch.zeros(inside.shape),
        group=torch.zeros(len(inside), dtype=torch.int64),
        **fields,
    )


def test_one_reward_a_row_lands_on_its_last_action() -> None:
    mask = [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    assert last_action(torch.tensor(mask)).int().tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    batch = batch_of(mask, reward=torch.tensor([2.0, 3.0, 4.0]))
    assert dense_reward(batch).tolist() == [[0, 2, 0], [0, 0, 3], [0, 0, 0]]
    several = batch_of(mask, reward=torch.tensor([[2.0, 1.0], [3.0, 0.0], [4.0, 4.0]]), objectives=("a", "b"))
    assert dense_reward(several, (1.0, 10.0)).tolist() == [[0, 12, 0], [0, 0, 3], [0, 0, 0]]
    dense = torch.arange(9.0).view(3, 3)
    assert dense_reward(batch_of(mask, reward=dense)) is dense


def test_ends_of_rows_hold_at_the_last_action() -> None:
    batch = batch_of([[1, 1, 0], [1, 1, 1], [0, 0, 0]], terminated=torch.tensor([True, False, True]))
    terminated, truncated = per_action_ends(batch)
    assert terminated.int().tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert not truncated.any()


def test_group_relative_components_agree_with_the_function() -> None:
    reward = torch.tensor([1.0, 0.0, 3.0, 1.0])
    batch = batch_of([[1, 1], [1, 0], [1, 1], [0, 0]], reward=reward)
    batch.group = torch.tensor([7, 2, 7, 2])
    found = GroupRelative(std=False)(batch, None)  # type: ignore[arg-type]
    wanted = group_relative(reward, batch.group, std=False)
    assert found.tolist() == [[wanted[0]] * 2, [wanted[1], 0], [wanted[2]] * 2, [0, 0]]


def test_weights_of_several_rewards_must_match_their_number() -> None:
    batch = batch_of([[1], [1]], reward=torch.zeros(2, 2), objectives=("a", "b"))
    with pytest.raises(ValueError, match="3 weights for 2 rewards"):
        GroupRelative(weights=(1.0, 1.0, 1.0))(batch, None)  # type: ignore[arg-type]


def test_gae_component_leaves_the_value_targets() -> None:
    batch = batch_of([[1, 1], [1, 0]], reward=torch.tensor([1.0, 0.0]), terminated=torch.tensor([True, True]))
    batch.signals["old_value"] = torch.tensor([[0.5, 0.5], [0.5, 9.0]])
    advantage = GAE(gamma=1.0, lam=1.0, normalize=False)(batch, None)  # type: ignore[arg-type]
    assert advantage.tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    assert batch.signals["returns"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
