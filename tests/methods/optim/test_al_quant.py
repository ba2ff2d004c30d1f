import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anypo import api
from anypo.domains.optim.rules import Adafactor, Adam, Came, ProjectedAdam, clip_rms
from anypo.methods.optim.al_quant import (
    AlAdafactor,
    AlCame,
    AlOptimizer,
    AlProjected,
    LogQuantizer,
    UniformQuantizer,
    al,
    drift,
    momentum,
    update_error,
)
from tests.helpers import parameter_pair, side_by_side

OPTIMIZERS = [AlOptimizer, AlAdafactor, AlCame, AlProjected]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e30)), min_size=1, max_size=40), st.sampled_from([2, 4, 8, 16]), st.integers(1, 50)
)
def test_zero_if_and_only_if_zero_and_bounded_relative_error(values, bits, block):
    x = torch.tensor(values, dtype=torch.float64)
    found = al(x, bits, block)
    assert torch.equal(found.codes == 0, x == 0) and torch.equal(found.values == 0, x == 0)
    assert found.codes.max() < 2**bits
    spread = (found.hi - found.lo).repeat_interleave(block)[: len(x)]
    some = x > 0
    ratio = (found.values[some].log() - x[some].log()).abs()
    assert (ratio <= spread[some] / (2 * (2**bits - 2)) + 1e-9 * (1 + x[some].log().abs())).all()


def test_one_or_two_distinct_values_and_zeros_are_lossless():
    for values in ([0.0] * 5, [3e-7, 0.0, 3e-7], [0.3, 7e-5, 0.0, 0.3, 7e-5]):
        x = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(al(x, 4, 8).values, x, rtol=1e-12, atol=0)


def test_many_bits_are_exact():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).double().exp()
    torch.testing.assert_close(al(x, 40, 50).values, x, rtol=1e-10, atol=0)
    assert float(update_error(x, x, 40, 50).update) < 1e-9
    grads = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(*drift(grads, 40, 30, 0.9), rtol=1e-9, atol=0)


@pytest.mark.parametrize("bits", [8, 16])
def test_storage_keeps_the_ends_exactly_and_agrees_with_the_pure_function(bits):
    x = (4 * torch.randn(7, 60, generator=torch.Generator().manual_seed(0))).exp()
    x[0, :9], x[6, 0] = 0.0, 1e-38  # denormal in 32 bits
    quantizer = LogQuantizer(bits, 256)
    stored = quantizer.encode(x)
    found = quantizer.decode(stored, x.shape)
    assert found[6, 0] == x[6, 0] and found.max() == x.max() and ((found == 0) == (x == 0)).all()
    torch.testing.assert_close(found.flatten(), al(x.flatten(), bits, 256).values, rtol=1e-6, atol=0)
    assert stored.codes.element_size() * 8 == bits


def test_momentum_storage():
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    quantizer = UniformQuantizer(256)
    found = quantizer.decode(quantizer.encode(x), x.shape)
    torch.testing.assert_close(found, momentum(x, 256).values)
    assert (found - x).abs().max() <= x.abs().max() / 254 * 1.001
    assert quantizer.decode(quantizer.encode(torch.zeros(300)), x.shape).abs().max() == 0


