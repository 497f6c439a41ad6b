"""ESM-2, a masked language model of proteins: BERT's encoder with `norm_first`.

https://doi.org/10.1126/science.ade2574
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.

from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeSize, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.pretraining import Bert, BertSettings
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings


@checked_dataclass(kw_only=True)
class Esm2Settings(BertSettings):
    """Settings of ESM-2: the settings of BERT's pretraining, and how hidden tokens enter.

    Args:
        norm_first: Whether layers normalize what attention and the feed-forward network get,
            instead of the sums with their outputs.
        token_dropout: Whether the embedding of hidden tokens is 0, and the other embeddings are
            scaled by 0.88 over their share of the sequence: the share that training expects.
        mask_token_id: The token in place of hidden ones; required by `token_dropout`.
    """

    norm_first: bool = True
    token_dropout: bool = False
    mask_token_id: NonNegativeSize | None = None

    @property
    @override
    def dropped_token(self) -> int | None:
        return self.mask_token_id if self.token_dropout else None

    @override
    def _check(self) -> None:
        super()._check()
        if self.token_dropout and self.mask_token_id is None:
            raise ConfigError(
                "token_dropout requires mask_token_id, the token in place of hidden ones. Set it, "
                "or remove token_dropout."
            )
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ConfigError(
                f"mask_token_id ({self.mask_token_id}) is not in the vocabulary of "
                f"{self.vocab_size} tokens (vocab_size)."
            )


class Esm2(Esm2Settings, Bert):
    """ESM-2 with its head for masked tokens."""

    @classmethod
    @override
    def _settings_class(cls) -> type[EncoderSettings]:
        return Esm2Settings
