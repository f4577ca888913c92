"""Graphs of decode steps, with a fake in place of torch.cuda.graph: all but the capture itself, in the interpreter."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pagestream.engine import LLM, SamplingParams
from pagestream.engine.core.sampling_params import SamplingParams as Params
from pagestream.engine.core.step_plan import Admitted, Sample, ScheduledSequence, StepPlan
from pagestream.engine.models.base import CausalLM
from pagestream.engine.runner.cuda_graphs import DecodeGraphs, batch_sizes
from pagestream.engine.runner.kv_cache import KVCache
from pagestream.engine.runner.model_runner import ModelRunner
from pagestream.engine.sampling.kernel_chooser import KernelChooser
from pagestream.engine.sampling.sampler import Sampler
from pagestream.kernels.transfer import Array, SharedMemory
from tests.tiny_models import make_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_SEQS = 16, 3


class FakeGraphs:
    """A GraphMaker that repeats the work by calling it, and puts the results where the first ones were."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.num_captured += 1
        kept = work()

        def replay() -> None:
            self.num_replayed += 1
            (logits, sampled), (kept_logits, kept_sampled) = work(), kept
            kept_logits.copy_(logits)
            for name in ("tokens", "logprobs", "log_sum_exp"):
                getattr(kept_sampled, name).copy_(getattr(sampled, name))

        return replay, kept


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path: Path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    llm = LLM(str(path), kernels="triton", device="cpu", dtype="float32", num_kv_blocks=4, max_num_batched_tokens=8, max_num_seqs=2)
    return llm.llm_engine.executor._model  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def captured(model: CausalLM) -> Setup:
    return Setup(model, with_graphs=True)


class Setup:
    """A runner over a pool of its own, with graphs or without."""

    def __init__(self, model: CausalLM, *, with_graphs: bool, link: SharedMemory | None = None):
        self.cache = KVCache(
            model.shape, block_size=BLOCK_SIZE, num_blocks=8, num_swap_blocks=0, dtype=torch.float32, device=CPU
        )
        link = link or SharedMemory()
        chooser = KernelChooser(link, model.shape.vocab_size, CPU)
        self.maker = FakeGraphs()
        graphs = None
        if with_graphs:
            graphs = DecodeGraphs(
                model, self.cache, chooser, link,
                block_size=BLOCK_SIZE, max_num_seqs=MAX_SEQS, max_context_len=48, device=CPU, maker=self.maker,
            )  # fmt: skip
            graphs.capture()
        self.graphs = graphs
        sampler = Sampler(model.shape.eos_token_ids, (), chooser)
        self.runner = ModelRunner(model, self.cache, sampler, block_size=BLOCK_SIZE, device=CPU, link=link, graphs=graphs)

    def pages(self) -> torch.Tensor:
        return torch.stack([torch.stack((layer.k, layer.v)) for layer in self.cache.layers])


PARAMS = {
    1: Params(temperature=0),
    2: Params(temperature=0.9, top_k=30, top_p=0.9),
    3: Params(temperature=1.2, presence_penalty=0.6, logit_bias={4: 2.0}),
}
TABLES = {1: (5, 0, 7), 2: (2,), 3: (6, 1)}
PROMPT_LENGTHS = {1: 15, 2: 4, 3: 16}


def prompt_of(seq_id: int) -> tuple[int, ...]:
    return tuple(5 + (11 * seq_id + 3 * place * place) % 300 for place in range(PROMPT_LENGTHS[seq_id]))


def run(setup: Setup, seq_ids: list[int], num_steps: int, params: dict[int, Params] = PARAMS) -> dict[int, list[int]]:
    """Each prompt in one step, then decode steps of all of them."""
    tokens: dict[int, list[int]] = {}
    for seq_id in seq_ids:
        admitted = Admitted(seq_id, prompt_of(seq_id), params[seq_id], seed=seq_id)
        row = ScheduledSequence(seq_id, prompt_of(seq_id), 0, TABLES[seq_id], (Sample(seq_id, seq_id),))
        result = setup.runner.execute(StepPlan(0, admitted=(admitted,), scheduled=(row,)))
        tokens[seq_id] = [result.sampled[seq_id].token_ids[0]]
    for step in range(num_steps):
        rows = tuple(
            ScheduledSequence(
                seq_id, (tokens[seq_id][-1],), PROMPT_LENGTHS[seq_id] + step, TABLES[seq_id], (Sample(seq_id, seq_id),)
            )
            for seq_id in seq_ids
        )
        result = setup.runner.execute(StepPlan(step + 1, scheduled=rows))
        assert not result.failed
        for seq_id in seq_ids:
            tokens[seq_id].append(result.sampled[seq_id].token_ids[0])
    return tokens


