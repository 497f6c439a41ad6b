"""Linear layers in float8, on a CPU by emulation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends.backend import Caps
from modelzoo_trainer import MixedPrecision
from modelzoo_trainer.core.parts.float8 import with_float8
from modelzoo_trainer.errors import ConfigError
from tests.core.test_initial_values import BATCH, Made, trainer_in, values_of
from tests.doubles import TinyModel

pytest.importorskip("torchao", reason="needs torchao (extra fp8)")
PLAIN = {"hidden_size": 32, "filter_size": 48, "dropout_rate": 0.0, "attention_dropout_rate": 0.0}


class Emulated(Made):
    """Makes a decoder with float8 layers, without values at first."""

    def __call__(self) -> nn.Module:
        return with_float8("rowwise", super().__call__(), emulate=True)


def test_the_linear_layers_of_blocks_are_replaced_and_no_others() -> None:
    model = Made(**PLAIN)()
    before = dict(model.named_parameters())
    linear = {name for name, one in model.named_modules() if type(one) is nn.Linear}
    assert with_float8("tensorwise", model, emulate=True) is model
    replaced = {name for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"}
    assert replaced == linear - {"lm_head"}
    assert all(param is before[name] for name, param in model.named_parameters())


def test_sizes_that_kernels_do_not_support_stay() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 17)])})
    with_float8("rowwise", model, emulate=True)
    assert [type(one).__name__ for one in model["layers"]] == ["Float8Linear", "Linear"]


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision\.fp8: TinyModel has no linear layer"):
        with_float8("rowwise", TinyModel())


def losses(folder: Path, model: Any, num_steps: int = 6) -> tuple[list[float], dict[str, Any]]:
    found: list[float] = []
    with trainer_in(folder, num_steps, model=model, precision=MixedPrecision()) as trainer:
        trainer.fit([BATCH])
        found.append(trainer.result.metrics["loss"])
        return found, values_of(trainer)


def test_it_trains_like_bfloat16_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    plain, _ = losses(tmp_path / "plain", Made(**PLAIN))
    whole, expected = losses(tmp_path / "whole", Emulated(**PLAIN))
    assert whole == pytest.approx(plain, rel=0.02)
    assert whole != plain
    losses(tmp_path / "run", Emulated(**PLAIN), 2)
    again, values = losses(tmp_path / "run", Emulated(**PLAIN))
    assert again == whole
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_the_setting_converts_the_model_before_it_has_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.cpu.CpuBackend.caps", Caps(no_float8=""))
    with trainer_in(tmp_path, model=Made(**PLAIN), precision=MixedPrecision(fp8="rowwise")) as one:
        kinds = {type(part).__name__ for part in one.model.modules()}
        assert "Float8Linear" in kinds
        assert one.backend.initial_values.num_drawn


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8": "rowwise", "enabled": False}, "requires enabled: true and fp16_type: bfloat16"),
        ({"fp8": "rowwise", "fp16_type": "float16"}, "requires enabled: true and fp16_type"),
        ({"fp8": "rows"}, r"expected 'tensorwise', .*Did you mean 'rowwise'\?"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixedPrecision(**settings)


def test_a_device_that_cannot_is_refused_with_the_reason(tmp_path: Path) -> None:
    message = r"precision\.fp8: float8 requires an NVIDIA GPU of compute capability 8\.9 or newer"
    with pytest.raises(ConfigError, match=message):
        trainer_in(tmp_path, precision=MixedPrecision(fp8="rowwise"))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.cpu.CpuBackend.caps", Caps(no_float8=""))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"requires torchao, .* pip install .*\[fp8\]"):
        trainer_in(tmp_path, precision=MixedPrecision(fp8="rowwise"))
