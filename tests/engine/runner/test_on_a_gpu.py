"""What the host does with a GPU's tensors between the kernels, tried on a pretended one: nothing mixes devices, nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, LayerCache
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted, Sample, ScheduledSequence, StepPlan, StepResult
from pagestream.engine.features.structured.mask import rule_out_on_device, rule_out_on_host
from pagestream.engine.runner.kv_cache import KVCache
from pagestream.engine.runner.model_runner import ModelRunner
from pagestream.engine.sampling.sampler import Sampler
from pagestream.kernels.transfer import PinnedLink
from tests.pretend_gpu import GPU, pretend_gpu

CPU = torch.device("cpu")
VOCAB, HIDDEN, EOS = 300, 16, 2
SHAPE = ModelShape(vocab_size=VOCAB, max_model_len=64, num_layers=1, num_kv_heads=1, head_size=16, eos_token_ids=frozenset({EOS}))
KINDS = {
    "greedy": SamplingParams(temperature=0, logprobs=2),
    "drawn": SamplingParams(temperature=0.8, seed=1),
    "truncated": SamplingParams(top_k=40, top_p=0.9, min_p=0.01),
    "typical": SamplingParams(typical_p=0.6),
    "penalties": SamplingParams(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={4: 3.0}),
    "ruled out": SamplingParams(min_tokens=5, allowed_token_ids=(2, 7, 8), bad_words=("x",), bad_word_ids=((7,),)),
    "beams": SamplingParams(temperature=0, n=2, best_of=2, use_beam_search=True),
    "scored prompt": SamplingParams(prompt_logprobs=3),
}


class QueuedNowhere(PinnedLink):
    """The link to a GPU, without pinned memory and with nobody to wait for."""

    def __init__(self) -> None:
        super().__init__(GPU, pinned=False)

    def wait(self) -> None:
        """Nothing is under way."""


class Lookup:
    """A CausalLM without attention: scores by token and position."""

    shape = SHAPE
    kv_dtype = torch.float32

    def __init__(self, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self._table, self._places, self._head = (
            torch.randn(rows, HIDDEN, generator=generator).to(device) for rows in (VOCAB, SHAPE.max_model_len, VOCAB)
        )

    def forward(self, input_ids: Tensor, cache: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        return F.embedding(input_ids, self._table) + F.embedding(metadata.positions, self._places)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(hidden, self._head.t(), out=out)


def run(device: torch.device, kind: SamplingParams) -> list[StepResult]:
    """A prompt beside a row inside of one and one to be pooled; then a decode step of two rows, one of them with two samples."""
    cache = KVCache(SHAPE, block_size=16, num_blocks=4, num_swap_blocks=0, dtype=torch.float32, device=CPU)
    runner = ModelRunner(Lookup(device), cache, Sampler(SHAPE.eos_token_ids), block_size=16, device=device, link=QueuedNowhere())
    prompt, other = (5, 9, 9, 30), (11, 12)
    scored = prompt[1:] if kind.prompt_logprobs is not None else ()
    first = StepPlan(
        0,
        admitted=(Admitted(1, prompt, kind, seed=3), Admitted(2, other, SamplingParams(), seed=4), Admitted(3, other, kind, seed=5)),
        scheduled=(
            ScheduledSequence(3, other, 0, (2,)),
            ScheduledSequence(1, prompt, 0, (0,), (Sample(1, 3),), scored_token_ids=scored),
            ScheduledSequence(4, other, 0, (3,), num_pooled=2),
        ),
    )
    second = StepPlan(
        1,
        scheduled=(
            ScheduledSequence(1, (40,), 4, (0,), (Sample(1, 8),)),
            ScheduledSequence(2, (50,), 2, (1,), (Sample(2, 9), Sample(7, 10))),
        ),
    )
    execute = ModelRunner.execute.__wrapped__  # type: ignore[attr-defined]  # inference mode knows no tensors that are made of others
    with torch.no_grad():
        return [execute(runner, plan) for plan in (first, second)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_steps_on_a_gpu_give_what_they_give_on_the_host(kind, monkeypatch):
    monkeypatch.setattr(QueuedNowhere, "__init__", lambda self: PinnedLink.__init__(self, CPU, pinned=False))
    want = run(CPU, kind)
    monkeypatch.undo()
    with pretend_gpu():
        got = run(GPU, kind)
    assert got == want
    assert not want[0].failed
    assert set(want[1].sampled) | set(want[1].candidates) == {1, 2, 7}
    assert set(want[0].pooled) == {4}


def test_a_grammar_rules_out_the_same_on_both():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    bits = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, (2, -(-VOCAB // 32))).astype(np.int32)
    want = logits.clone()
    rule_out_on_host(want, [0, 2], bits)
    with pretend_gpu():
        got = logits.to(GPU)
        rule_out_on_device(got, [0, 2], bits)
        assert got.tolist() == want.tolist()


def test_the_pretended_gpu_refuses_what_a_gpu_refuses():
    with pretend_gpu():
        there, here = torch.zeros(3, 4, device=GPU), torch.ones(4)
        assert there.device == GPU
        assert (there + 1)[1].cpu().tolist() == [1.0] * 4
        there[1] = 3.0
        there[[0, 2]] += here.to(GPU)
        assert there.tolist() == [[1.0] * 4, [3.0] * 4, [1.0] * 4]
        for mixed in (lambda: there + here, lambda: torch.where(there > 0, here, 0.0), lambda: there.add_(here), lambda: there @ here):
            with pytest.raises(RuntimeError, match="on the same device"):
                mixed()
        with pytest.raises((RuntimeError, TypeError), match=r"numpy"):
            there.numpy()
