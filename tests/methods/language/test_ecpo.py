import pytest
import torch

from anypo.domains.language.certificates import align, cert_ndcg, evidence_support, matching, ndcg, pl_logp
from anypo.domains.language.toys.certified_instances import CITES, GOLD, MENTIONS, ROSTER, TOP, audit, draw
from anypo.domains.language.toys.certified_ranking import STOP, CertifiedRanking
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.ecpo import METHOD, VARIANTS, fit_trajectory_reward, pairwise_loss, reward, reward_bins, trajectory_reward
from anypo.run import Run
from anypo.seams.reward import TaskReward
from tests.helpers import assert_continues, assert_trains


def small(**options):
    return CertifiedRanking(pool=32, **options)


def run_of(method, steps=2, seed=0, task=None, **options):
    task = task or small()
    return Run(method, task.policy(), task, steps=steps, seed=seed, **options)


def rankings(seed=0, rows=6, candidates=5):
    g = torch.Generator().manual_seed(seed)
    relevance = torch.randint(3, (rows, candidates), generator=g)
    ranking = torch.rand(rows, candidates, generator=g).argsort(1)[:, :3]
    return relevance, ranking, torch.rand(rows, 3, generator=g).double(), torch.rand(rows, 3, generator=g).double()


def test_whole_certificates_are_ndcg_and_none_are_nothing():
    relevance, ranking, validity, support = rankings()
    whole = torch.ones_like(validity)
    torch.testing.assert_close(cert_ndcg(relevance, ranking, whole, whole), ndcg(relevance, ranking))
    assert (cert_ndcg(relevance, ranking, whole, support, tau=1.1) == 0).all()
    assert (cert_ndcg(relevance, ranking, validity, support) <= ndcg(relevance, ranking) + 1e-12).all()
    assert (ndcg(relevance * 0, ranking) == 0).all()
    best = relevance.argsort(1, descending=True)
    torch.testing.assert_close(ndcg(relevance, best), (relevance > 0).any(1).double())


def test_one_position_is_a_softmax_over_the_feasible_candidates():
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    feasible = torch.ones(4, 5, dtype=torch.bool)
    feasible[:, 2] = False
    chosen = torch.tensor([[0], [1], [3], [4]])
    expected = scores.exp().gather(1, chosen)[:, 0] / (scores.exp() * feasible).sum(1)
    torch.testing.assert_close(pl_logp(scores, feasible, chosen).exp(), expected)
    assert pl_logp(scores[0], feasible[0], torch.tensor([2])) == -torch.inf
    whole = [pl_logp(scores[0, :3], torch.ones(3), torch.tensor(p)).exp() for p in ([0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1])]
    torch.testing.assert_close(torch.stack(whole).sum(), torch.ones((), dtype=torch.float64))


def test_the_policy_is_plackett_luce_then_softmaxes_and_its_logp_is_what_it_recorded():
    run = run_of(METHOD)
    torch.nn.init.normal_(run.policy.candidate[-1].weight)
    batch = run.task.collect(run.task.prompts(8, run.rng), run)
    scores = run.policy.candidate(batch.context[:, :, 0])[..., 0]
    expected = pl_logp(scores, batch.context[:, :, 0, 0], batch.signals["ranking"])
    new = run.policy.evaluate(batch, {"logp", "entropy"})
    torch.testing.assert_close(new.logp[:, :TOP].sum(1), expected)
    torch.testing.assert_close(new.logp, batch.logp)
    torch.testing.assert_close(new.entropy, batch.signals["old_entropy"])
    assert torch.isfinite(new.entropy).all() and (new.logp[~batch.mask] == 0).all()


def test_after_stop_a_position_has_no_more_picks():
    run = run_of(METHOD)
    batch = run.task.collect([p.but(samples=16) for p in run.task.prompts(4, run.rng)], run)
    first, second = batch.action[:, TOP::CITES], batch.mask[:, TOP + 1 :: CITES]
    assert torch.equal(second, first != STOP) and bool((first == STOP).any())
    assert batch.mask[:, : TOP + 1].all() and batch.mask[:, TOP::CITES].all()


