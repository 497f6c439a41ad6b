"""What a mode of your own imports; see `Mode`."""

from modelzoo_trainer.zoo.rows.interface import (
    Array,
    Document,
    Entry,
    Hook,
    Mode,
    Rows,
    SemanticData,
    Stats,
    Tokens,
)

__all__ = [
    "Array",
    "Document",
    "Entry",
    "Hook",
    "Mode",
    "Rows",
    "SemanticData",
    "Stats",
    "Tokens",
]
