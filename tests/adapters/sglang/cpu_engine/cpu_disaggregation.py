"""A transfer between a server that prefills and one that decodes, through files.

Part of the test plugin `cpu_engine`, in the place of SGLang's `nixl` transfer backend. What is sent, from
where and to where, is SGLang's: both servers give it the buffers of their pools and the indices of a request.
A request's file is written as a whole, so that the servers may run one after the other.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = "CPU_ENGINE_TRANSFERS"
"""Variable that names the folder; without it the backend is SGLang's."""


def register() -> None:
    """Put the classes below where SGLang looks for those of `nixl`."""
    if FOLDER not in os.environ:
        return
    fake = import_module("sglang.srt.disaggregation.fake")
    poll = import_module("sglang.srt.disaggregation.base").KVPoll

    class Manager(fake.FakeKVManager):
        """It knows any server that prefills as one without data parallelism."""

        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.prefill_info_table = SimpleNamespace(get=lambda address: SimpleNamespace(dp_size=1))

    class Sender(fake.FakeKVSender):
        """Writes a request's file with its last chunk."""

        def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
            super().init(num_kv_indices, aux_index)
            self.aux, self.pages = aux_index, list[int]()

        def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
            self.pages += list(kv_indices)
            if state_indices is not None:
                rows = places(self.kv_mgr.kv_args, self.pages, state_indices, self.aux)
                content = pickle.dumps([ctypes.string_at(*row) for row in rows])
                path(self.bootstrap_room).with_suffix(".part").write_bytes(content)
                path(self.bootstrap_room).with_suffix(".part").rename(path(self.bootstrap_room))
                super().send(kv_indices, state_indices, num_kv_tokens)

    class Receiver(fake.FakeKVReceiver):
        """Reads a request's file once it is there."""

        def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
            super().__init__(mgr, bootstrap_addr, bootstrap_room)
            self.room = bootstrap_room

        def send_metadata(
            self, kv_indices: Any, aux_index: Any = None, state_indices: Any = None, **given: Any
        ) -> None:
            assert not given["decode_prefix_len"], "what this server has is not left out of a file"
            super().send_metadata(kv_indices, aux_index, state_indices)
            self.places = list(places(self.kv_mgr.kv_args, kv_indices, state_indices, aux_index))

        def poll(self) -> Any:
            found = super().poll()
            if found != poll.Success or not self.places:
                return found
            if not path(self.room).exists():
                self.conclude_state = None
                return poll.Transferring
            rows = pickle.loads(path(self.room).read_bytes())
            for (address, size), row in zip(self.places, rows, strict=True):
                assert size == len(row)
                ctypes.memmove(address, row, size)
            self.places = []
            return found

    nixl = types.ModuleType("sglang.srt.disaggregation.nixl")
    vars(nixl).update(
        NixlKVManager=Manager, NixlKVSender=Sender, NixlKVReceiver=Receiver,
        NixlKVBootstrapServer=lambda *args, **given: None,
    )  # fmt: skip
    sys.modules[nixl.__name__] = nixl


def path(room: int | None) -> Path:
    return Path(os.environ[FOLDER], str(room))


def places(
    args: Any, pages: Sequence[int], states: Sequence[Sequence[int] | None], aux: int | None
) -> Iterator[tuple[int, int]]:
    """Address and bytes of all that belongs to a request: keys and values, states, and its first token."""
    assert aux is not None
    groups = [(args.kv_data_ptrs, args.kv_item_lens, pages), (args.aux_data_ptrs, args.aux_item_lens, [aux])]
    components = zip(args.state_data_ptrs, args.state_item_lens, states, strict=True)
    for pointers, sizes, indices in [*groups, *components]:
        for pointer, size in zip(pointers, sizes, strict=True):
            for index in () if indices is None else indices:
                yield int(pointer) + int(index) * int(size), int(size)
