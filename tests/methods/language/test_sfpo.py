import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step as one_step
from anypo.loops.on_policy import train
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.sfpo import METHOD, alpha_schedule, step
from anypo.run import Run
from anypo.seams.update import GradientSteps


def trained(method, steps=4, state=None, total=4, policy=None):
    task = TokenBandit(4, 3, 2)
    policy = task.policy()
    run = Run(method.set("update.learning_rate", 4.0), policy, task, steps=total, seed=1)
    if state is not None:
        run.load_state_dict(state)
    while run.step < steps:
        one_step(run)
    return run


def test_alpha_zero_and_no_inner_steps_are_the_base_update():
    base = trained(METHOD.but(update=GradientSteps())).policy.logits
    assert torch.equal(trained(METHOD.set("update.alpha", 0.0)).policy.logits, base)
    for alpha in (0.0, 0.3, 1.0):
        found = trained(METHOD.set("update.inner_steps", 0).set("update.alpha", alpha))
        torch.testing.assert_close(found.policy.logits, base)


def test_alpha_zero_is_the_base_update_with_adam_too():
    adam = METHOD.set("update.optimizer", "adam")
    base = trained(GRPO.but(update=GradientSteps(optimizer="adam"))).policy.logits
    assert torch.equal(trained(adam.set("update.alpha", 0.0)).policy.logits, base)


def test_alpha_one_is_k_plus_one_steps_on_the_batch():
    naive = trained(GRPO.but(update=GradientSteps(epochs=4))).policy.logits
    torch.testing.assert_close(trained(METHOD.set("update.alpha", 1.0)).policy.logits, naive)


def test_the_pure_step_agrees_with_its_limits():
    theta, matrix, bias = torch.randn(4).double(), torch.eye(4).double() * 0.5, torch.randn(4).double()
    one = theta - 0.1 * (matrix @ theta - bias)
    torch.testing.assert_close(step(theta, matrix, bias, 0.1, 3, 0.0).next, one)
    torch.testing.assert_close(step(theta, matrix, bias, 0.1, 0, 0.7).next, one)
    torch.testing.assert_close(step(theta, matrix, bias, 0.1, 3, 1.0).next, step(theta, matrix, bias, 0.1, 4, 1.0).fast)


def test_first_order_step_length():
    """theta_next - theta_0 = -lr (alpha K + 1) gradient + O(lr^2)."""
    theta, matrix, bias = torch.randn(4).double(), torch.eye(4).double(), torch.randn(4).double()
    moved = step(theta, matrix, bias, 1e-6, 3, 0.8).next - theta
    torch.testing.assert_close(moved / 1e-6, -(0.8 * 3 + 1) * (matrix @ theta - bias), rtol=1e-4, atol=1e-6)


def test_schedule_is_undefined_before_the_window_is_full():
    found = alpha_schedule(torch.tensor([9.0, 0.0, 5.0]).double(), 0.8, window=5, tau=0.1)
    assert found.z.tolist() == [0, 0, 0] and found.alpha.tolist() == [0.8] * 3


def test_the_component_follows_the_schedule_of_the_whole_history():
    generator = torch.Generator().manual_seed(0)
    entropy = torch.cat([torch.rand(12, generator=generator), torch.rand(6, generator=generator) + 5]).double()
    component = METHOD.set("update.window", 5).set("update.tau", 6.0).fresh().update
    seen = [component.watch(float(e)) for e in entropy]
    assert seen == alpha_schedule(entropy, 0.8, 5, 6.0).alpha.tolist()
    assert 0.0 in seen and 0.8 in seen


def test_state_survives_a_checkpoint():
    whole = trained(METHOD)
    half = trained(METHOD, steps=2)
    resumed = trained(METHOD, state=half.state_dict())
    assert torch.equal(resumed.policy.logits, whole.policy.logits)
    assert resumed.method.update.entropies == whole.method.update.entropies


def test_numbers_stay_finite_through_the_loop():
    task = TokenBandit(4, 3, 2)
    run = train(Run(METHOD, task.policy(), task, steps=3))
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in run.history) and run.history[0]["alpha"] == 0.8
