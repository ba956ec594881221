"""A long, mixed and unfriendly load on a real server, and a verdict on what it leaves behind.

    make soak                                                 # five minutes
    make soak SOAK_MINUTES=30 SOAK_ARGS='--seed 7 --json FILE'

Ends at a number of requests or at a time, whichever comes first. The requests are those of `soak_load`: of
mixed length, cancelled, abandoned, wrong, with deadlines, to a model `llm` that is served throughout and to a
model `other` that is unloaded, loaded and reloaded meanwhile, with streams in flight. A fifth of it is
warm-up. The server is then left alone and looked at, and again at the end; `soak_verdict` says what must
hold. Exit status 1 when it does not. The seed that it prints makes the same requests again, though not at the
same moments.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from octavo.serving import installation
from octavo.serving.launcher import RunningServer
from octavo.serving.model_processes import model_processes
from processes import (
    children,
    group_is_empty,
    launch_options,
    num_threads,
    regions,
    resident_bytes,
    zombies,
)
from soak_load import MAX_MODEL_LEN, PATIENCE_S, Client, alone
from soak_verdict import End, Rest, Tally, judge
from tiny import tiny_llama
from triton_clients import Metrics, control, get
from waiting import comes_true

WARM_UP_SHARE = 0.2
NUM_CLIENTS = 16
EXIT_TIMEOUT_S = 20
LOG_LINES = 100  # the server's last ones, shown when something is wrong
_IN_FLIGHT = re.compile(r"shutting down: (\d+) requests in flight")
_GAVE_UP = "failed to stop server: Internal - Exit timeout expired"  # see `soak_verdict.GAVE_UP`
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")
ENGINE = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": MAX_MODEL_LEN,
    "num_gpu_blocks_override": 72,
}
# Little room, so that requests wait and are preempted; in `other` some are refused as well.
MODELS = {"llm": {"max_num_seqs": 8}, "other": {"max_num_seqs": 2, "max_queue_size": 1}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="at most so long; 5 by default")
    parser.add_argument("--requests", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--seed", type=int, default=None, help="of what is asked; a new one by default")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    args = parser.parse_args()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 32)
    return args


def main() -> None:
    args = arguments()
    say(f"seed {args.seed}; at most {args.minutes:g} minutes and {args.requests:,} requests")
    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as folder:
        options = launch_options(make_models(Path(folder)), exit_timeout_s=EXIT_TIMEOUT_S)
        log = args.log or Path(folder) / "log"
        with RunningServer.start(options, installation.find(), log) as server:
            server.wait_ready(120)
            list(server.log.new_lines())  # what it says while it starts is not the soak's
            tally, warm, last = soak(server, args)
            end = stop(server)
        problems = judge(tally, warm, last, end)
        if problems:
            say("".join(log.read_text(errors="replace").splitlines(keepends=True)[-LOG_LINES:]))
    report(tally, warm, last)
    say(f"the server ended with status {end.status}")
    if args.json:
        figures = {"seed": args.seed, "problems": problems, "warm": asdict(warm), "last": asdict(last)}
        sums = {name: getattr(tally, name) for name in ("requests", "finals", "left", "kinds", "codes")}
        args.json.write_text(json.dumps({**figures, **sums}, indent=1) + "\n")
    for problem in problems:
        say(f"error: {problem}")
    say(f"seed {args.seed}: {'failed' if problems else 'all is well'}")
    sys.exit(1 if problems else 0)


def make_models(folder: Path) -> Path:
    """A repository with `llm` and `other`, both tiny."""
    tiny_llama(folder / "weights")
    for name, own in MODELS.items():
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        config = 'backend: "octavo"\ninstance_group [{ kind: KIND_CPU }]\n'
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.json").write_text(json.dumps({"model": str(folder / "weights"), **ENGINE, **own}))
    return folder / "repository"


def soak(server: RunningServer, args: argparse.Namespace) -> tuple[Tally, Rest, Rest]:
    tally = Tally()
    expected = alone(server.http, server.grpc)
    started_s = time.monotonic()
    rests = []
    for share in (WARM_UP_SHARE, 1.0):
        until_s = started_s + 60 * args.minutes * share
        load(server, tally, f"{args.seed}-{share}", expected, until_s, round(args.requests * share))
        if server.process.poll() is not None:
            sys.exit(f"error: {server.failure()}")
        rests.append(settle(server))
        say(f"{time.monotonic() - started_s:.0f} s, {tally.requests:,} requests: {rests[-1]}")
    return tally, rests[0], rests[1]


def load(
    server: RunningServer, tally: Tally, seed: str, expected: Mapping[str, str], until_s: float, most: int
) -> None:
    """All clients at once, and the model `other` coming and going, until the time is up or `tally` counts so
    many requests."""

    def goes_on() -> bool:
        return time.monotonic() < until_s and tally.requests < most and server.process.poll() is None

    def ask(number: int) -> None:
        client = Client(server.http, server.grpc, f"{seed}-{number}", expected)
        while goes_on():
            tally.add(client.next())
        client.close()

    def come_and_go() -> None:
        draw = random.Random(f"{seed}-lifecycle")
        while goes_on():
            time.sleep(draw.uniform(0, 8))
            (reload if draw.random() < 0.5 else unload_and_load)(server, tally)

    run_all([*(partial(ask, number) for number in range(NUM_CLIENTS)), come_and_go], tally)


def run_all(jobs: list[Callable[[], None]], tally: Tally) -> None:
    """Each on a thread of its own, to its end; what one raises is blamed on the soak itself."""

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            tally.blame(f"the soak's own thread ended with {error!r}")

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def reload(server: RunningServer, tally: Tally) -> None:
    """What loading does to a model that is loaded and has changed."""
    (server.options.repository / "other" / "1" / "model.json").touch()
    status, answer = control(server, "other", "load")
    if status != 200:
        tally.blame(f"reloading answered {status}: {answer}")


def unload_and_load(server: RunningServer, tally: Tally) -> None:
    pid = server.process.pid
    status, answer = control(server, "other", "unload")
    if status != 200:
        tally.blame(f"unloading answered {status}: {answer}")
    gone = comes_true(lambda: get(server, "/v2/models/other/ready")[0] != 200, PATIENCE_S)
    if not (gone and comes_true(lambda: "other_0_0" not in model_processes(pid).values(), PATIENCE_S)):
        tally.blame(f"the model was not gone {PATIENCE_S:.0f} s after it was unloaded")
    status, answer = control(server, "other", "load")
    if status != 200:
        tally.blame(f"loading answered {status}: {answer}")


def settle(server: RunningServer) -> Rest:
    """Waits until nothing is computed any more, and reads what the server holds then."""
    time.sleep(2)  # the gauges are refreshed every second
    comes_true(lambda: not any(gauges(server).values()), PATIENCE_S)
    # A model that was replaced goes once its last stream is over.
    pid = server.process.pid
    comes_true(lambda: len(children(pid)) == len(MODELS), PATIENCE_S)
    processes = {"server": pid, **{name: process for process, name in model_processes(pid).items()}}
    return Rest(
        # The model that comes and goes is a new process each time: it has no level to stay at.
        resident_bytes={
            name: resident_bytes(process)
            for name, process in processes.items()
            if not name.startswith("other")
        },
        threads={name: num_threads(process) for name, process in processes.items()},
        zombies=len(zombies(pid)),
        regions=len(regions(server)),
        gauges=gauges(server),
    )


def stop(server: RunningServer) -> End:
    """Tells the server to end; each model says how many requests it still has then."""
    lines = list(server.log.new_lines())
    status = server.stop()
    last = list(server.log.new_lines())
    in_flight = [_IN_FLIGHT.search(line.text) for line in last]
    return End(
        status=status,
        unanswered=sum(int(match[1]) for match in in_flight if match),
        group_is_empty=group_is_empty(server.process.pid),
        regions=len(regions(server)),
        errors=tuple(
            line.raw for line in lines + last if line.level in ("E", "F") and _GAVE_UP not in line.text
        ),
    )


def gauges(server: RunningServer) -> dict[str, float]:
    metrics = Metrics(server)
    return {f"{name} of {model}": metrics.value(name, model=model) for name in GAUGES for model in MODELS}


def report(tally: Tally, warm: Rest, last: Rest) -> None:
    say(f"{tally.requests:,} requests: {tally.finals:,} final responses, {tally.left:,} clients that left")
    say(f"answers compared with what they are alone: {tally.known:,}, of which differ: {tally.differing}")
    for what, counts in (("requests by kind", tally.kinds), ("final responses by code", tally.codes)):
        say(f"{what}: " + ", ".join(f"{name} {count:,}" for name, count in counts.most_common()))
    for name, before in warm.resident_bytes.items():
        after = last.resident_bytes.get(name, 0)
        say(f"memory of {name}: {before / 2**20:.1f} MiB after the warm-up, {after / 2**20:.1f} at the end")
    say(f"threads after the warm-up: {dict(warm.threads)}; at the end: {dict(last.threads)}")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
