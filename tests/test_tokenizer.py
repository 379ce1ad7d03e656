"""Tokenizer: ids equal llama.cpp's for GGUF and transformers' for folders; special tokens; errors; manners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from pagedllm.errors import ModelError
from pagedllm.tokenizer import Tokenizer
from tests.data.make_tokenizer_ids import FILE, made_up_vocabularies
from tests.model.gguf_files import byte_level_vocabulary, write_model

EXPECTED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
STRINGS: list[str] = EXPECTED["strings"]
IDS: dict[str, list[list[int]]] = {
    name: EXPECTED["ids"][ids] if isinstance(ids, str) else ids for name, ids in EXPECTED["ids"].items()
}  # a name stands for ids that are the same
MADE_UP = made_up_vocabularies(EXPECTED["merges"], EXPECTED["pieces"])


@pytest.fixture(scope="module")
def smollm2(demo_gguf: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_gguf)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder's tokenizer files: bytes, three merges, <|endoftext|>."""
    from pagedllm.model.gguf import GGUFCheckpoint

    file = write_model(tmp_path / "tiny.gguf", vocabulary=byte_level_vocabulary(["h e", "l l", "he ll"]))
    for name, content in GGUFCheckpoint(file).tokenizer_files().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def change_config(folder: Path, **settings: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings), encoding="utf-8")


def test_at_least_200_strings_are_compared() -> None:
    assert len(set(STRINGS)) >= 200


def test_ids_of_smollm2_equal_llama_cpps(smollm2: Tokenizer) -> None:
    assert smollm2.encode_batch(STRINGS) == IDS["SmolLM2"]


@pytest.mark.parametrize("name", MADE_UP)
def test_ids_of_a_made_up_vocabulary_equal_llama_cpps(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "made_up.gguf", vocabulary=MADE_UP[name]))
    for text, ids in zip(STRINGS, IDS[name], strict=True):
        if not differs_on_purpose(name.removeprefix("byte-level "), text):
            assert tokenizer.encode(text) == ids, text


def differs_on_purpose(pre: str, text: str) -> bool:
    """Where we follow the model's own tokenizer and llama.cpp does not: tests/data/README.md."""
    if pre in ("qwen2", "deepseek-r1-qwen"):
        return not unicodedata.is_normalized("NFC", text)
    return pre in ("tekken", "gpt-4o") and any(unicodedata.category(character)[0] == "M" for character in text)


def test_qwens_tokenizer_normalizes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "q.gguf", vocabulary=byte_level_vocabulary(pre="qwen2")))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_the_compared_strings_tell_pre_tokenizers_apart() -> None:
    pres = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "falcon", "default")
    names = [f"byte-level {pre}" for pre in pres]
    assert len({json.dumps(IDS[name]) for name in names}) == len(names)


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    file = write_model(tmp_path / "odd.gguf", vocabulary=byte_level_vocabulary(pre="poro-chat"))
    with pytest.raises(ModelError, match=r"odd\.gguf: tokenizer\.ggml\.pre 'poro-chat' is not supported; supported"):
        Tokenizer.from_folder(file)


def test_a_missing_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path / "odd.gguf", tokenizer__ggml__pre=None)
    with pytest.raises(ModelError, match="pre None is not supported"):
        Tokenizer.from_folder(file)


@pytest.mark.slow
def test_ids_of_gemma_3_equal_llama_cpps(gemma3_gguf: Path) -> None:
    tokenizer = Tokenizer.from_folder(gemma3_gguf)
    assert tokenizer.encode_batch(STRINGS) == IDS["Gemma 3"]
    assert tokenizer.bos_token_id == 2
    assert tokenizer.eos_token_ids == (1,)


def test_a_folder_gives_what_transformers_gives(demo_safetensors: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo_safetensors)
    ours = Tokenizer.from_folder(demo_safetensors)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    for text in STRINGS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_encode_batch_equals_encode(smollm2: Tokenizer) -> None:
    assert smollm2.encode_batch(STRINGS) == [smollm2.encode(text) for text in STRINGS]
    assert smollm2.encode_batch([]) == []


def test_encode_batch_goes_in_slices(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedllm.tokenizer.SLICE_TEXTS", 7)
    assert smollm2.encode_batch(STRINGS) == EXPECTED["ids"]["SmolLM2"]


def test_bos_and_eos_are_added_only_with_special_tokens(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary() | {"bos_token_id": 257, "eos_token_id": 257, "add_bos_token": True,
                                            "add_eos_token": True}  # fmt: skip
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "ends.gguf", vocabulary=vocabulary))
    assert tokenizer.encode("a") == [257, 97, 257]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.encode("") == [257, 257]
    assert tokenizer.encode_batch(["a", "b"], add_special_tokens=False) == [[97], [98]]


