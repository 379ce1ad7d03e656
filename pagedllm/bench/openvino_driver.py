"""Runs OpenVINO GenAI for a benchmark: a program of its own, started by the peer's Python, which has no pagedllm.

Usage: python openvino_driver.py MODEL_DIR NUM_THREADS KV_CACHE_BYTES. One JSON object a line. First out: {"engine":
name and version}. Then for each line in, {"prompt_token_ids": [[int]], "num_output_tokens": [int]}, one line out,
{"seconds": float, "output_token_ids": [[int]]}. Ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


def load(model_dir: str, num_threads: int, kv_cache_bytes: int) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = -(-kv_cache_bytes >> 30)  # GiB, rounded up
    scheduler.max_num_seqs = 128
    scheduler.max_num_batched_tokens = 4096
    scheduler.enable_prefix_caching = True
    return openvino_genai.ContinuousBatchingPipeline(
        model_dir, scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
    )


def generate(pipeline: Any, prompt_token_ids: list[list[int]], num_output_tokens: list[int]) -> dict[str, Any]:
    configs = []
    for count in num_output_tokens:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = count
        config.do_sample = False
        config.ignore_eos = True
        configs.append(config)
    start = time.perf_counter()
    inputs = [openvino.Tensor(np.asarray([ids], dtype=np.int64)) for ids in prompt_token_ids]
    results = pipeline.generate(inputs, configs)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "output_token_ids": [list(result.m_generation_ids[0]) for result in results]}


def main() -> None:
    model_dir, num_threads, kv_cache_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not mix with the replies
    pipeline = load(model_dir, num_threads, kv_cache_bytes)
    print(
        json.dumps({"engine": f"OpenVINO GenAI {openvino_genai.__version__.partition('-')[0]}"}),
        file=replies,
        flush=True,
    )
    for line in sys.stdin:
        print(json.dumps(generate(pipeline, **json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
