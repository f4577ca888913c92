"""`pagestream serve` around an engine without a model, as a process of its own for the tests of signals and exit codes.

Prints its address.  On SIGUSR1 the engine dies; with `--stop-hangs` it can't be stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time

from pagestream.server.app import create_app
from pagestream.server.metrics import Metrics
from pagestream.server.serving import bind, serve_until_ended
from pagestream.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine


class MortalEngine(FakeEngine):
    stop_hangs = False

    async def start(self) -> None:
        await super().start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.die)

    async def stop(self) -> None:
        if self.stop_hangs:
            time.sleep(600)  # as a step that never returns would hold up whoever waits for its thread
        await super().stop()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drain-timeout", type=float, default=10)
    parser.add_argument("--stop-hangs", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", stream=sys.stderr)
    metrics = Metrics("m")
    engine = MortalEngine(metrics, step_s=0.01, context=100_000)
    engine.stop_hangs = options.stop_hangs
    with bind("127.0.0.1", 0) as bound:
        print(f"serves at http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
        settings = ServerSettings(("m",), drain_timeout_s=options.drain_timeout)
        app = create_app(engine, settings, metrics)  # type: ignore[arg-type]
        return serve_until_ended(app, engine, bound, settings)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
