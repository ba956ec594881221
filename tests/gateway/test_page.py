"""The page's files, and what it does with answers of every kind, in a browser against canned endpoints."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from playwright.sync_api import Browser, Page, expect

from browser import chromium, visit
from octavo_client import Metrics, Sample
from octavo_gateway.page import FOLDER, page_router
from octavo_gateway.security import Keys
from ports import free_ports

KEY = "open sesame"
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
MARKDOWN = """# A <b>heading</b>

Some **bold**, *slanted* and `inline <i>` words, & an <img src=x onerror="document.title='broken in'">.

1. one
2. two

- a
- b

```python
def f(x):
    return "<script>document.title='broken in'</script>"
```
"""


@dataclass
class Canned:
    """A gateway whose answers are known. `wants_key` is whether it asks for one."""

    origin: str = ""
    wants_key: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies of chats
    blocks: tuple[int, int, int, int] = (11650, 500, 700, 1)  # all, used, reusable, shared

    async def metrics(self) -> Metrics:
        labels = {"model": "llm", "version": "1", "instance": "llm_0_0"}
        names = ("octavo:kv_blocks", "octavo:kv_blocks_used", "octavo:kv_blocks_reusable")
        values = dict(zip((*names, "octavo:kv_blocks_shared"), self.blocks, strict=True))
        values |= {"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2, "octavo:ready": 1}
        return Metrics(tuple(Sample(name, labels, value) for name, value in values.items()))

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.include_router(page_router(self.metrics))
        with_keys = Keys(app, [KEY])

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "first"}, {"id": "llm"}]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            wish = body["messages"][-1]["content"]
            if wish == "full":
                return JSONResponse({"error": {"message": "the queue is full: 64 requests wait"}}, 429)
            return StreamingResponse(_events(wish), media_type="text/event-stream")

        async def either(scope: Any, receive: Any, send: Any) -> None:
            await (with_keys if self.wants_key else app)(scope, receive, send)

        return either  # type: ignore[return-value]


async def _events(wish: str) -> AsyncIterator[str]:
    def event(**choice: Any) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n"

    text = {"markdown": MARKDOWN, "long": "word " * 400}.get(wish, "A short answer.")
    size = 5 if wish == "long" else 7
    for at in range(0, len(text), size):
        yield event(delta={"content": text[at : at + size]}, finish_reason=None)
        await asyncio.sleep(0.02 if wish == "long" else 0.001)
        if wish == "breaks" and at > 0:
            yield 'data: {"error": {"message": "[INTERNAL] a step failed", "code": "internal"}}\n\n'
            return
    yield event(delta={}, finish_reason="stop")
    yield 'data: {"choices": [], "usage": {"completion_tokens": 12}}\n\ndata: [DONE]\n\n'


@pytest.fixture(scope="module")
def canned() -> Iterator[Canned]:
    canned = Canned()
    (port,) = free_ports(1)
    canned.origin = f"http://127.0.0.1:{port}"
    server = uvicorn.Server(
        uvicorn.Config(
            canned.app(),
            port=port,
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield canned
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def ask(page: Page, words: str) -> None:
    expect(page.locator("#model")).to_have_value("first")
    ask_again(page, words)


def ask_again(page: Page, words: str) -> None:
    page.locator("#prompt").fill(words)
    page.keyboard.press("Enter")


def test_files_say_what_they_are_and_are_sent_once(canned: Canned) -> None:
    names = ["", *(f"page/{path.name}" for path in FOLDER.iterdir())]
    assert len(names) > 10
    with httpx.Client(verify=False) as client:
        for name in names:
            answer = client.get(f"{canned.origin}/{name}")
            assert answer.status_code == 200, name
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = dict(
                rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
            )
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert "//" not in answer.text.replace("http://www.w3.org/", "") or name.endswith(".js"), name
            assert "https:" not in answer.text, name
            assert "innerHTML" not in answer.text, name
            kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}.get(
                name.rpartition(".")[2]
            )
            assert answer.headers["content-type"].partition(";")[0] == (kind or "text/html")
            tag = answer.headers["etag"]
            for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
                again = client.get(f"{canned.origin}/{name}", headers={"If-None-Match": known})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert (
                client.get(f"{canned.origin}/{name}", headers={"If-None-Match": '"other"'}).status_code == 200
            )
        for wrong in ("page/page.py", "page/..%2fpage.py", "page/", "page/nothing.js"):
            assert client.get(f"{canned.origin}/{wrong}").status_code == 404


def test_live_is_a_stream_and_refuses_more_viewers_than_there_is_room_for(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.stream("GET", f"{canned.origin}/live", timeout=5) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.iter_lines()  # a name of its own: it leaves the stream when it is forgotten
        first = next(line for line in lines if line.startswith("data: "))
        view = json.loads(first.removeprefix("data: "))
        assert view["models"][0]["instances"][0]["blocks"] == {
            "total": 11650,
            "free": 10450,
            "cached": 700,
            "referenced": 499,
            "shared": 1,
        }
        monkeypatch.setattr("octavo_gateway.live.MOST_VIEWERS", 1)
        with httpx.stream("GET", f"{canned.origin}/live") as refused:
            assert refused.status_code == 503
            assert "close one of them" in json.loads(refused.read())["error"]["message"]
        assert next(lines) == ""


def test_markdown_becomes_nodes_and_never_markup(canned: Canned, browser: Browser) -> None:
    with visit(browser, canned.origin) as seen:
        page = seen.page
        ask(page, "markdown")
        body = page.locator(".assistant .body")
        expect(page.locator(".facts")).to_contain_text("12 tokens")
        expect(body.locator("h3")).to_have_text("A <b>heading</b>")
        expect(body.locator("strong")).to_have_text("bold")
        expect(body.locator("em")).to_have_text("slanted")
        expect(body.locator("p > code")).to_have_text("inline <i>")
        expect(body.locator("ol > li")).to_have_text(["one", "two"])
        expect(body.locator("ul > li")).to_have_text(["a", "b"])
        expect(body.locator("figcaption span")).to_have_text("python")
        code = """def f(x):\n    return "<script>document.title='broken in'</script>\""""
        assert body.locator("pre code").text_content() == code
        assert body.locator("img, script, b, i").count() == 0
        assert page.title() == "Octavo"
        assert body.locator("p").text_content().endswith("onerror=\"document.title='broken in'\">.")  # type: ignore[union-attr]
        expect(page.locator("#announcer")).to_contain_text("A <b>heading</b>")
        assert (seen.complaints, seen.strangers) == ([], [])


