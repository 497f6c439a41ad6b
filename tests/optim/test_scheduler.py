"""Schedules applied to an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.optim import LRScheduler, check_conflicts, make_param_groups
from modelzoo_trainer.optim.composed import (
    ChainedScheduler,
    ScalePerParamLR,
    SequentialLR,
    SequentialWD,
)
from modelzoo_trainer.optim.cycles import CosineAnnealingLR
from modelzoo_trainer.optim.decay import ConstantLR, CosineDecayLR, ExponentialLR, LinearLR
from modelzoo_trainer.optim.stepwise import MultiplicativeLR, StepLR
from modelzoo_trainer.optim.weight_decay import ConstantWD, CosineDecayWD, LinearWD


def lrs(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def decays(optimizer):
    return [group["weight_decay"] for group in optimizer.param_groups]


def warm_up_and_decay(optimizer=None, **kwargs):
    members = [LinearLR(None, 0.0, 1.0, 4), CosineDecayLR(None, 1.0, 0.1, 10)]
    return SequentialLR(optimizer, members, **kwargs)


def test_binding_writes_the_first_value(sgd):
    LinearLR(sgd, 0.2, 1.0, 4)
    assert lrs(sgd) == pytest.approx([0.2, 0.2])


def test_a_schedule_without_optimizer_is_bound_later(sgd):
    schedule = LinearLR(None, 0.2, 1.0, 4)
    assert schedule.optimizer is None
    schedule.bind(sgd)
    assert schedule.optimizer is sgd
    assert lrs(sgd) == pytest.approx([0.2, 0.2])


def test_a_schedule_is_bound_once(sgd):
    with pytest.raises(ConfigError, match="LinearLR already has an optimizer"):
        LinearLR(sgd, 0.2, 1.0, 4).bind(sgd)


def test_a_step_without_optimizer_is_refused():
    with pytest.raises(ConfigError, match="LinearLR has no optimizer"):
        LinearLR(None, 0.2, 1.0, 4).step()


def test_each_step_writes_its_value(sgd):
    schedule = LinearLR(sgd, 0.0, 1.0, 4)
    seen = []
    for _ in range(5):
        schedule.step()
        seen.append(lrs(sgd))
    assert seen == [[0.25, 0.25], [0.5, 0.5], [0.75, 0.75], [1.0, 1.0], [1.0, 1.0]]
    assert schedule.get_last_lr() == [1.0, 1.0]


def test_only_groups_with_a_tag_are_written(sgd):
    schedule = LinearLR(sgd, 0.0, 1.0, 4, param_group_tags="b")
    schedule.step()
    assert lrs(sgd) == [0.5, 0.25]
    assert decays(sgd) == [0.25, 0.25]
    assert schedule.get_last_lr() == [0.25]


def test_a_tag_that_no_group_has_is_refused(sgd):
    with pytest.raises(ConfigError, match=r"param_group_tags is \['c'\], .* Tags .*: a, b"):
        ConstantLR(sgd, 0.1, param_group_tags=["c"])


def test_a_tensor_is_filled_in_place(sgd):
    held = torch.tensor(0.5)
    sgd.param_groups[0]["lr"] = held
    LinearLR(sgd, 0.0, 1.0, 4).step()
    assert sgd.param_groups[0]["lr"] is held
    assert held.item() == 0.25
    assert sgd.param_groups[1]["lr"] == 0.25


def test_groups_that_were_replaced_by_loading_are_written(sgd):
    schedule = LinearLR(sgd, 0.0, 1.0, 4)
    sgd.load_state_dict(sgd.state_dict())
    schedule.step()
    assert lrs(sgd) == [0.25, 0.25]


def test_the_members_of_a_sequence_follow_each_other_from_their_own_zero():
    schedule = SequentialLR(
        None,
        [LinearLR(None, 0.0, 1.0, 4), LinearLR(None, 10.0, 5.0, 5), ConstantLR(None, 7.0)],
    )
    assert schedule.milestones == [4, 9]
    assert [schedule.value(step) for step in (0, 3, 4, 5, 8, 9, 100)] == [
        0.0,
        0.75,
        10.0,
        9.0,
        6.0,
        7.0,
        7.0,
    ]


def test_a_sequence_is_a_member_with_the_length_of_its_members():
    inner = warm_up_and_decay()
    assert inner.total_iters == 14
    outer = SequentialLR(None, [inner, ConstantLR(None, 3.0)])
    assert outer.milestones == [14]
    assert [outer.value(step) for step in (2, 13, 14)] == [0.5, inner.value(13), 3.0]
    assert outer.total_iters is None


def test_members_made_with_the_optimizer_leave_no_trace_in_it(sgd):
    first = LinearLR(sgd, 0.0, 1.0, 4)
    inner = SequentialLR(sgd, [LinearLR(sgd, 9.0, 8.0, 2), ConstantLR(sgd, 7.0)])
    schedule = SequentialLR(sgd, [first, inner], param_group_tags="a")
    assert lrs(sgd) == [0.0, 0.5]
    schedule.step()
    assert lrs(sgd) == [0.25, 0.5]
    assert first.optimizer is inner.optimizer is None


@pytest.mark.parametrize(
    ("members", "kwargs", "message"),
    [
        (list, {}, r"SequentialLR\.schedulers is empty"),
        (
            lambda: [CosineAnnealingLR(None, 0.1, 5), ConstantLR(None, 0.1)],
            {},
            r"SequentialLR\.schedulers\[0\]: CosineAnnealingLR has no total_iters",
        ),
        (
            lambda: [LinearLR(None, 0.0, 1.0, 4), ConstantLR(None, 0.1)],
            {"milestones": [5]},
            r"SequentialLR\.milestones is \[5\], but the total_iters .* add up to \[4\]",
        ),
        (
            lambda: [ConstantWD(None, 0.1)],
            {},
            "must change lr, but ConstantWD changes weight_decay",
        ),
        (lambda: [ConstantLR(None, 0.1, None, "a")], {}, "ConstantLR sets param_group_tags"),
        (lambda: ["ConstantLR"], {}, "'ConstantLR' is not a schedule"),
    ],
)
def test_members_that_do_not_fit_are_refused(members, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        SequentialLR(None, members(), **kwargs)


def test_milestones_that_agree_are_taken():
    members = [LinearLR(None, 0.0, 1.0, 4), ConstantLR(None, 0.1)]
    assert SequentialLR(None, members, milestones=[4]).milestones == [4]


def test_a_sequence_may_begin_after_a_step(sgd):
    schedule = warm_up_and_decay(sgd, last_epoch=1)
    assert lrs(sgd) == [0.5, 0.5]
    schedule.step()
    assert lrs(sgd) == [0.75, 0.75]
    assert schedule.state_dict()["last_step"] == 3
    with pytest.raises(ConfigError, match=r"SequentialLR\.last_epoch is -2; it must be a step, or"):
        warm_up_and_decay(last_epoch=-2)


def test_a_sequence_is_that_of_torch():
    theirs = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    members = [
        theirs.LinearLR(optimizer, 0.5, 1.0, 4),
        theirs.ExponentialLR(optimizer, 0.9),
        theirs.CosineAnnealingLR(optimizer, 6, 0.1),
    ]
    sequence = theirs.SequentialLR(optimizer, members, [4, 9])
    ours = SequentialLR(
        None,
        [
            LinearLR(None, 0.4, 0.8, 4),
            ExponentialLR(None, 0.8, 5, 0.9**5),
            CosineDecayLR(None, 0.8, 0.1, 6),
        ],
    )
    for step in range(16):
        assert ours.value(step) == pytest.approx(lrs(optimizer)[0], rel=1e-9), step
        optimizer.step()
        if step < 15:
            sequence.step()


def test_a_chain_multiplies_what_becomes_of_its_members():
    chain = ChainedScheduler(
        None, [LinearLR(None, 0.0, 1.0, 4), MultiplicativeLR(None, 0.5, coefficient=0.9)]
    )
    expected = [min(step / 4, 1) * 0.9**step for step in range(8)]
    assert [chain.value(step) for step in range(8)] == pytest.approx(expected)


def test_a_chain_is_that_of_torch():
    theirs = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.9)
    chained = theirs.ChainedScheduler(
        [theirs.LinearLR(optimizer, 0.5, 1.0, 4), theirs.ExponentialLR(optimizer, 0.9)]
    )
    ours = ChainedScheduler(
        None, [LinearLR(None, 0.45, 0.9, 4), MultiplicativeLR(None, 1.0, coefficient=0.9)]
    )
    for step in range(10):
        assert ours.value(step) == pytest.approx(lrs(optimizer)[0], rel=1e-9)
        optimizer.step()
        chained.step()


def test_a_later_member_of_a_chain_must_not_begin_at_zero():
    with pytest.raises(ConfigError, match=r"schedulers\[1\] starts at 0"):
        ChainedScheduler(None, [ConstantLR(None, 1.0), LinearLR(None, 0.0, 1.0, 4)])


@pytest.mark.parametrize("wrap", [lambda member: ScalePerParamLR(None, member), lambda m: m])
def test_groups_may_adjust_the_learning_rate(sgd, wrap):
    sgd.param_groups[1]["adjust_learning_rate"] = 0.5
    schedule = wrap(LinearLR(None, 0.2, 1.0, 4))
    schedule.bind(sgd)
    assert lrs(sgd) == pytest.approx([0.2, 0.1])
    schedule.step()
    assert lrs(sgd) == pytest.approx([0.4, 0.2])
    assert schedule.get_last_lr() == lrs(sgd)
    assert schedule.total_iters == 4


def test_a_state_round_trip_continues_where_it_was(sgd):
    schedule = warm_up_and_decay(sgd)
    for _ in range(6):
        schedule.step()
    state = schedule.state_dict()
    assert state["last_step"] == 6
    expected = []
    for _ in range(12):
        schedule.step()
        expected.append(lrs(sgd))

    other = torch.optim.SGD([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))], lr=9.0)
    resumed = warm_up_and_decay(other)
    resumed.load_state_dict(state)
    assert lrs(other) == [schedule.value(6)]
    for values in expected:
        resumed.step()
        assert lrs(other) == values[:1]


def test_a_state_with_other_members_is_refused():
    state = warm_up_and_decay().state_dict()
    with pytest.raises(CheckpointMismatch, match="has 2 schedulers, this one has 1"):
        SequentialLR(None, [ConstantLR(None, 0.1)]).load_state_dict(state)


def test_weight_decay_is_scheduled_beside_the_learning_rate(sgd):
    members = [LinearWD(None, 0.0, 0.4, 4), CosineDecayWD(None, 0.4, 0.0, 2), ConstantWD(None, 3.0)]
    both = [ConstantLR(sgd, 0.1), SequentialWD(sgd, members)]
    check_conflicts(both)
    seen = []
    for _ in range(6):
        for schedule in both:
            schedule.step()
        seen.append(decays(sgd)[1])
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.2, 3.0])
    assert lrs(sgd) == [0.1, 0.1]


def test_what_never_decays_is_left_alone_by_a_schedule_of_weight_decay():
    groups = make_param_groups(nn.Linear(2, 2), weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    ConstantWD(optimizer, 0.7).step()
    assert decays(optimizer) == [0.7, 0.0]


def test_an_optimizer_without_weight_decay_has_no_schedule_of_it():
    optimizer = torch.optim.Rprop([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="ConstantWD changes weight_decay, but Rprop has no such"):
        ConstantWD(optimizer, 0.1)


def test_two_schedules_of_one_key_need_tags(sgd):
    with pytest.raises(ConfigError, match="2 of them change lr, but ConstantLR"):
        check_conflicts([LinearLR(sgd, 0, 1, 4, param_group_tags="a"), ConstantLR(sgd, 0.1)])


def test_two_schedules_of_one_key_share_no_tag(sgd):
    rivals = [ConstantLR(sgd, 0.1, None, ["a", "b"]), LinearLR(sgd, 0, 1, 4, False, "b")]
    with pytest.raises(ConfigError, match=r"ConstantLR and LinearLR both change lr of the .* 'b'"):
        check_conflicts(rivals)


def test_two_schedules_of_one_key_share_no_group(sgd):
    sgd.param_groups[0]["tags"] = ["a", "c"]
    rivals = [ConstantLR(sgd, 0.1, None, "a"), ConstantLR(sgd, 0.2, None, "c")]
    with pytest.raises(
        ConfigError, match=r"both change lr of the group with the tags \['a', 'c'\]"
    ):
        check_conflicts(rivals)


def test_disjoint_tags_and_different_keys_do_not_conflict(sgd):
    check_conflicts([])
    check_conflicts(
        [
            ConstantLR(sgd, 0.1, None, "a"),
            ConstantLR(sgd, 0.2, None, "b"),
            ConstantWD(sgd, 0.3, None, ["a", "b"]),
        ]
    )
    assert lrs(sgd) == [0.1, 0.2]


def test_the_length_of_a_schedule_may_be_a_property_or_an_attribute(sgd):
    class Ramp(LRScheduler):
        def __init__(self, optimizer, length):
            self.length = length
            super().__init__(optimizer)

        @property
        def total_iters(self):
            return self.length

        def value(self, step):
            return min(step / self.length, 1.0)

    assert Ramp(sgd, 4).total_iters == 4
    assert StepLR(None, 0.1, 2, 0.5).total_iters is None
    assert ConstantLR(None, 0.1, 3).total_iters == 3


def test_a_subclass_may_have_a_constructor_and_attributes_of_its_own(sgd):
    class Halved(LinearLR):
        note: str = "half"

        def __init__(self, optimizer, begin):
            super().__init__(optimizer, begin, 0.0, 10)

        def value(self, step):
            return super().value(step) / 2

    schedule = Halved(sgd, 1.0)
    assert (lrs(sgd)[0], schedule.power, schedule.note) == (0.5, 1.0, "half")
