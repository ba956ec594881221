"""Headless Chromium for tests of the gateway's page, and what it must not do there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tools import tool

_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's own; playwright's are not needed."""
    path = tool("chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=_ARGUMENTS.split())
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that is open, with all that went wrong in it."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)  # of the console: errors, and what the policy stopped
    strangers: list[str] = field(default_factory=list)  # requests to other hosts

    def __post_init__(self) -> None:
        self.page.on("console", lambda said: self._complain(said.type, said.text))
        self.page.on("pageerror", lambda error: self._complain("error", str(error)))
        self.page.on("request", lambda request: self._see(request.url))

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _see(self, url: str) -> None:
        if not url.startswith((self.origin, "data:")):
            self.strangers.append(url)


@contextmanager
def visit(browser: Browser, origin: str, **context: Any) -> Iterator[Visit]:
    """Opens the page at `origin`, such as "http://127.0.0.1:9000"; `context` is playwright's."""
    opened: BrowserContext = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    opened.set_default_timeout(10_000)
    try:
        seen = Visit(opened.new_page(), origin)
        seen.page.goto(origin + "/")
        yield seen
    finally:
        opened.close()
