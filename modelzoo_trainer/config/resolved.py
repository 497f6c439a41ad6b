"""Plain values to YAML text that reads back as the same values."""

from __future__ import annotations

from typing import Any

import yaml

from modelzoo_trainer.config import scalars


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper without aliases, quoting what YAML 1.1 or 1.2 would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def resolve(
        self, kind: type[yaml.Node], value: str | None, implicit: bool | tuple[bool, bool]
    ) -> str:
        older = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]  # stubs
        plain = implicit[0] if isinstance(implicit, tuple) else implicit
        if kind is not yaml.ScalarNode or not plain or value is None:
            return str(older)
        newer = scalars.TAG + scalars.kind_of(value)
        return str(older) if newer == scalars.TAG + "str" else newer


def to_yaml(plain: Any) -> str:
    """Return `plain` as YAML, keys in their order, nothing shared.

    Args:
        plain: Dictionaries, lists, numbers, texts, booleans and None.
    """
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
