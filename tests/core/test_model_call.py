"""How a model is called: by the signature of its forward, or as the user has chosen."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback, ConfigError
from modelzoo_trainer.core.parts.model_call import call_for, signature_of
from tests.doubles import TinyModel, differing, tiny_batches, weights_of


class Named(NamedTuple):
    x: Any
    y: Any


def one(batch): ...
def one_default(x=None): ...
def tensor(x: Tensor): ...
def two(x, y): ...
def two_tensors(x: Tensor, y: Tensor): ...
def second_default(x, y=None): ...
def second_default_tensor(x: Tensor, y: Tensor | None = None): ...
def of_a_mapping(x: Mapping[str, Tensor], y=None): ...
def of_a_dict(x: dict[str, Tensor] | Tensor, y=None): ...
def all_default(x=None, y=None, z=None): ...
def all_default_tensors(x: Optional[torch.LongTensor] = None, y: torch.Tensor | None = None): ...  # noqa: UP045
def of_pairs(x: tuple[Tensor, Tensor] | None = None, y=None): ...
def variadic(*args): ...
def all_variadic(*args, **kwargs): ...
def keywords(**kwargs): ...
def one_and_keywords(x, **kwargs): ...
def three(x, y, z=None): ...
def keyword_only(*, x, y=None): ...
def batch_and_flag(batch, flag=False): ...


@functools.wraps(two)
def wrapped(*args, **kwargs): ...


X, XY, XYZ = {"x": 1}, {"x": 1, "y": 2}, {"x": 1, "y": 2, "z": 3}
PAIR = (1, 2)


@pytest.mark.parametrize(
    ("forward", "batch", "call"),
    [
        # what may work with the whole batch today stays
        (one, XY, "batch"),
        (one, {"batch": 1}, "batch"),
        (one, PAIR, "batch"),
        (one_default, X, "batch"),
        (one_default, [1], "batch"),
        (tensor, X, "batch"),
        (tensor, [1], "batch"),
        (second_default, PAIR, "batch"),
        (second_default_tensor, PAIR, "batch"),
        (second_default, X, "batch"),
        (second_default, XYZ, "batch"),
        (second_default, {"y": 1, "z": 1}, "batch"),
        (of_a_mapping, XY, "batch"),
        (of_a_dict, XY, "batch"),
        (of_pairs, X, "batch"),
        (batch_and_flag, {"x": 1, "flag": True}, "batch"),
        (variadic, PAIR, "batch"),
        (all_variadic, XY, "batch"),
        (one_and_keywords, XY, "batch"),
        (two, torch.ones(2), "batch"),
        (two, "xy", "batch"),
        # what cannot
        (two, XY, "kwargs"),
        (wrapped, XY, "kwargs"),
        (two_tensors, OrderedDict(XY), "kwargs"),
        (keywords, X, "kwargs"),
        (keyword_only, XY, "kwargs"),
        (three, XY, "kwargs"),
        (two, PAIR, "args"),
        (two, [1, 2], "args"),
        (two, Named(1, 2), "args"),
        (wrapped, PAIR, "args"),
        # and what does not fit
        (two, X, "batch"),
        (two, XYZ, "batch"),
        (two, {1: 1, 2: 2}, "batch"),
        (two, {}, "batch"),
        (two, (1, 2, 3), "batch"),
        (three, (1, 2, 3), "batch"),
        (keyword_only, PAIR, "batch"),
        # keys that are the parameters: not a batch for the first one
        (second_default, XY, "kwargs"),
        (all_default, XY, "kwargs"),
        (all_default_tensors, XY, "kwargs"),
        (all_default_tensors, X, "kwargs"),
        (second_default_tensor, X, "kwargs"),
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_the_signature_decides(forward, batch, call, as_text) -> None:
    signature = inspect.signature(forward, eval_str=not as_text)
    assert call_for(signature, batch) == call


def test_a_signature_that_is_not_known_leaves_the_batch_whole() -> None:
    model = nn.Module()
    model.forward = min  # type: ignore[method-assign]  # has no signature
    assert signature_of(model) is None or call_for(signature_of(model), PAIR) == "batch"
    assert call_for(None, XY) == "batch"


def test_of_a_compiled_model_the_signature_is_that_of_what_was_compiled() -> None:
    compiled = torch.compile(Pair(), backend="eager")
    assert list(signature_of(compiled).parameters) == ["inputs", "targets"]


class Pair(TinyModel):
    """A `TinyModel` that takes inputs and targets apart."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return super().forward((inputs, targets))


