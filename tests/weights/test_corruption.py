"""A GGUF model with flipped bytes in its header: served as it is, or refused with one of our own errors."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import OctavoError
from octavo.models.model_config import ModelConfig
from octavo.weights.gguf import GGUFFile
from octavo.weights.loader import load_weights, open_checkpoint
from tiny import tiny_llama
from tiny_gguf import byte_level_metadata, write_gguf


def test_a_damaged_header_never_raises_anything_else(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", vocab_size=288, attention_bias=True)
    tokenizer = byte_level_metadata("llama-bpe", add_bos_token=True, bos_token_id=3)
    metadata = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in tokenizer.items()}
    metadata |= {
        "tokenizer.chat_template": "{{ messages }}",
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 512,
    }
    path = tmp_path / "model.gguf"
    write_gguf(path, model, metadata=metadata)
    shapes = {name: t.shape for name, t in model.state_dict().items() if name != "lm_head.weight"}

    def weights() -> None:
        checkpoint = open_checkpoint(str(path))
        ModelConfig.from_dict(checkpoint.config())
        load_weights({name: torch.empty(shape) for name, shape in shapes.items()}.items(), checkpoint)

    def text() -> None:
        tokenizer = Tokenizer.load(str(path))
        tokenizer.decode(tokenizer.encode("hello the 1234 é🙂"))
        tokenizer.render_chat([{"role": "user", "content": "x"}])

    weights()
    text()
    content, rng = path.read_bytes(), random.Random(0)
    header_bytes = min(tensor.offset for tensor in GGUFFile(path).tensors.values())
    outcomes: Counter[str] = Counter()
    for _ in range(250):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(header_bytes)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(damaged)
        for use in (weights, text):
            try:
                use()
                outcomes["served"] += 1
            except OctavoError:
                outcomes["refused"] += 1
    assert min(outcomes["served"], outcomes["refused"]) > 50, outcomes
