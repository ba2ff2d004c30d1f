"""LAC: what its loss reduces to, its pitfalls, and that latents and flow steps train as one trajectory, save and resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.diffusion.alignment import alignment_loss
from anypo.domains.diffusion.latent_flow import ROLES, LatentFlow
from anypo.domains.diffusion.policy import FlowPolicy
from anypo.domains.diffusion.sample import as_batch
from anypo.domains.diffusion.scenes import QUADRANTS, TABLE, Scenes, arranged, pairs
from anypo.domains.diffusion.setup import build, load
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import advantages
from anypo.methods.diffusion.flow_grpo import loss as flow_loss
from anypo.methods.diffusion.lac import METHOD, gaussian_kl, latent_logp, loss, surrogate
from anypo.run import Run
from tests.helpers import assert_continues

GROUP = torch.tensor([0, 0, 0, 1, 1, 1])


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.arange(4) < torch.tensor([4, 2, 4, 1, 4, 3])[:, None]
    lat, flow = draw(6, 4), draw(6, 5)
    return {
        "lat_logp": lat + draw(6, 4, scale=0.3), "lat_old": lat, "lat_mask": mask,
        "flow_logp": flow + draw(6, 5, scale=1e-3), "flow_old": flow, "reward": draw(6), "group": GROUP,
    }  # fmt: skip


def scenes_run(method=METHOD, steps: int = 4, out: Path | None = None, gate: float | None = None) -> Run:
    policy, task = build("scenes", None, evaluation_steps=4, evaluation_samples=32, denoising_steps=4)
    if gate is not None:
        policy.gate.data.fill_(gate)
    return Run(method.set("select.prompts", 4).set("rollout.steps", 4), policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def test_without_the_latents_loss_it_is_flow_grpo() -> None:
    data = rows()
    adv = advantages(data["reward"], GROUP, adv_clip=1e9)
    every = torch.ones(6, 5, dtype=torch.bool)
    torch.testing.assert_close(loss(**data, w_lat=0.0), flow_loss(data["flow_logp"], data["flow_old"], every, adv, 1e-3))
    whole = loss(**data, w_lat=2.0, w_flow=3.0)
    torch.testing.assert_close(whole, 2 * loss(**data, w_flow=0.0) + 3 * loss(**data, w_lat=0.0))


def test_gates_of_zero_draw_and_score_as_a_plain_flow_on_the_hidden_state() -> None:
    run = scenes_run(gate=0.0)
    batch = run.method.rollout(run.method.select(run.task, run), run)
    policy, task = run.policy, run.task
    assert isinstance(policy, LatentFlow) and isinstance(task, Scenes)
    j = policy.slots
    x = torch.cat([batch.context[:, j:, :4], batch.action[:, -1:, :4]], dim=1)
    told = policy.encoder(batch.signal("words")).detach()[:, None]
    plain = as_batch(FlowPolicy(policy.flow), x, told, task.schedule, batch.group, batch.signal("prompt_id"))
    torch.testing.assert_close(batch.logp[:, j:], plain.logp)
    prompt = torch.arange(32)
    changed = [task.samples(policy, prompt, thought=task.thoughts(policy, prompt, replace={r: 3.0} if r else None)) for r in (None, *ROLES)]
    assert all(torch.equal(changed[0], other) for other in changed)


def test_equal_gaussians_have_no_divergence_and_padding_is_ignored() -> None:
    g = torch.Generator().manual_seed(0)
    mu, ls = torch.randn(2, 3, 4, generator=g), torch.randn(2, 3, 4, generator=g)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(gaussian_kl(mu, ls, mu, ls, mask), torch.zeros(2, 3))
    spoiled = mu.masked_fill(mask[..., None] == 0, float("nan"))
    assert torch.isfinite(gaussian_kl(spoiled, ls, mu + 1, ls, mask)).all()
    prob, halted = torch.zeros(2, 3), torch.full((2, 3), -1)
    assert torch.isfinite(latent_logp(spoiled, mu, ls, mask, prob, halted)).all()


def test_empty_slots_do_not_enter_the_mean() -> None:
    data = rows()
    spoiled = data | {"lat_logp": data["lat_logp"].masked_fill(~data["lat_mask"], float("-inf"))}
    torch.testing.assert_close(loss(**data), loss(**spoiled))
    adv, mask = torch.ones(6, 4, dtype=torch.float64), data["lat_mask"]
    same = surrogate(data["lat_old"], data["lat_old"], mask, adv, 0.2)
    assert float(same) == -1.0  # every ratio is 1, and only slots in use are averaged
    assert float(surrogate(data["lat_old"], data["lat_old"], torch.zeros_like(mask), adv, 0.2)) == 0.0


def test_replayed_trajectories_have_the_log_probabilities_they_were_drawn_with() -> None:
    run = scenes_run(steps=1)
    batch = METHOD.rollout(METHOD.select(run.task, run), run)
    torch.testing.assert_close(run.score(batch, {"logp"}).logp, batch.logp)
    latent = batch.signal("latent")
    assert latent[:, :6].all() and not latent[:, 6:].any()
    assert (batch.logp[:, :6][~batch.mask[:, :6]] == 0).all() and batch.mask[:, 6:].all()
    assert set(batch.signal("halted")[:, 3].tolist()) <= {0, 1} and (batch.signal("halted")[:, 5] == -1).all()
    stopped = batch.signal("halted")[:, 3] == 1
    assert torch.equal(batch.mask[:, 4], ~stopped)


def test_the_latents_are_constants_for_the_flow() -> None:
    """With w_lat 0 neither the latent policy nor its halting head moves; with w_flow 0 the flow does not."""
    for path, still in (("objective.w_lat", ("prior", "halting")), ("objective.w_flow", ("flow", "W", "gate"))):
        method = METHOD.but(regularize=()).set(path, 0.0)
        run = scenes_run(method)
        before = {k: v.clone() for k, v in run.policy.state_dict().items()}
        step(run)
        moved = {k.split(".")[0] for k, v in run.policy.state_dict().items() if not torch.equal(v, before[k])}
        assert moved and not moved & set(still), path


def test_it_trains_and_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = scenes_run(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    run = train(scenes_run())
    assert all(np.isfinite([r["loss"], r["reward"], r["latent/kl"], r["flow/kl"]]).all() for r in run.history)


def test_a_saved_policy_comes_back(tmp_path: Path) -> None:
    policy, task = build("scenes", None)
    policy.save_pretrained(tmp_path)
    again, prompt = load(tmp_path), torch.arange(32)
    assert torch.equal(task.samples(policy, prompt), task.samples(again, prompt))  # type: ignore[attr-defined, arg-type]


def test_the_reward_knows_a_layout() -> None:
    task, prompt = Scenes(), torch.arange(32)
    right = arranged(prompt // 8, TABLE[prompt % 8])
    assert (task.reward(right, prompt) == 2).all()
    assert (task.judged(arranged(prompt // 8, (TABLE[prompt % 8] + 1) % 4), prompt) == torch.tensor([1.0, 0.0])).all()
    assert (task.judged(right[:, [2, 3, 0, 1]], prompt)[:, 0] == 0).all() and QUADRANTS.shape == (4, 2)


@pytest.mark.parametrize("slots", [0, 1, 6])
def test_alignment_reaches_what_it_trains(slots: int) -> None:
    policy, g = LatentFlow(slots=slots), torch.Generator().manual_seed(0)
    alignment_loss(policy, pairs(16, g, True, slots), pairs(16, g, False, slots), g).backward()
    reached = {n.split(".")[0] for n, p in policy.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
    expected = (
        {"encoder", "flow"} | ({"prior", "posterior", "decoder", "W", "gate"} if slots else set()) | ({"halting"} if slots > 4 else set())
    )
    assert reached == expected


def test_policies_without_latents_are_refused() -> None:
    policy, task = build("gaussians:0", None)
    with pytest.raises(ValueError, match="take --task scenes"):
        step(Run(METHOD, policy, task, steps=1))
    _, scenes = build("scenes", None)
    with pytest.raises(ValueError, match="LatentFlow"):
        step(Run(FLOW_GRPO, policy, scenes, steps=1))
    joint, _ = build("scenes", None)
    step(Run(FLOW_GRPO.set("select.prompts", 2), joint, scenes, steps=1))  # plain Flow-GRPO treats latents as steps like any other
