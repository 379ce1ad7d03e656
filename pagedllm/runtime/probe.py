"""Whether a library's products keep a row's bits in batches of other sizes (exactness rule a).

Asked once, at the start, of the shapes that a model has: the answer holds for this GPU, library and these shapes, and
is reported as such."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedllm.model.decoder import Decoder
from pagedllm.model.linear import NO_EPILOGUE, Epilogue, Linear
from pagedllm.model.moe import MoE

NUM_ROWS = (1, 2, 3, 4, 5, 8, 13, 16, 24, 33, 64, 100, 128, 256, 257)


@torch.inference_mode()
def varying_products(decoder: Decoder) -> list[str]:
    """The products "in x out" of which a row's bits depend on the number of rows or on its place; [] if none does."""
    found = {}
    for linear, dtype, epilogue in _products(decoder):
        name = f"{linear.shape.in_features} x {linear.shape.out_features}"
        if name not in found:
            found[name] = not _keeps_rows(decoder, linear, dtype, epilogue)
    return [name for name, varies in found.items() if varies]


def _products(decoder: Decoder) -> Iterator[tuple[Linear, torch.dtype, Epilogue]]:
    for layer in decoder.layers:
        yield layer.attention.qkv, decoder.dtype, NO_EPILOGUE
        yield layer.output, decoder.dtype, NO_EPILOGUE
        dense = layer.mlp
        if isinstance(dense, MoE):  # experts' own products are ours, and exact
            yield dense.router, torch.float32, NO_EPILOGUE
            if dense.shared is None:
                continue
            yield dense.shared_gate, torch.float32, NO_EPILOGUE
            dense = dense.shared
        yield dense.up, decoder.dtype, dense.gate
        yield dense.down, decoder.dtype, NO_EPILOGUE
    yield decoder.head, torch.float32, NO_EPILOGUE


def _keeps_rows(decoder: Decoder, linear: Linear, dtype: torch.dtype, epilogue: Epilogue) -> bool:
    device = decoder.memory.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (max(NUM_ROWS), linear.shape.in_features)
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(decoder.dtype)

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), linear.shape.out_features, dtype=dtype, device=device)
        linear.apply(decoder.namespace, out, rows, epilogue)
        return out

    whole = product(x)
    return all(
        torch.equal(product(x[begin : begin + count]), whole[begin : begin + count])
        for count in NUM_ROWS
        for begin in {0, len(x) - count}
    )
