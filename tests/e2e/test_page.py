"""The page, the gateway and a real server together: what a person sees who asks for a story and stops it."""

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from browser import chromium, visit
from octavo.serving.launcher import RunningServer
from servers import gateway_before
from triton_clients import Metrics
from waiting import wait_until

STORY = "Tell me a very long story about a bookbinder who folds one sheet into eight leaves."


@pytest.fixture(scope="module")
def gateway(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of an `octavo gateway` in front of the server."""
    with gateway_before(server, tmp_path_factory.mktemp("gateway") / "log") as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def cells(page: Page, *kinds: str) -> int:
    return page.locator(", ".join(f".map .{kind}" for kind in kinds)).count()


def test_a_story_streams_moves_the_map_and_stops(
    gateway: str, server: RunningServer, browser: Browser
) -> None:
    with visit(browser, gateway) as seen:
        page = seen.page
        expect(page.locator("#model")).to_have_value("llm")
        expect(page.locator("#state-text")).to_have_text("live")
        wait_until(lambda: cells(page, "referenced", "shared") == 0, "the server is busy before the test", 15)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("4000")
        page.get_by_role("button", name="Done").click()
        page.locator("#prompt").fill(STORY)
        page.keyboard.press("Enter")
        body = page.locator(".assistant .body")
        expect(body).not_to_be_empty()
        lengths = [len(body.inner_text())]
        deadline = time.monotonic() + 15
        while len(lengths) < 6 and time.monotonic() < deadline:
            page.wait_for_timeout(50)
            if (length := len(body.inner_text())) != lengths[-1]:
                lengths.append(length)
        assert len(lengths) == 6, "the answer came in one piece"
        assert lengths == sorted(lengths)
        expect(page.locator("#tile-running b")).to_have_text("1")
        wait_until(lambda: cells(page, "referenced") > 0, "no cell of the map moved", 10)
        assert Metrics(server).value("vllm:num_requests_running") == 1
        page.locator("#stop").click()
        expect(page.locator(".facts")).to_contain_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        ended = body.inner_text()
        wait_until(lambda: Metrics(server).value("vllm:num_requests_running") == 0, "it runs on", 10)
        expect(page.locator("#tile-running b")).to_have_text("0")
        wait_until(lambda: cells(page, "referenced") == 0, "the map did not move back", 10)
        assert cells(page, "cached") > 0  # what it wrote can be reused
        assert body.inner_text() == ended
        assert (seen.complaints, seen.strangers) == ([], [])


def test_a_short_answer_ends_by_itself_and_says_what_it_took(gateway: str, browser: Browser) -> None:
    with visit(browser, gateway) as seen:
        page = seen.page
        expect(page.locator("#model")).to_have_value("llm")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("12")
        page.get_by_role("button", name="Done").click()
        page.locator("#prompt").fill(STORY)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".facts")).to_contain_text("cut off at 12 tokens")
        expect(page.locator(".facts")).to_contain_text("per second")
        page.locator("#prompt").fill("And then?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".facts")).to_have_count(2)
        expect(page.locator("#tile-first-token span")).to_have_text("ms")
        assert (seen.complaints, seen.strangers) == ([], [])