def test_padding_and_truncation_of_the_file_are_off(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                           "pad_type_id": 0, "pad_token": "!"}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer.from_folder(folder).encode("abcd") == [97, 98, 99, 100]


def test_tokens_of_the_config_are_added_and_become_special(folder: Path) -> None:
    change_config(
        folder,
        eos_token="<|end|>",
        additional_special_tokens=["<|tool|>"],
        added_tokens_decoder={"260": {"content": "<think>", "lstrip": False, "normalized": False, "rstrip": False,
                                      "single_word": False, "special": False}},
    )  # fmt: skip
    tokenizer = Tokenizer.from_folder(folder)
    think, end, tool = (tokenizer.token_to_id(token) for token in ("<think>", "<|end|>", "<|tool|>"))
    assert (think, tokenizer.eos_token_ids) == (260, (end,))
    assert tokenizer.special_token_ids == {259, end, tool}
    ids = tokenizer.encode("a<think><|end|><|tool|>")
    assert ids == [97, think, end, tool]
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<think><|end|><|tool|>"


def test_special_tokens_map_counts_without_added_tokens(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (259,)
    change_config(folder, added_tokens_decoder={})
    assert Tokenizer.from_folder(folder).eos_token_ids == ()


@pytest.mark.parametrize("ids", [[10**9], [-1], [2**32], [2**64, 97], [97, 99999, 98]])
def test_ids_outside_the_vocabulary_give_no_text(folder: Path, ids: list[int]) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(ids) == "".join(chr(i) for i in ids if 0 <= i < 256)
    assert tokenizer.id_to_token(ids[0]) == (chr(ids[0]) if ids[0] == 97 else None)


def test_a_folder_without_tokenizer_json_goes_through_transformers(folder: Path) -> None:
    expected = Tokenizer.from_folder(folder).encode("hello world")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    change_config(folder, tokenizer_class="GPT2Tokenizer")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert Tokenizer.from_folder(folder).encode("hello world") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer that the library can read"),
        ("tokenizer.json", "[]", "not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON"),
        ("tokenizer_config.json", "[]", "an object is needed, got list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder is malformed"),
        (
            "tokenizer_config.json",
            '{"chat_template": 5}',
            "chat_template must be a text or a list of names and templates, got 5",
        ),
        ("chat_template.json", "[]", r"chat_template\.json: an object is needed, got list"),
        ("chat_template.json", '{"chat_template": [{"name": "x"}]}', "a list of names and templates, got "),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: cannot be read"),
    ],
)
def test_a_bad_file_is_named(folder: Path, name: str, content: str | bytes, message: str) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_folder_without_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no tokenizer\.json, and transformers cannot make one"):
        Tokenizer.from_folder(tmp_path)


def test_an_unsupported_decoder_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r'decoder .*"WordPiece".* is not supported'):
        Tokenizer.from_folder(folder)


def test_a_library_that_warns_at_forks_encodes_on_one_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    tokenizer = Tokenizer.from_folder(folder)
    expected = tokenizer.encode_batch(["ab", "hello"])
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(tokenizers, "__version__", "0.22.2")
    monkeypatch.setattr(tokenizer, "_backend", OneByOne(tokenizer._backend))
    assert tokenizer.encode_batch(["ab", "hello"]) == expected
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with pytest.raises(AttributeError, match="encode_batch_fast"):
        tokenizer.encode_batch(["ab"])


class OneByOne:
    """A backend that has no way to encode a batch."""

    def __init__(self, backend: Any) -> None:
        self.encode = backend.encode


CHILD = """
import os, sys
from pagedllm.tokenizer import Tokenizer
tokenizer = Tokenizer.from_folder(sys.argv[1])
tokenizer.encode_batch(["some text"] * 500)
assert not {"transformers", "torch", "jinja2"} & set(sys.modules), "slow imports"
print(os.environ.get("TOKENIZERS_PARALLELISM"))
if (child := os.fork()) == 0:
    tokenizer.encode("in the child")
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("setting", [None, "true", "false"])
def test_fast_path_imports_little_and_a_fork_prints_nothing(folder: Path, setting: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    environment |= {} if setting is None else {"TOKENIZERS_PARALLELISM": setting}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", str(setting))
