"""The same work on Octavo, vLLM, Transformers and llama.cpp, in one run, in turns.

    make bench-peers                                  # everything, in about 20 minutes once it is installed
    make bench-peers BENCH_ARGS='--only batch --peers octavo,vllm --turns 1'

All peers run SmolLM2-135M on the same random prompts, greedily, each in a process of its own with the whole
machine for itself: all are loaded, then every turn has each peer do each work once, while the others sleep
(which is checked). The first turn warms up and is not counted; what counts are medians, and ratios within one
run. vLLM comes three times: `vllm` with its threads bound to all cores, which is what goals are judged
against, `vllm-default` as installed, and `vllm-int8` with int8 weights and activations. `octavo-streams` and
`octavo-unary` are clients of a tritonserver, one for each prompt, with and without streaming. Starts of the
server are compared with vLLM's load. A peer that fails is reported with its last lines, and the run goes on.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peer_machine
import peer_models
from peer_report import Results, rows, table
from peer_run import Run, make_prompts, measure_starts, say
from peer_table import START, WORKS, make_peers

VENVS = Path(__file__).parents[1] / "build/peers"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    works = [*(work.name for work in WORKS), START]
    parser.add_argument("--only", metavar="WORK,...", help=f"of {', '.join(works)}; all by default")
    parser.add_argument("--peers", metavar="PEER,...", help="all by default")
    parser.add_argument("--turns", type=int, default=3, help="counted ones; one more warms up")
    parser.add_argument("--quick", action="store_true", help="tiny works: does everything run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    parser.add_argument(
        "--venvs", type=Path, default=VENVS, metavar="FOLDER", help="of the peers' environments and models"
    )
    parser.add_argument("--without-tcmalloc", action="store_true", help="run vLLM without that allocator")
    args = parser.parse_args()
    args.only = chosen(args.only, works, "--only")
    args.venvs = args.venvs.absolute()
    return args


def chosen(names: str | None, known: Sequence[str], option: str) -> list[str]:
    """Those named, in the order in which they are known."""
    wanted = list(known) if names is None else names.split(",")
    if unknown := sorted(set(wanted) - set(known)):
        sys.exit(f"error: {option}: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return [name for name in known if name in wanted]


def main() -> None:
    args = arguments()
    loaded_for_start = {"vllm"} if START in args.only else set()
    works = [work.shrunk() if args.quick else work for work in WORKS if work.name in args.only]
    tcmalloc = None if args.without_tcmalloc else peer_machine.find_tcmalloc()
    known = make_peers(args.venvs, works or WORKS, peer_machine.cores(), tcmalloc)
    named = [known[name] for name in chosen(args.peers, list(known), "--peers")]
    peers = [peer for peer in named if set(peer.works) & set(args.only) or peer.name in loaded_for_start]
    uses_vllm = any(peer.engine == "vllm" for peer in peers)
    if uses_vllm and tcmalloc is None and not args.without_tcmalloc:
        sys.exit(
            "error: vLLM is to run with tcmalloc, as its documentation advises, and there is no "
            "libtcmalloc_minimal.so.4: apt-get install libtcmalloc-minimal4, or pass --without-tcmalloc"
        )
    peer_models.export_models(args.venvs)

    logs = args.venvs / "logs"
    with Run(peers, works, logs) as run:
        results = run.results
        if START in args.only:
            measure_starts(results, args.venvs, 1 if args.quick else 3)
        run.load()
        if {"batch", "prefill"} <= results.works.keys():
            results.step_bytes = {
                peer.name: peer_models.step_bytes(results.works["batch"], peer.settings.get("quantization"))
                for peer in peers
                if peer.engine == "octavo"
            }
        memory = peer_machine.MemoryReader()
        prompts = make_prompts(works, peer_models.vocab_size())
        for turn in range(args.turns + 1 if works else 0):
            say(f"turn {turn} of {args.turns}" if turn else "warming up")
            run.turn(prompts, counted=turn > 0)
            run.rest()
            results.read_bytes_per_s.append(memory.bytes_per_s())
    machine = peer_machine.describe()
    print(table(results, machine, args.turns))
    if uses_vllm and args.without_tcmalloc:
        print("  vLLM ran without tcmalloc")
    if args.json:
        report = _report(args, results, machine, run.versions)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _report(
    args: argparse.Namespace, results: Results, machine: dict[str, Any], versions: dict[str, Any]
) -> dict[str, Any]:
    return {
        "arguments": sys.argv[1:],
        "machine": machine,
        "versions": versions,
        "tcmalloc": not args.without_tcmalloc,
        "turns": args.turns,
        "measured": asdict(results),
        "goals": [{**asdict(row), "met": row.met} for row in rows(results)],
    }


if __name__ == "__main__":
    main()
