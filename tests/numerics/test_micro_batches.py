"""A batch that is split into micro-batches has the gradient, the loss and the steps of a whole."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback, Logging
from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batches import split_batch
from tests.doubles import History, TinyModel, differing, make_trainer, tiny_batches, weights_of

SIZE = "csx.performance.micro_batch_size"
Pair = namedtuple("Pair", ["inputs", "targets"])


class Watcher(Callback):
    """Keeps gradients of steps, sizes of forward passes, and batch indices."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.sizes: list[int] = []
        self.val_sizes: list[int] = []
        self.indices: list[int] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        self.indices.append(batch_idx)

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self.val_sizes.append(len(batch[0]))

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))


class Masked(nn.Module):
    """A mean over the items with mask 1, in float64, which says how many these are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        inputs, mask = batch
        terms = torch.tanh(self.linear(inputs)).squeeze(-1) ** 2
        return {"loss": (terms * mask).sum() / mask.sum().clamp_min(1), "num_items": mask.sum()}


def masked(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
            torch.randint(0, 2, (size,), generator=generator).double(),
        )
        for size in sizes
    ]


def run(model_dir, batches, *flags, val=None, **settings):
    watcher, history = Watcher(), History()
    settings = {"model": Masked, "loggers": history} | settings
    trainer = make_trainer(model_dir, *flags, watcher, **settings)
    trainer.fit(batches, val)
    return trainer, watcher, history


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 100])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 5), (7, 8, 2)])
@pytest.mark.slow_cases(every=4)
def test_the_gradient_and_the_loss_are_those_of_the_whole_batch(tmp_path, sizes, size):
    batches = masked(*sizes)
    _, whole, losses = run(tmp_path / "whole", batches)
    _, split, same = run(tmp_path / "split", batches, ScopedTrainFlags(**{SIZE: size}))
    assert max(split.sizes) <= size
    assert sum(split.sizes) == sum(sizes)
    torch.testing.assert_close(split.gradients, whole.gradients, rtol=1e-12, atol=1e-15)
    expected = [value for _, value in losses.of("loss")]
    assert [value for _, value in same.of("loss")] == pytest.approx(expected, rel=1e-12)


def test_windows_of_several_batches_count_the_loader_s_batches(tmp_path):
    batches = masked(4, 6, 5, 3, 2)
    settings: dict[str, Any] = {"grad_accum_steps": 2}
    _, whole, _ = run(tmp_path / "whole", batches, **settings)
    flags = ScopedTrainFlags(**{SIZE: 2})
    trainer, split, _ = run(tmp_path / "split", batches, flags, **settings)
    assert trainer.global_step == 3
    assert split.indices == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4]
    torch.testing.assert_close(split.gradients, whole.gradients, rtol=1e-12, atol=1e-15)


def test_a_size_that_divides_nothing_changes_nothing(tmp_path):
    batches = tiny_batches(4)
    settings: dict[str, Any] = {"model": TinyModel}
    whole, _, _ = run(tmp_path / "whole", batches, **settings)
    split, _, _ = run(tmp_path / "split", batches, ScopedTrainFlags(**{SIZE: 64}), **settings)
    assert differing(weights_of(whole), weights_of(split)) == []


def test_micro_batches_of_one_batch_draw_different_dropout_masks(tmp_path):
    seen = []

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, batch):
            kept = nn.functional.dropout(self.weight, 0.5, training=self.training)
            seen.append(kept.detach().clone())
            return {"loss": kept.mean() * batch[0].mean()}

    run(tmp_path, tiny_batches(1, 4), ScopedTrainFlags(**{SIZE: 2}), model=Dropped)
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("flags", [ScopedValidateFlags, GlobalFlags])
def test_a_validation_loss_is_that_of_whole_batches(tmp_path, flags):
    train, val = masked(4), masked(8, 5)
    settings: dict[str, Any] = {"eval_frequency": 1, "eval_steps": 2}
    _, _, whole = run(tmp_path / "whole", train, val=val, **settings)
    _, watcher, split = run(tmp_path / "split", train, flags(**{SIZE: 3}), val=val, **settings)
    assert watcher.val_sizes == [3, 3, 2, 3, 2]
    name = "validate_0/loss"
    expected = [value for _, value in whole.of(name)]
    assert [value for _, value in split.of(name)] == pytest.approx(expected, rel=1e-12)


def test_a_run_resumes_at_the_loader_s_batch(tmp_path):
    batches = masked(4, 6, 5, 3)
    flags = ScopedTrainFlags(**{SIZE: 2})
    through, _, _ = run(tmp_path / "through", batches, flags, max_steps=4)
    first = run(tmp_path / "halves", batches, flags, max_steps=2)[0]
    path = first.save_checkpoint()
    second = make_trainer(tmp_path / "halves", flags, model=Masked, max_steps=4)
    second.fit(batches, ckpt_path=path)
    assert differing(weights_of(through), weights_of(second)) == []


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_it_works_where_the_host_must_not_read(tmp_path, device):
    trainer, watcher, _ = run(
        tmp_path,
        tiny_batches(3),
        GlobalFlags(**{SIZE: 3}),
        val=tiny_batches(2),
        model=TinyModel,
        device=device,
    )
    assert trainer.global_step == 3
    assert watcher.sizes == [3, 1] * 3


def test_a_batch_is_sliced_whatever_its_nesting():
    ids = torch.arange(5)
    batch = {
        "ids": ids,
        "pair": Pair(ids, [ids, torch.tensor(7)]),
        "names": list("abcde"),
        "scale": 2.0,
    }
    first, second = split_batch(batch, 3)
    assert first["ids"].tolist() == [0, 1, 2]
    assert second["pair"].targets[0].tolist() == [3, 4]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].targets[1].item() == 7
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert first["scale"] == 2.0


def test_a_batch_whose_tensors_disagree_is_not_split():
    with pytest.raises(ConfigError, match=r"batch of 4 samples has a tensor of shape \(3,\)"):
        split_batch((torch.zeros(4), torch.zeros(3)), 2)


def test_a_pair_of_mappings_is_no_list_of_two_samples():
    rows = torch.arange(4).reshape(2, 2)
    parts = split_batch(({"a": rows}, {"b": rows}), 1)
    assert [(part[0]["a"].tolist(), part[1]["b"].tolist()) for part in parts] == [
        ([[0, 1]], [[0, 1]]),
        ([[2, 3]], [[2, 3]]),
    ]


@pytest.mark.parametrize("flags", [[], [ScopedTrainFlags(**{SIZE: 2})]])
def test_the_last_loss_of_a_run_of_unknown_length_is_that_of_its_whole_step(tmp_path, flags):
    batches = masked(4, 4, 4, 4, 4)
    settings = {"grad_accum_steps": 3, "logging": Logging(log_steps=0), "num_epochs": 1}
    _, _, known = run(tmp_path / "known", batches, *flags, **settings)
    _, _, unknown = run(tmp_path / "unknown", Stream(batches), *flags, **settings)
    assert unknown.of("loss") == known.of("loss")


class Stream:
    """Batches whose number is not known."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Marks(Callback):
    """Notes which batches are called first and final."""

    def __init__(self) -> None:
        self.starts: list[tuple[bool, bool]] = []
        self.ends: list[tuple[bool, bool]] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.starts.append((trainer.is_first_iteration, trainer.is_final_iteration))

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.ends.append((trainer.is_first_iteration, trainer.is_final_iteration))


def test_first_and_final_are_the_first_and_the_last_batch_of_the_loader(tmp_path):
    marks = Marks()
    flags = ScopedTrainFlags(**{SIZE: 2})
    run(tmp_path, masked(4, 4, 4), flags, marks, max_steps=3)
    assert [first for first, _ in marks.starts] == [True, True, False, False, False, False]
    assert [final for _, final in marks.starts] == [False] * 5 + [True]
    assert marks.ends == marks.starts
