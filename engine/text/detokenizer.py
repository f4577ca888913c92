"""Tokens in, text out, one sequence at a time: never half a character, and never a character twice."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from pagestream.engine.text.tokenizer import SPOILT, Tokenizer

CONTEXT_TOKENS = 8  # of the prompt, for vocabularies whose tokens look at their neighbours
MAX_HELD_TOKENS = 8  # no character has more bytes than 4; more tokens than that without an end are no character


class IncrementalDetokenizer:
    """The text of one sequence as its tokens arrive.

    `push` gives the text that this token added, `flush` what is left at the end; together they are the text of all tokens,
    `decode(prompt + output)` without its prompt.  What a token added may be nothing (half a character; a special token that is
    skipped), and the token that completes a character adds all of it.  So with t_i the text of token i (flushed text belongs to
    the last token), text[offset_i : offset_i + len(t_i)] == t_i always holds where offset_i is the length of all text before.

    A prompt that ends in half a character lends its bytes to the answer that completes it.  The same object can be fed the
    prompt's tokens first, where the prompt is echoed: build it without `prompt_token_ids` then.
    Unlike the libraries' decoders, which spoil all of a run of byte tokens if one byte is wrong, this spoils the wrong bytes only:
    the others may have been sent already.
    """

    __slots__ = ("_joiner", "push")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        kind = PieceJoiner if tokenizer.pieces is not None else WindowDecoder
        self._joiner: Joiner = kind(tokenizer, prompt_token_ids, skipped)
        self.push = self._joiner.push  # push(token_id) -> str: bound once, as it is called for every token

    def flush(self) -> str:
        """The end of the text: bytes that wait for more become U+FFFD.  Nothing may be pushed afterwards."""
        return self._joiner.flush()


class Joiner(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class PieceJoiner:
    """For vocabularies in which a text is its tokens' bytes one after the other."""

    __slots__ = ("_decode", "_drop_space", "_skipped", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]):
        assert tokenizer.pieces is not None
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        # The encoder's own space is dropped at the start of the whole text: in the prompt, unless that has no text.
        self._drop_space = tokenizer.pieces.drops_first_space
        for token_id in self._end_of(prompt_token_ids):
            self.push(token_id)

    def _end_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens that have text, enough of them to hold any half character at the end."""
        found: list[int] = []
        num_bytes = 0
        for token_id in reversed(prompt_token_ids):
            if num_bytes > 4:
                break
            if token_id not in self._skipped:
                found.append(token_id)
                num_bytes += len(self._token_bytes(token_id))
        return found[::-1]

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDecoder:
    """For all other vocabularies: decode a few tokens without and with the new one, and send the difference.

    [0, start) done with | [start, read) decoded and sent, context for the next | [read, …) not sent: half a character
    Exact where a decoder looks back no further than the context.
    """

    __slots__ = ("_decode", "_ids", "_read", "_sent", "_skipped")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]):
        self._decode = lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False)
        self._skipped = skipped
        context = [token_id for token_id in prompt_token_ids[-4 * CONTEXT_TOKENS :] if token_id not in skipped]
        self._ids = context[-CONTEXT_TOKENS:]
        self._read = len(self._ids)
        self._sent = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # Half a character shows as spoilt or, with some libraries, not at all.
        is_open = text.endswith(SPOILT) or len(text) <= len(self._sent)
        if is_open and len(self._ids) - self._read < MAX_HELD_TOKENS:
            return ""
        return self._send(text)

    def flush(self) -> str:
        return self._send(self._decode(self._ids))

    def _send(self, text: str) -> str:
        new = text[len(self._sent) :]
        # The context must begin where a text may begin, so it is cut only between tokens that were sent.
        self._ids = self._ids[self._read :] if self._read else self._ids
        self._read = len(self._ids)
        self._sent = self._decode(self._ids)
        return new
