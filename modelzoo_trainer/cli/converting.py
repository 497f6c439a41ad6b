"""The command `checkpoint convert`: weights from and to other layouts.

torch is imported only when something is converted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.dtypes import dtype_name, torch_dtype
from modelzoo_trainer.base.exit_codes import DONE, WRONG_USE
from modelzoo_trainer.errors import CheckpointError, ConfigError

_LAYOUTS: Final = ("hf", "cerebras")
_DTYPES: Final = ("float32", "float16", "bfloat16", "float64")
_EXAMPLES: Final = (
    "convert runs/a/checkpoint_500 exported --to hf --tokenizer tokenizer",
    "convert Llama-3.2-1B llama_1b --from hf",
    "convert weights.pt llama_7b --from cerebras --params params.yaml",
)


def add_command(
    add: Callable[
        [str, Callable[[argparse.Namespace], int], str, Sequence[str]], argparse.ArgumentParser
    ],
) -> None:
    """Add the command; `add` makes its parser from name, function, summary and examples."""
    command = add(
        "convert",
        run,
        "convert weights from or to the layout of Hugging Face or the Cerebras Model Zoo",
        _EXAMPLES,
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="a checkpoint or its exported weights; with --from hf a folder or a name of the Hub; "
        "with --from cerebras a file of torch.save or safetensors",
    )
    command.set_defaults(needs_siblings=True)  # the settings may be in the run's logs
    command.add_argument("target", metavar="DIR", help="the new folder to write")
    command.add_argument(
        "--from", dest="origin", choices=_LAYOUTS, help="layout of SOURCE; default: of this trainer"
    )
    command.add_argument(
        "--to", dest="layout", choices=_LAYOUTS, help="layout of DIR; default: of this trainer"
    )
    command.add_argument(
        "--params",
        metavar="FILE",
        type=Path,
        help="YAML file with the settings of the model; default: those in the checkpoint, in "
        "model.yaml beside the weights, or in the log of the run",
    )
    command.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=Path,
        help="folder or tokenizer.json to copy along; default: the files in SOURCE",
    )
    command.add_argument(
        "--dtype",
        type=dtype_name,
        choices=_DTYPES,
        help="of the weights, or an alias such as bf16; default: as in SOURCE",
    )
    command.add_argument(
        "--shard-size",
        metavar="SIZE",
        default="5GB",
        help="maximum size of a file of weights (default: 5GB)",
    )
    command.add_argument(
        "--family", metavar="NAME", help="model_type for --to hf; default: the first that fits"
    )
    command.add_argument(
        "--no-merge-adapters",
        dest="merge_adapters",
        action="store_false",
        help="with --to hf, of models of transformers: write LoRA adapters alone, in a folder of "
        "peft; default: they are merged into the weights",
    )
    command.add_argument(
        "--averaged", action="store_true", help="write the averaged weights of ModelEma"
    )


def run(options: argparse.Namespace) -> int:
    """Convert; print what was written, or what is wrong."""
    try:
        _check(options)
        lines = _convert(options)
    except (ConfigError, CheckpointError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or options.source}: {error.strerror or error}.")
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return DONE


def _convert(options: argparse.Namespace) -> list[str]:

    from modelzoo_trainer.config.loader import to_yaml
    from modelzoo_trainer.config.model_sections import models_in
    from modelzoo_trainer.tools.planning.figures import bytes_of
    from modelzoo_trainer.zoo.conversion.command import Request, convert

    return convert(
        Request(
            source=options.source,
            target=options.target,
            origin=options.origin,
            layout=options.layout,
            params=options.params,
            tokenizer=options.tokenizer,
            dtype=None if options.dtype is None else torch_dtype(options.dtype),
            shard_bytes=bytes_of(options.shard_size, "--shard-size"),
            family=options.family,
            merge_adapters=options.merge_adapters,
            averaged=options.averaged,
            models_in=models_in,
            to_yaml=to_yaml,
        )
    )


def _refuse(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return WRONG_USE


def _check(options: argparse.Namespace) -> None:
    if options.origin == options.layout:
        given = "neither --from nor --to" if options.origin is None else "--from and --to the same"
        raise ConfigError(
            f"{given}: nothing to convert. Pass --to hf to write a folder for transformers, or "
            f"--from hf to write weights for this trainer."
        )
    if options.family is not None and options.layout != "hf":
        raise ConfigError("--family has an effect only with --to hf. Remove it.")
    if options.params is not None and options.origin == "hf":
        raise ConfigError(
            "--params has no effect with --from hf: the settings come from config.json. Remove it."
        )
    if options.tokenizer is not None and options.layout == "cerebras":
        raise ConfigError(
            "--tokenizer has no effect with --to cerebras: only weights are written. Remove it."
        )
    for name, is_given in (
        ("--no-merge-adapters", not options.merge_adapters),
        ("--averaged", options.averaged),
    ):
        if is_given and options.origin is not None:
            raise ConfigError(
                f"{name} has an effect only on checkpoints of this trainer. Omit it, or --from."
            )
    options.target = Path(os.path.abspath(options.target))
