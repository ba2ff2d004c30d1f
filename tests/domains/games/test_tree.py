import pytest
import torch

pyspiel = pytest.importorskip("pyspiel")

from anypo.domains.games.tasks import play  # noqa: E402
from anypo.domains.games.tree import compile_game  # noqa: E402
from anypo.methods.games.vrpo import kuhn_payoff  # noqa: E402


def random_policy(tree, seed=0):
    raw = torch.rand(tree.legal.shape, generator=torch.Generator().manual_seed(seed)).double() * tree.legal
    return raw / raw.sum(1, keepdim=True)


def as_openspiel(tree, table):
    rows = {
        name: [(a, float(row[a])) for a in legal.nonzero().flatten().tolist()]
        for name, row, legal in zip(tree.names, table, tree.legal, strict=True)
    }
    return rows


@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_poker"])
def test_exploitability_is_openspiels(game):
    tree = compile_game(game)
    table = random_policy(tree)
    assert tree.exploitability(table) == pytest.approx(pyspiel.exploitability(pyspiel.load_game(game), as_openspiel(tree, table)), abs=1e-9)


def test_sizes_are_those_of_the_games():
    kuhn, leduc = compile_game("kuhn_poker"), compile_game("leduc_poker")
    assert (len(kuhn.names), len(leduc.names)) == (12, 936)
    assert set(kuhn.payoff[kuhn.player == -2].tolist()) == {-2.0, -1.0, 1.0, 2.0}


def test_values_are_what_many_games_pay():
    tree = compile_game("leduc_poker")
    table = random_policy(tree, 1)
    batch = play(tree, table, 40_000, torch.Generator().manual_seed(0))
    paid = batch.signals["payoff"].sum(1).double()
    assert abs(paid.mean() - tree.values(table)[0]) < 4 * paid.std() / 200
    node, action = batch.context[batch.mask], batch.action[batch.mask]
    assert tree.legal[tree.infoset[node], action].all()
    assert (batch.signals["mover_sign"][batch.mask] == 1 - 2 * tree.player[node]).all()


def test_the_rules_of_kuhn_poker():
    tree = compile_game("kuhn_poker")
    for first in range(3):
        for second in range(3):
            if first == second:
                continue
            start = tree.child[tree.child[0, first], second - (second > first)]
            for history in ("pp", "bp", "pbp", "bb", "pbb"):
                node = start
                for move in history:
                    node = tree.child[node, "pb".index(move)]
                assert float(tree.payoff[node]) == kuhn_payoff([first, second], history)


def test_the_critics_features_tell_all_cards_apart_and_the_actors_do_not():
    tree = compile_game("kuhn_poker")
    moves = tree.player >= 0
    assert len(torch.unique(tree.full[moves], dim=0)) == int(moves.sum())
    assert len(torch.unique(tree.seen, dim=0)) == len(tree.names)


@pytest.mark.parametrize(
    ("game", "words"), [("no_such_game", "no game"), ("matching_pennies_3p", "two-player"), ("matrix_rps", "moves in turn")]
)
def test_unfit_games_are_refused(game, words):
    with pytest.raises(ValueError, match=words):
        compile_game(game)


def test_the_average_policy_is_the_average_of_games():
    tree = compile_game("kuhn_poker")
    first, second, other = (random_policy(tree, seed) for seed in range(3))
    mine = (tree.mover == 0)[:, None]

    def against_other(policy):
        return float(tree.values(torch.where(mine, policy, other))[0])

    mean = (against_other(first) + against_other(second)) / 2
    assert against_other(tree.average([first, second])) == pytest.approx(mean, abs=1e-12)
