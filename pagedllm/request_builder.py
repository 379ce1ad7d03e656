"""RequestBuilder: a Prompt and its SamplingParams -> a Request that the engine can run, or the reason why not.

All checks that need the tokenizer or the model's sizes are here, so a call knows every bad prompt before its first
step. Messages carry no place in the list: the caller adds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pagedllm.choices import ChoiceTable, TokenTexts
from pagedllm.errors import NotSupportedError, RequestError
from pagedllm.notices import Notices
from pagedllm.prompts import Prompt
from pagedllm.reasoning import TAGS, Thinking, opens_thought
from pagedllm.request import Request
from pagedllm.sampling_params import SamplingParams
from pagedllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from pagedllm.beam_search_params import BeamSearchParams
    from pagedllm.tokenizer import Tokenizer

NUM_LAST_TOKENS = 4  # of a prompt given as ids: enough to see a think tag and newlines behind it


ANCHOR = "\n"  # merges with no word that follows, so what comes after it is written as inside a text
MAX_KNOWN_WORDS = 10_000
MAX_CHOICE_TABLES = 256


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become text; the fields are those of `LLM.chat`. clock: what `strftime_now` in templates reads."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    clock: Callable[[], datetime] = datetime.now


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    text: str | None  # the final text; None where ids were given
    token_ids: list[int]
    metadata: Any = None
    error: RequestError | None = None
    num_context_tokens: int = 0  # leading tokens that are not scored


class RequestBuilder:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_position: int,
        max_model_len: int,
        max_logprobs: int,
        eos_token_ids: tuple[int, ...],
        rope_variant: Callable[[int | None], int],
        chat_template: str | None,
        notices: Notices,
        scores_prompts: bool = True,
    ) -> None:
        """max_position: the length in the model's config; max_model_len: what the engine serves, perhaps less.

        scores_prompts: whether the runner can give the logprobs of prompt tokens.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_position = max_position
        self.max_model_len = max_model_len
        self.max_logprobs = max_logprobs
        self.eos_token_ids = eos_token_ids
        self.rope_variant = rope_variant
        self.chat_template = chat_template
        self.notices = notices
        self.scores_prompts = scores_prompts
        self._token_texts: dict[int, str] = {}
        self._is_thinking_model = all(tokenizer.token_to_id(tag) is not None for tag in TAGS)
        self._special_texts: dict[int, str] | None = None
        self._bad_words: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._writable: TokenTexts | None = None
        self._choice_tables: dict[tuple[str, ...], ChoiceTable] = {}

    def encode(self, prompts: Sequence[Prompt], chat: ChatOptions) -> list[EncodedPrompt]:
        """Token ids of each prompt; plain texts are encoded in one batch."""
        texts = [p.text for p in prompts if p.text is not None and _first_surrogate(p.text) is None]
        encoded_texts = iter(self.tokenizer.encode_batch(texts) if texts else [])
        return [self._encode_one(prompt, chat, encoded_texts.__next__) for prompt in prompts]

    def _encode_one(self, prompt: Prompt, chat: ChatOptions, next_ids: Callable[[], list[int]]) -> EncodedPrompt:
        error = prompt.error
        if prompt.text is not None:
            surrogate = _first_surrogate(prompt.text)
            if surrogate is None:
                ids = next_ids()
                self._tell_of_doubled_bos(ids)
                return EncodedPrompt(prompt.text, ids, prompt.metadata)
            text = f"the text holds half a surrogate pair at position {surrogate}, which no tokenizer can encode"
            error = RequestError("invalid_parameter", text, field="prompts")
        elif prompt.messages is not None:
            try:
                chat_text = self.render_chat(prompt.messages, chat)
                ids = self.tokenizer.encode(chat_text, add_special_tokens=False)
                return EncodedPrompt(chat_text, ids, prompt.metadata)
            except RequestError as refusal:
                error = refusal
            except NotSupportedError as refusal:
                error = RequestError("unsupported", str(refusal), field="messages")
        elif prompt.token_ids is not None:
            return EncodedPrompt(None, list(prompt.token_ids), prompt.metadata)
        return EncodedPrompt(prompt.text, [], prompt.metadata, error)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None or self.tokenizer.chat_template is not None

    def render_chat(self, messages: Sequence[Any], chat: ChatOptions) -> str:
        """The final text of a conversation; RequestError("template_error") quotes the template's own words."""
        return self.tokenizer.apply_chat_template(
            messages,
            chat_template=self.chat_template if chat.chat_template is None else chat.chat_template,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tools=chat.tools,
            clock=chat.clock,
            **chat.chat_template_kwargs,
        )

    def token_text(self, token_id: int) -> str:
        """How a single token reads, special ones too."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def check_params(self, params: SamplingParams) -> None:
        """The checks of a SamplingParams on use; RequestError, "unsupported" for what comes later."""
        try:
            params.verify()
        except NotSupportedError as error:
            raise RequestError("unsupported", str(error), field="sampling_params") from None
        params.verify_for_model(self.vocab_size, self.max_logprobs)
        if params.prompt_logprobs is not None and not self.scores_prompts:
            text = "prompt_logprobs and scores of texts are not supported for a model that transformers computes"
            raise RequestError("unsupported", text, field="prompt_logprobs")
        if params.n > 1 and params.is_greedy:
            self.notices.tell(f"n={params.n} with temperature=0: greedy outputs are all equal, each prompt is run once")
        for word in params.bad_words or ():
            check_encodable(word, "bad_words")
        if params.structured_outputs is not None:
            self._choices(params.structured_outputs)
        self._tell_of_hidden_stops(params)

    def check_beam_search(self, params: BeamSearchParams) -> None:
        """The checks of a BeamSearchParams on use; RequestError."""
        params.verify()
        sampling_params = params.sampling_params()
        self.check_params(sampling_params)
        eos_token_ids = () if params.ignore_eos else self.eos_token_ids
        params.verify_for_model(self.vocab_size, len({*eos_token_ids, *(params.stop_token_ids or ())}))

    def check_prompt(self, prompt: EncodedPrompt, params: SamplingParams) -> None:
        """Raises RequestError if the engine cannot run these ids with these params."""
        if prompt.error is not None:
            raise prompt.error
        ids, limit = prompt.token_ids, self.max_model_len
        if not ids:
            raise RequestError("empty_prompt", "the prompt has no tokens, and the tokenizer adds no BOS to start from")
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            text = f"token id {wrong} at position {ids.index(wrong)} is not in [0, {self.vocab_size})"
            raise RequestError("token_out_of_range", text)
        if len(ids) > limit:
            text = f"{len(ids):,} tokens exceed max_model_len {limit:,} by {len(ids) - limit:,}"
            raise RequestError("prompt_too_long", text)
        if len(ids) == limit and params.max_tokens != 0:
            text = f"{len(ids):,} tokens fill max_model_len {limit:,}: no room for one new token"
            raise RequestError("prompt_too_long", text)

    def build(
        self, request_id: str, index: int, prompt: EncodedPrompt, params: SamplingParams, seed: int, priority: int = 0
    ) -> Request:
        """The Request of a checked prompt; params becomes the engine's own, pass a copy."""
        num_prompt_tokens = len(prompt.token_ids)
        room = self.max_model_len - num_prompt_tokens
        total = None
        if params.max_tokens is not None:
            total = min(num_prompt_tokens + params.max_tokens, self.max_position)
        variant = self.rope_variant(total)
        max_output_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        choices = None
        if params.structured_outputs is not None:
            choices = self._choices(params.structured_outputs)
            max_output_tokens = min(max_output_tokens, choices.longest + 1)  # a byte each at least, and an end
        return Request(
            request_id=request_id,
            thinking=self._thinking(prompt),
            token_ids=list(prompt.token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling_params=params,
            max_output_tokens=max_output_tokens,
            choices=choices,
            seed=seed if params.seed in (None, -1) else stream_key(int(params.seed)),
            eos_token_ids=self.eos_token_ids,
            prompt_index=index,
            priority=priority,
            rope_variant=variant,
            extra_keys=(variant,) if variant else (),
            bad_word_ids=tuple(ids for word in params.bad_words or () for ids in self._bad_word_ids(word)),
            stop_tokens=self._stop_tokens(params),
            num_unscored_tokens=(
                0 if params.prompt_logprobs is None else num_prompt_tokens - max(1, prompt.num_context_tokens)
            ),
        )

    def _choices(self, params: StructuredOutputsParams) -> ChoiceTable:
        """Made once for equal choices."""
        key = tuple(params.choice or ())
        table = self._choice_tables.pop(key, None)
        if table is None:
            for choice in key:
                check_encodable(choice, "structured_outputs.choice")
            if self._writable is None:
                self._writable = TokenTexts(self.tokenizer.token_texts(self.vocab_size))
            try:
                table = ChoiceTable(key, self._writable)
            except ValueError as error:
                text = f"structured_outputs.choice holds {str(error)!r}, which the model's tokens cannot write"
                raise RequestError("invalid_parameter", text, field="structured_outputs") from None
        self._choice_tables[key] = table  # the last one used stands last
        if len(self._choice_tables) > MAX_CHOICE_TABLES:
            del self._choice_tables[next(iter(self._choice_tables))]
        return table

    def _thinking(self, prompt: EncodedPrompt) -> Thinking | None:
        if not self._is_thinking_model:
            return None
        text = prompt.text
        if text is None:
            text = self.tokenizer.decode(prompt.token_ids[-NUM_LAST_TOKENS:], skip_special_tokens=False)
        return Thinking(opens_thought(text))

    def _bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write the word: with and without a leading space, at the start and inside a text."""
        known = self._bad_words.get(word)
        if known is not None:
            return known
        bare = word.lstrip(" ")
        found: dict[tuple[int, ...], None] = {}
        before = self.tokenizer.encode(ANCHOR, add_special_tokens=False)
        for form in (bare, " " + bare) if bare else (word,):
            found[tuple(self.tokenizer.encode(form, add_special_tokens=False))] = None
            inside = self.tokenizer.encode(ANCHOR + form, add_special_tokens=False)
            if inside[: len(before)] == before:
                found[tuple(inside[len(before) :])] = None
        sequences = tuple(ids for ids in found if ids and max(ids) < self.vocab_size)
        if len(self._bad_words) >= MAX_KNOWN_WORDS:
            self._bad_words.clear()
        self._bad_words[word] = sequences
        return sequences

    def _stop_tokens(self, params: SamplingParams) -> dict[int, str]:
        """Special tokens whose text is a stop string, where skip_special_tokens keeps it out of the text."""
        if not params.stops or not params.skip_special_tokens:
            return {}
        return {token_id: text for token_id, text in self._specials().items() if text in params.stops}

    def _specials(self) -> dict[int, str]:
        """Special tokens as they read where they are shown."""
        if self._special_texts is None:
            self._special_texts = {i: self.token_text(i) for i in sorted(self.tokenizer.special_token_ids)}
        return self._special_texts

    def _tell_of_hidden_stops(self, params: SamplingParams) -> None:
        """A stop string that has a special token's text inside can never be found where such text is left out."""
        if not params.stops or not params.skip_special_tokens:
            return
        specials = self._specials().values()
        for stop in params.stops:
            inside = [text for text in specials if text and text in stop]
            if inside and stop not in inside:
                self.notices.tell(
                    f"stop={stop!r} holds the special token {inside[0]!r}, which skip_special_tokens=True leaves out "
                    "of the text: pass skip_special_tokens=False, or the token alone"
                )

    def _tell_of_doubled_bos(self, ids: list[int]) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            self.notices.tell(
                "a prompt begins with the BOS token, and the tokenizer adds one more: "
                "leave it out of the text, or pass prompt_token_ids"
            )


def stream_key(*parts: int | bytes) -> int:
    """64 bits that name a random stream: a hash of the parts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def check_encodable(text: str, field: str) -> None:
    """RequestError for a text with half a surrogate pair, which no tokenizer can encode."""
    if _first_surrogate(text) is not None:
        raise RequestError("invalid_parameter", f"{field} must be text that can be encoded, got {text!r}", field=field)


def _first_surrogate(text: str) -> int | None:
    """Where a lone surrogate stands, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
