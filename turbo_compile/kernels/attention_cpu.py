"""Attention on the CPU without an S x S tensor: one call of torch's flash kernel for each document or query block.

The flash kernel knows neither soft caps nor dropout: those use plain matmuls, by query block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turbo_compile.kernels.attention_layout import QUERY_BLOCK, Options, Piece, is_plain, pieces
from turbo_compile.kernels.counter_random import uniform

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_ROW_CALL = 256  # tokens of a row from which a flash call is long beside the Python that makes it
_DENSE_SCORES = 2**18  # elements of a score block without flash: small enough for the cache


def forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, layout: Tensor, sinks: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [B,H,S,D], k [B,G,S,D], v [B,G,S,V] -> out [B,S,H,V] contiguous, lse [B,H,S] contiguous (sinks included)."""
    compute = _flash_forward if _takes_flash(options) else _dense_forward
    out, lse = compute(options, q, k, v, layout, seed)
    if sinks is None:
        return out, lse
    sink = sinks.to(lse.dtype).unsqueeze(1)
    out.mul_(torch.sigmoid(lse - sink).transpose(1, 2).unsqueeze(-1))
    return out, torch.logaddexp(lse, sink)


def backward(
    options: Options,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, each [B,heads,S,width] stored as [B,S,heads,width], and of the sinks (empty without)."""
    grad_sinks = q.new_empty(0)
    if sinks is not None:
        delta = (grad_out.to(lse.dtype) * out).sum(-1).transpose(1, 2)
        grad_sinks = -(torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse) * delta).sum((0, 2)).to(sinks.dtype)
    # With the sinks inside `lse` and `out`, p = exp(logit - lse) and sum(p * dp) = sum(out * dout) hold as without.
    compute = _flash_gradients if _takes_flash(options) else _dense_gradients
    grad_q, grad_k, grad_v = compute(options, grad_out, q, k, v, out, lse, layout, seed)
    return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2), grad_sinks


def _takes_flash(options: Options) -> bool:
    return options.softcap is None and options.dropout == 0.0


# One flash call a piece. The kernel wants as many heads of k and v as of q, and reads any strides: grouped heads are
# views of one row, with the groups as the batch (query head g * R + r uses key head g).


def _flash_forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, layout: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, H, S, D = q.shape
    G, V = v.shape[1], v.shape[3]
    q, k, v = (_for_flash(x, max(D, V)) for x in (q, k, v))
    if _is_whole(options, layout):
        out, lse = _whole_forward(options, q, k, v)
        return out[..., :V].contiguous(), lse
    out = q.new_zeros(B, S, H, V)
    lse = q.new_full((B, H, S), float("-inf"), dtype=accumulate_dtype(q.dtype))
    q_rows, k_rows, v_rows, out_rows = (_rows(x, G, H // G) for x in (q, k, v, out.transpose(1, 2)))
    lse_rows = lse.view(B, G, -1, S).unbind()
    for piece in pieces(options, layout, q.dtype):
        for row in range(piece.rows.start, piece.rows.stop):
            piece_out, piece_lse = _flash(
                _part(q_rows[row], piece.queries),
                _part(k_rows[row], piece.keys),
                _part(v_rows[row], piece.keys),
                0.0,
                piece.causal,
                attn_mask=piece.bias,
                scale=options.scale,
            )
            if piece.bias is not None and not piece.causal:
                # The kernel gives a query without keys 0 for its lse, which is a true value of others.
                piece_lse = piece_lse + piece.bias.amax(-1)
            _part(out_rows[row], piece.queries).copy_(piece_out[..., :V])
            _part(lse_rows[row], piece.queries).copy_(piece_lse)
    return out, lse


def _flash_gradients(
    options: Options,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Tensor,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, S, D = q.shape
    G, V = v.shape[1], v.shape[3]
    operands = (grad_out.transpose(1, 2), q, k, v, out.transpose(1, 2))
    grad_out, q, k, v, out = (_for_flash(x, max(D, V)) for x in operands)
    if _is_whole(options, layout):
        grad_q, grad_k, grad_v = _whole_gradients(options, grad_out, q, k, v, out, lse)
        return grad_q[..., :D].contiguous(), grad_k[..., :D].contiguous(), grad_v[..., :V].contiguous()
    dtype = lse.dtype  # pieces that share keys add up here, not in half precision
    grad_q = q.new_zeros(B, S, H, D)
    grad_k, grad_v = k.new_zeros(B, S, G, D, dtype=dtype), v.new_zeros(B, S, G, V, dtype=dtype)
    grad_out_rows, q_rows, k_rows, v_rows, out_rows = (_rows(x, G, H // G) for x in (grad_out, q, k, v, out))
    # A query without keys has lse = -inf; all its logits are -inf, so any number serves.
    lse_rows = lse.masked_fill(lse == float("-inf"), 0.0).view(B, G, -1, S).unbind()
    grad_q_rows = _rows(grad_q.transpose(1, 2), G, H // G)
    grad_k_rows, grad_v_rows = grad_k.transpose(1, 2).unbind(), grad_v.transpose(1, 2).unbind()
    for piece in pieces(options, layout, q.dtype):
        for row in range(piece.rows.start, piece.rows.stop):
            piece_q, piece_k, piece_v = _flash_backward(
                _part(grad_out_rows[row], piece.queries),
                _part(q_rows[row], piece.queries),
                _part(k_rows[row], piece.keys),
                _part(v_rows[row], piece.keys),
                _part(out_rows[row], piece.queries),
                _part(lse_rows[row], piece.queries),
                0.0,
                piece.causal,
                attn_mask=piece.bias,
                scale=options.scale,
            )
            _part(grad_q_rows[row], piece.queries).copy_(piece_q[..., :D])
            grad_k_rows[row][:, piece.keys].add_(piece_k[..., :D].sum(1, dtype=dtype))
            grad_v_rows[row][:, piece.keys].add_(piece_v[..., :V].sum(1, dtype=dtype))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _is_whole(options: Options, layout: Tensor) -> bool:
    return (options.window is None or options.window >= layout.shape[1]) and is_plain(layout)


def _whole_forward(options: Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [B,S,H,width] and lse [B,H,S] of plain rows, in one call or one a row."""
    (B, H, S, width), G = q.shape, k.shape[1]
    if H == G or _copies_heads(B, S):
        out, lse = _flash(q, _copied(k, H), _copied(v, H), 0.0, options.causal, scale=options.scale)
        return out.transpose(1, 2), lse.contiguous()
    rows = zip(*(_rows(x, G, H // G) for x in (q, k, v)), strict=True)
    results = [_flash(*row, 0.0, options.causal, scale=options.scale) for row in rows]
    out = _stacked([out.permute(2, 0, 1, 3) for out, _ in results])
    return out.reshape(B, S, H, width), _stacked([lse for _, lse in results]).reshape(B, H, S)


def _whole_gradients(
    options: Options, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> list[Tensor]:
    """Gradients of q [B,S,H,width], k and v [B,S,G,width] of plain rows."""
    (B, H, S, width), G = q.shape, k.shape[1]
    causal, scale = options.causal, options.scale
    if H == G or _copies_heads(B, S):
        grads = _flash_backward(grad_out, q, _copied(k, H), _copied(v, H), out, lse, 0.0, causal, scale=scale)
        grad_q, *grads_kv = (grad.transpose(1, 2) for grad in grads)
        return [grad_q, *(x if H == G else x.view(B, S, G, -1, width).sum(3) for x in grads_kv)]
    operands = [_rows(x, G, H // G) for x in (grad_out, q, k, v, out)]
    rows = zip(*operands, lse.view(B, G, -1, S).unbind(), strict=True)
    results = [_flash_backward(*row, 0.0, causal, scale=scale) for row in rows]
    grad_q = _stacked([grad_q.permute(2, 0, 1, 3) for grad_q, _, _ in results]).reshape(B, S, H, width)
    return [grad_q, *(_stacked([row[i].sum(1) for row in results]).transpose(1, 2) for i in (1, 2))]


def _copies_heads(B: int, S: int) -> bool:
    """Whether grouped heads are copied for one call: for many short rows the calls cost more than the copies."""
    return B > 1 and S < _ROW_CALL


def _copied(x: Tensor, H: int) -> Tensor:
    """[B,G,S,width] -> [B,H,S,width]."""
    B, G, S, width = x.shape
    return x if G == H else x.unsqueeze(2).expand(B, G, H // G, S, width).reshape(B, H, S, width)


def _for_flash(x: Tensor, width: int) -> Tensor:
    """x as the kernel reads it: rows dense, and all of one width (zeros add nothing to a product)."""
    if x.shape[3] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()


def _rows(x: Tensor, G: int, R: int) -> Sequence[Tensor]:
    """Views [G,R,S,width] of each row of x [B,G*R,S,width], or of x [B,G,S,width], whose heads are then shared."""
    B, heads, S, width = x.shape
    grouped = x.view(B, G, R, S, width) if heads == G * R else x.unsqueeze(2).expand(B, G, R, S, width)
    return grouped.unbind()


def _part(x: Tensor, tokens: slice) -> Tensor:
    return x.narrow(2, tokens.start, tokens.stop - tokens.start)


def _stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)


# Soft caps and dropout: plain matmuls, by row and query block


@dataclass(frozen=True, slots=True)
class _Block:
    """The scores [G, R * queries, keys] of one row of a piece, and what they were made of (in the accumulate dtype)."""

    q: Tensor  # G, R * queries, D
    k: Tensor  # G, keys, D
    v: Tensor  # G, keys, V
    logits: Tensor  # after the soft cap and the mask
    slope: Tensor | None  # d logits / d (scaled scores), None for 1
    keep: Tensor | None  # 0 or 1/(1-p), as `logits`


def _dense_forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, layout: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, H, S, _ = q.shape
    dtype = accumulate_dtype(q.dtype)
    out = q.new_zeros(B, S, H, v.shape[3])
    lse = q.new_full((B, H, S), float("-inf"), dtype=dtype)
    for row, piece in _dense_pieces(options, layout, H, dtype):
        block = _block(options, q[row], k[row], v[row], row, piece, seed, dtype)
        block_lse = torch.logsumexp(block.logits, -1)
        p = _probabilities(block.logits, block_lse)
        block_out = _dropped(p, block.keep) @ block.v
        out[row, piece.queries] = block_out.view(H, -1, v.shape[3]).transpose(0, 1)
        lse[row, :, piece.queries] = block_lse.view(H, -1)
    return out, lse


def _dense_gradients(
    options: Options,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Tensor,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, S, D = q.shape
    G, V = v.shape[1], v.shape[3]
    dtype = accumulate_dtype(q.dtype)
    grad_q = q.new_zeros(B, S, H, D)
    grad_k, grad_v = (x.new_zeros(B, S, G, x.shape[3], dtype=dtype) for x in (k, v))
    for row, piece in _dense_pieces(options, layout, H, dtype):
        block = _block(options, q[row], k[row], v[row], row, piece, seed, dtype)
        grad_block, out_block = (
            x[row, piece.queries].to(dtype).transpose(0, 1).reshape(G, -1, V) for x in (grad_out, out)
        )
        p = _probabilities(block.logits, lse[row, :, piece.queries].reshape(G, -1))
        grad_v[row, piece.keys] += (_dropped(p, block.keep).mT @ grad_block).transpose(0, 1)
        grad_p = _dropped(grad_block @ block.v.mT, block.keep)
        grad_scores = p * (grad_p - (grad_block * out_block).sum(-1, keepdim=True)) * options.scale
        if block.slope is not None:
            grad_scores *= block.slope
        grad_q[row, piece.queries] = (grad_scores @ block.k).view(H, -1, D).transpose(0, 1)
        grad_k[row, piece.keys] += (grad_scores.mT @ block.q).transpose(0, 1)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _dense_pieces(options: Options, layout: Tensor, H: int, dtype: torch.dtype) -> Iterator[tuple[int, Piece]]:
    block = min(QUERY_BLOCK, max(16, _DENSE_SCORES // (H * layout.shape[1])))
    for piece in pieces(options, layout, dtype, block):
        for row in range(piece.rows.start, piece.rows.stop):
            yield row, piece


def _block(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: int,
    piece: Piece,
    seed: Tensor | None,
    dtype: torch.dtype,
) -> _Block:
    """q [H,S,D], k [G,S,D] and v [G,S,V] of one row."""
    (H, S, D), G = q.shape, k.shape[0]
    q = q[:, piece.queries].to(dtype).reshape(G, -1, D)
    k, v = k[:, piece.keys].to(dtype), v[:, piece.keys].to(dtype)
    logits, slope, keep = q @ k.mT * options.scale, None, None
    if options.softcap is not None:
        bounded = torch.tanh(logits / options.softcap)
        logits, slope = bounded * options.softcap, 1 - bounded * bounded
    if piece.bias is not None:
        by_head = logits.view(H, -1, logits.shape[-1])
        by_head += piece.bias
    if options.dropout > 0.0 and seed is not None:
        keep = keep_mask(seed, options.dropout, row, H, S, piece.queries, piece.keys).view(logits.shape)
        keep = keep.to(dtype) / (1.0 - options.dropout)
    return _Block(q, k, v, logits, slope, keep)


def keep_mask(seed: Tensor, p: float, row: int, H: int, S: int, queries: slice, keys: slice) -> Tensor:
    """[H, queries, keys]: which probabilities dropout keeps; each has its place in [B,H,S,S] as its counter."""
    head = torch.arange(row * H, (row + 1) * H).view(H, 1, 1)
    query = torch.arange(queries.start, queries.stop).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop)
    return uniform(seed, (head * S + query) * S + key) >= p


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))


def _dropped(p: Tensor, keep: Tensor | None) -> Tensor:
    return p if keep is None else p * keep


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
