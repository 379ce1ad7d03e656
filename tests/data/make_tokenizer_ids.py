"""Writes tokenizer_ids.json anew: the ids that llama.cpp gives to its strings, for real and for made-up vocabularies.

    python -m tests.data.make_tokenizer_ids LLAMA_CPP_IDS SMOLLM2.gguf GEMMA3.gguf

LLAMA_CPP_IDS is llama_cpp_ids.cpp, built. Run by hand, when strings or pre-tokenizers are added; see README.md here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from pagedllm.model.gguf_tokenizer import PRE_TOKENIZERS
from tests.model.gguf_files import CONTROL, USER_DEFINED, byte_level_vocabulary, sentencepiece_vocabulary, write_model

FILE = Path(__file__).with_name("tokenizer_ids.json")
SPECIALS = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL, "<b>": USER_DEFINED}
TAKEN = {
    *SPECIALS,
    "   ",
    "<unk>",
    "<s>",
    "</s>",
    "<0x0A>",
    "<eos>",
    "[PAD]",
}  # tokens of their own, or llama.cpp makes them so
NUM_MERGES = 1200


def trained_merges(strings: list[str], is_byte_level: bool) -> list[list[str]]:
    """Merges over the strings uncut, so that they cross every place where a pre-tokenizer cuts."""
    tokenizer = Tokenizer(models.BPE())
    if is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    alphabet = pre_tokenizers.ByteLevel.alphabet() if is_byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_MERGES + len({c for s in strings for c in s}), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(strings * 3, trainer)
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    kept: list[list[str]] = []
    lost = set(TAKEN)
    for pair in merges:
        if lost & {*pair, "".join(pair)}:
            lost.add("".join(pair))
        else:
            kept.append(pair)
    return kept


def made_up_vocabularies(merges: list[str], pieces: list[str]) -> dict[str, dict[str, Any]]:
    """Name of each set of ids to the vocabulary it is made with."""
    byte_level = {f"byte-level {pre}": byte_level_vocabulary(merges, pre, SPECIALS) for pre in PRE_TOKENIZERS}
    for vocabulary in byte_level.values():
        vocabulary["bos_token_id"] = vocabulary["tokens"].index("<|im_start|>")
    spm = sentencepiece_vocabulary(pieces, {"<|im_start|>": CONTROL, "<b>": USER_DEFINED, "   ": USER_DEFINED})
    return byte_level | {
        "sentencepiece": spm,
        "sentencepiece without prefix": spm | {"add_space_prefix": False, "add_eos_token": True},
    }


def llama_cpp_ids(program: str, model: Path, strings: list[str]) -> list[list[int]]:
    joined = b"".join(string.encode() + b"\0" for string in strings)
    output = subprocess.run([program, str(model)], input=joined, capture_output=True, check=True).stdout.decode()
    return [[int(number) for number in line.split()] for line in output.split("\n")[:-1]]


def main() -> None:
    program, smollm2, gemma3 = sys.argv[1:]
    strings: list[str] = json.loads(FILE.read_text(encoding="utf-8"))["strings"]
    merges = [" ".join(pair) for pair in trained_merges(strings, is_byte_level=True)]
    made = ["".join(pair) for pair in trained_merges(strings, is_byte_level=False)]
    pieces = list(dict.fromkeys([*made, *sorted({character for piece in made for character in piece})]))
    ids = {"SmolLM2": llama_cpp_ids(program, Path(smollm2), strings)}
    ids["Gemma 3"] = llama_cpp_ids(program, Path(gemma3), strings)
    with tempfile.TemporaryDirectory() as folder:
        for name, vocabulary in made_up_vocabularies(merges, pieces).items():
            file = write_model(Path(folder) / "vocabulary.gguf", vocabulary=vocabulary)
            ids[name] = llama_cpp_ids(program, file, strings)
    seen: dict[str, str] = {}
    shared = {name: seen.setdefault(json.dumps(lists), name) for name, lists in ids.items()}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (("merges", merges), ("pieces", pieces))]
    lines.append(f'"strings": {json.dumps(strings)}')
    sets = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(lists if shared[name] == name else shared[name], separators=(',', ':'))}"
        for name, lists in ids.items()
    )
    FILE.write_text("{" + ",\n".join([*lines, f'"ids": {{\n{sets}\n}}']) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
