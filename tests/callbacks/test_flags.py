"""Flags of other hardware: checked, and let be but for one."""

import pytest
from doubles import make_trainer

from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from modelzoo_trainer.errors import ConfigError

SIZE = "csx.performance.micro_batch_size"


@pytest.mark.parametrize("cls", [GlobalFlags, ScopedTrainFlags, ScopedValidateFlags])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"csx.performance.micro_batch_sise": 1}, f"is not a flag. Did you mean '{SIZE}'"),
        ({"micro_batch_size": 1}, "is not a flag."),
        ({SIZE: 0}, "is 0; expected a whole number > 0, 'auto', 'explore'"),
        ({SIZE: True}, "is True; expected a whole number"),
        ({SIZE: "all"}, "is 'all'; expected a whole number"),
        ({SIZE: {"explore": {"min": 0}}}, "expected a whole number > 0"),
        ({"csx.debug.execute_crd_memory_gi": "much"}, "is 'much'; expected a whole number."),
    ],
)
def test_a_wrong_flag_is_refused(cls, flags, message):
    (name,) = flags
    with pytest.raises(ConfigError, match=f"{cls.__name__}.{name} ") as caught:
        cls(**flags)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["auto", "explore", {"explore": {"min": 2, "max": 8}}, None])
def test_a_size_that_others_would_choose_leaves_batches_whole(value):
    flags = ScopedTrainFlags(**{SIZE: value})
    assert flags.micro_batch_size is None
    assert len(flags.notes) == (value is not None)


def test_what_has_no_effect_is_told():
    flags = GlobalFlags(**{"csx.debug.execute_crd_memory_gi": 50, "csx.new.thing": 1, SIZE: 2})
    assert flags.notes == [
        "csx.debug.execute_crd_memory_gi, csx.new.thing: no effect on this hardware."
    ]


@pytest.mark.parametrize(
    ("callbacks", "sizes"),
    [
        ([GlobalFlags(**{SIZE: 2})], (2, 2)),
        ([GlobalFlags(**{SIZE: 2}), ScopedValidateFlags()], (2, 2)),
        ([ScopedValidateFlags(**{SIZE: 3}), GlobalFlags(**{SIZE: 2})], (2, 3)),
        ([ScopedTrainFlags(**{SIZE: None}), GlobalFlags(**{SIZE: 2})], (None, 2)),
        ([ScopedTrainFlags(**{SIZE: 4}), ScopedValidateFlags(**{SIZE: 3})], (4, 3)),
    ],
)
def test_scoped_flags_go_before_global_ones_in_any_order(tmp_path, callbacks, sizes):
    trainer = make_trainer(tmp_path, *callbacks)
    assert (trainer.data.micro_batch_size, trainer.val_micro_batch_size) == sizes
