"""Block hashes: what a name covers."""

from __future__ import annotations

import pytest

from pagedllm.cache.block_hash import HASH_BYTES, extend_block_hashes, root_hash
from tests.engine.fakes import make_request


def hashes(token_ids: list[int], block_size: int = 2, extra_keys: tuple[object, ...] = ()) -> list[bytes]:
    request = make_request("r", token_ids, extra_keys=extra_keys)
    extend_block_hashes(request, block_size)
    return request.block_hashes


def test_only_full_blocks_have_a_name_of_128_bits() -> None:
    assert [len(hashes(list(range(n)))) for n in range(6)] == [0, 0, 1, 1, 2, 2]
    assert {len(name) for name in hashes([1, 2, 3, 4])} == {HASH_BYTES} == {16}


def test_names_are_the_same_in_every_process() -> None:
    assert hashes([1, 2, 3, 4], extra_keys=("salt", 0, None))[1].hex() == "aad7467da52d225c6f873933c24ab903"


def test_a_name_covers_all_tokens_before_it() -> None:
    assert hashes([1, 2, 3, 4])[0] == hashes([1, 2, 9, 9])[0]
    assert hashes([1, 2, 3, 4])[1] != hashes([2, 1, 3, 4])[1]
    assert len(set(hashes([5, 5] * 4))) == 4  # the same tokens at another depth are another block


def test_a_name_covers_the_extra_keys() -> None:
    keys: list[tuple[object, ...]] = [(), (0,), ("0",), (b"0",), (None,), (0, 0), ("0, 0",), (False,)]
    assert len({root_hash(key) for key in keys}) == len(keys)
    assert len({hashes([1, 2], extra_keys=key)[0] for key in keys}) == len(keys)


def test_an_extra_key_without_an_exact_repr_is_refused() -> None:
    with pytest.raises(TypeError, match=r"extra_keys must be .* got 1\.5"):
        root_hash((1.5,))


def test_names_grow_with_the_tokens_and_are_computed_once() -> None:
    calls: list[bytes] = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return len(calls).to_bytes(2, "little")

    request = make_request("r", [1, 2, 3])
    extend_block_hashes(request, 2, counting)
    extend_block_hashes(request, 2, counting)
    assert len(calls) == 2  # the root and one block
    request.token_ids += [4, 5]
    extend_block_hashes(request, 2, counting)
    assert request.block_hashes == [b"\x02\x00", b"\x03\x00"]
    assert calls[2] == b"\x02\x00" + b"\x03\x00\x00\x00\x04\x00\x00\x00"
