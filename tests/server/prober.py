"""Asks a server's probes until its standard input ends, then prints what it found.  Does nothing else, so its times are the server's."""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

PATHS = ("/livez", "/readyz")


def probe(port: int, path: str) -> tuple[float, int]:
    """Seconds from connecting to the whole answer, and its status."""
    started_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
    finally:
        connection.close()
    return time.monotonic() - started_s, response.status


def main() -> None:
    port, between_s = int(sys.argv[1]), float(sys.argv[2])
    all_s: dict[str, list[float]] = {path: [] for path in PATHS}
    statuses: dict[str, set[int]] = {path: set() for path in PATHS}
    print("probing", flush=True)
    while not select.select([sys.stdin], [], [], between_s)[0]:
        for path in PATHS:
            took_s, status = probe(port, path)
            all_s[path].append(took_s)
            statuses[path].add(status)
    print(json.dumps({"all_s": all_s, "statuses": {path: sorted(found) for path, found in statuses.items()}}), flush=True)


if __name__ == "__main__":
    main()
