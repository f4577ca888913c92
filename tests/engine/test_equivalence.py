"""An optimisation changes time, never tokens, and nobody's answer depends on company: the same bits, whatever is switched on."""

import random

import pytest

from pagestream.engine import LLM, SamplingParams

WORDS = "the sea was calm and the old captain looked over the water as he had done every morning for many years".split()


def prompts(count: int) -> list[str]:
    """Lengths from a few tokens to some hundreds, none the beginning of another."""
    return [f"{index} " + " ".join((WORDS[index % 7 :] + WORDS) * (1 + index * index // 12)) for index in range(count)]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=11, max_tokens=20, logprobs=2, ignore_eos=True),
]


def llm(**options) -> LLM:
    return LLM(**{"kv_cache_memory": 0.25, **options})


def answers(engine: LLM, asked: list[str], params) -> list:
    """Everything that could differ: tokens, text, and logprobs to the last bit."""
    outputs = engine.generate(asked, params, use_tqdm=False)
    return [[(answer.token_ids, answer.text, answer.logprobs) for answer in output.outputs] for output in outputs]


# float32 takes four times as long; its rows are held to the same promise, operator by operator, in tests/kernels/cpu.
@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def plain(dtype):
    return llm(dtype=dtype)


@pytest.fixture(scope="module")
def solo(plain):
    """Each prompt alone, with a cold prefix cache: the prompts do not share one."""
    return {params: [answers(plain, [prompt], params)[0] for prompt in prompts(16)] for params in PARAMS}


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
class TestSameBits:
    def test_in_a_batch_of_16(self, plain, solo, params):
        assert answers(plain, prompts(16), params) == solo[params]  # and with a warm prefix cache
        order = random.Random(5).sample(range(16), 16)
        assert answers(plain, [prompts(16)[index] for index in order], params) == [solo[params][index] for index in order]

    def test_in_a_cold_batch_without_prefix_cache(self, dtype, solo, params):
        engine = llm(dtype=dtype, enable_prefix_caching=False)
        assert answers(engine, prompts(16), params) == solo[params]

    def test_with_a_step_budget_of_32(self, dtype, solo, params):
        engine = llm(dtype=dtype, max_num_batched_tokens=32, max_num_seqs=16)
        assert answers(engine, prompts(16), params) == solo[params]

    def test_with_dequantised_weights_instead_of_the_files_own_blocks(self, dtype, solo, params):
        assert answers(llm(dtype=dtype, quantization="none"), prompts(16), params) == solo[params]

    def test_with_one_thread_and_larger_blocks(self, dtype, solo, params):
        engine = llm(dtype=dtype, cpu_threads=1, block_size=32)
        assert answers(engine, prompts(16), params) == solo[params]


CROWD = [f"{index} {' '.join(WORDS[: 3 + index])}" for index in range(8)]
CROWD_PARAMS = [SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=60, ignore_eos=True) for index in range(8)]


@pytest.fixture(scope="module")
def solo_of_crowd(plain):
    return [answers(plain, [prompt], params)[0] for prompt, params in zip(CROWD, CROWD_PARAMS, strict=True)]


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_with_a_pool_so_small_that_requests_give_way(dtype, solo_of_crowd, mode):
    engine = llm(dtype=dtype, num_kv_blocks=18, preemption_mode=mode, swap_space=0.5)
    assert answers(engine, CROWD, CROWD_PARAMS) == solo_of_crowd
    counters = engine.llm_engine.scheduler.counters
    assert counters.num_preempted_swap + counters.num_preempted_recompute > 0
    assert mode != "swap" or counters.num_preempted_swap > 0
    assert mode != "recompute" or counters.num_preempted_recompute > 0


def test_forks_are_the_answers_that_separate_requests_give(plain):
    """Copy-on-write against copies: the j-th of n answers has its own seed, whatever is shared."""
    params = SamplingParams(temperature=1, seed=3, n=4, max_tokens=16, ignore_eos=True)
    together = answers(plain, prompts(3), params)
    assert together == [answers(plain, [prompt], params)[0] for prompt in prompts(3)]
    first = SamplingParams(temperature=1, seed=3, max_tokens=16, ignore_eos=True)
    assert [forked[0] for forked in together] == [alone[0] for alone in answers(plain, prompts(3), first)]
    assert all(len({tokens for tokens, _, _ in forked}) > 1 for forked in together)
