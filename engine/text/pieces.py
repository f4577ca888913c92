"""What each token adds to a text, as bytes, for the vocabularies where that does not depend on its neighbours.

Byte-level vocabularies spell every byte as one printable character; SentencePiece's spell a space as U+2581 and the bytes of rare
characters as <0xE2>.  In both, a text is its tokens' bytes one after the other, read as UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SPACE_MARK = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """A token as its vocabulary spells it -> the bytes that it adds to a text."""

    token_bytes: Callable[[str], bytes]
    drops_first_space: bool  # one space at the very start of a text was put there by the encoder


def find_piece_decoder(declared: Mapping[str, Any] | None) -> PieceDecoder | None:
    """The decoder for a tokenizer.json's `decoder` entry; None where tokens can't be decoded one by one."""
    if declared is None:
        return None
    steps = list(declared["decoders"]) if declared["type"] == "Sequence" else [declared]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(byte_level_bytes, drops_first_space=False)
    drops_first_space = kinds[-1:] == ["Strip"]
    if drops_first_space:
        strip = steps.pop()
        if (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
            return None
    if [step["type"] for step in steps] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if steps[0]["pattern"] != {"String": SPACE_MARK} or steps[0]["content"] != " ":
        return None
    return PieceDecoder(sentencepiece_bytes, drops_first_space)


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte.  Printable bytes of Latin-1 stand for themselves, the others for U+0100, U+0101, … in their order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


ALPHABET = byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Tokens with a character outside the alphabet were added as plain text."""
    try:
        return bytes([ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
