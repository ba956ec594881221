"""Builds a tokenizer from a GGUF file's metadata. Called by `engine.tokenizer` only.

A GGUF file carries the vocabulary and, by name, the way that text was cut before the merges were
learned (`tokenizer.ggml.pre`). That name decides token ids, so an unknown one is refused: the nearest
guess would give a model text that it was not trained on, and no error.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import ConfigError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"

_GPT2_NAMES = ("default", "gpt-2")
_SINGLE_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_PRE_TOKENIZERS = _GPT2_NAMES + _SINGLE_DIGIT_NAMES + _LLAMA3_NAMES + _QWEN2_NAMES

_SPACE = "▁"  # how SentencePiece writes a space
_MAX_PIECE_CHARS = 256  # merges are recovered only for pieces up to this: the work grows with the square


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """A tokenizer that adds BOS and EOS as the file says. `where` names the file in a `ConfigError`."""
    kind = metadata.get("tokenizer.ggml.model")
    builder = {"gpt2": _byte_level, "llama": _sentence_piece}.get(str(kind))
    if builder is None:
        raise ConfigError(f"{where}: tokenizer.ggml.model is {kind!r}; supported: gpt2, llama")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.tokens is not a list of strings")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError(
            f"{where}: tokenizer.ggml.tokens holds {len(tokens) - len(vocabulary)} tokens twice"
        )
    tokenizer = builder(metadata, vocabulary, where)
    _add_tokens(tokenizer, metadata, tokens, where)
    tokenizer.post_processor = _frame(metadata, tokens, where)
    return tokenizer


def token_id(metadata: Mapping[str, Any], name: str, vocab_size: int, where: str) -> int | None:
    """The id under `tokenizer.ggml.NAME_token_id`; None when the file has none."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
        raise ConfigError(
            f"{where}: tokenizer.ggml.{name}_token_id is {repr(value)[:80]}; allowed: 0 to {vocab_size - 1}"
        )
    return value


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    """BPE over bytes, each written as a printable character (GPT-2's way)."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    split: Any
    if pre in _LLAMA3_NAMES or pre in _QWEN2_NAMES:
        pattern = Regex(_LLAMA3 if pre in _LLAMA3_NAMES else _QWEN2)
        split = [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    elif pre in _SINGLE_DIGIT_NAMES:
        split = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    elif pre in _GPT2_NAMES:
        split = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        raise ConfigError(
            f"{where}: tokenizer.ggml.pre is {repr(pre)[:80]}; supported: {', '.join(_PRE_TOKENIZERS)}; for "
            "others set 'tokenizer' to a folder with the model's tokenizer.json"
        )
    merges = _merges(metadata, where)
    tokenizer = Tokenizer(_bpe(where, vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    if pre in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    """SentencePiece's BPE: spaces become `▁`, and what no piece covers falls back to bytes."""
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata, where)
    else:
        merges = _merges_from_scores(metadata, vocabulary, where)
    tokenizer = Tokenizer(_bpe(where, vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _bpe(where: str, **arguments: Any) -> models.BPE:
    try:
        return models.BPE(**arguments)
    except Exception as error:  # the library raises bare `Exception`: a merge of pieces it does not have
        raise ConfigError(f"{where}: the vocabulary and its merges do not fit together: {error}") from None


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise ConfigError(f"{where}: tokenizer.ggml.merges is not a list of strings")
    pairs = []
    for line in lines:
        left, _, right = str(line).partition(" ")
        if not left or not right or " " in right:
            raise ConfigError(f"{where}: tokenizer.ggml.merges holds {line[:80]!r}, which is not two pieces")
        pairs.append((left, right))
    return pairs


def _merges_from_scores(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str
) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose joined piece has the best score, so these are the
    merges: every way to cut a piece into two pieces, the best scores first."""
    scores = _per_token(metadata, "scores", len(vocabulary), where)
    merges = []
    for piece, score in zip(vocabulary, scores.tolist(), strict=True):
        if len(piece) > _MAX_PIECE_CHARS:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, -len(left), -len(right), left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]


def _per_token(metadata: Mapping[str, Any], name: str, vocab_size: int, where: str) -> npt.NDArray[Any]:
    values = np.asarray(metadata.get(f"tokenizer.ggml.{name}", ()))
    if values.shape != (vocab_size,) or values.dtype.kind not in "iuf":
        raise ConfigError(
            f"{where}: tokenizer.ggml.{name} must hold a number for each of {vocab_size} tokens"
        )
    return values


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], where: str) -> None:
    """Tokens that are found whole in a text: user-defined ones, and those that are no text, called special
    (control tokens and the unknown one; BOS and EOS also where a file forgot to say so)."""
    if "tokenizer.ggml.token_type" in metadata:
        kinds = _per_token(metadata, "token_type", len(tokens), where)
    else:
        kinds = np.full(len(tokens), TokenType.NORMAL)
    ends = {token_id(metadata, name, len(tokens), where) for name in ("bos", "eos")}
    special = np.isin(kinds, (TokenType.CONTROL, TokenType.UNKNOWN))
    special[[i for i in ends if i is not None]] = True
    user_defined = (kinds == TokenType.USER_DEFINED) & ~special

    def added(which: npt.NDArray[np.bool_]) -> list[AddedToken]:
        found = [tokens[i] for i in which.nonzero()[0] if tokens[i]]
        return [AddedToken(token, normalized=False, special=which is special) for token in found]

    tokenizer.add_special_tokens(added(special))
    tokenizer.add_tokens(added(user_defined))


def _frame(metadata: Mapping[str, Any], tokens: list[str], where: str) -> processors.TemplateProcessing:
    """BOS before and EOS after a text, where the file says so, or its kind's default does."""
    bos_by_default = (
        metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    )
    template, special = ["$A"], []
    for name, position, default in (("bos", 0, bos_by_default), ("eos", 2, False)):
        identity = token_id(metadata, name, len(tokens), where)
        if identity is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            # A placeholder stands for the token: a template cannot quote a text with spaces.
            template.insert(position, f"<{name}>")
            special.append({"id": f"<{name}>", "ids": [identity], "tokens": [tokens[identity]]})
    return processors.TemplateProcessing(single=template, special_tokens=special)
