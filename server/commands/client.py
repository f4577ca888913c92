"""What the commands that talk to a running server have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import typer

from pagestream.engine import StartError

Url = Annotated[str, typer.Option("--url", envvar="PAGESTREAM_URL", help="The server, without /v1.")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="PAGESTREAM_API_KEY", help="The key that it asks for.")]
Model = Annotated[str | None, typer.Option("--model", help="A name that it serves; default: the first.")]

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(10, read=None)  # an answer may be long in coming


def headers_for(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@contextmanager
def connected(url: str, key: str | None) -> Iterator[httpx.Client]:
    """A client of this server.  Raises StartError, in one line, where it can't be reached or refuses."""
    with httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers_for(key), timeout=TIMEOUT) as client:
        try:
            yield client
        except httpx.HTTPStatusError as error:
            raise StartError(refusal(error.response)) from None
        except httpx.HTTPError as error:
            hint = "; `pagestream serve` starts a server, --url names another" if isinstance(error, httpx.ConnectError) else ""
            raise StartError(f"{url} can't be reached or has hung up: {error}{hint}") from None


def refusal(response: httpx.Response) -> str:
    """The server's own words where it has some."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def first_model(client: httpx.Client) -> str:
    """Raises StartError where the server lists none."""
    response = client.get("/v1/models").raise_for_status()
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise StartError(f"{client.base_url} lists no model") from None


def stream(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The JSON of each event, to the stream's end.  Raises HTTPStatusError, and StartError for an error within the stream."""
    with client.stream(method, path, json=body) as response:
        if response.is_error:
            response.read()
            response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise StartError(event["error"]["message"])
            yield event
