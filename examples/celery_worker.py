"""One model in a Celery worker: celery --workdir examples -A celery_worker worker --pool threads --concurrency 32.

Threads, not processes: all tasks share one model, and what they hand in runs together. With the default pool each
process would load its own. BROKER and BACKEND are URLs, MODEL names the model.
"""

import functools
import os

from celery import Celery

from pagedllm import LLM, SamplingParams

app = Celery(
    "celery_worker",
    broker=os.environ.get("BROKER", "redis://localhost"),
    backend=os.environ.get("BACKEND", "redis://localhost"),
)


@functools.cache
def get_llm() -> LLM:
    """Made in the process that uses it, by its first task."""
    return LLM(os.environ.get("MODEL", "demo-output/SmolLM2-135M-Instruct.gguf"), max_model_len=1024)


@app.task
def answer(question: str, max_tokens: int = 64) -> str | None:
    messages = [{"role": "user", "content": question}]
    future = get_llm().submit({"messages": messages}, SamplingParams(temperature=0, max_tokens=max_tokens))
    return future.result().text
