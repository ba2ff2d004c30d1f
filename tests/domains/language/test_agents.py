"""Conversations: what is trained, how they end, going back to a visited state, and the environments."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.domains.language.agents import AgentTask, CalculatorEnvironment, GridEnvironment, make_agent_task
from anypo.domains.language.tasks import make_task
from anypo.domains.language.worlds import GymnasiumText, Seeds, TextArena, TextWorld, calculate
from anypo.task import Prompt
from tests.domains.language.text_fakes import END, ScriptedPolicy, make_run


class Echo:
    """Says what it heard, between brackets, until it hears "bye"; 0.25 a turn."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.closed = False

    def reset(self, problem: Prompt) -> str:
        self.heard = []
        return f"{problem.content}?"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.heard.append(text)
        return f"[{text}]", 0.25, text == "bye"

    def save(self) -> list[str]:
        return list(self.heard)

    def restore(self, state: list[str]) -> None:
        self.heard = list(state)

    def close(self) -> None:
        self.closed = True


def echo_task(**settings) -> AgentTask:
    return AgentTask("echo", Seeds("echo"), Echo, **settings)


def two_then_bye(text: str, draw: float) -> str:
    return ["one", "two", "bye"][text.count("[")]


def spans(batch: Batch, row: int, policy: ScriptedPolicy) -> list[tuple[str, bool, int]]:
    """(text, written by the policy, segment) of each stretch of a row; the end token shows as "."."""
    out: list[tuple[str, bool, int]] = []
    for t in range(int(batch.attended[row].sum())):
        token = int(batch.action[row, t])
        key = bool(batch.mask[row, t]), int(batch.segment[row, t])
        text = "." if token == END else chr(token)
        if out and out[-1][1:] == key:
            out[-1] = (out[-1][0] + text, *key)
        else:
            out.append((text, *key))
    return out


# ---- batches


def test_observations_are_read_and_never_trained():
    run = make_run(ScriptedPolicy(two_then_bye), frozenset({"old_entropy"}))
    batch = echo_task().collect([Prompt(5, "a", samples=2), Prompt(6, "bc")], run)
    expected = [("one.", True, 0), ("[one]", False, 0), ("two.", True, 1), ("[two]", False, 1), ("bye.", True, 2)]
    for row in range(3):
        assert spans(batch, row, run.policy) == expected
    assert bool((batch.logp[~batch.mask] == 0).all()) and bool((batch.logp[batch.mask] != 0).all())
    assert bool((batch.signals["old_entropy"][~batch.mask] == 0).all())
    assert [run.policy.decode(c) for c in batch.context] == ["a?", "a?", "bc?"] == batch.signals["prompt_text"]
    assert batch.group.tolist() == [0, 0, 1] and batch.signals["prompt_id"].tolist() == [5, 5, 6]
    assert batch.signals["turn_reward"].tolist() == [[0.25, 0.25, 0.25, 0]] * 3 and batch.signals["turns"].tolist() == [3] * 3
    assert echo_task().score(batch).tolist() == [0.75] * 3
    assert bool(batch.terminated.all()) and batch.version.tolist() == [3] * 3
    assert batch.signals["completion"] == ["one[one]two[two]bye"] * 3


def test_rows_of_different_length_stay_apart():
    run = make_run(ScriptedPolicy(lambda text, draw: "bye" if text[0] == "a" else two_then_bye(text, draw)))
    batch = echo_task().collect([Prompt(0, "a"), Prompt(1, "b")], run)
    assert spans(batch, 0, run.policy) == [("bye.", True, 0)] and len(spans(batch, 1, run.policy)) == 5
    assert not bool(batch.attended[0, 4:].any()) and not bool(batch.action[0, 4:].any())
    assert [len(c["prompts"]) for c in run.policy.calls] == [2, 1, 1]  # finished conversations cost nothing


