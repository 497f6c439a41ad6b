"""Scale a published configuration down, so that it trains on a CPU in seconds.

The rule. What is not named stays as it is: dropout, initializers, biases, norms, activations, muP,
precision, optimizer, weight decay, callbacks, sparsity.

| setting | becomes |
|---|---|
| layers | at most 2 |
| heads N, groups of key and value heads G | N = 4; G = 4 if it was N, 1 if it was 1, else 2 |
| head size D | 16; `rotary_dim` in proportion, even, at least 2 |
| hidden size | N * D, or in proportion to `attention_inner_dim`, which becomes N * D |
| filter sizes | in proportion to the hidden size, a multiple of 8 |
| bases of muP | in proportion to their own size, so that width factors stay |
| vocabulary | at most 320: 256 bytes, the end of a document, and some that never occur |
| experts | at most 4, and as many per token as before, but at most as many as there are |
| sequence length T | rows of 64; `max_position_embeddings` 64 and the sink tokens |
| windows, original length of scaled positions, sink tokens | as T; at least 4, 8, 1 |
| `loss_weight`, `mlm_loss_weight` | in inverse proportion to T, as they are usually 1 / labels |
| `max_predictions_per_seq` | in proportion to T, at least 1 |
| batch size | 8; `micro_batch_size` in proportion, at least 1 |
| length | 20 steps, validation of 2 batches every 10, a checkpoint every 6, each step logged |
| learning rate | constant, 0.001, in place of each schedule of it; factors of groups stay |
| seed | 1 where there is none |
| sparsity | updates every 4 steps |
| workers of dataloaders | none: starting them takes longer than the run |
| data | the text of Python's standard library; for models of images, generated stripes with noise |
| sizes of images and latents | as in `published_images.py` and `published_latents.py` |
| models that see images | as in `published_multimodal.py` |
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import published_multimodal, published_seq2seq
from benchmarks.published_images import has_images, scale_images
from benchmarks.published_latents import folders_of, has_latents, scale_latents
from benchmarks.published_multimodal import fit_parts, sees_images

Plain = dict[str, Any]

LENGTH: Final = 64
VOCABULARY: Final = 320
STEPS: Final = 20
CHECKPOINT_STEPS: Final = 6
LEARNING_RATE: Final = 1e-3
BATCH: Final = 8
LABELS: Final = "labels.json"
"""File of the labels of tokens, in the folder of the data."""

_HEADS, _HEAD_SIZE, _LAYERS, _EXPERTS = 4, 16, 2, 4
_MICRO_BATCH: Final = "csx.performance.micro_batch_size"
_WINDOWS: Final = ("attention_sliding_window_length", "sliding_window_length")
_LENGTHS: Final = ("max_position_embeddings", "src_max_position_embeddings", "max_sequence_length")
_VOCABULARIES: Final = ("vocab_size", "src_vocab_size", "tgt_vocab_size")
_WRAPPER: Final = "ScalePerParamLR"


class Factors(NamedTuple):
    """How much smaller a model is: new size over old size."""

    width: float = 1.0
    length: float = 1.0


def scaled(trainer: Plain, folder: Path) -> tuple[Plain, list[Plain]]:
    """Return the `trainer` section scaled down, and its dataloaders, whose folders are new.

    Args:
        trainer: The section of a published file; unchanged.
        folder: Where the data will be: `train` and `val` in it, with a number if there are several.
    """
    short = _copied(trainer)
    init = short["init"]
    model = init.get("model") or {}
    num_sinks = max((_num_sinks(one) for _, one in _dataloaders(short)), default=0)
    factors = _scale_models(model, num_sinks)
    if model.get("label_vocab_file"):
        model["label_vocab_file"] = str(folder / LABELS)
    _scale_run(init)
    sizes = [one.get("batch_size") for key, one in _dataloaders(short) if key.startswith("train")]
    _scale_flags(init, sizes[0] if sizes else None)
    published: list[tuple[str, Plain]] = []
    loaders = []
    for key, loader in _dataloaders(short):
        before = "train" if key.startswith("train") else "val", copy.deepcopy(loader)
        is_new = before not in published
        published += [before] if is_new else []
        name = f"{before[0]}_{published.index(before) + 1}"
        _scale_loader(loader, folder / name, factors)
        loaders += [loader] if is_new else []
    fit = short.get("fit") or {}
    if fit.get("ckpt_path", ...) is None:
        del fit["ckpt_path"]  # else a killed run would not resume
    return short, loaders


def _copied(value: Any) -> Any:
    """Return a deep copy in which nothing is shared, as YAML aliases may be."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


# ---- model


