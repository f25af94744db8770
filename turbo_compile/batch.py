"""Read one call's keyword arguments: what is tokens, what is mode, what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from turbo_compile.boundaries.documents import document_layout
from turbo_compile.boundaries.sequence import cut, own_length
from turbo_compile.errors import TurboCompileError, UnsupportedOp
from turbo_compile.ir.program import SequenceSlicing

IGNORE = -100
_TENSORS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "cu_seq_lens_q", "cu_seq_lens_k")
_SWITCHES = (
    "num_items_in_batch",
    "max_length_q",
    "max_length_k",
    "use_cache",
    "return_dict",
    "return_logits",
    "return_logprobs",
    "output_router_logits",
    "output_hidden_states",
    "output_attentions",
    "logits_to_keep",
)
_CACHES = ("past_key_values", "cache")


@dataclass(frozen=True, slots=True)
class Batch:
    """One call, read: the program's batch fields, its sizes and the caller's switches.

    `fields` has ids, positions, layout, valid and, with labels, targets (shifted: the token each position predicts).
    `tokens` counts those with a target, `length` the tokens a row has, `longest` the positions up to the largest one.
    `checksum` is equal for equal fields.
    """

    fields: dict[str, Tensor]
    tokens: int
    length: int
    longest: int
    checksum: int
    num_items: Tensor | float | None
    has_loss: bool
    return_logits: bool
    return_logprobs: bool
    return_dict: bool
    router: bool
    keys: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.fields["ids"].shape
        return rows, length

    def cut(self, contract: SequenceSlicing, rank: int, ranks: int) -> Batch:
        """What rank `rank` of a sequence-parallel group of `ranks` takes of this batch."""
        fields = cut(contract, self.fields, rank, ranks)
        fields["sp_rank"] = torch.tensor(rank, device=fields["ids"].device)
        return replace(self, fields=fields, tokens=_count(fields), length=own_length(self.length, rank, ranks))


def read_batch(arguments: dict[str, Any], config: Any, device: torch.device, vocabulary: int) -> Batch:
    """The batch that `model(**arguments)` means.

    Raises:
        TurboCompileError: a key that has no meaning here, a tensor on the wrong device or of the wrong shape, a label
            outside the vocabulary; the message names the key.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    _check_keys(given)
    _check_switches(given)
    for key in _TENSORS:
        if key in given:
            _check_tensor(key, given[key], device)
    ids = given["input_ids"]
    _check_ids(ids, config, device)
    positions = _positions(given, ids)
    mask = _mask(given, ids)
    boundaries = _boundaries(given, ids)
    fields = {
        "ids": ids.to(torch.long).contiguous(),
        "positions": positions,
        "layout": document_layout(positions, mask, boundaries),
        "valid": torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool(),
    }
    targets = _targets(given, ids)
    if targets is not None:
        fields["targets"] = targets
        if device.type == "cpu":
            _check_labels(targets, vocabulary)
    return Batch(
        fields=fields,
        tokens=_count(fields),
        length=ids.shape[1],
        longest=int(positions.max()) + 1,
        checksum=_checksum(fields),
        num_items=given.get("num_items_in_batch"),
        has_loss=targets is not None,
        return_logits=bool(given.get("return_logits", False)),
        return_logprobs=_wants_logprobs(given, targets),
        return_dict=bool(given.get("return_dict", getattr(config, "return_dict", True))),
        router=_wants_router_loss(given, config),
        keys=tuple(sorted(given)),
    )


def _wants_router_loss(given: Mapping[str, Any], config: Any) -> bool:
    """What the call says, over the configuration; a model without such a loss ignores it, as eager does."""
    own = getattr(config, "output_router_logits", None)
    return own is not None and bool(given.get("output_router_logits", own))


def _count(fields: dict[str, Tensor]) -> int:
    """The tokens that have a target."""
    return int((fields["targets"] != IGNORE).sum()) if "targets" in fields else 0


def _checksum(fields: dict[str, Tensor]) -> int:
    """A number that differs, but for chance, where any field differs in shape or in one place."""
    total = torch.zeros((), dtype=torch.long, device=fields["ids"].device)
    for value in fields.values():
        flat = value.reshape(-1).long()
        place = torch.arange(1, flat.numel() + 1, device=flat.device)
        mixed = (flat + 1) * 0x9E3779B97F4A7C1 ^ place * 0x2545F4914F6CDD1D  # odd: products wrap, and lose nothing
        total = total * 31 + (mixed * mixed + mixed).sum() + value.shape[-1]
    return int(total)


def _check_keys(given: dict[str, Any]) -> None:
    for key in given:
        if key in _CACHES:
            raise UnsupportedOp(f"{key}: a compiled model keeps no cache; decode with one loaded from save_pretrained")
        if key == "inputs_embeds":
            raise UnsupportedOp("inputs_embeds: a compiled model takes input_ids")
        if key not in _TENSORS + _SWITCHES:
            raise TurboCompileError(
                f"a compiled model does not know the argument {key!r}; it takes {', '.join(_TENSORS)}"
            )
    if "input_ids" not in given:
        raise TurboCompileError(f"the compiled model needs input_ids; it was given {', '.join(given) or 'nothing'}")


