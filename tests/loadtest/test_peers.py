"""`loadtest/peers.py`, with fake peers that speak the protocol in processes of their own."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import peer_machine
import peer_models
import peer_process
import peer_streams
import peers
from peer_process import PeerFailed, PeerProcess, environment, wait_quiet
from peer_report import Results, Row, rows, table
from peer_run import Run, make_prompts
from peer_table import GOALS, WORKS, Goal, Peer, Work, make_peers

LOADTEST = Path(peers.__file__).parent
MACHINE = {"cpu": "a CPU", "cores": 2, "date": "2026-01-01"}

# The real protocol around an engine that does as its settings say.
FAKE = f"""
import contextlib, os, subprocess, sys, time
sys.path.insert(0, {str(LOADTEST)!r})
import peer_worker

@contextlib.contextmanager
def fake(settings):
    print("a library says hello")
    subprocess.run(["echo", "and so does a program"])
    if "refuses" in settings:
        raise SystemExit(settings["refuses"])
    if "spins" in settings:
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    works = 0

    def run(prompts, output):
        nonlocal works
        works += 1
        if works == settings.get("dies_at"):
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(9)
        if "journal" in settings:
            with open(settings["journal"], "a") as journal:
                print(settings["name"], len(prompts), file=journal)
        os.write(1, b"not a line of the protocol\\n")
        return {{"tokens": len(prompts) * output - settings.get("misses", 0), "seconds": settings["seconds"]}}

    yield run

