"""Callbacks of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from modelzoo_trainer import Callback, HookError, Hooks
from modelzoo_trainer.hooks import plugins

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path, monkeypatch) -> Iterator[Install]:
    """A function that installs a package with plugins: its name, code and entry points."""
    installed: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, code: str, **entries: str) -> None:
        installed.append(name)
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{plugins.GROUP}]", *lines]))
        plugins._installed.cache_clear()

    yield put
    plugins._installed.cache_clear()
    for name in installed:
        sys.modules.pop(name, None)


CODE = """
from modelzoo_trainer import Callback, Logger
class Found(Callback):
    def on_it(self, seen): seen.append(type(self).__name__)
class Other(Found): pass
class Sink(Logger):
    def log_metrics(self, metrics, step): pass
def none(): return None
def one(): return Found()
def listed(): return [Found()]
def several(): return (Found(), Other())
def sink(): return Sink()
def fails(): raise LookupError("no licence")
def wrong(): return [3]
def pair(): return ("post-forward", None)
number = 3
"""


@pytest.mark.parametrize(
    ("factory", "found"),
    [("none", []), ("one", ["Found"]), ("listed", ["Found"]), ("several", ["Found", "Other"])],
)
def test_a_plugin_brings_none_one_or_several(install, trainer_of, factory, found) -> None:
    install("finder", CODE, mine=f"finder:{factory}")
    seen: list[str] = []
    trainer_of().call("on_it", seen=seen)
    Hooks().call("on_it", seen=seen)
    assert seen == found * 2


def test_plugins_come_after_the_users_ordered_by_name(install, trainer_of) -> None:
    class Mine(Callback):
        def on_it(self, seen):
            seen.append("Mine")

    install("late", CODE.replace("Found", "Late"), b="late:one")
    install("early", CODE.replace("Found", "Early"), a="early:one")
    seen: list[str] = []
    trainer_of(Mine()).call("on_it", seen=seen)
    assert seen == ["Mine", "Early", "Late"]


def test_a_logger_of_a_plugin_is_a_logger_of_the_trainer(install, trainer_of) -> None:
    install("sinks", CODE, mine="sinks:sink")
    loggers = trainer_of(progress="none").loggers
    assert [type(logger).__name__ for logger in loggers] == ["Sink"]


def test_each_trainer_has_callbacks_of_its_own(install, trainer_of, tmp_path) -> None:
    install("finder", CODE, mine="finder:one")
    first, second = (
        [callback for callback in trainer.all_callbacks if type(callback).__name__ == "Found"]
        for trainer in (trainer_of(model_dir=tmp_path / "a"), trainer_of(model_dir=tmp_path / "b"))
    )
    assert first[0] is not second[0]


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("broken:fails", LookupError, "no licence"),
        ("broken:number", HookError, r"broken:number is 3\. It must be a function"),
        ("broken:wrong", HookError, r"got 3 of type int, which has no hook"),
        (
            "broken:pair",
            HookError,
            r"got \('post-forward', None\) of type tuple, which has no hook",
        ),
        ("broken:missing", AttributeError, "missing"),
        ("not_there:one", ModuleNotFoundError, "not_there"),
    ],
)
def test_a_plugin_that_fails_is_named(install, trainer_of, entry, error, message) -> None:
    install("broken", CODE, mine=entry)
    with pytest.raises(error, match=message) as caught:
        trainer_of()
    [note] = caught.value.__notes__
    assert f"plugin 'mine' ({entry}) of broken 1.0" in note


def test_nothing_of_a_plugin_is_imported_before_a_trainer_is_built(install) -> None:
    install("finder", CODE, mine="finder:one")
    assert "finder" not in sys.modules


def test_plugins_can_be_switched_off(install, trainer_of) -> None:
    install("broken", CODE, mine="broken:fails")
    with plugins.disabled():
        trainer_of()
    Hooks(plugins=False)
    plugins.set_enabled(False)
    try:
        Hooks()
    finally:
        plugins.set_enabled(True)
    with pytest.raises(LookupError):
        Hooks()


def test_what_a_plugin_brings_is_reported(install, trainer_of, caplog) -> None:
    install("finder", CODE, mine="finder:several")
    with caplog.at_level("INFO", "modelzoo_trainer.plugins"):
        trainer_of()
    assert "plugin 'mine' (finder:several) of finder 1.0: Found, Other" in caplog.text
