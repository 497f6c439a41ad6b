"""What disks and people do to the files of a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.reliability.states import make

_PAGE: Final = 4096


def any_byte(path: Path, generator: random.Random) -> tuple[Path, int]:
    """Return a file of a checkpoint and a position in it, each byte as likely as any other."""
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    file = generator.choices(files, sizes)[0]
    return file, generator.randrange(file.stat().st_size)


def flip_a_bit(path: Path, generator: random.Random) -> str:
    file, position = any_byte(path, generator)
    data = bytearray(file.read_bytes())
    bit = generator.randrange(8)
    data[position] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {position} of {file.name}"


def zero_a_page(path: Path, generator: random.Random) -> str:
    file, position = any_byte(path, generator)
    data = bytearray(file.read_bytes())
    begin = position - position % _PAGE
    end = min(len(data), begin + _PAGE)
    data[begin:end] = bytes(end - begin)
    file.write_bytes(data)
    return f"page at {begin} of {file.name}"


def truncate(path: Path, generator: random.Random) -> str:
    file, position = any_byte(path, generator)
    with file.open("rb+") as opened:
        opened.truncate(position)
    return f"{file.name} cut to {position}"


def append(path: Path, generator: random.Random) -> str:
    file, _ = any_byte(path, generator)
    with file.open("ab") as opened:
        opened.write(generator.randbytes(generator.randrange(1, 64)))
    return f"{file.name} made longer"


def delete(path: Path, generator: random.Random) -> str:
    file = generator.choice(sorted(path.iterdir()))
    file.unlink()
    return f"{file.name} deleted"


def add(path: Path, generator: random.Random) -> str:
    name = generator.choice(["extra.json", "pad.safetensors", ".hidden", "data.pkl", "part"])
    (path / name).write_bytes(b"{}")
    return f"{name} added"


def swap_in(path: Path, generator: random.Random) -> str:
    """Put a file of another checkpoint in the place of one."""
    other = make(path.parent / "other", 9, numbers=3000)[0]
    file = generator.choice(sorted(path.iterdir()))
    file.write_bytes((other / file.name).read_bytes())
    return f"{file.name} of another checkpoint"


def swap(path: Path, generator: random.Random) -> str:
    """Exchange two files."""
    first, second = generator.sample(sorted(path.iterdir()), 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    return f"{first.name} and {second.name} exchanged"


def link_a_file(path: Path, generator: random.Random) -> str:
    """Put a link to the same content in the place of a file."""
    file = generator.choice(sorted(path.iterdir()))
    real = path.with_name(f"real-{file.name}")
    file.rename(real)
    file.symlink_to(real)
    return f"{file.name} is a link"


def make_a_folder_of(path: Path, generator: random.Random) -> str:
    file = generator.choice(sorted(path.iterdir()))
    file.unlink()
    file.mkdir()
    return f"{file.name} is a folder"


KINDS: Final[dict[str, Callable[[Path, random.Random], str]]] = {
    "bit_flips": flip_a_bit,
    "zeroed_pages": zero_a_page,
    "truncations": truncate,
    "appends": append,
    "deletions": delete,
    "extra_files": add,
    "swapped_in": swap_in,
    "exchanged": swap,
    "links": link_a_file,
    "folders": make_a_folder_of,
}
