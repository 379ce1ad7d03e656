"""lm-evaluation-harness on pagedllm: python examples/lm_eval_pagedllm.py MODEL TASK[,TASK] [LIMIT]. Needs lm-eval.

The harness cuts its requests into tokens by its own rules (TemplateLM); this class scores and generates. All requests
of a task go to the engine in one call, which computes what their prompts share once.
"""

import sys

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM

from pagedllm import LLM, SamplingParams

MAX_NEW_TOKENS = 256  # where a task says nothing


class PagedLM(TemplateLM):
    def __init__(self, llm):
        super().__init__()
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.max_length = llm.info()["max_model_len"]

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self):
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self):
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """requests: ((context, continuation), context ids, continuation ids); what is too long loses its beginning."""
        contexts, continuations = [], []
        for _, context, continuation in requests:
            kept = continuation[1 - self.max_length :]
            contexts.append((context + continuation[: -len(kept)])[len(kept) - self.max_length :])
            continuations.append(kept)
        scores = self.llm.loglikelihood(contexts, continuations, use_tqdm=not disable_tqdm)
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        scores = self.llm.loglikelihood_rolling([request.args[0] for request in requests], use_tqdm=not disable_tqdm)
        return [score.logprob for score in scores]

    def generate_until(self, requests, disable_tqdm=False):
        prompts, params = [], []
        for request in requests:
            context, settings = request.args
            max_tokens = int(settings.get("max_gen_toks", MAX_NEW_TOKENS))
            until = settings.get("until") or []
            prompts.append(self.tok_encode(context)[-max(1, self.max_length - max_tokens) :])
            params.append(
                SamplingParams(
                    temperature=settings.get("temperature", 1.0) if settings.get("do_sample") else 0,
                    top_p=settings.get("top_p", 1.0),
                    max_tokens=max_tokens,
                    stop=[until] if isinstance(until, str) else [text for text in until if text],
                )
            )
        return self.llm.generate(prompts, params, use_tqdm=not disable_tqdm).texts


if __name__ == "__main__":
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else None
    with LLM(sys.argv[1], max_model_len=2048) as llm:
        report = simple_evaluate(model=PagedLM(llm), tasks=sys.argv[2].split(","), limit=limit)
        for task, values in report["results"].items():
            print(task, {name: value for name, value in values.items() if isinstance(value, float)})
