"""Tasks by name: what is built, refused, saved, evaluated, and that other methods run on them."""

import json

import pytest
import torch

from anypo import api, catalogue
from anypo.domains import owner
from anypo.domains.combinatorial.inventory_policy import unflatten
from anypo.domains.combinatorial.setup import build, evaluate, owns
from anypo.loops.on_policy import train
from anypo.run import Run

SHOP = {"jobs": 4, "instances": 4, "evaluation_instances": 3, "hidden": 8}
INVENTORY = {"scenarios": 8, "batch": 8, "periods": 12, "warm_up": 6, "test_scenarios": 4, "test_periods": 20, "hidden": 8}


def test_names():
    assert owns("shop:homogeneous") and owns("inventory:serial") and not owns("arithmetic") and not owns("shop")
    assert owner("inventory:one_store", "language") == "combinatorial"


@pytest.mark.parametrize(
    ("task", "options", "sentence"),
    [
        ("shop:odd", {}, "there are homogeneous and heterogeneous shops"),
        ("shop:homogeneous", {"lead_time": 3}, "know no option 'lead_time'"),
        ("shop:homogeneous", {"objective": "late"}, "unknown objective"),
        ("shop:homogeneous", {"instances": 0}, "at least 1"),
        ("inventory:odd", {}, "unknown inventory setting"),
        ("inventory:one_store", {"stores": 3}, "know no option 'stores'"),
        ("inventory:one_store", {"periods": 10}, "more periods than the warm_up"),
        ("inventory:one_store", {"policy": "oracle"}, "unknown inventory policy"),
    ],
)
def test_mistakes_are_named(task, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(task, None, **options)


@pytest.mark.parametrize("slug", ["ppo", "grpo", "rloo", "trpo"])
def test_methods_of_other_domains_schedule(slug):
    method = catalogue.get(slug, "combinatorial")
    policy, task = build("shop:heterogeneous", None, needs=method.needs(), **SHOP)
    run = train(Run(method, policy, task, steps=2))
    assert run.history[-1]["makespan"] > 0 and all(torch.isfinite(p).all() for p in policy.parameters())


def test_rows_of_unequal_length_are_padded_and_masked():
    """Instances whose jobs differ in length: the padding carries no reward, no log-prob and no gradient."""
    from anypo.domains.combinatorial.shop import Instances
    from anypo.domains.combinatorial.shop_instances import ShopSetting
    from anypo.domains.combinatorial.shop_tasks import ShopTask

    class Ragged(ShopSetting):
        def draw(self, seeds):
            proc, n_ops, arrival = super().draw(seeds)
            n_ops = n_ops.copy()
            n_ops[::2, 0] = 1
            return Instances(proc, n_ops, arrival)

    method = catalogue.get("ppo")
    policy, _ = build("shop:heterogeneous", None, **SHOP)
    task = ShopTask(Ragged(jobs=4), instances=4)
    run = Run(method, policy, task, steps=1)
    batch = run.collect(task.prompts(4, run.rng))
    assert batch.lengths.tolist() == [10, 12, 10, 12] and batch.horizon == 12
    padding = ~batch.mask
    assert padding.any() and (batch.logp[padding] == 0).all() and (task.score(batch, run)[padding] == 0).all()
    assert (batch.terminated.sum(1) == 1).all() and batch.terminated[0, 9] and batch.terminated[1, 11]
    train(run)


def test_a_method_without_a_simulated_cost_explores_an_inventory():
    method = catalogue.get("reinforce_pp", "combinatorial")
    policy, task = build("inventory:warehouse", None, needs=method.needs(), **INVENTORY)
    assert policy.stochastic
    run = train(Run(method, policy, task, steps=2))
    assert all(torch.isfinite(p).all() for p in policy.parameters()) and run.history[-1]["cost"] > 0


def test_the_log_probs_of_a_batch_are_those_of_its_numbers():
    policy, task = build("inventory:warehouse", None, **INVENTORY)
    run = Run(catalogue.get("reinforce_pp", "combinatorial"), policy, task, steps=1)
    batch = run.collect(task.prompts(3, run.rng))
    again = policy.observe(batch, {"logp", "entropy"})
    torch.testing.assert_close(batch.logp, again.logp)
    mean = policy.body(unflatten(task.setting, batch.context.flatten(0, 1)))
    normal = torch.distributions.Normal(mean.view(batch.action.shape), policy.log_std.exp())
    torch.testing.assert_close(batch.logp, normal.log_prob(batch.action).sum(-1))


def test_samples_of_a_prompt_share_their_problem():
    for name, options, seen in (("shop:heterogeneous", SHOP, "arrival"), ("inventory:one_store", INVENTORY, "demand")):
        policy, task = build(name, None, **options)
        run = Run(catalogue.get("reinforce_pp", "combinatorial"), policy, task, steps=1)
        batch = run.collect([p.but(samples=2) for p in task.prompts(2, run.rng)])
        assert batch.group.tolist() == [0, 0, 1, 1]
        same = batch.context[:, 0] if seen == "arrival" else batch.signals["demand"][:, :, 0]
        assert torch.equal(same[0], same[1]) and torch.equal(same[2], same[3]) and not torch.equal(same[0], same[2])
        assert not torch.equal(batch.action[0], batch.action[1])


@pytest.mark.parametrize(
    ("slug", "task", "options", "headline"),
    [("fjsp_dispatch", "shop:homogeneous", SHOP, "makespan"), ("hdpo", "inventory:serial", INVENTORY, "cost")],
)
def test_train_evaluate_and_resume_by_name(tmp_path, slug, task, options, headline):
    settings = {"objective.ignore": 6} if slug == "hdpo" else {}
    result = api.train(slug, task=task, steps=2, out=tmp_path, settings=settings, **options)
    assert result.task == task and next(iter(result.before)) == next(iter(result.after)) == headline
    pictures = json.loads((tmp_path / "figures.json").read_text())
    assert len(pictures["before"]) == len(pictures["after"]) == 1 and "svg" in pictures["after"][0]
    found = evaluate(str(tmp_path), task, **options)[headline]
    assert found["value"] == pytest.approx(result.after[headline], rel=1e-5) and found["low"] <= found["value"] <= found["high"]
    policy, _ = build(task, str(tmp_path), needs={"cost"}, **options)
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(value, result.run.policy.state_dict()[name])


def test_a_saved_policy_must_fit(tmp_path):
    policy, _ = build("shop:homogeneous", None, **SHOP)
    policy.save_pretrained(tmp_path / "shop")
    with pytest.raises(ValueError, match="another problem"):
        build("shop:homogeneous", str(tmp_path / "shop"), machines=6)
    policy, _ = build("inventory:one_store", None, **INVENTORY)
    policy.save_pretrained(tmp_path / "inventory")
    with pytest.raises(ValueError, match="another network"):
        build("inventory:one_store", str(tmp_path / "inventory"), lead_time=2, **INVENTORY)
