"""The tokenizer's doors, the list of parameters, and who may come in by which transport."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from pagestream.engine import StartError
from pagestream.server.args import keys_in
from pagestream.server.conversation import ChatRequest, Message
from pagestream.server.healthcheck import is_healthy
from pagestream.server.messages.wire import Conversation
from pagestream.server.responses_api.wire import ResponsesRequest
from pagestream.server.serving import bind, bind_unix, check_tls
from pagestream.server.settings import Tls
from pagestream.server.tokenize import TokenizeRequest
from tests.server.conftest import Live, events_of, refusal_of


@pytest.mark.parametrize("text", ["Hello", "京都 👩‍👧", "", "a\n" * 1000])
def test_tokens_and_back(live: Live, text):
    body = live.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert body["tokens"] == list(text.encode())
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == live.engine.max_model_len
    assert live.post("/detokenize", tokens=body["tokens"]).json() == {"prompt": text}


ASKED = [{"role": "user", "content": "Name a fruit."}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "Fig."}]
TOOL = {"type": "function", "function": {"name": "f", "description": "Fruits", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": ASKED},
        {"messages": ASKED, "tools": [TOOL]},
        {"messages": ASKED + CALLED, "tools": [TOOL], "chat_template_kwargs": {"a": 1}},
        {"messages": [*ASKED, {"role": "assistant", "content": "A fi"}], "continue_final_message": True},
        {"messages": ASKED, "add_generation_prompt": False},
    ],
)
def test_a_conversation_has_the_tokens_that_chat_counts(live: Live, monkeypatch: pytest.MonkeyPatch, fields):
    monkeypatch.setattr(live.engine, "chat_template", "messages")  # which shows no tools: a turn of ours does
    told = live.post("/tokenize", **fields).json()
    usage = live.post("/v1/chat/completions", **fields, max_tokens=1).json()["usage"]
    assert told["count"] == usage["prompt_tokens"]
    text = live.post("/detokenize", tokens=told["tokens"]).json()["prompt"]
    assert ("Fruits" in text) == ("tools" in fields)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": ASKED, "tools": [TOOL, TOOL]}, "tools"),
        ("/tokenize", {"messages": ASKED, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
def test_refusals_name_the_field(live: Live, path, fields, param):
    assert refusal_of(live.post(path, **fields))["param"] == param


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})])
def test_other_models_are_not_here(live: Live, path, fields):
    assert refusal_of(live.client.post(path, json={"model": "nope", **fields}), 404)["code"] == "model_not_found"


def test_every_parameter_is_listed_with_its_range(live: Live):
    endpoints = live.client.get("/v1/parameters").json()["endpoints"]
    completions = endpoints["/v1/completions"]
    assert completions["fields"]["prompt"]["required"] is True
    temperature = completions["fields"]["temperature"]
    assert (temperature["required"], temperature["default"]) == (False, 1.0)
    assert {"minimum": 0, "maximum": 2}.items() <= temperature["anyOf"][0].items()
    assert completions["refused"]["suffix"] == {"allowed": [None, ""]}
    assert set(endpoints) >= {"/v1/chat/completions", "/tokenize", "/detokenize"}


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_every_route_but_the_public_ones_needs_a_key(start, root_path):
    live = start(api_keys=("one", "two"), root_path=root_path)
    for prefix in {"", root_path}:
        for path in ("/v1/models", "/v1/parameters", "/tokenize", "/v1/completions", "/nothing"):
            assert refusal_of(live.client.get(prefix + path), 401)["code"] == "invalid_api_key"
            for headers in ({"Authorization": "Bearer two"}, {"x-api-key": "one"}):
                assert live.client.get(prefix + path, headers=headers).status_code != 401
            for headers in ({"Authorization": "Basic one"}, {"x-api-key": "three"}, {"Authorization": "Bearer"}):
                assert live.client.get(prefix + path, headers=headers).status_code == 401
        for path in ("/health", "/livez", "/readyz", "/version", "/metrics", "/openapi.json"):
            assert live.client.get(prefix + path).status_code == 200, path
    described = live.client.get("/openapi.json").json()
    assert described.get("servers", [{"url": ""}]) == [{"url": root_path}]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/tokenize", "; did you mean /tokenize?"),
        ("/v1/v1/messages", "; did you mean /v1/messages?"),
        ("/v1/embeddings/", "; did you mean /v1/embeddings?"),
        ("/nothing", ""),
        ("/v1/nothing", ""),
        ("/v1", ""),
    ],
)
def test_a_base_address_with_v1_too_often_or_not_at_all_is_told_so(live: Live, path, hint):
    error = refusal_of(live.client.post(path, json={}), 404)
    assert error["message"] == f"Not Found: POST {path}{hint}"


def test_keys_come_from_a_file_too(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# ours\n one \n\ntwo\n")
    assert keys_in(str(path)) == ["one", "two"]
    for text in ("", "# none\n"):
        path.write_text(text)
        with pytest.raises(StartError, match="no key"):
            keys_in(str(path))
    with pytest.raises(StartError, match="can't be read"):
        keys_in(str(tmp_path / "missing"))


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def serve(bound: Any, **options: Any) -> tuple[uvicorn.Server, threading.Thread]:
    server = uvicorn.Server(uvicorn.Config(hello, log_config=None, lifespan="off", ws="none", **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    return server, thread


def test_a_unix_socket(tmp_path: Path):
    path = str(tmp_path / "sock")
    with bind_unix(path) as bound:
        server, thread = serve(bound)
        with httpx.Client(transport=httpx.HTTPTransport(uds=path, retries=20), timeout=60) as client:
            bound.listen()
            assert client.get("http://localhost/").text == "hi"
        with pytest.raises(StartError, match="can't listen"):
            bind_unix(path)
        server.should_exit = True
        thread.join(60)
    with bind_unix(path):  # left behind by a server that is gone
        assert Path(path).is_socket()
    Path(path).unlink()
    Path(path).write_text("a file of somebody's")
    with pytest.raises(StartError, match="can't listen"):
        bind_unix(path)


def test_a_containers_health_is_the_servers(start):
    live = start()
    assert is_healthy(live.port)
    live.on_loop(live.engine.die)
    assert not is_healthy(live.port)
    with bind("127.0.0.1", 0) as bound:  # where nobody listens
        assert not is_healthy(bound.getsockname()[1])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path):
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    check_tls(Tls(certificate, key))
    with bind("127.0.0.1", 0) as bound:
        server, thread = serve(bound, ssl_certfile=certificate, ssl_keyfile=key)
        bound.listen()
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(verify=context, timeout=60) as client:
            assert client.get(f"https://127.0.0.1:{bound.getsockname()[1]}/").text == "hi"
        assert is_healthy(bound.getsockname()[1])
        server.should_exit = True
        thread.join(60)
    with bind("127.0.0.1", 0) as bound:
        options = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": certificate}
        server, thread = serve(bound, **options, ssl_cert_reqs=ssl.CERT_REQUIRED)
        bound.listen()
        assert is_healthy(bound.getsockname()[1]), "who shows no certificate is sent away by a server that lives"
        server.should_exit = True
        thread.join(60)
    for bad in (Tls(certificate), Tls(certificate, str(tmp_path / "missing")), Tls(certificate, key, str(tmp_path / "missing"))):
        with pytest.raises(StartError, match="can't be used"):
            check_tls(bad)


@pytest.mark.parametrize("num_tokens", [0, 20])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_come_where_asked_for(live: Live, path, num_tokens):
    asked = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    fields = {**asked, "n": 2, "seed": 3, "max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
    whole = live.post(path, **fields).json()["choices"]
    parts: list[dict[str, list[int]]] = [{"token_ids": [], "prompt_token_ids": []} for _ in range(2)]
    for event in events_of(live.post(path, **fields, stream=True)):
        for choice in event["choices"]:
            for name, found in parts[choice["index"]].items():
                found += choice.get(name) or []
    assert [{name: choice[name] for name in parts[0]} for choice in whole] == parts
    assert all(len(choice["token_ids"]) == num_tokens and choice["prompt_token_ids"] for choice in whole)
    plain = live.post(path, **(fields | {"return_token_ids": False})).json()["choices"][0]
    assert "token_ids" not in plain


TURNS = [{"role": "user", "content": "Hi"}]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/tokenize": {"messages": TURNS},
}


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_a_conversation_is_read_and_planned_beside_the_event_loop(live: Live, monkeypatch, path):
    """A body's worth of turns or of tools takes a good part of a second, in which nobody else would have a turn."""
    threads = set()
    for owner, name in (
        (Conversation, "chat_fields"), (ResponsesRequest, "as_chat"), (TokenizeRequest, "as_chat"),
        (ChatRequest, "reply_plan"), (Message, "as_template_input"),
    ):  # fmt: skip

        def noted(*arguments: Any, work: Any = getattr(owner, name)) -> Any:
            threads.add(threading.get_ident())
            return work(*arguments)

        monkeypatch.setattr(owner, name, noted)
    assert live.post(path, **CONVERSATIONS[path]).status_code == 200
    assert threads
    assert live.on_loop(threading.get_ident) not in threads
