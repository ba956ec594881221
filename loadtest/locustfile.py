"""Locust users that ask a language model by streams: over gRPC, over HTTP, and as OpenAI's clients do.

    locust -f loadtest/locustfile.py                              the web UI, on http://127.0.0.1:8089
    locust -f loadtest/locustfile.py --headless -u 8 -t 2m ...    no UI; the exit code tells of the SLO

`make loadtest` starts a server first. Everything that concerns Locust is here: users, its statistics and
web UI, when a test begins and ends. What is asked when, and the numbers, are in the modules called
`load_*`, which know nothing of it. Options and what comes out: backend/docs/load-tests.md.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import gevent
import gevent.pool
from flask import request as web_request
from locust import LoadTestShape, User, constant, events, task
from locust.exception import StopUser
from locust.runners import LocalRunner

sys.path.insert(0, str(Path(__file__).parent))

import load_options  # Locust may be started from anywhere
import load_page
import load_report
from load_link import Answer, SenderLost
from load_session import Session
from load_stats import Record, gaps

_log = logging.getLogger("loadtest")
_PAUSE_AFTER_ERROR_S = 0.5  # of a closed loop's user, so that refusals are not asked for as fast as they come
_EXIT_FAILED = 2
_TAB = "llm"


class Run:
    """The test of one Locust environment: at most one session at a time."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.session: Session | None = None
        self.sending = gevent.pool.Group()  # of an open loop
        self.failed = False
        self.told: dict[str, str] = {}  # by code, the first error's text
        self.last: list[dict[str, Any]] = []  # the table of the web UI, once the session is over

    def start(self) -> None:
        """Called when a test starts. Options may come from the web UI's form."""
        self.told, self.failed = {}, False
        try:
            plan = load_options.plan_of(self.environment.parsed_options)
            self.session = Session(plan, plan.load(), self._count)
        except (ValueError, OSError) as error:
            self.fail(error)
            return
        if plan.steps:
            self.session.tally.begin_step(plan.steps[0], time.monotonic())

    def stop(self) -> None:
        """The users have stopped."""
        session, self.session = self.session, None
        if session is None:
            return
        session.stop()
        self.sending.kill()
        session.close()
        options = self.environment.parsed_options
        data = load_report.data(session, self.told, options.exit_code_on_error)
        self.last = load_report.table(data)
        if not self.failed:
            self.environment.process_exit_code = data["exit_code"]
        sys.stderr.write(load_report.text(data))
        for path, write in (
            (options.report, load_page.write),
            (options.report_json, load_report.write_json),
        ):
            if path:
                write(Path(path), data)
                _log.info("wrote %s", path)

    def close(self) -> None:
        """Locust quits, be it by a signal in the middle of a test."""
        if self.session is not None:
            self.environment.runner.quit()
        if self.environment.process_exit_code is None and self.environment.parsed_options.headless:
            _log.error("the test ended before it began: give it more time")
            self.environment.process_exit_code = _EXIT_FAILED

    def table(self) -> list[dict[str, Any]]:
        if self.session is None:
            return self.last
        return load_report.table(load_report.running_data(self.session))

    def fail(self, error: Exception) -> None:
        """Ends a test that cannot go on."""
        _log.error("%s", error)
        self.failed = True
        self.environment.process_exit_code = _EXIT_FAILED
        self.quit()

    def quit(self) -> None:
        """From within a user: who stops the users cannot be one of them. The web UI stays."""
        runner = self.environment.runner
        gevent.spawn(runner.quit if self.environment.parsed_options.headless else runner.stop)

    def _count(self, done: Record, answer: Answer) -> None:
        """Into Locust's statistics. A request is one there: the rows of its parts do not count in the sum."""
        name, kind, stats = done.workload, done.transport, self.environment.stats
        self.environment.events.request.fire(
            request_type=kind,
            name=f"{name} e2e",
            response_time=1000 * (done.e2e_s or 0.0),
            response_length=done.output_tokens,
            exception=RequestFailed(done.error) if done.error else None,
            context={},
        )
        if answer.error is not None:
            code, message = answer.error
            if code not in self.told:
                self.told[code] = message
                _log.warning("the first error [%s]: %s", code, message)
            return
        for part, times_s in (
            ("ttft", [done.ttft_s]),
            ("tpot", [done.tpot_s]),
            ("itl", gaps(answer)),
            ("e2e, good", [done.e2e_s if done.good and self._promised else None]),
        ):
            for time_s in times_s:
                if time_s is not None:
                    stats.get(f"{name} {part}", kind).log(1000 * time_s, 0)

    @property
    def _promised(self) -> bool:
        return self.session is not None and self.session.plan.slo.stated


