"""Text deltas, against the decoding of the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from pagestream.engine.text.detokenizer import IncrementalDetokenizer
from pagestream.engine.text.tokenizer import SPOILT, FastBackend, Tokenizer

HARD_TEXTS = ["👩‍👩‍👧‍👦🇩🇪 ẽ́", "天空是蓝色的", "مرحبا", "a\tb\n\n\nc", "naïve 🤗", "<|im_end|>x"]

token_ids_of_smollm2 = st.lists(
    st.one_of(
        st.integers(0, 16),  # special
        st.integers(17, 300),  # mostly single bytes
        st.integers(0, 49151),
        st.integers(49152, 49200),  # outside the vocabulary
    ),
    max_size=40,
)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] = [], skip: bool = True) -> list[str]:  # noqa: B006
    """One text per token, the last with what was flushed."""
    joiner = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    texts = [joiner.push(token_id) for token_id in token_ids]
    rest = joiner.flush()
    return [*texts[:-1], texts[-1] + rest] if texts else [rest]


@settings(max_examples=400, deadline=None)
@given(token_ids=token_ids_of_smollm2, skip=st.booleans())
def test_deltas_make_the_whole(tokenizer, token_ids, skip):
    assert "".join(pieces_of(tokenizer, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=10))
def test_a_real_text_is_never_spoilt_on_the_way(tokenizer, text, prompt):
    token_ids = tokenizer.encode(text)
    joiner = IncrementalDetokenizer(tokenizer, tokenizer.encode(prompt), skip_special_tokens=False)
    whole = tokenizer.decode(token_ids, skip_special_tokens=False)
    sent = ""
    for token_id in token_ids:
        sent += joiner.push(token_id)
        assert whole.startswith(sent)
    assert sent + joiner.flush() == whole


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_offsets_point_at_their_tokens(tokenizer, text):
    pieces = pieces_of(tokenizer, tokenizer.encode(text), skip=False)
    whole, offset = "".join(pieces), 0
    assert whole == text
    for piece in pieces:
        assert whole[offset : offset + len(piece)] == piece
        offset += len(piece)


def test_half_a_character_is_held_and_flushed(tokenizer):
    first, *rest = tokenizer.encode("🤗")
    assert rest, "needs a character of several tokens"
    joiner = IncrementalDetokenizer(tokenizer)
    assert joiner.push(first) == ""
    assert joiner.flush() == SPOILT


def test_an_answer_completes_its_prompts_last_character(tokenizer):
    first, *rest = tokenizer.encode("🤗")
    prompt = [*tokenizer.encode("hug: "), first]
    assert "".join(pieces_of(tokenizer, rest, prompt)) == "🤗"
    assert "".join(pieces_of(tokenizer, [*prompt, *rest])) == "hug: 🤗"


def test_alternatives_have_names_of_their_own(tokenizer):
    names: dict[str, bytes] = {}
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        assert names.setdefault(tokenizer.token_text(token_id), data) == data
    first = tokenizer.encode("🤗")[0]
    assert tokenizer.token_text(first).startswith("bytes:\\xf0")
    assert tokenizer.token_bytes(49152) == b""


def sentencepiece_like(drops_space: bool) -> Tokenizer:
    """A few pieces spelled as SentencePiece does, with its bytes."""
    words = ["<unk>", "<s>", "</s>", "\u2581", "\u2581the", "\u2581cat", "s", "\u2581\u2581"]
    vocab = {word: token_id for token_id, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if drops_space else steps)
    return Tokenizer(FastBackend(fast), special_tokens={}, chat_templates={})


EMOJI = [8 + byte for byte in "🤗".encode()]


@settings(max_examples=200, deadline=None)
@given(
    drops_space=st.booleans(),
    skip=st.booleans(),
    prompt=st.lists(st.sampled_from([[1], [3], [4], [6], [7], EMOJI]), max_size=4),
    output=st.lists(st.sampled_from([[0], [2], [3], [4], [5], [6], [7], EMOJI]), max_size=6),
)
def test_spaces_of_sentencepiece_depend_on_the_prompt(drops_space, skip, prompt, output):
    tokenizer = sentencepiece_like(drops_space)
    prompt_ids, output_ids = sum(prompt, []), sum(output, [])
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=skip)
    assert before + "".join(pieces_of(tokenizer, output_ids, prompt_ids, skip)) == whole


def test_only_the_wrong_byte_of_a_run_is_spoilt():
    tokenizer = sentencepiece_like(True)
    assert "".join(pieces_of(tokenizer, [*EMOJI, 8 + 0xFF, 4], [6])) == "🤗" + SPOILT + " the"


def without_pieces(decoder: decoders.Decoder) -> Tokenizer:
    words = ["[UNK]", "[CLS]", "stream", "##ing", "page", "##s", "\u2581the", "\u2581cat", ",", "."]
    fast = FastTokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoder
    fast.add_special_tokens(["[UNK]", "[CLS]"])
    tokenizer = Tokenizer(FastBackend(fast), special_tokens={}, chat_templates={})
    assert tokenizer.pieces is None
    return tokenizer


@pytest.mark.parametrize(
    ("decoder", "token_id", "text"),
    [
        (decoders.Metaspace(), 6, " the"),
        (decoders.Metaspace(), 2, "stream"),
        (decoders.WordPiece(prefix="##"), 4, " page"),
        (decoders.WordPiece(prefix="##"), 3, "ing"),
    ],
)
def test_a_token_brings_its_space_which_only_the_start_of_a_text_loses(decoder, token_id, text):
    assert without_pieces(decoder).token_bytes(token_id) == text.encode()


@pytest.mark.parametrize("decoder", [decoders.WordPiece(prefix="##"), decoders.Metaspace()])
def test_other_vocabularies_are_decoded_through_a_window(decoder):
    tokenizer = without_pieces(decoder)
    rng = random.Random(5)
    for _ in range(50):
        prompt = [1, *rng.choices(range(2, 10), k=rng.randint(1, 12))]
        output = rng.choices(range(10), k=12)
        before = tokenizer.decode(prompt)
        assert before + "".join(pieces_of(tokenizer, output, prompt)) == tokenizer.decode(prompt + output)
        assert "".join(pieces_of(tokenizer, output)) == tokenizer.decode(output)
