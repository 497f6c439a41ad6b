"""Text generation at the end of a fit."""

from __future__ import annotations

import copy
import inspect
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.callback import Callback
from modelzoo_trainer.core.parts.training_mode import in_evaluation_mode
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.tokenization import END_OF_TEXT

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Backend
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.generate_text")

_NOT_A_BYTE: Final = "\ufffd".encode()


class GenerateText(Callback):
    """Generate a text from a prompt at the end of a fit; log it and write it to `sample.txt`.

    On a device that compiles one graph per length, a copy of the model on the host generates it.

    Args:
        prompt: Beginning of the text.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Sampling temperature; 0 = greedy.
        top_k: Sample among the `top_k` most likely tokens; None = all.
        seed: Seed of the sampling; the random state of the run does not change.
        tokenizer_file_path: File of the `tokenizers` library; None = tokens are bytes.

    Raises:
        ConfigError: If an argument is out of range; at setup, if the model has no `generate` with
            the required arguments, its vocabulary lacks a token of the prompt, or the tokenizer
            cannot be loaded.
    """

    @checked()
    def __init__(
        self,
        prompt: str,
        max_new_tokens: PositiveInt = 200,
        temperature: Annotated[float, Ge(0)] = 0.8,
        top_k: PositiveInt | None = None,
        seed: int = 0,
        tokenizer_file_path: str | None = None,
    ) -> None:
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._top_k = top_k
        self._seed = seed
        self._tokenizer_file_path = tokenizer_file_path
        self._tokenizer: Any = None

    @override
    def setup(self, trainer: Trainer) -> None:
        if not callable(getattr(trainer.model, "generate", None)):
            raise ConfigError(
                f"GenerateText: {type(trainer.model).__name__} has no method generate(input_ids, "
                f"max_new_tokens, ...). Remove the callback, or use a language model."
            )
        if self._tokenizer_file_path is not None:
            self._tokenizer = _load_tokenizer(Path(self._tokenizer_file_path).expanduser())
        self._check_call(trainer.model)

    def _check_call(self, model: Any) -> None:
        """Check the call of `generate` at setup instead of at the end of the run."""
        kind = type(model).__name__
        try:
            inspect.signature(model.generate).bind(None, self._max_new_tokens, **self._options())
        except TypeError as error:
            raise ConfigError(
                f"GenerateText: {kind}.generate cannot be called with (input_ids, max_new_tokens, "
                f"temperature=, top_k=, generator=): {error}. Add these parameters, or remove the "
                f"callback."
            ) from None
        size = getattr(model, "vocab_size", None)
        largest = max(self._encode())
        if isinstance(size, int) and largest >= size:
            raise ConfigError(
                f"GenerateText.prompt has the token id {largest}, but the vocab_size of {kind} is "
                f"{size}. Set tokenizer_file_path to the tokenizer of the data, or change prompt."
            )

    def _options(self, generator: torch.Generator | None = None) -> dict[str, Any]:
        """Return the keyword arguments of `generate`."""
        return {"temperature": self._temperature, "top_k": self._top_k, "generator": generator}

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        backend = trainer.backend
        if not backend.caps.holds_values or trainer.interrupted:
            return
        if not backend.comm.is_main and not backend.caps.sharded_state:
            return  # one process is enough unless the model is sharded
        text = self._decode(self._draw(trainer).tolist())
        if not backend.comm.is_main:
            return
        log.info("Sample at step %d:\n%s", trainer.global_step, text)
        path = trainer.artifact_dir / "sample.txt"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("Cannot write %s: %s", path, error)

    def _draw(self, trainer: Trainer) -> Tensor:
        backend = trainer.backend
        on_host = backend.caps.static_shapes  # each length is a different shape
        model: Any = _copied(trainer.model, backend) if on_host else trainer.model
        device = torch.empty(0).device if on_host else backend.device
        prompt = torch.tensor([self._encode()], device=device)
        with ExitStack() as stack:
            stack.enter_context(backend.inference())
            if trainer.precision.autocast is not None:
                stack.enter_context(trainer.precision.autocast)
            stack.enter_context(in_evaluation_mode(model))
            tokens: Tensor = model.generate(
                prompt,
                self._max_new_tokens,
                **self._options(torch.Generator(device).manual_seed(self._seed)),
            )
        return tokens[0]

    def _encode(self) -> list[int]:
        if self._tokenizer is None:
            tokens = list(self._prompt.encode())
        else:
            tokens = self._tokenizer.encode(self._prompt, add_special_tokens=False).ids
        return tokens or [END_OF_TEXT]

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(tokens))
        parts = [bytes([token]) if token < 256 else _NOT_A_BYTE for token in tokens]
        # Documents end with a byte that is not text.
        return b"".join(parts).decode(errors="replace").replace(chr(END_OF_TEXT), "\n")


def _copied(model: Module, backend: Backend) -> Module:
    """Return a copy of a model in host memory."""
    tensors = [*model.parameters(), *model.buffers()]
    copies = backend.host_state(tensors)
    memo: dict[int, Any] = {
        id(own): Parameter(value, own.requires_grad) if isinstance(own, Parameter) else value
        for own, value in zip(tensors, copies, strict=True)
    }
    return copy.deepcopy(model, memo)


def _load_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "GenerateText.tokenizer_file_path requires the tokenizers library, which is not "
            "installed: pip install tokenizers"
        ) from None
    if not path.is_file():
        raise ConfigError(f"GenerateText.tokenizer_file_path {str(path)!r} does not exist.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"GenerateText.tokenizer_file_path {str(path)!r} is not a file of the tokenizers "
            f"library: {error}"
        ) from error
