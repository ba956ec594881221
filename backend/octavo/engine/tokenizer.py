"""Text to token ids and back, and chat messages to text, by the tokenizer that came with the model.

The engine makes one `Tokenizer`; tokenizer threads encode while the engine's thread decodes. Encoding is
the `tokenizers` library's, which lets other threads run meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.gguf_tokenizer import build_tokenizer, token_id
from octavo.engine.vocabulary import MAX_VOCAB, Vocabulary
from octavo.errors import ConfigError, InvalidArgument
from octavo.weights.files import read_json_object, resolve_model_path
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_config import generation_config

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_MAX_TEXT_FILE_BYTES = 2**20


class Tokenizer:
    """Immutable and safe to use from several threads. Made by `load`."""

    def __init__(
        self,
        backend: Backend,
        where: str,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        model: "_Model | None" = None,
    ) -> None:
        """`special_tokens` are the texts of `bos_token` and its like; `where` names the files in errors."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._where = where
        self._special_tokens = dict(special_tokens)
        self._chat_template = ChatTemplate(chat_template, where) if chat_template else None
        self.vocabulary = Vocabulary.of(backend, where, model.vocab_size if model else 0)
        self.most_token_bytes = max(map(len, self.vocabulary.token_bytes), default=0)  # of the longest token
        self.bos_token_id: int | None = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        own_eos = () if eos is None else (eos,)
        self.eos_token_ids: tuple[int, ...] = (model.eos_token_ids if model else ()) or own_eos

    @classmethod
    def load(cls, model: str, tokenizer: str | None = None) -> "Tokenizer":
        """The model's own, or that of another folder or GGUF file; what ends a text is the model's to say.

        Raises `ConfigError` or `WeightsError` that names the file and what is wrong with it.
        """
        path = resolve_model_path(model)
        source = path if tokenizer is None else resolve_model_path(tokenizer)
        file = None if source.is_dir() else GGUFFile(source)
        if path.is_dir():
            facts = _Model.of_folder(path)
        else:
            facts = _Model.of_gguf(file if file and path == source else GGUFFile(path))
        return _from_folder(source, facts) if file is None else _from_gguf(file, facts)

    @property
    def vocab_size(self) -> int:
        """Ids are below it: the tokenizer's, or the model's, which often has a few rows to spare."""
        return len(self.vocabulary.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with BOS and the like where the model wants them. The text of a special token becomes
        that token. Raises `InvalidArgument` for what cannot be encoded as UTF-8: a lone surrogate."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}"
            ) from None
        # The library's plain `encode` holds the interpreter's lock until it is done; this one does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text. Raises `InvalidArgument` for an id that is outside the vocabulary."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InvalidArgument(
                    f"token id {i} is not in the vocabulary; allowed: 0 to {self.vocab_size - 1}"
                )
        text = b"".join(self.vocabulary.spoken(ids, skip_special_tokens)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.vocabulary.strips_first_space else text

    def token_text(self, token_id: int) -> str:
        """What a token says by itself, in the middle of a text; part of a character shows as U+FFFD. Empty
        for an id without a token."""
        return b"".join(self.vocabulary.spoken([token_id], False)).decode("utf-8", "replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, special tokens included: encode it with `add_special_tokens=False`.

        `variables` are the template's own (`tools`, `enable_thinking`). Raises `InvalidArgument` when the
        model has no template, and with the template's words when it refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidArgument(
                f"{self._where}: the model has no chat template; send text or token ids instead"
            )
        known = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return self._chat_template.render(messages, {**self._special_tokens, **known, **variables})

    def _id_of(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


@dataclass(frozen=True, slots=True)
class _Model:
    """What a tokenizer has to know of its model."""

    eos_token_ids: tuple[int, ...]
    vocab_size: int  # 0 when the model does not say

    @classmethod
    def of_folder(cls, folder: Path) -> "_Model":
        generation = read_json_object(folder / "generation_config.json", required=False)
        config = read_json_object(folder / "config.json", required=False)
        size: Any = config.get("vocab_size")
        known = type(size) is int and 0 < size <= MAX_VOCAB
        return cls(_eos_ids(generation) or _eos_ids(config), size if known else 0)

    @classmethod
    def of_gguf(cls, file: GGUFFile) -> "_Model":
        embedding = file.tensors.get("token_embd.weight")
        size = embedding.shape[0] if embedding else 0
        return cls(_eos_ids(generation_config(file.metadata)), min(size, MAX_VOCAB))


def _from_gguf(file: GGUFFile, model: _Model) -> Tokenizer:
    where, metadata = f"GGUF file {file.path}", file.metadata
    backend = build_tokenizer(metadata, where)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {role: token_id(metadata, name, len(tokens), where) for role, name in _ROLES.items()}
    special_tokens = {role: tokens[i] for role, i in ids.items() if i is not None}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{where}: tokenizer.chat_template is not a string")
    return Tokenizer(backend, where, special_tokens, template, model)


def _from_folder(folder: Path, model: _Model) -> Tokenizer:
    """`add_bos_token` in tokenizer_config.json is not read, as by Transformers: tokenizer.json decides."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(
            f"{folder}: it has no tokenizer.json; Transformers makes one (save_pretrained of a tokenizer)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare `Exception`
        raise ConfigError(f"{path}: it is not a tokenizer: {error}") from None
    settings = read_json_object(folder / "tokenizer_config.json", required=False)
    special_tokens = {role: token for role in _ROLES if (token := _content(settings.get(role)))}
    in_vocabulary = [t for t in special_tokens.values() if backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in in_vocabulary])
    return Tokenizer(backend, str(folder), special_tokens, _folder_template(folder, settings), model)


def _content(token: Any) -> str | None:
    """A special token in tokenizer_config.json: its text, or an object that holds its text."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            if path.stat().st_size > _MAX_TEXT_FILE_BYTES:
                raise ConfigError(f"{path}: it is larger than {_MAX_TEXT_FILE_BYTES} bytes")
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: it cannot be read: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{folder / 'tokenizer_config.json'}: 'chat_template' is not a string")
    return template


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(i for i in ids if type(i) is int and i >= 0)
