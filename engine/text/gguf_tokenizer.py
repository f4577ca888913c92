"""A tokenizer out of the metadata of a GGUF file (`tokenizer.ggml.*`), without any other file.

Source: the GGUF specification for the keys; the models' own tokenizer.json files for the patterns and for what the kinds leave unsaid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagestream.engine.core.errors import StartError
from pagestream.engine.text.tokenizer import FastBackend, Tokenizer

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.pre_tokenizers import PreTokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types; 1 normal, 5 unused, 6 byte
NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}  # ours: the file's
SPACE_MARK = "\u2581"  # a space in SentencePiece's vocabularies

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS_AND_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + LETTERS_AND_REST
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + LETTERS_AND_REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ONE_MARK = r"[^\r\n\p{L}\p{N}]?"
SLASHES_AND_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{ONE_MARK}{UPPER}*{LOWER}+|{ONE_MARK}{UPPER}+{LOWER}*|\p{{N}}{SLASHES_AND_REST}"
GPT4O = rf"{ONE_MARK}{UPPER}*{LOWER}+{CONTRACTIONS}?|{ONE_MARK}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}{SLASHES_AND_REST}"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """How a byte-level vocabulary wants text to be cut before its merges apply."""

    names: tuple[str, ...]  # values of tokenizer.ggml.pre
    patterns: tuple[str, ...]  # applied one after the other, each to the pieces of the one before
    whole_words_first: bool = False  # a piece that is in the vocabulary is taken whole, whatever the merges say
    composes: bool = False  # text is normalised to NFC
    adds_bos: bool = False  # where the file does not say


KINDS = (
    PreTokenizerKind(("default",), (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    PreTokenizerKind(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), (GPT2,)),
    PreTokenizerKind(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        (LLAMA3,),
        whole_words_first=True,
        adds_bos=True,
    ),
    PreTokenizerKind(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (LLAMA3,)),
    PreTokenizerKind(("qwen2", "deepseek-r1-qwen", "megrez"), (QWEN2,), composes=True),
    PreTokenizerKind(("stablelm2", "hunyuan"), (QWEN2,)),
    PreTokenizerKind(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", GPT2)),
    PreTokenizerKind(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    PreTokenizerKind(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    PreTokenizerKind(("deepseek-v3",), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3)),
    PreTokenizerKind(("tekken",), (TEKKEN,), whole_words_first=True, adds_bos=True),
    PreTokenizerKind(("gpt-4o", "llama4"), (GPT4O,)),
)


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the file's `tokenizer.*` keys describe.

    Raises StartError for a kind of vocabulary or of pre-tokenizer that is not known: guessing would give other tokens than
    the model was trained on, and nothing would tell.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        raise StartError("the GGUF file holds no tokenizer; give one with --tokenizer")
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            backend, adds_bos = byte_level_bpe(metadata)
        elif kind == "llama":
            backend, adds_bos = sentencepiece_bpe(metadata)
        else:
            raise StartError(f"the GGUF file's tokenizer is of kind {kind!r}, which can't be read; give one with --tokenizer")
        mark_added_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or ())
    except StartError:
        raise
    except Exception as error:  # a key is missing, a merge makes no token, …; the library raises plain Exception
        raise StartError(f"the GGUF file's tokenizer does not hold together: {type(error).__name__}: {error}") from error
    named = {name: known_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens)) for name, key in NAMED_TOKENS.items()}
    special_tokens = {name: tokens[token_id] for name, token_id in named.items() if token_id is not None}
    with_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    with_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    surround(backend, special_tokens.get("bos_token") if with_bos else None, special_tokens.get("eos_token") if with_eos else None)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        FastBackend(backend),
        special_tokens=special_tokens,
        chat_templates={} if template is None else {"default": template},
    )


def byte_level_bpe(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer without its added tokens, and whether it starts texts with BOS where the file does not say."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    name = metadata.get("tokenizer.ggml.pre", "default")
    kind = next((kind for kind in KINDS if name in kind.names), None)
    if kind is None:
        raise StartError(f"the GGUF file's pre-tokenizer {name!r} is not known; give the model's own files with --tokenizer")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.whole_words_first))
    backend.pre_tokenizer = pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    if kind.composes:
        backend.normalizer = normalizers.NFC()
    return backend, kind.adds_bos


def pre_tokenizer(kind: PreTokenizerKind) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_bpe(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE, whose merges are not listed: the pair that makes the piece of the highest score goes first."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = known_id(metadata, "tokenizer.ggml.unknown_token_id", len(tokens))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_by_score(tokens, metadata["tokenizer.ggml.scores"], vocab),
            unk_token=tokens[0 if unknown is None else unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_marks = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), to_marks]) if add_space_prefix else to_marks
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    return backend, True


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the likeliest piece first; within a piece the likeliest left part first."""
    merges: list[tuple[str, str]] = []
    for token_id in sorted(range(len(tokens)), key=lambda token_id: (-scores[token_id], token_id)):
        token = tokens[token_id]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += sorted((pair for pair in pairs if pair[0] in vocab and pair[1] in vocab), key=lambda pair: vocab[pair[0]])
    return merges


def mark_added_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    """Control and user-defined tokens are found whole in a text; the latter do not count as special."""
    from tokenizers import AddedToken

    typed = list(zip(tokens, token_types, strict=False))
    special = [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind in (UNKNOWN, CONTROL)]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == USER_DEFINED]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def surround(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Texts that are encoded with special tokens get these around them."""
    from tokenizers.processors import TemplateProcessing

    used = [token for token in (before, after) if token is not None]
    if used:
        backend.post_processor = TemplateProcessing(
            single=[*([before] if before is not None else []), "$A", *([after] if after is not None else [])],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
        )


def known_id(metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    """The token id under that key; None where it is not given or outside the vocabulary, as writers put -1 for none."""
    value = metadata.get(key)
    return int(value) if value is not None and 0 <= int(value) < num_tokens else None
