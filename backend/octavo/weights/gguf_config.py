"""What a GGUF file's metadata says of its model, in Hugging Face's words. Torch-free.

`weights.gguf_checkpoint` hands these out as the checkpoint's `config.json` and `generation_config.json`;
`engine.tokenizer` takes the ids that end a generation from here.
"""

import re
from collections.abc import Mapping
from typing import Any

from gguf.constants import GGMLQuantizationType

from octavo.errors import ConfigError
from octavo.weights.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"  # a tensor that is configuration: a divisor for each rotary frequency

_DTYPES = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What ends a generation: the end of the text, of a turn, and of a message to a tool."""
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    values = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(i for i in ids if i is not None)) or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in values.items() if value is not None}


def llama_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` of a file of the architecture `llama`.

    Raises `ConfigError` for metadata that is missing, wrong, or describes what is not supported.
    """
    read = _Metadata(file)
    hidden_size = read.size("embedding_length")
    num_heads = read.size("attention.head_count")
    head_size = read.size("attention.key_length", default=hidden_size // num_heads)
    read.require_equal("attention.value_length", head_size)
    read.require_equal("rope.dimension_count", head_size)
    read.require_equal("expert_count", 0)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("it is missing", "token_embd.weight")
    generation = generation_config(file.metadata)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": read.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.size("attention.head_count_kv", default=num_heads),
        "head_dim": head_size,
        "intermediate_size": read.size("feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": read.size("context_length"),
        "rms_norm_eps": read.value("attention.layer_norm_rms_epsilon"),
        "sliding_window": read.value("attention.sliding_window"),
        "rope_parameters": _rope(file, read),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _any(file, r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
        "mlp_bias": _any(file, r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
        "bos_token_id": generation.get("bos_token_id"),
        "eos_token_id": generation.get("eos_token_id"),
        "torch_dtype": _dtype(file),
    }


def _any(file: GGUFFile, pattern: str) -> bool:
    return any(re.fullmatch(pattern, name) for name in file.tensors)


class _Metadata:
    """The metadata of the architecture, by keys without its name."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def value(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"llama.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if type(value) is not int or value < 1:
            raise self._error(key, value, "it must be a number for all layers, 1 and more")
        return value

    def require_equal(self, key: str, supported: int) -> None:
        value = self.value(key, supported)
        if type(value) is not int or value != supported:
            raise self._error(key, value, f"supported: {supported}")

    def _error(self, key: str, value: Any, allowed: str) -> ConfigError:
        return ConfigError(
            f"GGUF file {self._file.path}: metadata 'llama.{key}' is {repr(value)[:80]}; {allowed}"
        )


def _rope(file: GGUFFile, read: _Metadata) -> dict[str, Any]:
    kind = read.value("rope.scaling.type", "none")
    factor = read.value("rope.scaling.factor", read.value("rope.scale_linear"))  # the second in old files
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read.value("rope.freq_base", 10000.0)}
    if ROPE_FACTORS in file.tensors:
        (_, factors), *_ = file.decode(ROPE_FACTORS)
        rope |= {"rope_type": "factors", "frequency_factors": factors.ravel().tolist()}
    elif kind == "linear" or (kind == "none" and factor not in (None, 0.0, 1.0)):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        original = read.value("rope.scaling.original_context_length")
        rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    return rope


def _dtype(file: GGUFFile) -> str:
    """Of a quantised file: bfloat16, in which such models are published; else as most weights are."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        dtype = _DTYPES.get(tensor.kind, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])
