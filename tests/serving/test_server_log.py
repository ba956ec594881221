"""Reading a tritonserver's log, line by line as a server wrote it."""

import os
from pathlib import Path

import pytest

from octavo.serving.server_log import ServerLog, parse

LOADING = 'I1130 08:38:18.456821 6051 model_lifecycle.cc:472] "loading: llm:1"\n'
LOADED = "I1130 08:38:23.413782 6051 model_lifecycle.cc:839] \"successfully loaded 'llm'\"\n"
OURS = 'I1130 08:38:21.250271 6051 tritonserver.py:6] "KV cache: 100 blocks"\n'
BEGINS = (
    "I1130 18:18:39.790433 6051 python_be.cc:2249] "
    '"TRITONBACKEND_ModelInstanceInitialize: {} (MODEL device 0)"\n'
)
IS_READY = 'I1130 18:19:00.327312 6051 tritonserver.py:242] "{}: version 1 is ready"\n'
LISTENS = 'I1130 18:19:01.027312 6051 http_server.cc:4704] "Started HTTPService at 127.0.0.1:8000"\n'
NOISE = 'E1130 08:38:18.455658 6051 server.cc:241] "CudaDriverHelper has not been initialized."\n'
TABLE = "+---+---+\n| llm | 1 |\n"
NOT_LOADED = (
    "E1130 08:38:20.052539 6051 model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: "
    r"{}\n\nAt:\n  /m/llm/1/model.py(4): initialize\n" + '"\n'
)


@pytest.fixture
def log(tmp_path: Path) -> ServerLog:
    (tmp_path / "log").write_text("")
    return ServerLog(tmp_path / "log")


def write(log: ServerLog, text: str) -> None:
    with log.path.open("a") as file:
        file.write(text)


def test_a_line_is_parsed_and_unescaped() -> None:
    line = parse('W1130 08:38:20.05 6051 model.py:64] "a \\"quoted\\" word\\nand a line"')
    assert (line.level, line.source, line.text) == ("W", "model.py", 'a "quoted" word\nand a line')
    assert parse("print").level is None


def test_new_lines_continue_and_wait_for_a_whole_line(log: ServerLog) -> None:
    write(log, LOADING + OURS[:30])
    assert [line.text for line in log.new_lines()] == ["loading: llm:1"]
    write(log, OURS[30:])
    assert [line.text for line in log.new_lines()] == ["KV cache: 100 blocks"]
    assert list(log.new_lines()) == []


def test_progress_is_what_a_model_says_between_loading_and_loaded(log: ServerLog) -> None:
    write(log, OURS + NOISE + LOADING + OURS + TABLE + "printed\n" + LOADED + OURS)
    said = [log.progress(line) for line in log.new_lines()]
    assert [text for text in said if text] == [
        "loading the model 'llm'",
        "KV cache: 100 blocks",
        "the model 'llm' is loaded",
    ]


def test_models_that_are_ready_wait_for_the_server_until_it_listens(log: ServerLog) -> None:
    for text, waits in (
        (LOADING + NOISE, False),
        (BEGINS.format("llm_0_0") + OURS, False),
        (IS_READY.format("llm_0_0"), True),
        (BEGINS.format("llm_0_1"), False),
        (IS_READY.format("llm_0_1"), True),
        (LOADED, True),
        (LISTENS, False),
    ):
        write(log, text)
        assert log.models_wait_for_server() == waits, text
    assert log.silent_s() < 60
    os.utime(log.path, (0, 0))
    assert log.silent_s() > 60


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (NOT_LOADED.format("ConfigError: 'dtype' is 3"), "the model 'llm' cannot be loaded: 'dtype' is 3"),
        (
            NOT_LOADED.format("TritonModelException: llm cannot be loaded: no such file"),
            "the model 'llm' cannot be loaded: no such file",
        ),
        (
            NOT_LOADED.format(r"ValueError: two\nlines"),
            "the model 'llm' cannot be loaded: ValueError: two lines",
        ),
        (
            "[libprotobuf ERROR x/text_format.cc:337] Error parsing text-format: 8:17: Expected integer.\n"
            'E1130 08:38:27.041624 6227 model_repository_manager.cc:1460] "Poll failed for model directory '
            "'llm': failed to read text proto from /m/llm/config.pbtxt\"\n",
            "the model 'llm' cannot be loaded: failed to read text proto from /m/llm/config.pbtxt: "
            "Error parsing text-format: 8:17: Expected integer.",
        ),
        (
            'E1130 08:40:40.586684 7919 main.cc:245] "failed to start GRPC service: Unavailable - Socket '
            "'127.0.0.1:8001' already in use \"\n",
            "tritonserver cannot start: failed to start GRPC service: Unavailable - Socket '127.0.0.1:8001' "
            "already in use",
        ),
        (
            "/x/tritonserver: error while loading shared libraries: libz.so.1: cannot open it\n",
            "tritonserver cannot start: error while loading shared libraries: libz.so.1: cannot open it",
        ),
        (
            "error: creating server: Internal - why\n",
            "tritonserver cannot start: creating server: Internal - why",
        ),
        ("", None),
    ],
    ids=["ours", "wrapped", "two lines", "config", "port", "library", "other", "nothing"],
)
def test_the_reason_of_a_failure_is_found(log: ServerLog, written: str, reason: str | None) -> None:
    write(log, NOISE + LOADING + written + TABLE)
    assert log.failure() == reason
