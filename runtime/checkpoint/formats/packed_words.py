"""Codes of four or eight bits in words of 32 bits along one axis.

Does not know about formats or files. Guarantees: only the words of the wanted codes are needed.
"""

from dataclasses import dataclass

import numpy as np

from ..tensor_source import Interval

WORD_BITS = 32


@dataclass(frozen=True)
class Packing:
    """A packing of codes without a sign."""

    bits: int
    places: tuple[int, ...] | None = None
    """The place of each code in its word, from the lowest bits; None for the order of codes."""

    @property
    def per_word(self) -> int:
        """The number of codes in a word."""
        return WORD_BITS // self.bits

    def words(self, codes: Interval) -> Interval:
        """The words that contain an interval of codes."""
        return Interval(codes.start // self.per_word, -(-codes.stop // self.per_word))

    def unpack(self, words: np.ndarray, axis: int, codes: Interval) -> np.ndarray:
        """The codes of an interval along an axis as uint8, from the array of their words."""
        places = self.places or range(self.per_word)
        shape = [1] * words.ndim
        shape.insert(axis + 1, self.per_word)
        shifts = np.array([place * self.bits for place in places], np.uint32).reshape(shape)
        each = np.expand_dims(words.view(np.uint32), axis + 1) >> shifts
        each = (each & np.uint32(2**self.bits - 1)).astype(np.uint8)
        each = each.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :])
        first = self.words(codes).start * self.per_word
        return each[(slice(None),) * axis + (codes.as_slice(first),)]