@pytest.mark.parametrize(
    ("settings", "problem", "context", "expected"),
    [
        ({"max_turns": 2}, Prompt(0, "a"), 99, [("one.", True, 0), ("[one]", False, 0), ("two.", True, 1)]),
        ({}, Prompt(0, "a", max_actions=6), 99, [("one.", True, 0), ("[one]", False, 0), ("tw", True, 1)]),
        ({}, Prompt(0, "a", max_actions=4), 99, [("one.", True, 0)]),
        ({"max_tokens": 2}, Prompt(0, "a"), 10, [("on", True, 0), ("[on]", False, 0), ("tw", True, 1)]),
        ({"max_tokens": 4}, Prompt(0, "a"), 13, [("one.", True, 0), ("[one]", False, 0), ("tw", True, 1)]),
        ({"max_tokens": 4}, Prompt(0, "a"), 11, [("one.", True, 0)]),
    ],
)
def test_limits_truncate_and_the_last_observation_is_left_out(settings, problem, context, expected):
    run = make_run(ScriptedPolicy(two_then_bye, context_limit=context))
    batch = echo_task(**settings).collect([problem], run)
    assert spans(batch, 0, run.policy) == expected
    assert batch.truncated.tolist() == [True] and batch.terminated.tolist() == [False]
    assert batch.signals["turns"].tolist() == [expected[-1][2] + 1]


def test_an_over_long_first_observation_is_named():
    with pytest.raises(ValueError, match=r"prompt 4 .*has 31 tokens; with 32 for the completion"):
        echo_task().collect([Prompt(4, "a" * 30)], make_run(ScriptedPolicy(two_then_bye, context_limit=40)))


def test_empty_replies_are_turns():
    for ends in (True, False):
        batch = echo_task(max_turns=2).collect([Prompt(0, "a")], make_run(ScriptedPolicy(lambda text, draw: "", ends=ends)))
        assert batch.signals["turns"].tolist() == [2] and batch.lengths.tolist() == [2 * ends]


def test_environments_are_closed():
    made = []

    def make():
        made.append(Echo())
        return made[-1]

    AgentTask("echo", Seeds("echo"), make).collect([Prompt(0, "a", samples=3)], make_run(ScriptedPolicy(two_then_bye)))
    assert len(made) == 3 and all(e.closed for e in made)


def test_branches_share_a_beginning_and_start_from_the_saved_state():
    run = make_run(ScriptedPolicy(two_then_bye))
    task = echo_task()
    batch = task.collect([Prompt(0, "a"), Prompt(1, "b")], run)
    run.policy.reply = lambda text, draw: "bye"
    run.version = 4
    branches = task.branch(batch, rows=[1, 1, 0], turns=[1, 2, 0], run=run)
    assert branches.parent.tolist() == [1, 1, 0] and branches.branch_at.tolist() == [9, 18, 0] and branches.group.tolist() == [1, 1, 0]
    for row, (parent, shared) in enumerate(zip(branches.parent, branches.branch_at, strict=True)):
        for name in ("action", "mask", "logp", "segment"):
            assert torch.equal(getattr(branches, name)[row, :shared], getattr(batch, name)[parent, :shared])
    assert branches.signals["completion"] == ["one[one]bye", "one[one]two[two]bye", "bye"]
    assert branches.signals["turn_state"][0] == [[], ["one"]] and branches.version.tolist() == [4] * 3
    assert task.score(branches).tolist() == [0.5, 0.75, 0.25]
    with pytest.raises(ValueError, match="conversation 0 cannot be continued from turn 3: 3 of its states were saved"):
        task.branch(batch, [0], [3], run)


def test_batches_can_be_picked_and_joined():
    run = make_run(ScriptedPolicy(two_then_bye))
    long, short = (echo_task(max_turns=n).collect([Prompt(0, "a", samples=2)], run) for n in (3, 3))
    both = Batch.concat([long, short[torch.tensor([1])]])
    assert len(both) == 3 and both.signals["completion"] == ["one[one]two[two]bye"] * 3


