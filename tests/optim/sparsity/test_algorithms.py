"""Masks, without a trainer."""

import pytest
import torch

from backends.comm import Comm
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.sparsity import (
    GMP,
    SET,
    Group,
    RigL,
    SparseParam,
    Static,
    algorithms_of,
)
from modelzoo_trainer.optim.sparsity.init_methods import RankingGroups, random_scores, ranks


def masked(algorithm, weight, mask=None, grad=None):
    """Return a parameter with a given mask of nonzero weights."""
    one = SparseParam.of(
        "w", torch.nn.Parameter(torch.as_tensor(weight).float()), algorithm, Comm()
    )
    if mask is not None:
        one.pruned.copy_(torch.as_tensor(mask) == 0)
        one.param.detach().masked_fill_(one.pruned, 0)
    if grad is not None:
        one.param.grad = torch.as_tensor(grad).float()
    return one


def first(one, seed=0):
    return one.first_pruned(torch.tensor(one.numbers(-1, seed))).logical_not().int()


def following(one, step, seed=0):
    return (
        one.next_pruned(torch.tensor(one.numbers(step, seed)), one.gradient()).logical_not().int()
    )


# ---- order


def test_ranks_are_places_and_the_first_of_equals_comes_first():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 9.0]])
    assert ranks(scores).tolist() == [[3, 0, 1, 2], [1, 2, 3, 0]]


def test_random_scores_are_all_different_and_follow_from_their_key():
    rows, key = torch.empty(4, 5000), torch.tensor([123, 2**32 - 1])
    scores = random_scores(rows, key)
    assert scores.unique().numel() == 20000
    assert scores.min() >= 0
    assert scores.max() < 2**32
    assert torch.equal(scores, random_scores(torch.ones(4, 5000), key))
    for other in ([124, 2**32 - 1], [123, 2**32 - 2]):
        changed = random_scores(rows, torch.tensor(other))
        both = torch.stack([scores.flatten(), changed.flatten()]).double()
        assert torch.corrcoef(both)[0, 1].abs() < 0.03


def test_random_scores_are_spread_evenly():
    scores = random_scores(torch.empty(1, 2**16), torch.tensor([5, 6]))
    counts = torch.histc(scores.double(), bins=16, min=0, max=2**32)
    assert counts.sub(2**12).abs().max() < 5 * 2**6  # five standard deviations


def test_rows_are_groups_of_a_dimension():
    tensor = torch.arange(24).reshape(2, 4, 3)
    layout = RankingGroups(dim=1, num=2)
    rows = layout.rows(tensor)
    assert sorted(rows[0].tolist()) == tensor[:, :2].flatten().sort().values.tolist()
    assert torch.equal(layout.whole(rows, tensor), tensor)


# ---- initial masks


@pytest.mark.parametrize("method", ["random", "topk", "checkerboard"])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.75, 0.99])
def test_the_fraction_is_exact_in_the_beginning(method, fraction):
    one = masked(Static(fraction, init_method=method), torch.randn(7, 9, 3))
    assert first(one).sum() == 189 - round(fraction * 189)


def test_random_masks_depend_on_seed_and_name():
    one = masked(Static(0.5), torch.ones(8, 8))
    again = masked(Static(0.5), torch.zeros(8, 8))
    other = masked(Static(0.5), torch.ones(8, 8))
    other.name = "v"
    assert torch.equal(first(one), first(again))
    assert not torch.equal(first(one), first(one, seed=1))
    assert not torch.equal(first(one), first(other))


def test_topk_keeps_the_greatest_magnitudes():
    one = masked(Static(0.5, init_method="topk"), [[1, -4], [3, -2]])
    assert first(one).tolist() == [[0, 1], [1, 0]]


def test_from_zeros_keeps_what_is_there():
    one = masked(Static(0.9, init_method="from_zeros"), [[0, 1], [2, 0]])
    assert first(one).tolist() == [[0, 1], [1, 0]]


def test_a_checkerboard_is_one():
    one = masked(Static(0.5, init_method="checkerboard"), torch.randn(3, 4))
    assert first(one).tolist() == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]


def test_a_checkerboard_is_spread_evenly_over_lines():
    one = masked(Static(0.75, init_method="checkerboard"), torch.randn(8, 16))
    assert first(one).sum(1).tolist() == [4] * 8
    assert first(one).sum(0).tolist() == [2] * 16


