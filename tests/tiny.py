"""Tiny random models on disk, as Hugging Face folders with a byte-level tokenizer, for whoever needs one."""

import json
from pathlib import Path
from typing import Any

EOS = 1
FIRST_BYTE = 3  # ids 0..2 are special, then come the 256 bytes, then a few merges
SPECIALS = ("<pad>", "<eos>", "<user>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<user>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant: {% endif %}"
)


def tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Any:
    """Saves a random grouped-query Llama of a few thousand weights with a tokenizer; returns the model.

    Weights are larger than Transformers' initial ones, so that argmax decisions are not near ties.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "initializer_range": 0.15,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides})).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE whose text round-trips whatever the bytes are, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("a", "n")]
    tokens = [*SPECIALS, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
