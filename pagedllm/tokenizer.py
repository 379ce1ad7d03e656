"""Tokenizer: text to ids and back, and chat templates, from a model folder's files.

Reads tokenizer.json by the `tokenizers` library alone (0.1 s; transformers' Auto* classes take 1.5 s and are asked only
where a folder has no tokenizer.json) and applies what tokenizer_config.json adds, as transformers does. Holds no state
that a call changes but caches. Called by LLM; the engine gets `detokenizer`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm.chat_template import DEFAULT, NAMED_TEMPLATES_FOLDER, TEMPLATE_FILE, ChatTemplates, read_templates
from pagedllm.detokenizer import Detokenizer, TokenBytes
from pagedllm.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
LEGACY_TEMPLATE_FILE = "chat_template.json"  # {"chat_template": ...}
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
FIRST_WITHOUT_FORK_WARNING = (0, 23)
SLICE_TEXTS = 2048


class Tokenizer:
    """Attributes: source (for messages), bos_token_id (or None), eos_token_ids, detokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, files: Mapping[str, str], source: str) -> None:
        """`files`: name to content of the folder's other files; `source`: the folder, for messages."""
        self.source = source
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        config = _read_config(files, source)
        tokens = _named_tokens(config)
        _add_tokens(backend, config, tokens, source)
        names = {name: _content(token) for name, token in tokens.items() if name.endswith("_token")}
        self.bos_token_id = self._id_of(names.get("bos_token"))
        eos_token_id = self._id_of(names.get("eos_token"))
        self.eos_token_ids = () if eos_token_id is None else (eos_token_id,)
        self._table = TokenBytes(backend, source)
        self.detokenizer = Detokenizer(self._table)
        self._templates = ChatTemplates(read_templates(files, config, source), names, source)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """A model's folder, or a GGUF file, which holds a tokenizer too."""
        folder = Path(path)
        if folder.is_file():
            from pagedllm.model.gguf_header import GGUFHeader
            from pagedllm.model.gguf_tokenizer import GGUFVocabulary, tokenizer_files

            return cls.from_files(tokenizer_files(GGUFVocabulary(GGUFHeader(folder))), str(folder))
        if not folder.is_dir():
            raise ModelError(f"{folder} does not exist: pass the folder that holds {TOKENIZER_FILE}")
        names = [CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE, LEGACY_TEMPLATE_FILE]
        names += [f"{NAMED_TEMPLATES_FOLDER}/{path.name}" for path in folder.glob(f"{NAMED_TEMPLATES_FOLDER}/*.jinja")]
        files = {name: _read_text(folder / name) for name in names if (folder / name).is_file()}
        file = folder / TOKENIZER_FILE
        return cls(_load(file) if file.is_file() else _convert(folder), files, str(folder))

    @classmethod
    def from_files(cls, files: Mapping[str, str], source: str) -> Tokenizer:
        """From contents by name, tokenizer.json among them."""
        from tokenizers import Tokenizer as Backend

        return cls(_parse(lambda: Backend.from_str(files[TOKENIZER_FILE]), source), files, source)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's own vocabulary may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Those that skip_special_tokens leaves out."""
        return self._table.special_ids

    def token_texts(self, num_tokens: int) -> dict[int, bytes]:
        """The bytes of the ids below num_tokens, without those that skip_special_tokens leaves out."""
        special = self._table.special_ids
        return {token_id: self._table[token_id] for token_id in range(num_tokens) if token_id not in special}

    @property
    def chat_template(self) -> str | None:
        """The default one."""
        return self._templates.templates.get(DEFAULT)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Equal to `encode` of each. Uses all cores, except where that would make a later fork print a warning.

        In slices: what the library returns is large, and an interrupt is seen between two of them.
        """
        import tokenizers

        version = tuple(map(int, tokenizers.__version__.split(".")[:2]))
        if version < FIRST_WITHOUT_FORK_WARNING and "TOKENIZERS_PARALLELISM" not in os.environ:
            return [self.encode(text, add_special_tokens) for text in texts]
        ids: list[list[int]] = []
        for begin in range(0, len(texts), SLICE_TEXTS):
            texts_of_slice = list(texts[begin : begin + SLICE_TEXTS])
            encodings = self._backend.encode_batch_fast(texts_of_slice, add_special_tokens=add_special_tokens)
            ids += [encoding.ids for encoding in encodings]
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Ids outside the vocabulary give no text.

        spaces_between_special_tokens: vLLM's name; both values give the same text, because no supported decoder puts
        spaces between special tokens.
        """
        stream = self.detokenizer.open((), skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, None outside it."""
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return token

    def token_to_id(self, token: str) -> int | None:
        return self._id_of(token)

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        clock: Callable[[], datetime] = datetime.now,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, special tokens included: encode it with add_special_tokens=False.

        chat_template: a template, the name of one of the model's, or the path of a file; None: the model's own.
        tools: JSON schemas or functions. clock: what `strftime_now` in templates reads. kwargs: seen by the template.
        Raises RequestError ("template_error", "empty_prompt" or "invalid_parameter") without an index.
        """
        return self._templates.render(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, clock, kwargs
        )

    def check_chat_template(self, chat_template: str) -> None:
        """Raises RequestError for one that `apply_chat_template` would refuse whatever the messages."""
        self._templates.check(chat_template)

    def _id_of(self, token: str | None) -> int | None:
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id


def _load(file: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    return _parse(lambda: Backend.from_file(str(file)), str(file))


def _parse(load: Callable[[], tokenizers.Tokenizer], source: str) -> tokenizers.Tokenizer:
    try:
        return load()
    except Exception as error:  # the library has no type of its own
        raise ModelError(f"{source}: not a tokenizer that the library can read: {_line(error)}") from error


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """transformers makes one from older files: a SentencePiece model, vocabulary and merges."""
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer

    try:
        backend = getattr(AutoTokenizer.from_pretrained(folder, local_files_only=True), "backend_tokenizer", None)
    except Exception as error:
        raise ModelError(f"{folder}: no {TOKENIZER_FILE}, and transformers cannot make one: {_line(error)}") from error
    if not isinstance(backend, Backend):
        raise ModelError(f"{folder}: no {TOKENIZER_FILE}, and its tokenizer has no fast form: convert it first")
    return backend


def transformers_tokenizer(source: str) -> Any:
    """The same tokenizer as a transformers object, from a folder or a GGUF file, without the network."""
    from transformers import AutoTokenizer

    path = Path(source)
    if path.is_file():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error


def _read_config(files: Mapping[str, str], source: str) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json counts only where that lists no added tokens."""
    config = _read_object(files, CONFIG_FILE, source) | _read_object(files, LEGACY_TEMPLATE_FILE, source)
    if "added_tokens_decoder" not in config:
        config |= _read_object(files, SPECIAL_TOKENS_FILE, source)
    return config


def _read_object(files: Mapping[str, str], name: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise ModelError(f"{source}/{name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{source}/{name}: an object is needed, got {type(value).__name__}")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name to token (a text, or an object with content and flags); extra tokens under their place."""
    named = {
        name: token
        for name, token in config.items()
        if name.endswith("_token") and (isinstance(token, str) or (isinstance(token, dict) and "content" in token))
    }
    for key in EXTRA_TOKENS:
        extra = config.get(key) or []
        if isinstance(extra, dict):
            named |= extra
        else:
            named |= {f"{key}[{index}]": token for index, token in enumerate(extra)}
    return named


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, Any], source: str
) -> None:
    """Tokens of tokenizer_config.json that tokenizer.json lacks or flags otherwise; named ones become special."""
    from tokenizers import AddedToken

    present = {i: _flags(token) for i, token in backend.get_added_tokens_decoder().items()}
    missing: list[AddedToken] = []
    try:
        for token_id, entry in sorted(
            (int(key), value) for key, value in config.get("added_tokens_decoder", {}).items()
        ):
            token = AddedToken(**{key: value for key, value in entry.items() if key != "__type"})
            if present.get(token_id) != _flags(token):
                missing.append(token)
                present[token_id] = _flags(token)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{source}/{CONFIG_FILE}: added_tokens_decoder is malformed: {error}") from error
    backend.add_tokens(missing)
    special = {flags[0] for flags in present.values() if flags[-1]}
    backend.add_special_tokens(
        [
            AddedToken(content, special=True, normalized=False)
            for content in dict.fromkeys(map(_content, named.values()))
            if content not in special
        ]
    )


def _flags(token: tokenizers.AddedToken) -> tuple[Any, ...]:
    return token.content, token.single_word, token.lstrip, token.rstrip, token.normalized, token.special
