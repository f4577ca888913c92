"""The page in a real browser.  Needs Chromium (a package of most systems) and `pip install -e '.[browser]'`; hence slow."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs, FinishReason
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, running, served, served_model
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow

NUM_BLOCKS = 24
KEY = "right-key"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[Live]:
    metrics = Metrics("m")
    args = EngineArgs(
        model=str(checkpoint), num_kv_blocks=NUM_BLOCKS, max_num_seqs=16, device="cpu", cpu_threads=1,
        swap_space=0.01, preemption_mode="swap",
    )  # fmt: skip
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    assert path, "these tests need Chromium: install your system's package of it (Debian: apt-get install chromium)"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


class Visit:
    """A page, with everything on its console and every request that left for another host."""

    def __init__(self, browser: Any, url: str, **options: Any):
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(20_000)
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: None if request.url.startswith(url) else self.strangers.append(request.url))
        self.page.goto(url + "/")


@pytest.fixture
def visit(browser: Any, live: Live) -> Iterator[Visit]:
    visit = Visit(browser, live.url)
    visit.page.wait_for_selector("#model option", state="attached")
    yield visit
    visit.page.close()
    assert visit.complaints == []
    assert visit.strangers == []


def open_all_groups(page: Any) -> None:
    page.wait_for_selector("#parameter-max_tokens", state="attached")  # after a sign-in they are yet to come
    page.evaluate("() => document.querySelectorAll('.group').forEach((group) => (group.open = true))")


def say(page: Any, text: str, **parameters: int) -> None:
    open_all_groups(page)
    for name, value in parameters.items():
        page.fill(f"#parameter-{name}", str(value))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_a_chat_streams_and_can_be_repeated(visit: Visit, live: Live):
    page = visit.page
    say(page, "Hello", max_tokens=20)
    page.wait_for_selector(".exchange:not(.is-running)")
    assert page.inner_text(".answer-text")
    numbers = page.inner_text(".exchange-foot .quiet")
    assert "first token after" in numbers
    before = live.metric("vllm:request_success_total")
    page.click(".retry")
    live.until(lambda: live.metric("vllm:request_success_total") == before + 1, "one more answer")
    page.wait_for_selector(".exchange:not(.is-running)")
    assert page.locator(".exchange").count() == 1


def test_several_answers_stand_side_by_side_with_their_tokens(visit: Visit):
    page = visit.page
    page.check("#show-tokens")
    say(page, "Hello", max_tokens=12, n=3)
    page.wait_for_selector(".exchange:not(.is-running)")
    assert page.locator(".answer").count() == 3
    page.hover(".answer >> nth=0 >> .token >> nth=1")
    assert page.locator("#hint .hint-row").count() >= 5
    page.focus(".answer >> nth=1 >> .tokens")
    page.keyboard.press("ArrowRight")
    assert page.locator(".answer >> nth=1 >> .token.chosen").count() == 1


def test_a_completion_goes_on_from_its_text(visit: Visit):
    page = visit.page
    page.check("[name=kind][value=completion]", force=True)
    page.fill("#parameter-max_tokens", "8")
    page.fill("#prompt", "Once upon a time")
    page.press("#prompt", "Enter")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".exchange:not(.is-running)")
    assert page.evaluate("() => document.querySelector('.said').textContent") == "Once upon a time\n"


def test_the_fields_have_the_ranges_that_the_server_tells_and_are_those_of_the_kind(visit: Visit, live: Live):
    page = visit.page
    open_all_groups(page)
    fields = live.client.get("/v1/parameters").json()["endpoints"]["/v1/completions"]["fields"]
    for name in ("temperature", "n", "best_of", "length_penalty", "presence_penalty"):
        shape = fields[name]["anyOf"][0]
        field = page.locator(f"#parameter-{name}")
        assert (float(field.get_attribute("min")), float(field.get_attribute("max"))) == (shape["minimum"], shape["maximum"])
    assert page.locator("#parameter-early_stopping option").all_inner_texts() == ["true", "false", "never"]
    assert not page.is_visible("#parameter-best_of"), "chat has none"
    page.check("[name=kind][value=completion]", force=True)
    assert page.is_visible("#parameter-best_of")


def test_beams_stand_as_a_tree_whose_ways_are_the_answers_best_first(visit: Visit, live: Live):
    page = visit.page
    page.check("[name=kind][value=completion]", force=True)
    open_all_groups(page)
    page.check("#parameter-use_beam_search")
    assert page.input_value("#parameter-temperature") == "0"
    page.fill("#parameter-n", "3")
    page.fill("#parameter-max_tokens", "8")
    page.fill("#prompt", "Once upon a time")
    page.click("#send")
    page.wait_for_selector(".exchange:not(.is-running)")
    # From each end up to the root: the texts on the way are the answer's.
    ways = page.evaluate(
        """() => [...document.querySelectorAll(".leaf")].map((leaf) => {
            const texts = [];
            for (let node = leaf.closest(".node"); node; node = node.parentElement.closest(".node"))
                texts.unshift([...node.querySelector(".run").children].map((token) => token.textContent).join(""));
            return [Number(leaf.querySelector(".rank").textContent), texts.join("")];
        })"""
    )
    body = {"prompt": "Once upon a time", "use_beam_search": True, "n": 3, "max_tokens": 8, "temperature": 0, "logprobs": 5}
    answers = live.complete(**body).json()["choices"]
    assert sorted(ways) == [[rank, "".join(answer["logprobs"]["tokens"])] for rank, answer in enumerate(answers, 1)]
    assert page.locator(".node").count() > 1
    page.click(".leaf >> nth=0")
    assert page.locator(".leaf[aria-pressed=true]").count() == 1
    assert 0 < page.locator(".node.is-aside").count() < page.locator(".node").count()
    page.hover(".run >> nth=-1 >> .token >> nth=0")
    assert page.locator("#hint .hint-row").count() >= 5
    page.uncheck("#parameter-use_beam_search")
    assert page.input_value("#parameter-temperature") == "0.7"


def test_a_request_can_be_copied_as_python_that_gives_the_same_answer(browser: Any, visit: Visit, live: Live):
    page = visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.check("[name=kind][value=completion]", force=True)
    open_all_groups(page)
    for name, value in {"max_tokens": 8, "temperature": 0, "n": 2, "best_of": 3, "min_tokens": 8}.items():
        page.fill(f"#parameter-{name}", str(value))
    page.fill("#prompt", "It's \"quoted\"")
    page.click("#copy-python")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Copied')")
    program = page.evaluate("() => navigator.clipboard.readText()")
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    body = {"prompt": 'It\'s "quoted"', "max_tokens": 8, "temperature": 0, "n": 2, "best_of": 3, "min_tokens": 8}
    assert said == "\n---\n".join(choice["text"] for choice in live.complete(**body).json()["choices"]) + "\n"
    page.click("#copy-curl")
    page.wait_for_function("() => document.getElementById('status').textContent.includes('curl')")
    command = page.evaluate("() => navigator.clipboard.readText()")
    streamed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    assert streamed.rstrip().endswith("data: [DONE]")


def test_stop_ends_the_request_in_the_engine(browser: Any, start):
    slow = start({"step_s": 0.02, "context": 8000})
    visit = Visit(browser, slow.url)
    page = visit.page
    page.wait_for_selector("#model option", state="attached")
    open_all_groups(page)
    page.check("#parameter-ignore_eos")
    say(page, "Hello", max_tokens=5000)
    page.wait_for_function("() => document.querySelector('.answer-text').textContent.length > 20")
    page.click("#stop")
    page.wait_for_selector(".exchange:not(.is-running)")
    slow.until(lambda: bool(slow.engine.ended), "the engine to let go")
    assert slow.engine.ended[0][1] is FinishReason.ABORT
    assert page.inner_text(".answer-foot") == "stopped"
    assert visit.complaints == []
    page.close()


def test_a_refusal_is_told_in_the_servers_words(visit: Visit):
    page = visit.page
    say(page, "Hello", max_tokens=100_000, n=2)
    page.wait_for_selector(".exchange .error")
    assert "max_tokens" in page.inner_text(".exchange .error")
    assert page.locator(".answer").count() == 0, "nothing came, and empty answers would say that something had"
    assert page.inner_text("#status") == "That failed."
    # The browser itself reports every 400 on its console.
    assert all("400" in complaint for complaint in visit.complaints)
    visit.complaints.clear()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_live_views_address_shows_the_head_of_the_page_and_no_figure_over_another(browser: Any, live: Live, width: int):
    visit = Visit(browser, live.url, viewport={"width": width, "height": 600})
    page = visit.page
    page.wait_for_selector("#model option", state="attached")
    page.goto(live.url + "/#live")
    page.wait_for_selector("#tiles dd")
    page.wait_for_timeout(300)  # the browser scrolls to what an address names some time after it was shown
    assert page.evaluate("() => scrollY") == 0
    page.evaluate("() => document.querySelectorAll('#tiles dd span').forEach((value) => (value.textContent = '123,456'))")
    too_wide = "() => [...document.querySelectorAll('#tiles dd')].filter((value) => value.scrollWidth > value.clientWidth).length"
    assert page.evaluate(too_wide) == 0
    page.close()


def test_the_live_view_shows_the_blocks_as_the_metric_counts_them_and_who_was_swapped(visit: Visit, live: Live):
    page = visit.page
    page.click("[data-view=live]")
    page.wait_for_selector("#tiles dd")
    # Every state that a row of the table ever shows, by request.
    page.evaluate(
        """() => {
            window.seen = {};
            new MutationObserver(() => {
                for (const row of document.querySelectorAll("#requests tr")) {
                    const states = window.seen[row.dataset.number] ??= [];
                    if (states.at(-1) !== row.className) states.push(row.className);
                }
            }).observe(document.getElementById("requests"), { childList: true, subtree: true, attributes: true, characterData: true });
        }"""
    )

    def free_in_the_page() -> int:
        return int(page.get_attribute("#grid", "data-free"))

    def free_by_metric() -> int:
        return round((1 - live.metric("vllm:kv_cache_usage_perc")) * NUM_BLOCKS)

    differences = []
    with ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(live.complete, prompt=f"{number} the quick brown fox", max_tokens=250, ignore_eos=True) for number in range(48)
        ]
        page.click("#requests tr.is-running button >> nth=0")
        page.wait_for_selector(".table-blocks li")
        assert page.locator(".timeline li").count() > 0
        while not all(one.done() for one in running):
            differences.append(abs(free_in_the_page() - free_by_metric()))
            page.wait_for_timeout(50)
        assert all(one.result().status_code == 200 for one in running)
    # The page is a tenth of a second behind at most: the difference is often none, and never more than comes and goes in that time.
    assert 0 in differences
    assert sorted(differences)[len(differences) // 2] <= 8
    page.wait_for_function(f"() => document.getElementById('grid').dataset.free === '{NUM_BLOCKS}'")
    assert free_by_metric() == NUM_BLOCKS
    seen = page.evaluate("() => window.seen")
    back_and_forth = [states for states in seen.values() if "is-swapped" in states]
    assert any("is-running" in states[states.index("is-swapped") :] for states in back_and_forth), seen
    page.focus("#grid")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#block-note").startswith("Block 0:")


def test_the_story_of_a_request_tells_its_tokens_by_the_number_of_its_answers(visit: Visit, live: Live):
    page = visit.page
    page.click("[data-view=live]")
    page.wait_for_selector("#tiles dd")
    for number, told in ((1, "[0-9]+ of at most 250 tokens"), (2, "[0-9]+ tokens in 2 answers of at most 150 each")):
        limit = 250 if number == 1 else 150
        with ThreadPoolExecutor(8) as pool:  # enough of them that some run while the page is slow
            running = [pool.submit(live.complete, prompt="Hello", n=number, max_tokens=limit, ignore_eos=True) for _ in range(24)]
            page.click("#requests tr.is-running button >> nth=0")
            page.wait_for_selector(f"#detail-body dd:text-matches('^{told}$')")
            assert all(one.result().status_code == 200 for one in running)
        page.wait_for_selector("#no-requests")


def test_an_engine_that_rests_is_shown_at_rest(visit: Visit, live: Live):
    page = visit.page
    page.goto(live.url + "/#live")
    page.wait_for_selector("#tiles dd")
    live.complete(prompt="Hello", max_tokens=300, ignore_eos=True)
    page.wait_for_function("() => document.querySelector('#tiles div:nth-child(4) dd').textContent !== '0'")
    page.wait_for_function("() => document.querySelector('#tiles div:nth-child(4) dd').textContent === '0'")


def test_who_looks_is_told_that_the_server_has_ended(browser: Any, checkpoint: Path):
    with served_model(checkpoint) as gone:
        visit = Visit(browser, gone.url, viewport={"width": 390, "height": 600})
        page = visit.page
        page.wait_for_selector("#model option", state="attached")
        page.goto(gone.url + "/#live")
        page.wait_for_selector("#tiles dd")
        assert page.inner_text("#live-status") == ""
    page.wait_for_function("() => document.getElementById('live-status').textContent.includes(\"can't be reached\")")
    box = page.locator("#live-status").bounding_box()
    assert box["y"] < 200, "what is old is said to be old where one looks first"
    page.goto("about:blank")
    page.close()


def test_a_server_that_is_gone_is_told_in_our_words(browser: Any):
    with running() as gone:
        visit = Visit(browser, gone.url)
        page = visit.page
        page.wait_for_selector("#model option", state="attached")
    say(page, "Hello", max_tokens=5)
    page.wait_for_selector(".exchange .error")
    assert page.inner_text(".exchange .error") == "The server can't be reached."
    page.close()


def test_nobody_looks_when_the_view_is_left(visit: Visit, live: Live):
    visit.page.click("[data-view=live]")
    live.until(lambda: live.engine._live._num_watchers == 1, "somebody looks")
    visit.page.click("[data-view=playground]")
    live.until(lambda: live.engine._live._num_watchers == 0, "nobody looks")


def test_signing_in_with_a_wrong_and_the_right_key(browser: Any, start):
    keyed = start(api_keys=(KEY,))
    visit = Visit(browser, keyed.url)
    page = visit.page
    page.wait_for_selector("#sign-in[open]")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_function("() => document.getElementById('sign-in-error').textContent.includes('not valid')")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.wait_for_selector("#sign-in", state="hidden")
    say(page, "Hello", max_tokens=10)
    page.wait_for_selector(".exchange:not(.is-running)")
    assert page.inner_text(".answer-text")
    assert visit.strangers == []
    assert all("401" in complaint for complaint in visit.complaints), visit.complaints
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("view", ["playground", "beams", "live"])
def test_nothing_serious_for_those_who_see_or_hear_it_otherwise(browser: Any, live: Live, scheme: str, width: int, view: str):
    from axe_playwright_python.sync_playwright import Axe

    # axe is put into the page, which the page's own policy does not allow.
    visit = Visit(browser, live.url, color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
    page = visit.page
    page.wait_for_selector("#model option", state="attached")
    page.evaluate("() => (document.getElementById('parameters-box').open = true)")
    if view == "live":
        page.click("[data-view=live]")
        page.wait_for_selector("#tiles dd")
        clicked = Event()

        def keep_asking() -> None:  # one answer may be over before the browser has clicked
            while not clicked.is_set():
                live.complete(prompt="a long one", max_tokens=200, ignore_eos=True)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(keep_asking)
            try:
                page.click("#requests button >> nth=0")
            finally:
                clicked.set()
            running.result()
        page.wait_for_selector("#detail:not([hidden])")
    else:
        if view == "beams":
            page.check("[name=kind][value=completion]", force=True)
            open_all_groups(page)
            page.check("#parameter-use_beam_search")
        page.check("#show-tokens")
        say(page, "Hello", max_tokens=10)
        if view == "beams":
            page.click("#send")
        page.wait_for_selector(".exchange:not(.is-running)")
    found = Axe().run(page).response["violations"]
    serious = [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    page.close()