@pytest.mark.parametrize("seq_ids", [[1], [1, 2], [3, 1, 2]])
def test_replayed_steps_are_the_eager_ones(model, seq_ids):
    """Tokens and pages to the last bit; over the edge of a block, and with rows that want more than a draw."""
    eager, replayed = Setup(model, with_graphs=False), Setup(model, with_graphs=True)
    before = replayed.pages()
    assert not before.any()  # neither warm-up nor capture wrote anything
    want = run(eager, seq_ids, 3)
    assert run(replayed, seq_ids, 3) == want
    assert replayed.maker.num_replayed == 3
    assert torch.equal(replayed.pages(), eager.pages())


def test_padding_changes_nothing(model):
    """One sequence in a graph of one row, and in one of three rows of which two are padding."""
    narrow, wide = Setup(model, with_graphs=True), Setup(model, with_graphs=True)
    assert narrow.graphs is not None
    assert wide.graphs is not None
    wide.graphs._sizes = [MAX_SEQS]
    want = run(narrow, [2], 2)
    assert run(wide, [2], 2) == want
    assert torch.equal(narrow.pages(), wide.pages())
    row = ScheduledSequence(2, (want[2][-1],), 7, TABLES[2], (Sample(2, 2),))
    with torch.inference_mode():
        logits = [graphs.run([row], [PARAMS[2]]).logits.clone() for graphs in (narrow.graphs, wide.graphs)]
    assert torch.equal(*logits)
    assert torch.isfinite(logits[0]).all()


def test_graphs_share_one_place_for_their_logits(model):
    """A place for each of 35 sizes would take 2 GB at a vocabulary of 128 256, which nobody has set aside."""
    setup = Setup(model, with_graphs=True)
    assert setup.graphs is not None
    graphs = list(setup.graphs._graphs.values())
    assert [graph.logits.shape[0] for graph in graphs] == [3, 2, 1]
    assert len({graph.logits.data_ptr() for graph in graphs}) == 1


def test_a_row_without_numbers_fails_alone(model):
    setup = Setup(model, with_graphs=True)
    run(setup, [1, 2], 0)
    setup.cache.layers[0].v[TABLES[2][0]] = float("nan")
    rows = tuple(
        ScheduledSequence(seq_id, (9,), PROMPT_LENGTHS[seq_id], TABLES[seq_id], (Sample(seq_id, seq_id),)) for seq_id in (1, 2)
    )
    result = setup.runner.execute(StepPlan(1, scheduled=rows))
    assert list(result.failed) == [2]
    assert list(result.sampled) == [1]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([ScheduledSequence(1, (5,), 47, (1, 2, 3), (Sample(1, 1),))], True),
        ([ScheduledSequence(1, (5,), 48, (1, 2, 3, 4), (Sample(1, 1),))], False),  # beyond the longest context
        ([ScheduledSequence(1, (5, 6), 0, (1,), (Sample(1, 1),))], False),
        ([ScheduledSequence(1, (5,), 3, (1,))], False),  # inside a prompt
        ([ScheduledSequence(1, (5,), 3, (1,), (Sample(1, 1), Sample(2, 2)))], False),  # about to fork
        ([ScheduledSequence(n, (5,), 3, (1,), (Sample(n, 1),)) for n in range(4)], False),  # more than the largest graph
    ],
)
def test_which_steps_are_served(captured, rows, expected):
    assert captured.graphs is not None
    assert captured.graphs.serves(StepPlan(0, scheduled=tuple(rows))) is expected


