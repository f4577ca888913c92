"""A request's body: read within a limit, parsed as strict JSON, checked against its wire type.  Refusals name the field."""

from __future__ import annotations

import asyncio
import codecs
import difflib
import hashlib
import json
import math
from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pagestream.engine import InvalidRequest
from pagestream.server.errors import HttpError
from pagestream.server.fields import MissingField, WireModel
from pagestream.server.state import server_state

MAX_JSON_DEPTH = 32
MAX_JSON_CONTAINERS = 1 << 16  # arrays and objects; a parser makes so many in a tenth of a second, in which nobody else has a turn
IDEMPOTENCY_KEY = "idempotency-key"
SENT_ONCE = ("Content-Type", "Authorization", "X-Api-Key", "Idempotency-Key", "X-Request-Timeout")  # of two, which one is meant?
MAX_BYTES_ON_LOOP = 1 << 16  # takes about a millisecond
MIN_BYTES_SENT = 1 << 15  # of a body, each time that `--slow-sender-timeout` runs out; half a kilobyte a second by default

KINDS = {
    "string_type": "a string", "int_type": "an integer", "float_type": "a number", "bool_type": "a boolean", "list_type": "an array",
    "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object", "none_required": "null",
}  # fmt: skip

Wire = TypeVar("Wire", bound=WireModel)
Location = tuple[int | str, ...]


async def read_body(http: Request, wire: type[Wire]) -> Wire:
    """The request's body as this wire type.

    Raises HttpError (408, 413, 415), InvalidRequest, and starlette's ClientDisconnect where the client leaves meanwhile.
    """
    # One rule for all: JSON must be called JSON.  It also keeps other sites' pages off a local server, since a browser
    # sends this type across origins only after asking.
    for name in SENT_ONCE:
        if len(http.headers.getlist(name)) > 1:
            raise InvalidRequest(f"the header {name} was sent more than once", param=name)
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"Content-Type must be application/json, not {kind[:40]!r}", code="unsupported_media_type")
    coding = http.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):  # a few bytes of these could become any number
        hint = {"Accept-Encoding": "identity"}
        raise HttpError(
            415, f"Content-Encoding {coding[:40]!r} is not supported: send the body as it is", code="unsupported_encoding", headers=hint
        )
    settings = server_state(http).settings
    raw = await read_limited(http, settings.max_body_bytes, settings.slow_sender_timeout_s)
    if IDEMPOTENCY_KEY in http.headers:
        http.state.body_digest = hashlib.sha256(raw).hexdigest()
    if len(raw) <= MAX_BYTES_ON_LOOP:
        return parse(raw, wire)
    return await asyncio.to_thread(parse, raw, wire)


def parse(raw: bytes, wire: type[Wire]) -> Wire:
    """Raises InvalidRequest."""
    fields, has_infinite = parse_object(raw)
    for name in [name for name in fields if name in wire.unsupported]:
        value = fields.pop(name)
        if isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if inner is not None}
        if value is not None and value not in wire.unsupported[name]:
            hint = f"; {wire.elsewhere[name]} takes it" if name in wire.elsewhere else ""
            raise InvalidRequest(f"{name} is not supported yet{hint}", param=name, code="unsupported_parameter")
    checked = check(wire, fields)
    if has_infinite:
        refuse_constants(fields)
    return checked


async def read_limited(http: Request, max_body_bytes: int, slow_sender_timeout_s: float = 0.0) -> bytes:
    """The body, of which each such time (0: no limit) must bring MIN_BYTES_SENT or the end.  Raises HttpError (408, 413)."""
    closing = {"Connection": "close"}
    too_large = HttpError(413, f"the body is larger than {max_body_bytes} bytes", code="body_too_large", headers=closing)
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_body_bytes:
        raise too_large
    body = bytearray()
    num_wanted = MIN_BYTES_SENT
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(slow_sender_timeout_s or None) as limit:
            async for piece in http.stream():
                body += piece
                if len(body) > max_body_bytes:
                    raise too_large
                if len(body) >= num_wanted and slow_sender_timeout_s:
                    num_wanted = len(body) + MIN_BYTES_SENT
                    limit.reschedule(clock() + slow_sender_timeout_s)
    except TimeoutError:
        told = f"the body came too slowly: less than {MIN_BYTES_SENT} bytes of it in {slow_sender_timeout_s:g} s"
        raise HttpError(408, told, code="request_timeout", headers=closing) from None
    return bytes(body)


