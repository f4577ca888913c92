"""`pagestream chat` and `pagestream complete`: a running server, from the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from pagestream.engine import StartError
from pagestream.server.commands.client import DEFAULT_URL, Key, Model, Url, connected, first_model, stream

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Tokens to generate at most.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="The likeliest tokens with this share together.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed, the same answer.")]

HELP = "Enter sends; /clear forgets what was said, /quit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    model: Model = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
) -> None:
    """Talk with the model of a running server."""
    with connected(url, api_key) as client:
        body = given(model=model or first_model(client), max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            import readline  # noqa: F401  # line editing and history for input(), by being imported

            note(f"{body['model']} at {url}. {HELP}")
        opening = [{"role": "system", "content": system}] if system else []
        messages: list[dict[str, str]] = list(opening)
        while True:
            try:
                said = input("› " if is_terminal else "").strip()
            except (EOFError, KeyboardInterrupt):
                break
            if said in ("/quit", "/exit"):
                break
            if said == "/clear":
                messages = list(opening)
            elif said:
                messages.append({"role": "user", "content": said})
                request = {**body, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
                answer = show(stream(client, "POST", "/v1/chat/completions", request))
                messages.append({"role": "assistant", "content": answer})


def complete(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    model: Model = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
) -> None:
    """Let the model of a running server continue a text."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise StartError("there is no text to continue")
    with connected(url, api_key) as client:
        body = given(model=model or first_model(client), max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        request = {**body, "prompt": text, "stream": True, "stream_options": {"include_usage": True}}
        show(stream(client, "POST", "/v1/completions", request))


def given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def note(text: str) -> None:
    """Beside the answer, not in it: for people only."""
    if sys.stderr.isatty():
        typer.secho(text, err=True, dim=True)


def show(events: Iterable[dict[str, Any]]) -> str:
    """Print the answer as it comes; returns it, as far as it came before it was stopped."""
    parts: list[str] = []
    start_s, first_s, num_tokens = time.monotonic(), None, 0
    try:
        for event in events:
            for choice in event["choices"]:
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                first_s = first_s or time.monotonic()
                parts.append(text or "")
                sys.stdout.write(parts[-1])
                sys.stdout.flush()
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    except KeyboardInterrupt:
        note(" stopped")
    print()
    if first_s is not None and num_tokens > 1:
        pace = (num_tokens - 1) / max(1e-9, time.monotonic() - first_s)
        note(f"{num_tokens} tokens, the first after {first_s - start_s:.2f} s, then {pace:.1f} a second")
    return "".join(parts)
