"""The JSON Schema of the format, made from the constructors' signatures."""

from modelzoo_trainer.config.json_schema.schema import json_schema

__all__ = ["json_schema"]
