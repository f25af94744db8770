"""Attention on CUDA: flash for plain rows and packed documents, FlexAttention for everything else.

Flash takes half-precision rows without padding, windows included; sinks follow from its log-sum-exp as on the CPU.
Padding, soft caps, dropout, wide heads and other dtypes go through FlexAttention, whose masks read the layout on the
device; its backward recomputes the forward under autograd. A layout is read to the host once, not once a layer: a read
waits for the device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from turbo_compile.kernels.attention_layout import Options
from turbo_compile.kernels.counter_random import uniform

_flash = torch.ops.aten._flash_attention_forward.default
_flash_backward = torch.ops.aten._flash_attention_backward.default

_FLASH_WIDTH = 256  # the widest head of the flash kernel; it also wants a multiple of 8


@dataclass(frozen=True, slots=True)
class Documents:
    """What the host must know of a layout: whether rows are plain, or packed documents with these bounds."""

    plain: bool
    packed: bool
    offsets: Tensor  # int32 [documents + 1], into the B * S tokens
    longest: int


_last_read: tuple[weakref.ref[Tensor], int, Documents] | None = None


def forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, layout: Tensor, sinks: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As turbo_compile.kernels.attention_cpu.forward."""
    documents = _read_once(layout)
    if not _takes_flash(options, q, v, documents):
        out, lse = flex_forward(options, q, k, v, layout, sinks, seed)
        return out.contiguous(), lse.contiguous()
    B, H, S, _ = q.shape
    offsets = None if documents.plain else documents.offsets
    result = _flash(
        *(_tokens(x, _width(q, v), documents) for x in (q, k, v)),
        *(offsets, offsets, documents.longest, documents.longest, 0.0, options.causal, False),
        scale=options.scale,
        **_window(options),
    )
    out = result[0].view(B, S, H, -1)[..., : v.shape[3]].contiguous()
    lse = result[1] if documents.plain else result[1].view(H, B, S).transpose(0, 1)
    if sinks is None:
        return out, lse.contiguous()
    sink = sinks.to(lse.dtype).unsqueeze(1)
    out.mul_(torch.sigmoid(lse - sink).transpose(1, 2).unsqueeze(-1))
    return out, torch.logaddexp(lse, sink).contiguous()


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
    """As turbo_compile.kernels.attention_cpu.backward."""
    documents = _read_once(layout)
    if not _takes_flash(options, q, v, documents):
        return _flex_backward(options, grad_out, q, k, v, layout, sinks, seed)
    B, H, S, D = q.shape
    grad_sinks = q.new_empty(0)
    if sinks is not None:
        delta = (grad_out.to(lse.dtype) * out).sum(-1).transpose(1, 2)
        grad_sinks = -(torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse) * delta).sum((0, 2)).to(sinks.dtype)
    offsets = None if documents.plain else documents.offsets
    width = _width(q, v)
    grads = _flash_backward(
        _tokens(grad_out.transpose(1, 2), width, documents),
        *(_tokens(x, width, documents) for x in (q, k, v)),
        _tokens(out.transpose(1, 2), width, documents),
        lse if documents.plain else lse.transpose(0, 1).reshape(H, B * S),
        *(offsets, offsets, documents.longest, documents.longest, 0.0, options.causal),
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # the dropout's random state, of which there is none
        torch.empty(0, dtype=torch.uint64, device=q.device),
        scale=options.scale,
        **_window(options),
    )
    grad_q, grad_k, grad_v = (
        grad.view(B, S, -1, width)[..., :n].contiguous().transpose(1, 2)
        for grad, n in zip(grads, (D, D, v.shape[3]), strict=True)
    )
    return grad_q, grad_k, grad_v, grad_sinks


def _read_once(layout: Tensor) -> Documents:
    global _last_read
    if _last_read is None or _last_read[0]() is not layout or _last_read[1] != layout._version:
        _last_read = weakref.ref(layout), layout._version, read_documents(layout)
    return _last_read[2]


