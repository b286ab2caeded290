"""The stream through the real SGLang on a CPU: its pools, backends and commits, with the adapter.

Its prefill is a forward pass that writes the recorded states. Where its scheduler takes slots and rows and
moves states to the host, so does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from replayssm.core.formats import state_tensors
from tests.adapters.sglang.engine import Engine, make_batch, write_model
from tests.parity.stream import LAYERS, SEQUENCES, WINDOW, Inputs, Slot, Stream

_HEADS: dict[str, dict[str, Any]] = {
    "mamba2": {"mamba_head_dim": 5, "ssm_state_size": 8},
    "gdn": {"linear_value_head_dim": 5, "linear_key_head_dim": 8},
    "kda": {
        "linear_attn_config": {
            "kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 4, "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip
"""What the stream's layers have otherwise than the adapter's own tests."""


class SGLang:
    """Pools and backend of one model, and a row and a slot for each sequence."""

    def __init__(self, stream: Stream, folder: Path) -> None:
        speculation: dict[str, Any] = {"enable_linear_replayssm": True}
        if stream.speculates:
            speculation = {
                "enable_linear_replayssm_spec": True, "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": stream.max_draft, "speculative_ngram_max_bfs_breadth": 1,
            }  # fmt: skip
        self.engine = Engine.start(
            stream.rule,
            write_model(stream.rule, folder, **_HEADS[stream.rule]),
            slots=SEQUENCES,
            requests=SEQUENCES,
            linear_replayssm_cache_len=WINDOW,
            dtype=str(stream.act).removeprefix("torch."),
            **speculation,
        )
        for weights, recorded in zip(self.engine.weights, stream.weights, strict=True):
            rates = {"A": -torch.exp(recorded["A_log"])}
            for name, value in weights.items():
                value.copy_((rates | recorded)[name])
        self.pool = self.engine.slots.mamba_pool
        self.rings = self.pool._replayssm
        for ring in self.rings.stacked.values():
            ring.fill_(float("nan"))
        self.engine.states[:, 1:].fill_(float("nan"))
        self.rings.cursors.history[1:] = 3
        self.rows: dict[str, int] = {}
        self.slots: dict[str, torch.Tensor] = {}
        self._away: dict[str, Any] = {}

    def prefill(self, name: str, states: list[torch.Tensor]) -> None:
        """See `Side`."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self._admit(name)

        def run() -> None:
            for layer, state in enumerate(states):
                self.engine.states[layer, self.slots[name]] = state

        self.engine.forward(make_batch(ForwardMode.EXTEND, [self.rows[name]]), run)

    def step(self, names: Sequence[str], tokens: list[Inputs]) -> list[torch.Tensor]:
        """See `Side`."""
        given = [{name: value[:, 0] for name, value in layer.items()} for layer in tokens]
        outputs = self.engine.decode([self.rows[name] for name in names], given)
        return [out.unsqueeze(1) for out in outputs]

    def verify(
        self, names: Sequence[str], tokens: list[Inputs], accepted: Sequence[int]
    ) -> list[torch.Tensor]:
        """See `Side`; committed as EAGLE's and the n-gram drafter do."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative import spec_utils

        rows, drafts = [self.rows[name] for name in names], next(iter(tokens[0].values())).shape[1]
        given = [{name: value.flatten(0, 1) for name, value in layer.items()} for layer in tokens]
        outputs = self.engine.verify(rows, given, drafts)
        lens = torch.tensor(accepted, dtype=torch.int32)
        index = torch.arange(len(rows) * drafts, dtype=torch.int32).view(len(rows), drafts)
        index = torch.where(torch.arange(drafts) < lens[:, None], index, -1)
        before = torch.ones(len(rows), dtype=torch.int64)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, req_pool_indices=torch.tensor(rows), seq_lens=before,
            seq_lens_cpu=before, mamba_track_indices=None, tree_cache=SimpleNamespace(page_size=1),
        )  # fmt: skip
        worker = SimpleNamespace(model_runner=self.engine.runner)
        spec_utils.commit_mamba_states_after_verify(worker, batch, lens, index, drafts)
        return outputs

    def copy(self, source: str, target: str) -> None:
        """As its prefix cache copies states."""
        self._admit(target)
        self.pool.copy_from(self.slots[source], self.slots[target])

    def take_away(self, name: str) -> None:
        """As a retracted request's state goes to the host."""
        self._away[name] = self.pool.get_cpu_copy(self.slots[name])
        self._release(name)

    def bring_back(self, name: str) -> None:
        """See `Side`."""
        self._admit(name)
        self.pool.load_cpu_copy(self._away.pop(name), self.slots[name])

    def finish(self, name: str) -> None:
        """See `Side`."""
        self._release(name)

    def look(self, name: str) -> Slot:
        """See `Side`."""
        if name in self._away:
            _, temporal = self._away[name][:2]
            return Slot([state[0] for state in temporal], [{}] * LAYERS, None, 0)
        slot = int(self.slots[name])
        cursors = self.rings.cursors
        rings = [{key: tensor[slot] for key, tensor in layer.items()} for layer in self.rings.rings]
        reads = [state_tensors(copy) for copy in self.rings.read_states or ()]
        return Slot(
            list(self.engine.states[:, slot]), rings, int(cursors.start[slot]), int(cursors.history[slot]),
            [tuple(tensor[slot] for tensor in tensors) for tensors in reads],
        )  # fmt: skip

    def _admit(self, name: str) -> None:
        """A row and a slot."""
        self.rows[name] = min(set(range(1, SEQUENCES + 1)) - set(self.rows.values()))
        slot = self.engine.slots.mamba_allocator.alloc(1)
        assert slot is not None
        self.slots[name] = slot
        self.engine.slots.req_index_to_mamba_index_mapping[self.rows[name]] = slot.int()

    def _release(self, name: str) -> None:
        self.engine.slots.mamba_allocator.free(self.slots.pop(name))
        del self.rows[name]
