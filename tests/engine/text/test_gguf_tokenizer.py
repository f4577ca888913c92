"""The tokenizer out of GGUF metadata, against slow and simple re-tellings of what the vocabularies mean."""

from __future__ import annotations

import io

import pytest
import regex
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagestream.engine.core.errors import InvalidRequest, StartError
from pagestream.engine.text.gguf_tokenizer import GPT2, KINDS, from_gguf_metadata
from pagestream.engine.text.pieces import ALPHABET

TEXTS = [
    "The sky is blue.",
    "  two spaces,\ttab\n\n\nnewlines  ",
    "12345 + 67 = 12412, it's I'll we're",
    "def f(x):\n    return x * 2  # straße naïve",
    "天空是蓝色的。今天天气很好。",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, ẽ́ marks",
    "\x00\x01 control \u200b zero width \ufeff",
]
SPELLING = {byte: character for character, byte in ALPHABET.items()}


def naive_bpe(text: str, metadata: dict, patterns: list[str]) -> list[int]:
    """Cut with the patterns one after the other, then merge the best pair of each piece until none is left."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    words = [text] if text else []
    for pattern in patterns:
        words = [part for word in words for part in regex.split(f"({pattern})", word) if part]
    token_ids = []
    for word in words:
        parts = [SPELLING[byte] for byte in word.encode()]
        while len(parts) > 1:
            best = min(zip(parts, parts[1:], strict=False), key=lambda pair: ranks.get(pair, 1 << 30))
            if best not in ranks:
                break
            merged, index = [], 0
            while index < len(parts):
                is_best = tuple(parts[index : index + 2]) == best
                merged.append("".join(best) if is_best else parts[index])
                index += 2 if is_best else 1
            parts = merged
        token_ids += [vocab[part] for part in parts]
    return token_ids


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_naive_merging(tokenizer, smollm2_metadata, text):
    assert tokenizer.encode(text) == naive_bpe(text, smollm2_metadata, [r"\p{N}", GPT2])


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(tokenizer, smollm2_metadata, text):
    known = {ALPHABET[token] for token in smollm2_metadata["tokenizer.ggml.tokens"] if len(token) == 1}
    assume(known.issuperset(text.encode()))  # some bytes, of control characters and of unassigned planes, have no token
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_in_a_text_are_recognised(tokenizer):
    token_ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False)
    assert token_ids[0] == 1
    assert token_ids[-1] == 2
    assert tokenizer.decode(token_ids) == "user\nhi"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


def test_half_a_surrogate_pair_is_the_callers_mistake(tokenizer):
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.param == "prompt"


def test_facts_of_smollm2(tokenizer, smollm2_metadata):
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.chat_template == smollm2_metadata["tokenizer.chat_template"]


def test_bos_is_added_where_the_file_says_so(smollm2_metadata):
    with_both = from_gguf_metadata(smollm2_metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    plain = with_both.encode("hello", add_special_tokens=False)
    assert with_both.encode("hello") == [1, *plain, 2]


@pytest.mark.parametrize("name", [name for kind in KINDS for name in kind.names])
def test_each_pre_tokenizer_cuts_as_its_patterns_say(smollm2_metadata, name):
    kind = next(kind for kind in KINDS if name in kind.names)
    built = from_gguf_metadata(smollm2_metadata | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False})
    for text in TEXTS:
        assert built.decode(built.encode(text), skip_special_tokens=False) == text
        if not kind.whole_words_first:
            assert built.encode(text) == naive_bpe(text, smollm2_metadata, list(kind.patterns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "nobody-knows"}, "nobody-knows"),
        ({"tokenizer.ggml.merges": ["no such"]}, "does not hold together"),
    ],
)
def test_what_is_not_understood_stops_the_start(smollm2_metadata, change, message):
    with pytest.raises(StartError, match=message):
        from_gguf_metadata(smollm2_metadata | change)


def test_no_tokenizer_stops_the_start():
    with pytest.raises(StartError, match="--tokenizer"):
        from_gguf_metadata({"general.architecture": "llama"})


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece BPE model with byte fallback, trained on the spot."""
    words = ["the cat sat on the mat", "a dog ran over the hill", "streams of tokens and pages of keys", "naïve café über straße"]
    lines = [f"{first}, {second} {number}" for first in words for second in words for number in range(12)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def sentencepiece_metadata(trained) -> dict[str, object]:
    ids = range(trained.vocab_size())
    kinds = [2 if trained.is_unknown(i) else 3 if trained.is_control(i) else 6 if trained.is_byte(i) else 1 for i in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [trained.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": trained.bos_id(),
        "tokenizer.ggml.eos_token_id": trained.eos_id(),
        "tokenizer.ggml.unknown_token_id": trained.unk_id(),
    }


@pytest.mark.parametrize("text", ["the cat", "streams of the tokens, 12", "naïve café", "a  b", "日本 the cat 👩‍👩‍👧", "\n\nend "])
def test_sentencepiece_equals_the_library(trained, sentencepiece_metadata, text):
    ours = from_gguf_metadata(sentencepiece_metadata)
    assert ours.encode(text) == [trained.bos_id(), *trained.encode(text)]
    assert ours.encode(text, add_special_tokens=False) == trained.encode(text)
    assert ours.decode(trained.encode(text)) == text