class RequestFailed(Exception):
    """Its text is the error's code alone, so that Locust counts errors by it."""


class _StreamingUser(User):
    """In a closed loop it asks, reads the answer, and asks again; in an open loop it sends what is due."""

    abstract = True
    wait_time = constant(0)
    transport: str

    @task
    def ask(self) -> None:
        run: Run = self.environment.octavo_run
        session = run.session
        if session is None:  # refused, or over
            raise StopUser
        try:
            if session.plan.arrivals == "closed":
                if not session.ask(self.transport):
                    session.stopping.wait(_PAUSE_AFTER_ERROR_S)
            else:
                self._send_next(run, session)
        except SenderLost as error:
            run.fail(error)
            raise StopUser from None

    def _send_next(self, run: Run, session: Session) -> None:
        due_s = session.next_due_s()
        if due_s is None:  # a trace has been played
            run.sending.join()
            run.quit()
            session.stopping.wait()
            raise StopUser
        if session.stopping.wait(max(0.0, due_s - time.monotonic())):
            run.sending.join()
            raise StopUser
        session.send_due(self.transport, due_s, run.sending.spawn)


class OctavoGrpcUser(_StreamingUser):
    """A Triton server's gRPC stream."""

    transport = "grpc"


class OctavoHttpUser(_StreamingUser):
    """A Triton server's generate_stream."""

    transport = "http"


class OpenAIUser(_StreamingUser):
    """/v1/chat/completions and /v1/completions, of the gateway or of any server that has them."""

    transport = "openai"


class Steps(LoadTestShape):
    """So many users, then so many. Used when --steps says so."""

    abstract = True  # or Locust would always use it

    def __init__(self, run: Run, users: tuple[int, ...], step_s: float) -> None:
        super().__init__()
        self._run, self._users, self._step_s = run, users, step_s
        self._index = 0

    def tick(self) -> tuple[int, float] | None:
        index = int(self.get_run_time() / self._step_s)
        if index >= len(self._users):
            return None
        if index != self._index and self._run.session is not None:
            self._run.session.tally.begin_step(self._users[index], time.monotonic())
        self._index = index
        return self._users[index], float(max(self._users))


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    load_options.add_to(parser)


@events.init.add_listener
def _init(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    try:
        if not isinstance(runner, LocalRunner):
            raise ValueError(
                "one Locust process only: it sends through one of its own, and the report needs all"
            )
        plan = load_options.plan_of(environment.parsed_options)
        plan.load()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(_EXIT_FAILED)
    run = environment.octavo_run = Run(environment)
    environment.user_classes[:] = [
        user for user in environment.user_classes if user.transport in plan.transports
    ]
    if plan.steps:
        environment.shape_class = Steps(run, plan.steps, plan.step_s)
        environment.shape_class.runner = runner
    environment.events.test_start.add_listener(lambda **_: run.start())
    environment.events.test_stopping.add_listener(lambda **_: run.session and run.session.stop())
    environment.events.test_stop.add_listener(lambda **_: run.stop())
    environment.events.quitting.add_listener(lambda **_: run.close())
    if web_ui is not None:
        _add_tab(web_ui, run)


def _add_tab(web_ui: Any, run: Run) -> None:
    """A tab of the web UI with this module's own figures."""
    columns = [{"key": key, "title": title} for key, title in load_report.COLUMNS.items()]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens and goodput", "key": _TAB}],
        "extended_tables": [{"key": _TAB, "structure": columns}],
    }

    @web_ui.app.after_request
    def add_table(response: Any) -> Any:
        if web_request.path == "/stats/requests" and response.is_json:
            table = {"extended_stats": [{"key": _TAB, "data": run.table()}]}
            response.set_data(json.dumps({**response.json, **table}))
        return response
