"""A cache of 8 bits: the same promises as any other, nearly twice the tokens in the same memory, and answers as good."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pagestream.engine import LLM, SamplingParams, TokenLogprobs
from pagestream.engine.core.errors import StartError
from tests.tiny_models import make_checkpoint

DTYPES = ["int8", "fp8"]
PERPLEXITY = {"int8": 0.005, "fp8": 0.02}  # the greatest change, as a share; measured: 0.0007 and 0.0043
AGREEMENT = {"int8": 0.97, "fp8": 0.93}  # of the likeliest tokens; measured: 0.988 and 0.955
TEXT = (Path(__file__).parents[2] / "engine" / "core" / "README.md").read_text(encoding="utf-8")
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, logprobs=2, ignore_eos=True)
PROMPTS = [[20 + index, *((7 * place + index) % 300 for place in range(3 + 5 * index * index))] for index in range(9)]


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list:
    """Everything that could differ: tokens, and logprobs to the last bit."""
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [[(answer.token_ids, answer.logprobs) for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module", params=DTYPES)
def make(request, tiny_llama):
    """Makes engines over such a cache."""
    return lambda **options: LLM(
        str(tiny_llama), **{"dtype": "bfloat16", "kv_cache_dtype": request.param, "num_kv_blocks": 120, **options}
    )


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_same_bits_alone_in_a_batch_in_chunks_and_with_a_warm_cache(make, params):
    alone = make()
    solo = [answers(alone, [prompt], params)[0] for prompt in PROMPTS]
    assert answers(alone, PROMPTS, params) == solo
    assert alone.llm_engine.scheduler.counters.num_prefix_hit_tokens > 0
    assert answers(make(enable_prefix_caching=False), PROMPTS, params) == solo
    assert answers(make(max_num_batched_tokens=32, max_num_seqs=16, cpu_threads=1), PROMPTS, params) == solo
    assert answers(make(block_size=32, num_kv_blocks=60), PROMPTS, params) == solo


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_same_bits_after_giving_way(make, mode):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    wide, tight = make(), make(num_kv_blocks=14, preemption_mode=mode, swap_space=0.01)
    prompts = PROMPTS[:4]
    assert answers(tight, prompts, params) == [answers(wide, [prompt], params)[0] for prompt in prompts]
    counters = tight.llm_engine.scheduler.counters
    assert (counters.num_preempted_swap if mode == "swap" else counters.num_preempted_recompute) > 0


def test_forks_are_the_answers_that_separate_requests_give(make):
    """Copy-on-write copies scales with their codes."""
    llm, prompts = make(), PROMPTS[:3]
    four = SamplingParams(temperature=1, seed=3, n=4, max_tokens=20, ignore_eos=True)
    one = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)
    together = answers(llm, prompts, four)
    assert [forked[0] for forked in together] == [alone[0] for alone in answers(llm, prompts, one)]
    assert all(len({tokens for tokens, _ in forked}) > 1 for forked in together)
    beams = SamplingParams(use_beam_search=True, temperature=0, n=3, max_tokens=20)
    assert answers(llm, prompts, beams) == [answers(make(), [prompt], beams)[0] for prompt in prompts]


def test_plain_torch_serves_it_too(make):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    llm, prompts = make(kernels="torch"), PROMPTS[:4]
    assert answers(llm, prompts, params) == [answers(llm, [prompt], params)[0] for prompt in prompts]


def test_the_same_memory_holds_nearly_twice_the_tokens(smollm2_path):
    blocks = {
        dtype: LLM(str(smollm2_path), kv_cache_dtype=dtype, kv_cache_memory=0.25).llm_engine.scheduler.blocks.device.num_blocks
        for dtype in ("bfloat16", *DTYPES)
    }
    # Heads of 64: 128 bytes a token, or 64 and a scale of 4.
    assert blocks["int8"] == blocks["fp8"] == pytest.approx(blocks["bfloat16"] * 128 / 68, abs=1)


def test_heads_that_do_not_fill_words_are_refused(tmp_path):
    path = make_checkpoint("llama", tmp_path, head_dim=10)
    with pytest.raises(StartError, match="kv_cache_dtype .* multiple of 4"):
        LLM(str(path), kv_cache_dtype="int8", num_kv_blocks=40)


@pytest.fixture(scope="module")
def plain_reading(smollm2_path):
    return reading(LLM(str(smollm2_path), num_kv_blocks=400), TEXT)


def reading(llm: LLM, text: str) -> list[TokenLogprobs]:
    """What the model thought of each token of a text, read in steps of 64: all but the first step reads from the cache."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([text], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [token for token in output.prompt_logprobs if token is not None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_is_read_as_with_a_cache_of_16_bits(smollm2_path, plain_reading, dtype):
    coded = reading(LLM(str(smollm2_path), num_kv_blocks=400, kv_cache_dtype=dtype, max_num_batched_tokens=64), TEXT)
    assert len(coded) == len(plain_reading) > 900
    surprise = [-sum(token.logprob for token in tokens) / len(tokens) for tokens in (coded, plain_reading)]
    agreed = sum(mine.top[0][0] == other.top[0][0] for mine, other in zip(coded, plain_reading, strict=True))
    assert math.exp(surprise[0] - surprise[1]) == pytest.approx(1, abs=PERPLEXITY[dtype])
    assert agreed / len(coded) > AGREEMENT[dtype]
