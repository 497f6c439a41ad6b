"""Changes from the command line."""

import pytest

from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.overrides import apply_overrides, parse_override, set_option
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.errors import ConfigError

FILE = """\
trainer:
  init:
    seed: 1
    loop: &loop {max_steps: 5}
    callbacks:
      - CheckLoss: {}
      - EarlyStopping: {patience: 3}
      - KeepN: null
    loggers: null
  fit: {other: *loop}
"""
SEVERAL = "trainer:\n- trainer: {init: {seed: 1}}\n- trainer: {init: {seed: 2}}\n"


def apply(*changes, text=FILE):
    root = read_text(text, "params.yaml")
    return to_plain(apply_overrides(root, [parse_override(change) for change in changes]))


def init(*changes):
    return apply(*changes)["trainer"]["init"]


@pytest.mark.parametrize("path", ["trainer.init.loop.max_steps", "init.loop.max_steps"])
def test_a_path_begins_at_the_root_or_inside_trainer(path):
    assert init(f"{path}=10")["loop"] == {"max_steps": 10}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("on", "on"),
        ("", None),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("{a: {b: c}}", {"a": {"b": "c"}}),
        ("a=b", "a=b"),
        ("'1'", "1"),
    ],
)
def test_the_value_is_yaml(text, value):
    assert init(f"init.seed={text}")["seed"] == value


def test_a_path_that_is_not_there_is_made():
    assert init("init.checkpoint.steps=2")["checkpoint"] == {"steps": 2}


def test_an_item_is_named_by_its_index():
    assert init("init.callbacks[1].EarlyStopping.patience=9")["callbacks"][1] == {
        "EarlyStopping": {"patience": 9}
    }


def test_an_item_is_named_by_its_class_in_any_case():
    assert init("init.callbacks[earlystopping].patience=9")["callbacks"][1] == {
        "EarlyStopping": {"patience": 9}
    }


def test_an_item_without_arguments_gets_some():
    assert init("init.callbacks[KeepN].n=2")["callbacks"][2] == {"KeepN": {"n": 2}}


def test_a_component_that_is_not_there_is_added():
    changed = init("init.callbacks[my.mod.Mine].x=1", "init.loggers[Progress]=null")
    assert changed["callbacks"][3] == {"my.mod.Mine": {"x": 1}}
    assert changed["loggers"] == [{"Progress": None}]


def test_a_key_with_dots_is_written_in_quotes():
    assert init('init.callbacks[CheckLoss]."csx.flag"=1')["callbacks"][0] == {
        "CheckLoss": {"csx.flag": 1}
    }


def test_a_path_leads_through_a_key_with_dots_that_the_file_has():
    text = "trainer: {init: {optimizer: {torch.optim.SGD: {lr: 1}, torch: {optim: 2}}}}"
    for path in ("torch.optim.SGD.lr", "'torch.optim.SGD'.lr".replace("'", '"')):
        set_ = apply(f"init.optimizer.{path}=3", text=text.replace(", torch: {optim: 2}", ""))
        assert set_["trainer"]["init"]["optimizer"] == {"torch.optim.SGD": {"lr": 3}}
    both = apply("init.optimizer.torch.optim=3", text=text)["trainer"]["init"]["optimizer"]
    assert both == {"torch.optim.SGD": {"lr": 1}, "torch": {"optim": 3}}
    absent = apply("init.optimizer.torch.optim.Adam=3", text=text.partition(", torch")[0] + "}}}")
    assert absent["trainer"]["init"]["optimizer"]["torch"] == {"optim": {"Adam": 3}}


def test_changes_are_applied_in_order():
    assert init("init.loop={num_steps: 1}", "init.loop.max_steps=7")["loop"] == {
        "num_steps": 1,
        "max_steps": 7,
    }


def test_a_change_under_an_alias_changes_one_place_only():
    changed = apply("init.loop.max_steps=10")["trainer"]
    assert changed["init"]["loop"] == {"max_steps": 10}
    assert changed["fit"]["other"] == {"max_steps": 5}


def test_in_a_list_of_trainers_a_short_path_changes_all():
    changed = apply("init.seed=9", text=SEVERAL)["trainer"]
    assert [item["trainer"]["init"]["seed"] for item in changed] == [9, 9]


@pytest.mark.parametrize("path", ["trainer[1].trainer.init.seed", "trainer[1].init.seed"])
def test_in_a_list_of_trainers_an_index_changes_one(path):
    changed = apply(f"{path}=9", text=SEVERAL)["trainer"]
    assert [item["trainer"]["init"]["seed"] for item in changed] == [1, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("init.seed", "is not of the form PATH=VALUE. Write --set a.b.c=VALUE, with items of a"),
        ("=3", "is not of the form PATH=VALUE"),
        ("init..seed=3", "is not of the form PATH=VALUE"),
        ("init.callbacks[=3", "is not of the form PATH=VALUE"),
        ("init.seed.x=3", "trainer.init.seed is 1 and has no key 'x'."),
        ("init.seed[0]=3", "trainer.init.seed is 1, not a list"),
        (
            "init.callbacks.CheckLoss=3",
            "trainer.init.callbacks is a list and has no key 'CheckLoss",
        ),
        (
            "init.callbacks[3].x=3",
            "trainer.init.callbacks[3] does not exist; the list has 3 items.",
        ),
        (
            "init.callbacks[-1]=3",
            "trainer.init.callbacks[-1] does not exist; the list has 3 items.",
        ),
        ("init.loggers[1].x=1", "trainer.init.loggers[1] does not exist; the list has 0 items."),
        ("init.seed=[1", "'[' is not closed: expected ',' or ']', but got the end"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_by_its_option(change, message):
    with pytest.raises(ConfigError) as caught:
        apply(change)
    assert str(caught.value).startswith(f"--set {change}: {message}")


def test_a_class_name_that_fits_several_items_is_refused():
    text = "trainer: {init: {callbacks: [{A: {}}, {a: {}}]}}"
    with pytest.raises(ConfigError) as caught:
        apply("init.callbacks[A].x=1", text=text)
    assert str(caught.value) == (
        "--set init.callbacks[A].x=1: trainer.init.callbacks[A] is ambiguous: items "
        "[0, 1] have that name; select one by its index."
    )


def test_an_option_of_its_own_gives_text():
    option = set_option(("trainer", "init", "seed"), "1", "--seed")
    root = apply_overrides(read_text(FILE, "params.yaml"), [option])
    assert to_plain(root)["trainer"]["init"]["seed"] == "1"


def test_an_option_may_leave_alone_what_is_not_there():
    option = set_option(("trainer", "init", "backend", "kind"), None, "--device", only_present=True)
    root = read_text(FILE, "params.yaml")
    assert to_plain(apply_overrides(root, [option])) == to_plain(root)
