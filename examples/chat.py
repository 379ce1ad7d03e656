"""A conversation of two turns, then many conversations at once: python examples/chat.py [MODEL]."""

import sys

from pagedllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo-output/SmolLM2-135M-Instruct.gguf"
PARAMS = SamplingParams(temperature=0, max_tokens=24)

with LLM(MODEL, max_model_len=1024) as llm:
    messages = []
    for question in ("What is the capital of Japan?", "And of France?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, PARAMS)[0].text
        messages.append({"role": "assistant", "content": answer})
        print("user:", question)
        print("assistant:", answer)
    conversations = [[{"role": "user", "content": f"Name one animal of {place}."}] for place in ("Africa", "Asia")]
    for text in llm.chat(conversations, PARAMS).texts:
        print("->", text)