class AllOptional(TinyModel):
    """Likewise, with nothing required, as models of Hugging Face."""

    def forward(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Any:
        return super().forward((inputs, targets))


class Whole(TinyModel):
    """A `TinyModel` that takes a mapping."""

    def forward(self, batch: Any) -> Any:
        return super().forward((batch["inputs"], batch["targets"]))


PAIRS = tiny_batches(4)
DICTS = [{"inputs": inputs, "targets": targets} for inputs, targets in PAIRS]


@pytest.mark.parametrize(
    ("model", "batches", "text"),
    [
        (TinyModel, PAIRS, "model(batch)"),
        (Pair, PAIRS, "model(*batch)"),
        (Pair, DICTS, "model(**batch)"),
        (AllOptional, DICTS, "model(**batch)"),
        (Whole, DICTS, "model(batch)"),
    ],
)
def test_the_weights_are_those_of_the_whole_batch_whatever_the_call(
    trainer_of, tmp_path, caplog, model, batches, text
) -> None:
    first = trainer_of(model_dir=tmp_path / "first")
    first.fit(PAIRS, PAIRS)
    second = trainer_of(model=model)
    assert second.model_call is None
    second.fit(batches, batches)
    assert second.model_call == text
    assert differing(weights_of(first), weights_of(second)) == []
    told = [record for record in caplog.records if text in record.getMessage()]
    assert len(told) == (text != "model(batch)")


@pytest.mark.parametrize(
    ("call", "model", "batches"),
    [
        ("args", AllOptional, PAIRS),
        ("args", AllOptional, [list(pair) for pair in PAIRS]),
        ("kwargs", AllOptional, DICTS),
        ("batch", TinyModel, PAIRS),
        ("batch", Whole, DICTS),
    ],
)
def test_the_users_choice_comes_first(trainer_of, tmp_path, call, model, batches) -> None:
    first = trainer_of(model_dir=tmp_path / "first")
    first.fit(PAIRS)
    second = trainer_of(model=model, call_model=call)
    second.fit(batches)
    assert differing(weights_of(first), weights_of(second)) == []


def test_a_single_tensor_is_one_positional_argument(trainer_of) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            assert x.shape == (3,)
            return (self.weight * scale * x).mean()

    trainer = trainer_of(model=Alone, call_model="args")
    trainer.fit([torch.ones(3)])
    assert trainer.global_step == 1


def test_an_unknown_choice_is_refused(trainer_of) -> None:
    with pytest.raises(
        ConfigError, match=r"^call_model must be 'batch'.*'kwargs'.*'args'.* got 'dict'"
    ):
        trainer_of(call_model="dict")


@pytest.mark.parametrize(
    ("call", "batch", "told"),
    [
        ("kwargs", PAIRS[0], r"model\(\*\*batch\).* a tuple of Tensor \(4, 3\), Tensor \(4, 1\)"),
        ("kwargs", PAIRS[0][0], r"model\(\*\*batch\).* a Tensor \(4, 3\)"),
        ("kwargs", {1: PAIRS[0][0]}, r"model\(\*\*batch\).* a dict of 1: Tensor"),
        ("batch", PAIRS[0], r"'batch' .*Pair\.forward takes .*inputs.*targets.* a tuple of"),
        ("kwargs", {"x": PAIRS[0][0]}, r"'kwargs' .*Pair\.forward takes .* a dict of 'x': Tensor"),
        ("args", PAIRS[0][:1], r"'args' .*Pair\.forward takes .* a tuple of Tensor \(4, 3\)\."),
        ("args", DICTS[0], r"model\(\*batch\).* a dict of 'inputs': Tensor .*'targets': Tensor"),
    ],
)
def test_a_batch_that_does_not_fit_the_choice_is_refused(trainer_of, call, batch, told) -> None:
    with pytest.raises(ConfigError, match=told):
        trainer_of(model=Pair, call_model=call).fit([batch])


def test_a_choice_that_hooks_make_fit_is_not_refused(trainer_of) -> None:
    class Apart(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            args[:] = batch

    trainer = trainer_of(Apart(), model=Pair, call_model="batch")
    trainer.fit(PAIRS)
    assert trainer.global_step == 4


def test_each_dataloader_is_decided_on_its_own(trainer_of) -> None:
    trainer = trainer_of(model=Pair, num_epochs=1, eval_frequency=2)
    trainer.validate(PAIRS)
    assert trainer.model_call == "model(*batch)"
    trainer.fit(DICTS, [lambda: PAIRS, lambda: DICTS])
    assert trainer.model_call == "model(**batch)"
    trainer.fit(PAIRS, DICTS)
    assert (trainer.global_step, trainer.model_call) == (8, "model(*batch)")


def test_hooks_see_the_batch_as_the_one_argument(trainer_of) -> None:
    seen = []

    class Watch(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            seen.append((args == [batch], kwargs))

    trainer_of(Watch(), model=Pair).fit(DICTS)
    assert seen == [(True, {})] * 4


@pytest.mark.parametrize("given", [None, "args", "kwargs"])
def test_a_hook_may_change_the_batch_or_the_call(trainer_of, tmp_path, given) -> None:
    class Doubled(Callback):
        """Doubles inputs: within the batch, or of the call."""

        def __init__(self, *, unpacks: bool) -> None:
            self.unpacks = unpacks

        def on_before_forward(self, trainer, model, batch, args, kwargs):
            pair = list(batch.values()) if isinstance(batch, dict) else list(batch)
            pair[0] = 2 * pair[0]
            if self.unpacks:
                args[:] = pair
            else:
                args[0] = dict(zip(batch, pair, strict=True)) if isinstance(batch, dict) else (
                    tuple(pair)
                )  # fmt: skip

    batches = DICTS if given == "kwargs" else PAIRS
    model = AllOptional if given else Pair
    found = []
    for number, unpacks in enumerate((True, False)):
        trainer = trainer_of(
            Doubled(unpacks=unpacks),
            model=model,
            call_model=given,
            model_dir=tmp_path / f"{number}",
        )
        trainer.fit(batches)
        found.append(weights_of(trainer))
    assert differing(*found) == []


class Refuses(nn.Module):
    """Raises in forward."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.error = error

    def forward(self, x, y=None):
        raise self.error


class RefusesTwo(Refuses):
    def forward(self, inputs, targets):
        raise self.error


class RefusesOne(Refuses):
    def forward(self, images):
        raise self.error


LABELS_FIRST = [{"labels": y, "pixels": x} for x, y in PAIRS]
SHAPES = "Tensor (4, 3), Tensor (4, 1)"


def note_of(error: BaseException) -> str:
    """Return the one note of how the model was called."""
    [note] = [note for note in error.__notes__ if "the model was called" in note]
    return note


@pytest.mark.parametrize(
    ("model", "batches", "given", "said", "unsaid"),
    [
        # both work
        (Refuses, PAIRS, None, ["model(batch)", "call_model='args'", "batch[0])"], []),
        (Refuses, PAIRS, "args", ["model(*batch)", "call_model='batch'"], ["self.model"]),
        (Refuses, [{"x": PAIRS[0][0]}], None, ["call_model='kwargs'", "model(batch['x'])"], []),
        # only one does
        (RefusesOne, PAIRS, None, ["model(batch)", "self.model(batch[0])"], ["call_model"]),
        (RefusesOne, DICTS, None, ["self.model(batch['inputs'])"], ["call_model", "**batch"]),
        (RefusesOne, LABELS_FIRST, None, ["self.model(batch['pixels'])"], ["call_model"]),
        (RefusesTwo, PAIRS, None, ["model(*batch)"], ["call_model", "self.model"]),
        (RefusesTwo, DICTS, None, ["model(**batch)"], ["call_model", "self.model"]),
        # neither
        (RefusesTwo, [PAIRS[0] * 2], None, ["self.model(batch[0], batch[1])"], ["call_model"]),
        (RefusesTwo, [PAIRS[0][:1]], None, ["self.model(...)"], ["call_model"]),
        (RefusesOne, [PAIRS[0][0]], None, ["a Tensor (4, 3)."], ["call_model", "self.model"]),
    ],
)  # fmt: skip
def test_a_note_offers_only_the_calls_that_the_signature_allows(
    trainer_of, model, batches, given, said, unsaid
) -> None:
    with pytest.raises(TypeError) as caught:
        trainer_of(model=model(TypeError("no")), call_model=given).fit(batches)
    note = note_of(caught.value)
    assert [text for text in said if text not in note] == []
    assert [text for text in unsaid if text in note] == []


@pytest.mark.parametrize(
    ("batches", "shapes"),
    [
        (PAIRS, f"model(batch); the batch is a tuple of {SHAPES}."),
        (DICTS, "a dict of 'inputs': Tensor (4, 3), 'targets': Tensor (4, 1)."),
        (LABELS_FIRST[:1], "a dict of 'labels': Tensor (4, 1), 'pixels': Tensor (4, 3)."),
        ([PAIRS[0][0]], "model(batch); the batch is a Tensor (4, 3)."),
    ],
)
@pytest.mark.parametrize("method", ["fit", "validate"])
def test_any_error_of_forward_gets_the_shapes_of_the_batch_once(
    trainer_of, batches, shapes, method
) -> None:
    trainer = trainer_of(model=RefusesOne(RuntimeError("expected input")))
    for _ in range(2):  # the same exception
        with pytest.raises(RuntimeError) as caught:
            getattr(trainer, method)(batches)
    assert note_of(caught.value).endswith(shapes)


def test_an_error_of_a_later_batch_gets_its_shapes(trainer_of) -> None:
    odd = (torch.ones(2, 5), torch.ones(2, 1))
    with pytest.raises(RuntimeError) as caught:
        trainer_of().fit([*PAIRS, odd])
    assert "a tuple of Tensor (2, 5), Tensor (2, 1)" in note_of(caught.value)


def test_micro_batches_are_unpacked(trainer_of, tmp_path) -> None:
    found = []
    for name, model, batches in (("whole", TinyModel, PAIRS), ("apart", Pair, DICTS)):
        trainer = trainer_of(model=model, model_dir=tmp_path / name)
        trainer.split_train_batches(2)
        trainer.fit(batches)
        found.append(weights_of(trainer))
    assert differing(*found) == []


class Labelled(TinyModel):
    """A model in the style of Hugging Face; without labels it returns no loss."""

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.tanh(self.hidden(input_ids)))
        return {"logits": logits} | ({} if labels is None else {"loss": (logits - labels).mean()})


LABELLED = [{"input_ids": x, "labels": y} for x, y in tiny_batches(2)]


@pytest.mark.parametrize("given", [None, "kwargs"])
def test_a_column_too_many_is_named(trainer_of, given) -> None:
    batches = [{**batch, "idx": torch.ones(4), "text": ["a"] * 4} for batch in LABELLED]
    with pytest.raises((ConfigError, TypeError, AttributeError)) as caught:
        trainer_of(model=Labelled, call_model=given).fit(batches)
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "'idx', 'text' are not a parameter of Labelled.forward" in told
    assert "drop the keys" in told
    assert "set call_model" not in told
    assert "another call_model" not in told
    trainer_of(model=Labelled, call_model=given).fit(LABELLED)


def test_a_batch_without_labels_is_given_by_name_after_a_training_by_name(trainer_of) -> None:
    trainer = trainer_of(model=Labelled)
    trainer.fit(LABELLED)
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in LABELLED]
    found = trainer.predict(unlabelled)["logits"]
    assert trainer.model_call == "model(**batch)"
    expected = trainer.predict(LABELLED)["logits"]
    assert torch.equal(found, expected)


def test_a_batch_of_other_keys_is_given_whole_after_a_training_by_name(trainer_of) -> None:
    class Either(Labelled):
        def forward(self, input_ids, labels=None):
            if isinstance(input_ids, dict):
                input_ids = input_ids["pixels"]
            return super().forward(input_ids, labels)

    trainer = trainer_of(model=Either)
    trainer.fit(LABELLED)
    trainer.predict([{"pixels": LABELLED[0]["input_ids"]}])
    assert trainer.model_call == "model(batch)"
