"""GET /v1/parameters: every field of every request, with its range, made from the wire types themselves."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from pagestream.server.conversation import ChatRequest
from pagestream.server.embeddings import EmbeddingRequest
from pagestream.server.fields import WireModel
from pagestream.server.messages.wire import CountTokensRequest, MessagesRequest
from pagestream.server.protocol import CompletionRequest
from pagestream.server.responses_api.wire import ResponsesRequest
from pagestream.server.tokenize import DetokenizeRequest, TokenizeRequest

ENDPOINTS: dict[str, type[WireModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def describe(wire: type[WireModel]) -> dict[str, Any]:
    """`fields` are JSON Schemas, `refused` has what is known but not served, with the values that are taken all the same."""
    schema = wire.model_json_schema()
    required = schema.get("required", [])
    return {
        "fields": {name: {**field, "required": name in required} for name, field in schema["properties"].items()},
        "refused": {name: {"allowed": [None, *values]} for name, values in sorted(wire.unsupported.items())},
        "$defs": schema.get("$defs", {}),
    }


async def get_parameters(http: Request) -> dict[str, Any]:
    return {"object": "parameters", "endpoints": {path: describe(wire) for path, wire in ENDPOINTS.items()}}
