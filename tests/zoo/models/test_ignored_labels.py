"""A label of -100 weighs nothing: in losses, metrics, weights of batches, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import ModelEvalMetrics
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.classifier import BertClassifier
from modelzoo_trainer.zoo.models.bert.token_heads import BertSummarizer, BertTokenClassifier
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.fc_mnist import FcMnist
from tests.doubles import History
from tests.zoo.models import bert_cases, decoder_cases, llava_cases, t5_cases, vit_cases

IGNORED = -100
SIZES = decoder_cases.SIZES | decoder_cases.NO_DROPOUT
EXPERTS = {"moe": {"num_experts": 3, "top_k": 2, "load_balancing_loss_coef": 0.1}}
Batch = dict[str, Tensor]


def tokens(*, prefix: str = "", has_mask: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 51, (3, 9), generator=generator)
    batch = {f"{prefix}input_ids": ids[:, :-1], f"{prefix}labels": ids[:, 1:]}
    return batch | ({f"{prefix}attention_mask": torch.ones(3, 8).int()} if has_mask else {})


def gpt2(**changes: Any) -> Gpt2:
    torch.manual_seed(1)
    return Gpt2(**{**SIZES, **changes})


def dpo(**settings: Any) -> Dpo:
    torch.manual_seed(1)
    return Dpo(policy_model={"name": "gpt2", **decoder_cases.SIZES}, dpo=settings)


def bert(kind: type[Any], **settings: Any) -> Any:
    torch.manual_seed(1)
    return kind(**{**bert_cases.SIZES, **settings})


def sentences() -> Batch:
    indices = torch.tensor([[0, 3, 5]] * 4)
    whole = {"cls_indices": indices, "cls_weights": torch.ones(4, 3).int()}
    return bert_cases.batch_of({}) | whole | {"labels": torch.arange(12).view(4, 3) % 2}


def of_classes() -> Batch:
    keys = ("input_ids", "attention_mask", "token_type_ids")
    batch = bert_cases.batch_of({})
    return {key: batch[key] for key in keys} | {"labels": torch.tensor([0, 2, 1, 1])}


def masked_words() -> Batch:
    return bert_cases.batch_of({}, gathers=True) | {"masked_lm_mask": torch.ones(4, 3).int()}


MASKED: dict[str, tuple[Callable[[], Any], Callable[[], Batch], str, str]] = {
    "gpt2": (gpt2, tokens, "labels", "attention_mask"),
    "gpt2, by sequences": (
        lambda: gpt2(loss_scaling="batch_size", loss_weight=0.5),
        tokens,
        "labels",
        "attention_mask",
    ),
    "experts": (lambda: gpt2(**EXPERTS), tokens, "labels", "attention_mask"),
    "llava": (llava_cases.make, llava_cases.batch_of, "labels", "loss_mask"),
    "t5": (lambda: t5_cases.make("t5"), t5_cases.batch_of, "labels", "decoder_attention_mask"),
    "t5, by labels": (
        lambda: t5_cases.make("t5", mlm_loss_scaling="num_masked"),
        t5_cases.batch_of,
        "labels",
        "decoder_attention_mask",
    ),
    "bert": (lambda: bert_cases.make("bert"), masked_words, "labels", "masked_lm_mask"),
    "tokens": (
        lambda: bert(BertTokenClassifier, num_classes=60, encoder_output_dropout_rate=0.0),
        lambda: bert_cases.batch_of({}) | {"loss_mask": torch.ones(4, 12).int()},
        "labels",
        "loss_mask",
    ),
    "sentences": (lambda: bert(BertSummarizer), sentences, "labels", "cls_weights"),
    "dpo": (
        lambda: dpo(loss_type="ipo"),
        lambda: tokens(prefix="chosen_") | tokens(prefix="rejected_"),
        "chosen_labels",
        "chosen_attention_mask",
    ),
}


def found_of(model: Any, batch: Any) -> dict[str, float]:
    """Return all numbers that a model gives for a batch, those of metrics with their weights."""
    torch.manual_seed(2)
    with torch.no_grad():
        outputs = model(batch)
    means = model.validation_means(outputs, batch) if hasattr(model, "validation_means") else {}
    found = {f"{name}, value": value for name, (value, _, _) in means.items()}
    found |= {f"{name}, weight": weight for name, (_, weight, _) in means.items()}
    found |= {name: one for name, one in outputs.items() if not torch.as_tensor(one).dim()}
    return {name: float(value) for name, value in found.items()} | {
        "labels": float(model.count_labels(batch))
    }


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("case", MASKED)
@pytest.mark.slow_cases(every=4)
def test_an_ignored_label_equals_one_without_weight(case: str, is_training: bool) -> None:
    make, batch_of, labels, mask = MASKED[case]
    model, batch = make().train(is_training), batch_of()
    is_out = torch.zeros_like(batch[labels], dtype=torch.bool)
    for row, column in batch[mask].nonzero()[[0, 4, -1]]:
        is_out[row, column] = True

    ignored = found_of(model, batch | {labels: batch[labels].masked_fill(is_out, IGNORED)})
    masked = found_of(model, batch | {mask: batch[mask].masked_fill(is_out, 0)})

    assert ignored == pytest.approx(masked, rel=1e-6)
    assert ignored["labels"] < found_of(model, batch)["labels"]


CLASSES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "fc_mnist": (
        lambda: FcMnist(hidden_sizes=[8], input_size=6, dropout=0.0),
        lambda: (torch.arange(24.0).view(4, 6).sin(), torch.tensor([3, 1, 4, 1])),
    ),
    "vit": (lambda: vit_cases.make("vit", **vit_cases.NO_DROPOUT), vit_cases.batch_of),
    "bert classes": (
        lambda: bert(
            BertClassifier,
            num_labels=3,
            problem_type="single_label_classification",
            task_dropout=0.0,
        ),
        of_classes,
    ),
}


def with_labels(batch: Any, labels: Tensor, rows: slice = slice(None)) -> Any:
    if isinstance(batch, tuple):
        return (batch[0][rows], labels[rows])
    return {key: value[rows] for key, value in (batch | {"labels": labels}).items()}


@pytest.mark.parametrize("case", CLASSES)
def test_an_ignored_class_equals_a_row_that_is_not_there(case: str) -> None:
    torch.manual_seed(1)
    make, batch_of = CLASSES[case]
    model, batch = make().eval(), batch_of()
    labels = (batch[1] if isinstance(batch, tuple) else batch["labels"]).clone()
    labels[2:] = IGNORED

    ignored = found_of(model, with_labels(batch, labels))

    assert ignored == pytest.approx(found_of(model, with_labels(batch, labels, slice(2))), rel=1e-5)
    assert ignored["num_items"] == 2


@pytest.mark.parametrize("case", [*MASKED, *CLASSES])
@pytest.mark.slow_cases(every=4)
def test_a_batch_without_a_label_has_loss_0_and_no_gradient(case: str) -> None:
    make, batch_of = (MASKED | CLASSES)[case][:2]  # type: ignore[operator]
    model, batch = make(), batch_of()
    if case in CLASSES:
        old = batch[1] if isinstance(batch, tuple) else batch["labels"]
        batch = with_labels(batch, torch.full_like(old, IGNORED))
    else:
        keys = [key for key in batch if key.endswith("labels")]
        batch |= {key: torch.full_like(batch[key], IGNORED) for key in keys}
    if "next_sentence_label" in batch:
        batch["next_sentence_label"] = torch.full((4, 1), IGNORED)

    loss = model(batch)["loss"]
    torch.autograd.backward(loss)

    grads = [one.grad for one in model.parameters() if one.grad is not None]
    assert model.count_labels(batch) == 0
    assert torch.stack([grad.abs().max() for grad in grads]).max() == 0
    assert loss.item() == pytest.approx(25.0 if case == "dpo" else 0.0)  # ipo: (1 / (2 beta))^2


def trainer_of(tmp_path: Any, *, grad_accum_steps: int = 1, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "model": lambda: gpt2(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "loop": TrainingLoop(max_steps=2, grad_accum_steps=grad_accum_steps),
        "model_dir": tmp_path / "run",
        "seed": 1,
        **options,
    }
    return Trainer(device="cpu", progress="none", **given)


def without_labels(batch: Batch) -> Batch:
    return batch | {"labels": torch.full_like(batch["labels"], IGNORED)}


@pytest.mark.parametrize("has_mask", [False, True])
def test_batches_without_labels_do_not_change_what_is_accumulated(
    tmp_path: Any, has_mask: bool
) -> None:
    batch = tokens(has_mask=has_mask)
    alone = trainer_of(tmp_path / "a")
    mixed = trainer_of(tmp_path / "b", grad_accum_steps=3)

    alone.fit([batch, batch])
    mixed.fit([batch, without_labels(batch), without_labels(batch)] * 2)

    for one, other in zip(alone.model.parameters(), mixed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_validation_counts_batches_without_labels_as_nothing(tmp_path: Any) -> None:
    batch, found = tokens(has_mask=False), []
    for loader in ([batch], [without_labels(batch), batch, without_labels(batch)]):
        folder = tmp_path / f"{len(loader)}"
        trainer = trainer_of(folder, callbacks=[ModelEvalMetrics()])
        found.append(dict(trainer.validate(loader).metrics))

    assert set(found[0]) >= {"loss", "accuracy", "lm_perplexity"}
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("case", ["labels", "mask"])
def test_a_first_batch_without_a_label_is_refused_before_the_first_step(
    tmp_path: Any, case: str
) -> None:
    batch = tokens()
    empty = without_labels(batch) if case == "labels" else batch | {"attention_mask": 0 * IDS}
    trainer = trainer_of(tmp_path)
    with pytest.raises(ConfigError, match=r"first batch has no label that counts.* -100"):
        trainer.fit([empty, batch])
    assert trainer.global_step == 0
    trainer = trainer_of(tmp_path / "later")
    trainer.fit([batch, empty])
    assert trainer.global_step == 2


def test_a_later_epoch_and_a_resumed_run_may_begin_without_labels(tmp_path: Any) -> None:
    batch = tokens()
    loop = TrainingLoop(num_epochs=3, steps_per_epoch=1, eval_frequency=None)

    class Epochs:
        num = 0

        def __iter__(self) -> Any:
            self.num += 1
            yield batch if self.num == 1 else without_labels(batch)

    trainer_of(tmp_path, loop=loop, checkpoint=Checkpoint(steps=1)).fit(Epochs())
    again = trainer_of(tmp_path, loop=TrainingLoop(max_steps=4, eval_frequency=None))
    again.fit([without_labels(batch)])
    assert again.global_step == 4


@pytest.mark.parametrize("scaling", ["num_tokens", "batch_size"])
def test_a_validation_without_a_label_is_an_error_and_logs_no_loss(
    tmp_path: Any, scaling: Any
) -> None:
    batch, history = tokens(), History()
    model = lambda: gpt2(loss_scaling=scaling)  # noqa: E731
    trainer = trainer_of(tmp_path, model=model, loggers=history)
    with pytest.raises(ConfigError, match=r"validation has no label that counts"):
        trainer.fit([batch] * 2, [without_labels(batch)] * 2)
    assert history.of("validate_0/loss") == []


IDS = torch.ones(3, 8).int()
