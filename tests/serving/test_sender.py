"""Who gets the next response, what is in it, and that nobody waits for longer than their turn."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from octavo.errors import Cancelled, OctavoError
from octavo.request import SamplingParams, TextDelta
from octavo.serving.codec import Returns, Tensors
from octavo.serving.outbox import OpenRequest, Outbox
from octavo.serving.reply import Reply
from octavo.serving.sender import Sender

TIMEOUT_S = 5.0


@dataclass
class Server:
    """A channel that writes down what is sent. Tests clear `unblocked` to hold every send up."""

    sent: list[tuple[str, str]] = field(default_factory=list)  # client's id, text of all sequences
    asked: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    finals: list[str] = field(default_factory=list)
    asking_s: float = 0.0
    sending_s: float = 0.0
    unblocked: threading.Event = field(default_factory=threading.Event)
    busy: threading.Event = field(default_factory=threading.Event)

    def send(self, request: OpenRequest, tensors: Tensors, final: bool) -> None:
        self.busy.set()
        assert self.unblocked.wait(TIMEOUT_S)
        time.sleep(self.sending_s)
        self.sent.append((request.client_id, b"|".join(tensors["text_output"]).decode()))
        if final:
            self.finals.append(request.client_id)

    def send_error(self, request: OpenRequest, error: OctavoError) -> None:
        self.sent.append((request.client_id, error.code))
        self.finals.append(request.client_id)

    def is_cancelled(self, request: OpenRequest) -> bool:
        self.asked.append(request.client_id)
        time.sleep(self.asking_s)
        return request.client_id in self.cancelled


class Run:
    """A sender with its outbox, over a `Server`. `open` opens a request; `put` is what an engine does."""

    def __init__(self, coalesce: bool = True) -> None:
        self.server = Server()
        self.server.unblocked.set()
        self.outbox = Outbox(coalesce)
        self.done: list[str] = []
        self.sender = Sender(
            self.outbox,
            self.server,
            cancel=lambda request: self.outbox.fail(request, Cancelled("cancelled")),
            on_done=lambda ended: self.done.append(ended.request.client_id),
            on_tick=lambda: None,
        )

    def open(self, id: str, *, n: int = 1, stream: bool = True) -> OpenRequest:
        request = self.outbox.open(None)  # type: ignore[arg-type]
        request.client_id = id
        request.reply = Reply(SamplingParams(n=n), Returns(), stream)
        return request

    def put(self, request: OpenRequest, text: str, index: int = 0, last: bool = False) -> None:
        self.outbox.put(request, TextDelta(request.id, index, text, (ord(text[-1]),), request_finished=last))

    def hold(self, request: OpenRequest) -> None:
        """Blocks the sender in the response with this request's next delta, which is `-`."""
        self.server.unblocked.clear()
        self.server.busy.clear()
        self.put(request, "-")
        assert self.server.busy.wait(TIMEOUT_S)

    def settle(self) -> list[tuple[str, str]]:
        """Lets the sender go on; what it sends until nothing is waiting, without what was held."""
        begin = len(self.server.sent) + 1
        self.server.unblocked.set()
        deadline = time.monotonic() + TIMEOUT_S
        while self.outbox._waiting or len(self.server.sent) < begin:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.sender.stop(TIMEOUT_S)
        return self.server.sent[begin:]


@pytest.fixture
def make() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(coalesce: bool = True) -> Run:
        runs.append(Run(coalesce))
        runs[-1].sender.start()
        return runs[-1]

    yield start
    for run in runs:
        run.server.unblocked.set()
        run.sender.stop(TIMEOUT_S)
        assert not run.sender._thread.is_alive()


def test_a_sender_that_keeps_up_merges_nothing(make: Callable[..., Run]) -> None:
    run = make()
    streams = [run.open(name) for name in "abcd"]
    for step in range(50):
        for stream in streams:
            run.put(stream, str(step % 10))
        deadline = time.monotonic() + TIMEOUT_S
        while len(run.server.sent) < 4 * (step + 1):
            assert time.monotonic() < deadline
            time.sleep(0.0001)
    assert run.server.sent == [(name, str(step % 10)) for step in range(50) for name in "abcd"]
    assert run.sender.num_coalesced == 0


def test_what_waits_for_a_stream_while_the_sender_is_behind_is_one_response(make: Callable[..., Run]) -> None:
    run = make()
    a, b = run.open("a"), run.open("b")
    run.hold(a)
    for text in "123":
        run.put(b, text)
        run.put(a, text)
    assert run.settle()[:2] == [("b", "123"), ("a", "123")]
    assert run.sender.num_coalesced == 4


def test_without_coalescing_every_delta_is_a_response_in_order_of_arrival(make: Callable[..., Run]) -> None:
    run = make(coalesce=False)
    a, b = run.open("a"), run.open("b")
    run.hold(a)
    for text in "123":
        run.put(b, text)
        run.put(a, text)
    assert run.settle()[:6] == [("b", "1"), ("a", "1"), ("b", "2"), ("a", "2"), ("b", "3"), ("a", "3")]
    assert run.sender.num_coalesced == 0


