"""Steps 5 to 10 of five small models, from checkpoints that the original Trainer wrote.

The weights and the optimizer's state after step 4 are those of the file; losses, learning rates,
gradient norms and final weights are compared with what the original Trainer did next.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from modelzoo_trainer import Callback, MixedPrecision, Trainer, TrainingLoop
from modelzoo_trainer.optim import OptimizerFactory, SequentialLR, optimizer_class, scheduler_class
from modelzoo_trainer.zoo.conversion.cerebras import plan_from_cerebras, plan_to_cerebras
from modelzoo_trainer.zoo.conversion.engine import InMemory, shapes_of
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.registry import model_class
from tests.compat.corpus_here import CORPUS

pytestmark = pytest.mark.corpus

RUNS = CORPUS / "mdl"
FIRST = 4  # steps of the checkpoint


def state_of(folder: Path, path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, read by the program that comes with it."""
    spec = importlib.util.spec_from_file_location("readmdl", RUNS / "readmdl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_bytes(lzma.decompress((folder / "checkpoint_4.mdl.xz").read_bytes()))
    _, tree, _ = module.read(str(path))
    return dict(tree)


def tensors(found: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(value.bits) for name, value in found.items()}


def with_our_names(model: nn.Module, settings: Any, theirs: dict[str, Tensor]) -> Any:
    """Return tensors of the original by our names: weights, or a part of an optimizer's state."""
    if not isinstance(model, Decoder):
        names = {name: model.published_name(name) for name, _ in model.named_parameters()}
        return {name: theirs[their] for name, their in names.items()}
    for kind in ("weight", "bias"):  # one tensor with two names
        pair = [f"model.{owner}.{kind}" for owner in ("ln_f", "transformer_decoder.norm")]
        held = [theirs[name] for name in pair if name in theirs]
        theirs |= dict.fromkeys(pair, held[0]) if held else {}
    shapes = shapes_of(type(model), settings)
    return dict(plan_from_cerebras(InMemory(theirs), model, shapes, where="the file").tensors())


def with_their_names(model: nn.Module, settings: Any) -> dict[str, Tensor]:
    """Return the weights by the names of the original."""
    if not isinstance(model, Decoder):
        return {model.published_name(name): one for name, one in model.named_parameters()}
    shapes, ours = shapes_of(type(model), settings), InMemory(model.state_dict())
    return dict(plan_to_cerebras(ours, model, shapes, where="the model").tensors())


def start(
    model: nn.Module, optimizer: Any, state: dict[str, Any], expected: dict[str, Any], settings: Any
) -> None:
    """Copy the weights and the optimizer's state of a checkpoint."""
    weights = with_our_names(model, settings, tensors(state["model"]))
    model.load_state_dict(weights, strict=False)  # tied weights have one name there
    saved = state["optimizer"]
    numbers = [one for group in saved["param_groups"] for one in group["params"]]
    names = [name for group in expected["group_parameters"] for name in group]
    for key in saved["state"][0].keys() - {"beta1_power", "beta2_power"}:
        theirs = {
            name: saved["state"][number][key] for number, name in zip(numbers, names, strict=True)
        }
        found = with_our_names(model, settings, tensors(theirs))
        for name, param in model.named_parameters():
            optimizer.state[param][key] = found[name]
            if key == "exp_avg":
                optimizer.state[param]["step"] = torch.tensor(float(FIRST))


class Watch(Callback):
    """Keep the loss, the learning rates and the norm of the gradients of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[float], float]] = []
        self._norm = 0.0

    def on_after_backward(self, trainer: Any, model: Any, outputs: Any) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        self._norm = torch.stack([grad.double().norm() for grad in grads]).norm().item()

    def on_before_scheduler_step(
        self, trainer: Any, model: Any, optimizer: Any, scheduler: Any
    ) -> None:
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def on_train_batch_end(
        self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append((outputs["loss"].item(), self._rates, self._norm))


def parts_of(init: dict[str, Any]) -> tuple[Any, Any]:
    """Return what makes the optimizer and the schedule of a file, the latter after four steps."""
    ((name, arguments),) = init["optimizer"].items()
    given = {key: tuple(one) if isinstance(one, list) else one for key, one in arguments.items()}
    members = [
        scheduler_class(name)(**arguments)
        for member in init["schedulers"][0]["SequentialLR"]["schedulers"]
        for name, arguments in member.items()
    ]

    def schedule(optimizer: Any) -> Any:
        return SequentialLR(optimizer, members, last_epoch=FIRST - 1)

    return OptimizerFactory(optimizer_class(name), given), schedule


@pytest.mark.parametrize("name", ["gpt3_mup", "llama", "mixtral", "bert", "gpt3_sgd"])
def test_a_run_goes_on_as_in_the_original(name: str, tmp_path: Path) -> None:
    folder = RUNS / name
    init = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))["trainer"]["init"]
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    settings = {key: value for key, value in init["model"].items() if key != "name"}
    model: Any = model_class(init["model"]["name"])(**settings)
    make, schedule = parts_of(init)
    optimizer = make(model)
    start(model, optimizer, state_of(folder, tmp_path / "checkpoint.mdl"), expected, settings)
    batches: list[dict[str, Tensor]] = [{} for _ in range(11)]
    for key, value in load_file(folder / "batches.safetensors").items():
        step, _, entry = key.removeprefix("step_").partition(".")
        batches[int(step)][entry] = value
    watch = Watch()
    trainer = Trainer(
        device="cpu",
        model_dir=tmp_path,
        model=model,
        optimizer=optimizer,
        schedulers=schedule,
        precision=MixedPrecision(**init["precision"]),
        loop=TrainingLoop(max_steps=10 - FIRST),
        callbacks=[watch],
        progress="none",
    )

    trainer.fit(batches[FIRST + 1 :])

    for step, (loss, rates, norm) in zip(expected["steps"][FIRST:], watch.seen, strict=True):
        assert loss == pytest.approx(step["loss"], rel=1e-6)
        assert norm == pytest.approx(step["grad_norm"], rel=1e-6)
        assert sorted(set(rates)) == pytest.approx(sorted(set(step["lr"])), rel=1e-6)
    found = with_their_names(model, settings)
    assert len(found) >= 20
    for key, value in found.items():
        wanted = expected["final_weights"][key]
        assert value.double().norm().item() == pytest.approx(wanted["norm"], rel=1e-6)
        assert value.double().sum().item() == pytest.approx(wanted["sum"], abs=1e-4)
