"""In torch, the GPU kernels that SGLang calls to verify drafts: its tree, its attention, its states.

Part of the test plugin `cpu_engine`. The workers and the scheduler are SGLang's. N-grams are looked up here
too, so that no compiler is needed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def register(replace: Callable[[str, str, Any], None]) -> None:
    """Put the functions of this module in the place of SGLang's; `replace` takes module, name, function."""
    links = types.ModuleType("sgl_kernel.speculative")
    vars(links)["reconstruct_indices_from_tree_mask"] = tree_links
    sys.modules.update({"sgl_kernel": types.ModuleType("sgl_kernel"), "sgl_kernel.speculative": links})
    ops = "sglang.kernels.ops"
    replace(f"{ops}.speculative.spec_tree", "verify_tree_greedy_func", accept)
    replace(f"{ops}.speculative.cache_locs", "assign_extend_cache_locs_func", extend_locations)
    replace(f"{ops}.speculative.cache_locs", "fill_front_out_cache_loc_func", front_locations)
    replace(f"{ops}.speculative.cache_locs", "assign_draft_cache_locs_contiguous_func", draft_locations)
    replace(f"{ops}.speculative.spec_tree", "build_tree_kernel_efficient_func", star_links)
    replace(f"{ops}.speculative.eagle", "fill_bonus_tokens_func", bonus_tokens)
    replace(f"{ops}.speculative.eagle", "fill_accept_out_cache_loc_func", accepted_locations)
    replace("sglang.srt.mem_cache.allocation", "assign_req_to_token_pool_func", assign_places)
    replace("sglang.srt.speculative.cpp_ngram.ngram_corpus", "NgramCorpus", Corpus)
    copies = f"{ops}.mamba.mamba_state_scatter_triton"
    replace(copies, "fused_mamba_state_scatter_with_mask", scatter)
    replace(copies, "fused_conv_window_scatter_with_mask", scatter)
    replace(copies, "_conv_multi_eligible", lambda pairs: False)
    pools = import_module("sglang.srt.mem_cache.memory_pool")
    pools.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
    pools.MHATokenToKVPool.move_kv_cache = pools.MLATokenToKVPool.move_kv_cache = move_kv
    attention = import_module("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend
    prefill = attention.forward_extend

    def extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **given: Any) -> Any:
        if batch.forward_mode.is_target_verify():
            return verify_attention(self, q, k, v, layer, batch)
        return prefill(self, q, k, v, layer, batch, *args, **given)

    attention.forward_extend = extend
    # For drafts of one step, which need no other.
    drafts = import_module("sglang.srt.speculative.draft_utils").DraftBackendFactory
    drafts.create_draft_extend_backend = lambda self: attention(self.draft_model_runner)