# ---- updates


def test_static_masks_stay():
    one = masked(Static(0.5), [[1, 2, 3, 4]], [[1, 0, 1, 0]])
    assert not any(one.algorithm.is_due(step) for step in range(10))


def test_gmp_takes_the_smallest_away_and_none_comes_back():
    algorithm = GMP({"type": "linear", "init": 0.25, "slope": 0.25})
    one = masked(algorithm, [[-1, 5, 0.5, -2]], [[1, 0, 1, 1]])
    assert following(one, 1).tolist() == [[1, 0, 0, 1]]
    assert following(one, 2).tolist() == [[0, 0, 0, 1]]


def test_gmp_prunes_a_weight_that_is_small_rather_than_bring_one_back():
    one = masked(GMP(0.5), [[0, 7, 8, 0]], [[1, 0, 0, 1]])
    assert following(one, 1).tolist() == [[1, 0, 0, 1]]


def test_gmp_of_a_constant_is_never_due_and_otherwise_always():
    assert not GMP(0.5).is_due(3)
    assert GMP({"type": "cubic", "final": 0.5, "steps": 9}).is_due(3)


def test_rigl_drops_the_smallest_and_grows_the_greatest_gradient():
    algorithm = RigL(0.5, update={"freq": 1}, drop_fraction=0.5)
    one = masked(algorithm, [[4, 0, -1, 0, 3, 0, 2, 0]], [[1, 0, 1, 0, 1, 0, 1, 0]])
    one.param.grad = torch.tensor([[0.0, 1, 0, -9, 0, 2, 0, 8]])
    # -1 and 2 are dropped; -9 and 8 are the greatest gradients.
    assert following(one, 1).tolist() == [[1, 0, 0, 1, 1, 0, 0, 1]]


def test_what_rigl_drops_may_come_back_by_its_gradient():
    algorithm = RigL(0.5, update={"freq": 1}, drop_fraction=0.5)
    one = masked(algorithm, [[4, 0, 1, 0]], [[1, 0, 1, 0]], [[0, 1, -5, 2]])
    assert following(one, 1).tolist() == [[1, 0, 1, 0]]


def test_rigl_leaves_a_parameter_without_a_gradient_as_it_is():
    one = masked(RigL(0.5, update={"freq": 1}), [[4, 0, 1, 0]], [[1, 0, 1, 0]])
    assert following(one, 1).tolist() == [[1, 0, 1, 0]]


def test_set_keeps_the_greatest_and_grows_at_random():
    algorithm = SET(0.5, update={"freq": 1}, drop_fraction=0.25)
    weight = torch.arange(1.0, 401.0).reshape(20, 20)
    one = masked(algorithm, weight, torch.arange(400).reshape(20, 20) % 2)
    after = following(one, 3)
    kept = one.param.detach().flatten().topk(150).indices
    assert after.sum() == 200
    assert after.flatten()[kept].all()
    grown = after.flatten().bool() & one.pruned.flatten()
    assert 20 < grown.sum() <= 50  # a fifth of what may grow was there before
    assert torch.equal(after, following(one, 3))
    assert not torch.equal(after, following(one, 4))
    assert not torch.equal(after, following(one, 3, seed=1))


@pytest.mark.parametrize("kind", [SET, RigL])
def test_the_fraction_is_exact_after_each_update_of_a_changing_schedule(kind):
    schedule = {"type": "cycling", "values": [0.9, 0.3, 0.6], "period": 1}
    drop = {"type": "cosine", "init": 0.5, "half_period": 6}
    algorithm = kind(schedule, update={"freq": 1}, drop_fraction=drop)
    generator = torch.Generator().manual_seed(0)
    one = masked(algorithm, torch.randn(9, 11, generator=generator))
    one.pruned.copy_(first(one) == 0)
    for step, fraction in enumerate([0.3, 0.6, 0.9, 0.3], start=1):
        one.param.grad = torch.randn(9, 11, generator=generator)
        one.pruned.copy_(one.next_pruned(torch.tensor(one.numbers(step, 0)), one.gradient()))
        assert one.pruned.sum() == round(fraction * 99)


