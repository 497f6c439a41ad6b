"""Files of rows on a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from modelzoo_trainer.zoo.rows.interface import Rows
from modelzoo_trainer.zoo.rows.preprocessing import output
from modelzoo_trainer.zoo.rows.preprocessing.shuffling import BucketWriter

ROWS = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def check(raised, folder) -> None:
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(folder))
    assert "\n" not in str(raised.value)
    assert "again" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("write", "content"), [(output.write_rows, {"data": ROWS}), (output.write_text, "text")]
)
def test_a_full_disk_is_named_in_one_line_and_the_file_does_not_count(tmp_path, write, content):
    (tmp_path / f"a.h5{output.PART}").symlink_to(FULL)
    with pytest.raises(OSError, match="No space") as raised:
        write(tmp_path / "a.h5", content)
    check(raised, tmp_path)
    assert not (tmp_path / "a.h5").exists()


def test_a_full_disk_is_named_while_rows_are_shuffled(tmp_path):
    layout = output.StreamLayout(
        features=("input_ids",) * 3, dtype="int32", inverts_mask=False, bytes_per_file=100
    )
    writer = BucketWriter(tmp_path, layout, 1, 0)
    (tmp_path / "INCOMPLETE.buckets").mkdir()
    (tmp_path / "INCOMPLETE.buckets" / "bucket_0.bin").symlink_to(FULL)
    with pytest.raises(OSError, match="No space") as raised:
        writer.add(Rows({"data": ROWS}, np.array([4, 4])))
    check(raised, tmp_path)
