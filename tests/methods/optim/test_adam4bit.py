import pytest
import torch
from torch import nn

from anypo import api
from anypo.domains.optim.quantizer import BlockQuantizer, Packed
from anypo.methods.optim.adam4bit import (
    Adam4bit,
    RankOneQuantizer,
    Sgd4bit,
    StochasticBlocks,
    adamw_step,
    de_map,
    factored_v,
    linear_map,
    quantize_m,
    quantize_v,
    rank1_scale,
)
from tests.helpers import parameter_pair, side_by_side


@pytest.mark.parametrize("factored", [False, True])
def test_small_vectors_are_32_bit_adamw(factored):
    pair, gradients = parameter_pair(100)
    mine = Adam4bit([pair[0]], lr=0.01, weight_decay=0.1, factored=factored)
    side_by_side((mine, torch.optim.AdamW([pair[1]], lr=0.01, weight_decay=0.1)), pair, gradients)
    torch.testing.assert_close(pair[0], pair[1], rtol=1e-6, atol=1e-7)


def test_the_first_step_is_32_bit_adamw_and_later_ones_are_not():
    pair, gradients = parameter_pair((80, 64))
    optimizers = Adam4bit([pair[0]], lr=0.01, weight_decay=0.1), torch.optim.AdamW([pair[1]], lr=0.01, weight_decay=0.1)
    side_by_side(optimizers, pair, gradients[:1])
    torch.testing.assert_close(pair[0], pair[1], rtol=1e-6, atol=1e-7)
    side_by_side(optimizers, pair, gradients[1:])
    assert not torch.equal(pair[0], pair[1])


def test_the_optimizer_follows_the_pure_function():
    pair, gradients = parameter_pair((16, 24))
    optimizer = Adam4bit([pair[0]], lr=0.01, weight_decay=0.1, min_size=1)
    p, m, v = pair[1].data, torch.zeros(16, 24), torch.zeros(16, 24)
    for t, gradient in enumerate(gradients, 1):
        pair[0].grad = gradient
        optimizer.step()
        p, m, v = adamw_step(p, gradient, m, v, t, 0.01, wd=0.1)
        torch.testing.assert_close(pair[0].data, p, rtol=1e-5, atol=1e-6)


def test_rank1_scale_of_products_and_of_equal_rows():
    a, b = torch.rand(5).double(), torch.rand(7).double()
    torch.testing.assert_close(rank1_scale(a[:, None] * b), torch.minimum(a[:, None] * b.max(), b * a.max()))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    x[:, 0] = 9.0  # every row has the same maximum
    torch.testing.assert_close(rank1_scale(x), x.abs().amax(0).expand(6, 4))


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_rank1_scale_bounds_every_entry_in_any_number_of_axes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    assert (rank1_scale(x) >= x.abs()).all()
    stored = RankOneQuantizer(linear_map()).encode(x.square())
    assert stored.scale.shape == (sum(shape),)
    torch.testing.assert_close(RankOneQuantizer(linear_map()).decode(stored, x.shape), quantize_v(x.square()).values)


def test_positive_second_moments_never_become_zero_and_zero_rows_stay_zero():
    v = 10 ** (-12 * torch.rand(40, 30, generator=torch.Generator().manual_seed(0)).double())
    v[7] = 0
    found = quantize_v(v).values
    assert ((found > 0) == (v > 0)).all()
    assert (found >= rank1_scale(v) / 16).all() and (found <= rank1_scale(v)).all()


def test_values_on_the_map_are_lossless():
    x = torch.cat([de_map() * 3.7, torch.zeros(16).double()])
    found = quantize_m(x, 16)
    torch.testing.assert_close(found.values, x)
    assert found.scale.tolist() == [3.7, 0.0]
    v = linear_map()[None] * torch.tensor([[2.0], [1.0]]).double()
    v[1] = 1.0 / 16 * torch.arange(1, 17)
    torch.testing.assert_close(quantize_v(v[:1]).values, v[:1])


