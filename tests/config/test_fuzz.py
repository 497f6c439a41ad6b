"""Whatever a file holds, it is a plan or a `ConfigError` with places, and nothing else."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.overrides import parse_override
from modelzoo_trainer.config.plan import MODES
from modelzoo_trainer.config.resolved import to_yaml
from modelzoo_trainer.errors import ConfigError

FUZZ = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PIECES = st.sampled_from(
    [
        "a",
        "b: ",
        "- ",
        "\n",
        "  ",
        "&x ",
        "*x",
        "<<: ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "!!str ",
        "!t ",
        "'",
        '"',
        "|\n",
        "? ",
        ": ",
        "#",
        "---",
        "1e-4",
        "null",
        "\t",
        "%",
        "@",
        "\x00",
        "\ufeff",
    ]
)
WORDS = st.sampled_from(
    [
        "trainer",
        "init",
        "fit",
        "validate",
        "validate_all",
        "model",
        "name",
        "tiny_net",
        "AdamW",
        "optimizer",
        "schedulers",
        "SequentialLR",
        "callbacks",
        "EarlyStopping",
        "CheckLoss",
        "loop",
        "train_dataloader",
        "val_dataloaders",
        "data_processor",
        "Digits",
        "batch_size",
        "lr",
        "backend",
        "backend_type",
        "device",
        "cpu",
        "precision",
        "hidden_size",
        "max_steps",
        "seed",
    ]
)
LEAVES = WORDS | st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | st.text(max_size=3)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
SECTIONS = st.dictionaries(WORDS, TREES, max_size=4)
FILES = st.builds(
    lambda init, rest: {"trainer": {"init": {"model": {"name": "tiny_net"}, **init}, **rest}},
    SECTIONS,
    SECTIONS,
)
LINE = re.compile(r"f\.yaml(:\d+:\d+)?: \S")


def refusal(function, *args):
    """Return the lines of the `ConfigError` that `function` raises; none if it raises none."""
    try:
        function(*args)
    except ConfigError as error:
        return str(error).split("\n")
    return []


@FUZZ
@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    assert all(LINE.match(line) for line in refusal(read_text, text, "f.yaml"))


@FUZZ
@given(st.lists(PIECES, max_size=14))
def test_any_mixture_of_yaml_is_read_or_refused(pieces):
    assert all(LINE.match(line) for line in refusal(read_text, "".join(pieces), "f.yaml"))


@FUZZ
@given(FILES, st.sampled_from(list(MODES)))
def test_any_tree_is_planned_or_refused(names, tree, mode):
    node = read_text(to_yaml(tree), "f.yaml")
    assert all(LINE.match(line) for line in refusal(check_config, node, names, mode))


@FUZZ
@given(st.lists(PIECES | WORDS | st.sampled_from([".", "=", "[0]", '"a.b"']), max_size=8))
def test_any_change_is_parsed_or_refused(pieces):
    change = "".join(pieces)
    found = "\n".join(refusal(parse_override, change))
    assert found == "" or found.startswith(f"--set {change}: ")