def test_a_first_token_waits_for_one_response_to_each_of_the_others(make: Callable[..., Run]) -> None:
    run = make()
    old = [run.open(f"old {number}") for number in range(8)]
    run.hold(old[0])
    for text in "123":
        for stream in old:
            run.put(stream, text)
    run.put(run.open("new"), "!")
    for stream in old:  # these join what waits already: nobody gets before the newcomer a second time
        run.put(stream, "4")
    sent = run.settle()[:9]
    assert sent == [*((f"old {number}", "1234") for number in range(8)), ("new", "!")]


def test_streams_take_turns_while_the_sender_is_behind(make: Callable[..., Run]) -> None:
    """Whoever was just answered goes to the end of the line, so all get as many responses."""
    run = make()
    streams = [run.open(name) for name in "abcde"]
    turns: list[str] = []
    right = run.server.send

    def send_and_generate(request: OpenRequest, tensors: Tensors, final: bool) -> None:
        right(request, tensors, final)
        turns.append(request.client_id)
        if len(turns) <= 100:  # two more of everybody's before the next response can leave
            for stream in streams * 2:
                run.put(stream, "x")

    run.server.send = send_and_generate  # type: ignore[method-assign]
    run.put(streams[0], "x")
    run.settle()
    assert turns[:101] == ["a", *"abcde" * 20]


def test_deltas_of_one_step_for_several_sequences_share_a_response_and_are_not_counted(
    make: Callable[..., Run],
) -> None:
    run = make()
    held, two = run.open("held"), run.open("two", n=2)
    run.hold(held)
    run.put(two, "x", 0)
    run.put(two, "y", 1)
    assert run.settle()[0] == ("two", "x|y")
    assert run.sender.num_coalesced == 0


def test_without_streaming_nothing_is_counted(make: Callable[..., Run]) -> None:
    run = make()
    held, whole = run.open("held"), run.open("whole", stream=False)
    run.hold(held)
    for text in "abc":
        run.put(whole, text)
    run.put(whole, "d", last=True)
    assert run.settle()[0] == ("whole", "abcd")
    assert run.sender.num_coalesced == 0
    assert run.done == ["whole", "held"]


def test_what_comes_after_the_final_response_is_dropped(make: Callable[..., Run]) -> None:
    for coalesce in (True, False):
        run = make(coalesce)
        held, request = run.open("held"), run.open("r")
        run.hold(held)
        run.put(request, "a", last=True)
        run.outbox.fail(request, Cancelled("late"))
        sent = run.settle()
        assert [name for name, _ in sent].count("r") == 1
        assert run.server.finals.count("r") == 1


def test_tokens_do_not_wait_for_a_round_of_asking_who_was_cancelled(make: Callable[..., Run]) -> None:
    run = make()
    run.server.asking_s = 0.005
    waiting = [run.open(f"w{number}") for number in range(100)]
    deadline = time.monotonic() + TIMEOUT_S
    while len(run.server.asked) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    asked = len(run.server.asked)
    run.put(waiting[0], "x")
    while not run.server.sent:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    assert len(run.server.asked) - asked < 20  # of the 97 that were left in the round


def test_everyone_is_asked_in_turn_and_the_cancelled_are_ended_once(make: Callable[..., Run]) -> None:
    run = make()
    for number in range(5):
        run.open(str(number))
    run.server.cancelled = {"3"}
    deadline = time.monotonic() + TIMEOUT_S
    while len(run.server.asked) < 14:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert sorted(run.server.asked[:5]) == ["0", "1", "2", "3", "4"]
    assert sorted(run.server.asked[5:13]) == ["0", "0", "1", "1", "2", "2", "4", "4"]
    assert run.server.sent == [("3", "CANCELLED")]


def test_a_queued_request_of_150_is_ended_within_200_ms_of_its_cancellation_while_32_stream(
    make: Callable[..., Run],
) -> None:
    """With a response and a question as dear as measured on a server, and a sender that is always behind."""
    run = make()
    run.server.sending_s, run.server.asking_s = 0.0006, 0.00005
    streams = [run.open(f"s{number}") for number in range(32)]
    queued = [run.open(f"q{number}") for number in range(118)]
    over = threading.Event()

    def generate() -> None:
        while not over.wait(0.02):
            for stream in streams:
                run.put(stream, "x")

    engine = threading.Thread(target=generate)
    engine.start()
    try:
        waits_s = []
        for number, request in enumerate(queued[::8]):
            time.sleep(0.013 * (number % 5))  # somewhere in a round
            cancelled_s = time.monotonic()
            run.server.cancelled.add(request.client_id)
            while run.outbox.is_open(request):
                assert time.monotonic() - cancelled_s < TIMEOUT_S
                time.sleep(0.001)
            waits_s.append(time.monotonic() - cancelled_s)
    finally:
        over.set()
        engine.join()
    assert len(waits_s) == 15
    assert max(waits_s) < 0.2
    assert run.server.finals == [request.client_id for request in queued[::8]]
