"""Every model that a test has enabled is disabled after it, and leaves nothing patched."""

from collections.abc import Iterator
from typing import Any

import pytest

from replayssm.adapters.transformers import Handle
from replayssm.adapters.transformers.handle import _SCANS


@pytest.fixture(autouse=True)
def _disable_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    handles: list[Handle] = []
    initialise = Handle.__init__

    def remember(self: Handle, *args: Any) -> None:
        initialise(self, *args)
        handles.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "__init__", remember)
        yield
    for handle in handles:
        handle.disable()
    assert not _SCANS._original
