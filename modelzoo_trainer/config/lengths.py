"""Lengths that a data processor leaves out, taken from the model."""

from __future__ import annotations

from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.names import Names, Unshipped
from modelzoo_trainer.config.positions import Place, Problems, is_null


def fill_lengths(
    component: Component,
    place: Place,
    model: Component | None,
    names: Names,
    problems: Problems,
) -> None:
    """Set the lengths of samples that are left out to the model's, with a note.

    If a model says them only when it is built, they are left to the data processor. If the
    model has none, a problem is added.

    `component`: the data processor at `place`. `model`: None = it has problems of its own.
    """
    find = getattr(component.target, "lengths_from_model", None)
    if find is None or isinstance(component.target, Unshipped):
        return
    for name, attribute in find(component.arguments).items():
        given = place.key(name)
        if given is not None and not is_null(given.node):
            continue
        limit = ... if model is None else names.model_limit(model, attribute)
        at, path = place.key_at, place.path_of(name)
        if limit is None:
            owner = getattr(component.target, "__name__", component.path)
            what = (
                f"missing; {owner} requires it (an integer >= 1), as the model has no {attribute}."
            )
            problems.add(at, path, what)
        elif isinstance(limit, int):
            component.arguments[name] = limit
            problems.note(at, path, f"not set: {limit}, {attribute} of the model.")
        elif model is not None:
            what = f"not set: {attribute} of the model, which is known when the model is built."
            problems.note(at, path, what)
