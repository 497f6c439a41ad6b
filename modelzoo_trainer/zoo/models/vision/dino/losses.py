"""Losses between the scores of a teacher and of a student, with centres of the teacher's scores.

Dimension letters: B batch, G global and L local views of a sample, P patches, T tokens (the class
token and P), K prototypes.
"""

# Annotations are evaluated here: the fields are read for the checks of settings.
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Fraction,
    NonNegativeSize,
    Size,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.autocast import without_autocast
from modelzoo_trainer.zoo.models.vision.multi_image import check_masks


@checked_dataclass(kw_only=True)
class DistillationSettings:
    """Settings of `DinoDistillationLoss` and `iBOTPatchLoss`.

    Args:
        input_size: Number of prototypes.
        warmup_teacher_temp: Temperature of the teacher in the first step.
        teacher_temp: After the warm-up.
        warmup_teacher_temp_steps: Steps of the warm-up, in which the temperature is linear; with 1,
            the first step has `warmup_teacher_temp`, the second one `teacher_temp`.
        teacher_temp_scheduler: `linear_cosine`: linear, then constant.
        student_temp: Temperature of the student.
        center_momentum: Share of the previous centre in the new one.
        total_steps: No effect, as the temperature is constant after the warm-up.
    """

    input_size: Size
    warmup_teacher_temp: FinitePositiveFloat = 0.04
    teacher_temp: FinitePositiveFloat = 0.07
    warmup_teacher_temp_steps: NonNegativeSize = 0
    teacher_temp_scheduler: Literal["linear_cosine"] = "linear_cosine"
    student_temp: FinitePositiveFloat = 0.1
    center_momentum: Fraction = 0.9
    total_steps: Size | None = None


class CenteredLoss(nn.Module):
    """Base of the losses: the temperature, and the centre of the teacher's scores.

    The sums of scores are collected in each forward pass in training; `end_step` moves the centre
    to their mean. A checkpoint has the centre and the number of steps.

    Shapes:
        center, sums: (K,). step, count: ().
    """

    center: Tensor
    step: Tensor
    sums: Tensor
    count: Tensor

    def __init__(self, settings: DistillationSettings) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("center", torch.zeros(settings.input_size))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(settings.input_size), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def reset_parameters(self) -> None:
        """Set all buffers to 0."""
        for buffer in self.buffers():
            nn.init.zeros_(buffer)

    def temperature(self) -> Tensor:
        """Return the temperature of the teacher, ()."""
        given = self.settings
        if not given.warmup_teacher_temp_steps:
            return torch.full_like(self.count, given.teacher_temp)
        last = max(given.warmup_teacher_temp_steps - 1, 1)
        share = (self.step.to(self.count.dtype) / last).clamp(max=1)
        return given.warmup_teacher_temp + share * (given.teacher_temp - given.warmup_teacher_temp)

    def targets(self, teacher: Tensor) -> Tensor:
        """Return the teacher's distributions, of the shape of its scores, without gradients."""
        return functional.softmax((teacher.detach() - self.center) / self.temperature(), dim=-1)

    @torch.no_grad()
    def collect(self, sums: Tensor, count: Tensor | int) -> None:
        """Add scores of the teacher to this step's scores, in training.

        Args:
            sums: Their sum, (K,).
            count: Their number.
        """
        if self.training:
            self.sums.add_(sums)
            self.count.add_(count)

    @torch.no_grad()
    def end_step(self, is_taken: Tensor) -> None:
        """Move the centre to the mean of the collected scores, if there are any; count the step.

        Args:
            is_taken: Whether the step counts, (), bool; if not, what was collected is dropped.

        Source: Caron et al. 2021, https://arxiv.org/abs/2104.14294, equation 4.
        """
        mean = self.sums / self.count.clamp(min=1)
        moved = self.center.lerp(mean, 1 - self.settings.center_momentum)
        # Not a weight of 0: the scores of a skipped step may be non-finite.
        self.center.copy_(torch.where((self.count > 0) & is_taken, moved, self.center))
        self.step.add_(is_taken.to(self.step.dtype))
        self.drop()

    @torch.no_grad()
    def drop(self) -> None:
        """Drop what was collected in this step."""
        self.sums.zero_()
        self.count.zero_()


