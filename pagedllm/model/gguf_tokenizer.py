"""From a GGUF header to tokenizer files: tokenizer.json, tokenizer_config.json, chat templates.

A file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not hold it, so PRE_TOKENIZERS does, by name; one that is
not in the table is refused, since a wrong one gives plausible wrong ids. Equality with llama.cpp's ids is what the
tests hold (tests/data/README.md), but for Qwen's normalization, where we follow the model's own tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedllm.errors import ModelError
from pagedllm.model.gguf_header import GGUFHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"  # SentencePiece's sign for a space
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # kinds in tokenizer.ggml.token_type
# Ends of a turn that files often do not declare, or declare as ordinary text; llama.cpp knows them by name too.
END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The text is cut by each pattern in turn, and the pieces are merged separately."""

    patterns: tuple[str, ...]
    takes_whole_words: bool = False  # a piece that is a token is taken without merging
    adds_bos: bool = False  # unless the file says otherwise
    is_normalized: bool = False  # NFC first


_LETTER = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*")


def _by_case(suffix: str, numbers: str) -> str:
    """Words end where a capital follows: Tekken's, and OpenAI's o200k, whose contractions stay at the word."""
    words = rf"{_LETTER}{_UPPER}*{_LOWER}+{suffix}|{_LETTER}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{numbers}|{_REST_WITH_SLASH}"


_LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_LLAMA3 = PreTokenizer((_LLAMA3_PATTERN,), takes_whole_words=True, adds_bos=True)
_QWEN2_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN2 = PreTokenizer((_QWEN2_PATTERN,), is_normalized=True)
_GPT2_ALONE = PreTokenizer((_GPT2,))
_DIGITS_FIRST = PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2_ALONE,
    "olmo": _GPT2_ALONE,
    "mpt": _GPT2_ALONE,
    "phi-2": _GPT2_ALONE,
    "smollm": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,  # Granite 3
    "starcoder": _DIGITS_FIRST,
    "command-r": _DIGITS_FIRST,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": PreTokenizer((_LLAMA3_PATTERN,)),  # OLMo 2, Phi 4
    "smaug-bpe": PreTokenizer((_LLAMA3_PATTERN,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": PreTokenizer((_QWEN2_PATTERN,)),
    "tekken": PreTokenizer((_by_case("", r"\p{N}"),), takes_whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_by_case(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),  # gpt-oss, Phi-4-mini
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

_TOKEN_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
              "sep_token": "seperator", "mask_token": "mask"}  # fmt: skip
_KNOWN = {
    "model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id", "eot_token_id",
    "eom_token_id", "unknown_token_id", "padding_token_id", "seperator_token_id", "mask_token_id", "add_bos_token",
    "add_eos_token", "add_space_prefix",
    # of no weight for a causal text model
    "add_sep_token", "cls_token_id", "token_type_count", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id",
    "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
}  # fmt: skip


class GGUFVocabulary:
    """What the header says of tokens, checked: one kind and, for SentencePiece, one score a token."""

    def __init__(self, header: GGUFHeader) -> None:
        self.path: Path = header.path
        self.metadata = header.metadata
        for key in header.metadata:
            name = key.removeprefix("tokenizer.ggml.")
            if name != key and name not in _KNOWN and not (name == "remove_extra_whitespaces" and not self._key(name)):
                raise ModelError(f"{self.path}: the tokenizer's setting {key} is not supported")
        self.model: str = self._key("model")
        if self.model not in ("gpt2", "llama"):
            raise ModelError(f"{self.path}: tokenizer.ggml.model {self.model!r} is not supported, only gpt2 and llama")
        tokens = self._key("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ModelError(f"{self.path}: tokenizer.ggml.tokens is missing or empty")
        self.tokens: list[str] = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        self.ids: dict[str, int] = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise ModelError(f"{self.path}: the token {twice!r} stands twice in tokenizer.ggml.tokens")
        self.kinds = self._per_token("token_type", np.dtype(np.int32))
        self.pre_tokenizer = self._pre_tokenizer()

    def _key(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def _per_token(self, name: str, dtype: np.dtype[Any]) -> Any:
        values = self._key(name)
        if values is None:
            return np.ones(len(self.tokens), dtype)
        if not isinstance(values, np.ndarray) or values.dtype != dtype or len(values) != len(self.tokens):
            raise ModelError(f"{self.path}: tokenizer.ggml.{name} must hold one {dtype.name} a token")
        return values

    def _pre_tokenizer(self) -> PreTokenizer | None:
        if self.model == "llama":
            return None
        name = self._key("pre")
        if name not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise ModelError(f"{self.path}: tokenizer.ggml.pre {name!r} is not supported; supported are {known}")
        return PRE_TOKENIZERS[name]

    def flag(self, name: str, default: bool) -> bool:
        value = self._key(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: tokenizer.ggml.{name} must be a boolean, got {value!r}")
        return value

    def token_id(self, name: str) -> int | None:
        value = self._key(f"{name}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            raise ModelError(f"{self.path}: tokenizer.ggml.{name}_token_id {value!r} is not in the vocabulary")
        return value

    @property
    def eos_token_ids(self) -> list[int]:
        """Declared ends first, then those known by name."""
        declared = [self.token_id(name) for name in ("eos", "eot", "eom")]
        return list(dict.fromkeys([*(i for i in declared if i is not None),
                                   *(self.ids[text] for text in END_TEXTS if text in self.ids)]))  # fmt: skip

    @property
    def adds_bos(self) -> bool:
        return self.flag("add_bos_token", self.pre_tokenizer is None or self.pre_tokenizer.adds_bos)

    @property
    def post_processor(self) -> dict[str, Any]:
        """Arguments of a TemplateProcessing; empty where nothing is added to a text."""
        wanted = {"bos": self.adds_bos, "eos": self.flag("add_eos_token", False)}
        added = {name: self.token_id(name) for name, is_added in wanted.items() if is_added}
        if None in added.values():
            raise ModelError(f"{self.path}: the header adds {' and '.join(added)} to each text, but gives no id for it")
        tokens = {name: (self.tokens[token_id], token_id) for name, token_id in added.items() if token_id is not None}
        before, after = [[f"{tokens[name][0]}:0"] if name in tokens else [] for name in ("bos", "eos")]
        return {"single": [*before, "$A:0", *after], "special_tokens": list(tokens.values())} if tokens else {}

    def merges(self) -> list[tuple[str, str]]:
        """gpt2: as written. llama: every pair of tokens that makes a token, the best score first.

        Where one token can be made in two ways SentencePiece takes the leftmost place and BPE the first rank; they
        agree on all text that we compared (tests/data/README.md).
        """
        if self.model == "gpt2":
            lines = self._key("merges")
            if not isinstance(lines, list):
                raise ModelError(f"{self.path}: tokenizer.ggml.merges is missing")
            return [self._parts(line) for line in lines]
        scores = self._per_token("scores", np.dtype(np.float32))
        order = np.argsort(-scores, kind="stable")
        is_text = (self.kinds != CONTROL) & (self.kinds != UNKNOWN)
        ids, tokens = self.ids, self.tokens
        pairs: list[tuple[str, str]] = []
        for index in order[is_text[order]].tolist():
            token = tokens[index]
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    pairs.append((left, right))
        return pairs

    def _parts(self, line: str) -> tuple[str, str]:
        cut = line.find(" ", 1)  # the left part may itself be a space
        if cut < 0:
            raise ModelError(f"{self.path}: tokenizer.ggml.merges holds {line!r}, which is no pair")
        return line[:cut], line[cut + 1 :]


def build_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    """The whole pipeline as a `tokenizers` object."""
    from tokenizers import AddedToken, Tokenizer, models, processors

    pre = vocabulary.pre_tokenizer
    unknown = vocabulary.token_id("unknown")
    options: dict[str, Any] = {"ignore_merges": True} if pre and pre.takes_whole_words else {}
    if pre is None:
        options = {"byte_fallback": True, "fuse_unk": True}
        options |= {} if unknown is None else {"unk_token": vocabulary.tokens[unknown]}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), **options))
    except Exception as error:  # the library has no type of its own
        raise ModelError(f"{vocabulary.path}: tokens and merges do not fit each other: {error}") from error
    has_prefix = vocabulary.flag("add_space_prefix", pre is None)
    if pre is None:
        _use_sentencepiece(tokenizer, has_prefix)
    elif has_prefix:
        raise ModelError(f"{vocabulary.path}: tokenizer.ggml.add_space_prefix is not supported with model gpt2")
    else:
        _use_byte_level(tokenizer, pre)
    added = [AddedToken(token, special=is_special, normalized=False) for token, is_special in _added(vocabulary)]
    tokenizer.add_tokens(added)
    if vocabulary.post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(**vocabulary.post_processor)
    return tokenizer


def _use_sentencepiece(tokenizer: Tokenizer, has_prefix: bool) -> None:
    from tokenizers import decoders, normalizers

    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)


def _use_byte_level(tokenizer: Tokenizer, pre: PreTokenizer) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    if pre.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()


def _added(vocabulary: GGUFVocabulary) -> list[tuple[str, bool]]:
    """Tokens found in the text before it is cut, in order of id, and whether decoding may skip them."""
    found = np.flatnonzero(np.isin(vocabulary.kinds, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
    ends = [vocabulary.ids[text] for text in END_TEXTS if text in vocabulary.ids]
    return [
        (vocabulary.tokens[index], index in ends or int(vocabulary.kinds[index]) != USER_DEFINED)
        for index in sorted({*found, *ends})
    ]


def tokenizer_files(vocabulary: GGUFVocabulary) -> dict[str, str]:
    """File name to content, as a checkpoint's folder would hold them."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _TOKEN_IDS.items():
        token_id = vocabulary.token_id(key)
        if token_id is not None:
            config[name] = vocabulary.tokens[token_id]
    files = {
        "tokenizer.json": build_tokenizer(vocabulary).to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
    }
    for key, template in vocabulary.metadata.items():
        if key == "tokenizer.chat_template" and isinstance(template, str):
            files["chat_template.jinja"] = template
        elif key.startswith("tokenizer.chat_template.") and isinstance(template, str):
            name = key.removeprefix("tokenizer.chat_template.")
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ModelError(f"{vocabulary.path}: the chat template's name {name!r} cannot be a file's name")
            files[f"additional_chat_templates/{name}.jinja"] = template
    return files