def test_settings_model_and_conversation_are_what_is_asked(canned: Canned, browser: Browser) -> None:
    canned.asked.clear()
    with visit(browser, canned.origin) as seen:
        page = seen.page
        ask(page, "hello")
        expect(page.locator(".facts")).to_have_count(1)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0.2")
        page.get_by_label("Max tokens").fill("33")
        page.get_by_label("System message").fill("Be brief.")
        page.get_by_role("button", name="Done").click()
        page.locator("#model").select_option("llm")
        page.locator("#prompt").fill("two\nlines")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".facts")).to_have_count(2)
        ask_again(page, "long")
        expect(page.locator(".assistant .body").last).to_contain_text("word word")
        page.get_by_role("button", name="New chat").click()  # ends the answer as well
        assert page.locator(".message").count() == 0
        expect(page.locator("#stop")).to_be_hidden()
        page.get_by_role("button", name="Why is the sky blue?").click()
        expect(page.locator(".facts")).to_have_count(1)
    user, assistant = "user", "assistant"
    said = [[(m["role"], m["content"]) for m in body["messages"]] for body in canned.asked]
    assert said == [
        [(user, "hello")],
        [("system", "Be brief."), (user, "hello"), (assistant, "A short answer."), (user, "two\nlines")],
        [*said[1], (assistant, "A short answer."), (user, "long")],
        [("system", "Be brief."), (user, "Why is the sky blue?")],
    ]
    first, second, *_ = canned.asked
    assert [first[name] for name in ("model", "temperature", "max_tokens", "stream")] == [
        "first",
        0.7,
        512,
        True,
    ]
    assert [second[name] for name in ("model", "temperature", "max_tokens")] == ["llm", 0.2, 33]


