"""Every key of the published configurations, spoilt: the mistake is found where it is."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from modelzoo_trainer.config.shipped import shipped_names
from tests.compat.corpus_here import CONFIGURATIONS
from tests.config.mutants import GIVEN_TWICE, KINDS, MISSING, Mutant, keys_of, mutants_of
from tests.config.shapes import Format
from tests.config.verdicts import Verdicts

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SAMPLE = 1000

# What the format lets pass, because a published class has it open: mutants by owner.
OPEN = {
    "AdamW.adjust_learning_rate": 2,
    "ImageNet1KProcessor": 8,
    "ImageNet1KProcessor.transforms": 78,
    "MultimodalRawDatasetProcessor.preprocessing": 57,
    "MultimodalRawDatasetProcessor.transforms": 24,
    "a model without a name": 257,
}

pytestmark = pytest.mark.corpus


@pytest.fixture(scope="module")
def files():
    paths = [*sorted(CONFIGS.glob("*.yaml")), *sorted(CONFIGURATIONS.rglob("*.yaml"))]
    assert len(paths) >= 80
    return {f"{path.parent.name}/{path.name}": path.read_text("utf-8") for path in paths}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return Verdicts(tmp_path_factory.mktemp("mutants"), shipped_names())


@pytest.fixture
def form(verdicts):
    return Format(verdicts.names)


def is_in_sample(source: str, mutant: Mutant, one_in: int) -> bool:
    what = f"{source} {mutant.path} {mutant.kind}"
    return zlib.crc32(what.encode()) % one_in == 0


@pytest.mark.slow
def test_a_sample_of_mistakes_is_found(files, form, tmp_path, verdicts):
    sample = Verdicts(tmp_path, verdicts.names)
    for source, text in files.items():
        found = [one for one in mutants_of(text, form) if is_in_sample(source, one, 30)]
        if found:
            sample.judge(source, text, found)
    assert sample.missed == []
    assert sample.crashes == []
    assert sum(sample.counts[kind, "mutants"] for kind in KINDS) > SAMPLE * 0.7
    assert sample.share("suggested") >= 0.95


def test_no_more_is_open_than_what_is_listed(files, form):
    found: Counter[str] = Counter()
    shipped = set()
    for text in files.values():
        is_open = [one for one in mutants_of(text, form) if one.is_open]
        found.update(one.owner for one in is_open)
        shipped |= {one.owner for one in is_open if one.is_shipped}
    assert {owner: number for owner, number in found.items() if number > OPEN.get(owner, 0)} == {}
    assert shipped == {"AdamW.adjust_learning_rate"}  # the groups are the model's


@pytest.mark.soak
def test_every_mistake_is_found(files, form, verdicts, capsys):
    num_keys = 0
    for source, text in files.items():
        num_keys += len(keys_of(text, form))
        verdicts.judge(source, text, mutants_of(text, form))
    seconds, slowest = verdicts.slowest
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(files)} files, {num_keys} keys\n{verdicts.table()}\n"
            f"right key suggested for {verdicts.share('suggested'):.2%} of the misspelt ones\n"
            f"{verdicts.seconds:.0f} s in all; slowest: {seconds:.2f} s, {slowest}\n"
        )
    assert verdicts.missed == []
    assert verdicts.crashes == []
    assert verdicts.share("suggested") >= 0.95
    assert verdicts.counts[GIVEN_TWICE, "judged"] == num_keys
    assert verdicts.counts[MISSING, "judged"] > 1000