def read_documents(layout: Tensor) -> Documents:
    B, S = layout.shape
    position = torch.arange(S, dtype=layout.dtype, device=layout.device)
    is_first = layout == position
    packed = layout == torch.where(is_first, position, 0).cummax(1).values
    starts = is_first.flatten().nonzero().flatten()
    offsets = torch.cat([starts, starts.new_tensor([B * S])])
    longest, is_packed, is_plain = torch.stack([offsets.diff().amax(), packed.all(), (layout == 0).all()]).tolist()
    return Documents(bool(is_plain), bool(is_packed), offsets.to(torch.int32), longest)


def _takes_flash(options: Options, q: Tensor, v: Tensor, documents: Documents) -> bool:
    simple = documents.packed and options.softcap is None and options.dropout == 0.0
    return simple and q.dtype in (torch.float16, torch.bfloat16) and _width(q, v) <= _FLASH_WIDTH


def _width(q: Tensor, v: Tensor) -> int:
    return -(-max(q.shape[3], v.shape[3]) // 8) * 8


def _tokens(x: Tensor, width: int, documents: Documents) -> Tensor:
    """[B,heads,S,D] -> [B,S,heads,width] for plain rows, else [B*S,heads,width]; narrow heads padded with zeros."""
    x = x.transpose(1, 2)
    if x.shape[3] < width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[3]))
    x = x if x.stride(3) == 1 else x.contiguous()
    return x if documents.plain else x.flatten(0, 1)


def _window(options: Options) -> dict[str, int]:
    """The kernel counts the keys beside the query, -1 for all of them."""
    beside = -1 if options.window is None else options.window - 1
    return {"window_size_left": beside, "window_size_right": 0 if options.causal else beside}


def flex_forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, layout: Tensor, sinks: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out [B,S,H,V] and lse [B,H,S] by FlexAttention, differentiable."""
    # As tensors: a second value of a float argument would become a symbol, which FlexAttention's closures cannot hold.
    scale, softcap, p = (
        None if number is None else torch.full((), number, device=q.device)
        for number in (options.scale, options.softcap, options.dropout or None)
    )
    return _flex_compiled()(q, k, v, layout, sinks, seed, options.causal, options.window, scale, softcap, p)


@functools.cache
def _flex_compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(flex)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    window: int | None,
    scale: Tensor,
    softcap: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What `flex_forward` compiles: attention with `scale`, `softcap` and the dropout `p` as 0-d tensors."""
    B, H, S, _ = q.shape
    start = torch.where(layout < 0, -1 - layout, layout)

    def sees(b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
        seen = layout[b, t] >= 0
        seen = seen & ((t <= s) & (t >= start[b, s]) if causal else start[b, t] == start[b, s])
        return seen if window is None else seen & ((s - t).abs() < window)

    def capped(score: Tensor, b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
        score = score * scale
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    def kept(score: Tensor, b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
        assert seed is not None and p is not None
        score = capped(score, b, h, s, t)
        counter = ((b.long() * H + h) * S + s) * S + t
        return torch.where(uniform(seed, counter) >= p, score, float("-inf"))

    mask = create_block_mask(sees, B, None, S, S, device=q.device)
    attend = functools.partial(
        flex_attention, q, k, v, block_mask=mask, scale=1.0, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    out, aux = attend(score_mod=capped)
    lse = aux.lse
    if p is not None:
        # Dropped probabilities keep the full row's normaliser: rescale a softmax over the kept keys alone.
        out, kept_aux = attend(score_mod=kept)
        finite = lse.masked_fill(lse == float("-inf"), 0.0)
        out = out * (torch.exp(kept_aux.lse - finite) / (1.0 - p)).unsqueeze(-1).to(out.dtype)
    if sinks is not None:
        sink = sinks.to(lse.dtype).unsqueeze(1)
        out = out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return out.transpose(1, 2), lse


def _flex_backward(
    options: Options,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    with torch.enable_grad():
        out, _ = flex_forward(options, q, k, v, layout, sinks, seed)
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    grad_q, grad_k, grad_v, *grad_sinks = torch.autograd.grad(out, leaves, grad_out)
    grad_q, grad_k, grad_v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v, grad_sinks[0] if grad_sinks else q.new_empty(0)