def test_alignment_keeps_order_and_counts_right_fillers():
    assert align(torch.tensor([0, 1, 2, 3]), torch.tensor([3, 2, 1, 0])) == 0.25
    assert align(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 7, 1, 2, -1, 3])) == 1
    hit = torch.tensor([0, 1])[:, None] == torch.tensor([0, 0, 1])
    found = matching(hit, torch.tensor([[True, False, False], [False, False, True]]))
    assert (found.length, found.right, found.used.tolist()) == (2, 2, [True, False, True])


def test_support_of_what_has_none():
    whole, cited = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.25]), torch.tensor([0.0, 0.0, 0.25, 0.0, 0.5])
    found = evidence_support(whole, cited, torch.tensor([True, False, True, False, True]))
    assert found.tolist() == [0.0, 1.0, 0.5, 0.0, 1.0]


def test_a_span_of_another_candidate_is_invalid():
    instances = draw(16, 0)
    ranking = torch.arange(TOP).expand(16, -1)
    cited = torch.zeros(16, TOP, ROSTER, MENTIONS, dtype=torch.bool)
    cited[:, 0, 1], cited[:, 1, 1] = instances.kind[:, 1] >= 0, instances.kind[:, 1] >= 0
    found = audit(instances, ranking, cited.flatten(2))
    assert (found.validity[:, 0] == 0).all() and (found.validity[:, 1] == 1).all() and not found.feasible.any()
    assert (found.support[:, 0] == 0).all() and (found.validity[:, 2] == 0).all()
    some = align(instances.skeleton, instances.kind[:, 1]) > 0
    assert (found.support[some, 1] == 1).all()


def test_rosters():
    closed, predicted, hybrid = (draw(64, 0, roster) for roster in ("closed", "predicted", "hybrid"))
    assert torch.equal(closed.kind, predicted.kind) and torch.equal(closed.relevance, hybrid.relevance)
    assert torch.equal(hybrid.listed, closed.listed | predicted.listed)
    assert closed.listed[:, :GOLD].all() and not closed.listed[:, GOLD:].any() and (closed.relevance[:, GOLD:] == 0).all()
    with pytest.raises(ValueError, match="closed, predicted or hybrid"):
        draw(4, 0, "open")


def test_ranking_reward_alone_is_listwise_grpo_on_ndcg():
    only = METHOD.set("reward.w_valid", 0.0).set("reward.w_cycle", 0.0).set("reward.w_cert", 0.0).set("reward.w_rank", 1.0)
    runs = [train(run_of(m, 3)) for m in (only, METHOD.but(reward=TaskReward()))]
    for mine, theirs in zip(*(run.policy.parameters() for run in runs), strict=True):
        assert torch.equal(mine, theirs)
    components = torch.rand(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 1, 0, 1])
    found = reward(components, (1.0, 0.0, 0.0, 0.0), group=group)
    torch.testing.assert_close(found.advantages, grpo.advantages(components[:, 0], group))
    assert (reward(components[:1], (0.3, 0.2, 0.2, 0.3)).advantages == 0).all()


def test_trajectory_reward_is_monotone_and_learns_what_matters():
    features = torch.rand(16, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    relevance = (3 * features[..., 1]).floor().long()
    u = fit_trajectory_reward(features, relevance)
    assert u.argmax() == 1 and (trajectory_reward(u, features + 0.1) > trajectory_reward(u, features)).all()
    assert pairwise_loss(trajectory_reward(u, features), relevance) < pairwise_loss(torch.zeros(16, 6), relevance)
    assert pairwise_loss(torch.zeros(2, 3), torch.ones(2, 3)) == 0
    assert reward_bins(u, torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])).tolist() == [0, 2]


def test_without_labels_it_needs_a_trajectory_reward():
    run = train(run_of(VARIANTS["unlabelled"]))
    assert all(0 <= record["cert_ndcg"] <= record["ndcg"] <= 1 for record in run.history)
    with pytest.raises(ValueError, match="no trajectory reward"):
        step(run_of(VARIANTS["unlabelled"].but(prepare=())))


def test_trains_and_resumes(tmp_path):
    def run_to(out, upto):
        run = run_of(METHOD, upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    assert_trains(METHOD)
