"""Token ids of a window: in memory, in a file, and across the border between them."""

from __future__ import annotations

import os
from array import array

import pytest

from pagedllm.jobs import tokens
from pagedllm.jobs.tokens import TokenStore


@pytest.mark.parametrize("memory_bytes", [1 << 20, 40, 4])
def test_prompts_come_back_from_memory_and_from_the_file(monkeypatch, tmp_path, memory_bytes):
    monkeypatch.setattr(tokens, "MEMORY_BYTES", memory_bytes)
    store = TokenStore(tmp_path)
    prompts = [[1, 2, 3], [], [1 << 30], list(range(20)), [7]]
    for prompt in prompts:
        store.append(prompt)
    assert [store.token_ids(index) for index in (4, 0, 3, 1, 2)] == [prompts[index] for index in (4, 0, 3, 1, 2)]
    assert store[0] == array("i", [1, 2, 3]).tobytes()
    assert store.num_bytes().tolist() == [12, 0, 4, 80, 4]
    assert len(store) == 5
    assert os.listdir(tmp_path) == []  # a file without a name: nothing stays, however we end
    store.close()
    store.close()


def test_a_full_disk_is_told(monkeypatch):
    monkeypatch.setattr(tokens, "MEMORY_BYTES", 8)
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(tokens.tempfile, "TemporaryFile", lambda **options: full)
        with pytest.raises(OSError, match="No space left"):
            TokenStore(None).append([1, 2, 3])
