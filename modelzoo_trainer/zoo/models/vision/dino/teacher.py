"""Teachers: copies of a student's weights, and averages of them."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Step
from modelzoo_trainer.zoo.models.vision.dino.plan import CosineDecay

Local = Callable[[Tensor], Tensor]


def decay_after(num: Tensor, given: CosineDecay) -> Tensor:
    """Return the share of a teacher that stays in its next update.

    end - (end - start) (1 + cos(pi num / total)) / 2, and `end` after all steps.

    Shapes:
        num: the number of the update from 1, (). Returns: (), float32.
    """
    share = (num.to(torch.float32) / given.total_steps).clamp(max=1)
    span = given.ema_decay_end - given.ema_decay_start
    return given.ema_decay_end - span * (1 + torch.cos(math.pi * share)) / 2


@torch.no_grad()
def move_to(teacher: nn.Module, student: nn.Module, weight: Tensor, local: Local) -> None:
    """Compute teacher = (1 - weight) teacher + weight student, for all parameters.

    Args:
        teacher: Changed in place.
        student: With the same parameters.
        weight: (), floating.
        local: Returns this rank's part of a parameter.
    """
    for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
        part = local(own.detach())
        part.lerp_(local(other.detach()).to(part.dtype), weight.to(part.dtype))


def check_dtypes(where: str, tensors: Iterable[Tensor]) -> None:
    """Check that none has 16 bits, in which small updates are rounded away.

    Raises:
        ConfigError: With the dtype; `where`: the part, for the message.
    """
    for one in tensors:
        if one.is_floating_point() and one.dtype.itemsize < 4:
            raise ConfigError(
                f"{where} has values in {one.dtype}, in which the small updates of averages and "
                f"centres are rounded to nothing. Keep the model in float32, and compute in 16 "
                f"bits with the section precision, or with param_dtype of sharding."
            )


def copy_steps(source: nn.Module, target: nn.Module) -> Iterator[Step]:
    """Yield the parts of both with own parameters, each with the function that copies them."""
    for name, one in source.named_modules():
        if next(one.parameters(recurse=False), None) is not None:
            other = target.get_submodule(name)
            yield nn.ModuleList([one, other]), _Copy(one, other)


class _Copy:
    """Copy the own parameters of a module."""

    def __init__(self, source: nn.Module, target: nn.Module) -> None:
        self._pair = source, target

    @torch.no_grad()
    def __call__(self) -> None:
        source, target = self._pair
        for name, value in source.named_parameters(recurse=False):
            target.get_parameter(name).copy_(value)


def check_equal(source: nn.Module, target: nn.Module, where: str) -> None:
    """Check that two modules have the same parameters.

    Raises:
        ConfigError: With the first one that differs; `where`: the setting, for the message.
    """
    shapes = [
        {name: tuple(value.shape) for name, value in module.named_parameters()}
        for module in (source, target)
    ]
    for name in {**shapes[0], **shapes[1]}:
        first, second = (own.get(name) for own in shapes)
        if first != second:
            raise ConfigError(
                f"{where}: the parts differ: {name} has the shape {first} in the source and "
                f"{second} in the target. Give both the same settings."
            )
