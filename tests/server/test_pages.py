"""The page's files: complete, from this server alone, with or without a key, and gone with --no-ui."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server.conftest import Live, refusal_of

FOLDER = Path(__file__).resolve().parents[2] / "server" / "ui"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in {".html", ".css", ".js", ".svg"})
# What a page can load by; a link that a reader may follow is another matter, but there is none of those either.
ELSEWHERE = re.compile(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", re.IGNORECASE)


def test_the_page_names_only_files_that_are_there(live: Live):
    page = live.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="ui/([^"]+)"', page.text))
    named |= {
        name for path in FOLDER.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8"))
    }
    assert named <= set(NAMES)
    assert {name for name in NAMES if name != "index.html"} <= named, "a file that nothing names"


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_as_what_it_is(live: Live, name: str):
    answer = live.client.get(f"/ui/{name}")
    assert answer.content == (FOLDER / name).read_bytes()
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
    assert answer.headers["content-type"].startswith(kind)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    again = live.client.get(f"/ui/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", NAMES)
def test_no_file_leads_to_another_host(name: str):
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not ELSEWHERE.search(text)


@pytest.mark.parametrize("name", ["nothing.js", "..%2fsettings.py", "__init__.py"])
def test_nothing_else_is_served(live: Live, name: str):
    refusal_of(live.client.get(f"/ui/{name}"), 404)


def test_every_element_that_the_modules_ask_for_is_there():
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.js"):
        for element in re.findall(r'\$\("([^"]+)"\)', path.read_text(encoding="utf-8")):
            assert f'id="{element}"' in page, f"{path.name} asks for #{element}"


def test_the_page_needs_no_key_and_shows_nothing_that_does(start):
    keyed = start(api_keys=("secret",))
    assert keyed.client.get("/").status_code == 200
    refusal_of(keyed.client.get("/v1/models"), 401)


def test_it_can_be_left_out(start):
    bare = start(ui=False)
    refusal_of(bare.client.get("/"), 404)
    refusal_of(bare.client.get("/ui/app.js"), 404)
    assert bare.client.get("/v1/models").status_code == 200
