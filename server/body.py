"""A request's body: read within a limit, parsed as strict JSON, checked against its wire type.  Refusals name the field."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import json
import math
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pagestream.engine import InvalidRequest
from pagestream.server.errors import HttpError
from pagestream.server.fields import WireModel

MAX_JSON_DEPTH = 32
MAX_JSON_CONTAINERS = 1 << 16  # arrays and objects; a parser makes so many in a tenth of a second, in which nobody else has a turn
IDEMPOTENCY_KEY = "idempotency-key"
MAX_BYTES_ON_LOOP = 1 << 16  # takes about a millisecond

Wire = TypeVar("Wire", bound=WireModel)
Location = tuple[int | str, ...]


async def read_body(request: Request, wire: type[Wire], max_body_bytes: int) -> Wire:
    """The request's body as this wire type.

    Raises HttpError (413, 415), InvalidRequest, and starlette's ClientDisconnect where the client leaves meanwhile.
    """
    # One rule for all: JSON must be called JSON.  It also keeps other sites' pages off a local server, since a browser
    # sends this type across origins only after asking.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"Content-Type must be application/json, not {kind[:40]!r}", code="unsupported_media_type")
    raw = await read_limited(request, max_body_bytes)
    if IDEMPOTENCY_KEY in request.headers:
        request.state.body_digest = hashlib.sha256(raw).hexdigest()
    if len(raw) <= MAX_BYTES_ON_LOOP:
        return parse(raw, wire)
    return await asyncio.to_thread(parse, raw, wire)


def parse(raw: bytes, wire: type[Wire]) -> Wire:
    """Raises InvalidRequest."""
    fields = parse_object(raw)
    for name in [name for name in fields if name in wire.unsupported]:
        value = fields.pop(name)
        if value is not None and value not in wire.unsupported[name]:
            raise InvalidRequest(f"{name} is not supported yet", param=name, code="unsupported_parameter")
    checked = check(wire, fields)
    if b"NaN" in raw or b"Infinity" in raw:
        refuse_constants(fields)
    return checked


async def read_limited(request: Request, max_body_bytes: int) -> bytes:
    too_large = HttpError(
        413, f"the body is larger than {max_body_bytes} bytes", code="body_too_large", headers={"Connection": "close"}
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_body_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_body_bytes:
            raise too_large
    return bytes(body)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parses RFC 8259 JSON.  NaN and Infinity pass as floats, so that the field's own check can name the field."""
    if not raw.strip():
        raise InvalidRequest("the body is empty; a JSON object was expected", code="invalid_json")
    check_structure(raw)
    try:
        text = raw.decode("utf-8")
        value = json.loads(text)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}", code="invalid_json"
        ) from None
    except UnicodeError:
        raise InvalidRequest("the body is not JSON: its text is not valid Unicode", code="invalid_json") from None
    except ValueError:  # a number of thousands of digits
        raise InvalidRequest("the body is not JSON: a number has too many digits", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {type_name(value)}", code="invalid_json")
    return value


def refuse_constants(value: Any) -> None:
    """Where a field takes any value, as a template's arguments do, nothing else has refused them."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise InvalidRequest("NaN and Infinity are not JSON", code="invalid_json") from None


def check_structure(raw: bytes) -> None:
    """Depth and size of what a parser would build, told from the brackets outside of texts alone.  Raises InvalidRequest."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:  # as most bodies
        return
    characters = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.cumsum(characters == ord('"'), dtype=np.int32) % 2 == 0
    characters = characters[is_outside] | 0x20  # which makes [ a { and ] a }
    opened, closed = characters == ord("{"), characters == ord("}")
    if opened.sum() > MAX_JSON_CONTAINERS:
        raise InvalidRequest(f"the body holds more than {MAX_JSON_CONTAINERS} arrays and objects", code="invalid_json")
    if np.cumsum(opened.astype(np.int8) - closed, dtype=np.int32).max(initial=0) > MAX_JSON_DEPTH:
        raise InvalidRequest(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json")


def check(wire: type[Wire], fields: dict[str, Any]) -> Wire:
    """The validated wire type.  Raises InvalidRequest for the first fault, naming the field as the client wrote it."""
    try:
        return wire.model_validate(fields)
    except ValidationError as error:
        raise as_refusal(error, wire, fields) from None


def as_refusal(error: ValidationError, wire: type[BaseModel], fields: dict[str, Any]) -> InvalidRequest:
    fault, steps = likeliest(error, fields)
    param = path_of(steps)
    if fault["type"] == "extra_forbidden":
        name = str(fault["loc"][-1])
        near = difflib.get_close_matches(name[:64], wire.model_fields, n=1) if len(fault["loc"]) == 1 else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return InvalidRequest(f"unknown field {name[:64]!r}{hint}", param=param, code="unknown_parameter")
    if fault["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    if fault["type"] == "value_error":
        refusal = fault["ctx"]["error"]
        if isinstance(refusal, InvalidRequest):
            return refusal
        return InvalidRequest(str(refusal), param=param or None)
    if fault["type"] == "union_tag_invalid":
        return InvalidRequest(f"{param}.type must be one of {fault['ctx']['expected_tags']}", param=f"{param}.type")
    if fault["type"] == "model_type":
        return InvalidRequest(f"{param} must be an object, not {shown(fault['input'])}", param=param)
    message = fault["msg"].replace("Input should be", "must be", 1)
    return InvalidRequest(f"{param} {message}, not {shown(fault['input'])}", param=param)


def likeliest(error: ValidationError, fields: dict[str, Any]) -> tuple[ErrorDetails, Location]:
    """The fault to tell, and where it is."""
    told = [(fault, steps_within(fields, fault)) for fault in error.errors(include_url=False)]
    # A misspelt field first: it is likelier the cause of the other faults than their company.
    for fault, steps in told:
        if fault["type"] == "extra_forbidden" and len(steps) == len(fault["loc"]):
            return fault, steps
    # What may be of several kinds has a fault for each of them: the kind that was meant is the one that fits furthest.
    _, first = told[0]
    beside = [each for each in told if each[1][: len(first)] == first]
    return max(beside, key=lambda each: (len(each[1]), each[0]["type"] != "extra_forbidden"))


def steps_within(value: Any, fault: ErrorDetails) -> Location:
    """The fault's location in the body itself, without the names of the kinds that were tried there."""
    steps: list[int | str] = []
    *inner, last = fault["loc"] or ("",)
    for step in inner:
        if has(value, step):
            steps.append(step)
            value = value[step]
    if last != "" and (has(value, last) or fault["type"] == "missing"):
        steps.append(last)
    return tuple(steps)


def has(value: Any, step: int | str) -> bool:
    return isinstance(step, int) if isinstance(value, list) else isinstance(value, dict) and step in value


def path_of(location: Location) -> str:
    """messages[0].content for ('messages', 0, 'content')."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return type_name(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def type_name(value: Any) -> str:
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}.get(
        type(value), "null"
    )
