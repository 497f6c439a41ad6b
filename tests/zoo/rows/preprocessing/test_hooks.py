"""Read hooks: what they return for an entry, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.preprocessing.hooks import find_hook
from modelzoo_trainer.zoo.rows.turns import Turn, TurnRegion, turns_of

PUBLISHED = "cerebras.modelzoo.data_preparation.data_preprocessing.hooks:"
CHAT = {
    "multi_turn_key": "messages",
    "multi_turn_role_key": "role",
    "multi_turn_content_key": "content",
}


def turns(hook, entry, **arguments):
    """Return what a published hook makes of an entry, as (role, text) pairs."""
    found = find_hook(PUBLISHED + hook, arguments)(entry)
    return found and [(turn.get("type"), turn["content"][0]["text"]) for turn in found]


def chat(*pairs):
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def test_the_published_hooks_return_their_turns():
    assert turns("text_read_hook", {"text": " a b\n"}, text_key="text") == [(None, "a b")]
    keys = {"prompt_key": "p", "completion_key": "c"}
    entry = {"p": "why", "c": 5}
    assert turns("prompt_completion_text_read_hook", entry, **keys) == [
        ("prompt", "why"),
        ("completion", "5"),
    ]
    assert turns("prompt_completion_chat_read_hook", entry, **keys) == [
        ("user", "why"),
        ("assistant", "5"),
    ]


def test_token_ids_stay_lists_of_integers():
    keys = {"context_key": "x", "completion_key": "y"}
    assert turns("nlg_read_hook", {"x": [1, 2], "y": [3]}, **keys) == [
        ("context", [1, 2]),
        ("completion", [3]),
    ]


def test_a_chat_is_an_optional_system_message_and_pairs():
    entry = chat(("system", "s"), ("user", "u"), ("assistant", "a"))
    assert turns("chat_read_hook", entry, **CHAT) == [
        ("system", "s"),
        ("user", "u"),
        ("assistant", "a"),
    ]
    entry = chat(("human", "u"), ("gpt", "a"))
    assert turns("chat_read_hook", entry, **CHAT) == [("user", "u"), ("assistant", "a")]


@pytest.mark.parametrize(
    "roles",
    [
        [],
        ["system"],
        ["user"],
        ["user", "user"],
        ["assistant", "user"],
        ["user", "assistant", "user"],
    ],
)
def test_a_chat_without_pairs_is_skipped(roles):
    assert turns("chat_read_hook", chat(*((role, "x") for role in roles)), **CHAT) is None


def test_a_preference_has_a_prompt_of_its_own_or_one_inside_both_answers():
    keys = {"chosen_key": "c", "rejected_key": "r"}
    entry = {"p": "why", "c": "good", "r": "bad"}
    expected = [("prompt", "why"), ("chosen", "good"), ("rejected", "bad")]
    assert turns("dpo_read_hook", entry, prompt_key="p", **keys) == expected
    shared = "Human: x Assistant: y Human: z ASSISTANT:"
    entry = {"c": f"{shared} good", "r": f"{shared} bad"}
    expected = [("prompt", shared), ("chosen", "good"), ("rejected", "bad")]
    assert turns("dpo_read_hook", entry, **keys) == expected
    with pytest.raises(ConfigError, match=r"'c' has no 'assistant:'.*prompt_key"):
        turns("dpo_read_hook", {"c": "good", "r": "bad"}, **keys)


def test_a_missing_column_is_named():
    hook = find_hook(PUBLISHED + "text_read_hook", {"text_key": "text"})
    with pytest.raises(ConfigError, match=r"no key 'text'.*'texts'"):
        hook({"texts": ""})
    with pytest.raises(ConfigError, match=r"an object with 'text'.*got list"):
        hook([])
    with pytest.raises(ConfigError, match=r"'text' must hold text, got dict"):
        hook({"text": {}})


def test_a_hook_knows_its_columns():
    hook = find_hook(PUBLISHED + "chat_read_hook", CHAT)
    assert hook.columns == ["messages", "role", "content"]
    keys = {"chosen_key": "a", "rejected_key": "b", "prompt_key": None}
    assert find_hook(PUBLISHED + "dpo_read_hook", keys).columns == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("text_read_hook", {}, "text_key .* is missing"),
        ("text_read_hook", {"text_key": 3}, r"read_hook_kwargs\.text_key: .*3"),
        ("text_read_hook", {"text_kye": "a"}, r"read_hook_kwargs\.text_kye.*'text_key'"),
        ("text_raed_hook", {}, "'text_read_hook'"),
        ("finetuning_llava_hook", {}, "images"),
    ],
)
def test_a_published_hook_is_checked_before_it_is_called(path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        find_hook(PUBLISHED + path, arguments)


def test_the_colon_is_suggested_where_a_dot_is_written():
    with pytest.raises(ConfigError, match=r"Write 'a\.hooks:f'"):
        find_hook("a.hooks.f", {})


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that makes a hook of a user's module."""
    monkeypatch.syspath_prepend(tmp_path)

    unused = f"own_{tmp_path.name}"

    def make(body, name=unused):
        (tmp_path / f"{name}.py").write_text(f"def hook(entry, **kwargs):\n    {body}\n")
        return find_hook(f"{name}:hook", {"text_key": "t"})

    return make


