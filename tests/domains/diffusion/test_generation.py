"""Generation tasks, their policies and what they ship."""

import numpy as np
import pytest
import torch

from anypo import api
from anypo.domains.diffusion import builtin, denoise, rewards, setup
from anypo.domains.diffusion.policy import load
from anypo.domains.diffusion.sample import as_batch, sample
from anypo.domains.diffusion.tasks import Digits, Gaussians, pictures
from anypo.loops import on_policy
from anypo.methods.diffusion.flow_grpo import METHOD
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.seams.rollout import as_roots, continue_rows
from anypo.seams.update import flatten_actions

QUICK = {"evaluation_steps": 4, "evaluation_samples": 20}


def collected(name="digits:ink", samples=3):
    policy, task = setup.build(name, None, **QUICK)
    run = Run(METHOD, policy, task, steps=2, seed=0)
    return run, run.method.rollout([p.but(samples=samples) for p in task.prompts(4, run.rng)], run)


def test_a_batch_of_chains():
    run, batch = collected()
    assert batch.action.shape == batch.context.shape == (12, 10, 64)
    torch.testing.assert_close(batch.context[:, 1:], batch.action[:, :-1], rtol=0, atol=0)
    assert bool(batch.mask.all()) and bool(batch.logp.isfinite().all())
    assert batch.group.tolist() == [g for g in range(4) for _ in range(3)]
    assert len(set(batch.signals["prompt_id"].tolist())) == 4
    again = run.policy.observe(batch, {"logp", "mean"})
    torch.testing.assert_close(again.logp, batch.logp, rtol=0, atol=0)
    velocity = run.policy.observe(batch, {"velocity"})["velocity"].double()
    x = torch.cat([batch.context[:, :1], batch.action], dim=1).double()
    torch.testing.assert_close(denoise.logp(x, velocity, denoise.uniform_levels(10), 0.7, "sum").float(), batch.logp, rtol=1e-4, atol=1e-3)


def test_members_of_a_group_start_from_different_noise():
    _, batch = collected()
    start = batch.context[:, 0]
    assert bool((torch.cdist(start, start) + 100 * torch.eye(len(start)) > 1).all())


