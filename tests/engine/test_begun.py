"""A request that an earlier engine began goes on to the same tokens, wherever it was cut off."""

import pytest

from pagestream.engine import Begun, FinishReason, SamplingParams, fold
from tests.engine.test_async_engine import running, until_idle

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "drawn": SamplingParams(temperature=1, max_tokens=40, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.8, max_tokens=40, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=30),
    "may end": SamplingParams(temperature=1, seed=11, max_tokens=40, stop=("q", "the")),
}


async def outputs_of(engine, request_id, params, begun):
    (stream,) = await engine.add_requests(request_id, ["the quick brown fox"], params, begun=begun)
    stream.keep_deltas()
    return [output async for output in stream], stream.seed


@pytest.mark.parametrize("kind", list(PARAMS))
async def test_it_goes_on_to_the_same_tokens_from_anywhere(tiny_llama, kind):
    params = PARAMS[kind]
    async with running(tiny_llama, max_num_batched_tokens=16, max_num_seqs=4) as engine:
        outputs, seed = await outputs_of(engine, "whole", params, ())
        whole = fold(outputs)
        answer = whole.outputs[0]
        for cut in sorted({0, 1, 2, 15, 16, 17, 30, len(answer.token_ids) - 1, len(answer.token_ids)}):
            known = answer.token_ids[:cut]
            again, _ = await outputs_of(engine, f"cut{cut}", params, [Begun(seed, known)])
            folded = fold(again)
            assert folded.outputs == whole.outputs
            assert folded.usage.num_output_tokens == whole.usage.num_output_tokens
            # One delta a token, as before: so that events have the same numbers.
            assert [delta.outputs for delta in again] == [delta.outputs for delta in outputs]
        await until_idle(engine)


async def test_one_that_had_ended_is_only_told(tiny_llama):
    async with running(tiny_llama) as engine:
        outputs, seed = await outputs_of(engine, "whole", PARAMS["greedy"], ())
        token_ids = fold(outputs).outputs[0].token_ids

        def broken(plan):
            raise AssertionError("nothing is left to compute")

        engine._engine.executor.execute = broken
        again, _ = await outputs_of(engine, "told", PARAMS["greedy"], [Begun(seed, token_ids)])
        assert fold(again).outputs[0].finish_reason is FinishReason.LENGTH
        await until_idle(engine)
