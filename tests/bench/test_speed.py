"""Ratios that must hold on any machine, measured side by side in alternating rounds.  Only meaningful while nothing else runs."""

import statistics
import time

import pytest
import torch

from pagestream.engine import LLM, SamplingParams
from tests.oracle import load_default_model

pytestmark = pytest.mark.slow

ROUNDS = 5
NUM_TOKENS = 64
PROMPT = "The history of the town begins with a small group of people who came over the hills in the spring of that year and"


def seconds_of(work) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_stream_is_at_least_as_fast_as_generate(smollm2_path, dtype):
    model = load_default_model(smollm2_path).to(getattr(torch, dtype))
    llm = LLM(dtype=dtype, kv_cache_memory=0.25, enable_prefix_caching=False, quantization="none")
    token_ids = torch.tensor([llm.get_tokenizer().encode(PROMPT)])
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def theirs():
        with torch.inference_mode():
            model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )

    def ours():
        llm.generate(PROMPT, params, use_tqdm=False)

    ours()
    theirs()  # both once to warm up
    rounds = [(seconds_of(ours), seconds_of(theirs)) for _ in range(ROUNDS)]
    ratio = statistics.median(mine / other for mine, other in rounds)
    print(f"\n{dtype}: {ratio:.2f} of the time that transformers.generate takes")
    assert ratio <= 1.0


def test_eight_streams_give_two_and_a_half_times_the_tokens_of_one():
    llm = LLM(kv_cache_memory=0.25, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [f"{number} {PROMPT}" for number in range(8)]
    llm.generate(prompts, params, use_tqdm=False)

    def taken_s(count: int) -> float:
        return seconds_of(lambda: llm.generate(prompts[:count], params, use_tqdm=False))

    rounds = [(taken_s(1), taken_s(8)) for _ in range(ROUNDS)]
    ratio = statistics.median(8 * one / eight for one, eight in rounds)
    print(f"\n8 streams give {ratio:.1f} times the tokens of one")
    assert ratio >= 2.5


def test_a_shared_beginning_takes_a_quarter_of_the_time_to_the_first_token():
    """Eight at once, 1,200 words of each the same; then eight others that begin like them."""
    llm = LLM(kv_cache_memory=0.5)
    engine = llm.llm_engine
    head = " ".join(f"{word} {number}" for number, word in enumerate(PROMPT.split() * 26))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate(PROMPT, params, use_tqdm=False)

    def first_tokens_s(name: str) -> float:
        started_s = time.perf_counter()
        for number in range(8):
            tail = " ".join(f"{name} {number} {place}" for place in range(13))
            engine.add_request(f"{name}{number}", f"{head} {tail}", params)
        told: dict[str, float] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                told.setdefault(output.request_id, time.perf_counter() - started_s)
        return statistics.median(told.values())

    rounds = []
    for number in range(2):
        head = f"{number} {head}"
        rounds.append((first_tokens_s("first"), first_tokens_s("second")))
    ratio = statistics.median(second / first for first, second in rounds)
    print(f"\nfirst tokens of the second round after {ratio:.3f} of the time of the first")
    assert ratio <= 0.25
