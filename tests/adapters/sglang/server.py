"""Requests on a small SGLang: its radix cache, allocators and `Req`, driven as its scheduler drives them.

A token's inputs depend on its id alone, so the state after any sequence of tokens is known from the oracle.
A prefill is the oracle's: it checks the state that it finds in the request's slot and writes the one behind
the chunk. Decode steps are SGLang's own, with replay.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from replayssm.adapters.sglang.served import pool_of
from replayssm.core.formats import state_format
from tests import oracle
from tests.adapters.sglang.engine import LAYERS, Engine, Inputs, make_batch

VOCABULARY = 3
TOLERANCE = 2e-4
"""Sequences are short and states of order one; an error that is a fault is of order one too."""
TOLERANCES = {torch.float32: TOLERANCE, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""By the states' format."""
READ_ERRORS = {"int8": 0.05, "fp8": 0.05, "nvfp4": 0.1}
"""Of outputs in parts of a token's largest, by the format of the copy that steps read; states have no part in
it."""


@dataclass(frozen=True)
class Draft:
    """Tokens that a verification step is given for a request.

    Attributes:
        tokens: a token for each node; the first is the request's next.
        accepted: the nodes that are accepted, the first among them.
        parents: of a tree the parent of each node; `None` for a chain.
    """

    tokens: list[int]
    accepted: list[int]
    parents: list[int] | None = None

    def path(self, node: int) -> list[int]:
        """The tokens from the first to `node`."""
        if self.parents is None:
            return self.tokens[: node + 1]
        before = self.path(self.parents[node]) if node else []
        return [*before, self.tokens[node]]


