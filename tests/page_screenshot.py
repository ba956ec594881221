"""Makes `backend/docs/page.png`, the page beside a server that works for several people at once.

    .venv/bin/python tests/page_screenshot.py [--dark] [--seconds 60] [FILE]

A real server and a real gateway are started for it, with few enough blocks for each to have a cell.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import expect

sys.path.insert(0, str(Path(__file__).parents[1] / "loadtest"))

from browser import chromium, visit
from octavo_client import Cancelled, Client, SamplingParams, Unavailable
from servers import gateway_before, serving
from triton_clients import make_repository

FILE = Path(__file__).parents[1] / "backend" / "docs" / "page.png"
QUESTION = "Write a Python function that says whether a word is a palindrome, and explain how it works."
RULES = (
    "You help the readers of a small library. Answer in whole sentences, politely and to the point. Say so "
    "when you do not know. Name the shelf on which a book stands: fiction is on the first floor, history and "
    "travel on the second, crafts and bookbinding in the basement. The library is open from nine to six. "
)
SUBJECTS = ("lighthouses", "bookbinding", "glaciers", "violins", "spices", "comets", "canal boats", "bees")


def converse(url: str, number: int, ended: threading.Event) -> None:
    """One reader after another, with the same rules and a question of their own."""
    with Client(url) as client:
        count = number
        while not ended.is_set():
            question = (
                f"I look for a book on {SUBJECTS[count % len(SUBJECTS)]}, number {count}. Which, and where?"
            )
            messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
            params = SamplingParams(max_tokens=60 + 17 * (count % 5), temperature=0.8, ignore_eos=True)
            count += 7
            try:
                with client.stream_chat(messages, params) as stream:
                    for _ in stream:
                        if ended.is_set():
                            break
            except (Cancelled, Unavailable):
                return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--seconds", type=float, default=60, help="of load before the picture")
    parser.add_argument("--readers", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = make_repository(
            Path(folder) / "repository",
            backend="octavo",
            dtype="bfloat16",
            max_model_len=2048,
            num_gpu_blocks_override=420,
        )
        with (
            serving(repository, Path(folder) / "log") as server,
            gateway_before(server, Path(folder) / "gateway.log") as port,
        ):
            photograph(f"http://127.0.0.1:{port}", f"grpc://{server.grpc}", arguments)


def photograph(origin: str, url: str, arguments: argparse.Namespace) -> None:
    ended = threading.Event()
    readers = [threading.Thread(target=converse, args=(url, i, ended)) for i in range(arguments.readers)]
    scheme = "dark" if arguments.dark else "light"
    try:
        with (
            chromium() as browser,
            visit(browser, origin, device_scale_factor=1.5, color_scheme=scheme) as seen,
        ):
            for reader in readers:
                reader.start()
                time.sleep(0.4)
            expect(seen.page.locator("#model")).to_have_value("llm")
            seen.page.wait_for_timeout(arguments.seconds * 1000)
            seen.page.locator("#prompt").fill(QUESTION)
            seen.page.keyboard.press("Enter")
            expect(seen.page.locator(".assistant .body")).not_to_be_empty()
            seen.page.wait_for_timeout(8000)
            seen.page.screenshot(path=arguments.file)
    finally:
        ended.set()
        for reader in readers:
            reader.join()


if __name__ == "__main__":
    main()
