"""Exact causal attention in plain torch: the reference on any device, and the implementation on CPU.

Query blocks bound the memory: never more than [B, H, block, S] scores at a time, and keys that no query of the block
can see are left out. Probabilities are recomputed in backward from the saved logsumexp. Everything is float32
(float64 for float64). Keys and values are not repeated for grouped queries: a key head's query heads are stacked into
rows of one product.

Legend: B sequences, S sequence length, H query heads, Hkv key/value heads, G = H / Hkv, Dh head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype

MAX_SCORES = 2**22  # elements of one block's scores
MAX_BLOCK = 64  # query rows


@dataclass(frozen=True, slots=True)
class Block:
    """Queries start … end, the keys first … end they may see, and 0 where they may, -inf where not, as a bias
    [B or 1, 1, rows, keys]."""

    start: int
    end: int
    first: int
    bias: Tensor

    @property
    def rows(self) -> int:
        return self.end - self.start


def query_blocks(q: Tensor, document_ids: Tensor | None, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
    """Blocks of queries in order, with their mask: causal, same document, within `window` keys counting itself."""
    sequences, seq_len, heads, _ = q.shape
    rows = max(1, min(MAX_BLOCK, MAX_SCORES // max(1, sequences * heads * seq_len)))
    position = torch.arange(seq_len, device=q.device)
    for start in range(0, seq_len, rows):
        end = min(start + rows, seq_len)
        first = 0 if window is None else max(0, start - window + 1)
        distance = position[start:end, None] - position[None, first:end]
        hidden = distance < 0
        if window is not None:
            hidden = hidden | (distance >= window)
        hidden = hidden[None]
        if document_ids is not None:
            query, key = document_ids[:, start:end, None], document_ids[:, None, first:end]
            hidden = hidden | (query != key) | (query < 0)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        yield Block(start, end, first, bias[:, None])


def _heads_first(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B, S, Hkv·G, Dh] → contiguous [B·Hkv, G, S, Dh]; for keys and values G is 1."""
    sequences, seq_len, heads, width = x.shape
    x = x.reshape(sequences, seq_len, heads // groups, groups, width).permute(0, 2, 3, 1, 4).to(dtype)
    return x.reshape(sequences * (heads // groups), groups, seq_len, width)


def _rows(x: Tensor, block: Block) -> Tensor:
    """The block's query rows of [B·Hkv, G, S, …], a key head's G query heads stacked: [B·Hkv, G·rows, …]."""
    return x[:, :, block.start : block.end].reshape(x.shape[0], x.shape[1] * block.rows, *x.shape[3:])


def _scores(query: Tensor, key: Tensor, block: Block, scale: float, sequences: int, heads: int) -> Tensor:
    """Scaled scores [B·Hkv, G·rows, keys] of a block, -inf where hidden."""
    rows, keys = _rows(query, block), key[:, 0, block.first : block.end]
    scores = rows.new_empty(rows.shape[0], rows.shape[1], keys.shape[1])
    torch.baddbmm(scores, rows, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
    scores.view(sequences, heads, *block.bias.shape[2:]).add_(block.bias)
    return scores


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, Dh] in q's dtype, lse [B, H, S]); a query that sees no key gets zeros, and a logsumexp of 0."""
    sequences, seq_len, heads, width = q.shape
    kv_heads = k.shape[2]
    groups = heads // kv_heads
    wide = accumulate_dtype(q.dtype)
    query, key, value = _heads_first(q, groups, wide), _heads_first(k, 1, wide), _heads_first(v, 1, wide)
    out = q.new_empty(sequences, seq_len, kv_heads, groups, width)
    lse = q.new_empty(sequences, kv_heads, groups, seq_len, dtype=wide)
    for block in query_blocks(q, document_ids, window, wide):
        p = _scores(query, key, block, scale, sequences, heads)
        largest = p.amax(-1, keepdim=True)
        if document_ids is not None:
            largest = largest.masked_fill(largest == float("-inf"), 0.0)
        p.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
        if document_ids is not None:
            total = total.masked_fill(total == 0.0, 1.0)
        rows = slice(block.start, block.end)
        part = torch.bmm(p, value[:, 0, block.first : block.end]).div_(total)
        shape = (sequences, kv_heads, groups, block.rows)
        out[:, rows] = part.view(*shape, width).permute(0, 3, 1, 2, 4)
        lse[..., rows] = total.log_().add_(largest).view(shape)
    return out.view(q.shape), lse.view(sequences, heads, seq_len)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_ids: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes and dtype of q, k, v.

    With p = exp(scores - lse) and delta = Σ_Dh grad·out: ds = p · (grad·vᵀ - delta) · scale.
    """
    sequences, seq_len, heads, width = q.shape
    kv_heads = k.shape[2]
    groups = heads // kv_heads
    wide = accumulate_dtype(q.dtype)
    query, key, value = _heads_first(q, groups, wide), _heads_first(k, 1, wide), _heads_first(v, 1, wide)
    grad_out = _heads_first(grad, groups, wide)
    delta = (grad_out * _heads_first(out, groups, wide)).sum(-1)
    lse = lse.reshape(sequences * kv_heads, groups, seq_len)
    dq = q.new_empty(sequences, seq_len, kv_heads, groups, width)
    dk, dv = torch.zeros_like(key[:, 0]), torch.zeros_like(value[:, 0])
    for block in query_blocks(q, document_ids, window, wide):
        keys = slice(block.first, block.end)
        g, rows = _rows(grad_out, block), _rows(query, block)
        p = _scores(query, key, block, scale, sequences, heads).sub_(_rows(lse, block)[..., None]).exp_()
        dv[:, keys].baddbmm_(p.transpose(1, 2), g)
        ds = torch.bmm(g, value[:, 0, keys].transpose(1, 2)).sub_(_rows(delta, block)[..., None])
        ds.mul_(p).mul_(scale)
        dk[:, keys].baddbmm_(ds.transpose(1, 2), rows)
        part = torch.bmm(ds, key[:, 0, keys])
        dq[:, block.start : block.end] = part.view(sequences, kv_heads, groups, block.rows, width).permute(
            0, 3, 1, 2, 4
        )

    def as_given(x: Tensor, like: Tensor) -> Tensor:
        moved = x.view(sequences, kv_heads, seq_len, x.shape[-1]).transpose(1, 2)
        return moved.to(like.dtype, memory_format=torch.contiguous_format, copy=True)

    return dq.view(q.shape), as_given(dk, k), as_given(dv, v)
