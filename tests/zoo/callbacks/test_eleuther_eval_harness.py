"""Arguments of EleutherEvalHarness; what it computes is in tests/zoo/hugging_face."""

from __future__ import annotations

from typing import Any

import pytest

from modelzoo_trainer.callbacks import EleutherEvalHarness
from modelzoo_trainer.errors import ConfigError


def make(args: Any = None, **options: Any) -> EleutherEvalHarness:
    options = {"pretrained_model_name_or_path": "a"} | options
    return EleutherEvalHarness({"tasks": "a, b"} | (args or {}), **options)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ({"taks": "a"}, {}, r"eeh_args.taks: no such setting. Did you mean 'tasks'\?"),
        ({"tasks": ""}, {}, "eeh_args.tasks"),
        ({"tasks": " , "}, {}, "names no task"),
        ({"num_fewshot": -1}, {}, "eeh_args.num_fewshot"),
        ({"limit": 0}, {}, "eeh_args.limit"),
        ({"cache_requests": "always"}, {}, "eeh_args.cache_requests"),
        ({"seed": "1,2"}, {}, r"seed: expected one integer or four"),
        ({"seed": "1,a,2,3"}, {}, r"seed: 'a' in '1,a,2,3' is not an integer"),
        ({"top_p": 1.5}, {}, "eeh_args.top_p"),
        ({"fewshot_as_multiturn": True}, {}, "requires apply_chat_template"),
        ({}, {"pretrained_model_name_or_path": None}, "there is no tokenizer"),
        ({}, {"tokenizer_file_path": "b", "eos_id": 0}, "are both given"),
        (
            {},
            {"pretrained_model_name_or_path": None, "tokenizer_file_path": "b"},
            "requires eos_id",
        ),
        ({}, {"flags": {"torch.backends.cudnn.bench": 1}}, r"EleutherEvalHarness.flags.torch"),
        ({}, {"batch_sizes": 4}, r"no argument 'batch_sizes'. Did you mean 'batch_size'"),
        ({}, {"name_scope": "a/"}, "name_scope"),
        ({"use_cache": "f"}, {}, r"eeh_args.use_cache: .* 'f' by their prompts.*Remove it"),
    ],
)
def test_an_invalid_argument_is_refused(args, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make(args, **options)


def test_arguments_without_effect_are_said() -> None:
    assert make().notes == []
    args = {"trust_remote_code": True, "top_k": 3}
    notes = make(args, data_dir="a", num_workers=2, flags={"csx.performance.a": 1}).notes
    assert notes[0] == "data_dir, num_workers: no effect; requests are kept in memory."
    assert "trust_remote_code: no effect" in notes[1]
    assert "top_k: no effect on tasks that do not sample" in notes[2]


def test_the_arguments_become_those_of_lm_eval() -> None:
    args = {"seed": 3, "cache_requests": "refresh", "limit": 5, "max_tokens": 7, "temperature": 0.5}
    given = make(args | {"predict_only": True}).arguments.for_lm_eval()
    names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    assert [given[name] for name in names] == [3] * 4
    assert given["rewrite_requests_cache"]
    assert given["cache_requests"]
    assert type(given["limit"]) is int
    assert given["gen_kwargs"] == {"max_gen_toks": 7, "temperature": 0.5, "do_sample": True}
    assert given["log_samples"]
    assert make({"seed": "0,None,2,3"}).arguments.seeds == [0, None, 2, 3]
    assert make({"tasks": ["a", "b,c"]}).arguments.names == ["a", "b,c"]
