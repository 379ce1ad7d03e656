"""One model behind a web server: uvicorn --app-dir examples fastapi_app:app. Needs fastapi and uvicorn.

Handlers hand in their prompts by `submit`; what is there at the same time runs together. MODEL=... names the model.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from pagedllm import LLM, RequestError, SamplingParams

MODEL = os.environ.get("MODEL", "demo-output/SmolLM2-135M-Instruct.gguf")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with LLM(MODEL, max_model_len=1024) as llm:
        app.state.llm = llm
        yield


class Question(BaseModel):
    text: str
    max_tokens: int = 64


app = FastAPI(lifespan=lifespan)


@app.post("/answer")
async def answer(question: Question) -> dict[str, str | None]:
    messages = [{"role": "user", "content": question.text}]
    try:
        params = SamplingParams(temperature=0, max_tokens=question.max_tokens)
        output = await asyncio.wrap_future(app.state.llm.submit({"messages": messages}, params))
    except RequestError as error:
        raise HTTPException(400, {"code": error.code, "message": error.message}) from error
    return {"text": output.text, "finish_reason": output.outputs[0].finish_reason}