def test_maps():
    assert len(de_map()) == len(de_map(signed=False)) == len(linear_map()) == 16
    without = de_map(signed=False, zero=False)
    assert without.min() > 0 and torch.equal(without[1:], de_map(signed=False)[1:])


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_packing_halves_the_codes_and_changes_nothing(count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    plain = BlockQuantizer(de_map(), 128)
    stored = Packed(plain).encode(x)
    assert stored.codes.shape == ((count + 1) // 2,) and stored.codes.dtype == torch.uint8
    assert torch.equal(Packed(plain).decode(stored, x.shape), plain.decode(plain.encode(x), x.shape))


def test_states_take_an_eighth_of_the_bytes_and_one_means_much_less():
    pair, gradients = parameter_pair((128, 128))
    optimizers = Adam4bit([pair[0]]), Adam4bit([pair[1]], factored=True)
    side_by_side(optimizers, pair, gradients[:2])
    whole = 8 * 128 * 128
    assert optimizers[0].state_bytes() / whole < 0.15 and optimizers[1].state_bytes() == 128 * 128 // 2 + 4 * 128 + 4 * 256


def test_factored_second_moment_is_adam_on_squares_of_rank_one():
    pair, _ = parameter_pair((80, 64))
    generator = torch.Generator().manual_seed(0)
    gradient = torch.rand(80, 1, generator=generator) * torch.rand(1, 64, generator=generator)
    optimizers = Adam4bit([pair[0]], lr=0.01, factored=True, min_size=10**6), torch.optim.Adam([pair[1]], lr=0.01)
    side_by_side(optimizers, pair, [gradient, 0.5 * gradient, 2 * gradient])
    torch.testing.assert_close(pair[0], pair[1], rtol=1e-4, atol=1e-5)
    square = gradient.square()
    torch.testing.assert_close(factored_v(square.mean(1), square.mean(0)), square)


def test_stochastic_rounding_keeps_the_mean():
    x = torch.rand(128, generator=torch.Generator().manual_seed(0)).double()
    torch.manual_seed(0)
    quantizer = StochasticBlocks(de_map(), 128)
    mean = torch.stack([quantizer.decode(quantizer.encode(x), x.shape) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, x, rtol=0, atol=0.02)
    assert (quantize_m(x).values - x).abs().max() > 0.05


def test_sgd_is_torchs_on_small_tensors_and_near_it_on_large_ones():
    for shape, tolerance in ((50, 1e-6), ((80, 64), 0.4)):
        pair, gradients = parameter_pair(shape)
        start = pair[1].detach().clone()
        side_by_side((Sgd4bit([pair[0]], lr=0.1), torch.optim.SGD([pair[1]], lr=0.1, momentum=0.9)), pair, gradients)
        assert (pair[0] - pair[1]).norm() < tolerance * (pair[1] - start).norm()


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_exactly(factored, dtype):
    pair, gradients = parameter_pair((80, 65))
    pair, gradients = [nn.Parameter(p.detach().to(dtype)) for p in pair], [g.to(dtype) for g in gradients]
    whole, first = (Adam4bit([p], lr=0.01, factored=factored) for p in pair)
    side_by_side((whole, first), pair, gradients[:3])
    second = Adam4bit([pair[1]], lr=0.01, factored=factored)
    second.load_state_dict(first.state_dict())
    side_by_side((whole, second), pair, gradients[3:])
    assert torch.equal(pair[0], pair[1])


def test_full_precision_groups_keep_32_bits():
    pair, gradients = parameter_pair((100, 64))
    mine = Adam4bit([{"params": [pair[0]], "full_precision": True}], lr=0.01)
    side_by_side((mine, torch.optim.Adam([pair[1]], lr=0.01)), pair, gradients)
    torch.testing.assert_close(pair[0], pair[1], rtol=1e-6, atol=1e-7)


def test_bad_hyper_parameters_get_a_sentence():
    for options, message in (({"lr": -1.0}, "needs lr > 0"), ({"betas": (1.0, 0.9)}, "betas in")):
        with pytest.raises(ValueError, match=message):
            Adam4bit([nn.Parameter(torch.zeros(1))], **options)


@pytest.mark.parametrize("name", ["adam4bit", "sgd4bit"])
def test_any_method_takes_it(name):
    rate = {"adam4bit": 0.1, "sgd4bit": 1.0}[name]
    result = api.train("grpo", task="token_bandit", steps=3, settings={"update.optimizer": name, "update.learning_rate": rate})
    assert result.after["pass@1"] > result.before["pass@1"]
