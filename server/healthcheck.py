"""`python -m pagestream.server.healthcheck`: whether the server in this container is healthy, told by the exit code.

What an image asks every few seconds, so it imports next to nothing.  Options that stand on the command line alone can't be seen from
here but by asking: over plain HTTP first, then over TLS, whose certificate need not be for this address.
"""

from __future__ import annotations

import os
import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection

TIMEOUT_S = 2.0


def is_healthy(port: int, host: str = "127.0.0.1") -> bool:
    if status_at(HTTPConnection(host, port, timeout=TIMEOUT_S)) == 200:
        return True
    anybody = ssl.create_default_context()
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE
    secure = HTTPSConnection(host, port, timeout=TIMEOUT_S, context=anybody)
    try:
        secure.connect()
    except OSError:
        return False
    # None: it lets in only those who show a certificate, and has said so by hanging up.
    return status_at(secure) in (200, None)


def status_at(connection: HTTPConnection) -> int | None:
    """Of /health; None where the connection ended without an answer, 0 where none came in time."""
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except TimeoutError:
        return 0
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_healthy(int(os.environ.get("PAGESTREAM_PORT", "8000"))) else 1)