class Server:
    """A radix cache and running requests.

    Attributes:
        engine: pools and backend.
        tree: SGLang's radix cache.
        running: requests in decode.
        hits: of each request the tokens that the cache had.
        finished: of each finished request the tokens that were fed.
    """

    def __init__(self, engine: Engine, generator: torch.Generator) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.engine = engine
        self.tolerance = TOLERANCES[engine.states.dtype]
        pool = pool_of(engine.slots)
        read_states = None if pool is None else pool.read_states
        self.read_error = 0.0 if read_states is None else READ_ERRORS[state_format(read_states[0])]
        self.inputs = engine.draw(VOCABULARY, generator)
        kv = SimpleNamespace(cpu_copy_carries_mamba=False, layer_transfer_counter=None)
        self.allocator = TokenToKVPoolAllocator(4096, torch.float32, "cpu", kv, False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=engine.slots,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            )
        )
        self.running: list[Any] = []
        self.hits: list[int] = []
        self.finished: list[list[int]] = []
        self._known: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._count = 0

    def state(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Each layer's state after a sequence, from the oracle."""
        key = tuple(tokens)
        if not key:
            shape = self.engine.states.shape[2:]
            return [torch.zeros(shape, dtype=torch.double) for _ in range(LAYERS)]
        if key not in self._known:
            self._known[key] = [self._token(layer, key)[0] for layer in range(LAYERS)]
        return self._known[key]

    def _token(self, layer: int, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        token = self.engine.oracle_token(layer, self.inputs[layer], tokens[-1])
        return oracle.TOKEN[self.engine.rule](self.state(tokens[:-1])[layer], token)

    def admit(self, prompt: Sequence[int], chunk: int | None = None, decoding: Sequence[Any] = ()) -> Any:
        """Prefill a request, in chunks of at most `chunk` tokens; the last with `decoding` mixed in.

        Returns:
            The request, whose first output token is decided.
        """
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._count += 1
        req = Req(str(self._count), "", array("q", prompt), SamplingParams(max_new_tokens=1000))
        req.init_next_round_input(self.tree)
        self.hits.append(req.prefix_len)
        req.lock = self.tree.lock(req.last_node)
        self._allocate(req)
        row = req.kv.req_pool_idx
        kept = self.tree.path_device_indices(req.last_node)[: req.prefix_len]
        fresh = self._kv(len(prompt) - req.prefix_len)
        self.engine.slots.req_to_token[row, : len(prompt)] = torch.cat([kept, fresh]).int()
        done = req.prefix_len
        while done < len(prompt):
            end = len(prompt) if chunk is None else min(len(prompt), done + chunk)
            mixed = decoding if end == len(prompt) else ()
            self._prefill(
                [(req, done, end), *((other, self._fed(other), self._fed(other) + 1) for other in mixed)]
            )
            req.kv.kv_committed_len = req.kv.kv_allocated_len = end
            for other in mixed:
                self._grow(other)
            self.tree.checkpoint(req, up_to=end)
            done = end
        self.running.append(req)
        self._sample(req)
        for other in mixed:
            self._sample(other)
        return req

    def step(
        self, requests: Sequence[Any], padded: int = 0, tracked: Sequence[bool] | None = None, **batch: Any
    ) -> None:
        """One decode step of running requests; outputs are compared with the oracle's.

        Args:
            requests: the requests.
            padded: padded rows behind them.
            tracked: which rows the prefix cache keeps, as the scheduler's batch says it on the host.
            **batch: further attributes of the forward batch.
        """
        for req in requests:
            self._grow(req)
        ids = torch.tensor([req.output_ids[-1] for req in requests] + [0] * padded)
        tokens: list[Inputs] = [{name: value[ids] for name, value in layer.items()} for layer in self.inputs]
        rows = [req.kv.req_pool_idx for req in requests] + [0] * padded
        outputs = self.engine.decode(rows, tokens, tracked, requests, **batch)
        for layer, out in enumerate(outputs):
            assert (out[len(requests) :] == 0).all(), "a padded row"
            for row, req in enumerate(requests):
                _, want = self._token(layer, self._tokens(req))
                self.assert_output(out[row], want)
        for req in requests:
            self._sample(req)

    def verify(
        self,
        requests: Sequence[Any],
        drafts: Sequence[Draft],
        padded: int = 0,
        road: str = "commit_mamba_states_after_verify",
        targets: Sequence[int] | None = None,
        graph: bool = False,
    ) -> None:
        """One verification step of running requests, and SGLang's commit of what was accepted.

        The outputs of every node are compared with the oracle's, whether the node is accepted or not.

        Args:
            requests: the requests.
            drafts: of each request the nodes and how many are accepted, all of one length.
            padded: padded rows behind them.
            road: how the drafter commits, see `commit`.
            targets: the slot that tracks each request, -1 for none.
            graph: SGLang prepares the step as for a CUDA graph.
        """
        nodes = len(drafts[0].tokens)
        tree = drafts[0].parents is not None
        ids = torch.tensor([token for draft in drafts for token in draft.tokens] + [0] * padded * nodes)
        tokens: list[Inputs] = [{name: value[ids] for name, value in layer.items()} for layer in self.inputs]
        rows = [req.kv.req_pool_idx for req in requests] + [0] * padded
        parents = [draft.parents or [] for draft in drafts] + [[-1] * nodes] * padded if tree else ()
        outputs = self.engine.verify(rows, tokens, nodes, parents, graph)
        for layer, out in enumerate(outputs):
            assert (out[len(requests) :] == 0).all(), "a padded row"
            for row, (req, draft) in enumerate(zip(requests, drafts, strict=True)):
                for node in range(nodes):
                    fed = [*self._tokens(req)[:-1], *draft.path(node)]
                    _, want = self._token(layer, fed)
                    self.assert_output(out[row, node], want)
        self.commit(requests, drafts, road, targets)
        for req, draft in zip(requests, drafts, strict=True):
            for node in draft.accepted:
                self._grow(req)
                if node:
                    req.output_ids.append(draft.tokens[node])
            self._sample(req)

    def commit(
        self, requests: Sequence[Any], drafts: Sequence[Draft], road: str, targets: Sequence[int] | None
    ) -> None:
        """SGLang's own commit of a verification step.

        Drafters for EAGLE and n-grams call a common function; DFLASH and DSPARK bring their own.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative import spec_utils
        from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
        from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

        nodes = len(drafts[0].tokens)
        lens = torch.tensor([len(draft.accepted) for draft in drafts], dtype=torch.int32)
        before = torch.tensor([self._fed(req) for req in requests])
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in requests]),
            seq_lens=before,
            seq_lens_cpu=before,
            mamba_track_indices=None if targets is None else torch.tensor(targets),
            tree_cache=SimpleNamespace(page_size=1),
        )
        worker = SimpleNamespace(model_runner=self.engine.runner)
        if road == "commit_mamba_states_after_verify":
            index = torch.full((len(drafts), nodes), -1, dtype=torch.int32)
            for row, draft in enumerate(drafts):
                accepted = torch.tensor(draft.accepted, dtype=torch.int32)
                index[row, : len(accepted)] = accepted + row * nodes
            spec_utils.commit_mamba_states_after_verify(worker, batch, lens, index, nodes)
            return
        commit = {
            "dflash": DFlashWorkerV2._update_target_mamba_state_after_verify,
            "dspark": DSparkWorkerV2._commit_target_mamba_states_after_verify,
        }[road]
        drafter = SimpleNamespace(target_worker=worker, _need_mamba_verify_commit=True)
        commit(
            drafter, batch=batch, seq_lens_pre_verify=before, seq_lens_post_verify=before + lens,
            commit_lens=lens,
        )  # fmt: skip

    def draft(self, req: Any, nodes: int, accepted: int, rng: random.Random, tree: bool = False) -> Draft:
        """A draft of which the first `accepted` tokens on one path are what the request would sample.

        The first is the token that the request feeds anyway; the others are random.
        """
        path = [self._tokens(req)[-1]]
        while len(path) < accepted:
            path.append(self._next([*self._tokens(req)[:-1], *path], len(req.output_ids) + len(path) - 1))
        places = [0, *sorted(rng.sample(range(1, nodes), accepted - 1))] if tree else range(accepted)
        tokens = [rng.randrange(VOCABULARY) for _ in range(nodes)]
        parents = [-1, *(rng.randrange(node) for node in range(1, nodes))]
        for number, place in enumerate(places):
            tokens[place] = path[number]
            parents[place] = places[number - 1] if number else -1
        return Draft(tokens, list(places), parents if tree else None)

    def finish(self, req: Any) -> None:
        """End a request: SGLang's cache takes its state and frees what it held."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        self.running.remove(req)
        self.finished.append(self._tokens(req)[:-1])
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        release_kv_cache(req, self.tree, checkpoint=True)

    def retract(self, req: Any) -> Any:
        """Take a request's state to the host, and its slot and row away."""
        from sglang.srt.mem_cache.common import release_kv_cache

        self.running.remove(req)
        saved = self.engine.slots.mamba_pool.get_cpu_copy(req.kv.mamba_pool_idx.unsqueeze(0))
        release_kv_cache(req, self.tree, checkpoint=False)
        return saved

    def resume(self, req: Any, saved: Any) -> None:
        """Give a retracted request a slot and a row again, and its state back."""
        slots = self.engine.slots
        req.kv.req_pool_idx = None
        self._allocate(req)
        req.kv.mamba_needs_clear = False
        slots.mamba_pool.load_cpu_copy(saved, req.kv.mamba_pool_idx.unsqueeze(0))
        length = len(self._tokens(req)) - 1
        slots.req_to_token[req.kv.req_pool_idx, :length] = self._kv(length).int()
        req.kv.kv_committed_len = req.kv.kv_allocated_len = length
        req.kv.cache_protected_len = 0
        self.running.append(req)

    def evict(self, states: int) -> None:
        """Take states of the prefix cache away."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=0, mamba_num=states))

    def assert_output(self, out: torch.Tensor, want: torch.Tensor) -> None:
        """A token's output is the oracle's, but for the error of what a step reads."""
        if self.read_error == 0.0:
            torch.testing.assert_close(out.double(), want, rtol=self.tolerance, atol=self.tolerance)
            return
        error = (out - want).abs().amax() / want.abs().amax().clamp(min=1.0)
        assert error < self.read_error

    def _allocate(self, req: Any) -> None:
        """A row and, if it has none, a slot; as the scheduler does, states of the cache make room."""
        slots = self.engine.slots
        if not req.kv.holds_mamba and slots.mamba_allocator.available_size() == 0:
            self.evict(1)
        assert slots.alloc([req]) is not None

    def _tokens(self, req: Any) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids]

    def _fed(self, req: Any) -> int:
        return len(self._tokens(req)) - 1

    def _kv(self, count: int) -> torch.Tensor:
        places = self.allocator.alloc(count)
        assert places is not None
        return places

    def _grow(self, req: Any) -> None:
        """A place for the token that a decode step feeds."""
        place = self.engine.slots.req_to_token[req.kv.req_pool_idx]
        place[req.kv.kv_committed_len] = self._kv(1).int()[0]
        req.kv.kv_committed_len += 1
        req.kv.kv_allocated_len = req.kv.kv_committed_len

    def _sample(self, req: Any) -> None:
        """A next token, by a rule of its own so that requests often share prefixes."""
        req.output_ids.append(self._next(self._tokens(req), len(req.output_ids)))

    def _next(self, tokens: Sequence[int], outputs: int) -> int:
        """The token that follows `tokens`, of which `outputs` have been sampled."""
        return (sum(tokens) + outputs) % VOCABULARY

    def _prefill(self, rows: list[tuple[Any, int, int]]) -> None:
        """A forward pass over tokens `[start, end)` of each request, mixed if some are in decode."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        clear = [req.kv.mamba_pool_idx for req, _, _ in rows if req.kv.mamba_needs_clear]
        copies = [req for req, _, _ in rows if req.kv.mamba_cow_src_index is not None]
        lengths = [end - start for _, start, end in rows]
        batch = make_batch(
            ForwardMode.MIXED if len(rows) > 1 else ForwardMode.EXTEND,
            [req.kv.req_pool_idx for req, _, _ in rows],
            mamba_clear_indices=torch.stack(clear) if clear else None,
            mamba_cow_src_indices=torch.cat([req.kv.mamba_cow_src_index for req in copies])
            if copies
            else None,
            mamba_cow_dst_indices=torch.stack([req.kv.mamba_pool_idx for req in copies]) if copies else None,
            extend_start_loc=torch.tensor([0, *lengths]).cumsum(0)[:-1],
            extend_seq_lens=torch.tensor(lengths),
            extend_prefix_lens=torch.tensor([start for _, start, _ in rows]),
            extend_seq_lens_cpu=lengths,
            extend_num_tokens=sum(lengths),
        )
        for req, _, _ in rows:
            req.kv.mamba_needs_clear, req.kv.mamba_cow_src_index = False, None

        def run() -> None:
            self.engine.backend.init_forward_metadata(batch)
            for req, start, end in rows:
                slot, tokens = int(req.kv.mamba_pool_idx), self._tokens(req)
                before, after = self.state(tokens[:start]), self.state(tokens[:end])
                for layer in range(LAYERS):
                    found = self.engine.states[layer, slot]
                    torch.testing.assert_close(
                        found.double(), before[layer], rtol=self.tolerance, atol=self.tolerance
                    )
                    found.copy_(after[layer])

        self.engine.forward(batch, run)


def live(server: Server, choice: str, rng: random.Random, away: list[tuple[Any, Any]]) -> bool:
    """One event in the requests' lives, where it is possible now; `away` are those that were retracted."""
    room = len(server.running) + len(away) < 4
    if choice in ("admit", "mixed") and room:
        known = rng.choice([[], *server.finished[-3:]])
        prompt = [*known, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 7)))]
        decoding = list(server.running) if choice == "mixed" else []
        server.admit(prompt, chunk=rng.choice([None, 2, 3]), decoding=decoding)
    elif choice == "finish" and server.running:
        server.finish(rng.choice(server.running))
    elif choice == "retract" and server.running:
        req = rng.choice(server.running)
        away.append((req, server.retract(req)))
    elif choice == "resume" and away:
        server.resume(*away.pop(rng.randrange(len(away))))
    elif choice == "evict":
        server.evict(rng.randint(1, 3))
    else:
        return False
    return True
