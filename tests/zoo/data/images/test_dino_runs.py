"""Runs of DINO on images: a kill, several processes, gradient accumulation, other engines."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer import Callback, Checkpoint, MixedPrecision, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss, ScopedTrainFlags
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.data.images.dino import DinoImageDataProcessor
from tests.distributed.ranks import run_ranks, try_ranks
from tests.doubles import Cut, SaveAndCut
from tests.zoo.data.images.views_arguments import arguments
from tests.zoo.data.images.written import write_images
from tests.zoo.models.dino_cases import make, settings

Seen = list[tuple[list[float], float]]


class Watch(Callback):
    """Keep a digest of each batch and the losses; end the process after a step."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at = killed_at
        self.seen: Seen = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        masks = batch["collated_masks"].float().sum(dim=(1, 2))
        views = batch["global_view"].sum(dim=(1, 2, 3, 4))
        self.seen.append(((masks + views).tolist(), outputs["loss"].item()))

    def on_step_committed(self, trainer):
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Spoil(Callback):
    """Makes the loss of a step NaN; keeps the state before and after it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.states: list[dict[str, torch.Tensor]] = []

    def on_before_backward(self, trainer, model, outputs):
        if trainer.global_step == self.step:
            outputs["loss"] = outputs["loss"] * float("nan")

    def on_step_boundary(self, trainer):
        state = trainer.model.state_dict()
        self.states.append({key: value.clone() for key, value in state.items()})


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(params, lr=0.01, eps=0.01)  # large, as noise of 0 gradients counts


def made(
    folder: str, *callbacks: Callback, drops: float = 0.0, accum: int = 1, **options: Any
) -> Trainer:
    return Trainer(
        device="cpu",
        model_dir=folder,
        model=lambda: make(trunk={"stochastic_depth_drop_prob": drops}),
        optimizer=adam,
        loop=TrainingLoop(max_steps=8, grad_accum_steps=accum),
        checkpoint=Checkpoint(steps=3),
        callbacks=callbacks,
        progress="none",
        seed=0,
        **options,
    )


def loader(root: str, **given: Any) -> Any:
    return DinoImageDataProcessor(**arguments(root, **given)).create_dataloader()


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.close()
    return state


def trained(
    rank: int,
    root: str,
    folder: str,
    killed_at: int | None = None,
    drops: float = 0.0,
    **given: Any,
) -> tuple[Seen, dict[str, torch.Tensor]]:
    watch = Watch(killed_at)
    trainer = made(folder, watch, drops=drops)
    trainer.fit(loader(root, **given))
    return watch.seen, state_of(trainer)


def killed(rank: int, root: str, folder: str, given: dict[str, Any]) -> None:
    trained(rank, root, folder, killed_at=5, **given)


@pytest.fixture
def root(tmp_path) -> str:
    write_images(tmp_path / "data" / "train", 3, 3)
    return str(tmp_path / "data")


# CI: with a worker; without one, and with the last batch: tests/numerics/test_resume_data.py.
@pytest.mark.soak_cases("given1")
@pytest.mark.slow
@pytest.mark.parametrize("given", [{"num_workers": 1, "drops": 0.3}, {"drop_last": False}])
def test_a_run_that_is_killed_ends_with_the_same_bits(root, tmp_path, given) -> None:
    seen, state = trained(0, root, str(tmp_path / "whole"), **given)
    folder = str(tmp_path / "run")
    ((ok, _),) = try_ranks(1, killed, root, folder, given)
    assert not ok

    rest, resumed = trained(0, root, folder, **given)

    assert rest == seen[-len(rest) :]
    assert 2 <= len(rest) <= 5
    assert all(map(torch.equal, resumed.values(), state.values()))
    assert state["ema_step"].item() == 8
    assert state["losses.model.0.center"].abs().sum() > 0


@pytest.mark.slow
def test_two_processes_equal_one_also_after_a_resume(root, tmp_path) -> None:
    alone, state = trained(0, root, str(tmp_path / "one"))
    for folder in ("two", "resumed"):
        if folder == "resumed":
            try_ranks(1, killed, root, str(tmp_path / folder), {})
        parts = run_ranks(2, trained, root, str(tmp_path / folder))
        seen = [part for part, _ in parts]
        together = [first[0] + second[0] for first, second in zip(*seen, strict=True)]
        assert together == [samples for samples, _ in alone][-len(together) :]
        assert (len(together) < len(alone)) == (folder == "resumed")
        for _, found in parts:
            torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_padding_batches_of_several_processes_count_nothing(root, tmp_path) -> None:
    given = {"batch_size": 3, "num_samples": 5, "drop_last": False}
    _, state = trained(0, root, str(tmp_path / "one"), **given)
    ranks = run_ranks(3, partial(trained, **given), root, str(tmp_path / "three"))
    for _, found in ranks:
        torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_batches_of_a_step_are_one_batch_for_centres_and_teachers(root, tmp_path) -> None:
    flags = ScopedTrainFlags(**{"csx.performance.micro_batch_size": 1})
    whole, parts = made(str(tmp_path / "whole")), made(str(tmp_path / "parts"), flags)
    for trainer in (whole, parts):
        trainer.fit(loader(root))
    expected, found = state_of(whole), state_of(parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found["ema_step"].item() == 8


@pytest.mark.slow
def test_a_run_that_is_cut_within_a_step_ends_with_the_same_bits(root, tmp_path) -> None:
    whole = made(str(tmp_path / "whole"), accum=3)
    whole.fit(loader(root))
    with pytest.raises(Cut):
        made(str(tmp_path / "cut"), SaveAndCut(8), accum=3).fit(loader(root))
    resumed = made(str(tmp_path / "cut"), accum=3)
    resumed.fit(loader(root))
    expected, found = state_of(whole), state_of(resumed)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.slow
def test_a_skipped_step_moves_neither_centres_nor_teachers(root, tmp_path) -> None:
    spoil = Spoil(2)
    trainer = made(str(tmp_path / "run"), CheckLoss("skip"), spoil)
    trainer.fit(loader(root))
    trainer.close()
    before, after, later = spoil.states[1:4]
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (after["ema_step"].item(), later["ema_step"].item()) == (2, 3)
    assert not torch.equal(later["losses.model.0.center"], after["losses.model.0.center"])


class Overflow(Spoil):
    """Makes the gradients of a step infinite."""

    def on_before_backward(self, trainer, model, outputs):
        pass

    def on_after_backward(self, trainer, model, outputs):
        if trainer.global_step == self.step:
            for one in model.parameters():
                if one.grad is not None:
                    one.grad.fill_(float("inf"))


@pytest.mark.slow
def test_a_step_that_the_loss_scaler_skips_moves_nothing(root, tmp_path) -> None:
    spoil = Overflow(2)
    trainer = made(str(tmp_path / "run"), spoil, precision=MixedPrecision(enabled=False))
    trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
    trainer.fit(loader(root))
    trainer.close()
    before, after, later = spoil.states[1:4]
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (after["ema_step"].item(), later["ema_step"].item()) == (2, 3)


ENGINES: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": "full"},
    "blocks": {"compile": {"target": "blocks", "backend": "aot_eager"}},
    "model": {"compile": {"backend": "aot_eager"}},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_compute_the_same(root, tmp_path, engine) -> None:
    plain, other = (
        made(str(tmp_path / name), backend=options)
        for name, options in (("plain", None), ("other", ENGINES[engine]))
    )
    for trainer in (plain, other):
        trainer.fit(loader(root))
    torch.testing.assert_close(state_of(other), state_of(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_file_trains_and_validates_and_names_bad_sizes(root, tmp_path, capsys) -> None:
    write_images(tmp_path / "data" / "val", 3, 2)
    file = tmp_path / "params.yaml"
    for side, facts in ((8, []), (12, ["global_view", "12", "image_size"])):
        data = {"data_processor": "DinoImageDataProcessor", **arguments(root)}
        transform = data["ssl_transform"]
        transform["multi_crop_transform"]["global_image_size"] = side
        transform["masked_patch_transform"]["image_size"] = side
        init = {
            "device": "cpu",
            "model_dir": str(tmp_path / f"run{side}"),
            "model": {"name": "dino", **settings()},
            "optimizer": {"AdamW": {"lr": 0.01}},
            "loop": {"max_steps": 2},
            "callbacks": [{"ModelEvalMetrics": {}}],
        }
        fit = {"train_dataloader": data, "val_dataloader": data}
        file.write_text(yaml.safe_dump({"trainer": {"init": init, "fit": fit}}))
        code = main(["fit", str(file)])
        said = "".join(capsys.readouterr())
        assert (code == 0) == (not facts)
        assert [fact for fact in facts[1:] if fact not in said] == []
