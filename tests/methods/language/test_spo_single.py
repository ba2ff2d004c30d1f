import torch

from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.spo_single import (
    METHOD,
    TRACKER,
    PrioritizedPrompts,
    advantages,
    init,
    recalled,
    remembered,
    rho,
    update,
    weights,
)
from anypo.seams.credit import whiten
from tests.helpers import assert_resumes, assert_trains, random_rows, trained


def test_without_forgetting_the_value_is_the_running_frequency():
    rewards = torch.bernoulli(torch.full((50,), 0.3, dtype=torch.float64), generator=torch.Generator().manual_seed(0))
    alpha, beta = torch.tensor([0.5]).double(), torch.tensor([0.5]).double()
    for i, reward in enumerate(rewards):
        alpha, beta, value = update(reward[None], alpha, beta, torch.ones(1).double())
        torch.testing.assert_close(value, (rewards[: i + 1].sum() + 0.5)[None] / (i + 2))


def test_constant_forgetting_is_an_exponential_window():
    rewards = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alpha, beta = torch.zeros(1).double(), torch.zeros(1).double()
    for reward in rewards:
        alpha, beta, _ = update(reward[None], alpha, beta, torch.tensor([0.9], dtype=torch.float64))
    torch.testing.assert_close(alpha, (rewards * 0.9 ** torch.arange(299, -1, -1).double()).sum()[None])
    torch.testing.assert_close(alpha + beta, torch.tensor([10 * (1 - 0.9**300)], dtype=torch.float64))  # the window 1 / (1 - rho)


def test_far_shift_forgets_fastest_and_a_first_visit_slowest():
    rows = random_rows()
    far = rho(rows.old_logp, rows.old_logp - 50, rows.mask, torch.ones(8))
    assert torch.equal(far.rho, torch.full((8,), 0.875, dtype=torch.float64))
    first = rho(rows.old_logp, rows.old_logp - 50, rows.mask, torch.zeros(8))
    assert torch.equal(first.rho, torch.full((8,), 0.96, dtype=torch.float64)) and not first.shift.any()


def test_equal_values_are_a_whitened_global_baseline():
    reward = torch.rand(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ones = torch.full((12,), 3.0).double()
    found = advantages(reward, ones, 2 * ones, ddof=0)
    torch.testing.assert_close(found.advantages, whiten(reward[:, None], torch.ones(12, 1).bool())[:, 0])


def test_padding_and_empty_rows_do_not_count():
    rows = random_rows()
    mask = rows.mask.clone()
    mask[3] = False
    padded = torch.where(mask, rows.logp, -torch.inf)
    clean = rho(rows.old_logp, torch.where(mask, rows.logp, 0.0), mask, torch.ones(8))
    dirty = rho(torch.where(mask, rows.old_logp, torch.nan), padded, mask, torch.ones(8))
    torch.testing.assert_close(dirty.shift, clean.shift)
    assert dirty.shift[3] == 0


def test_no_signal_is_zero_not_nan():
    one = torch.ones(1).double()
    assert advantages(one, one, one).advantages.tolist() == [0.0]
    assert not advantages(torch.ones(5).double(), torch.ones(5).double(), torch.ones(5).double()).advantages.any()


def test_without_offline_samples_the_tracker_is_one_half():
    assert init(torch.zeros(3), 0).value.tolist() == [0.5] * 3
    assert weights(*init(torch.tensor([4.0, 8.0]), 8)[:2]).prob.sum() == 1


def test_the_advantage_uses_the_tracker_from_before():
    run = trained(METHOD, 1)
    before = {i: init(torch.zeros(1), 8) for i in range(4)}
    assert set(run.state[TRACKER]) == set(before)
    totals = torch.tensor(list(run.state[TRACKER].values())).double().sum(1)
    torch.testing.assert_close(totals, torch.full((4,), 0.96 * 8 + 1, dtype=torch.float64))  # first visit: rho_max, then one reward


def test_a_stored_response_comes_back_whole():
    run = trained(METHOD, 1)
    batch = run.collect(METHOD.select(run.task, run))
    back = recalled([remembered(batch, i) for i in range(len(batch))], batch)
    assert torch.equal(back.action, batch.action) and torch.equal(back.logp, batch.logp) and torch.equal(back.mask, batch.mask)


def test_prompts_repeat_where_the_task_has_too_few():
    run = trained(METHOD.but(select=PrioritizedPrompts(prompts=9)), 3)
    assert run.finished and len(run.state[TRACKER]) == 4


def test_other_selects_start_from_one_half():
    run = trained(METHOD.but(select=GRPO.select), 2)
    assert len(run.state[TRACKER]) == 4


def test_trains_and_resumes(tmp_path):
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)
