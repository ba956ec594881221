"""What `peers.py` compares: the works, the peers, who does which work, and the goals they are judged by."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.weights.loader import resolve_model_path
from offline import SMOLLM2

WORKER = Path(__file__).parent / "peer_worker.py"
OWN_PYTHON = Path(sys.executable)


@dataclass(frozen=True)
class Work:
    """So many sequences of so many random prompt tokens, continued greedily by so many output tokens."""

    name: str
    sequences: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.sequences} x ({self.prompt_tokens} in, {self.output_tokens} out)"

    @property
    def total_output_tokens(self) -> int:
        return self.sequences * self.output_tokens

    def shrunk(self) -> "Work":
        """Of the same kind and a small fraction of the size, to see that everything works."""
        return replace(
            self,
            sequences=min(self.sequences, 4),
            prompt_tokens=self.prompt_tokens // 8,
            output_tokens=max(1, self.output_tokens // 8),
        )


WORKS = (
    Work("batch", 32, 128, 128),
    Work("long", 8, 512, 64),
    Work("single", 1, 128, 128),
    Work("prefill", 32, 128, 1),  # what `batch` takes before its decode steps: the step time follows
)
START = "start"  # the work that is no work: from a process's start to its being ready


@dataclass(frozen=True)
class Peer:
    """`engine` names a function of `peer_worker`, which gets `settings` in a process of this `python`."""

    name: str
    engine: str
    works: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    python: Path = OWN_PYTHON
    environment: Mapping[str, str] = field(default_factory=dict)
    script: Path = WORKER


@dataclass(frozen=True)
class Goal:
    """`ours` does `work` at least `at_least` times as fast as `theirs`. 0: reported and not judged.

    vLLM is two peers: with all cores given to its threads by hand, and as it is when it is installed.
    """

    work: str
    ours: str
    theirs: str
    at_least: float


GOALS = (
    Goal("batch", "octavo", "vllm", 2.2),
    Goal("batch", "octavo", "vllm-default", 2.2),
    Goal("batch", "octavo", "transformers", 0),
    Goal("batch", "octavo", "llama.cpp-q4_1", 0),
    Goal("batch", "octavo-int8", "vllm", 3.0),
    Goal("batch", "octavo-int8", "vllm-default", 3.0),
    Goal("batch", "octavo-int8", "vllm-int8", 0),
    Goal("long", "octavo", "vllm", 2.0),
    Goal("long", "octavo", "vllm-default", 2.0),
    Goal("long", "octavo", "transformers", 0),
    Goal("single", "octavo", "transformers", 2.0),
    Goal("single", "octavo", "vllm", 0),
    Goal("single", "octavo", "llama.cpp-q4_1", 0),
    Goal("single", "octavo", "llama.cpp-q8_0", 0),
    Goal("single", "octavo-int8", "llama.cpp-q8_0", 0),
    Goal("batch", "octavo-streams", "octavo", 0.85),
    Goal("batch", "octavo-unary", "octavo", 0.95),
)
# The bounds within which the streams may merge tokens into one response.
MOST_TOKENS_PER_RESPONSE = 2.0
MOST_STEPS_BETWEEN_TOKENS = 2.0  # at the 99th percentile

# How many times as long as a start of the server vLLM's load takes. Its own cache is kept from run to run.
START_GOALS = {"warm": 15.0, "cold": 4.0}


def make_peers(
    folder: Path, works: Sequence[Work], cores: Sequence[int], tcmalloc: Path | None
) -> dict[str, Peer]:
    """All peers by name, in the order in which they take turns. `folder` has their virtual environments and
    exported models; `cores` are the numbers of the CPU cores to use."""
    most_sequences = max(work.sequences for work in works)
    longest = max(work.prompt_tokens + work.output_tokens for work in works)
    sizes = {"max_num_seqs": most_sequences, "max_model_len": longest}
    octavo = {
        **sizes,
        "model": SMOLLM2,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,  # the turns repeat the prompts
        "kv_cache_memory_bytes": 1 << 29,  # twice what the largest work needs
    }
    llama_sizes = {**sizes, "model": str(resolve_model_path(SMOLLM2)), "threads": len(cores)}
    everything = ("batch", "long", "single")

    def vllm(name: str, model: str, works: tuple[str, ...], bind: bool) -> Peer:
        venv = folder / "vllm"
        preload = [str(path) for path in (tcmalloc, venv / "lib/libiomp5.so") if path is not None]
        environment = {
            "LD_PRELOAD": os.pathsep.join(preload),
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CACHE_ROOT": str(folder / "cache" / name),
        }
        if bind:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        settings = {**sizes, "model": str(folder / model)}
        return Peer(name, "vllm", works, settings, venv / "bin/python", environment)

    def llama(name: str, works: tuple[str, ...], **more: str) -> Peer:
        settings = {**llama_sizes, **more}
        return Peer(name, "llama_cpp", works, settings, folder / "llama/bin/python")

    peers = (
        Peer("octavo", "octavo", (*everything, "prefill"), octavo),
        Peer("octavo-int8", "octavo", (*everything, "prefill"), {**octavo, "quantization": "int8"}),
        Peer("octavo-streams", "tritonserver", ("batch",), {**octavo, "stream": True}),
        Peer("octavo-unary", "tritonserver", ("batch",), {**octavo, "stream": False}),
        vllm("vllm", "model", everything, bind=True),
        vllm("vllm-default", "model", everything, bind=False),  # keeps a core for its server process
        vllm("vllm-int8", "model-int8", everything, bind=True),
        Peer("transformers", "transformers", everything, {"model": SMOLLM2}),
        llama("llama.cpp-q4_1", ("batch", "single")),
        llama("llama.cpp-q8_0", ("single",), requantised=str(folder / "model-q8_0.gguf")),
    )
    return {peer.name: peer for peer in peers}
