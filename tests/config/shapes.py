"""The format as a walk over a file: whose each key is, and what it may be.

It is said here a second time, apart from the checks that are tested: only the signatures of the
classes that a file names are the same, for they are the format of their arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from modelzoo_trainer.config.arguments import Parameter, Schema, schema_of
from modelzoo_trainer.config.names import Names, NameTable, Unshipped
from modelzoo_trainer.config.positions import FilePosition, Place, Problems, Scalar
from tests.config.parts import Part, plain

FORMAT = "the format"
_BACKEND = (
    "backend_type cluster_config compile_dir compile_only validate_only artifact_dir "
    "enable_distributed main_process_id dist_backend init_method sync_batchnorm"
)


@dataclass(frozen=True)
class Held:
    """A key, and all that is known of it.

    Args:
        key: The key.
        value: Its value.
        holder: The mapping that holds them.
        holder_line: Where the key of that mapping stands.
        path: From the root of the file.
        owner: The class or the section whose key it is.
        is_shipped: Whether that is part of this package.
        known: Keys that are right in that place.
        is_open: Whether any key is right there.
        is_unknown: Whether nothing at all is known of the place.
        is_required: Whether it has to be there.
        argument: What takes it, or what it is in, and the whole value of that; None if the format
            itself does.
        anchored: Of the file.
    """

    key: Part
    value: Part
    holder: Part
    holder_line: int
    path: str
    owner: str
    is_shipped: bool
    known: frozenset[str]
    is_open: bool
    is_unknown: bool
    is_required: bool
    argument: tuple[Parameter, Part] | None
    anchored: dict[str, Part]


@dataclass(frozen=True)
class Shape:
    """What fits in a place.

    Args:
        owner: The class or the section.
        keys: Those it has, with what fits there.
        required: Those of them that have to be there.
        is_open: Whether any other key is right as well.
        is_unknown: Whether nothing is known.
        is_shipped: Whether the owner is part of this package.
        of_key: What fits in the value of any key; for a class name.
        refine: Returns the shape for what is given, when that is known.
        parameter: What takes the value.
        flags: Whether keys that are no argument are flags, which are known by name.
        names: Of classes, where a key is one.
    """

    owner: str
    keys: dict[str, Shape] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    is_open: bool = False
    is_unknown: bool = False
    is_shipped: bool = True
    of_key: Callable[[str], Shape] | None = None
    refine: Callable[[Part], Shape] | None = None
    parameter: Parameter | None = None
    flags: bool = False
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _At:
    """Where the walk is: the line of the key that leads there, the path, and the argument."""

    line: int
    path: str
    argument: tuple[Parameter, Part] | None = None


class Format:
    """The format, with the classes of `names`."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._anchored: dict[str, Part] = {}
        self._seen: set[int] = set()

    def walk(self, root: Part, anchored: dict[str, Part]) -> Iterator[Held]:
        """Yield every key of a file once.

        Args:
            root: The file.
            anchored: Its anchors.
        """
        self._anchored, self._seen = anchored, set()
        yield from self._held(root, self._root(), _At(root.line, ""))

    def _held(self, part: Part, shape: Shape, at: _At) -> Iterator[Held]:
        part = self._anchored[part.value] if part.kind == "alias" else part
        if part.kind == "list":
            for idx, item in enumerate(part.items):
                inner = replace(at, path=f"{at.path}[{idx}]", line=item.line)
                yield from self._held(item, shape, inner)
            return
        shape = shape.refine(part) if shape.refine is not None else shape
        for key, value in part.pairs:
            if key.start in self._seen:
                continue
            self._seen.add(key.start)
            inner = shape.of_key(key.value) if shape.of_key else shape.keys.get(key.value)
            is_flag = shape.flags and key.value.startswith("csx.")
            argument = at.argument
            if inner is not None and inner.parameter is not None:
                argument = (inner.parameter, value)
            yield Held(
                key,
                value,
                part,
                at.line,
                f"{at.path}.{key.value}".lstrip("."),
                shape.owner,
                shape.is_shipped,
                shape.names | frozenset(shape.keys),
                shape.is_open and not is_flag,
                shape.is_unknown or (inner is None and shape.is_open and not is_flag),
                self._is_required(key, part, shape, argument),
                argument,
                self._anchored,
            )
            below = inner or replace(shape, keys={}, required=frozenset(), refine=None)
            if inner is not None and inner.parameter is not None:
                owner = f"{shape.owner}.{key.value}"
                below = Shape(owner, is_shipped=shape.is_shipped)
            yield from self._held(
                value, below, _At(key.line, f"{at.path}.{key.value}".lstrip("."), argument)
            )

    def _is_required(
        self, key: Part, holder: Part, shape: Shape, argument: tuple[Parameter, Part] | None
    ) -> bool:
        if argument is None or shape.keys:
            return key.value in shape.required
        parameter, whole = argument
        return not fits(parameter, plain(whole, self._anchored, key, {}))

    def _root(self) -> Shape:
        fit = {key: self._loader() for key in ("train_dataloader", "val_dataloader")}
        text = Shape(FORMAT)
        trainer = Shape(
            "trainer",
            {
                "init": self._init(),
                "fit": Shape("fit", {**fit, "ckpt_path": text}, frozenset({"train_dataloader"})),
                "validate": Shape(
                    "validate",
                    {"val_dataloader": self._loader(), "ckpt_path": text},
                    frozenset({"val_dataloader"}),
                ),
                "validate_all": Shape(
                    "validate_all", {"val_dataloaders": self._loader(), "ckpt_paths": text}
                ),
            },
            frozenset({"init"}),
        )
        several = Shape(FORMAT, {"trainer": trainer}, frozenset({"trainer"}))
        either = replace(trainer, refine=lambda part: several if _is_item(part) else trainer)
        return Shape(FORMAT, {"trainer": either}, frozenset({"trainer"}))

    def _init(self) -> Shape:
        names = self._names
        single = Shape(FORMAT)
        keys = dict.fromkeys(("device", "model_dir", "seed"), single)
        keys["backend"] = Shape("backend", dict.fromkeys(_BACKEND.split(), single), flags=True)
        keys["sparsity"] = Shape("sparsity")
        keys["model"] = Shape("model", refine=self._model)
        keys["optimizer"] = self._component(names.optimizers, 1)
        keys["schedulers"] = self._component(names.schedulers, 1)
        keys["callbacks"] = self._component(names.callbacks)
        keys["loggers"] = self._component(names.loggers)
        for key, target in names.sections.items():
            keys[key] = _arguments(schema_of(target))
        return Shape("init", keys, frozenset({"model"}))

    def _component(self, table: NameTable, num_injected: int = 0) -> Shape:
        def arguments(name: str) -> Shape:
            found = self._schema(table, name, num_injected)
            nested = {key: self._component(table, num_injected) for key in _NESTED}
            if found is None:
                return Shape(name, is_unknown=True, is_shipped=False)
            schema, is_shipped = found
            keys = nested if table.kind == "scheduler" else {}
            return _arguments(schema, is_shipped=is_shipped, nested=keys)

        names = frozenset({*table.names, *table.published_names(table.kind)})
        return Shape(f"the {table.kind}s", of_key=arguments, names=names)

    def _loader(self) -> Shape:
        refine = self._named("data_processor", self._names.processors)
        return Shape("dataloader", refine=refine)

    def _model(self, part: Part) -> Shape:
        return self._named("name", self._names.models)(part)

    def _named(self, key: str, table: NameTable) -> Callable[[Part], Shape]:
        """Return a function from a mapping to its shape, the class named by one of its keys."""

        def shape(part: Part) -> Shape:
            given = [value.value for name, value in part.pairs if name.value == key]
            found = self._schema(table, given[0], 0) if given else None
            if found is None:  # nothing is known of it, but of the key that names it
                owner = given[0] if given else f"a {table.kind} without a name"
                keys = {key: Shape(FORMAT)} if given else {}
                return Shape(owner, keys, frozenset(keys), is_open=True, is_shipped=False)
            schema, is_shipped = found
            full = _arguments(schema, is_shipped=is_shipped)
            return replace(
                full,
                keys={**full.keys, key: Shape(FORMAT)},
                required=full.required | {key},
            )

        return shape

    def _schema(self, table: NameTable, name: str, num: int) -> tuple[Schema, bool] | None:
        at = FilePosition("")
        problems = Problems(for_a_run=False)
        target = table.find(name, Place(Scalar(name, at), "", at), problems)
        if target is None:
            return None
        if isinstance(target, Unshipped):
            return target.schema, False
        return schema_of(target, num), True


_NESTED = ("scheduler", "schedulers")


def _is_item(part: Part) -> bool:
    return len(part.pairs) == 1 and part.pairs[0][0].value == "trainer"


def _arguments(
    schema: Schema, *, is_shipped: bool = True, nested: dict[str, Shape] | None = None
) -> Shape:
    keys = {
        name: Shape(schema.owner, parameter=parameter, is_shipped=is_shipped)
        for name, parameter in schema.parameters.items()
    }
    keys |= {name: shape for name, shape in (nested or {}).items() if name in keys}
    required = {name for name, one in schema.parameters.items() if one.is_required}
    return Shape(
        schema.owner,
        keys,
        frozenset(required),
        schema.is_open,
        is_shipped=is_shipped,
        flags=is_shipped,
    )


def fits(parameter: Parameter, value: Any) -> bool:
    """Return whether a parameter takes a value that stands in a file.

    Args:
        parameter: Its annotation decides.
        value: Dictionaries, lists and scalars.
    """
    if parameter.adapter is None:
        return True
    try:
        parameter.adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True
