"""Our decoders with the weights of models of transformers.

Each function that ends in `_tensors` translates a mapping of their tensors, parameters or
gradients, into ours: the translations are linear, except for the norms of Gemma 2.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
VOCAB, WIDTH, HEADS, FILTER, LAYERS, LENGTH = 61, 32, 4, 48, 2, 24
DIM: Final = WIDTH // HEADS
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_heads": HEADS,
    "filter_size": FILTER,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": LENGTH,
    "dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}
THEIR_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": LENGTH,
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Case:
    """A model of transformers and the settings of ours.

    Args:
        name: Name of our model.
        kind: Name of their class, with a configuration class of the same stem.
        settings: Ours, besides `SIZES`.
        config: Theirs, besides `THEIR_SIZES`.
        tensors: Their tensors to ours.
        exact: Tolerance of float64; angles are float32 in both.
        is_offset: Whether norms have weights 1 + w.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: Callable[[Tensors], Iterator[tuple[str, Tensor]]]
    exact: float = 1e-10
    is_offset: bool = False


def weighted(tensors: Tensors, theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
    """Yield weight and bias, as far as they are there."""
    for kind in ("weight", "bias"):
        if f"{theirs}.{kind}" in tensors:
            yield f"{ours}.{kind}", tensors[f"{theirs}.{kind}"]


def divided(
    tensors: Tensors, theirs: str, ours: str, divide: Callable[[Tensor], tuple[Tensor, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield queries, keys and values of one projection, as far as they are there."""
    for kind in ("weight", "bias"):
        if f"{theirs}.{kind}" in tensors:
            parts = divide(tensors[f"{theirs}.{kind}"])
            for letter, part in zip("qkv", parts, strict=True):
                yield f"{ours}.{letter}_proj.{kind}", part


def per_head(rows: Tensor) -> tuple[Tensor, ...]:
    """Divide rows that are queries, keys, values of the first head, and so on."""
    return tuple(part.flatten(0, 1) for part in rows.unflatten(0, (-1, 3, DIM)).unbind(1))


def per_group(groups: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Divide rows that are queries, one key, one value of the first group, and so on."""

    def divide(rows: Tensor) -> tuple[Tensor, ...]:
        parts = rows.unflatten(0, (groups, HEADS // groups + 2, DIM))
        queries, keys, values = parts[:, :-2], parts[:, -2], parts[:, -1]
        return queries.flatten(0, 2), keys.flatten(0, 1), values.flatten(0, 1)

    return divide


def queries_first(rows: Tensor) -> tuple[Tensor, ...]:
    """Divide rows that are all queries, then one key, one value."""
    return rows.split([WIDTH, DIM, DIM])


def half_split(rotary_dim: int) -> Callable[[Tensor], Tensor]:
    """Return the order of rows of q and k that turns pairs (2i, 2i + 1) into (i, i + R / 2)."""

    def reorder(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (HEADS, DIM))
        turning = heads[:, :rotary_dim]
        order = (turning[:, 0::2], turning[:, 1::2], heads[:, rotary_dim:])
        return torch.cat(order, dim=1).flatten(0, 1)

    return reorder


def gpt2_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """GPT-2: its projections are stored transposed."""
    yield from weighted(tensors, "transformer.wte", "token_embeddings")
    yield from weighted(tensors, "transformer.wpe", "position_embeddings")
    for idx in range(LAYERS):
        theirs, ours = f"transformer.h.{idx}", f"layers.{idx}"
        turned = {
            name: value.T if value.dim() == 2 else value
            for name, value in tensors.items()
            if name.startswith(theirs)
        }
        yield from weighted(tensors, f"{theirs}.ln_1", f"{ours}.attention_norm")
        yield from weighted(tensors, f"{theirs}.ln_2", f"{ours}.ffn_norm")
        yield from divided(
            turned, f"{theirs}.attn.c_attn", f"{ours}.attention", lambda rows: rows.chunk(3)
        )
        yield from weighted(turned, f"{theirs}.attn.c_proj", f"{ours}.attention.o_proj")
        yield from weighted(turned, f"{theirs}.mlp.c_fc", f"{ours}.ffn.up_proj")
        yield from weighted(turned, f"{theirs}.mlp.c_proj", f"{ours}.ffn.down_proj")
    yield from weighted(tensors, "transformer.ln_f", "final_norm")


def bigcode_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """StarCoder, SantaCoder: as GPT-2, with one key and value, not transposed."""
    for name, value in gpt2_tensors(tensors):
        if "_proj" not in name:
            yield name, value
    for idx in range(LAYERS):
        theirs, ours = f"transformer.h.{idx}", f"layers.{idx}"
        yield from divided(tensors, f"{theirs}.attn.c_attn", f"{ours}.attention", queries_first)
        yield from weighted(tensors, f"{theirs}.attn.c_proj", f"{ours}.attention.o_proj")
        yield from weighted(tensors, f"{theirs}.mlp.c_fc", f"{ours}.ffn.up_proj")
        yield from weighted(tensors, f"{theirs}.mlp.c_proj", f"{ours}.ffn.down_proj")


def llama_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Llama, Mistral, Gemma 2: the names differ, and the two further norms of Gemma 2."""
    yield from weighted(tensors, "model.embed_tokens", "token_embeddings")
    has_four_norms = "model.layers.0.pre_feedforward_layernorm.weight" in tensors
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    if has_four_norms:
        norms = {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "ffn_post_norm",
        }
    for idx in range(LAYERS):
        theirs, ours = f"model.layers.{idx}", f"layers.{idx}"
        for their_norm, our_norm in norms.items():
            yield from weighted(tensors, f"{theirs}.{their_norm}", f"{ours}.{our_norm}")
        for letter in "qkvo":
            yield from weighted(
                tensors, f"{theirs}.self_attn.{letter}_proj", f"{ours}.attention.{letter}_proj"
            )
            yield from weighted(
                tensors, f"{theirs}.self_attn.{letter}_norm", f"{ours}.attention.{letter}_norm"
            )
        for part in ("up", "gate", "down"):
            yield from weighted(tensors, f"{theirs}.mlp.{part}_proj", f"{ours}.ffn.{part}_proj")
    yield from weighted(tensors, "model.norm", "final_norm")
    yield from weighted(tensors, "lm_head", "lm_head")


def gptj_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """GPT-J: it turns neighbouring dimensions, so that rows of q and k are reordered."""
    reorder = half_split(GPTJ_ROTARY)
    yield from weighted(tensors, "transformer.wte", "token_embeddings")
    for idx in range(LAYERS):
        theirs, ours = f"transformer.h.{idx}", f"layers.{idx}"
        yield from weighted(tensors, f"{theirs}.ln_1", f"{ours}.attention_norm")
        for letter in "qk":
            name = f"{theirs}.attn.{letter}_proj.weight"
            yield f"{ours}.attention.{letter}_proj.weight", reorder(tensors[name])
        yield from weighted(tensors, f"{theirs}.attn.v_proj", f"{ours}.attention.v_proj")
        yield from weighted(tensors, f"{theirs}.attn.out_proj", f"{ours}.attention.o_proj")
        yield from weighted(tensors, f"{theirs}.mlp.fc_in", f"{ours}.ffn.up_proj")
        yield from weighted(tensors, f"{theirs}.mlp.fc_out", f"{ours}.ffn.down_proj")
    yield from weighted(tensors, "transformer.ln_f", "final_norm")
    yield from weighted(tensors, "lm_head", "lm_head")


GPTJ_ROTARY: Final = 4


def fused_tensors(
    names: Mapping[str, str], divide: Callable[[Tensor], tuple[Tensor, ...]]
) -> Callable[[Tensors], Iterator[tuple[str, Tensor]]]:
    """Return the translation of GPT-NeoX, Falcon and BLOOM, which fuse queries, keys and values.

    Args:
        names: Ours to theirs; with `layer` the prefix of a layer.
        divide: Rows of the fused projection to queries, keys and values.
    """

    def translate(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        for ours, theirs in names.items():
            if ours == "layer":
                continue
            if not ours.startswith("layer."):
                yield from weighted(tensors, theirs, ours)
                continue
            for idx in range(LAYERS):
                name = f"{names['layer']}.{idx}.{theirs}"
                inner = f"layers.{idx}.{ours.removeprefix('layer.')}"
                if ours == "layer.attention":
                    yield from divided(tensors, name, inner, divide)
                else:
                    yield from weighted(tensors, name, inner)

    return translate
