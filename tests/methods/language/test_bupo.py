"""BuPO: what it reduces to, whose gradient reaches what, the switch of phases, and internal policies of real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.internal import internal_policy, layer_entropy
from anypo.domains.language.toys.toy_arith import ToyArith, forced_batch
from anypo.domains.language.toys.transformer_policy import TransformerPolicy
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.bupo import METHOD, BottomUp, loss, phase
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import MissingSignal
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from tests.helpers import assert_continues, trained

FINAL = ClippedSurrogate(aggregation="token_mean", dual_clip=10.0)


def arith_run(method: Method, steps: int, out: Path | None = None) -> Run:
    task = ToyArith(small=True)
    task.prompts_per_step = 4
    run = Run(method, TransformerPolicy(width=16, layers=3, heads=2), task, steps=steps, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def rewarded(method: Method) -> Method:
    """With a reward that an untrained policy finds."""
    return method.but(reward=lambda batch, run: (batch.action[:, 0] % 2).float())


def parameters(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def some_states(seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(6, 4, 5, generator=g, dtype=torch.float64, requires_grad=True)
    unembed = torch.randn(7, 5, generator=g, dtype=torch.float64, requires_grad=True)
    action = torch.randint(7, (6, 4), generator=g)
    mask = torch.arange(4) < torch.tensor([4, 1, 3, 0, 2, 4])[:, None]
    return hidden, unembed, action, mask, torch.randn(6, generator=g, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 2])


def test_without_inner_steps_it_is_grpo() -> None:
    mine = train(arith_run(rewarded(METHOD.set("objective.inner_steps", 0)), 3))
    plain = train(arith_run(rewarded(GRPO.but(credit=METHOD.credit, objective=FINAL, regularize=())), 3))
    assert torch.equal(parameters(mine), parameters(plain))


def test_on_the_last_layer_it_is_grpo() -> None:
    mine = train(arith_run(rewarded(METHOD.set("objective.layer", 3)), 3))
    plain = train(arith_run(rewarded(GRPO.but(credit=METHOD.credit, objective=FINAL, regularize=())), 3))
    torch.testing.assert_close(parameters(mine), parameters(plain), atol=1e-5, rtol=1e-4)


def test_fresh_parameters_have_ratio_one_and_minus_the_mean_advantage() -> None:
    hidden, unembed, action, mask, reward, group = some_states()
    found = loss(hidden, hidden.detach(), unembed, action, mask, reward, group)
    advantage = METHOD.credit(Batch(action=action, mask=mask, logp=torch.zeros(6, 4), group=group, reward=reward), None)
    assert torch.equal(found.ratio, mask.to(found.ratio))
    torch.testing.assert_close(found.loss, -advantage[mask].mean())
    slopes = torch.autograd.grad(found.loss, (hidden, unembed))
    assert torch.isfinite(slopes[1]).all() and slopes[0][~mask].eq(0).all()


def test_padding_may_hold_anything_and_the_old_policy_has_no_gradient() -> None:
    hidden, unembed, action, mask, reward, group = some_states()
    clean = loss(hidden, hidden.detach() * 1.1, unembed, action, mask, reward, group)
    dirty = torch.where(mask[..., None], hidden.detach() * 1.1, torch.tensor(float("nan"), dtype=torch.float64)).requires_grad_()
    found = loss(hidden, dirty, unembed, action, mask, reward, group)
    assert torch.equal(found.loss, clean.loss)
    assert torch.autograd.grad(found.loss, dirty, allow_unused=True) == (None,)


def test_the_component_is_the_pure_loss() -> None:
    run = arith_run(rewarded(METHOD), 1)
    batch = step(run)  # moves the policy away from the one that acted
    policy: TransformerPolicy = run.policy  # type: ignore[assignment]
    run.version = 0
    tokens, where = policy.laid_out(batch.context, batch.action)

    def before(states: Tensor) -> Tensor:
        return states.gather(1, where[:, :-1, None].expand(-1, -1, states.shape[-1]))

    untrained = TransformerPolicy(width=16, layers=3, heads=2)
    old = before(untrained.layer_states(tokens, 1))
    torch.testing.assert_close(
        batch.signals["old_layer_logp_1"], internal_policy(old, untrained.output.weight, batch.action, batch.mask).logp
    )
    hidden = before(policy.layer_states(tokens, 1))
    mine = METHOD.objective(batch, policy.evaluate(batch, {"logp", "layer_logp_1"}), run).value
    logp = internal_policy(hidden, policy.output.weight, batch.action, batch.mask).logp
    ratio = (logp - batch.signals["old_layer_logp_1"]).exp()
    assert batch.reward is not None and batch.advantage is not None
    expected = -torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)[batch.mask].mean()
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_the_gradient_stops_at_the_layer(layer: int) -> None:
    policy = TransformerPolicy(width=16, layers=3, heads=2)
    policy.evaluate(forced_batch(policy, [("1+2=", "3"), ("9+9=", "18")]), {f"layer_logp_{layer}"})[f"layer_logp_{layer}"].sum().backward()
    for i, block in enumerate(policy.blocks):
        assert all((p.grad is not None and p.grad.abs().sum() > 0) == (i < layer) for p in block.parameters())
    assert policy.output.weight.grad is not None and policy.embedding.weight.grad is not None
    assert (policy.gain.grad is not None) == (layer == 3)


def test_the_phases_follow_the_optimizer_steps() -> None:
    assert phase(torch.tensor([1, 2, 3]), 2).tolist() == [1, 1, 0] and phase(torch.tensor([1]), 0).tolist() == [0]
    method = rewarded(METHOD.set("objective.inner_steps", 3).set("update.epochs", 2))  # the switch lies inside the second batch
    run = arith_run(method, 3)
    assert "layer_logp_1" in run.method.needs()
    train(run)
    assert [round(r["internal"], 2) for r in run.history] == [1.0, 0.5, 0.0]
    assert "layer_logp_1" not in run.method.needs()


def test_the_stream_is_the_model() -> None:
    policy = TransformerPolicy(width=16, layers=3, heads=2)
    batch = forced_batch(policy, [("1+2=", "3"), ("9+9=", "18")])
    tokens, _ = policy.laid_out(batch.context, batch.action)
    found = policy.stream(tokens)
    rebuilt = found.h0 + found.attn.sum(0) + found.ffn.sum(0)
    torch.testing.assert_close(
        torch.nn.functional.rms_norm(rebuilt, (16,)) * policy.gain, policy.layer_states(tokens, 3), atol=1e-5, rtol=0
    )
    entropy = layer_entropy(found.h0, found.attn, found.ffn, policy.output.weight)
    assert entropy.layer.shape == (4, *tokens.shape) and entropy.ffn.shape == (3, *tokens.shape)


def test_samples_are_scored_as_they_were_drawn() -> None:
    batch = step(arith_run(rewarded(METHOD), 1))
    policy = TransformerPolicy(width=16, layers=3, heads=2)
    seen = policy.evaluate(batch, {"logp", "layer_logp_3", "entropy"})
    torch.testing.assert_close(seen.logp, batch.logp, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(seen["layer_logp_3"], seen.logp)


def test_a_policy_without_layers_is_refused() -> None:
    with pytest.raises(MissingSignal, match="layer_logp_1"):
        trained(METHOD, 1)
    with pytest.raises(MissingSignal, match="layer_logp_9"):
        arith_run(METHOD.set("objective.layer", 9), 1)


def test_it_resumes(tmp_path: Path) -> None:
    method = rewarded(METHOD.set("objective.inner_steps", 1))

    def run_to(out: Path, upto: int) -> Run:
        run = arith_run(method, 4, out)
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)


def test_the_layers_of_a_language_model() -> None:
    from anypo.domains.language.models import load_policy

    policy = load_policy("builtin", token_budget=64)
    contexts = [policy.encode("1+2="), policy.encode("what is 7?"), policy.encode("1+2=")]
    action = torch.stack([policy.encode("abcd efgh ijkl")[:3] for _ in range(3)])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    batch = Batch(action=action, mask=mask, logp=torch.zeros(3, 3), group=torch.arange(3), context=contexts)
    found = policy.evaluate(batch, {"logp", "layer_logp_1", "layer_logp_2", "layer_logp_4"})
    torch.testing.assert_close(found["layer_logp_4"], found.logp, atol=1e-4, rtol=1e-4)
    for layer in (1, 2):
        for i, context in enumerate(contexts):
            states = policy.causal_lm(torch.cat([context, action[i]])[None], output_hidden_states=True).hidden_states[layer]
            before = states[:, len(context) - 1 : -1]
            expected = internal_policy(before, policy.network.scale * policy.network.head.weight, action[i : i + 1], mask[i : i + 1]).logp
            torch.testing.assert_close(found[f"layer_logp_{layer}"][i : i + 1], expected, atol=1e-4, rtol=1e-4)
    policy.zero_grad()
    found["layer_logp_1"].sum().backward()
    touched = {
        int(name.split("layers.")[1].split(".")[0]) for name, p in policy.named_parameters() if p.grad is not None and "layers." in name
    }
    assert touched == {0}
    assert BottomUp().needs <= {"old_" + n for n in policy.provides} | policy.provides
