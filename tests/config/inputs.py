"""Strategies for files: text, pieces of YAML, trees of both layouts, spoilt files, changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

PIECES = st.sampled_from(
    [
        *("a", "b: ", "- ", "\n", "  ", "&x ", "*x", "<<: ", "[", "]", "{", "}", ", ", "!!str "),
        *("!t ", "'", '"', "|\n", "? ", ": ", "#", "---", "...", "1e-4", "null", "\t", "%", "@"),
        *("`", "\\", "\x00", "\ufeff", "\x85", "\u2028", "\U0001f600", "0x", ".inf", "!!float "),
        *("!!map ", ">-\n", "trainer: ", "init: ", "model: ", "name: ", "fc_mnist", "~"),
        *("\n  ", "\n    ", "\n      "),
    ]
)
_WORDS = (
    "trainer init fit validate validate_all model name model_name tiny_net fc_mnist gpt2 llama t5 "
    "optimizer AdamW SGD params tag lr learning_rate betas weight_decay adjust_learning_rate "
    "schedulers SequentialLR LinearLR CosineDecayLR ScalePerParamLR scheduler total_iters "
    "initial_learning_rate end_learning_rate milestones callbacks EarlyStopping CheckLoss "
    "ComputeNorm KeepNCheckpoints n GlobalFlags ScopedTrainFlags csx.performance.micro_batch_size "
    "explore min max loggers TensorBoardLogger ProgressLogger loop max_steps num_steps num_epochs "
    "eval_frequency eval_steps checkpoint steps logging log_steps log_level precision enabled "
    "fp16_type loss_scaling_factor dynamic sparsity algorithm static rigl update freq schedule "
    "drop_fraction type cosine groups param_filter backend backend_type cluster_config device cpu "
    "GPU CSX seed model_dir autorestart train_dataloader val_dataloader val_dataloaders "
    "data_processor DigitsProcessor SyntheticProcessor TextFileProcessor GptHDF5MapDataProcessor "
    "Digits batch_size split train val ckpt_path ckpt_paths hidden_size hidden_sizes input_size "
    "os.nothing initializer std a.b"
)
WORDS = st.sampled_from(_WORDS.split())
_OLDER = (
    "train_input eval_input model sparsity optimizer runconfig wandb name data_processor "
    "batch_size micro_batch_size explore min mixed_precision fp16_type lora_params compression "
    "optimizer_type AdamW adamw beta1 beta2 weight_decay_rate learning_rate scheduler Linear "
    "CosineDecay Piecewise main_scheduler steps decay_steps values boundaries log_summaries "
    "loss_scaling_factor grad_accum_steps add_summaries target_device CSX GPU max_steps "
    "num_epochs checkpoint_steps checkpoint_path max_checkpoints load_checkpoint_states logging "
    "ini debug_args check_loss_values log_input_summaries op_profiler_config experimental "
    "listeners listener_type listener_name NormTensorListener project group run_id fc_mnist gpt2 "
    "model_dir seed save_initial_checkpoint enable_distributed mode"
)
LEGACY_WORDS = st.sampled_from(_OLDER.split())
NUMBERS = st.integers(-1, 3) | st.floats() | st.sampled_from([10**40, -(10**40), 1e308, 5e-324])
OTHERS = st.none() | st.booleans() | NUMBERS | st.text(max_size=3)


def trees(words: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Return a strategy for values made of `words` and others."""
    keys = words | st.text(max_size=2)
    return st.recursive(
        words | OTHERS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


def sections(names: str, words: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for mappings of some of `names` to trees."""
    return st.dictionaries(st.sampled_from(names.split()), trees(words), max_size=4)


_INIT = (
    "model optimizer schedulers precision sparsity loop checkpoint logging callbacks loggers "
    "device backend seed model_dir autorestart"
)
_MODELS = st.sampled_from([{"name": "fc_mnist"}, {"name": "gpt2", "vocab_size": 4}, {"name": "t5"}])
FILES = st.builds(
    lambda model, init, rest: {"trainer": {"init": {"model": model, **init}, **rest}},
    _MODELS,
    sections(_INIT, WORDS),
    sections("fit validate validate_all", WORDS),
)
LEGACY_FILES = st.builds(
    lambda one, rest: {**one, **rest},
    st.sampled_from([{"model": {"name": "fc_mnist"}}, {"runconfig": {"max_steps": 3}}]),
    sections("train_input eval_input model sparsity optimizer runconfig wandb", LEGACY_WORDS),
)
PATHS = st.lists(
    WORDS | st.sampled_from([".", ".", ".", "[0]", "[-1]", "[AdamW]", '"a.b"', "trainer.init."]),
    max_size=7,
).map("".join)
VALUES = st.lists(PIECES, max_size=4).map("".join) | st.sampled_from(["1", "null", "{}", "[]", ""])
CHANGES = st.lists(st.builds("{}={}".format, PATHS, VALUES) | PATHS, min_size=1, max_size=3)


def spoilt(paths: Iterable[Path]) -> st.SearchStrategy[bytes]:
    """Return a strategy for files with some bytes or lines changed."""
    contents = [path.read_bytes() for path in paths]
    acts = st.sampled_from(["flip", "insert", "delete", "swap lines", "copy line", "cut", "indent"])
    change = st.tuples(acts, st.floats(0, 1, exclude_max=True), st.integers(0, 255))
    return st.builds(_spoil, st.sampled_from(contents), st.lists(change, min_size=1, max_size=4))


def _spoil(content: bytes, changes: list[tuple[str, float, int]]) -> bytes:
    for act, where, number in changes:
        content = spoil(content, act, where, number)
    return content


def spoil(content: bytes, act: str, where: float, number: int) -> bytes:
    """Return a file with one change.

    Args:
        content: The file.
        act: What is done.
        where: How far into the file, from 0 to 1.
        number: A byte, or how many lines or bytes further on.
    """
    i = int(where * len(content))
    if act == "flip":
        return content[:i] + bytes([number]) + content[i + 1 :]
    if act == "insert":
        return content[:i] + bytes([number]) + content[i:]
    if act == "delete":
        return content[:i] + content[i + 1 + number % 8 :]
    if act == "cut":
        return content[:i]
    lines = content.split(b"\n")
    i = int(where * len(lines))
    j = (i + number) % len(lines)
    if act == "swap lines":
        lines[i], lines[j] = lines[j], lines[i]
    elif act == "copy line":
        lines.insert(i, lines[j])
    else:
        lines[i] = b" " * (number % 5) + lines[i].lstrip()
    return b"\n".join(lines)
