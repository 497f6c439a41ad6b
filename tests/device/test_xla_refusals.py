"""What is said where torch_xla is not what it should be; without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from backends import BackendUnavailable, make_backend
try:
    make_backend({device!r}).open()
except BackendUnavailable as error:
    print(error)
"""


def said(folder: Path, device: str, **environment: str) -> str:
    """Ask for a device in a process that finds what lies in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(device=device)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def install(folder: Path, version: str, code: str = "") -> None:
    """Lay out a package as an installer does."""
    (folder / "torch_xla").mkdir()
    (folder / "torch_xla" / "__init__.py").write_text(code, encoding="utf-8")
    facts = folder / f"torch_xla-{version}.dist-info"
    facts.mkdir()
    text = f"Metadata-Version: 2.1\nName: torch_xla\nVersion: {version}\n"
    (facts / "METADATA").write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_a_torch_xla_for_another_torch_is_refused_with_both_versions(tmp_path: Path) -> None:
    install(tmp_path, "1.13.1")
    message = said(tmp_path, "xla")
    assert "torch_xla 1.13.1 requires torch 1.13, but torch " + torch.__version__ in message
    assert "pip install 'modelzoo-trainer[xla]'" in message


@pytest.mark.slow
def test_a_torch_xla_that_does_not_import_is_refused_with_the_reason(tmp_path: Path) -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    install(tmp_path, f"{version}.0", "raise ImportError('undefined symbol')")
    message = said(tmp_path, "xla", PJRT_DEVICE="TPU")
    assert "undefined symbol" in message
    assert "PJRT_DEVICE ('TPU')" in message


@pytest.mark.slow
def test_auto_is_the_device_that_the_runtime_is_told_to_use(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        return  # that goes first
    install(tmp_path, "1.13.1")
    assert "torch_xla 1.13.1" in said(tmp_path, "auto", PJRT_DEVICE="TPU")
    assert said(tmp_path, "auto", PJRT_DEVICE="CPU") == ""
