"""Drives the scheduler with a model that is a function: the next token depends on the tokens before it, and on nothing else."""

import hashlib

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.errors import OutOfBlocks
from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.request import Request
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.core.stopping import Verdict

BLOCK_SIZE = 4


def make_request(request_id: str, prompt: list[int], max_tokens: int, *, n: int = 1, priority: int = 0, salt: str = "") -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(request_id, tuple(prompt), params, 0.0, max_tokens, seed=len(prompt), priority=priority, cache_salt=salt)


def next_token(token_ids, seed: int) -> int:
    digest = hashlib.blake2b(repr((list(token_ids), seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 50


class FakeRun:
    """A step at a time; the cache is simulated slot by slot, so that a wrong block shows as a wrong token."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.device: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.texts: dict[str, dict[int, list[int]]] = {}
        self.sequences: dict[int, tuple[list[int], int]] = {}
        self.num_steps = 0
        self.num_tokens = 0
        self.plans = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.texts[request.request_id] = {}

    def copy(self, source, target, copies) -> None:
        moved = [(copy.target, offset, source.get((copy.source, offset))) for copy in copies for offset in range(BLOCK_SIZE)]
        for block, offset, content in moved:
            target[block, offset] = content

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        assert plan.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        assert len(plan.scheduled) <= self.scheduler.limits.max_num_seqs
        self.copy(self.device, self.host, plan.swap_out)
        self.copy(self.host, self.device, plan.swap_in)
        self.copy(self.device, self.device, plan.copies)
        for admitted in plan.admitted:
            self.sequences[admitted.seq_id] = ([*admitted.prompt_token_ids, *admitted.output_token_ids], admitted.seed)
        verdicts = {}
        for row in plan.scheduled:
            verdicts |= self.compute(row)
        self.scheduler.commit(plan, verdicts)
        self.scheduler.blocks.check()

    def compute(self, row) -> dict[int, Verdict]:
        group = self.scheduler.group_of(row.seq_id)
        request = group.request
        history = []
        for position in range(row.start):
            history.append(self.device[row.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE][-1])
        for offset, token_id in enumerate(row.token_ids):
            position = row.start + offset
            history.append(token_id)
            self.device[row.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE] = tuple(history)
        if not row.samples and request.max_tokens == 0 and len(history) == len(request.prompt_token_ids):
            return {row.seq_id: Verdict((), FinishReason.LENGTH)}
        verdicts = {}
        for sample in row.samples:
            token_id = next_token(history, sample.seed)
            num_outputs = len(history) - len(request.prompt_token_ids) + 1
            texts = self.texts[request.request_id]
            texts.setdefault(sample.seq_id, []).append(token_id)
            ended = FinishReason.STOP if token_id == 0 else FinishReason.LENGTH if num_outputs >= request.max_tokens else None
            verdicts[sample.seq_id] = Verdict((token_id,), ended)
        return verdicts

    def run(self, max_steps: int = 100_000) -> None:
        while self.scheduler.num_unfinished:
            self.step()
            assert self.num_steps < max_steps, "no end"

    def answers(self, request_id: str) -> list[list[int]]:
        return [tokens for _, tokens in sorted(self.texts[request_id].items())]


def solo_answers(request: Request) -> list[list[int]]:
    """What the request would get with all the memory in the world and nobody else."""
    from pagestream.engine.core.seeds import seed_of_answer

    answers = []
    for index in range(request.sampling_params.num_sequences if request.max_tokens else 0):
        tokens: list[int] = []
        while len(tokens) < request.max_tokens:
            tokens.append(next_token([*request.prompt_token_ids, *tokens], seed_of_answer(request.seed, index)))
            if tokens[-1] == 0:
                break
        answers.append(tokens)
    return answers


class FailingManager(BlockManager):
    """A pool whose n-th taking fails, once."""

    def __init__(self, *args, fail_at: int, **options):
        super().__init__(*args, **options)
        self.num_taken_blocks = 0
        self.fail_at = fail_at
        allocate = self.device.allocate

        def failing():
            self.num_taken_blocks += 1
            if self.num_taken_blocks == self.fail_at:
                raise OutOfBlocks
            return allocate()

        self.device.allocate = failing
