"""Characters to token ids and back: printable ASCII and two special tokens."""

from __future__ import annotations

from collections.abc import Iterable

FIRST, LAST = ord(" "), ord("~")
PAD_ID = LAST - FIRST + 1
EOS_ID = PAD_ID + 1
VOCAB_SIZE = EOS_ID + 1


def encode(text: str) -> tuple[int, ...]:
    """Token ids of printable ASCII text.

    Raises:
        ValueError: The text holds another character.
    """
    for character in text:
        if not FIRST <= ord(character) <= LAST:
            raise ValueError(f"{character!r} is not a printable ASCII character")
    return tuple(ord(character) - FIRST for character in text)


def decode(token_ids: Iterable[int]) -> str:
    """Text of token ids; the special tokens have none."""
    return "".join(chr(token + FIRST) for token in token_ids if token < PAD_ID)