@pytest.mark.parametrize(("key", "dim"), [("balance_in_groups", 1), ("balance_out_groups", 0)])
def test_each_group_has_the_fraction(key, dim):
    algorithm = RigL(0.75, update={"freq": 1}, **{key: 3})
    one = masked(algorithm, torch.randn(6, 12), grad=torch.randn(6, 12))
    one.pruned.copy_(first(one) == 0)
    for _ in range(2):
        parts = one.pruned.chunk(3, dim)
        assert [part.sum().item() for part in parts] == [18, 18, 18]
        one.pruned.copy_(one.next_pruned(torch.tensor(one.numbers(1, 0)), one.gradient()))


def test_a_parameter_that_has_no_such_groups_is_refused():
    algorithm = RigL(0.5, update={"freq": 1}, balance_in_groups=5)
    with pytest.raises(ConfigError, match=r"'w' of shape \(6, 12\) cannot be divided into 5"):
        masked(algorithm, torch.randn(6, 12))
    with pytest.raises(ConfigError, match=r"'w' of shape \(6,\) cannot"):
        masked(algorithm, torch.randn(6))


# ---- arguments


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (None, []),
        (0, [Static]),
        (0.5, [Static]),
        ({"sparsity": 0.5}, [Static]),
        ({"algorithm": "RigL", "sparsity": 0.5, "update": {"freq": 3}}, [RigL]),
        ([{"sparsity": 0.5}, {"algorithm": "gmp", "schedule": 0.5}], [Static, GMP]),
        ({"algorithm": "group", "groups": [{"sparsity": 0.5}, [0.1, 0.2]]}, [Static] * 3),
        (SET(0.5, update={"freq": 1}), [SET]),
        (Group([Static(0.5), Group([GMP(0.1)])]), [Static, GMP]),
        (lambda: 0.5, [Static]),
        (lambda: None, []),
    ],
)
def test_an_algorithm_may_be_written_in_many_ways(given, kinds):
    assert [type(leaf) for leaf in algorithms_of(given)] == kinds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1.0, r"sparsity: expected a number in \[0, 1\), got 1.0"),
        ("0.5", r"sparsity: expected a number in \[0, 1\), got '0.5'"),
        ([], r"Group.groups: expected a list of algorithms, got \[\]"),
        ([0.5, "a"], r"sparsity\[1\]: expected a number in \[0, 1\), got 'a'"),
        ({"algorithm": "riggl"}, "sparsity.algorithm is 'riggl'. Did you mean 'rigl'?"),
        ({"sparsty": 0.5}, "sparsity.sparsty: no such argument of Static. Did you mean 'sparsity'"),
        ({"algorithm": "rigl", "sparsity": 0.5}, "sparsity.update is missing; RigL requires it"),
        ({"algorithm": "gmp"}, "GMP.sparsity is missing; give sparsity or schedule"),
        ({"algorithm": "gmp", "sparsity": 0, "schedule": 0}, "sparsity and schedule are both giv"),
        (
            {"sparsity": 0.5, "init_method": "top"},
            r"Static.init_method: .*, got 'top'. Did you mean 'topk'\?",
        ),
        ({"sparsity": 0.5, "init_method": ["topk"]}, r"Static.init_method: .*, got \['topk'\]"),
        (
            {"sparsity": 0.5, "param_filter": []},
            r"Static.param_filter: .* a glob, .*, got \[\]",
        ),
        ({"algorithm": "group", "groups": 3}, "Group.groups: expected a list of algorithms, got 3"),
    ],
)
def test_what_is_no_algorithm_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        algorithms_of(given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RigL(0.5, update={"freq": 1}, balance_in_groups=0),
            "balance_in_groups: .*, got 0",
        ),
        (
            lambda: RigL(0.5, update={"freq": 1}, balance_in_groups=1, balance_out_groups=1),
            "balance_in_groups and balance_out_groups are both given",
        ),
        (
            lambda: RigL(0.5, update={"freq": 1}, drop_fraction=1),
            r"RigL.drop_fraction: .* 1\).*, got 1",
        ),
        (lambda: SET(0.5, update=3), "SET.update: expected a mapping with freq or steps, got 3"),
        (
            lambda: SET(0.5, update={"freq": 1}, ensure_sparsity_fraction=False),
            "ensure_sparsity_fraction is False",
        ),
        (lambda: Group([3]), r"Group.groups\[0\] is 3, which is not an algorithm"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
