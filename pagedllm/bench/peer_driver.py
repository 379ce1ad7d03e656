"""Runs another engine for a benchmark: a program of its own, started by the peer's Python, which has no pagedllm.

Usage: python -I peer_driver.py ENGINE MODEL NUM_THREADS KV_CACHE_BYTES. One JSON object a line. First out: {"engine":
name and version}. Then for each line in, {"prompt_token_ids": [[int]], "num_output_tokens": [int], "sampling": null or
{"temperature": float, "top_p": float, "top_k": int}}, one line out, {"seconds": float, "output_token_ids": [[int]]}.
Ends at the end of its input. -I keeps this folder off the peer's module path: its files have common names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

Ids = list[list[int]]
Sampling = dict[str, Any]
MAX_NUM_SEQS = 128
MAX_NUM_BATCHED_TOKENS = 4096


class OpenVino:
    """MODEL is a folder exported by optimum-cli."""

    def __init__(self, model: str, num_threads: int, kv_cache_bytes: int) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = -(-kv_cache_bytes >> 30)  # GiB, rounded up
        scheduler.max_num_seqs = MAX_NUM_SEQS
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.enable_prefix_caching = True
        self.name = f"OpenVINO GenAI {openvino_genai.__version__.partition('-')[0]}"
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
        )

    def generate(self, prompts: Ids, lengths: list[int], sampling: Sampling | None) -> Ids:
        import numpy as np
        import openvino
        import openvino_genai

        configs = []
        for count in lengths:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = count
            config.ignore_eos = True
            config.do_sample = sampling is not None
            for field, value in (sampling or {}).items():
                setattr(config, field, value)
            configs.append(config)
        inputs = [openvino.Tensor(np.asarray([ids], dtype=np.int64)) for ids in prompts]
        return [list(result.m_generation_ids[0]) for result in self.pipeline.generate(inputs, configs)]


class Vllm:
    """MODEL is a folder of safetensors. Threads and memory come by its environment variables."""

    def __init__(self, model: str, num_threads: int, kv_cache_bytes: int) -> None:
        import vllm

        self.name = f"vLLM {vllm.__version__}"
        self.llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=True,
        )

    def generate(self, prompts: Ids, lengths: list[int], sampling: Sampling | None) -> Ids:
        import vllm

        given = sampling or {"temperature": 0.0}
        params = [
            vllm.SamplingParams(ignore_eos=True, max_tokens=count, detokenize=False, **given) for count in lengths
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class LlamaCpp:
    """MODEL is a GGUF file. One request after another: its Python interface has no batches."""

    def __init__(self, model: str, num_threads: int, kv_cache_bytes: int) -> None:
        import llama_cpp

        self.name = f"llama.cpp ({os.path.basename(model)}, llama-cpp-python {llama_cpp.__version__})"
        self.llm = llama_cpp.Llama(
            model, n_ctx=4096, n_batch=512, n_threads=num_threads, n_threads_batch=num_threads, verbose=False
        )

    def generate(self, prompts: Ids, lengths: list[int], sampling: Sampling | None) -> Ids:
        given = sampling or {"temperature": 0.0}
        options = {"temp" if field == "temperature" else field: value for field, value in given.items()}
        outputs = []
        for prompt, count in zip(prompts, lengths):  # noqa: B905 - the peer's Python may be old
            tokens = self.llm.generate(prompt, **options)
            outputs.append([next(tokens) for _ in range(count)])
        return outputs


class Transformers:
    """MODEL is a folder of safetensors. Batches of requests of similar length, padded; each as long as its longest.

    Its threads come by OMP_NUM_THREADS.
    """

    def __init__(self, model: str, num_threads: int, kv_cache_bytes: int) -> None:
        import torch
        import transformers

        self.name = f"transformers {transformers.__version__}"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: Ids, lengths: list[int], sampling: Sampling | None) -> Ids:
        outputs: Ids = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: (lengths[index], len(prompts[index])))
        for begin in range(0, len(order), MAX_NUM_SEQS):
            batch = order[begin : begin + MAX_NUM_SEQS]
            generated = self._generate_batch([prompts[i] for i in batch], max(lengths[i] for i in batch), sampling)
            for index, ids in zip(batch, generated):  # noqa: B905
                outputs[index] = ids[: lengths[index]]
        return outputs

    def _generate_batch(self, prompts: Ids, count: int, sampling: Sampling | None) -> Ids:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=sampling is not None, **(sampling or {})
            )
        generated: Ids = output[:, width:].tolist()
        return generated


ENGINES: dict[str, Any] = {"openvino": OpenVino, "vllm": Vllm, "llama.cpp": LlamaCpp, "transformers": Transformers}


def main() -> None:
    engine_name, model, num_threads, kv_cache_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not mix with the replies
    engine = ENGINES[engine_name](model, num_threads, kv_cache_bytes)
    print(json.dumps({"engine": engine.name}), file=replies, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        begin = time.perf_counter()
        output_token_ids = engine.generate(call["prompt_token_ids"], call["num_output_tokens"], call["sampling"])
        reply = {"seconds": time.perf_counter() - begin, "output_token_ids": output_token_ids}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