peer_worker.ENGINES["fake"] = fake
peer_worker.main()
"""


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_process, "_WINDOW_S", 0.1)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fake_worker.py"
    path.write_text(FAKE)
    return path


def fake(script: Path, name: str = "fake", works: tuple[str, ...] = ("batch",), **settings: Any) -> Peer:
    return Peer(name, "fake", works, {"name": name, "seconds": 2.0, **settings}, script=script)


BATCH, SINGLE = Work("batch", 2, 3, 4), Work("single", 1, 3, 4)


def test_what_libraries_print_does_not_get_between_the_answers(script: Path, tmp_path: Path) -> None:
    with PeerProcess(fake(script), tmp_path / "log") as process:
        assert 0 < process.load_s < 30
        assert process.versions["numpy"] == np.__version__
        for _ in range(2):
            assert process.work([[1, 2], [3, 4]], 5) == {"seconds": 2.0, "tokens": 10}
    log = (tmp_path / "log").read_text()
    assert "a library says hello" in log
    assert "and so does a program" in log
    assert log.count("not a line of the protocol") == 2


def test_a_peer_that_cannot_start_is_reported_with_its_last_lines(script: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"(?s)it ended with status 1\n.*no such model"):
        PeerProcess(fake(script, refuses="no such model"), tmp_path / "log")
    missing = Peer("fake", "fake", (), python=tmp_path / "nowhere/python")
    with pytest.raises(PeerFailed, match=r"nowhere/python does not start: No such file.*make bench-peers"):
        PeerProcess(missing, tmp_path / "log")


def test_answers_that_are_wrong_or_late_are_failures(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        PeerProcess(fake(script, misses=1), tmp_path / "log") as process,
        pytest.raises(PeerFailed, match="it made 9 tokens instead of 2 x 5"),
    ):
        process.work([[1], [2]], 5)
    script.write_text("print('hello')")
    with pytest.raises(PeerFailed, match=r"it answered with what is no JSON: b'hello\\n'"):
        PeerProcess(fake(script), tmp_path / "log")
    script.write_text("import sys; sys.stdin.read()")
    monkeypatch.setattr(peer_process, "LONGEST_LOAD_S", 0.1)
    with pytest.raises(PeerFailed, match="no answer after 0 s"):
        PeerProcess(fake(script), tmp_path / "log")


def test_a_program_that_a_peer_leaves_running_is_seen_and_ended(script: Path, tmp_path: Path) -> None:
    with PeerProcess(fake(script, spins=True), tmp_path / "log") as process:
        busy, _ = wait_quiet([process], timeout_s=0)
        assert busy["fake"] > peer_process.QUIET_CORES
    assert peer_process.cpu_seconds([process.pid]) == {process.pid: 0.0}
    with PeerProcess(fake(script), tmp_path / "log") as process:
        assert wait_quiet([process])[0] == {}


def test_peers_take_turns_and_the_first_turn_does_not_count(script: Path, tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    everything = ("batch", "single")
    first = fake(script, "first", everything, journal=journal)
    second = fake(script, "second", ("single",), journal=journal, seconds=0.5)
    prompts = make_prompts([BATCH, SINGLE], 100)
    with Run([first, second], [BATCH, SINGLE], tmp_path / "logs") as run:
        run.load()
        for turn in range(3):
            run.turn(prompts, counted=turn > 0)
    turn_of_all = ["first 2", "first 1", "second 1"]
    assert Path(journal).read_text().splitlines() == turn_of_all * 3
    answers = run.results.answers
    assert {name: {work: len(a) for work, a in by_work.items()} for name, by_work in answers.items()} == {
        "first": {"batch": 2, "single": 2},
        "second": {"single": 2},
    }
    assert run.results.rate("first", "batch") == 2 * 4 / 2.0
    assert run.results.rate("second", "single") == 4 / 0.5
    assert set(run.results.load_s) == {"first", "second"}


def test_a_peer_that_dies_is_out_and_the_run_goes_on(script: Path, tmp_path: Path) -> None:
    mortal, lasting = fake(script, "mortal", dies_at=2), fake(script, "lasting")
    broken = fake(script, "broken", refuses="no such model")
    prompts = make_prompts([BATCH], 100)
    with Run([mortal, broken, lasting], [BATCH], tmp_path / "logs") as run:
        run.load()
        for _ in range(3):
            run.turn(prompts, counted=True)
    results = run.results
    assert set(results.failures) == {"mortal", "broken"}
    assert "it ended with status 9\n" in results.failures["mortal"]
    assert "out of memory" in results.failures["mortal"]
    assert results.rate("mortal", "batch") is None
    assert len(results.answers["lasting"]["batch"]) == 3
    text = table(results, MACHINE, 3)
    assert "mortal          failed: it ended with status 9" in text
    assert "no such model" in text
    assert "4.0 (4 to 4)" in text


def measured(**seconds: list[float]) -> Results:
    """`peer__work=[...]`."""
    works = {"batch": Work("batch", 32, 128, 128), "prefill": Work("prefill", 32, 128, 1)}
    results = Results(works)
    for key, values in seconds.items():
        peer, _, work = key.partition("__")
        results.load_s[peer] = 30.0
        results.answers.setdefault(peer, {})[work] = [{"seconds": s, "tokens": 0} for s in values]
    return results


def test_ratios_are_those_of_medians_and_are_judged() -> None:
    results = measured(ours__batch=[1.0, 5.0, 2.0], theirs__batch=[5.0, 4.0, 9.0])
    goals = [Goal("batch", "ours", "theirs", 2.5), Goal("batch", "ours", "theirs", 2.6)]
    goals += [Goal("batch", "ours", "theirs", 0), Goal("batch", "ours", "absent", 1)]
    goals += [Goal("long", "ours", "theirs", 1)]
    found = rows(results, goals)
    assert [row.value for row in found] == [2.5] * 3
    assert [row.met for row in found] == [True, False, None]
    assert str(found[1]).split()[-5:] == [">=", "2.60", "2.50", "NOT", "MET"]
    results.failures["theirs"] = "it died"
    assert rows(results, goals) == []


def test_streams_starts_and_limits_are_judged_too() -> None:
    results = measured(octavo__batch=[3.54], octavo__prefill=[1.0], vllm__batch=[9.0])
    results.answers["octavo-streams"] = {
        "batch": [{"seconds": 4.0, "tokens_per_response": 1.5, "steady_p99_s": 0.05}]
    }
    results.starts_s = {"warm": [1.0, 3.0, 2.0], "cold": [10.0]}
    results.read_bytes_per_s = [20e9]
    results.step_bytes = {"octavo": int(0.2e9)}
    assert results.step_s("octavo") == pytest.approx(0.02)
    by_label = {row.label: row for row in rows(results, [])}
    assert {label: (round(row.value, 6), row.met) for label, row in by_label.items()} == {
        "octavo-streams: tokens per response": (1.5, True),
        "octavo-streams: inter-token p99 in steps, prompts done": (2.5, False),
        "load of vllm / start of octavo serve, warm": (15.0, True),
        "load of vllm / start of octavo serve, cold": (3.0, False),
        "octavo: share of the read bandwidth in a decode step": (0.5, None),
    }


def test_a_busy_machine_is_pointed_out() -> None:
    results = measured(octavo__batch=[1.0])
    results.others_cores = [0.0, 0.7, 1.5]
    assert "WARNING: other programs used 0.7 cores" in table(results, MACHINE, 3)
    results.others_cores = [0.0, 0.05, 1.5]
    assert "WARNING" not in table(results, MACHINE, 3)


def test_a_bound_from_above_is_met_from_below() -> None:
    assert Row("", 2.0, 2.0, at_most=True).met
    assert not Row("", 2.1, 2.0, at_most=True).met


def test_goals_and_peers_name_each_other(tmp_path: Path) -> None:
    known = make_peers(tmp_path, WORKS, [4, 5], tmp_path / "libtcmalloc.so")
    works = {work.name for work in WORKS}
    for goal in GOALS:
        assert goal.work in set(known[goal.ours].works) & set(known[goal.theirs].works)
    assert all(set(peer.works) <= works for peer in known.values())
    vllm = known["vllm"].environment
    assert vllm["VLLM_CPU_OMP_THREADS_BIND"] == "4,5"
    assert vllm["LD_PRELOAD"] == f"{tmp_path}/libtcmalloc.so:{tmp_path}/vllm/lib/libiomp5.so"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in known["vllm-default"].environment
    assert known["octavo"].settings["max_num_seqs"] == 32
    assert known["octavo"].settings["max_model_len"] == 576


def test_prompts_are_the_same_in_every_run() -> None:
    prompts = make_prompts(WORKS, 49152)
    assert prompts == make_prompts(WORKS, 49152)
    assert [(len(p), len(p[0])) for p in prompts.values()] == [(32, 128), (8, 512), (1, 128), (32, 128)]
    assert all(0 <= token < 49152 for token in prompts["batch"][0])
    assert [str(work.shrunk()) for work in WORKS][:2] == ["4 x (16 in, 16 out)", "4 x (64 in, 8 out)"]


def test_thread_settings_of_the_callers_shell_do_not_reach_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OCTAVO_CACHE", "somewhere")
    given = environment({"LD_PRELOAD": "a.so"})
    assert "OMP_NUM_THREADS" not in given
    assert (given["OCTAVO_CACHE"], given["LD_PRELOAD"], given["HF_HUB_OFFLINE"]) == ("somewhere", "a.so", "1")


def test_without_tcmalloc_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_machine, "find_tcmalloc", lambda: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--peers", "vllm", "--venvs", str(tmp_path)])
    with pytest.raises(SystemExit, match="apt-get install libtcmalloc-minimal4, or pass --without-tcmalloc"):
        peers.main()
    monkeypatch.setattr(sys, "argv", ["peers.py", "--only", "batch,walk"])
    with pytest.raises(SystemExit, match="--only: unknown: walk; known: batch, long, single, prefill, start"):
        peers.main()


class _Response:
    """As tritonclient's."""

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens

    def as_numpy(self, name: str) -> Any:
        assert name == "num_output_tokens"
        return None if self._tokens is None else np.array([self._tokens], np.uint32)


