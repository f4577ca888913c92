"""Executes plans on one device: copies, forward, logits of the rows that need them, sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pagestream.engine.core.step_plan import NOT_FINITE, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from pagestream.engine.models.base import CausalLM
from pagestream.engine.runner.batch import Batch, TableRows, build_batch
from pagestream.engine.runner.fault_injection import FaultInjector
from pagestream.engine.runner.forward_timer import ForwardTimer
from pagestream.engine.runner.kv_cache import KVCache
from pagestream.engine.runner.pooling import pooled_sums
from pagestream.engine.sampling.choosing import Best, choose_best
from pagestream.engine.sampling.logprobs import prompt_logprobs
from pagestream.engine.sampling.sampler import Drawn, Sampler, scored_rows
from pagestream.kernels.transfer import HostLink

if TYPE_CHECKING:  # it needs Triton, which is not everywhere
    from pagestream.engine.runner.cuda_graphs import DecodeGraphs

SCORED_ROWS_AT_ONCE = 64  # a row of logits is large, and a long prompt has thousands


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A step's prompt logprobs: a sequence is in one of the two."""

    entries: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by seq_id
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, seq_id: int, entries: tuple[TokenLogprobs, ...]) -> None:
        # One logit that is no number leaves its whole row without any.
        if any(math.isnan(entry.logprob) for entry in entries):
            self.failed[seq_id] = NOT_FINITE
        else:
            self.entries[seq_id] = entries


class ModelRunner:
    """An Executor.  Owns the device's tensors; what it writes is the same however often a plan is run."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        sampler: Sampler,
        *,
        block_size: int,
        device: torch.device,
        link: HostLink,
        injector: FaultInjector | None = None,
        graphs: DecodeGraphs | None = None,
        best_tokens: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ):
        """graphs: decode steps that they serve are replayed.  best_tokens: from hidden states [R, hidden], the first of the logits
        of each row and its score; serves steps of greedy rows.  Neither where faults are injected, which happen between the parts.
        """
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._block_size = block_size
        self._table_rows = TableRows()
        self._device = device
        self._link = link
        self._injector = injector
        self._graphs = graphs if injector is None else None
        self._best_tokens = best_tokens if injector is None else None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        timer = ForwardTimer(self._device)
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._cache.copy(plan.copies)
        self._meet(plan)
        if not plan.scheduled:
            return StepResult(plan.step_id, {})
        if self._graphs is not None and self._graphs.serves(plan):
            return self._replay(self._graphs, plan, timer)
        if self._injector is not None:
            self._injector.strike("forward", plan.scheduled)
        batch = build_batch(plan, self._block_size, self._link, self._table_rows)
        hidden = self._model.forward(batch.input_ids, self._cache.layers, batch.metadata)
        scored = self._score_prompts(batch, hidden)
        sums = pooled_sums(hidden, batch.pooled)
        failed = sums.failed | scored.failed
        if not batch.sampling:
            timer.stop()
            return StepResult(plan.step_id, {}, scored.entries, failed=failed, pooled=sums.pooled, forward_s=timer.seconds())
        if len(batch.sampling) < len(hidden):
            hidden = hidden.index_select(0, batch.sampling_rows)  # indexing would wake threads of torch, which then wait busily
        drawn = self._draw(hidden, batch.sampling, timer)
        failed |= drawn.failed
        return StepResult(plan.step_id, drawn.sampled, scored.entries, drawn.candidates, failed, sums.pooled, timer.seconds())

    def _draw(self, hidden: torch.Tensor, rows: Sequence[ScheduledSequence], timer: ForwardTimer) -> Drawn:
        if self._best_tokens is not None:
            self._sampler.observe_rows(rows)
            if self._sampler.are_greedy(rows):
                token_ids, scores = self._best_tokens(hidden)
                timer.stop()
                not_finite = [index for index, score in enumerate(scores.tolist()) if not math.isfinite(score)]
                return Drawn.of_plain_rows(choose_best(Best(token_ids.tolist(), not_finite), rows))
        logits = self._model.logits(hidden)
        timer.stop()
        if self._injector is not None:
            self._injector.strike("sample", rows)
            self._injector.spoil(logits, rows)
        return self._sampler.sample(logits, rows)

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan, timer: ForwardTimer) -> StepResult:
        rows = plan.scheduled
        params = self._sampler.observe_rows(rows)
        replayed = graphs.run(rows, params)
        timer.stop()
        if self._sampler.are_unchanged(rows):
            drawn = self._sampler.drawn(rows, params, replayed.choice(scored_rows(params)))
        else:
            # The graph's draw is thrown away: the lists and masks for another are made while the device computes the logits.
            drawn = self._sampler.sample(replayed.logits, rows)
        return StepResult(plan.step_id, drawn.sampled, {}, drawn.candidates, drawn.failed, forward_s=timer.seconds())

    def _meet(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            self._sampler.admit(admitted)
            if self._injector is not None:
                self._injector.admit(admitted)
        for seq_id in plan.retired_seq_ids:
            self._sampler.retire(seq_id)
            if self._injector is not None:
                self._injector.retire(seq_id)

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor) -> PromptScores:
        scored = PromptScores()
        for row, first in batch.scored:
            num_top = self._sampler.params(row.seq_id).prompt_logprobs or 0
            entries: tuple[TokenLogprobs, ...] = ()
            for start in range(0, len(row.scored_token_ids), SCORED_ROWS_AT_ONCE):
                token_ids = row.scored_token_ids[start : start + SCORED_ROWS_AT_ONCE]
                rows = hidden[first + start : first + start + len(token_ids)]
                entries += prompt_logprobs(self._model.logits(rows), token_ids, num_top)
            scored.add(row.seq_id, entries)
        return scored
