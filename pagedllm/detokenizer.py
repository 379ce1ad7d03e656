"""From token ids to text, whole or as a stream, with one result.

A token is bytes: what the tokenizer's decoder does to a token is read once from its settings, so a stream costs one
look-up a token and never decodes anything twice. Bytes become text by UTF-8 with replacement; a character that is not
complete yet is held back. Knows the backend tokenizer and Request's fields; called by Tokenizer and by the engine.

Where a decoder splits runs of invalid bytes in another way (`ByteFallback` turns a whole run with a broken character
into one U+FFFD a byte), valid characters stay here.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pagedllm.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

    from pagedllm.request import Request

REPLACEMENT = "\ufffd"


class TokenBytes:
    """The bytes of each token id, and which ids are special."""

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._replacements: list[tuple[str, str]] = []
        self._alphabet: dict[str, int] = {}
        self._has_byte_tokens = False
        self.strip = b""  # removed once from the start of a text
        self._read_decoder(source)

    def __getitem__(self, token_id: int) -> bytes:
        """b"" for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self._alphabet:
            # as the library does it: a token with any other character, an added one that is, stands for itself
            values = [self._alphabet.get(character, -1) for character in token]
            return token.encode() if -1 in values else bytes(values)
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()

    def _read_decoder(self, source: str) -> None:
        """Accepts ByteLevel, and SentencePiece's steps: Replace, ByteFallback, Fuse, Strip."""
        decoder = self._backend.decoder
        state: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
        steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
        is_fused = False
        for step in steps:
            kind = step["type"]
            if kind == "ByteLevel" and len(steps) == 1:
                self._alphabet = byte_level_alphabet()
            elif kind == "Replace" and "String" in step["pattern"] and not is_fused:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "ByteFallback":
                self._has_byte_tokens = True
            elif kind == "Fuse":
                is_fused = True
            elif kind == "Strip" and is_fused and step["stop"] == 0 and not self.strip:
                self.strip = step["content"].encode() * step["start"]
            else:
                raise ModelError(f"{source}: the tokenizer's decoder {json.dumps(step)} is not supported")


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte: GPT-2's printable stand-ins. Printable bytes stand for themselves, the others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TextStream:
    """The text of one output, as far as it is certain.

    prompt + the stream's text reads as prompt and output decoded together: a leading space that the decoder would
    strip is stripped only where the prompt shows nothing, and bytes of a character that the prompt left open count.
    """

    def __init__(self, table: TokenBytes, skipped: frozenset[int], prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = table.strip if not any(map(self._bytes_of, prompt_token_ids)) else b""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= 4:  # no character is longer
                break
        self._decoder.decode(tail)
        self._is_prompt_open = bool(self._decoder.getstate()[0])

    def push(self, token_ids: Iterable[int]) -> str:
        """The new text that no later token can change."""
        return self._decode(b"".join(map(self._bytes_of, token_ids)), is_last=False)

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was never completed, else nothing."""
        return self._decode(b"", is_last=True)

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._table[token_id]

    def _decode(self, data: bytes, is_last: bool) -> str:
        while self._strip and data:
            if data[:1] != self._strip[:1]:
                self._strip = b""
            else:
                data, self._strip = data[1:], self._strip[1:]
        text = self._decoder.decode(data, is_last)
        if self._is_prompt_open and text:
            # the prompt's own text already shows its open character as U+FFFD
            self._is_prompt_open = False
            text = text.removeprefix(REPLACEMENT)
        return text


class Detokenizer:
    """What the engine asks for text."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table

    def stream(self, request: Request) -> TextStream:
        """A stream of the request's output; nothing is pushed yet."""
        prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        return self.open(prompt_token_ids, request.sampling_params.skip_special_tokens)

    def decode(self, request: Request) -> str:
        """The whole output so far: what a stream would have given by now, and its `finish`."""
        stream = self.stream(request)
        return stream.push(request.text_token_ids) + stream.finish()

    def open(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> TextStream:
        skipped = self._table.special_ids if skip_special_tokens else frozenset[Any]()
        return TextStream(self._table, skipped, prompt_token_ids)
