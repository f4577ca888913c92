"""A server as a process of its own, and a prober as another, so that neither is measured by a process that is busy itself."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Spawned:
    process: subprocess.Popen[str]
    client: httpx.Client
    port: int


@contextlib.contextmanager
def started(module: str, *arguments: str) -> Iterator[Spawned]:
    """A module run as a server whose first line ends with its address, once it is ready; killed at the end."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rpartition(" at ")[2].strip().removesuffix("/v1")
            with httpx.Client(base_url=url, timeout=60) as client:
                wait_until_ready(process, client)
                yield Spawned(process, client, httpx.URL(url).port or 80)
        finally:
            process.kill()


def wait_until_ready(process: subprocess.Popen[str], client: httpx.Client) -> None:
    end_s = time.monotonic() + 60
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        with contextlib.suppress(httpx.TransportError):
            if client.get("/readyz").status_code == 200:
                return
        assert time.monotonic() < end_s, "the server did not become ready"
        time.sleep(0.02)


def serving(model: Path | str, *flags: str, cpu_threads: int | None = 1) -> contextlib.AbstractContextManager[Spawned]:
    """`pagestream serve` of this model under the name m."""
    threads = () if cpu_threads is None else ("--cpu-threads", str(cpu_threads))
    return started("pagestream.server", "serve", str(model), "--served-model-name", "m", "--port", "0", *flags, *threads)


@dataclass(slots=True)
class Probes:
    """What a prober has found, once it was told to end."""

    all_s: dict[str, list[float]]  # by path, in the order of the rounds
    statuses: dict[str, list[int]]

    @property
    def num_rounds(self) -> int:
        return min(map(len, self.all_s.values()), default=0)

    def sorted_s(self) -> list[float]:
        return sorted(took_s for found in self.all_s.values() for took_s in found)


@contextlib.contextmanager
def probing(port: int, between_s: float = 0.05) -> Iterator[Probes]:
    """Ask /livez and /readyz again and again, each on a connection of its own, as a supervisor does; read the result afterwards."""
    found = Probes({}, {})
    command = [sys.executable, "-m", "tests.server.prober", str(port), str(between_s)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "probing\n"
            yield found
            process.stdin.close()
            told = json.loads(process.stdout.readline())
        finally:
            process.kill()
    found.all_s, found.statuses = told["all_s"], told["statuses"]
