"""Keys and values of the tokens so far, so that generation computes only the new token's.

Dimension letters: B batch, G groups of keys and values, S length of the cache, D head dimension.
"""

from torch import Tensor


class KeyValueCache:
    """The keys and values of one layer, in buffers of one size.

    `length`: number of tokens S for which there is room.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(
        self, keys: Tensor, values: Tensor, position: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values, and return those to attend to.

        `position`: of the one new token; None = these are the first tokens, which attend to each
        other only. Later positions in the buffers are 0 and must be masked.

        Shapes:
            keys, values: (B, G, T, D). position: (1,), int64. Returns: the same for the first
            tokens, else (B, G, S, D).
        """
        if position is None or self._keys is None or self._values is None:
            self._keys, self._values = (self._room(part) for part in (keys, values))
            self._keys[:, :, : keys.shape[2]] = keys
            self._values[:, :, : values.shape[2]] = values
            return keys, values
        self._keys.index_copy_(2, position, keys)
        self._values.index_copy_(2, position, values)
        return self._keys, self._values

    def _room(self, part: Tensor) -> Tensor:
        # Zeros: a masked NaN in uninitialized memory would still spoil the sum.
        return part.new_zeros((*part.shape[:2], self.length, part.shape[3]))
