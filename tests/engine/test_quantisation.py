"""--quantization: nobody's answer depends on company in any mode, what is served is said, what can't be is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagestream.engine import LLM, SamplingParams, StartError
from pagestream.engine.sizing import weights_summary
from tests.tiny_models import make_checkpoint

PROMPTS = [[3 + (11 * i + j * j) % 300 for j in range(length)] for i, length in enumerate((3, 40, 9, 77, 5, 61, 16, 33))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=11, max_tokens=24, logprobs=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def tiny_opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of those that transformers' modules compute."""
    return make_checkpoint("opt", tmp_path_factory.mktemp("tiny_opt"), num_hidden_layers=1)


def llm(path: Path, mode: str, **options: Any) -> LLM:
    return LLM(str(path), quantization=mode, **{"num_kv_blocks": 200, **options})


def answers(engine: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize(("model", "mode"), [("tiny_llama", "int4"), ("tiny_llama", "int8"), ("tiny_opt", "int4")])
def test_the_same_bits_alone_in_a_crowd_in_pieces_and_from_the_cache(model: str, mode: str, request: pytest.FixtureRequest):
    path = request.getfixturevalue(model)
    engine, chunked = llm(path, mode), llm(path, mode, max_num_batched_tokens=16, max_num_seqs=8, enable_prefix_caching=False)
    crowded = llm(path, mode, num_kv_blocks=7, cpu_threads=1)
    for params in PARAMS:
        alone = [answers(engine, [prompt], params)[0] for prompt in PROMPTS]
        for other in (engine, chunked, crowded):
            assert answers(other, PROMPTS, params) == alone
    counters = crowded.llm_engine.scheduler.counters
    assert counters.num_preempted_recompute + counters.num_preempted_swap > 0
    assert engine.llm_engine.scheduler.counters.num_prefix_hit_tokens > 0


def test_without_compiled_operators_the_same_weights_serve_in_plain_torch(tiny_llama: Path):
    """The tokens of the packed path, as long as no logit is near another: the rest of plain torch rounds more often."""
    packed, plain = llm(tiny_llama, "int4"), llm(tiny_llama, "int4", kernels="torch", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    for got, want in zip(answers(packed, PROMPTS, params), answers(plain, PROMPTS, params), strict=True):
        (theirs,) = want[1]
        (ours,) = got[1]
        assert abs(ours.logprob - theirs.logprob) < 0.3
    floats = llm(tiny_llama, "none", kernels="torch", dtype="float32")
    assert answers(floats, PROMPTS, params) != answers(plain, PROMPTS, params)


def test_what_is_served_is_said(tiny_llama: Path):
    def said(mode: str, **options: Any) -> str:
        return weights_summary(llm(tiny_llama, mode, **options).llm_engine.executor._model.shape)  # type: ignore[attr-defined]

    assert said("auto").endswith("100% float32")
    assert "% Q4_1, " in said("int4")
    assert "% Q8_0" in said("int8")
    assert "Q4_1 in bfloat16" in said("int4", kernels="torch", dtype="bfloat16")


def test_none_is_auto(tiny_llama: Path):
    engine = LLM(str(tiny_llama), num_kv_blocks=20, quantization=None)
    assert answers(engine, PROMPTS[:1], PARAMS[0]) == answers(llm(tiny_llama, "auto"), PROMPTS[:1], PARAMS[0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_dtype_that_converted_weights_are_not_computed_in_is_refused(tiny_llama: Path, dtype: str):
    with pytest.raises(StartError, match=f"quantization int4 computes in bfloat16 on a CPU, not in dtype {dtype}"):
        llm(tiny_llama, "int4", dtype=dtype)
