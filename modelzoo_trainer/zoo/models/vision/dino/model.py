"""Self-supervised pretraining of images: trunks, heads and losses, some of them a teacher's.

DINO, https://arxiv.org/abs/2104.14294; iBOT, https://arxiv.org/abs/2111.07832; DINOv2,
https://arxiv.org/abs/2304.07193.

Dimension letters: B batch, G global and L local views, C channels, P patches.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Step
from modelzoo_trainer.zoo.models.freezing import check_patterns, freeze_matching
from modelzoo_trainer.zoo.models.vision import classifier
from modelzoo_trainer.zoo.models.vision.dino.head import DinoHead
from modelzoo_trainer.zoo.models.vision.dino.losses import CenteredLoss, DistillationLoss, PatchLoss
from modelzoo_trainer.zoo.models.vision.dino.plan import (
    DINO_LOSS,
    PATCH_LOSS,
    ModelPart,
    Pair,
    read_plan,
)
from modelzoo_trainer.zoo.models.vision.dino.references import (
    HEADS,
    LOSSES,
    TRUNKS,
    BatchEntry,
    Call,
    Module,
)
from modelzoo_trainer.zoo.models.vision.dino.teacher import (
    Local,
    check_dtypes,
    check_equal,
    copy_steps,
    decay_after,
    move_to,
)
from modelzoo_trainer.zoo.models.vision.multi_image import MultiImageViT

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Reduce = Callable[[Tensor], Tensor]
_LOSSES: Final[Mapping[str, Callable[[Any], CenteredLoss]]] = {
    DINO_LOSS: DistillationLoss,
    PATCH_LOSS: PatchLoss,
}
_TRUNK: Final = re.compile(rf"({TRUNKS}\.model\.\d+\.)(encoder\..*)")
_STATE: Final = "dino_step"


def published_name(name: str) -> str | None:
    """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

    `name`: as of `named_parameters()`.
    """
    found = _TRUNK.fullmatch(name)
    if found is None:
        return f"model.{name}"
    inner = classifier.published_name(found[2])
    return None if inner is None else f"model.{found[1]}{inner.removeprefix('model.vit_model.')}"


class NumberedParts(nn.Module):
    """Trunks, heads or losses, by number; it has no forward pass."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        # No ModuleList: its elements would be compiled, sharded and checkpointed as a whole.
        self.model = nn.ModuleDict({str(number): part for number, part in enumerate(parts)})

    def __getitem__(self, number: int) -> Any:
        return self.model[str(number)]

    def __len__(self) -> int:
        return len(self.model)


