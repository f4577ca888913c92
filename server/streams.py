"""GET /v1/streams/{id}: a resumable stream goes on where its reader was cut off."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Request, Response

from pagestream.engine import InvalidRequest
from pagestream.server.errors import HttpError
from pagestream.server.event_log import position_of
from pagestream.server.shared import SharedStream
from pagestream.server.state import server_state


async def get_stream(
    http: Request,
    stream_id: str,
    last_event_id: Annotated[
        str | None, Header(alias="Last-Event-ID", description="The id of the last event that arrived; without it, all events.")
    ] = None,
) -> Response:
    state = server_state(http)
    shared = await state.shared_answers.find(stream_id)
    if shared is None:
        raise HttpError(
            404, "no such stream: it never was resumable, or is not kept any more", param="stream_id", code="stream_not_found"
        )
    http.state.answer_id = shared.id
    shared.attach()
    try:
        await shared.until_admitted()
        position = position_of(last_event_id, shared.num_lanes)
        if shared.is_done and shared.is_beyond(position):
            raise InvalidRequest("Last-Event-ID names no event of this stream", param="Last-Event-ID")
    except BaseException:
        shared.detach()
        raise
    if shared.is_done and shared.is_end(position):
        shared.detach()
        return Response(status_code=204)  # tells a browser not to come back
    state.metrics.resumptions["reader"].inc()
    return SharedStream(shared, state.settings, position=position)
