"""Order flow: features without look-ahead, what rewards and losses reduce to, the market as environment, recorded books, and the method in the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.control.order_book import Market, OrderFlow, Quotes, Simulator, ofi, read_order_book, spread_reward, window_feature
from anypo.domains.control.setup import build
from anypo.domains.control.tasks import GymTask
from anypo.loops.on_policy import step, train
from anypo.methods.control.orderflow import (
    METHOD,
    VARIANTS,
    QTable,
    losses,
    metrics,
    q_learning,
    shaped,
    shaped_advantages,
    trade,
    window_loss,
)
from anypo.run import Run
from tests.helpers import assert_continues, assert_resumes_on_cartpole, gradient, random_rows

QUOTES = Market(steps=8).window(np.random.default_rng(0))


def test_flow_counts_bids_up_and_asks_down() -> None:
    prices, sizes = [10.0, 10.0], [5.0, 5.0]
    asks = [11.0, 11.0]
    assert ofi(prices, [5.0, 8.0], asks, sizes).tolist() == [0.0, 3.0]
    assert ofi(prices, sizes, asks, [5.0, 8.0]).tolist() == [0.0, -3.0]
    assert ofi(prices, sizes, [11.0, 12.0], [5.0, 7.0]).tolist() == [0.0, 5.0]  # the ask was eaten
    assert ofi([10.0, 9.0], [5.0, 7.0], asks, sizes).tolist() == [0.0, -5.0]


@pytest.mark.parametrize("window", [1, 5, 20])
def test_features_know_nothing_of_later_events(window: int) -> None:
    whole = window_feature(*QUOTES, window=window)
    cut = window_feature(*(x[:23] for x in QUOTES), window=window)
    np.testing.assert_array_equal(whole[:23], cut)
    k, events = 22, ofi(*QUOTES)[max(0, 22 - window + 1) : 23]
    depth = ((QUOTES.bid_size + QUOTES.ask_size) / 2)[max(0, k - window + 1) : k + 1].mean()
    assert whole[k] == pytest.approx(events.sum() / (depth + 1e-8))


def test_without_cost_and_with_spread_1_the_reward_is_the_move() -> None:
    rng = np.random.default_rng(0)
    action, mid = rng.integers(-1, 2, (3, 6)), rng.standard_normal((3, 7))
    np.testing.assert_array_equal(spread_reward(action, mid, np.ones((3, 6)), 0.0), action * np.diff(mid))


def test_losses_and_advantages_reduce() -> None:
    rows = random_rows(3)
    reward = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(shaped(reward, 0.0), reward)
    torch.testing.assert_close(shaped(reward, 2.0), torch.where(reward < 0, 3 * reward, reward))
    lone = shaped_advantages(reward, rows.mask, torch.arange(8), 1.0)
    same = shaped_advantages(reward[:1].expand(8, 5), torch.ones(8, 5, dtype=torch.bool), torch.zeros(8, dtype=torch.int64), 1.0)
    assert not lone.any() and not same.any()
    one = random_rows(4, horizon=1)
    found = losses(one.logp, one.old_logp, one.advantages, one.mask, 0.2)
    torch.testing.assert_close(found.grpo, found.gspo)
    still = losses(rows.old_logp, rows.old_logp, rows.advantages, rows.mask, 0.2)
    torch.testing.assert_close(still.grpo, -rows.advantages.mean())
    torch.testing.assert_close(still.gspo, -rows.advantages.mean())
    complete = shaped_advantages(reward, rows.mask, torch.zeros(8, dtype=torch.int64), 1.0)
    assert abs(float(losses(rows.old_logp, rows.old_logp, complete[:, 0], rows.mask, 0.2).gspo)) < 1e-12


def test_the_window_ratio_has_the_gradient_of_its_formula() -> None:
    rows = random_rows(5)
    logp = rows.logp.clone().requires_grad_()
    length = rows.mask.sum(1)
    ratio = (torch.where(rows.mask, logp - rows.old_logp, 0.0).sum(1) / length).exp()
    direct = -torch.minimum(ratio * rows.advantages, ratio.clamp(0.8, 1.2) * rows.advantages).mean()
    spread = rows.advantages[:, None].expand_as(logp)
    mine = window_loss(logp, rows.old_logp, spread, rows.mask, 0.2)
    torch.testing.assert_close(mine, direct)
    torch.testing.assert_close(gradient(mine, logp), gradient(direct, logp))
    padded = torch.where(rows.mask, rows.logp, -torch.inf)
    torch.testing.assert_close(window_loss(padded, torch.where(rows.mask, rows.old_logp, -torch.inf), spread, rows.mask, 0.2), direct)


def test_drawdown_starts_at_zero_equity() -> None:
    found = metrics(torch.tensor([[-1.0, 0.5, -2.0], [1.0, -0.25, 1.0]]))
    assert found.max_drawdown.tolist() == [2.5, 0.25] and found.net_pnl.tolist() == [-2.5, 1.75] and found.profitability == 0.5


def test_the_table_learns_one_transition_after_another() -> None:
    table = q_learning(torch.zeros(2, 3), torch.tensor([[0.0, 1.0, 2.0, 1.0], [1.0, 0.0, 0.0, 0.0]]), alpha=0.5, gamma=0.5)
    assert table.tolist() == [[0.0, 1.0, 0.0], [0.25, 0.0, 0.0]]
    task = GymTask("OrderFlow-v0")
    start = QTable([-1.0, 0.0, 1.0])
    seen = trade(task, start.actor(np.random.default_rng(0)), [1, 2])
    start.learn(seen)
    assert start.table.any() and set(np.unique(start.index(seen.observation)) % 3) <= {0, 1, 2}


def test_the_book_stays_in_order_and_beta_0_is_symmetric() -> None:
    quotes = Simulator(beta=1.0)(2000, np.random.default_rng(0))
    assert (quotes.ask_price > quotes.bid_price).all() and min(quotes.bid_size.min(), quotes.ask_size.min()) >= 1
    assert max(quotes.bid_size.max(), quotes.ask_size.max()) <= 80 and np.abs(np.diff(quotes.bid_price)).max() <= 1
    assert set(np.unique(quotes.ask_price - quotes.bid_price)) == {1.0, 2.0}


def test_an_episode_earns_what_the_equation_says() -> None:
    market = OrderFlow(steps=12)
    rng = np.random.default_rng(1)
    market.reset(seed=7)
    mid, spread = (x[:, 0] for x in market.dynamics.known(market.state[:, None])[:2])
    actions, gains = rng.integers(0, 3, 12), []
    for t, action in enumerate(actions):
        seen, gain, done, _, _ = market.step(action)
        gains.append(gain)
        assert done == (t == 11) and seen[-1] == action - 1 and seen[4] == spread[t + 1]
    np.testing.assert_allclose(gains, spread_reward(actions[None] - 1, mid[None], spread[None, :-1], 0.05)[0])


def test_a_group_meets_one_market() -> None:
    policy, task = build("OrderFlow-v0", None, hidden=(8, 8))
    batch = step(Run(METHOD.set("select.prompts", 2).set("select.group_size", 3), policy, task, steps=1))
    market = batch.context[..., :-1].unflatten(0, (2, 3))
    assert torch.equal(market, market[:, :1].expand_as(market)) and not torch.equal(market[0], market[1])
    assert len(batch.action.unique(dim=0)) == 6 and batch.horizon == 100 and batch.terminated[:, -1].all()
    assert not batch.advantage.requires_grad and abs(float(batch.advantage.sum())) < 1e-2
    torch.testing.assert_close(batch.reward, shaped(batch.signal("raw_reward"), 1.0))


def test_a_recorded_book_takes_the_simulators_place(tmp_path: Path) -> None:
    rows = np.stack([QUOTES.ask_price * 100, QUOTES.ask_size, QUOTES.bid_price * 100, QUOTES.bid_size], axis=1)
    bad = [[100.0, 5, 100.0, 5], [100.0, 5, 200.0, 5], [9999999999.0, 0, 100.0, 5]]
    file = tmp_path / "AMZN_orderbook_1.csv"
    np.savetxt(file, np.concatenate([rows[:5], bad, rows[5:]]), delimiter=",", fmt="%d")
    assert all(np.array_equal(a, b) for a, b in zip(read_order_book(file), QUOTES, strict=True))
    market = OrderFlow(data=file, steps=7, cost=0.5)
    seen, _ = market.reset(seed=0)
    assert np.isfinite(seen).all() and isinstance(market.dynamics.recorded, Quotes)
    with pytest.raises(ValueError, match="set fewer steps"):
        OrderFlow(data=file, steps=8, every=6)
    (tmp_path / "crossed.csv").write_text("100,5,100,5\n")
    with pytest.raises(ValueError, match="no row with a bid below an ask"):
        read_order_book(tmp_path / "crossed.csv")
    (tmp_path / "words.csv").write_text("ask,bid\n")
    with pytest.raises(ValueError, match="not a LOBSTER orderbook file"):
        read_order_book(tmp_path / "words.csv")


@pytest.mark.parametrize("name", ["", "gspo", "ppo"])
def test_it_trains_resumes_and_runs_on_cartpole(name: str, tmp_path: Path) -> None:
    method = VARIANTS.get(name, METHOD).set("select.prompts", 2)

    def run_to(out: Path, upto: int) -> Run:
        policy, task = build("OrderFlow-v0", None, hidden=(8, 8), horizon=30)
        run = Run(method, policy, task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path / "here", "loss")
    assert_resumes_on_cartpole(method, tmp_path / "cartpole")