def test_errors_are_said_with_what_to_do_and_can_be_tried_again(canned: Canned, browser: Browser) -> None:
    canned.asked.clear()
    with visit(browser, canned.origin) as seen:
        page = seen.page
        ask(page, "full")
        error = page.locator(".message .error p")
        words = "The queue is full: 64 requests wait. The server has all the work it takes."
        expect(error).to_have_text(f"{words} Try again in a moment.")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".message .error")).to_have_count(1)
        assert [body["messages"] for body in canned.asked] == [[{"role": "user", "content": "full"}]] * 2
        page.get_by_role("button", name="New chat").click()
        ask(page, "breaks")
        expect(error).to_contain_text("A step failed. Try again")
        expect(page.locator(".assistant .body")).to_have_text("A short answer")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page, "anything")
        expect(error.last).to_contain_text("The gateway does not answer. See that the gateway runs")


def test_a_key_is_asked_for_once_and_kept_in_the_tab(canned: Canned, browser: Browser) -> None:
    canned.wants_key = True
    try:
        with visit(browser, canned.origin) as seen:
            page = seen.page
            dialog = page.locator("#ask-key")
            expect(dialog).to_be_visible()
            page.locator("#key").fill("wrong")
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text("That key does not fit")
            page.locator("#key").fill(KEY)
            page.keyboard.press("Enter")
            expect(dialog).to_be_hidden()
            expect(page.locator("#state-text")).to_have_text("live")
            ask(page, "hello")
            expect(page.locator(".facts")).to_have_count(1)
            kept = page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]")
            assert kept == [[KEY], 0, ""]
    finally:
        canned.wants_key = False


def test_cells_follow_the_counts(canned: Canned, browser: Browser) -> None:
    kinds = ("shared", "referenced", "cached", "free")
    with visit(browser, canned.origin) as seen:
        page = seen.page

        def share(*counts: int, most: int = 600) -> tuple[int, list[int]]:
            blocks = {**dict(zip(kinds, counts, strict=True)), "total": sum(counts)}
            script = "([blocks, most]) => import('/page/blocks.js').then((m) => m.share(blocks, most))"
            shared = page.evaluate(script, [blocks, most])
            return shared["perCell"], [shared["cells"][kind] for kind in kinds]

        assert share(1, 2, 3, 94) == (1, [1, 2, 3, 94])
        assert share(1, 499, 700, 10450) == (20, [1, 25, 35, 522])
        assert share(1, 1, 1, 99_997) == (167, [1, 1, 1, 596])
        assert share(0, 100_000, 1, 1) == (167, [0, 597, 1, 1])
        assert share(0, 0, 0, 0) == (1, [0, 0, 0, 0])
        expect(page.locator("#cell-size")).to_have_text("a cell is 20 blocks")
        assert [page.locator(f".map .{kind}").count() for kind in kinds] == [1, 25, 35, 522]
        assert page.locator("#legend b").all_text_contents() == ["1", "499", "700", "10,450"]
        label = page.get_by_role("img", name="KV blocks").get_attribute("aria-label")
        assert label == "KV blocks: 1 shared, 499 referenced, 700 cached, 10450 free, of 11650"


