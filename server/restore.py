"""From the journal back to answers: what an earlier process had begun goes on, and gives the tokens it would have given."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from pagestream.engine import Begun, SamplingParams
from pagestream.server.answer import Answer
from pagestream.server.body import check
from pagestream.server.chat import prepare
from pagestream.server.completions import CompletionAnswer
from pagestream.server.generation import admit
from pagestream.server.journal import Journal, JournalledAnswer, JournalledRequest
from pagestream.server.metrics import Metrics
from pagestream.server.protocol import ChatRequest, CompletionRequest
from pagestream.server.settings import ServerSettings
from pagestream.server.shared import SharedAnswer, SharedAnswers

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

log = logging.getLogger(__name__)

LEAST_TIMEOUT_S = 0.001  # of a deadline that has passed meanwhile: the answer ends with what there is


class Restorer:
    """Brings answers of the journal back among the shared ones."""

    def __init__(
        self, journal: Journal, engine: AsyncLLMEngine, settings: ServerSettings, answers: SharedAnswers, metrics: Metrics
    ):
        self._metrics = metrics
        self._journal = journal
        self._engine = engine
        self._settings = settings
        self._answers = answers

    async def resume_unfinished(self) -> None:
        """At the start.  Each goes on for as long as a stream without a reader does; then it is ended."""
        cut_off = await asyncio.to_thread(self._journal.unfinished)
        for record in cut_off:
            if record.is_sound:
                await self._begin(record)
        if cut_off:
            log.info("%d answers that were cut off go on", len(cut_off))

    async def find(self, answer_id: str) -> SharedAnswer | None:
        """One that an earlier process had finished, or nobody had come back for in time."""
        record = await asyncio.to_thread(self._journal.load, answer_id)
        if record is None or not record.is_resumable or not record.is_sound:
            return None
        return await self._begin(record)

    async def _begin(self, record: JournalledAnswer) -> SharedAnswer:
        answer = await rebuild(record, self._engine, self._settings)
        if known := self._answers.known(record.id):  # two may ask at the same time
            return known
        begun = [begun_of(request, answer.params) for request in record.requests]
        prompts: list[str | list[int]] = [list(request.prompt_token_ids) for request in record.requests]
        param = "messages"
        if isinstance(answer.request, CompletionRequest):
            prompts, param = list(answer.request.prompt), "prompt"  # with its text, which may have to be echoed
        self._metrics.resumptions["restart"].inc()
        return self._answers.begin(answer, lambda: admit(self._engine, answer, prompts, param, self._journal, begun), None)


async def rebuild(record: JournalledAnswer, engine: AsyncLLMEngine, settings: ServerSettings) -> Answer:
    """The answer as it was when its request came, under the same id."""
    answer: Answer
    if record.kind == CompletionAnswer.object_name:
        completion = check(CompletionRequest, record.body)
        answer = CompletionAnswer(completion, engine, completion.model)
    else:
        # Rendered again only to know how to read the answer: a template may look at the date, and the prompt is what it was.
        answer, _ = await prepare(check(ChatRequest, record.body), engine, settings)
    answer.id, answer.created = record.id, record.created
    if record.timeout_s is not None:
        answer.timeout_s = max(LEAST_TIMEOUT_S, record.timeout_s - (time.time() - record.at_s))
    return answer


def begun_of(request: JournalledRequest, params: SamplingParams) -> Begun:
    """With the tokens it has where they are all that is to be told; otherwise it is computed anew, to the same end."""
    is_plain = params.num_sequences == 1 and params.logprobs is None and params.prompt_logprobs is None
    return Begun(request.seed, request.token_ids.get(0, ()) if is_plain else ())
