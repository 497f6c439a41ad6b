"""Settings of a run that take less memory: meshes, recomputation, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2
from typing import Any, Final

from modelzoo_trainer.config.loader import to_yaml
from modelzoo_trainer.tools.planning.figures import Figures
from modelzoo_trainer.tools.planning.memory_tracker import MemoryKind

Plain = dict[str, Any]

RECOMPUTATIONS: Final = (None, "selective", "full")
_SLOWER: Final = {None: 0.0, "selective": 0.05, "full": 0.33}
_PER_TENSOR: Final = 0.1  # for each doubling of the processes along this axis
_PER_CONTEXT: Final = 0.05
_PER_HALVING: Final = 0.02  # of the micro-batch
_LARGEST_TENSOR: Final = 8  # devices of a machine: this axis sends in every layer
_LARGEST_CONTEXT: Final = 64
_COPIED: Final = 0.15  # of the activations, at least: `tensor` does not split the residual stream
_MICRO_BATCH: Final = "csx.performance.micro_batch_size"
_FLAGS: Final = "ScopedTrainFlags"
_OF_THE_MODEL: Final = (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Processes along each axis."""

    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        """All processes."""
        return self.shard * self.context * self.tensor

    def share(self, split: float) -> float:
        """Return the part of the parameters that a process has.

        `split`: the part of the parameters that `tensor` splits.
        """
        own = split / self.tensor + 1 - split
        return own / (self.shard * self.context) if self.shard > 1 else own

    def split(self, share: float) -> float:
        """Return the part of the parameters that `tensor` splits, if a process has a `share`."""
        own = share * self.shard * self.context if self.shard > 1 else share
        return min(1.0, max(0.0, (1 - own) / (1 - 1 / self.tensor)))

    def splits_all_of(self, other: Mesh) -> bool:
        """Return whether all is split here that another mesh splits, in at least as many parts."""
        is_split = self.context % other.context == 0 and self.tensor % other.tensor == 0
        return is_split and (self.shard > 1 or other.shard == 1)


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that can be tried.

    Args:
        mesh: The processes.
        recomputation: Value of `activation_checkpointing`.
        num_samples: Of a batch, of each process.
        micro_batch: Samples of a micro-batch.
        sharding: Value of `sharding`, where the mesh has the axis.
        splits_positions: Value of `sequence_parallel`.
    """

    mesh: Mesh
    recomputation: str | None
    num_samples: int
    micro_batch: int
    sharding: tuple[tuple[str, Any], ...] = ()
    splits_positions: bool = False

    @property
    def cost(self) -> float:
        """How much longer a step takes than the operations of the model, roughly."""
        return (
            _SLOWER[self.recomputation]
            + _PER_TENSOR * log2(self.mesh.tensor)
            + _PER_CONTEXT * log2(self.mesh.context)
            + _PER_HALVING * log2(self.num_samples / self.micro_batch)
        )

    @property
    def kind(self) -> tuple[str | None, int, int, bool]:
        """What activations depend on, besides the micro-batch."""
        return self.recomputation, self.mesh.context, self.mesh.tensor, self.splits_positions

    @classmethod
    def alone(cls) -> Choice:
        """Return the setting of one process."""
        return cls(Mesh(), None, 1, 1)

    def settings(self) -> Plain:
        """Return the settings of the file, below `trainer.init`; None = without."""
        mesh = self.mesh
        axes = {"shard": mesh.shard, "context": mesh.context, "tensor": mesh.tensor}
        parallel = {name: size for name, size in axes.items() if size > 1}
        sharding = dict(self.sharding) if mesh.shard > 1 else {}
        if sharding and self.micro_batch < self.num_samples:
            sharding["accumulate_shards"] = True
        backend: Plain = {
            "parallel": parallel or None,
            "sharding": sharding or None,
            "activation_checkpointing": self.recomputation,
            "sequence_parallel": self.splits_positions,
        }
        if mesh.tensor == 1:
            backend["tensor_plan"] = None
        return {"backend": backend, "callbacks": [{_FLAGS: {_MICRO_BATCH: self.micro_batch}}]}

    def changes(self) -> list[str]:
        """Return the same as for `--set`."""
        backend = self.settings()["backend"]
        found = [f"init.backend.{key}={_in_line(value)}" for key, value in backend.items()]
        return [*found, f'init.callbacks[{_FLAGS}]."{_MICRO_BATCH}"={self.micro_batch}']

    def yaml(self) -> str:
        """Return the settings as a part of a file."""
        return to_yaml({"trainer": {"init": self.settings()}}).rstrip()


def _in_line(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_in_line(one)}" for key, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def device_numbers(most: int) -> list[int]:
    """Return how many devices are tried: powers of two, and what divides the largest number."""
    powers = {1 << power for power in range(most.bit_length())}
    return sorted(powers | {num for num in range(1, most + 1) if most % num == 0})


def multiples_of_divisors(num: int, most: int) -> list[int]:
    """Return the products of the divisors of a number and powers of two."""
    divisors = (one for one in range(1, min(num, most) + 1) if num % one == 0)
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({one * power for one in divisors for power in powers if one * power <= most})


def choices(
    num_devices: int,
    num_samples: int,
    *,
    is_global: bool,
    sharding: tuple[tuple[str, Any], ...],
    can_split_positions: bool = False,
) -> Iterator[Choice]:
    """Yield what may be tried with a number of devices.

    Args:
        num_devices: The number.
        num_samples: Of a batch of the file.
        is_global: Whether that is the batch of all processes, which must divide it.
        sharding: Value of `sharding`.
        can_split_positions: Whether the model has sequence parallelism.
    """
    for mesh in _meshes(num_devices):
        if is_global and num_samples % mesh.shard:
            continue
        own = num_samples // mesh.shard if is_global else num_samples
        for recomputation in RECOMPUTATIONS:
            for size in _sizes(own):
                choice = Choice(mesh, recomputation, own, size, sharding)
                if can_split_positions and mesh.tensor > 1:
                    yield replace(choice, splits_positions=True)
                yield choice


def _meshes(num: int) -> Iterator[Mesh]:
    for tensor in _divisors(num, _LARGEST_TENSOR):
        for context in _divisors(num // tensor, _LARGEST_CONTEXT):
            yield Mesh(num // tensor // context, context, tensor)


def _divisors(num: int, most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if num % (1 << power) == 0]


def _sizes(most: int) -> list[int]:
    """Return sizes of micro-batches."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def guess(
    choice: Choice, known: Choice, figures: Figures, *, split: float = 1.0, factor: float = 1.0
) -> float:
    """Return about how many bytes a process needs, from the figures of another choice.

    Parameters, gradients and optimizer state are shared by the processes. Activations grow
    with the micro-batch, and are split along `context`, and most of them along `tensor`.

    Args:
        choice: The choice.
        known: The other one.
        figures: Of the other one.
        split: The part of the parameters that `tensor` splits.
        factor: Of everything else than parameters, gradients and optimizer state, which are known.
    """
    share = choice.mesh.share(split) / known.mesh.share(split)
    part = _activations(choice) / _activations(known)
    factors = {
        MemoryKind.ACTIVATIONS: part * choice.micro_batch / known.micro_batch,
        MemoryKind.EXCHANGE: known.mesh.tensor / choice.mesh.tensor,
        MemoryKind.BATCH: choice.num_samples / known.num_samples,
    }
    training = 0.0
    for kind, size in figures.training.parts.items():
        own = share if kind in _OF_THE_MODEL else factor * factors.get(kind, 1.0)
        training += size * own
    return max(training, of_model(choice, known, figures, split))


def _activations(choice: Choice) -> float:
    """Return the part of the activations of a sample that a process has."""
    mesh, copied = choice.mesh, 0.0 if choice.splits_positions else _COPIED
    return (copied + (1 - copied) / mesh.tensor) / mesh.context


def of_model(choice: Choice, known: Choice, figures: Figures, split: float) -> float:
    """Return the bytes of parameters, gradients and optimizer state, all there when it steps."""
    highest = figures.training.highest
    share = choice.mesh.share(split) / known.mesh.share(split)
    return share * sum(highest[kind] for kind in _OF_THE_MODEL)