CONTRASTS = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const shows = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!shows || node.closest("option, noscript, .unseen") || !node.checkVisibility()) continue;
    const [over, under] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(over, under) + 0.05) / (Math.min(over, under) + 0.05);
    found.push([ratio, `${node.tagName}.${node.className} ${node.textContent.slice(0, 30)}`]);
  }
  return found;
}"""


def test_text_has_contrast_in_both_schemes_which_differ(canned: Canned, browser: Browser) -> None:
    papers = []
    for scheme in ("light", "dark"):
        with visit(browser, canned.origin, color_scheme=scheme) as seen:
            page = seen.page
            ask(page, "markdown")
            expect(page.locator(".facts")).to_have_count(1)
            ask(page, "full")
            expect(page.locator(".error")).to_have_count(1)
            contrasts = page.evaluate(CONTRASTS)
            page.get_by_role("button", name="Settings").click()
            contrasts += page.evaluate(CONTRASTS)
            assert len(contrasts) > 60
            assert [(ratio, what) for ratio, what in contrasts if ratio < 4.5] == []
            papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]


def test_a_phone_has_room_for_everything_and_for_thumbs(canned: Canned, browser: Browser) -> None:
    with visit(browser, canned.origin, **PHONE) as seen:
        page = seen.page
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        expect(page.locator("main")).to_be_visible()
        expect(page.locator("aside")).to_be_hidden()
        ask(page, "markdown")
        expect(page.locator(".facts")).to_have_count(1)
        assert page.evaluate(overflow) == 0
        small = """() => [...document.querySelectorAll("button, select, textarea, input")]
            .filter((node) => node.checkVisibility()).map((node) => [node, node.getBoundingClientRect()])
            .filter(([, box]) => box.width < 44 || box.height < 44).map(([node]) => node.outerHTML)"""
        assert page.evaluate(small) == []
        page.get_by_role("button", name="Settings").tap()
        assert page.evaluate(small) == []
        page.get_by_role("button", name="Done").tap()
        page.get_by_role("button", name="Engine").tap()
        expect(page.locator("aside")).to_be_visible()
        expect(page.locator("main")).to_be_hidden()
        expect(page.locator("#tile-running b")).to_have_text("3")
        assert page.evaluate(overflow) == 0
        scroll = "(node) => node.scrollWidth - node.clientWidth"
        assert page.locator("aside").evaluate(scroll) == 0


def test_everything_can_be_done_with_keys(canned: Canned, browser: Browser) -> None:
    with visit(browser, canned.origin, reduced_motion="reduce") as seen:
        page = seen.page
        expect(page.locator("#model")).to_have_value("first")
        keys = page.keyboard
        keys.press("Tab")  # to the link that skips
        keys.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()
        keys.type("lo")
        keys.press("Shift+Enter")
        expect(page.locator("#prompt")).to_have_value("lo\n")
        page.locator("#prompt").fill("")
        keys.type("long")
        keys.press("Enter")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator(".assistant .body")).to_contain_text("word word")
        cursor = "getComputedStyle(document.querySelector('.assistant .body > :last-child'), '::after')"
        assert page.evaluate(f"[{cursor}.animationName, {cursor}.width !== 'auto']") == ["none", True]
        keys.press("Escape")
        expect(page.locator(".facts")).to_contain_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator("#announcer")).to_contain_text("The answer was stopped.")
        active = "document.activeElement"
        focused = f"({active}.id === 'prompt' ? {active}.closest('.field') : {active})"
        reached = set()
        for _ in range(12):
            keys.press("Shift+Tab")
            reached.add(page.evaluate("document.activeElement.id"))
            shown = page.evaluate(
                f"[getComputedStyle({focused}).outlineStyle, {active}.outerHTML.slice(0, 40)]"
            )
            assert shown[0] != "none" or shown[1].startswith("<body"), shown
        assert {"messages", "open-settings", "new-chat", "model"} <= reached
        page.locator("#open-settings").focus()
        keys.press("Enter")
        expect(page.locator("#settings")).to_be_visible()
        keys.press("Escape")
        expect(page.locator("#settings")).to_be_hidden()
        expect(page.locator("#open-settings")).to_be_focused()
