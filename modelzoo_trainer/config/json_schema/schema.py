"""The JSON Schema of the whole format, for editors, made from the constructors."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.base.annotations import adapter_of
from modelzoo_trainer.config.json_schema.components import (
    Definitions,
    JsonSchema,
    TypeSchemas,
    component_schema,
    named_schema,
    one_of_types,
    reference,
    with_shared_arguments,
)
from modelzoo_trainer.config.names import Names, NameTable
from modelzoo_trainer.config.plan import METHODS
from modelzoo_trainer.config.sections import (
    INIT_KEYS,
    OPTIONAL_CALL,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    OPTIONAL_TEXTS,
    PROGRESS,
    SEED,
)

_MODEL_KEYS: Final = ("name", "model_name")
_TEXTS: Final = {
    "trainer": "A trainer, or a list of trainers that run one after another.",
    "init": "The parts of the trainer.",
    "fit": "Training; required in modes train and train_and_eval.",
    "validate": "Validation on one dataloader; required in mode eval.",
    "validate_all": "Validation of several checkpoints on several dataloaders; for mode eval_all.",
    "test": "A test, as a validation on one dataloader; required in mode test.",
    "predict": "The outputs of the model, written to files; required in mode predict.",
    "dataloader": "The data to test on or to predict for.",
    "output_dir": "The folder for the predictions; null: predictions in model_dir.",
    "eval_steps": "Number of batches; null: all.",
    "train_dataloader": "Training data.",
    "val_dataloader": "Validation data.",
    "val_dataloaders": "Validation data: one dataloader or several.",
    "ckpt_path": "Start from this checkpoint; best: the best one of SaveBest, last: the newest; "
    "null: from new weights; not given: from the newest one in model_dir.",
    "ckpt_paths": "The checkpoints: one or several paths or glob patterns; best and last as in "
    "ckpt_path.",
    "progress": "Console output: bar, lines or none; null: a bar on a terminal, otherwise lines.",
    "device": "The device: cpu, gpu, auto or another, in any case; or the path of a backend class.",
    "backend": "Options of the device.",
    "backend_type": "The device, as in `device`.",
    "model_dir": "The folder of the run.",
    "model": "The model: its name with its arguments, or {package.module.ClassName: {arguments}}.",
    "call_model": "How the model is called: batch = model(batch), kwargs = model(**batch), args = "
    "model(*batch); null: as the signature of its forward says at the first batch.",
    "optimizer": "The optimizer; not required for validation.",
    "schedulers": "Schedules of the learning rate and other settings of the optimizer.",
    "sparsity": "Which weights stay zero: a fraction, a mapping with `algorithm`, or several.",
    "callbacks": "Callbacks; {Name: null} removes a default one.",
    "loggers": "Loggers of metrics; {Name: null} removes a default one.",
    "seed": "Seed of all random generators; null: not seeded.",
    "name": "The model, upper or lower case; a dotted path for one of your own.",
    "data_processor": "The class that reads the data, upper or lower case; a dotted path for one "
    "of your own.",
}


def json_schema(names: Names) -> dict[str, Any]:
    """Return the schema of a configuration file (JSON Schema, draft 2020-12).

    It rejects what can be rejected without running code; what constructors reject, and what depends
    on the device, is found by the check before a run.
    """
    return _Format(names).schema()


class _Format:
    """The schema of a file, part by part."""

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
        found = {**definitions, **with_shared_arguments(self._definitions.found)}
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
        methods = {}
        for name, method in METHODS.items():
            parts = {
                key: several if key == method.several else one
                for key in (method.dataloader, *method.others)
            }
            path = OPTIONAL_TEXT if method.ckpt == "ckpt_path" else OPTIONAL_TEXTS
            parts[method.ckpt] = self._plain(path)
            parts |= {key: self._plain(annotation) for key, annotation in method.plain.items()}
            required = [method.dataloader] if method.is_needed else None
            methods[name] = _mapping(parts, required=required, is_optional=True)
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
            "call_model": self._plain(OPTIONAL_CALL),
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
