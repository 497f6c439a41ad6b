"""Callbacks that are validated and have no effect."""

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.csx_noops import DebugArgsPath, WeightCompression

ONE = {"format": "int8", "param_filter": "*"}


def test_that_it_has_no_effect_is_reported():
    assert "no effect on this hardware" in DebugArgsPath("args.pb").notes[0]
    assert DebugArgsPath(None).notes == []
    assert "no effect on this hardware" in WeightCompression(ONE).notes[0]


def test_one_compression_is_a_list_of_one():
    assert WeightCompression(ONE).compressions == WeightCompression([ONE]).compressions


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda: DebugArgsPath(3), "DebugArgsPath.debug_args_path: expected a path or null, got 3"),
        (
            lambda: WeightCompression("int8"),
            "WeightCompression.compressions must be a dict or a list of dicts, got 'int8'",
        ),
        (lambda: WeightCompression({"format": "int8"}), "has no param_filter"),
        (lambda: WeightCompression([ONE, 3]), "3 has no format"),
    ],
)
def test_what_does_not_fit_is_refused(make_one, message):
    with pytest.raises(ConfigError, match=message):
        make_one()