def _check_switches(given: dict[str, Any]) -> None:
    for key in ("output_hidden_states", "output_attentions"):
        if given.get(key):
            raise UnsupportedOp(f"{key}: a compiled program returns no intermediate values")
    if isinstance(given.get("logits_to_keep", 0), Tensor) or given.get("logits_to_keep", 0) != 0:
        raise UnsupportedOp("logits_to_keep: a compiled program returns all logits; slice them after the call")


def _check_tensor(key: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise TurboCompileError(f"{key} must be a tensor, not {type(value).__name__}")
    other_index = device.index is not None and value.device.index not in (None, device.index)
    if value.device.type != device.type or other_index:
        raise TurboCompileError(
            f"{key} is on {value.device}, the model on {device}; move it: {key}.to({str(device)!r})"
        )


def _rows(key: str, value: Tensor, ids: Tensor) -> Tensor:
    if value.shape != ids.shape:
        raise TurboCompileError(f"{key} has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}; they must agree")
    return value


def _check_ids(ids: Tensor, config: Any, device: torch.device) -> None:
    if ids.is_floating_point():
        raise TurboCompileError(f"input_ids hold {ids.dtype}; token ids are integers")
    rows = int(config.get_text_config().vocab_size)
    if device.type == "cpu" and ids.numel() and (int(ids.max()) >= rows or int(ids.min()) < 0):
        wrong = int(ids.max()) if int(ids.max()) >= rows else int(ids.min())
        raise TurboCompileError(f"input_ids hold {wrong}, outside the vocabulary of {rows}")


def _positions(given: dict[str, Any], ids: Tensor) -> Tensor:
    if ids.dim() != 2 or ids.numel() == 0:
        raise TurboCompileError(f"input_ids must be rows of tokens, (B, S), each at least 1, not {tuple(ids.shape)}")
    if "position_ids" not in given:
        return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
    positions = given["position_ids"]
    if positions.dim() == 2 and positions.shape[0] == 1:
        positions = positions.expand(ids.shape[0], -1)
    return _rows("position_ids", positions, ids).to(torch.long).contiguous()


def _mask(given: dict[str, Any], ids: Tensor) -> Tensor | None:
    """The padding mask; None when it masks nothing, as then it says nothing."""
    if "attention_mask" not in given:
        return None
    mask = given["attention_mask"]
    if mask.dim() != 2:
        raise UnsupportedOp(
            f"attention_mask has shape {tuple(mask.shape)}: a mask that is not causal plus padding plus documents has "
            "no rule; give a 2-D padding mask, or restart position_ids at each document"
        )
    return _rows("attention_mask", mask, ids)


def _boundaries(given: dict[str, Any], ids: Tensor) -> Tensor | None:
    if "cu_seq_lens_q" not in given:
        return None
    boundaries = given["cu_seq_lens_q"]
    other = given.get("cu_seq_lens_k", boundaries)
    if boundaries.shape != other.shape or not torch.equal(boundaries, other):
        raise UnsupportedOp("cu_seq_lens_q and cu_seq_lens_k differ: attention across documents has no rule")
    if boundaries.dim() == 1 and bool((boundaries.diff() < 0).any()):
        raise TurboCompileError(f"cu_seq_lens_q must not decrease, and is {boundaries.tolist()}")
    if boundaries.dim() != 1 or int(boundaries[-1]) != ids.numel() or int(boundaries[0]) != 0:
        raise TurboCompileError(
            f"cu_seq_lens_q must run from 0 to the {ids.numel()} tokens of the batch, not {boundaries.tolist()}"
        )
    return boundaries


def _targets(given: dict[str, Any], ids: Tensor) -> Tensor | None:
    """For each position, the token it predicts, or -100: labels shifted once, before anything is cut."""
    if "shift_labels" in given:
        return _rows("shift_labels", given["shift_labels"], ids).to(torch.long).contiguous()
    if "labels" not in given:
        return None
    labels = _rows("labels", given["labels"], ids)
    if labels.is_floating_point():
        raise TurboCompileError(f"labels hold {labels.dtype}; labels are token ids, or {IGNORE}")
    labels = labels.to(torch.long)
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def _wants_logprobs(given: dict[str, Any], targets: Tensor | None) -> bool:
    if given.get("return_logprobs") and targets is None:
        raise TurboCompileError("return_logprobs: log-probabilities are those of labels; pass labels, or shift_labels")
    return bool(given.get("return_logprobs", False))


def _check_labels(targets: Tensor, vocabulary: int) -> None:
    wrong = (targets != IGNORE) & ((targets < 0) | (targets >= vocabulary))
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise TurboCompileError(
            f"labels hold {int(targets[row, column])} (row {row}, predicted at position {column}), outside the "
            f"vocabulary of {vocabulary}; ignored tokens are marked {IGNORE}"
        )
