import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.games import foraging
from anypo.domains.games.programs import CLIQUE, GAMES, action, candidates, mutated, random_program, refusal, size
from anypo.domains.games.synthesizers import Enumerative, Mutation, constant_tests, feedback, pass_rate, play, transposed
from anypo.methods.games.pibr import (
    STUDY,
    best_response,
    collected,
    evaluations_until,
    forage,
    improve,
    joint_best_response,
    pibr,
)

PRISONERS = GAMES["prisoners"]
CONSTANT = [["act", 0], ["act", 1]]
LEVELS = torch.tensor([1, 2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_programs_end_with_an_action_and_survive_editing(seed):
    rng = np.random.default_rng(seed)
    one, other = random_program(rng, 3), random_program(rng, 3)
    for _ in range(3):
        edited = mutated(one, rng)
        assert refusal(edited) == "" and action(edited, other, 4) in (0, 1) and action(edited, edited, 4) == action(edited, edited, 4)
        one = edited


def test_mutual_simulation_ends_when_the_fuel_does():
    mirror = ["mirror"]
    for fuel in range(1, 6):
        assert action(mirror, mirror, fuel) == 0
    assert action(mirror, ["act", 1], 1) == 0, "one fuel simulates an opponent that has none"
    assert action(mirror, ["act", 1], 2) == 1 and action(["act", 1], mirror, 1) == 1
    assert action(["if_opp_plays", 1, ["act", 0], ["act", 1]], ["act", 1], 1) == 1


def test_sameness_is_of_source_and_not_of_behaviour():
    twin = ["if_same", ["act", 0], ["act", 1]]
    padded = ["if_same", ["act", 0], ["other", ["act", 0]]]
    assert action(CLIQUE, twin, 4) == 0 and action(CLIQUE, padded, 4) == 1
    inside = ["other", ["if_opp_const", 1, ["act", 0], ["act", 1]]]
    assert action(inside, ["act", 1], 4) == 1 and action(inside, ["other", ["act", 0]], 4) == 0


@pytest.mark.parametrize("game", GAMES)
def test_constant_candidates_are_classical_best_response_dynamics(game):
    payoff = torch.tensor(GAMES[game]).double()
    found = pibr(payoff, payoff.T, ["act", 1], ["act", 1], CONSTANT, rounds=6).history[:, 0].tolist()
    first, second, expected = 1, 1, []
    for t in range(6):
        reply = int(payoff[:, second if t % 2 == 0 else first].argmax())
        first, second = (reply, second) if t % 2 == 0 else (first, reply)
        expected.append(reply)
    assert found == expected


def test_full_social_weight_with_common_payoffs_is_joint_optimization():
    payoff = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double()
    for opponent in candidates():
        shared = best_response(opponent, payoff, candidates(), other_payoff=payoff, social=1.0)
        assert shared.index == best_response(opponent, 2 * payoff, candidates()).index


def test_ties_go_to_the_smaller_program_and_then_to_the_earlier_one():
    assert best_response(["act", 1], PRISONERS, [CLIQUE, ["mirror"], ["act", 1]]).index == 1
    assert best_response(["act", 1], PRISONERS, [CLIQUE, ["act", 0]]).index == 0
    with_tests = best_response(["act", 1], PRISONERS, [["mirror"], ["act", 1]], tests=constant_tests(PRISONERS))
    assert with_tests.index == 1, "defecting is the best reply to both constants, mirroring to one"
    assert pass_rate(["mirror"], constant_tests(PRISONERS)) == 0.5 and pass_rate(["mirror"], []) == 0.0


def test_the_second_player_has_its_own_view():
    first, second = [[3, 0], [5, 1]], [[7, 6], [4, 2]]
    found = pibr(first, second, ["act", 0], ["act", 0], CONSTANT, rounds=2).history
    assert found[1].tolist() == [0, 1, 0, 5.0, 4.0], "against 1, player 2 earns 4 by action 0 and 2 by action 1"
    assert transposed(second) == [[7.0, 4.0], [6.0, 2.0]]


def test_feedback_tells_what_happened_and_what_failed():
    told = feedback(["act", 0], ["act", 1], PRISONERS, tests=constant_tests(PRISONERS), error="nonsense")
    assert told.utility == 0 and told.best_possible == 5 and told.error == "nonsense"
    assert told.outcomes == [(0, 0, 3.0), (0, 1, 0.0), (1, 0, 5.0), (1, 1, 1.0)]
    assert told.failed_tests == [(["act", 0], 1, 0), (["act", 1], 1, 0)]


def test_a_reader_tries_conditions_first_and_repairs_failed_branches():
    tests = constant_tests(GAMES["coordination"])
    told = feedback(["act", 1], CLIQUE, GAMES["coordination"], tests=tests)
    edits = Mutation(0)(told, 20)
    assert len(edits) == 20 and CLIQUE in edits[:12] and edits[12] == ["if_opp_const", 0, ["act", 0], ["act", 1]]
    assert pass_rate(edits[12], tests) == 1.0 > pass_rate(["act", 1], tests)
    content = feedback(["act", 1], ["act", 0], GAMES["coordination"])
    assert Mutation(3)(content, 5) == Mutation(3, reads_feedback=False)(content, 5), "against constants there are no conditions to try"


def test_iterations_stop_at_an_equilibrium_and_drop_what_is_no_program():
    told = []

    def careless(feedback, count):
        told.append(feedback.error)
        return [["launch", "missiles"], ["act", 2], ["if_same", ["act", 0]], CLIQUE]

    course = improve(PRISONERS, transposed(PRISONERS), (["act", 1], CLIQUE), (careless, Enumerative()))
    assert course.settled and course.programs == (CLIQUE, CLIQUE) and course.outcomes[-1] == play(CLIQUE, CLIQUE, PRISONERS, PRISONERS)
    assert told[0] == "" and "is no program; one is a list that begins with act" in told[1]
    defected = improve(PRISONERS, transposed(PRISONERS), (["act", 0], ["act", 0]), (Enumerative(CONSTANT), Enumerative(CONSTANT)))
    assert defected.settled and defected.programs == (["act", 1], ["act", 1])
    assert evaluations_until(lambda told, n: [["act", 1], CLIQUE], CLIQUE, ["act", 1], PRISONERS) == 2


def test_what_is_no_program_is_refused_with_the_reason():
    for wrong, why in (
        ("act", "is no program"), (["act", True], "an action, 0 or 1, not True"), (["other"], "other takes 1 arguments, not 0"),
        (["other", ["mirror", 1]], "mirror takes 0 arguments, not 1"), ([[]], "is no program"),
    ):  # fmt: skip
        assert why in refusal(wrong)
    deep, wide = ["mirror"], ["mirror"]
    for _ in range(20):
        deep = ["other", deep]
    for _ in range(7):
        wide = ["if_same", wide, wide]
    assert "nested deeper" in refusal(deep) and "more than 64 parts" in refusal(wide) and size(wide) == 255
    with pytest.raises(ValueError, match="pass other_payoff"):
        best_response(["act", 0], PRISONERS, CONSTANT, social=0.5)
    pennies = [[1, 0], [0, 1]]
    with pytest.raises(ValueError, match="no two candidates"):
        joint_best_response(pennies, [[0, 1], [1, 0]], CONSTANT)


@pytest.mark.parametrize("actions", [[4, 3], [2, 3], [3, 0], [1, 1]])
def test_moves_that_collide_are_cancelled(actions):
    """Agents at (2,1) and (2,3), the first also wants what the second wants; (2,0) is free, row 1 holds a food above the first."""
    state = torch.tensor([[2, 1], [2, 3]]), LEVELS, torch.tensor([[1, 1], [4, 4]]), torch.tensor([3, 2])
    found = foraging.lbf_step(*state, torch.tensor(actions))
    expected = {(4, 3): [[2, 1], [2, 3]], (2, 3): [[3, 1], [2, 2]], (3, 0): [[2, 0], [2, 3]], (1, 1): [[2, 1], [1, 3]]}
    assert found.agents.tolist() == expected[tuple(actions)] and (found.reward == 0).all()


def test_steps_of_many_layouts_are_those_of_each():
    rng = np.random.default_rng(0)
    start = foraging.layouts(6, rng)
    actions = torch.from_numpy(rng.integers(6, size=(6, 2)))
    many = foraging.lbf_step(start.agents, LEVELS, start.foods, start.food_levels, actions)
    for b in range(6):
        one = foraging.lbf_step(start.agents[b], LEVELS, start.foods[b], start.food_levels[b], actions[b])
        assert all(torch.equal(x, y[b]) for x, y in zip(one, many, strict=True))


def test_a_follower_reads_where_the_other_is_heading():
    """A weak agent beside nothing follows a strong one to the food that only both can lift, and both are paid by level."""
    start = foraging.Layouts(torch.tensor([[[0, 0], [4, 4]]]), torch.tensor([[[1, 3], [3, 1]]]), torch.tensor([[3, 0]]))
    follower, leader = (foraging.FOLLOW, foraging.ADJACENT), (foraging.JOINT, foraging.ADJACENT)
    joint = foraging.encode([follower, leader])[None]
    torch.testing.assert_close(foraging.episodes(joint, start, LEVELS), torch.tensor([[1 / 3, 2 / 3]]))
    waiting = foraging.encode([follower, (foraging.WAIT, foraging.JOINT)])[None]
    assert foraging.decide(waiting, start, LEVELS).tolist() == [[0, 0]], "one that waits is followed nowhere"
    assert foraging.decide(foraging.encode([follower, follower])[None], start, LEVELS).tolist() == [[0, 0]]


def test_candidates_are_all_ordered_lists_and_layouts_leave_room():
    assert len(foraging.candidates()) == len(set(foraging.candidates())) == 200
    start = foraging.layouts(50, np.random.default_rng(1))
    assert ((start.foods >= 1) & (start.foods <= 3)).all() and ((start.foods[:, 0] - start.foods[:, 1]).abs().amax(-1) > 1).all()
    assert (foraging._distances(start.agents, start.foods) > 0).all() and (start.agents[:, 0] != start.agents[:, 1]).any(-1).all()
    with pytest.raises(ValueError, match="have no room on a grid of 3x3"):
        foraging.layouts(1, np.random.default_rng(0), size=3)


def test_foragers_improve_and_stay_where_nothing_is_better():
    start = foraging.layouts(3, np.random.default_rng(2))
    lone = (foraging.FEASIBLE, foraging.ADJACENT)
    few = [lone, (foraging.FOLLOW, foraging.ADJACENT), (foraging.ADJACENT, foraging.FEASIBLE, foraging.JOINT)]
    found = forage(LEVELS, start, [lone, lone], candidates=few)
    assert collected(found, LEVELS, start).min() > collected([lone, lone], LEVELS, start).max()
    assert forage(LEVELS, start, found, candidates=few) == found


def test_the_study_repeats_itself():
    found = STUDY.run(seed=1, rounds=1, episodes=1)
    assert found["prisoners"] == [3.0, 3.0] and 0 <= found["foraging_collected"] <= 1 and STUDY.kind == "system"