class Dino(nn.Module):
    """Trunks, heads and losses of images, such as a student's and its teacher's.

    Each part is called once for each list in its `forward_args`, whose entries are null, an entry
    of the batch (`ssl_transform.output('global_view')`), or an output of an earlier part
    (`heads.output(1, 0, 0)`: part, call, output). A trunk `MultiImageViTModel` gets images, null,
    and masks or null; it returns all states, and the states of the class token. A head `DinoHead`
    gets and returns one tensor. `DinoDistillationLoss` gets scores of the student and of the
    teacher for global views, and scores of the student for local ones; `iBOTPatchLoss` scores of
    the teacher and of the student for all states, and the masks.

    After each optimizer step, the trainer calls `end_step`: centres move to the mean over all
    samples of the step, and teachers to their students.

    Args:
        image_model_trunks: `image_model` with a name and settings, `forward_args`, `stop_grad`.
        heads: Likewise, with `head_model`.
        losses: Likewise, with `loss` and `loss_weight`.
        copy_init_weights: Parts (`source`) whose initial weights others (`target`) get.
        ema: Parts (`target`) that are averages of others (`source`), with `scheduler_name: cosine`
            and `scheduler_params`: `ema_decay_start`, `ema_decay_end`, `total_steps`.
        freeze: Regular expressions; parameters and modules in whose names, or names in the Model
            Zoo, one is found are not trained.
        mixed_precision: Accepted for compatibility; no effect: use the section `precision`.
        fp16_type: Accepted for compatibility; no effect: use the section `precision`.

    Raises:
        ConfigError: If a setting is invalid, or settings do not fit each other.
    """

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    published_name = staticmethod(published_name)
    ema_step: Tensor
    num_seen: Tensor

    def __init__(
        self,
        *,
        image_model_trunks: list[dict[str, Any]],
        heads: list[dict[str, Any]],
        losses: list[dict[str, Any]],
        copy_init_weights: list[dict[str, Any]] | None = None,
        ema: list[dict[str, Any]] | None = None,
        freeze: list[str] | None = None,
        mixed_precision: bool | None = None,
        fp16_type: str | None = None,
    ) -> None:
        super().__init__()
        self._plan = read_plan(image_model_trunks, heads, losses, copy_init_weights, ema)
        check_patterns(freeze or ())
        plan = self._plan
        self.image_model_trunks = NumberedParts(
            [MultiImageViT(one.settings) for one in plan.trunks]
        )
        self.heads = NumberedParts([DinoHead(one.settings) for one in plan.heads])
        self.losses = NumberedParts([_LOSSES[one.name](one.settings) for one in plan.losses])
        self.register_buffer("ema_step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_seen", torch.zeros(()), persistent=False)
        self._names = _names_of_losses(plan.losses)
        self._before: dict[str, Tensor] | None = None  # what was collected before a padding batch
        self._overflows: list[Tensor] = []  # of the loss scaler in this step
        for name, pairs in (("copy_init_weights", plan.copies), ("ema", plan.averages)):
            for number, pair in enumerate(pairs):
                check_equal(*self._modules_of(pair), f"{name}[{number}]")
        self.reset_parameters()
        self._freeze(freeze)

    @classmethod
    def check_arguments(
        cls,
        *,
        image_model_trunks: list[dict[str, Any]],
        heads: list[dict[str, Any]],
        losses: list[dict[str, Any]],
        copy_init_weights: list[dict[str, Any]] | None = None,
        ema: list[dict[str, Any]] | None = None,
        freeze: list[str] | None = None,
        mixed_precision: bool | None = None,
        fp16_type: str | None = None,
    ) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor, except for what needs the names of parameters.
        """
        read_plan(image_model_trunks, heads, losses, copy_init_weights, ema)
        check_patterns(freeze or ())

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how the layers of trunks are split; heads are whole everywhere."""
        plan: dict[str, str] = {}
        for number in range(len(self.image_model_trunks)):
            encoder = self.image_model_trunks[number].encoder
            prefix = f"{TRUNKS}.model.{number}.encoder."
            plan |= {f"{prefix}{name}": style for name, style in encoder.tensor_plan.items()}
        return plan

    def reset_parameters(self) -> None:
        """Initialize all weights and buffers; also after `to_empty`."""
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it."""
        for number in range(len(self.image_model_trunks)):
            yield from self.image_model_trunks[number].encoder.initial_steps()
        for number in range(len(self.heads)):
            yield from self.heads[number].initial_steps()
        for number in range(len(self.losses)):
            yield self.losses[number], self.losses[number].reset_parameters
        for pair in self._plan.copies:
            yield from copy_steps(*self._modules_of(pair))
        yield _Own(self), self._reset_own

    # ---- the step

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return the loss: the sum of all losses, each times its weight.

        Args:
            batch: A mapping with the entries that `forward_args` name, such as `global_view`,
                `local_view` and `collated_masks`.

        Returns:
            `loss`, and each loss by the name of its class.

        Shapes:
            global_view: (B, G, C, height, width) floating, local_view: (B, L, C, height, width)
            floating, collated_masks: (B, G, P) bool. The losses: (), float32.

        Cost:
            No host read, no data-dependent shape: heads compute the scores of all patches, also of
            those that are not masked.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        entries = self._entries(batch)
        found: dict[str, list[list[Any]]] = {}
        found[TRUNKS] = self._call(self._plan.trunks, self.image_model_trunks, entries, found)
        found[HEADS] = self._call(self._plan.heads, self.heads, entries, found)
        values = self._call(self._plan.losses, self.losses, entries, found)
        if self.training:
            with torch.no_grad():
                self.num_seen.add_(1)
        outputs: dict[str, Any] = {}
        total: Any = 0
        for name, part, calls in zip(self._names, self._plan.losses, values, strict=True):
            total = total + part.weight * calls[0]
            outputs[name] = calls[0].detach()
        return {"loss": total, **outputs}

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Any
    ) -> dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]:
        """Return the losses, which `ModelEvalMetrics` averages over samples, with their weight."""
        size = len(self._entries(batch)[self._plan.keys[0]])
        return {name: (outputs[name], size, None) for name in self._names if name in outputs}

    @torch.no_grad()
    def end_step(
        self,
        reduce: Reduce | None = None,
        local: Local = lambda tensor: tensor,
        taken: Tensor | None = None,
    ) -> None:
        """Move centres to the mean scores since the last call, and teachers to their students.

        The trainer calls it after each optimizer step; a loop of your own must do so. Without a
        forward pass in training since the last call, it is a no-op.

        Args:
            reduce: Returns the sum of a tensor over the processes; None = there is one.
            local: Returns this rank's part of a parameter.
            taken: Whether the optimizer took the step, (), bool; if not, as when a loss scaler
                skips it, what was collected is dropped, and nothing moves. None = it did.

        Cost:
            No host read. Collective with `reduce`: one message of all centres.

        Raises:
            ConfigError: If the weights of a teacher, or the centres, have 16 bits.
        """
        self._check_dtypes()
        losses = [self.losses[number] for number in range(len(self.losses))]
        if reduce is not None:
            collected = [
                self.num_seen,
                *(one for loss in losses for one in (loss.count, loss.sums)),
            ]
            _share(collected, reduce)
        is_taken = self.num_seen > 0  # a step that a guard skipped has restored the buffers
        if taken is not None:
            is_taken = is_taken & taken
        for loss in losses:
            loss.end_step(is_taken)
        self.ema_step.add_(is_taken.to(self.ema_step.dtype))
        self.num_seen.zero_()
        for pair in self._plan.averages:
            assert pair.decay is not None  # of an average
            student, teacher = self._modules_of(pair)
            weight = (1 - decay_after(self.ema_step, pair.decay)) * is_taken
            move_to(teacher, student, weight, local)

    @torch.no_grad()
    def drop_step(self) -> None:
        """Drop what was collected since the last step."""
        self.num_seen.zero_()
        for number in range(len(self.losses)):
            self.losses[number].drop()

    # ---- hooks of a run

    def on_enter_fit(
        self,
        trainer: "Trainer",
        stack: ExitStack,
        train_dataloader: Any,
        val_dataloader: Any,
        loop: Any,
    ) -> None:
        """Drop, when the fit ends, what was collected in a step that it did not finish."""
        stack.callback(self.drop_step)

    def on_fit_start(
        self, trainer: "Trainer", train_dataloader: Any, val_dataloader: Any, loop: Any
    ) -> None:
        """Check that updates of teachers and centres are not rounded away."""
        self._check_dtypes()

    def on_train_step_start(self, trainer: "Trainer", model: Any, batch: Any) -> None:
        """Keep what was collected before a batch that is another process's and counts nothing."""
        self._overflows = []
        self._before = None
        if trainer.is_padding:
            self._before = {name: value.clone() for name, value in self._collected().items()}

    def on_before_optimizer_step(self, trainer: "Trainer", model: Any, optimizer: Any) -> None:
        """Keep whether the loss scaler skips the step."""
        self._overflows += trainer.precision.overflows(optimizer)
        if trainer.manual_steps is None:
            self._leave_padding()  # before a guard restores the buffers of a step

    def on_train_step_end(self, trainer: "Trainer", model: Any, outputs: Any, batch: Any) -> None:
        """End the optimizer step, if this batch is its last one."""
        self._leave_padding()
        if not trainer.grad_accum.should_run_optimizer_step:
            return
        taken: Tensor | None = None
        if self._overflows:
            overflows = torch.stack([one.reshape(()) for one in self._overflows])
            taken = (overflows > 0).any().logical_not()
        comm = trainer.backend.comm
        self.end_step(comm.reduce if comm.data_shard[1] > 1 else None, comm.local_part, taken)

    @torch.no_grad()
    def _leave_padding(self) -> None:
        """Restore what was collected before a padding batch."""
        before, self._before = self._before, None
        if before is not None:
            for name, value in self._collected().items():
                value.copy_(before[name])

    def on_step_discarded(self, trainer: "Trainer") -> None:
        """Drop what was collected: these batches will be trained on again."""
        self.drop_step()

    def on_rollback(self, trainer: "Trainer", ckpt_path: Path) -> None:
        """Drop what was collected."""
        self.drop_step()

    def on_save_checkpoint(self, trainer: "Trainer", state_dict: dict[str, Any]) -> None:
        """Add what was collected, within a step only."""
        if "grad_accum" in state_dict:
            state_dict[_STATE] = trainer.backend.state_view(self._collected())

    def on_load_checkpoint(self, trainer: "Trainer", state_dict: dict[str, Any]) -> None:
        """Restore what was collected within a step, if the run continues in it."""
        self.drop_step()
        found = state_dict.get(_STATE)
        if found is not None and not trainer.grad_accum.should_run_optimizer_step:
            for name, value in self._collected().items():
                value.copy_(found[name])

    def _collected(self) -> dict[str, Tensor]:
        """Return the buffers that are not in the state dict."""
        found = {"num_seen": self.num_seen}
        for number in range(len(self.losses)):
            loss = self.losses[number]
            found |= {f"sums.{number}": loss.sums, f"count.{number}": loss.count}
        return found

    # ---- parts

    def _modules_of(self, pair: Pair) -> tuple[nn.Module, nn.Module]:
        return self._module(pair.source), self._module(pair.target)

    def _check_dtypes(self) -> None:
        check_dtypes(LOSSES, self.losses.buffers())
        for pair in self._plan.averages:
            check_dtypes(str(pair.target), self._module(pair.target).parameters())

    def _module(self, one: Module) -> nn.Module:
        found: nn.Module = (self.image_model_trunks if one.kind == TRUNKS else self.heads)[one.part]
        return found

    def _freeze(self, patterns: list[str] | None) -> None:
        freeze_matching(self, patterns or (), f"'{TRUNKS}.model.0' or '{HEADS}.model.0'")
        for number, pair in enumerate(self._plan.averages):
            if any(one.requires_grad for one in self._module(pair.target).parameters()):
                name = f"{pair.target.kind}.model.{pair.target.part}"
                raise ConfigError(
                    f"ema[{number}].target: {pair.target} is an average, but the optimizer would "
                    f"train it as well. Add '{name}.*' to freeze."
                )

    def _reset_own(self) -> None:
        nn.init.zeros_(self.ema_step)
        nn.init.zeros_(self.num_seen)

    def _entries(self, batch: Any) -> Mapping[str, Tensor]:
        keys = self._plan.keys
        if isinstance(batch, Mapping) and all(key in batch for key in keys):
            return batch
        what = f"a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            what = f"a mapping with the keys {sorted(map(str, batch))}"
        raise ConfigError(
            f"forward_args name the entries {', '.join(keys)} of a batch, but got {what}. Use the "
            f"data processor DinoImageDataProcessor."
        )

    def _call(
        self,
        parts: Sequence[ModelPart],
        modules: NumberedParts,
        entries: Mapping[str, Tensor],
        earlier: Mapping[str, list[list[Any]]],
    ) -> list[list[Any]]:
        """Return what each call of each part returns."""
        found = []
        for number, part in enumerate(parts):
            with torch.no_grad() if part.stop_grad else nullcontext():
                calls = [
                    modules[number](*_arguments(call, entries, earlier)) for call in part.calls
                ]
            found.append(calls)
        return found


