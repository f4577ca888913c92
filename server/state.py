"""What the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine
    from pagestream.server.journal import Journal
    from pagestream.server.key_limits import KeyLimits
    from pagestream.server.live import LiveFeed
    from pagestream.server.metrics import Metrics
    from pagestream.server.settings import ServerSettings
    from pagestream.server.shared import SharedAnswers


@dataclass(frozen=True, slots=True)
class ServerState:
    """Made with the application, as its `state.server`; what is in here is never replaced."""

    engine: AsyncLLMEngine
    settings: ServerSettings
    metrics: Metrics
    journal: Journal | None
    key_limits: KeyLimits
    shared_answers: SharedAnswers
    live: LiveFeed
    created: int  # Unix time of the start


def server_state(http: Request) -> ServerState:
    return http.app.state.server