def _scale_models(model: Plain, num_sinks: int) -> Factors:
    """Scale a model, and the models inside it, in place."""
    if published_seq2seq.is_seq2seq(model):
        published_seq2seq.scale_model(model)
        return Factors()
    found = Factors()
    for inner in _inner_models(model.values()):
        found = _scale_models(inner, num_sinks)
    if "hidden_size" in model:
        found = _scale_model(model, num_sinks)
    if sees_images(model):
        fit_parts(model, found.length)
    return found


def _inner_models(values: Iterable[Any]) -> Iterator[Plain]:
    """Yield the models among values, also in mappings and lists."""
    for value in values:
        if isinstance(value, dict) and "hidden_size" in value:
            yield value
        elif isinstance(value, dict | list):
            yield from _inner_models(value.values() if isinstance(value, dict) else value)


def _scale_model(model: Plain, num_sinks: int) -> Factors:
    _scale_inputs(model)
    hidden, heads = model["hidden_size"], model.get("num_heads") or 1
    inner = model.get("attention_inner_dim") or hidden
    head_size = inner / heads
    new_inner = _HEADS * _HEAD_SIZE
    new_hidden = _multiple(new_inner * hidden / inner, 8)
    factors = Factors(new_hidden / hidden, _length_factor(model, num_sinks))
    model["hidden_size"], model["num_heads"] = new_hidden, _HEADS
    if model.get("attention_inner_dim"):
        model["attention_inner_dim"] = new_inner
    groups = (model.get("extra_attention_params") or {}).get("num_kv_groups")
    if groups:
        few = groups if groups == 1 else _HEADS if groups == heads else _HEADS // 2
        model["extra_attention_params"]["num_kv_groups"] = few
    if model.get("rotary_dim"):
        model["rotary_dim"] = _multiple(_HEAD_SIZE * model["rotary_dim"] / head_size, 2)
    if model.get("num_hidden_layers"):
        model["num_hidden_layers"] = min(model["num_hidden_layers"], _LAYERS)
    _change(model, ("mup_base_hidden_size",), factors.width)
    _scale_filter(model, factors.width)
    _limit_vocabulary(model)
    _scale_lengths(model, factors.length, num_sinks)
    _scale_experts(model)
    is_sum = model.get("loss_scaling") == "batch_size" or str(model.get("name")).startswith("bert/")
    if model.get("loss_weight") and is_sum:
        model["loss_weight"] /= factors.length
    if model.get("mlm_loss_weight"):
        model["mlm_loss_weight"] /= factors.length
    return factors


def _scale_inputs(section: Plain) -> None:
    """Scale what a model or a dataloader of other data than tokens has."""
    if has_images(section):
        scale_images(section)
    if has_latents(section):
        scale_latents(section)


def _scale_filter(model: Plain, factor: float) -> None:
    if model.get("filter_size"):
        new = _multiple(model["filter_size"] * factor, 8)
        _change(model, ("mup_base_filter_size",), new / model["filter_size"])
        model["filter_size"] = new


def _limit_vocabulary(given: Plain) -> None:
    for name in _VOCABULARIES:
        if given.get(name):
            given[name] = min(given[name], VOCABULARY)


def _scale_lengths(model: Plain, factor: float, num_sinks: int) -> None:
    for name in _LENGTHS:
        if model.get(name):
            model[name] = LENGTH + _sinks(num_sinks, factor)
    _change(model, _WINDOWS, factor, least=4)
    _change(model, ("attention_sink_tokens",), factor, least=1)
    extra = model.get("pos_scaling_extra_args") or {}
    _change(extra, ("original_max_position_embeddings",), factor, least=8)


def _scale_experts(model: Plain) -> None:
    for key in ("moe", "moe_params"):
        given = model.get(key) or {}
        if given.get("num_experts"):
            given["num_experts"] = min(given["num_experts"], _EXPERTS)
            if given.get("top_k"):
                given["top_k"] = min(given["top_k"], given["num_experts"])


def _length_factor(model: Plain, num_sinks: int) -> float:
    length = next((model[name] for name in _LENGTHS if model.get(name)), LENGTH + num_sinks)
    return min(1.0, LENGTH / max(1, length - num_sinks))


# ---- run


