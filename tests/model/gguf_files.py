"""Small GGUF files, written by the `gguf` package, for tests of the reader, the tokenizer and the conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SIZES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": np.float32(1e-5),
    "rope.freq_base": np.float32(10000.0),
}


def byte_tokens() -> list[str]:
    """The 256 stand-ins for bytes that byte-level vocabularies begin with, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level_vocabulary(
    merges: Sequence[str] = ("q q",), pre: str = "smollm", specials: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Keys under tokenizer.ggml: bytes, what the merges make (at least one), then `specials` (text to kind)."""
    tokens = list(dict.fromkeys([*byte_tokens(), *(merge.replace(" ", "") for merge in merges)]))
    specials = {"<|endoftext|>": CONTROL} if specials is None else specials
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *specials],
        "token_type": [NORMAL] * len(tokens) + list(specials.values()),
        "merges": list(merges),
    }


def sentencepiece_vocabulary(pieces: Sequence[str], specials: Mapping[str, int] | None = None) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 bytes, `pieces` (the earlier the better), then `specials`."""
    control = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    specials = {} if specials is None else specials
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [*control, *bytes_, *pieces, *specials],
        "token_type": [*control.values(), *[BYTE] * 256, *[NORMAL] * len(pieces), *specials.values()],
        "scores": np.array([0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0] * len(specials), np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def layer_shapes(architecture: str, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, in torch's order of dimensions."""
    hidden, inner = sizes["embedding_length"], sizes["feed_forward_length"]
    heads, kv_heads = sizes["attention.head_count"], sizes["attention.head_count_kv"]
    head_dim = sizes.get("attention.key_length", hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if architecture in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    if architecture == "gemma3":
        shapes |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
    return shapes


def random_tensors(architecture: str, sizes: Mapping[str, Any], vocab_size: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab_size, sizes["embedding_length"])}
    for layer in range(sizes["block_count"]):
        for name, shape in layer_shapes(architecture, sizes).items():
            shapes[f"blk.{layer}.{name}"] = shape
    shapes["output_norm"] = (sizes["embedding_length"],)
    return {
        f"{name}.weight": rng.standard_normal(shape, np.float32) * np.float32(0.1) for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """`keys` are whole header keys; a tensor not in `types` is stored as it is."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, (float, np.float32)):
            writer.add_float32(key, float(value))
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))
    for name, tensor in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_keys(architecture: str, sizes: Mapping[str, Any], vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{architecture}.{key}": value for key, value in sizes.items()} | {
        f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()
    }


def write_model(
    path: Path,
    architecture: str = "llama",
    vocabulary: Mapping[str, Any] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    **changes: Any,
) -> Path:
    """A tiny random model; `changes` replace or add header keys, "." written as "__", None removes one."""
    vocabulary = byte_level_vocabulary() if vocabulary is None else vocabulary
    keys = model_keys(architecture, SIZES, vocabulary)
    if architecture == "gemma3":
        keys["gemma3.attention.sliding_window"] = 16
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    sizes = SIZES | {
        key.removeprefix(f"{architecture}."): value for key, value in keys.items() if key.startswith(f"{architecture}.")
    }
    tensors = random_tensors(architecture, sizes, len(vocabulary["tokens"]))
    return write_gguf(path, architecture, keys, tensors, types)