class CountingLink(SharedMemory):
    def __init__(self) -> None:
        self.num_fetched = 0
        self.is_at_work = False

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        self.is_at_work = True
        tensors = super().upload(arrays)
        self.is_at_work = False
        return tensors

    def refill(self, target: torch.Tensor, arrays: Sequence[Array]) -> None:
        self.is_at_work = True
        super().refill(target, arrays)
        self.is_at_work = False

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        self.num_fetched += 1
        self.is_at_work = True
        arrays = super().fetch(tensors)
        self.is_at_work = False
        return arrays


class Waits(TorchFunctionMode):
    """Counts what would make the host wait for a GPU, were there one, outside of the link and of Triton's interpreter."""

    NAMES = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"})

    def __init__(self, link: CountingLink):
        super().__init__()
        self._link = link
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES and not self._link.is_at_work and not is_interpreting():
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def is_interpreting() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if "/triton/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Params(temperature=1.0, min_p=0.1), PARAMS[2]),
        (Params(temperature=0, logprobs=3), PARAMS[2]),
        (Params(temperature=0.7, logprobs=0, repetition_penalty=1.2, frequency_penalty=0.3), Params(logprobs=5)),
        (Params(temperature=0, allowed_token_ids=(5, 9, 250), min_tokens=2), PARAMS[2]),
        (PARAMS[3], Params(logprobs=2, logit_bias={7: 3.0}, bad_word_ids=((7,), (8, 9)), bad_words=("a", "b"))),
    ],
    ids=["plain", "logprobs of one", "penalties", "allowed tokens", "biases and bad words"],
)
def test_the_host_waits_once_a_step(model, with_graphs, first, second):
    link = CountingLink()
    setup = Setup(model, with_graphs=with_graphs, link=link)
    with Waits(link) as waits:
        tokens = run(setup, [1, 2], 2, PARAMS | {1: first, 2: second})
    assert len(tokens[1]) == 3
    assert link.num_fetched == 2 + 2  # each prompt, and each decode step of both
    assert waits.found == []
    prompt = ScheduledSequence(3, prompt_of(3)[:5], 0, TABLES[3])
    admitted = Admitted(3, prompt_of(3), PARAMS[3], seed=3)
    setup.runner.execute(StepPlan(9, admitted=(admitted,), scheduled=(prompt,)))
    assert link.num_fetched == 4  # a chunk inside a prompt gives nothing to wait for


def test_a_replay_makes_no_views_of_its_buffer(captured):
    """They cost the host more than all else that it does before the launch, and nobody reads them again."""

    class Views(TorchFunctionMode):
        num_made = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_made += func is torch.Tensor.view
            return func(*args, **(kwargs or {}))

    assert captured.graphs is not None
    graphs = captured.graphs._graphs
    kept = graphs[2]
    graphs[2] = dataclasses.replace(kept, replay=lambda: None)
    rows = [ScheduledSequence(seq_id, (5,), 3, TABLES[seq_id], (Sample(seq_id, seq_id),)) for seq_id in (1, 2)]
    with Views() as views:
        captured.graphs.run(rows, [PARAMS[1], PARAMS[2]])
    graphs[2] = kept
    assert views.num_made == 0


def test_the_watch_for_waits_sees_them():
    with Waits(CountingLink()) as waits:
        torch.ones(2).tolist()
        bool(torch.ones(1) > 0)
    assert waits.found == ["tolist", "__bool__"]


def test_batch_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(256)[-2:] == [248, 256]
    assert batch_sizes(300)[-3:] == [272, 288, 300]


def test_the_whole_engine_replays_its_decode_steps(tmp_path, monkeypatch):
    from pagestream.engine import factory

    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 8, "max_num_batched_tokens": 20, "max_num_seqs": 2}
    prompts, params = [[7, 8, 9], [30, 31]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    eager = LLM(str(path), kernels="triton", **options)
    want = [output.outputs[0].token_ids for output in eager.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)]
    maker = FakeGraphs()
    monkeypatch.setattr(factory, "graph_maker", lambda device: maker)
    replaying = LLM(str(path), kernels="triton", max_context_len_to_capture=32, **options)
    assert (maker.num_captured, maker.num_replayed) == (2, 1)  # with the token that shows whether the model gives numbers
    got = replaying.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in got] == want
    assert (maker.num_captured, maker.num_replayed) == (2, 1 + 3)
    LLM(str(path), kernels="triton", enforce_eager=True, **options)
    assert maker.num_captured == 2