def parse_object(raw: bytes) -> tuple[dict[str, Any], bool]:
    """Parses RFC 8259 JSON, with or without the mark that some systems begin a text with.

    NaN and Infinity, and numbers beyond all floats, pass as floats, so that the field's own check can name the field; the second
    value says whether there are any.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if not raw.strip():
        raise InvalidRequest("the body is empty; a JSON object was expected", code="invalid_json")
    check_structure(raw)
    try:
        text = raw.decode("utf-8")
        value, has_infinite = read_json(text)
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
    return value, has_infinite


def read_json(text: str) -> tuple[Any, bool]:
    """What the text says, and whether it holds a number that no double can.  Raises ValueError."""
    infinite: list[str] = []

    def real(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            infinite.append(digits[:8])
        return number

    # The parser itself lets no other thread have a turn, but a function of ours for each number does: it takes twice as long, and
    # the event loop waits for milliseconds where it waited for tenths of a second.
    whole = (lambda digits: int(digits)) if len(text) > MAX_BYTES_ON_LOOP else None
    return json.loads(text, parse_float=real, parse_constant=real, parse_int=whole), bool(infinite)


def refuse_constants(value: Any) -> None:
    """Where a field takes any value, as a template's arguments do, nothing else has refused them."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise InvalidRequest("NaN and Infinity are not JSON, and a number is too large for a double", code="invalid_json") from None


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


def as_refusal(error: ValidationError, wire: type[WireModel], fields: dict[str, Any]) -> InvalidRequest:
    fault, steps, kinds = likeliest(error, fields)
    param = path_of(steps)
    if fault["type"] == "extra_forbidden":
        name = str(fault["loc"][-1])
        hint = hint_at(name, wire) if len(fault["loc"]) == 1 else ""
        return InvalidRequest(f"unknown field {name[:64]!r}{hint}", param=param, code="unknown_parameter")
    if fault["type"] == "union_tag_not_found":
        if not isinstance(fault["input"], dict):
            return InvalidRequest(f"{param} must be an object, not {shown(fault['input'])}", param=param)
        param += ".type"
    if fault["type"] in ("missing", "union_tag_not_found"):
        return missing(param)
    if fault["type"] == "value_error":
        refusal = fault["ctx"]["error"]
        if isinstance(refusal, InvalidRequest):
            return refusal
        if isinstance(refusal, MissingField):
            return missing(f"{param}.{refusal}")
        return InvalidRequest(f"{param}: {refusal}" if param else str(refusal), param=param or None)
    if fault["type"] == "union_tag_invalid":
        return InvalidRequest(f"{param}.type must be one of {fault['ctx']['expected_tags']}", param=f"{param}.type")
    return InvalidRequest(f"{param} {rule_of(fault, kinds)}", param=param)


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")


def rule_of(fault: ErrorDetails, kinds: list[str]) -> str:
    """What the value must be, and what it is instead."""
    limits, is_text = fault.get("ctx", {}), fault["type"].startswith("string_")
    unit = "characters" if is_text else "entries"
    match fault["type"]:
        case "too_short" | "string_too_short":
            least = limits["min_length"]
            return "must not be empty" if least == 1 else f"must hold at least {least} {unit}"
        case "too_long" | "string_too_long":
            return f"must hold at most {limits['max_length']} {unit}, not {len(fault['input'])}"
        case "string_pattern_mismatch":
            return f"must match {limits['pattern']}, which {shown(fault['input'])} does not"
    rule = f"must be {' or '.join(kinds)}" if kinds else fault["msg"].replace("Input should be", "must be", 1)
    return f"{rule}, not {shown(fault['input'])}"


def hint_at(name: str, wire: type[WireModel]) -> str:
    """What may help whoever wrote this unknown field; empty where nothing is known."""
    if name in wire.elsewhere:
        return f"; {wire.elsewhere[name]} takes it"
    near = likely_name(name[:64], wire.model_fields)
    return f"; did you mean {near!r}?" if near else ""


def likely_name(name: str, known: Collection[str]) -> str | None:
    """The known name that was meant: one with some words more or less, else one that is spelt nearly so."""
    words = set(name.lower().replace("-", "_").split("_"))
    shares = {each: len(words & parts) / len(words | parts) for each in known if (parts := set(each.split("_"))) & words}
    related = [each for each, share in shares.items() if share >= 0.5 and share == max(shares.values())]
    spelt = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
    return next(iter(spelt or related), None)


def likeliest(error: ValidationError, fields: dict[str, Any]) -> tuple[ErrorDetails, Location, list[str]]:
    """The fault to tell, where it is, and, where it is one of kind, the kinds that are taken there."""
    told = [(fault, steps_within(fields, fault)) for fault in error.errors(include_url=False)]
    # A misspelt field first: it is likelier the cause of the other faults than their company.  But what is of a type that isn't taken
    # may well have fields of its own.
    types = {steps[:-1]: (fault, steps) for fault, steps in told if fault["type"] == "literal_error" and steps[-1:] == ("type",)}
    for fault, steps in told:
        if fault["type"] == "extra_forbidden" and len(steps) == len(fault["loc"]):
            fault, steps = types.get(steps[:-1], (fault, steps))
            return fault, steps, []
    # What may be of several kinds has a fault for each of them: the kind that was meant is the one that fits furthest.
    _, first = told[0]
    beside = [each for each in told if each[1][: len(first)] == first]
    fault, steps = max(beside, key=lambda each: (len(each[1]), each[0]["type"] not in KINDS, each[0]["type"] != "extra_forbidden"))
    kinds = [KINDS[each["type"]] for each, place in beside if place == steps and each["type"] in KINDS]
    return fault, steps, list(dict.fromkeys(kinds)) if fault["type"] in KINDS else []


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
