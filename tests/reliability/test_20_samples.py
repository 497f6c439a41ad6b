"""Stored checkpoints of every format version load."""

from __future__ import annotations

from pathlib import Path

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.manifest import FORMAT_VERSION

SAMPLES = Path(__file__).parents[1] / "checkpointing" / "samples"


def test_there_is_a_sample_of_every_version_and_each_loads(count) -> None:
    found = {}
    for path in sorted(SAMPLES.glob("v*/checkpoint_*")):
        manifest = checkpointing.read_manifest(path)
        assert checkpointing.verify(path) == []
        assert checkpointing.load(path)
        found[manifest.format_version] = path
        assert path.parent.name == f"v{manifest.format_version}"
    assert sorted(found) == list(range(1, FORMAT_VERSION + 1))
    count(versions=len(found))