def test_a_users_hook_is_imported_and_gets_its_arguments(own):
    hook = own("return [{'content': [{'text': entry[kwargs['text_key']]}]}]")
    assert hook({"t": "a"}) == [{"content": [{"text": "a"}]}]


def test_a_users_hook_may_skip_a_document(own):
    assert own("return []")({}) is None


def test_a_hook_that_does_not_exist_is_refused(own):
    own("return None", "own_other")
    with pytest.raises(ConfigError, match=r"own_other has no function 'hok'.*'hook'"):
        find_hook("own_other:hok", {})
    with pytest.raises(ConfigError, match=r"read_hook: Cannot import 'no_such_module'"):
        find_hook("no_such_module:hook", {})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("text", "list of turns is expected, got 'text'"),
        ([1], "turn 0: a dict is expected, got 1"),
        ([{"contents": []}], "turn 0: unknown key 'contents'.*'content'"),
        ([{"type": 1, "content": []}], "'type' must be a string, got 1"),
        ([{"content": "a"}], "'content' must be a list of dicts, got 'a'"),
        ([{"content": ["a"]}], "one region.*got 'a'"),
        ([{"content": [{"text": 1.5}]}], "region 'text'.*got 1.5"),
        ([{"content": [{"text": [-1]}]}], "token ids is expected"),
        ([{"content": [{"image": "a.png"}]}], "images are not supported"),
        ([{"content": [{"text": "a"}], "semantic_loss_weight": [1, 0]}], "each of the 1 items"),
        ([{"content": [{"text": "a"}], "semantic_loss_weight": [0.5]}], "must be 0 or 1, got 0.5"),
        ([{"content": [{"text": "a"}], "semantic_attention_mask": [0]}], "has no effect on text"),
    ],
)
def test_what_a_hook_may_not_return_is_refused_with_its_place(returned, message):
    with pytest.raises(ConfigError, match=f"(?s)here.*{message}"):
        turns_of(returned, "here")


def test_weights_and_drops_belong_to_their_regions():
    returned = {
        "type": "user",
        "content": [{"text": "a"}, {"code": np.array([1, 2])}],
        "semantic_loss_weight": [1, 0],
        "semantic_drop_mask": [False, True],
        "semantic_attention_mask": [1, 1],
    }
    regions = (TurnRegion("text", "a", 1.0, False), TurnRegion("code", (1, 2), 0.0, True))
    assert turns_of([returned], "here") == (Turn("user", regions),)


def test_arguments_in_data_keys_are_arguments_and_given_once() -> None:
    keys = {"prompt_key": "a", "completion_key": "b"}
    path = "modelzoo.data_preparation.data_preprocessing.hooks:prompt_completion_text_read_hook"
    assert find_hook(path, {"data_keys": keys}).arguments == keys
    with pytest.raises(ConfigError, match=r"data_keys\.prompt_key: prompt_key is given twice"):
        find_hook(path, {"data_keys": keys, "prompt_key": "c"})


def test_texts_of_chats_and_preferences_are_stripped_as_in_the_model_zoo() -> None:
    entry = {"p": " a\n", "c": "\tb ", "r": " c"}
    pair = {"prompt_key": "p", "completion_key": "c"}
    expected = [("user", "a"), ("assistant", "b")]
    assert turns("prompt_completion_chat_read_hook", entry, **pair) == expected
    messages = chat(("system", " s "), ("user", " a "), ("assistant", "b\n"))
    assert turns("chat_read_hook", messages, **CHAT) == [("system", " s "), *expected]
    silent = chat(("system", ""), ("user", "a"), ("assistant", "b"))
    assert turns("chat_read_hook", silent, **CHAT) == expected
    keys = {"chosen_key": "c", "rejected_key": "r", "prompt_key": "p"}
    assert turns("dpo_read_hook", entry, **keys) == [
        ("prompt", "a"),
        ("chosen", "b"),
        ("rejected", "c"),
    ]
    plain = turns("prompt_completion_text_read_hook", entry, **pair)
    assert plain == [("prompt", " a\n"), ("completion", "\tb ")]
