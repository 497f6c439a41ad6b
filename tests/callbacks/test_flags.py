"""Flags of other hardware: checked, and let be but for one."""

import pytest

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
