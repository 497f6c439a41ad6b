"""Which class a name means."""

import sys

import pytest

from modelzoo_trainer.base.user_modules import import_module
from modelzoo_trainer.config.arguments import schema_of
from modelzoo_trainer.config.components import check_component
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.names import NameTable, import_path
from modelzoo_trainer.config.positions import Place, Problems
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError

MODULE = """\
class Mine: ...
class CheckLoss: ...
def make(): ...
NUMBER = 3
"""


class CheckLoss: ...


class EarlyStopping: ...


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Return the name of a module of the user's, in a package."""
    package = tmp_path / "zoo_test_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "callbacks.py").write_text(MODULE)
    (package / "broken.py").write_text("1 / 0\n")
    (package / "needy.py").write_text("import zoo_test_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "zoo_test_package.callbacks"
    for name in [name for name in sys.modules if name.startswith("zoo_test_package")]:
        del sys.modules[name]


def table(*modules):
    classes = {"CheckLoss": CheckLoss, "EarlyStopping": EarlyStopping}
    shipped = NameTable.of("callback", classes)
    return NameTable(kind="callback", names=shipped.names, load=shipped.load, modules=modules)


def find(name, in_table):
    problems = Problems()
    place = Place.root(read_text("x", "f.yaml"))
    return in_table.find(name, place, problems), problems.lines()


@pytest.mark.parametrize("name", ["EarlyStopping", "earlystopping", "EARLYSTOPPING"])
def test_a_shipped_name_fits_in_any_case(name):
    assert find(name, table()) == (EarlyStopping, [])


def test_a_misspelt_name_is_refused_with_a_suggestion():
    assert find("EarlyStoping", table()) == (
        None,
        [
            "f.yaml:1:1: 'EarlyStoping' is not a callback. Did you mean 'EarlyStopping'? "
            "Known: CheckLoss, EarlyStopping."
        ],
    )


def test_a_foreign_name_is_refused_with_what_is_known():
    assert find("Xyz", table()) == (
        None,
        ["f.yaml:1:1: 'Xyz' is not a callback. Known: CheckLoss, EarlyStopping."],
    )


def test_a_name_that_is_a_number_is_refused():
    assert find(3, table()) == (None, ["f.yaml:1:1: 3 is not the name of a callback."])


def test_a_dotted_path_is_imported_when_it_is_named(own_module):
    assert own_module not in sys.modules
    found, problems = find(f"{own_module}.Mine", table())
    assert problems == []
    assert found is sys.modules[own_module].Mine


def test_classes_of_an_imported_module_have_bare_names(own_module):
    module = import_module(own_module)
    assert find("mine", table(module)) == (module.Mine, [])
    assert find("Mine2", table(module))[1] == [
        "f.yaml:1:1: 'Mine2' is not a callback. Did you mean 'Mine'? "
        "Known: CheckLoss, EarlyStopping, Mine."
    ]


def test_functions_and_values_of_an_imported_module_have_none(own_module):
    module = import_module(own_module)
    assert find("make", table(module))[0] is None
    assert find("number", table(module))[0] is None


def test_a_name_that_is_shipped_and_imported_is_refused(own_module):
    module = import_module(own_module)
    assert find("CheckLoss", table(module))[1] == [
        "f.yaml:1:1: 'CheckLoss' is in modelzoo_trainer and in zoo_test_package.callbacks. "
        "Write the dotted path of one of them."
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("zoo_test_nowhere.X", "Cannot import 'zoo_test_nowhere'."),
        ("zoo_test_package.no.X", "Cannot import 'zoo_test_package.no'."),
        ("zoo_test_package.callbacks.Mein", "zoo_test_package.callbacks has no 'Mein'. Did you"),
        (
            "zoo_test_package.callbacks.NUMBER",
            "'zoo_test_package.callbacks.NUMBER' is 3; expected ",
        ),
        (".X", "'' is not a valid module name."),
        ("a..X", "'a.' is not a valid module name."),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_a_path_that_leads_nowhere_says_where_it_ends(path, message):
    with pytest.raises(ConfigError) as caught:
        import_path(path)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["zoo_test_package.callbacks.Mine", "zoo_test_package/callbacks"])
@pytest.mark.usefixtures("own_module")
def test_a_module_is_not_asked_for_by_the_path_of_a_class(name):
    with pytest.raises(ConfigError) as caught:
        import_module(name)
    assert str(caught.value).startswith(f"{name!r} is not a ")
    assert str(caught.value).endswith(": package.module.")


@pytest.mark.usefixtures("own_module")
def test_the_name_of_a_file_is_not_that_of_a_module():
    with pytest.raises(ConfigError, match=r"'zoo_test_package\.py'.* Write zoo_test_package,"):
        import_module("zoo_test_package.py")


@pytest.mark.usefixtures("own_module")
def test_what_goes_wrong_inside_a_module_of_the_users_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        import_path("zoo_test_package.broken.X")
    with pytest.raises(ModuleNotFoundError, match="zoo_test_nowhere"):
        import_path("zoo_test_package.needy.X")


PUBLISHED = {"t5": schema_of(lambda *, layers, dropout=0.0: None, owner="t5")}


def with_published():
    return NameTable(
        kind="model",
        names=("gpt2",),
        load=lambda name: EarlyStopping,
        published=lambda kind, name: PUBLISHED.get(name.lower()),
        published_names=lambda kind: tuple(PUBLISHED),
    )


def model(text, *, for_a_run):
    problems = Problems(for_a_run=for_a_run)
    place = Place.root(read_text(text, "f.yaml")).key("model")
    return check_component(place, with_published(), problems), problems


def test_a_published_class_that_is_not_shipped_is_refused_for_a_run_with_what_to_do():
    _, problems = model("model: {T5: {layers: 1}}", for_a_run=True)
    [line] = problems.lines()
    assert line.startswith("f.yaml:1:9: model.T5: the model 'T5' is not part of this package. ")
    assert all(word in line for word in ("gpt2", "model: {mypkg.MyModel: {...}}", "--import"))


def test_in_a_check_it_is_a_note_and_its_arguments_are_checked():
    component, problems = model("model: {t5: {layers: 1}}", for_a_run=False)
    assert problems.lines() == []
    assert [note.message[:31] for note in problems.notes] == ["valid, but cannot run here: the"]
    assert component.target.name == "t5"
    with pytest.raises(ConfigError, match="is not part of this package"):
        component.build()
    _, problems = model("model: {t5: {layer: 1}}", for_a_run=False)
    assert problems.lines() == [
        "f.yaml:1:14: model.t5.layer: no such argument of t5. Did you mean 'layers'?",
        "f.yaml:1:9: model.t5.layers: missing; t5 requires it (anything).",
    ]


def test_a_misspelt_published_name_is_no_note():
    _, problems = model("model: {t55: {layers: 1}}", for_a_run=False)
    (line,) = problems.lines()
    assert line.startswith("f.yaml:1:9: model.t55: 't55' is not a model. Did you mean 't5'? Known")


def test_of_very_many_names_the_first_are_listed():
    many = NameTable.of("model", {f"name{number:03}": object for number in range(105)})
    _, [line] = find("naem104", many)
    assert "Did you mean 'name104'? Known: name000, name001" in line
    assert line.endswith("name099 and 5 more.")


@pytest.mark.parametrize(
    "kind", ["models", "optimizers", "schedulers", "callbacks", "loggers", "processors"]
)
def test_an_unknown_name_gets_all_of_its_kind_besides_the_nearest(kind):
    table = getattr(shipped_names(), kind)
    _, [line] = find(f"{table.names[0]}z", table)
    assert f"Did you mean {table.names[0]!r}? Known: " in line
    assert line.partition("Known: ")[2].removesuffix(".").split(", ") == sorted(table.names)
