"""Two engines in one process; one judges what the other wrote: python examples/two_models.py [MODEL [OTHER_MODEL]]."""

import sys

from pagedllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo-output/SmolLM2-135M-Instruct.gguf"
OTHER_MODEL = sys.argv[2] if len(sys.argv) > 2 else MODEL
SIZES = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}  # each takes a fixed share, so the order is no matter

with LLM(MODEL, **SIZES) as writer, LLM(OTHER_MODEL, **SIZES) as judge:
    questions = ["What is the capital of Japan?", "What is two plus two?"]
    answers = writer.chat([[{"role": "user", "content": q}] for q in questions], SamplingParams(max_tokens=24)).texts
    cases = [f"Question: {q}\nAnswer: {a}\nIs the answer right?" for q, a in zip(questions, answers, strict=True)]
    verdicts = judge.chat([[{"role": "user", "content": case}] for case in cases], SamplingParams(max_tokens=16)).texts
    for question, answer, verdict in zip(questions, answers, verdicts, strict=True):
        print(question, "|", answer, "|", verdict)
