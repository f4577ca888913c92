"""Loading from folders: the fast library alone, or transformers' own classes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from pagestream.engine.core.errors import StartError
from pagestream.engine.text.detokenizer import IncrementalDetokenizer
from pagestream.engine.text.tokenizer import Tokenizer, load_tokenizer

TEXT = "Streams of tokens, 12345: naïve 🤗\n"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A model's folder with SmolLM2's vocabulary."""
    fast = FastTokenizer.from_str(tokenizer._backend._fast.to_str())
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "bos_token": "<|im_start|>",
        "pad_token": None,
        "chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_folder_with_tokenizer_json(folder, tokenizer):
    loaded = load_tokenizer(folder)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT), "limits saved with the vocabulary do not apply"
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.vocab_size) == (1, 2, 49152)
    assert loaded.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert loaded.chat_templates == {"default": "plain", "tool_use": "tools"}


def test_template_file_goes_before_the_entry(folder):
    (folder / "chat_template.jinja").write_text("from a file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    loaded = load_tokenizer(folder)
    assert loaded.chat_template == "from a file"
    assert loaded.chat_templates["rag"] == "with documents"


def test_folder_without_tokenizer_json(tmp_path, tokenizer, smollm2_metadata):
    """Older folders have the vocabulary and the merges in files of their own."""
    vocab = {token: token_id for token_id, token in enumerate(smollm2_metadata["tokenizer.ggml.tokens"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(smollm2_metadata["tokenizer.ggml.merges"]) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "plain"}))
    loaded = load_tokenizer(tmp_path)
    text = "Streams of tokens: naïve 🤗\n"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.chat_template) == (1, 2, "plain")
    assert loaded.pieces is not None


def test_slow_tokenizer_gives_the_same(tmp_path):
    """A vocabulary of transformers' own in Python, one token a byte."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, mode="slow")
    token_ids = loaded.encode(TEXT)
    assert token_ids == [*(byte + 3 for byte in TEXT.encode()), 1]
    assert loaded.decode(token_ids) == TEXT
    assert loaded.eos_token_id == 1
    joiner = IncrementalDetokenizer(loaded)
    texts = [joiner.push(token_id) for token_id in token_ids]
    assert "".join(texts) + joiner.flush() == TEXT
    assert all("\ufffd" not in text for text in texts)
    assert loaded.token_bytes(10_000) == b""


def test_unreadable_folders_stop_the_start(tmp_path):
    with pytest.raises(StartError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_that_transformers_made_up_stops_the_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "architectures": ["OPTForCausalLM"]}))
    with pytest.raises(StartError, match="there is no vocabulary in it"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([], "holds no JSON object"),
        ({"bos_token": 1}, "has 1 as its bos_token, which is no text"),
        ({"eos_token": {"text": "</s>"}}, "as its eos_token, which is no text"),
        ({"chat_template": 1.5}, "neither a text nor a list"),
        ({"chat_template": [{"name": "default"}]}, "neither a text nor a list"),
        ({"chat_template": {"default": "x"}}, "neither a text nor a list"),
    ],
)
def test_settings_that_are_none_stop_the_start(tiny_llama, tmp_path, settings, reason):
    (tmp_path / "tokenizer.json").write_bytes((tiny_llama / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(StartError, match=reason) as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_long_texts_let_other_threads_run(tokenizer):
    """Counted, not timed: this thread must get its turns while the other encodes."""
    text = TEXT * 20_000
    started, done = threading.Event(), threading.Event()

    def encode() -> None:
        started.set()
        tokenizer.encode(text)
        done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    started.wait()
    turns = 0
    while not done.is_set():
        time.sleep(0)
        turns += 1
    worker.join()
    assert turns > 100