def test_signals_agree_with_one_another():
    run, batch = collected()
    found = run.policy.observe(batch, {"mean", "log_std", "entropy", "kl_old", "logp"})
    normal = torch.distributions.Normal(found.mean, found.log_std.exp())
    torch.testing.assert_close(normal.log_prob(batch.action).sum(-1), found.logp, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(normal.entropy().sum(-1), found.entropy, rtol=1e-5, atol=1e-4)
    assert float(found.kl_old.abs().max()) == 0


def test_a_batch_can_be_split_into_rows_and_into_single_steps():
    run, batch = collected()
    flat = flatten_actions(batch)
    assert len(flat) == 120 and flat.horizon == 1
    torch.testing.assert_close(run.policy.observe(flat, {"logp"}).logp.view(12, 10), batch.logp, rtol=1e-4, atol=1e-3)
    run.policy.rows_at_once = 35
    torch.testing.assert_close(run.policy.observe(batch, {"logp"}).logp, batch.logp, rtol=1e-4, atol=1e-3)


def test_steps_without_noise_are_not_trained():
    policy, task = setup.build("gaussians", None)
    schedule = denoise.ddim_schedule(denoise.uniform_levels(5), 1.0)
    prompt = torch.zeros(6, dtype=torch.int64)
    x = sample(policy, torch.randn(6, 2), None, schedule, torch.Generator().manual_seed(0))
    batch = as_batch(policy, x, None, schedule, prompt, prompt)
    assert batch.mask.tolist() == [[True] * 4 + [False]] * 6
    assert bool((batch.logp[:, 4] == 0).all())
    found = policy.observe(batch, {"logp", "entropy", "log_std", "mean", "kl_old"})
    assert all(bool(value.isfinite().all()) for value in found.values())


def test_rows_may_have_schedules_of_their_own():
    """Every chain noisy at one step of its own and deterministic elsewhere."""
    policy, _ = setup.build("gaussians", None)
    levels = denoise.uniform_levels(4)
    noisy, plain = denoise.sde_schedule(levels, 0.7), denoise.ode_schedule(levels)
    chosen = torch.arange(4)[:, None] == torch.arange(4)
    mixed = denoise.Schedule(levels, *(torch.where(chosen, a, b) for a, b in zip(noisy[1:], plain[1:], strict=True)))
    start = torch.randn(1, 2).expand(4, 2)
    x = sample(policy, start, None, mixed, torch.Generator().manual_seed(0))
    straight = sample(policy, start, None, plain)
    prompt = torch.arange(4)
    batch = as_batch(policy, x, None, mixed, prompt, prompt)
    assert torch.equal(batch.mask, chosen)
    for k in range(4):
        torch.testing.assert_close(x[k, : k + 1], straight[k, : k + 1])
        assert not torch.allclose(x[k, k + 1], straight[k, k + 1])


def test_chains_go_on_from_their_middle():
    run, batch = collected()
    rows, depth = torch.tensor([0, 0, 5, 7]), torch.tensor([3, 0, 9, 10])
    again = continue_rows(batch, rows, depth, run)
    for i, (row, d) in enumerate(zip(rows.tolist(), depth.tolist(), strict=True)):
        torch.testing.assert_close(again.action[i, :d], batch.action[row, :d], rtol=0, atol=0)
        assert d == 10 or not torch.allclose(again.action[i, d], batch.action[row, d])
    type(batch).concat([as_roots(batch), again])


def test_prompts_come_in_turn():
    task = Digits(**QUICK)
    ids = [p.id for p in task.prompts(20, np.random.default_rng(0))]
    assert sorted(ids[:10]) == list(range(10)) == sorted(ids[10:])


def test_the_models_that_ship_draw_what_they_were_trained_on():
    policy, task = setup.build("digits:ink", None)
    assert float(task.held_out(policy, 200)["recognized"].mean()) > 0.9
    policy, task = setup.build("gaussians", None)
    x = task.samples(policy, torch.zeros(400, dtype=torch.int64))
    nearest = torch.cdist(x, Gaussians.modes()).min(1)
    assert float((nearest.values < 0.5).float().mean()) > 0.95
    assert torch.bincount(nearest.indices, minlength=8).min() > 20


def test_what_ships_is_small():
    assert sum(path.stat().st_size for path in builtin.FOLDER.glob("*.safetensors")) < 1_000_000


def test_rewards_of_digits():
    white, half = torch.ones(1, 8, 8), torch.zeros(1, 8, 8)
    half[:, :, :4] = 1
    digit = torch.tensor([3])
    assert float(rewards.ink(white, digit)) == 1 and float(rewards.ink(half, digit)) == 0.5
    assert float(rewards.symmetry(white, digit)) == 1 and float(rewards.symmetry(half, digit)) == 0
    classifier = builtin.classifier()
    picture = torch.rand(5, 8, 8)
    every = torch.stack([rewards.digit_reward(f"classifier:{d}", classifier)(picture, digit.expand(5)) for d in range(10)])
    torch.testing.assert_close(every.sum(0), torch.ones(5))
    torch.testing.assert_close(rewards.digit_reward("classifier", classifier)(picture, digit.expand(5)), every[3])


def test_the_classifier_reads_real_digits():
    pytest.importorskip("sklearn")
    from anypo.domains.diffusion.builtin.pretrain import digits

    data, label = digits()
    seen = rewards.digit_probability(pictures(data), builtin.classifier()).argmax(-1)
    assert float((seen == label)[1::2].float().mean()) > 0.95  # the half it was not fitted to


def test_pretraining_learns():
    from anypo.domains.diffusion.builtin import pretrain

    trained = pretrain.train_flow("gaussians", lambda n, g: (Gaussians.data(n, g), None), steps=800, batch=64)
    data = Gaussians.data(2000, torch.Generator().manual_seed(1))
    losses = [
        float(pretrain.flow_matching_loss(m, data, None, torch.Generator().manual_seed(2)).detach())
        for m in (builtin.network("gaussians"), trained)
    ]
    assert losses[1] < 0.8 * losses[0]


def test_a_reward_function_of_ones_own():
    def dark(picture, digit):
        return -picture.mean((1, 2))

    result = api.train("flow_grpo", task=Digits(dark, **QUICK), steps=2)
    assert result.task == "digits:dark" and result.after["reward"] > result.before["reward"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("digits:colour", "unknown reward 'colour'"), ("digits:classifier:x", "unknown reward"), ("gaussians:9", "0 to 7"), ("faces", "unknown diffusion task")],
)  # fmt: skip
def test_unknown_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        setup.build(name, None)


def test_unknown_options_and_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="takes no such option"):
        setup.build("digits:ink", None, colour=3)
    with pytest.raises(ValueError, match="holds no saved flow policy"):
        setup.build("digits:ink", str(tmp_path))


def test_a_saved_policy_is_the_same_policy(tmp_path):
    policy, task = setup.build("digits:ink", None, **QUICK)
    with torch.no_grad():
        policy.network.layers[0].weight.add_(0.1)
    policy.save_pretrained(tmp_path)
    torch.testing.assert_close(task.samples(load(tmp_path), torch.arange(3)), task.samples(policy, torch.arange(3)), rtol=0, atol=0)


def test_methods_of_language_train_denoising_steps():
    """GRPO as it stands: the task's own schedule, sequence means, the estimated KL."""
    policy, task = setup.build("digits:ink", None, **QUICK)
    run = Run(GRPO, policy, task, steps=3, seed=0)
    on_policy.train(run)
    assert run.history[-1]["reward"] > run.history[0]["reward"] and all(np.isfinite(r["loss"]) for r in run.history)


@pytest.mark.parametrize("objective", ["cispo", "gspo", "dapo"])
def test_objectives_of_language_fit(objective):
    result = api.train("flow_grpo", task="digits:symmetry", steps=2, seams={"objective": objective}, **QUICK)
    assert result.after["reward"] > result.before["reward"]


def test_a_run_leaves_pictures_from_before_and_after(tmp_path):
    for name in ("digits:ink", "gaussians"):
        folder = tmp_path / name.replace(":", "_")
        api.train("flow_grpo", task=name, steps=1, out=folder, **QUICK)
        page = (folder / "report.html").read_text()
        assert "Pictures" in page and page.count("data:image/png;base64") >= 2
        found = api.evaluate(str(folder), k=(1,), samples=20, evaluation_steps=4)
        assert found["reward"]["low"] <= found["reward"]["value"] <= found["reward"]["high"]
