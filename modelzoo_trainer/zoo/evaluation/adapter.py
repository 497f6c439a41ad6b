"""A model of a run as a model of `lm_eval`, with the semantics of its `HFLM`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.evaluation.decoding import Sampling, texts_of
from modelzoo_trainer.zoo.evaluation.decoding import pack as pack_prompts
from modelzoo_trainer.zoo.evaluation.processes import Processes
from modelzoo_trainer.zoo.evaluation.rows import RaggedRows
from modelzoo_trainer.zoo.evaluation.scoring import plan_scoring

log = logging.getLogger("modelzoo_trainer.evaluation")

SCORING: Final = "scoring"
DECODING: Final = "decoding"
_DEFAULT_NEW: Final = 256  # tokens, as in HFLM
_SETTINGS: Final = ("do_sample", "temperature", "top_k", "top_p")
_PLAIN: Final = {"num_beams": 1, "use_cache": True}  # what has no effect with these values


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFacts:
    """What an evaluation is told.

    Args:
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens of an input.
        batch_size: Rows per forward pass of each process.
        seed: Seed of sampling.
        ends: Tokens that end a text, besides the tokenizer's.
    """

    tokenizer: Any
    max_length: int
    batch_size: int
    seed: int
    ends: Sequence[int] = ()


class HarnessModel:
    """What `lm_eval` asks of a model; `adapter_class` combines it with its base class."""

    backend = "causal"
    tokenizer: Any
    cache_hook: Any

    def prepare(self, facts: EvaluationFacts, processes: Processes) -> None:
        """Set what the constructor of the base class does not know."""
        self.tokenizer = facts.tokenizer
        self.max_length = facts.max_length
        self.batch_size = facts.batch_size
        self._ends = facts.ends
        self._seed = facts.seed
        self._processes = processes

    # ---- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        found: int = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Return the tokens of a text, with special ones if the tokenizer adds them."""
        first = self.tokenizer.decode([self.prefix_token_id])
        if add_special_tokens is None and first and string.startswith(first):
            add_special_tokens = False
        own = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        found: list[int] = self.tokenizer.encode(string, **own)
        return found

    def _note_long(self, lengths: Sequence[int]) -> None:
        num = sum(length > self.max_length for length in lengths)
        if num:
            log.warning(
                "%d of %d inputs are longer than max_sequence_length (%d, the longest has %d "
                "tokens); their first tokens are dropped.",
                num,
                len(lengths),
                self.max_length,
                max(lengths),
            )

    # ---- log-likelihoods

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is greedy."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[misc]  # of the base class
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **options: Any
    ) -> list[tuple[float, bool]]:
        self._note_long([len(context) + len(rest) - 1 for _, context, rest in requests])
        plan = plan_scoring([(context, rest) for _, context, rest in requests], self.max_length)
        values = self._processes.run(SCORING, plan.pack())
        found: list[Any] = [None] * len(requests)
        columns = (values[name].tolist() for name in ("index", "score", "is_greedy"))
        for number, score, is_greedy in zip(*columns, strict=True):
            found[number] = score, bool(is_greedy)
        for (text, _, _), answer in zip(requests, found, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of the maximum length."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ---- generation

    def check_generation(self, settings: dict[str, Any]) -> None:
        """Raise a `ConfigError` if the settings of a task that generates text cannot be used."""
        self._sampling(settings)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each prompt, up to the first of its ending texts."""
        found: list[Any] = [None] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            settings = requests[numbers[0]].args[1]
            sampling = self._sampling(settings)
            prompts = [self._prompt(requests[number].args[0]) for number in numbers]
            self._note_long([len(prompt) + sampling.max_new_tokens for prompt in prompts])
            room = self.max_length - sampling.max_new_tokens
            prompts = [prompt[-room:] for prompt in prompts]
            values = self._processes.run(DECODING, pack_prompts(RaggedRows.of(prompts), sampling))
            for place, tokens in texts_of(values).items():
                found[numbers[place]] = self._text(tokens, sampling)
        for request, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _sampling(self, settings: dict[str, Any]) -> Sampling:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given: dict[str, Any] = normalize_gen_kwargs(settings, _DEFAULT_NEW)
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        stops = handle_stop_sequences(given.pop("until", None), eos=end)
        num = given.pop("max_gen_toks")
        for name, value in given.items():
            if name not in _SETTINGS and _PLAIN.get(name) != value:
                raise ConfigError(
                    f"EleutherEvalHarness: the task's generation_kwargs have {name!r} ({value!r}), "
                    f"which is not supported. {suggest(name, _SETTINGS)} Remove it from the task, "
                    f"or use another one."
                )
        if num >= self.max_length:
            raise ConfigError(
                f"EleutherEvalHarness: the task generates up to {num} tokens, which leaves no "
                f"room for a prompt in {self.max_length}. Set eeh_args.max_tokens to fewer."
            )
        stops = [stop for stop in stops if stop]
        lengths = [len(self.tokenizer.encode(stop, add_special_tokens=False)) for stop in stops]
        is_sampled = bool(given.get("do_sample"))
        temperature = float(given.get("temperature", 1.0)) if is_sampled else 0.0
        if is_sampled and temperature == 0:
            raise ConfigError(
                "EleutherEvalHarness: the task's generation_kwargs have do_sample: true with "
                "temperature 0, which transformers refuses as well. Set eeh_args.temperature, 0 "
                "for the most likely tokens."
            )
        return Sampling(
            max_new_tokens=num,
            temperature=temperature,
            top_k=given.get("top_k") or None,
            top_p=float(given.get("top_p") or 1.0),
            seed=self._seed,
            ends=[self.eot_token_id, *self._ends],
            stops=stops,
            lookback=max(lengths, default=0) + 2,
        )

    def _prompt(self, text: str) -> list[int]:
        first = self.tokenizer.bos_token
        own = {"add_special_tokens": False} if first and text.startswith(first) else {}
        tokens: list[int] = self.tokenizer.encode(text, **own)
        return tokens or [self.prefix_token_id]

    def _text(self, tokens: list[int], sampling: Sampling) -> str:
        from lm_eval.models.utils import postprocess_generated_text

        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        found: str = postprocess_generated_text(text, list(sampling.stops), None)
        return found

    # ---- chats

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a chat, by the tokenizer's template."""
        import jinja2

        def applied(messages: list[dict[str, str]]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return text

        try:
            return applied(chat_history)
        except jinja2.exceptions.TemplateError:  # of a template without a system role
            return applied([one for one in chat_history if one["role"] != "system"])

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")


@cache
def adapter_class() -> type[Any]:
    """Return the class with `lm_eval`'s base class, which is imported only now."""
    from lm_eval.api.model import TemplateLM

    return type("ModelOfTheRun", (HarnessModel, TemplateLM), {})