class DistillationLoss(CenteredLoss):
    """Cross entropy of views of a sample: the student predicts the teacher's view of another one.

    The mean, over samples and pairs of a global view of the teacher and another view of the
    student, of -sum_k t_k log s_k, with t = softmax((teacher - center) / temperature) and
    s = softmax(student / student_temp).

    Source: Caron et al. 2021, https://arxiv.org/abs/2104.14294, equations 1 to 3.
    """

    def forward(self, student: Tensor, teacher: Tensor, local: Tensor | None = None) -> Tensor:
        """Return the loss, ().

        Args:
            student: Scores of the student for the global views.
            teacher: Scores of the teacher.
            local: Scores of the student for the local views, if there are any.

        Shapes:
            student, teacher: (B, G, K). local: (B, L, K).

        Raises:
            ConfigError: If the shapes do not fit, or there is no pair.
        """
        _check_scores("DinoDistillationLoss", student, teacher, self.settings.input_size, 3)
        student, teacher = _wide(student), _wide(teacher)
        num_global = student.shape[1]
        num_pairs = num_global * (num_global - 1)
        targets = self.targets(teacher)
        logs = functional.log_softmax(student / self.settings.student_temp, dim=-1)
        seen = logs.sum(dim=1)
        if local is not None:
            num_pairs += num_global * local.shape[1]
            scores = _wide(local) / self.settings.student_temp
            seen = seen + functional.log_softmax(scores, dim=-1).sum(dim=1)
        if not num_pairs:
            raise ConfigError(
                "DinoDistillationLoss got one view, but compares different ones. Set "
                "global_num_crops: 2, or give it local views."
            )
        self.collect(teacher.sum(dim=(0, 1)), teacher.shape[0] * num_global)
        every = (targets.sum(dim=1) * seen).sum(dim=-1)
        same = (targets * logs).sum(dim=(1, 2))
        return -((every - same) / num_pairs).mean()


class PatchLoss(CenteredLoss):
    """Cross entropy of masked patches: the student predicts what the teacher sees there.

    The mean over images of the mean over their masked patches of -sum_k t_k log s_k, as in
    `DistillationLoss`; images without masked patches count as 0.

    Source: Zhou et al. 2022, https://arxiv.org/abs/2111.07832, equation 2; Oquab et al. 2023,
    https://arxiv.org/abs/2304.07193, section 4.
    """

    def forward(self, teacher: Tensor, student: Tensor, masked: Tensor) -> Tensor:
        """Return the loss, (); 0 if nothing is masked.

        Args:
            teacher: Scores of the teacher for the class token and the patches.
            student: Scores of the student.
            masked: Which patches the student did not see.

        Shapes:
            teacher, student: (B, G, T, K). masked: (B, G, P) bool.

        Raises:
            ConfigError: If the shapes do not fit, or the masks are not bool.
        """
        _check_scores("iBOTPatchLoss", student, teacher, self.settings.input_size, 4)
        student, teacher = _wide(student[:, :, 1:]), _wide(teacher[:, :, 1:])
        check_masks("iBOTPatchLoss", masked)
        if masked.shape != teacher.shape[:-1]:
            raise ConfigError(
                f"iBOTPatchLoss got masks of the shape {tuple(masked.shape)}, but scores of "
                f"{tuple(teacher.shape[:-1])} patches. Set the same image_size and patch_size for "
                f"the masks and the model."
            )
        weights = masked.to(teacher.dtype)
        logs = functional.log_softmax(student / self.settings.student_temp, dim=-1)
        losses = -(self.targets(teacher) * logs).sum(dim=-1)
        of_images = (losses * weights).sum(dim=-1) / weights.sum(dim=-1).clamp(min=1)
        with torch.no_grad(), without_autocast(teacher.device.type):
            self.collect(weights.flatten() @ teacher.flatten(0, 2), weights.sum())
        return of_images.mean()


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _check_scores(name: str, student: Tensor, teacher: Tensor, size: int, num: int) -> None:
    if student.shape == teacher.shape and student.dim() == num and student.shape[-1] == size:
        return
    raise ConfigError(
        f"{name} got scores of the shapes {tuple(student.shape)} (student) and "
        f"{tuple(teacher.shape)} (teacher), but requires equal ones with {num} dimensions, the "
        f"last of input_size, {size}. Check forward_args and input_size of the loss."
    )
