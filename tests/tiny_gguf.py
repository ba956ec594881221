"""Tiny GGUF files: a Transformers Llama, permuted as llama.cpp's converter does, and tokenizers' metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i and row i + D / 2 of a head become neighbours: llama.cpp rotates those."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """Matrices are stored as `kind`, the rest as float32. `metadata` comes on top; None leaves a key out."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    entries: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **(metadata or {}),
    }
    for key, value in entries.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if ".q_proj." in name:
            values = permuted(values, config.num_attention_heads)
        if ".k_proj." in name:
            values = permuted(values, config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, stored), raw_dtype=stored)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


def byte_level_metadata(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """All bytes, some merges (numbers among them), a control and a user-defined token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = "t h|th e|Ġ the|i n|Ġ Ġ|ĠĠ ĠĠ|1 2|12 3|123 4|Ġ 1|' s|Ã ©|Ċ Ċ|. .|! Ċ|Ġ a".split("|")
    merged = ["".join(pair.split()) for pair in pairs]
    tokens = ["<|endoftext|>", *alphabet, *merged, "<think>", "a b"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.token_type": np.array(
            [CONTROL, *[NORMAL] * (len(tokens) - 3), USER_DEFINED, USER_DEFINED], np.int32
        ),
        "tokenizer.ggml.eos_token_id": 0,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentence_piece_metadata(**more: Any) -> dict[str, Any]:
    """Bytes, single characters, and words with every piece on the way to them, best scores first."""
    words = ["▁the", "▁hello", "▁a", "▁▁▁▁", "ing", "ello", "世界", "▁world", "é", "123"]
    pieces = dict.fromkeys([*"▁abcdefghilmnoprstuw123", *"世界é"])
    for word in words:
        pieces.update(dict.fromkeys(word[:cut] for cut in range(2, len(word) + 1)))
    characters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*characters, *pieces]
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(pieces))], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
