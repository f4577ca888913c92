"""From the journal back to answers: what an earlier process had begun goes on, and gives the tokens it would have given."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from pagestream.engine import Begun, ClientError, SamplingParams
from pagestream.server.answer import Answer
from pagestream.server.body import check
from pagestream.server.chat import ChatAnswer, prepare
from pagestream.server.completions import CompletionAnswer
from pagestream.server.conversation import ChatRequest
from pagestream.server.generation import admit
from pagestream.server.journal import Journal
from pagestream.server.journal_file import DEADLINE, JournalledAnswer, JournalledRequest
from pagestream.server.protocol import CompletionRequest
from pagestream.server.settings import ServerSettings
from pagestream.server.shared import SharedAnswer
from pagestream.server.state import ServerState

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

log = logging.getLogger(__name__)

LEAST_TIMEOUT_S = 0.001  # of a deadline that has passed meanwhile: the answer ends with what there is


class Restorer:
    """Brings answers of the journal back among the shared ones."""

    def __init__(self, state: ServerState, journal: Journal):
        self._state = state
        self._journal = journal

    async def resume_unfinished(self) -> None:
        """At the start.  Each goes on for as long as a stream without a reader does; then it is ended.

        One that this server does not take, having other limits or templates than the one before, is left: nobody else's fault.
        """
        cut_off = [record for record in await asyncio.to_thread(self._journal.unfinished) if record.is_sound]
        num_begun = 0
        for record in cut_off:
            try:
                num_begun += await self._begin(record) is not None
            except ClientError as error:
                log.warning("%s was cut off and can't go on: %s", record.id, error)
        if cut_off:
            log.info("%d answers that were cut off go on", num_begun)

    async def find(self, answer_id: str) -> SharedAnswer | None:
        """One that an earlier process had finished, or nobody had come back for in time."""
        record = await asyncio.to_thread(self._journal.load, answer_id)
        if record is None or not record.is_resumable or not record.is_sound:
            return None
        return await self._begin(record)

    async def _begin(self, record: JournalledAnswer) -> SharedAnswer | None:
        state = self._state
        answer = await rebuild(record, state.engine, state.settings)
        if not can_be_told(record, answer.params):
            return None
        if known := state.shared_answers.known(record.id):  # two may ask at the same time
            return known
        begun = [begun_of(request, answer.params) for request in record.requests]
        prompts: list[str | list[int]] = [list(request.prompt_token_ids) for request in record.requests]
        param = "messages"
        if isinstance(answer.request, CompletionRequest):
            prompts, param = list(answer.request.prompt), "prompt"  # with its text, which may have to be echoed
        state.metrics.resumptions["restart"].inc()
        return state.shared_answers.begin(answer, lambda: admit(state, answer, prompts, param, begun), None)


async def rebuild(record: JournalledAnswer, engine: AsyncLLMEngine, settings: ServerSettings) -> Answer:
    """The answer as it was when its request came, under the same id."""
    answer: Answer
    if record.kind == CompletionAnswer.object_name:
        answer = CompletionAnswer(check(CompletionRequest, record.body), engine)
    else:
        # Rendered again only to know how to read the answer: a template may look at the date, and the prompt is what it was.
        answer, _ = await prepare(ChatAnswer, check(ChatRequest, record.body), engine, settings)
    answer.id, answer.created = record.id, record.created
    # What had ended is not in a hurry: some of it has to be computed again.
    answer.timeout_s = max(LEAST_TIMEOUT_S, left_s(record)) if record.timeout_s is not None and record.is_cut_off else None
    return answer


def left_s(record: JournalledAnswer) -> float:
    """Until its deadline."""
    return math.inf if record.timeout_s is None else record.timeout_s - (time.time() - record.at_s)


def begun_of(request: JournalledRequest, params: SamplingParams) -> Begun:
    """With the tokens it has where they are all that is to be told; otherwise it is computed anew, to the same end."""
    token_ids = request.token_ids.get(0, ()) if tokens_tell_all(params) else ()
    return Begun(request.seed, token_ids, is_over=request.finish_reason == DEADLINE)


def tokens_tell_all(params: SamplingParams) -> bool:
    return params.num_sequences == 1 and params.logprobs is None and params.prompt_logprobs is None


def can_be_told(record: JournalledAnswer, params: SamplingParams) -> bool:
    """What a deadline ended can't be computed anew to the same end, since nothing says after which token it came."""
    is_late = record.is_cut_off and left_s(record) <= 0
    return tokens_tell_all(params) or not (is_late or any(request.finish_reason == DEADLINE for request in record.requests))