def test_tokens_of_one_response_come_at_once() -> None:
    streams = [
        [(10.1, _Response(1)), (10.2, _Response(3)), (10.2, _Response(None))],
        [(10.1, _Response(1)), (10.4, _Response(1))],
    ]
    summary = peer_streams._summary(streams, start_s=10.0)
    assert summary["tokens"] == 6
    assert summary["seconds"] == pytest.approx(0.4)
    assert summary["tokens_per_response"] == 1.5
    assert summary["inter_token_p50_s"] == pytest.approx(0.05)  # of 0, 0, 0.1 and 0.3
    with pytest.raises(RuntimeError, match="the server answered: queue full"):
        peer_streams._summary([[(10.1, Exception("queue full"))]], start_s=10.0)


def test_a_step_reads_every_weight_and_the_keys_and_values() -> None:
    work = Work("batch", 32, 128, 128)
    parameters, norms = 134_515_008, 61 * 576
    keys_and_values = 32 * (128 + 64) * 30 * 2 * 3 * 64 * 2
    assert peer_models.step_bytes(work, None) == 2 * parameters + keys_and_values
    assert peer_models.step_bytes(work, "int8") == parameters + norms + keys_and_values


def test_int8_weights_are_within_half_a_step_of_their_row() -> None:
    weight = torch.randn(5, 7).bfloat16()
    tensors = {"a.q_proj.weight": weight, "a.norm.weight": torch.ones(3)}
    quantised = peer_models._quantised(tensors)
    assert quantised.keys() == {"a.q_proj.weight", "a.q_proj.weight_scale", "a.norm.weight"}
    scale = quantised["a.q_proj.weight_scale"]
    assert scale.shape == (5, 1)
    error = (quantised["a.q_proj.weight"].float() * scale - weight.float()).abs()
    assert (error <= scale / 2 * 1.001).all()