def test_settings_are_checked():
    with pytest.raises(ValueError, match="max_turns must be at least 1"):
        echo_task(max_turns=0)
    with pytest.raises(ValueError, match="no setting 'turns'; did you mean max_turns"):
        make_task("calculator", turns=3)
    with pytest.raises(ValueError, match="rewarded by its environment"):
        make_task("calculator", rewards=len)
    with pytest.raises(ValueError, match="names nothing after the colon"):
        make_task("textarena:")


def test_a_real_model_evaluates_what_it_sampled():
    """The log-probs recorded during the conversation are those of the finished row, observations included."""
    from anypo.domains.language.builtin.pretrain import build_model, build_tokenizer
    from anypo.domains.language.policy import LanguagePolicy

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    policy = LanguagePolicy(build_model(tokenizer), tokenizer)
    task = make_task("grid", max_turns=3, max_tokens=5)
    run = make_run(policy, frozenset({"old_entropy"}))
    batch = task.collect([p.but(samples=2) for p in task.prompts(3, run.rng)], run)
    assert bool((batch.attended & ~batch.mask).any())
    again = policy.observe(batch, {"logp", "entropy"})
    torch.testing.assert_close(again.logp, batch.logp, atol=1e-4, rtol=0)
    torch.testing.assert_close(again.entropy * batch.mask, batch.signals["old_entropy"], atol=1e-4, rtol=0)
    observed = "".join(
        chr(0) if m else policy.decode(a[None]) for a, m in zip(batch.action[0], batch.mask[0] | ~batch.attended[0], strict=True)
    )
    assert all(text.startswith("at ") for text in observed.split(chr(0)) if text)


# ---- the calculator


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*(3+4)", "84"), (" 7/2 ", "3.5"), ("1/3", "0.333333"), ("-3*-2", "6"), ("0.5+0.5", "1"), ("1/0", "error"), ("", "error"),
        ("2**3", "error"), ("7//2", "error"), ("(1", "error"), ("abs(1)", "error"), ("1 2", "error"), ("9" * 65, "error"), ("007", "error"),
        ("(" * 32 + "1" + ")" * 31, "error"), ("-" * 60 + "1", "1"), ("5 5 5", "error"), ("()", "error"), ("1.2.3", "error"),
    ],
)  # fmt: skip
def test_calculate(text, value):
    assert calculate(text) == value


@given(st.text(alphabet="0123456789+-*/(). x", max_size=30))
def test_calculate_reads_any_text(text):
    value = calculate(text)
    if value != "error":
        assert float(value) == pytest.approx(eval(text.strip()), rel=1e-5, abs=1e-9)


def test_the_calculator_answers_and_the_final_answer_ends():
    task = make_task("toolcalc")

    def uses_it(text: str, draw: float) -> str:
        if ";" not in text:
            return f"<calc>{text.removesuffix('=')}</calc> and so on"
        return text.rpartition(";")[0].rpartition("=")[2]

    run = make_run(ScriptedPolicy(uses_it))
    batch = task.collect(task.prompts(5, run.rng), run)
    assert task.score(batch).tolist() == [1] * 5 and task.evaluate(run)["pass@1"] == 1 and task.evaluate(run)["turns"] == 2
    for row, columns in enumerate(batch.signals["columns"]):
        reply, observation, answer = (text for text, _, _ in spans(batch, row, run.policy))
        assert (
            reply.endswith("</calc>") and observation == f"={columns['answer']};" and answer == f"{columns['answer']}."
        )  # the turn stops there
    run.policy.reply = lambda text, draw: "1"
    assert task.evaluate(run)["pass@1"] == 0
    run.policy.reply = lambda text, draw: "<calc>what</calc>"
    assert "=error;" in task.collect(task.prompts(1, run.rng), run).signals["completion"][0]


def test_calculations_are_split():
    task = make_task("calculator")
    training = {p.id for p in task.prompts(200, np.random.default_rng(0))}
    assert not training & {p.id for p in task.held_out(200)}


# ---- the board