def _scale_run(init: Plain) -> None:
    init.pop("model_dir", None)
    if init.get("seed") is None:
        init["seed"] = 1
    loop = init.setdefault("loop", {})
    for name in ("num_epochs", "steps_per_epoch", "num_steps"):
        loop.pop(name, None)
    loop |= {"max_steps": STEPS, "eval_frequency": STEPS // 2, "eval_steps": 2}
    checkpoint = init["checkpoint"] = init.get("checkpoint") or {}
    checkpoint["steps"] = CHECKPOINT_STEPS
    logging = init["logging"] = init.get("logging") or {}
    logging["log_steps"] = 1
    init["schedulers"] = [_constant(one) for one in init.get("schedulers") or ()]
    for arguments in (init.get("optimizer") or {}).values():
        _replace_rates(arguments or {})
    sparsity = init.get("sparsity")
    for one in sparsity if isinstance(sparsity, list) else [sparsity or {}]:
        if "freq" in (one.get("update") or {}):
            one["update"]["freq"] = 4


def _constant(schedule: Plain) -> Plain:
    """Return a constant learning rate in place of a schedule of it; others stay."""
    ((name, arguments),) = schedule.items()
    arguments = arguments or {}
    if name == _WRAPPER:
        return {name: arguments | {"scheduler": _constant(arguments["scheduler"])}}
    if name.lower().endswith("wd"):
        return schedule
    kept = {key: arguments[key] for key in ("param_group_tags",) if key in arguments}
    return {"ConstantLR": kept | {"learning_rate": LEARNING_RATE}}


def _replace_rates(arguments: Plain) -> None:
    for name in ("lr", "learning_rate"):
        if isinstance(arguments.get(name), float):
            arguments[name] = LEARNING_RATE
    for group in arguments.get("params") or ():
        _replace_rates(group)


# ---- data


def _dataloaders(trainer: Plain) -> Iterator[tuple[str, Plain]]:
    """Yield the key and the settings of each dataloader."""
    for section in trainer.values():
        for key, value in section.items() if isinstance(section, dict) else ():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, dict) and "data_processor" in one:
                    yield key, one


def _scale_loader(loader: Plain, folder: Path, factors: Factors) -> None:
    old = loader.get("batch_size")
    loader["batch_size"] = BATCH
    loader["num_workers"] = 0
    if "micro_batch_size" in loader:
        loader["micro_batch_size"] = _micro(loader["micro_batch_size"], old)
    _scale_format(loader, folder)
    _scale_sequences(loader)
    if loader.get("num_samples"):
        loader["num_samples"] = STEPS * BATCH
    _limit_vocabulary(loader)
    for transform in loader.get("data_transforms") or ():
        _scale_transform(transform, factors)
    for number, member in enumerate(loader.get("mixture") or ()):
        member["data_dir"] = str(folder / str(number))
    if has_latents(loader):
        loader["data_dir"] = folders_of(loader, folder)
    elif "data_dir" in loader:
        loader["data_dir"] = str(folder)


def _scale_format(loader: Plain, folder: Path) -> None:
    """Scale what dataloaders of other data than rows of tokens have."""
    if published_seq2seq.is_seq2seq(loader):
        published_seq2seq.scale_loader(loader, folder)
    if sees_images(loader):
        published_multimodal.scale_loader(loader, folder)
    _scale_inputs(loader)
    if loader.get("vocab_file"):
        loader["vocab_file"] = str(folder / "vocab.txt")


def _scale_sequences(loader: Plain) -> None:
    if loader.get("max_sequence_length"):
        factor = min(1.0, LENGTH / loader["max_sequence_length"])
        _change(loader, ("max_predictions_per_seq",), factor)
        loader["max_sequence_length"] = LENGTH


def _scale_transform(transform: Plain, factors: Factors) -> None:
    if "num_sink_tokens" in transform:
        transform["num_sink_tokens"] = _sinks(transform["num_sink_tokens"], factors.length)
    for name in [name for name in transform if name.endswith("_token_id")]:
        transform[name] = min(transform[name], VOCABULARY - 1)


def _num_sinks(loader: Plain) -> int:
    transforms = loader.get("data_transforms") or ()
    return sum(one.get("num_sink_tokens", 0) for one in transforms)


def _sinks(num: int, factor: float) -> int:
    return max(1, round(num * factor)) if num else 0


def _scale_flags(init: Plain, batch_size: Any) -> None:
    """Scale the micro-batch sizes of the callbacks with flags."""
    for callback in init.get("callbacks") or ():
        for arguments in callback.values():
            if isinstance(arguments, dict) and _MICRO_BATCH in arguments:
                arguments[_MICRO_BATCH] = _micro(arguments[_MICRO_BATCH], batch_size)


def _micro(size: Any, batch_size: Any) -> Any:
    """Return a micro-batch size in proportion; `auto` stays."""
    known = isinstance(size, int) and isinstance(batch_size, int)
    return min(BATCH, max(1, size * BATCH // batch_size)) if known else size


# ---- sizes


def _change(given: Plain, names: tuple[str, ...], factor: float, *, least: int = 1) -> None:
    """Multiply integer settings, where they are set."""
    for name in names:
        if isinstance(given.get(name), int) and given[name]:
            given[name] = max(least, round(given[name] * factor))


def _multiple(value: float, of: int) -> int:
    return max(of, round(value / of) * of)