def test_protected_tensors_are_the_plain_optimizer():
    for role, below in (("norm", 0), ("weight", 10**9)):
        pair, gradients = parameter_pair((40, 50))
        mine = AlOptimizer([{"params": [pair[0]], "role": role}], lr=0.01, weight_decay=0.1, protect_below=below)
        side_by_side((mine, torch.optim.AdamW([pair[1]], lr=0.01, weight_decay=0.1)), pair, gradients)
        torch.testing.assert_close(pair[0], pair[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_first_step_is_exact_and_later_ones_are_near(optimizer):
    pair, gradients = parameter_pair((40, 50))
    mine, exact = optimizer([pair[0]], lr=0.01, protect_below=0), optimizer([pair[1]], lr=0.01, protect_below=10**9)
    side_by_side((mine, exact), pair, gradients[:1])
    assert torch.equal(pair[0], pair[1])
    before = pair[1].detach().clone()
    side_by_side((mine, exact), pair, gradients[1:])
    assert not torch.equal(pair[0], pair[1])
    assert (pair[0] - pair[1]).norm() < 0.1 * (pair[1] - before).norm()


def test_what_is_stored_follows_the_plan():
    expected = {
        AlOptimizer: {"m": torch.int8, "v": torch.uint8},
        AlAdafactor: {"row": torch.uint8, "col": torch.uint8},
        AlCame: {
            "m": torch.int8,
            "row": torch.uint16,
            "col": torch.uint16,
            "instability_row": torch.uint16,
            "instability_col": torch.uint16,
        },
        AlProjected: {"m": torch.int8, "v": torch.uint8},
    }
    for optimizer, states in expected.items():
        parameter = nn.Parameter(torch.zeros(40, 50))
        mine = optimizer([parameter], protect_below=0)
        parameter.grad = torch.randn(40, 50)
        mine.step()
        found = {k.removesuffix("_codes"): v.dtype for k, v in mine.state[parameter].items() if k.endswith("_codes")}
        assert found == states
    assert mine.state[parameter]["projection"].shape == (40, 32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_exactly(optimizer, dtype):
    pair, gradients = parameter_pair((40, 50))
    pair, gradients = [nn.Parameter(p.detach().to(dtype)) for p in pair], [g.to(dtype) for g in gradients]
    whole, first = (optimizer([p], lr=0.01, protect_below=0) for p in pair)
    side_by_side((whole, first), pair, gradients[:3])
    second = optimizer([pair[1]], lr=0.01, protect_below=0)
    second.load_state_dict(first.state_dict())
    side_by_side((whole, second), pair, gradients[3:])
    assert torch.equal(pair[0], pair[1])


@pytest.mark.parametrize("rule", [Adam(), Adafactor(), Came(), ProjectedAdam(rank=2)])
@pytest.mark.parametrize("shape", [(), (6,), (6, 5), (4, 3, 2)])
def test_rules_stay_finite_on_any_shape_and_on_entries_without_gradient(rule, shape):
    states, generator = {}, torch.Generator().manual_seed(0)
    for t in range(1, 6):
        gradient = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            gradient[0], gradient[:, 1] = 0.0, 0.0  # a dead row and a dead column, crossing
        elif t < 3:
            gradient = torch.zeros(shape)
        direction = rule.direction(gradient, states, t)
        assert direction.shape == shape and direction.isfinite().all()
        if len(shape) == 2 and not isinstance(rule, ProjectedAdam):
            assert (direction[0] == 0).all() and (direction[:, 1] == 0).all()
    assert set(rule.kinds) | {"projection"} >= set(states)


def test_full_rank_projection_of_a_diagonal_gradient_is_adam_and_moments_follow_a_change():
    gradient = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))[:, :3]
    found = ProjectedAdam(rank=3).direction(gradient, {}, 1)
    torch.testing.assert_close(found, gradient.sign(), rtol=1e-5, atol=1e-5)
    states, generator = {}, torch.Generator().manual_seed(0)
    rule = ProjectedAdam(rank=2, every=2)
    for t in range(1, 4):
        before = {name: value.clone() for name, value in states.items()}
        gradient = torch.randn(5, 4, generator=generator)
        rule.direction(gradient, states, t)
    turn = states["projection"].T @ before["projection"]
    assert not torch.allclose(turn, torch.eye(2), atol=1e-3)
    fresh = states["projection"].T @ gradient
    torch.testing.assert_close(states["m"], 0.9 * turn @ before["m"] + 0.1 * fresh)
    torch.testing.assert_close(states["v"], 0.999 * turn.square() @ before["v"] + 0.001 * fresh.square())


def test_clip_leaves_small_updates_alone():
    x = torch.randn(30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(clip_rms(x, 10.0), x)
    assert float(clip_rms(x, 0.5).square().mean().sqrt()) == pytest.approx(0.5, rel=1e-5)


def test_idle_entries_stay_idle_and_wake_as_in_full_precision():
    pair, _ = parameter_pair((64, 32))
    optimizers = AlOptimizer([pair[0]], lr=0.01, protect_below=0), torch.optim.Adam([pair[1]], lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        gradient = torch.randn(64, 32, generator=generator)
        gradient[:, 0] *= step == 19
        before = [p.detach()[:, 0].clone() for p in pair]
        side_by_side(optimizers, pair, [gradient])
    moved = [p.detach()[:, 0] - b for p, b in zip(pair, before, strict=True)]
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-7)


def test_bad_settings_get_a_sentence():
    with pytest.raises(ValueError, match="8 or 16 bits"):
        LogQuantizer(5)
    with pytest.raises(ValueError, match="needs lr > 0"):
        AlCame([nn.Parameter(torch.zeros(1))], lr=0.0)


@pytest.mark.parametrize("name", ["al_quant", "al_adafactor", "al_came", "al_projected"])
def test_any_method_takes_it(name):
    result = api.train("grpo", task="token_bandit", steps=3, settings={"update.optimizer": name, "update.learning_rate": 0.03})
    assert result.after["pass@1"] > result.before["pass@1"] and math.isfinite(result.after["pass@1"])
