"""Drives the scheduler with a model that is a function: the next token depends on the tokens before it, and on nothing else."""

import hashlib

from pagestream.engine.core.beam_search import Beam, BeamRules, advance
from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import PreemptionMode, SchedulerLimits, SchedulingPolicy
from pagestream.engine.core.errors import OutOfBlocks
from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.request import Request
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.core.seeds import seed_of_answer
from pagestream.engine.core.stopping import Verdict

BLOCK_SIZE = 4


def make_scheduler(
    num_blocks: int,
    *,
    swap: int = 0,
    budget: int = 16,
    max_num_seqs: int = 8,
    mode: PreemptionMode = PreemptionMode.AUTO,
    policy: SchedulingPolicy = SchedulingPolicy.FCFS,
    cache: bool = True,
) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK_SIZE, num_swap_blocks=swap, enable_prefix_caching=cache)
    return Scheduler(SchedulerLimits(max_num_seqs, budget, policy, mode), blocks)


def make_request(
    request_id: str, prompt: list[int], max_tokens: int, *, n: int = 1, beams: bool = False, priority: int = 0, salt: str = ""
) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens, use_beam_search=beams, temperature=0.0 if beams else 1.0)
    return Request(request_id, tuple(prompt), params, 0.0, max_tokens, seed=len(prompt), priority=priority, cache_salt=salt)


def next_token(token_ids, seed: int) -> int:
    digest = hashlib.blake2b(repr((list(token_ids), seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 50


def next_candidates(token_ids) -> list[tuple[int, float]]:
    """Some tokens with logprobs, likeliest first; the end, 0, is among them now and then."""
    return sorted(((next_token(token_ids, -place), -0.1 - next_token(token_ids, -99 - place) / 9) for place in range(12)), key=lambda one: -one[1])


def unique(candidates: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return list({token_id: (token_id, logprob) for token_id, logprob in reversed(candidates)}.values())[::-1]


def beam_rules(request: Request) -> BeamRules:
    return BeamRules.of(request.sampling_params, request.max_tokens, frozenset((0,)))


class FakeRun:
    """A step at a time; the cache is simulated slot by slot, so that a wrong block shows as a wrong token."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.device: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.texts: dict[str, dict[int, list[int]]] = {}
        self.num_known: dict[int, int] = {}  # by seq_id, tokens that a sampler would have seen
        self.beams: dict[str, tuple[dict[int, Beam], tuple[Beam, ...]]] = {}  # live ones by seq_id, and the answers
        self.num_steps = 0
        self.num_tokens = 0
        self.plans = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.texts[request.request_id] = {}
        if request.sampling_params.use_beam_search:
            first = self.scheduler.group(request.request_id).sequences[0]
            self.beams[request.request_id] = {first.seq_id: Beam()}, ()

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
            self.num_known[admitted.seq_id] = len(admitted.prompt_token_ids) + len(admitted.output_token_ids)
        verdicts = {}
        candidates: dict[str, dict[int, list]] = {}
        for row in plan.scheduled:
            if row.samples:
                assert row.start <= self.num_known[row.seq_id], "a sampler would miss tokens"
                self.num_known[row.seq_id] = max(self.num_known[row.seq_id], row.start + len(row.token_ids))
            verdicts |= self.compute(row, candidates)
        for request_id, found in candidates.items():
            rows = [row for row in plan.scheduled if row.seq_id in found]
            verdicts |= self.advance_beams(request_id, found, [sample.seq_id for row in rows for sample in row.samples[1:]])
        self.scheduler.commit(plan, verdicts)
        self.scheduler.blocks.check()

    def advance_beams(self, request_id: str, found: dict[int, list], unborn: list[int]) -> dict[int, Verdict]:
        live, answers = self.beams[request_id]
        assert found.keys() == live.keys(), "beams take their step together"
        rules = beam_rules(self.scheduler.group(request_id).request)
        step = advance(list(live.values()), answers, [found[seq_id] for seq_id in live], rules)
        parents, self.beams[request_id] = list(live), ({}, step.answers)
        if step.is_done:
            self.texts[request_id] = {place: list(answer.token_ids) for place, answer in enumerate(step.answers)}
            return dict.fromkeys(parents, Verdict((), FinishReason.STOP))
        verdicts: dict[int, Verdict] = {}
        for beam in step.live:
            parent = parents[beam.parent]
            seq_id = unborn.pop() if parent in verdicts else parent
            verdicts[seq_id] = Verdict(beam.token_ids[-1:], None, None if seq_id == parent else parent)
            self.beams[request_id][0][seq_id] = beam
        return {parent: Verdict((), FinishReason.STOP) for parent in parents} | verdicts

    def compute(self, row, candidates) -> dict[int, Verdict]:
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
        if request.sampling_params.use_beam_search:
            if row.samples:
                candidates.setdefault(request.request_id, {})[row.seq_id] = unique(next_candidates(history))
            return {}
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
    if request.sampling_params.use_beam_search:
        return solo_beams(request)
    answers = []
    for index in range(request.sampling_params.num_sequences if request.max_tokens else 0):
        tokens: list[int] = []
        while len(tokens) < request.max_tokens:
            tokens.append(next_token([*request.prompt_token_ids, *tokens], seed_of_answer(request.seed, index)))
            if tokens[-1] == 0:
                break
        answers.append(tokens)
    return answers


def solo_beams(request: Request) -> list[list[int]]:
    """The same with beams that hold lists and no blocks."""
    live, answers, is_done = (Beam(),), (), request.max_tokens == 0
    while not is_done:
        candidates = [unique(next_candidates([*request.prompt_token_ids, *beam.token_ids])) for beam in live]
        step = advance(live, answers, candidates, beam_rules(request))
        live, answers, is_done = step.live, step.answers, step.is_done
    return [list(answer.token_ids) for answer in answers]


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
