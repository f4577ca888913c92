"""`pagestream serve` around an engine without a model, as a process of its own for the tests of signals and exit codes.

Prints the port.  With `--die-after S` the engine dies so many seconds after its start, with `--stop-hangs` it can't be stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

from pagestream.server.app import create_app
from pagestream.server.metrics import Metrics
from pagestream.server.serving import bind, serve_until_ended
from pagestream.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine


class MortalEngine(FakeEngine):
    die_after_s: float | None = None
    stop_hangs = False

    async def start(self) -> None:
        await super().start()
        if self.die_after_s is not None:
            asyncio.get_running_loop().call_later(self.die_after_s, self.die)

    async def stop(self) -> None:
        if self.stop_hangs:
            time.sleep(60)  # as a step that never returns would hold up whoever waits for its thread
        await super().stop()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drain-timeout", type=float, default=10)
    parser.add_argument("--die-after", type=float)
    parser.add_argument("--stop-hangs", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", stream=sys.stderr)
    metrics = Metrics("m")
    engine = MortalEngine(metrics, step_s=0.01, context=100_000)
    engine.die_after_s, engine.stop_hangs = options.die_after, options.stop_hangs
    with bind("127.0.0.1", 0) as bound:
        print(bound.getsockname()[1], flush=True)
        app = create_app(engine, ServerSettings(("m",)), metrics)  # type: ignore[arg-type]
        return serve_until_ended(app, engine, bound, options.drain_timeout)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
