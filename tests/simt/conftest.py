from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simt.emulator import Emulator, build


@pytest.fixture(scope="session")
def loaded_emulator() -> Emulator:
    return Emulator(build())


@pytest.fixture
def emulator(loaded_emulator: Emulator) -> Iterator[Emulator]:
    loaded_emulator.configure()
    yield loaded_emulator
    loaded_emulator.configure()