class _Own(nn.Module):
    """The buffers of a model itself, for its initialization in parts."""

    def __init__(self, model: Dino) -> None:
        super().__init__()
        self._buffers = model._buffers


def _arguments(
    call: Call, entries: Mapping[str, Tensor], earlier: Mapping[str, list[list[Any]]]
) -> list[Any]:
    found: list[Any] = []
    for one in call:
        if one is None or isinstance(one, BatchEntry):
            found.append(None if one is None else entries[one.name])
            continue
        output = earlier[one.kind][one.part][one.call]
        found.append(output[one.number] if isinstance(output, tuple) else output)
    return found


def _names_of_losses(parts: Sequence[ModelPart]) -> list[str]:
    """Return the names of losses in the output: of their class, with a number if it repeats."""
    found: list[str] = []
    for part in parts:
        num = sum(name.partition("_")[0] == part.name for name in found)
        found.append(f"{part.name}_{num + 1}" if num else part.name)
    return found


def _share(tensors: list[Tensor], reduce: Reduce) -> None:
    """Replace tensors by their sums over the processes, in one message."""
    sums = reduce(torch.cat([one.reshape(-1) for one in tensors]))
    for one, found in zip(
        tensors, torch.split(sums, [one.numel() for one in tensors]), strict=True
    ):
        one.copy_(found.view_as(one))
