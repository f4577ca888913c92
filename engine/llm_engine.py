"""One step after the other: schedule, execute, judge, commit.  The offline and the async door both drive this."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from pagestream.engine.block_ages import BlockAges
from pagestream.engine.core.errors import InvalidRequest, RequestFailed
from pagestream.engine.core.outputs import FinishReason, RequestOutput
from pagestream.engine.core.request import Request
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.scheduler import Scheduler
from pagestream.engine.core.step_plan import StepPlan
from pagestream.engine.engine_args import EngineArgs
from pagestream.engine.intake import Intake, RequestOptions
from pagestream.engine.isolation import execute_isolated
from pagestream.engine.metrics import EngineListener, RequestInfo, StepStats
from pagestream.engine.output_processor import OutputProcessor
from pagestream.engine.runner.executor import Executor
from pagestream.engine.watch import RequestWatch, StepTimes

logger = logging.getLogger(__name__)


class LLMEngine:
    """Single-threaded: whoever calls, calls from one thread at a time.  Between steps its state is consistent."""

    def __init__(
        self,
        *,
        intake: Intake,
        scheduler: Scheduler,
        executor: Executor,
        outputs: OutputProcessor,
        listener: EngineListener | None = None,
        clock: Callable[[], float] = time.monotonic,
        block_bytes: int = 0,
        count_compiled: Callable[[], int] = lambda: 0,
    ):
        """count_compiled: kernels compiled since all that should be needed were."""
        self.count_compiled = count_compiled
        self.intake = intake
        self.scheduler = scheduler
        self.executor = executor
        self._outputs = outputs
        self._clock = clock
        ages = None
        if listener is not None:
            ages = BlockAges(scheduler.blocks.device.num_blocks, clock)
            scheduler.blocks.device.observer = ages
        self.watch = RequestWatch(listener, clock, block_bytes, ages, count_compiled)
        self.observer: Callable[[StepPlan, StepStats], None] | None = None  # told of each step, while somebody looks on

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, listener: EngineListener | None = None) -> LLMEngine:
        """Load the model and size the cache.  Raises StartError."""
        from pagestream.engine.factory import build_engine

        return build_engine(engine_args.to_config(), listener).engine

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> None:
        """Check and queue one request.

        Raises ClientError, naming the field, and RequestFailed where its text can't be begun; then nothing was queued.
        """
        if self.scheduler.group(request_id) is not None:
            raise InvalidRequest(f"request_id {request_id!r} is in use", param="request_id")
        params = sampling_params or SamplingParams()
        told = self.admit(self.intake.make_request(request_id, prompt, params, arrival_time_s=self._clock(), options=options))
        if told and told[-1].error is not None:
            raise RequestFailed(told[-1].error)

    def admit(self, request: Request) -> list[RequestOutput]:
        """Queue a request that the intake has checked; returns what tokens that an earlier engine generated have to tell.

        One whose text can't be begun fails by itself: then that is all there is to return.
        """
        group = self.scheduler.add(request)
        self.watch.arrived(request, group.timeline)
        try:
            outputs = self._outputs.add(request, group.sequences[0].seq_id)
        except Exception as error:
            logger.exception("request %s: its text could not be begun", request.request_id)
            failed = self._end(request.request_id, FinishReason.ERROR, f"{type(error).__name__}: {error}")
            return [] if failed is None else [failed]
        if outputs and outputs[-1].finished:
            reason = outputs[-1].outputs[0].finish_reason or FinishReason.STOP
            self.scheduler.finish(request.request_id, reason)
            outputs[-1] = self.watch.ended(outputs[-1], reason)
        elif request.is_over and (last := self._end(request.request_id, FinishReason.DEADLINE)) is not None:
            outputs.append(last)
        return outputs

    def abort_request(
        self, request_id: str | Sequence[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[RequestOutput]:
        """End one request or several now; returns their last outputs.  Those that are not here are passed over."""
        request_ids = [request_id] if isinstance(request_id, str) else request_id
        ended = [self._end(each, reason) for each in request_ids]
        return [output for output in ended if output is not None]

    def request_info(self, request_id: str) -> RequestInfo | None:
        """Where a request stands, also for some time after its end; None if it is not known (any more)."""
        group = self.scheduler.group(request_id)
        return self.watch.info(request_id, "finished" if group is None else group.status.value)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return self.scheduler.num_unfinished

    # ---- the heart --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the news of every request that has some.

        A request whose own computation fails ends with FinishReason.ERROR and `error` set; the others go on as if it had
        never been there.  Raises EngineDead if nothing can be computed any more.
        """
        if not self.has_unfinished_requests():
            return []
        times = StepTimes(self._clock)
        plan = self.scheduler.schedule()
        times.scheduled()
        self._note_first_steps(plan)
        result = execute_isolated(self.executor, plan)
        times.executed(result.forward_s)
        judgement = self._outputs.judge(plan, result)
        times.judged()
        # Before the commit, which passes over who has ended: blocks of a row that failed were never filled, and nobody may find
        # them in the prefix cache.
        outputs = judgement.outputs + self._end_failed(judgement.failed)
        self.scheduler.commit(plan, judgement.verdicts)
        times.committed()
        stats = self.watch.step_stats(self.scheduler, times, plan.num_tokens, judgement.failed)
        if self.observer is not None:
            self.observer(plan, stats)
        return self.watch.step_done(outputs, stats)

    def stats(self) -> StepStats:
        """The gauges of this moment."""
        return self.watch.step_stats(self.scheduler)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _note_first_steps(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            group = self.scheduler.group_of(admitted.seq_id)
            request_id = group.request.request_id
            if self.watch.first_scheduled(request_id):
                self._outputs.set_num_cached(request_id, group.timeline.num_cached_tokens)

    def _end_failed(self, failed: dict[int, str]) -> list[RequestOutput]:
        ended = {self.scheduler.group_of(seq_id).request.request_id: why for seq_id, why in failed.items()}
        outputs = [self._end(request_id, FinishReason.ERROR, why) for request_id, why in ended.items()]
        return [output for output in outputs if output is not None]

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> RequestOutput | None:
        group = self.scheduler.finish(request_id, reason)
        output = self._outputs.end(request_id, reason, error)
        if output is not None and group is not None:
            return self.watch.ended(output, reason)
        return output
