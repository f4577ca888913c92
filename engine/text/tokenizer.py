"""Text to token ids and back, whichever library knows the vocabulary.

A `Tokenizer` is a backend (the fast library, or transformers' own classes) with the facts around it: special tokens, chat templates.
Immutable once built and safe to use from several threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pagestream.engine.core.errors import InvalidRequest, StartError
from pagestream.engine.text.pieces import PieceDecoder, find_piece_decoder

if TYPE_CHECKING:
    import tokenizers

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPOILT = "\ufffd"  # stands for bytes that are no character


class Backend(Protocol):
    """What a vocabulary library must do for us."""

    vocab_size: int  # highest id + 1, added tokens included
    special_ids: frozenset[int]
    pieces: PieceDecoder | None  # None: the text of a token depends on its neighbours in ways that only `decode` knows

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token(self, token_id: int) -> str | None: ...  # as the vocabulary spells it; None for an id that it does not have
    def token_id(self, token: str) -> int | None: ...


class FastBackend:
    def __init__(self, fast: tokenizers.Tokenizer):
        fast.no_truncation()  # a limit saved with the vocabulary would cut prompts silently
        fast.no_padding()
        self._fast = fast
        added = fast.get_added_tokens_decoder()
        self.vocab_size = max(fast.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.pieces = find_piece_decoder(json.loads(fast.decoder.__getstate__()) if fast.decoder is not None else None)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch of one: that call lets other Python threads run meanwhile, the call for a single text does not.
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self._fast.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._fast.token_to_id(token)


class SlowBackend:
    """One of transformers' tokenizers that are written in Python; not built for several threads, hence the lock."""

    pieces: PieceDecoder | None = None

    def __init__(self, slow: Any):
        self._slow = slow
        self._lock = threading.Lock()
        self.vocab_size = max(slow.vocab_size, max(slow.added_tokens_decoder, default=-1) + 1)
        self.special_ids = frozenset(slow.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            return self._slow.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        with self._lock:
            known = [token_id for token_id in token_ids if token_id < self.vocab_size]
            return self._slow.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token(self, token_id: int) -> str | None:
        with self._lock:
            return self._slow.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        with self._lock:
            token_id = self._slow.convert_tokens_to_ids(token)
            return None if token_id is None or self._slow.convert_ids_to_tokens(token_id) != token else token_id


class Tokenizer:
    """Invariant: the same text gives the same ids and the same ids the same text, from any thread."""

    def __init__(self, backend: Backend, *, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]):
        self._backend = backend
        self._bytes_of: dict[int, bytes] = {}  # filled as tokens are met; entries never change
        self.pieces = backend.pieces
        self._neighbour = [] if self.pieces is not None else backend.encode("a", False)[-1:]  # any token that has a text
        self._neighbour_text = backend.decode(self._neighbour, False)
        self.vocab_size = backend.vocab_size
        self.special_ids = backend.special_ids
        self.special_tokens = dict(special_tokens)  # bos_token, eos_token, … -> how they are written
        self.chat_templates = dict(chat_templates)  # by name; the usual one is "default"
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text.  Special tokens that are written out in it are recognised either way.

        `add_special_tokens` puts BOS and the like around it as the model wants for plain text; False for a rendered chat
        template, which writes its own.  Takes milliseconds for long texts and then lets other threads run.
        Raises InvalidRequest(param="prompt") for text that is not Unicode.
        """
        try:
            return self._backend.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text holds half of a surrogate pair, which is no character", param="prompt") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens by themselves; ids outside the vocabulary stand for nothing, half characters for U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of UTF-8 that this token adds to a text, apart from what its neighbours make of it."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._look_up(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        r"""A name for this token where alternatives are listed; two tokens with different bytes never share one.

        Its text; for bytes that are no text by themselves their escapes after `bytes:`, as in OpenAI's answers: `bytes:\xe2\x80`.
        """
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.token(token_id)
        if token is None:
            return b""
        if self.pieces is not None:
            return self.pieces.token_bytes(token)
        # Behind another token: at the start of a text many decoders drop the space that a token brings.
        before = self._neighbour_text
        both = self._backend.decode([*self._neighbour, token_id], False)
        added = both.removeprefix(before) if both.startswith(before) else self._backend.decode([token_id], False)
        return added.encode(errors="replace")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_id(token)


def load_tokenizer(folder: Path, *, mode: str = "auto", trust_remote_code: bool = False) -> Tokenizer:
    """Load from a model's folder.

    mode "slow" asks for transformers' Python tokenizer; a folder without tokenizer.json goes through transformers too.
    Raises StartError if there is none to be had.
    """
    if mode != "slow" and (folder / "tokenizer.json").is_file():
        return load_fast(folder)
    return load_through_transformers(folder, use_fast=mode != "slow", trust_remote_code=trust_remote_code)


def load_fast(folder: Path) -> Tokenizer:
    import tokenizers

    try:
        fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise StartError(f"{folder / 'tokenizer.json'} can't be read: {error}") from error
    config = read_json(folder / "tokenizer_config.json")
    declared = read_json(folder / "special_tokens_map.json") | {name: value for name, value in config.items() if value is not None}
    special_tokens = {name: written(declared[name], name, folder) for name in SPECIAL_TOKEN_NAMES if declared.get(name) is not None}
    return Tokenizer(FastBackend(fast), special_tokens=special_tokens, chat_templates=read_chat_templates(folder, config))


def load_through_transformers(folder: Path, *, use_fast: bool, trust_remote_code: bool) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), use_fast=use_fast, trust_remote_code=trust_remote_code)
    except Exception as error:  # anything may come out of a model's own code
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StartError(f"no tokenizer could be loaded from {folder}: {reason}") from error
    backend: Backend = FastBackend(loaded.backend_tokenizer) if loaded.is_fast else SlowBackend(loaded)
    if len(backend.special_ids) >= backend.vocab_size:  # transformers makes one up where there are no files
        raise StartError(f"no tokenizer could be loaded from {folder}: there is no vocabulary in it")
    special_tokens = {name: str(value) for name, value in loaded.special_tokens_map.items() if name in SPECIAL_TOKEN_NAMES}
    templates = loaded.chat_template or {}
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_templates={"default": templates} if isinstance(templates, str) else templates,
    )


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name.  A file of its own goes before the entry in tokenizer_config.json, which may be one text or a list of named ones."""
    entry = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template") or {}
    if isinstance(entry, str):
        templates = {"default": entry}
    else:
        try:
            templates = {str(named["name"]): str(named["template"]) for named in entry}
        except (KeyError, TypeError) as error:
            raise StartError(f"the chat_template of {folder} is neither a text nor a list of named ones") from error
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def read_json(path: Path) -> dict[str, Any]:
    """The object in that file; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartError(f"{path} holds no JSON object")
    return content


def written(token: Any, name: str, folder: Path) -> str:
    """How a special token is written; files have it as text or as an object with the text in it.  Raises StartError for others."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise StartError(f"the tokenizer of {folder} has {str(token)[:40]} as its {name}, which is no text")
    return text
