"""Diffusion transformer: predict the noise in latents of images of a class.

https://arxiv.org/abs/2212.09748

    noisy latents -> patches + positions -> dropout -> layers -> norm -> patches of noise

Layers and the last norm depend on time and class: c = silu(time embedding + label embedding).

Dimension letters: B batch, C channels of the latents, H hidden size, P patches.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Step, draw_weight
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.feed_forward import GATED
from modelzoo_trainer.zoo.models.published_names import renamed
from modelzoo_trainer.zoo.models.visible import EVERYTHING
from modelzoo_trainer.zoo.models.vision.dit_parts import (
    DitLayer,
    NoiseHead,
    NoiseSchedule,
    TimestepEmbedding,
)
from modelzoo_trainer.zoo.models.vision.dit_settings import DitSettings
from modelzoo_trainer.zoo.models.vision.embeddings import ImageEmbedding

_INPUT, _LABEL, _NOISE, _TIMESTEP = "input", "label", "diffusion_noise", "timestep"
_LAYER: Final = r"layers\.(\d+)\."
_THEIR_LAYER: Final = r"transformer_decoder.layers.\1."
_NAMES: Final = {
    r"embedding\.patches\.projection\.": "patch_embedding_layer.linear_proj.",
    r"embedding\.position_embeddings\.": "patch_embedding_layer.position_embeddings.",
    # The end of these is ours: the published names of the two layers are not known.
    r"timestep_embedding\.": "timestep_embedding_layer.",
    r"label_embedding\.": "label_embedding_layer.",
    rf"{_LAYER}attention\.([qkv])_proj\.": rf"{_THEIR_LAYER}self_attn.proj_\2_dense_layer.",
    rf"{_LAYER}attention\.o_proj\.": rf"{_THEIR_LAYER}self_attn.proj_output_dense_layer.",
    rf"{_LAYER}attention_gate\.": rf"{_THEIR_LAYER}gate_msa.1.",
    rf"{_LAYER}ffn_gate\.": rf"{_THEIR_LAYER}gate_mlp.1.",
    rf"{_LAYER}ffn\.up_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer.",
    rf"{_LAYER}ffn\.gate_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer_for_glu.",
    rf"{_LAYER}ffn\.down_proj\.": rf"{_THEIR_LAYER}ffn.ffn.1.linear_layer.",
    # Here too: scale and shift of the norms.
    rf"{_LAYER}attention_norm\.": rf"{_THEIR_LAYER}norm1.",
    rf"{_LAYER}ffn_norm\.": rf"{_THEIR_LAYER}norm3.",
    r"head\.norm\.": "final_norm.",
    r"head\.projection\.": "noise_head.conv_transpose.",
}


def published_name(name: str) -> str | None:
    """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

    `name`: as of `named_parameters()`.
    """
    return renamed(name, _NAMES)


class Dit(DitSettings, nn.Module):
    """Diffusion transformer with layers that time and class modulate (adaLN-Zero)."""

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    published_name = staticmethod(published_name)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        nn.Module.__init__(self)
        vision = self.vision()
        self.noise_schedule = NoiseSchedule(
            self.num_diffusion_steps, self.beta_start, self.beta_end
        )
        self.embedding = ImageEmbedding(vision)
        self.timestep_embedding = TimestepEmbedding(
            self.frequency_embedding_size, self.hidden_size, self.embedding_nonlinearity
        )
        num_labels = self.num_classes + (self.label_dropout_rate > 0)  # the last one: no class
        self.label_embedding = nn.Embedding(num_labels, self.hidden_size)
        self.layers = nn.ModuleList(DitLayer(vision) for _ in range(self.num_hidden_layers))
        self.head = NoiseHead(vision, is_convolution=self.use_conv_transpose_unpatchify)
        self.reset_parameters()

    @classmethod
    def check_arguments(cls, **arguments: Any) -> DitSettings:
        """Check the constructor's arguments without building the model; return the settings.

        Raises:
            ConfigError: As the constructor.
        """
        return DitSettings(**arguments)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns.

        The embeddings and the last projection are whole everywhere.
        """
        attention, ffn = "layers.*.attention.", "layers.*.ffn."
        plan = {f"{attention}{name}_proj": "colwise" for name in "qkv"}
        plan |= {f"{attention}o_proj": "rowwise"}
        plan |= {f"{ffn}up_proj": "colwise", f"{ffn}down_proj": "rowwise"}
        if self.nonlinearity in GATED:
            plan[f"{ffn}gate_proj"] = "colwise"
        for branch in ("attention", "ffn"):
            for part in ("norm.scale", "norm.shift", "gate"):
                plan[f"layers.*.{branch}_{part}"] = "colwise_gather"
        return plan

    def reset_parameters(self) -> None:
        """Initialize all weights; also after `to_empty`."""
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it."""
        start = self.initializers()
        yield self.noise_schedule, self.noise_schedule.reset_parameters
        patches = self.embedding.patches
        for module, draw in self.embedding.initial_steps():
            if module is patches and self.init_conv_like_linear is False:
                draw = partial(patches.draw, start["projection"], like_linear=False)
            yield module, draw
        time = self.timestep_embedding
        yield time, partial(time.draw, start["timestep_embedding"])
        labels = self.label_embedding
        yield labels, partial(draw_weight, labels, start["label_embedding"])
        for layer in self.layers:
            assert isinstance(layer, DitLayer)
            yield layer, partial(layer.draw, start["attention"], start["ffn"])
        yield self.head, partial(self.head.draw, start["head"])

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean square error of the predicted noise, and that noise.

        Args:
            batch: `input`, the latents, times `vae_scaling_factor`; `label`, `num_classes` for no
                class; `diffusion_noise`, which is added to the latents; `timestep`, which decides
                how much of it.

        Returns:
            `loss`, `prediction`.

        Shapes:
            input, diffusion_noise, prediction: (B, C, height, width) floating. label, timestep:
            (B,) integer. loss: (), float32.

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        self._check(batch)
        noise, timesteps = batch[_NOISE], batch[_TIMESTEP].long()
        noisy = self.noise_schedule(batch[_INPUT], noise, timesteps)
        prediction = self.predict_noise(noisy, batch[_LABEL], timesteps)
        loss = functional.mse_loss(prediction.float(), noise.float())
        return {"loss": loss, "prediction": prediction}

    def predict_noise(self, noisy: Tensor, labels: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noise in noisy latents.

        Shapes:
            noisy: (B, C, height, width) floating. labels, timesteps: (B,) integer. Returns: as
            noisy.
        """
        hidden = self.embedding(noisy)
        embedded = self.timestep_embedding(timesteps) + self.label_embedding(labels)
        condition = functional.silu(embedded)
        context = Context(angles=None, visible=(EVERYTHING, EVERYTHING))
        for layer in self.layers:
            hidden = layer(hidden, condition, context)
        prediction: Tensor = self.head(hidden, condition)
        return prediction

    def _check(self, batch: Any) -> None:
        names = (_INPUT, _LABEL, _NOISE, _TIMESTEP)
        if not isinstance(batch, Mapping) or any(name not in batch for name in names):
            given = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise ConfigError(
                f"dit requires batches with {', '.join(names)}, got {given}. Use the data "
                f"processor DiffusionLatentImageNet1KProcessor."
            )
        num, latent = len(batch[_INPUT]), (self.latent_channels, *(self.latent_size or ()))
        for name in names:
            shape = (num, *latent) if name in (_INPUT, _NOISE) else (num,)
            if tuple(batch[name].shape) != shape:
                raise ConfigError(
                    f"The batch has {name} of the shape {tuple(batch[name].shape)}, but the model "
                    f"requires {shape}, from latent_channels and latent_size. Set the same in the "
                    f"data processor and the model, or only in the model."
                )