class Corpus:
    """What has followed each few tokens so far; drafts are trees of it, grown as SGLang's own are.

    Each suffix of a text that is known has paths of its own from the root, the longest suffix first, of which
    each token takes the breadth's newest followers.
    """

    DEPTH = 18

    def __init__(self, max_bfs_breadth: int, draft_token_num: int, **given: Any) -> None:
        self.breadth, self.nodes = max_bfs_breadth, draft_token_num
        self.reset()

    def reset(self) -> None:
        self.followers: dict[tuple[int, ...], list[int]] = {}

    def synchronize(self) -> None: ...

    def erase_match_state(self, req_ids: list[str]) -> None: ...

    def batch_put(self, batch_tokens: list[list[int]]) -> None:
        for tokens in batch_tokens:
            for end in range(1, len(tokens)):
                for start in range(max(0, end - self.DEPTH + 1), end):
                    known = self.followers.setdefault(tuple(tokens[start:end]), [])
                    if tokens[end] in known:
                        known.remove(tokens[end])
                    known.insert(0, tokens[end])

    def batch_get(
        self, req_ids: list[str], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each tree's nodes, and of each node which nodes are on its path."""
        drafts = np.zeros((len(batch_tokens), self.nodes), dtype=np.int64)
        mask = np.tile(np.eye(self.nodes, dtype=np.int64), (len(batch_tokens), 1, 1))
        for row, tokens in enumerate(batch_tokens):
            children: dict[tuple[int, int], int] = {}
            drafts[row, 0], mask[row, :, 0] = tokens[-1], 1
            for order in range(self.DEPTH - 1, 0, -1):
                waiting = [(0, tuple(tokens[-order:]))]
                while waiting:
                    node, path = waiting.pop(0)
                    for token in self.followers.get(path, [])[: self.breadth]:
                        if (node, token) not in children:
                            if len(children) == self.nodes - 1:
                                break
                            child = children[node, token] = len(children) + 1
                            drafts[row, child] = token
                            mask[row, child] |= mask[row, node]
                        waiting.append((children[node, token], (*path, token)))
        return drafts.flatten(), mask.flatten()


def tree_links(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    children: torch.Tensor,
    siblings: torch.Tensor,
    rows: int,
    nodes: int,
) -> None:
    """Positions, numbers, first children and next siblings of nodes, from who is whose ancestor."""
    before = torch.tril(tree_mask.view(rows, nodes, nodes).bool(), -1)
    positions.copy_((before.sum(-1) + seq_lens[:, None]).flatten())
    index.copy_(torch.arange(rows * nodes).view(rows, nodes))
    children.fill_(-1)
    siblings.fill_(-1)
    for row in range(rows):
        last: dict[int, int] = {}
        for node in range(1, nodes):
            ancestors = before[row, node].nonzero().flatten().tolist()
            if not ancestors:
                continue
            parent = ancestors[-1]
            if parent in last:
                siblings[row, last[parent]] = node
            else:
                children[row, parent] = node
            last[parent] = node


def accept(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow a draft tree for as long as a child is what the model predicts."""
    for row in range(len(candidates)):
        node, count = 0, 0
        accept_index[row, 0] = retrieve_index[row, 0]
        while True:
            wanted = target_predict[row, node]
            predicts[retrieve_index[row, node]] = wanted
            child = int(retrieve_next_token[row, node])
            while child != -1 and candidates[row, child] != wanted:
                child = int(retrieve_next_sibling[row, child])
            if child == -1 or count + 1 == accept_index.shape[1]:
                break
            node, count = child, count + 1
            accept_index[row, count] = retrieve_index[row, node]
        accept_token_num[row] = count
    return predicts, accept_index, accept_token_num


def extend_locations(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    **given: Any,
) -> torch.Tensor:
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in bounds]).long()


def assign_places(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write where the tokens `start..end` of each request are cached."""
    first = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start].to(req_to_token.dtype)
        first += end - start


def draft_locations(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    assert mrope is None
    places = extend_locations(req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_cols)
    out_cache_loc[: len(places)] = places
    if positions is not None:
        positions.copy_(seq_lens.repeat_interleave(topk))


def star_links(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    *args: Any,
    **given: Any,
) -> None:
    """What `tree_links` works out, and who sees whom: chains, and trees that are one step deep."""
    assert topk == 1 or depth == 1
    nodes = torch.arange(draft_token_num)
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    after = torch.where(nodes + 1 < draft_token_num, nodes + 1, -1)
    retrieve_next_token.copy_(after if topk == 1 else torch.where(nodes == 0, after, -1))
    retrieve_next_sibling.copy_(torch.where(nodes == 0, -1, after) if topk > 1 else torch.tensor(-1))
    levels = nodes if topk == 1 else (nodes > 0).long()
    positions.copy_((verified_seq_len[:, None] + levels).flatten())
    if topk > 1:
        own = torch.eye(draft_token_num, dtype=torch.bool) | (nodes == 0)
        rows = [
            torch.cat([own.new_ones(draft_token_num, length), own], dim=1).flatten()
            for length in verified_seq_len.tolist()
        ]
        tree_mask[: sum(map(len, rows))] = torch.cat(rows)


def bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus: torch.Tensor, *args: Any, **given: Any
) -> None:
    """The last accepted token of each request."""
    rows = accept_tokens.view(len(accept_lens), -1)
    bonus.copy_(rows.gather(1, (accept_lens.long() - 1)[:, None])[:, 0])


def front_locations(num_front: torch.Tensor, locations: torch.Tensor, front: torch.Tensor) -> None:
    rows = zip(locations.view(len(num_front), -1), num_front.tolist(), strict=True)
    packed = torch.cat([row[:count] for row, count in rows])
    front[: len(packed)] = packed


def accepted_locations(
    accept_index: torch.Tensor, locations: torch.Tensor, accepted: torch.Tensor, size: int
) -> None:
    packed = locations[accept_index.flatten()[accept_index.flatten() >= 0].long()]
    accepted[: len(packed)] = packed


def move_kv(self: Any, targets: torch.Tensor, sources: torch.Tensor) -> None:
    """Keys and values of accepted tokens to their places; place 0 is padding."""
    buffers = [self.k_buffer, self.v_buffer] if hasattr(self, "k_buffer") else [self.kv_buffer]
    for buffer in buffers:
        for layer in buffer:
            layer[targets] = layer[sources].clone()


def verify_attention(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> torch.Tensor:
    """Attention of drafts `[B T, heads dim]` over cached keys and over their own ancestors."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if k is not None:
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    rows, tokens = batch.batch_size, batch.spec_info.draft_token_num
    keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
    q = q.view(rows, tokens, layer.tp_q_head_num, layer.qk_head_dim)
    chain = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    locations, mask, out, first = batch.out_cache_loc.view(rows, tokens), batch.spec_info.custom_mask, [], 0
    for row, length in enumerate(batch.seq_lens.tolist()):
        past = self.req_to_token_pool.req_to_token[batch.req_pool_indices[row], :length].long()
        places = torch.cat([past, locations[row]])
        if getattr(batch.spec_info, "topk", 0) == 1:
            seen = torch.cat([chain.new_ones(tokens, length), chain], dim=1)
        else:
            seen = mask[first : first + tokens * len(places)].view(tokens, -1)
        first += tokens * len(places)
        heads = layer.tp_q_head_num // keys.shape[1]
        key, value = (x[places].transpose(0, 1).repeat_interleave(heads, 0) for x in (keys, values))
        query = q[row].transpose(0, 1)
        y = F.scaled_dot_product_attention(
            query, key.to(q.dtype), value.to(q.dtype), seen, scale=layer.scaling
        )
        out.append(y.transpose(0, 1))
    return torch.cat(out).reshape(rows * tokens, -1)


def fill_parents(parents: torch.Tensor, children: torch.Tensor, siblings: torch.Tensor) -> None:
    """Parent of each node of draft trees, `[B, T]`, from first child and next sibling; the root's is 0."""
    parents.zero_()
    nodes = torch.arange(parents.shape[1], device=parents.device)
    for node in range(parents.shape[1]):
        parents.copy_(torch.where(nodes == children[:, node, None], node, parents))
        parents.copy_(torch.where(nodes == siblings[:, node, None], parents[:, node, None], parents))


def parents_of(parents: torch.Tensor | None, row: int, tokens: int) -> list[int]:
    """The token before each; -1 for the first."""
    return list(range(-1, tokens - 1)) if parents is None else [-1, *parents[row, 1:].tolist()]


def scatter(
    states: torch.Tensor,
    snapshots: torch.Tensor,
    slots: torch.Tensor,
    steps: torch.Tensor,
    source_rows: torch.Tensor | None = None,
) -> None:
    """Copy what was kept of one step of each row, `[layers, rows, steps, ...]`, to its slot."""
    for row, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist(), strict=True)):
        if slot >= 0 and step >= 0:
            states[:, slot] = snapshots[:, row, step]
