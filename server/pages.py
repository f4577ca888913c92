"""The page at `/`, from the files in `ui/`.  They hold no secret and need no key: the page asks for one, and /v1 checks it."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request, Response

from pagestream.server.errors import HttpError

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS = {
    # Nothing from elsewhere and nothing inline: what a model writes into the page stays text.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Pages:
    """The files, read once, each with a tag by which a browser asks whether it has changed."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}
        for file in files("pagestream.server.ui").iterdir():
            media_type = MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
            if media_type is not None:
                content = file.read_bytes()
                self._files[file.name] = content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    async def get_page(self, http: Request) -> Response:
        return self._answer(http, "index.html")

    async def get_file(self, http: Request, name: str) -> Response:
        return self._answer(http, name)

    def _answer(self, http: Request, name: str) -> Response:
        if name not in self._files:
            raise HttpError(404, "there is no such file", code="not_found")
        content, media_type, tag = self._files[name]
        headers = HEADERS | {"ETag": tag}
        if http.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)


def add_pages(app: FastAPI) -> None:
    pages = Pages()
    app.add_api_route("/", pages.get_page, include_in_schema=False)
    app.add_api_route("/ui/{name}", pages.get_file, include_in_schema=False)
