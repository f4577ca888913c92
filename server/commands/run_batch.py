"""`pagestream run-batch`: a file of requests to a file of answers, through a running server; run again, it goes on where it ended."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from pagestream.engine import StartError
from pagestream.server.commands.batch_file import Answers, BatchRequest, count_requests, read_requests
from pagestream.server.commands.client import DEFAULT_URL, TIMEOUT, Key, Url, connected, first_model, headers_for, refusal

AGAIN = (408, 409, 429, 500, 502, 503, 504)
MAX_WAIT_S = 30.0


def run_batch(
    input_file: Annotated[Path, typer.Option("-i", "--input", help="Requests, one JSON object a line: custom_id, url, body.")],
    output_file: Annotated[Path, typer.Option("-o", "--output", help="Answers, in the order in which they are ready.")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests under way at a time.")] = 64,
    retries: Annotated[int, typer.Option("--retries", min=0, help="Of a request that the server could not take.")] = 10,
) -> None:
    """Answer a file of requests in OpenAI's batch format.  Interrupted, it is run again and writes the rest."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    total = count_requests(input_file)
    with connected(url, api_key) as client:
        model = first_model(client)
        base_url = str(client.base_url)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Answers(output_file) as answers, Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, completed=len(answers), note="")
        batch = Batch(answers, base_url, api_key, model, retries)

        def answered() -> None:
            progress.update(task, completed=len(answers), note=f"{batch.num_failed} failed" if batch.num_failed else "")

        wanted = (request for request in read_requests(input_file) if not answers.has(request.custom_id))
        asyncio.run(batch.run(wanted, concurrency, answered))
    if batch.num_failed:
        failed = "1 request was" if batch.num_failed == 1 else f"{batch.num_failed:,} requests were"
        typer.echo(f"{failed} refused; the output has the status and the reason", err=True)
        raise typer.Exit(1)


class Batch:
    """Sends at most so many requests at a time, and reads no further ahead than that: memory is theirs, not the file's."""

    def __init__(self, answers: Answers, base_url: str, key: str | None, model: str, retries: int):
        self.num_failed = 0
        self._answers = answers
        self._base_url, self._key, self._model, self._retries = base_url, key, model, retries

    async def run(self, requests: Iterator[BatchRequest], concurrency: int, answered: Any) -> None:
        """Raises StartError when the server can't be reached any more; what was answered until then is written."""
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        options = {"base_url": self._base_url, "headers": headers_for(self._key), "timeout": TIMEOUT, "limits": limits}
        async with httpx.AsyncClient(**options) as client:  # type: ignore[arg-type]  # a dict of unlike values

            async def work() -> None:
                for request in requests:  # shared: each worker takes the next one
                    answer = await self._answer(client, request)
                    self._answers.add(request.custom_id, answer)
                    self.num_failed += answer["response"]["status_code"] != 200
                    answered()

            workers = [asyncio.create_task(work()) for _ in range(concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, client: httpx.AsyncClient, request: BatchRequest) -> dict[str, Any]:
        body = {"model": self._model, **request.body}
        for attempt in range(self._retries + 1):
            wait_s = min(MAX_WAIT_S, 0.25 * 2**attempt) * random.uniform(0.5, 1)
            try:
                response = await client.post(request.url, json=body)
            except httpx.TransportError as error:
                problem = f"{self._base_url} can't be reached: {error or type(error).__name__}"
            else:
                if response.status_code not in AGAIN or response.headers.get("x-should-retry") == "false":
                    return as_answer(response)
                problem = refusal(response)
                wait_s = min(MAX_WAIT_S, max(wait_s, retry_after_s(response)))
            if attempt < self._retries:
                await asyncio.sleep(wait_s)
        raise StartError(f"{problem}; what was answered is kept, run the same command again to go on")


def retry_after_s(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0


def as_answer(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = {"error": {"message": refusal(response)}}
    told = {"status_code": response.status_code, "request_id": response.headers.get("x-request-id", ""), "body": body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "response": told, "error": None}
