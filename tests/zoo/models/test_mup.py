"""muP coordinate check: activations after some steps do not depend on the width."""

from typing import Any

import pytest

from tests.docs.conftest import load_script
from tests.zoo.models.llama_settings import LLAMA

pytestmark = pytest.mark.slow

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", LLAMA | {"rotary_dim": 16}),
    "gptj": ("gptj", {"rotary_dim": 16, "scale_qk_dot_by_d": True}),
}


def spread(name: str, settings: dict[str, Any], *, uses_mup: bool) -> dict[str, float]:
    """Return the largest size over the smallest, and that of the widest over the narrowest."""
    mup = load_script("../benchmarks/mup.py")

    def make(width: int) -> Any:
        return mup.make_model(name, width, uses_mup=uses_mup, **settings)

    found = mup.coordinates(make)
    assert list(found) == [64, 128, 256, 512]
    columns = {part: [sizes[part] for sizes in found.values()] for part in mup.PARTS}
    if uses_mup:
        return {part: max(sizes) / min(sizes) for part, sizes in columns.items()}
    return {part: sizes[-1] / sizes[0] for part, sizes in columns.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_with_mup_activations_have_the_same_size_at_every_width(kind: str) -> None:
    name, settings = KINDS[kind]
    found = spread(name, settings, uses_mup=True)
    assert found.keys() == {"embedding", "attention", "ffn", "logits"}
    assert {part: size for part, size in found.items() if size > 1.5} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_without_mup_activations_grow_with_the_width(kind: str) -> None:
    name, settings = KINDS[kind]
    found = spread(name, settings, uses_mup=False)
    assert {part: size for part, size in found.items() if part != "embedding" and size < 3} == {}