BOARD = Prompt(0, "walk a1 to c1 not b1 e5:", {"start": "a1", "goal": "c1", "walls": ["b1", "e5"]})


def test_the_board_moves_stops_and_ends():
    grid = GridEnvironment()
    assert grid.reset(BOARD) == BOARD.content
    assert grid.step("r") == ("at a1:", 0.0, False)  # a wall
    assert grid.step("ddll") == ("at a1:", 0.0, False)  # edges
    assert grid.step("u?") == ("at a2:", 0.0, False)
    saved = grid.save()
    assert grid.step("rrduuu") == ("", 1.0, True)  # the goal ends it at once
    grid.reset(BOARD)
    grid.restore(saved)
    assert grid.step("rr") == ("at c2:", 0.0, False)


def test_walk_problems_are_solved_on_the_board():
    task = make_task("grid")
    ways = {p.content: p.columns["answer"] for p in task.held_out()}

    def half_then_half(text: str, draw: float) -> str:
        way = ways[text.partition(":")[0] + ":"]
        return way[len(way) // 2 :] if text.count(":") > 1 else way[: len(way) // 2]

    found = task.evaluate(make_run(ScriptedPolicy(half_then_half)))
    assert found["pass@1"] == 1 and found["turns"] == 2
    shown = task.sample_completions(make_run(ScriptedPolicy(half_then_half)), 2)
    assert [s["reward"] for s in shown] == [1, 1] and "at " in shown[0]["completion"]


def test_calculator_states_are_restored():
    one, other = CalculatorEnvironment(), CalculatorEnvironment()
    one.reset(Prompt(0, "1+1=", {"answer": "2"}))
    other.restore(one.save())
    assert other.step(" 2 ") == ("", 1.0, True)


# ---- other packages


def test_gymnasium_text_worlds():
    gymnasium = pytest.importorskip("gymnasium")

    class Parrot(gymnasium.Env):
        action_space = observation_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            return f"seed {seed}", {}

        def step(self, action):
            return action.upper(), 2, action == "end", action == "cut", {}

    world = GymnasiumText(Parrot())
    assert world.reset(Prompt(0, "", {"seed": 7})) == "seed 7"
    assert world.step("hi") == ("HI", 2.0, False) and world.step("end")[2] and world.step("cut")[2]
    with pytest.raises(ValueError, match=r"the actions of CartPole-v1 are Discrete.*not text"):
        make_agent_task("gymnasium:CartPole-v1").collect([Prompt(0, "")], make_run(ScriptedPolicy(two_then_bye)))


def test_textarena_games():
    class Game:
        def reset(self, num_players, seed):
            self.turns, self.seed = 0, seed
            assert num_players == 1

        def get_observation(self):
            return 0, f"turn {self.turns} of {self.seed}"

        def step(self, action):
            self.turns += 1
            return action == "win", {}

        def close(self):
            return {0: 1}, {"turns": self.turns}

    game = TextArena(Game())
    assert game.reset(Prompt(0, "", {"seed": 3})) == "turn 0 of 3"
    assert game.step("x") == ("turn 1 of 3", 0.0, False) and game.step("win") == ("", 1.0, True)


def test_textworld_games():
    class Game:
        def seed(self, seed):
            self.points = seed

        def reset(self):
            return SimpleNamespace(feedback="A room.")

        def step(self, command):
            self.points += 2
            return SimpleNamespace(feedback=f"You {command}."), self.points, command == "win"

    world = TextWorld(Game())
    assert world.reset(Prompt(0, "", {"seed": 0})) == "A room."
    assert world.step("look") == ("You look.", 2.0, False) and world.step("win") == ("You win.", 2.0, True)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    with pytest.raises(ValueError, match="needs the package textarena; install it with: pip install textarena"):
        TextArena("Game-v0")


def test_seeds_are_split():
    seeds = Seeds("x")
    assert min(p.id for p in seeds.training(1000, np.random.default_rng(0))) > max(p.id for p in seeds.held_out(1000))
