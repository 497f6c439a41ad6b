"""The whole format as JSON Schema, for editors: made from the constructors, as the checks are."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.annotations import adapter_of
from modelzoo_trainer.config.json_schema.components import (
    Definitions,
    JsonSchema,
    TypeSchemas,
    component_schema,
    named_schema,
    one_of_types,
    reference,
)
from modelzoo_trainer.config.names import Names, NameTable
from modelzoo_trainer.config.sections import (
    INIT_KEYS,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    PROGRESS,
    SEED,
)

_MODEL_KEYS: Final = ("name", "model_name")
_TEXTS: Final = {
    "trainer": "What is trained or validated; or a list of trainers that run one after another.",
    "init": "What the trainer is made of.",
    "fit": "Training: needed in the modes train and train_and_eval.",
    "validate": "Validation over one dataloader: needed in the mode eval.",
    "validate_all": "Validation of several checkpoints over several dataloaders: mode eval_all.",
    "train_dataloader": "What is trained on.",
    "val_dataloader": "What is validated on.",
    "val_dataloaders": "What is validated on, one or several.",
    "ckpt_path": "Start from this checkpoint; null: from the weights as they are; left out: from "
    "the newest one of model_dir.",
    "ckpt_paths": "The checkpoints, one or several paths or patterns of paths.",
    "progress": "What the console shows: a bar, lines, or none; null: a bar on a terminal, else "
    "lines.",
    "device": "What to run on: cpu, gpu, auto or another, in any case.",
    "backend": "Options of the device.",
    "backend_type": "What to run on, as in `device`.",
    "model_dir": "The folder of the run.",
    "model": "The model: its name with its arguments, or {package.module.ClassName: {arguments}}.",
    "optimizer": "What trains the model; not needed to validate.",
    "schedulers": "What changes settings of the optimizer from step to step.",
    "sparsity": "Which weights stay zero: a fraction, a mapping with `algorithm`, or several.",
    "callbacks": "What else happens during a run; {Name: null} removes one of the defaults.",
    "loggers": "Where metrics go; {Name: null} removes one of the defaults.",
    "seed": "Makes runs repeatable; null: as torch was seeded.",
    "name": "Which model, in any case; a dotted path for one of your own.",
    "data_processor": "The class that reads the data, in any case; a dotted path for one of your "
    "own.",
}


def json_schema(names: Names) -> dict[str, Any]:
    """Return the schema of a configuration file (JSON Schema, draft 2020-12).

    It refuses what can be refused without running anything; what constructors refuse, and what
    only the device knows, is left to the check before a run.
    """
    return _Format(names).schema()


class _Format:
    """The parts of a file, each a definition or inside of one."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._types = TypeSchemas()
        self._definitions = Definitions(self._types)

    def schema(self) -> JsonSchema:
        trainer = {
            "description": _TEXTS["trainer"],
            "type": ["object", "array"],
            "if": {"type": "object"},
            "then": reference("trainer"),
            "minItems": 1,
            "items": _mapping({"trainer": reference("trainer")}, required=["trainer"]),
        }
        definitions = self._components() | {"trainer": self._trainer(), "init": self._init()}
        found = {**definitions, **self._definitions.found}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "modelzoo_trainer.schema.json",
            "title": "modelzoo_trainer configuration",
            **_mapping({"trainer": trainer}, required=["trainer"]),
            "$defs": found | self._types.definitions,
        }

    def _trainer(self) -> JsonSchema:
        one = reference("dataloader")
        several = {
            "type": ["object", "array", "null"],
            "if": {"type": "object"},
            "then": one,
            "items": one,
        }
        path = self._plain(OPTIONAL_TEXT)
        paths = self._plain(str | list[str] | None)
        fit = {"train_dataloader": one, "val_dataloader": several, "ckpt_path": path}
        validate = {"val_dataloader": one, "ckpt_path": path}
        validate_all = {"val_dataloaders": several, "ckpt_paths": paths}
        methods = {
            "fit": _mapping(fit, required=["train_dataloader"], is_optional=True),
            "validate": _mapping(validate, required=["val_dataloader"], is_optional=True),
            "validate_all": _mapping(validate_all, is_optional=True),
        }
        return _mapping({"init": reference("init")} | methods, required=["init"])

    def _init(self) -> JsonSchema:
        parts: JsonSchema = {
            "device": self._plain(OPTIONAL_TEXT),
            "backend": {
                "type": one_of_types("object", is_optional=True),
                "properties": {
                    "backend_type": {"description": _TEXTS["backend_type"]}
                    | self._plain(OPTIONAL_TEXT)
                },
            },
            "model_dir": self._plain(OPTIONAL_PATH),
            "model": reference("model"),
            "optimizer": reference("optimizer"),
            "schedulers": _list_of("scheduler"),
            "callbacks": _list_of("callback"),
            "loggers": _list_of("logger"),
            "progress": self._plain(PROGRESS),
            "seed": self._plain(SEED),
        }
        for key, target in self._names.sections.items():
            parts[key] = self._definitions.of_call(target, is_optional=True)
        return _mapping({key: parts.get(key, {}) for key in INIT_KEYS}, required=["model"])

    def _components(self) -> JsonSchema:
        names, definitions = self._names, self._definitions
        nested = {"scheduler": reference("scheduler"), "schedulers": _list_of("scheduler")}
        optimizers = definitions.of_table(names.optimizers, num_injected=1)
        schedulers = definitions.of_table(names.schedulers, num_injected=1, nested=nested)
        processors = definitions.of_table(names.processors, ignored=["data_processor"])
        dataloader = named_schema(_TEXTS["data_processor"], processors, ["data_processor"])
        return {
            "model": self._model(),
            "optimizer": component_schema(names.optimizers, optimizers, is_optional=True),
            "scheduler": component_schema(names.schedulers, schedulers),
            "callback": self._installed(names.callbacks, names.default_callbacks()),
            "logger": self._installed(names.loggers, names.default_loggers()),
            "dataloader": {"type": "object", "required": ["data_processor"], **dataloader},
        }

    def _installed(self, table: NameTable, defaults: Any) -> JsonSchema:
        removable = {type(default) for default in defaults}
        return component_schema(table, self._definitions.of_table(table, removable=removable))

    def _model(self) -> JsonSchema:
        table = self._names.models
        classes = self._definitions.of_table(
            table, ignored=_MODEL_KEYS, published=self._names.published_fields
        )
        # In the other form a class is the only key, and its arguments have no key for its name.
        unnamed = {"properties": dict.fromkeys(_MODEL_KEYS, False)}
        alone = component_schema(table, {name: ref | unnamed for name, ref in classes.items()})
        alone.pop("properties")  # so that an editor offers `name`, not the classes
        named = named_schema(_TEXTS["name"], classes, _MODEL_KEYS)
        return {
            "description": _TEXTS["model"],
            "type": "object",
            "properties": named.pop("properties"),
            "not": {"required": list(_MODEL_KEYS)},  # they are one setting
            "if": {"anyOf": [{"required": [key]} for key in _MODEL_KEYS]},
            "then": named,
            "else": alone,
        }

    def _plain(self, annotation: Any) -> JsonSchema:
        return self._types.of(adapter_of(annotation))


def _mapping(
    parts: JsonSchema, *, required: list[str] | None = None, is_optional: bool = False
) -> JsonSchema:
    """Return the schema of a mapping with a fixed set of keys."""
    return {
        "type": one_of_types("object", is_optional=is_optional),
        "properties": {
            key: ({"description": _TEXTS[key]} if key in _TEXTS else {}) | part
            for key, part in parts.items()
        },
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _list_of(name: str) -> JsonSchema:
    return {"type": one_of_types("array", is_optional=True), "items": reference(name)}
