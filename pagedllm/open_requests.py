"""OpenRequests: requests in the engine that no running call waits for, of a suspended `generate_iter` or of `submit`.

Every method needs the LLM's lock. Between two of them other calls may step the engine: they advance these requests
too, and set aside what ended. A step of another call that fails empties the engine: these then come back as aborted.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedllm.assembly import Assembly
from pagedllm.errors import RequestError
from pagedllm.outputs import RequestOutput
from pagedllm.prompts import Prompt
from pagedllm.request import Request
from pagedllm.request_builder import ChatOptions, EncodedPrompt, stream_key
from pagedllm.sampling_params import SamplingParams


class OpenRequests:
    def __init__(self, assembly: Assembly, call_number: int, *, is_list: bool) -> None:
        """call_number: names the random streams, together with the place of a prompt, as in `generate`.

        is_list: errors name the place of their prompt.
        """
        self._is_list = is_list
        self._assembly = assembly
        self._call_number = call_number
        self._num_added = 0
        self._prompts: dict[str, EncodedPrompt] = {}  # by request id: those in the engine
        self._scheduler = assembly.engine.scheduler

    @property
    def num_in_flight(self) -> int:
        return len(self._prompts)

    @property
    def request_ids(self) -> list[str]:
        return list(self._prompts)

    def add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Brings prompts into the engine, in order; gives back the outputs of those that are refused."""
        refused = []
        encoded_prompts = self._assembly.builder.encode(prompts, ChatOptions())
        for encoded, given in zip(encoded_prompts, params, strict=True):
            index, request_id = self._num_added, f"{self._call_number}:{self._num_added}"
            self._num_added += 1
            try:
                request = self._build(request_id, index, encoded, given)
            except RequestError as error:
                if self._is_list and error.index is None:
                    text = f"prompts[{index}]: {error.message}"
                    error = RequestError(error.code, text, index=index, field=error.field)
                refused.append(
                    RequestOutput.of_refused(
                        request_id, index, error, encoded.text, encoded.token_ids, encoded.metadata
                    )
                )
            else:
                self._prompts[request_id] = encoded
                self._assembly.engine.add_request(request)
        return refused

    def step(self) -> list[RequestOutput]:
        """The outputs of requests that ended elsewhere since the last call; if there are none, those of one step."""
        engine = self._assembly.engine
        ended = engine.take(self._prompts)
        if engine.scheduler is not self._scheduler:
            self._scheduler = engine.scheduler
            ended += engine.abort([i for i in self._prompts if self._scheduler.find(i) is None])
        if not ended and self._prompts:
            stepped = engine.step()
            ended = [request for request in stepped if request.request_id in self._prompts]
            engine.set_aside(request for request in stepped if request.request_id not in self._prompts)
        return [self._output(request) for request in ended]

    def abort(self) -> None:
        """Ends all of them; the engine forgets them."""
        abort_requests(self._assembly, self.request_ids)
        self._prompts.clear()

    def abort_with_outputs(self) -> list[RequestOutput]:
        """Like `abort`; gives what they had, also after a step that raised."""
        aborted = abort_requests(self._assembly, self.request_ids)
        outputs = [self._output(request) for request in aborted]
        self._prompts.clear()
        return outputs

    def _build(self, request_id: str, index: int, encoded: EncodedPrompt, params: SamplingParams) -> Request:
        builder = self._assembly.builder
        builder.check_params(params)
        builder.check_prompt(encoded, params)
        seed = stream_key(self._assembly.seed, self._call_number, index)
        return builder.build(request_id, index, encoded, params.clone(), seed)

    def _output(self, request: Request) -> RequestOutput:
        encoded = self._prompts.pop(request.request_id)
        token_text = self._assembly.builder.token_text
        return RequestOutput.of_request(request, encoded.text, encoded.metadata, token_text)


def abort_requests(assembly: Assembly, request_ids: Sequence[str]) -> list[Request]:
    aborted = assembly.engine.abort(request_ids)
    return aborted + assembly.engine.take(request_ids)
