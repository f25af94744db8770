"""Compare a compiled model with the plain one: loss, and every gradient, tensor by tensor."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.families import VOCABULARY, ids_of
from turbo_compile import turbo_compile
from turbo_compile.runtime import runtime_of

Batch = dict[str, Any]
_VANISHING, _NOISE = 1e-8, 1e-7  # a reference gradient below the first is noise, and is held to the second


def compiled(model: Any, plan: Any = "auto", backend: str = "eager") -> Any:
    """A compiled copy of `model`, which stays as it is, to compare with."""
    return turbo_compile(copy.deepcopy(model), plan, backend=backend)


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter or gradient, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm().clamp(min=1e-30))


def own_rows(batch: Batch, sp: int = 1) -> Batch:
    """This rank's rows of a global batch: those of its group, where `sp` ranks share a sequence."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {
        key: value.tensor_split(world // sp)[rank // sp] if isinstance(value, Tensor) and value.dim() else value
        for key, value in batch.items()
    }


def run_eager(model: Any, batch: Batch) -> Any:
    return model(**batch, use_cache=False)


def gradient_errors(reference: Any, model: Any) -> dict[str, float]:
    """By parameter, see `gradient_error`."""
    errors = {}
    ours = dict(model.named_parameters())
    assert list(ours) == [fqn for fqn, _ in reference.named_parameters()]
    for fqn, p in reference.named_parameters():
        q = ours[fqn]
        assert (p.grad is None) == (q.grad is None), f"{fqn}: eager has a gradient {p.grad is not None}, ours not so"
        if p.grad is None:
            continue
        assert q.grad.dtype == q.dtype
        if isinstance(q, DTensor):
            assert q.grad.placements == q.placements and q.grad.device_mesh == q.device_mesh
        gradient = whole(q.grad)
        assert not gradient.isnan().any(), f"{fqn}: NaN"
        errors[fqn] = gradient_error(gradient, p.grad)
    return errors


def gradient_error(ours: Tensor, reference: Tensor) -> float:
    """|ours - reference| / |reference|. A vanishing reference is compared absolutely, scaled to match."""
    size, difference = float(reference.norm()), float((ours - reference).norm())
    return difference / size if size > _VANISHING else difference / _NOISE * 1e-5


def eager_step(reference: Any, batch: Batch) -> Any:
    """What the plain model makes of the global batch, its gradients left in place."""
    reference.zero_grad()
    expected = run_eager(reference, batch)
    expected.loss.backward()
    return expected


def eager_documents(reference: Any, batch: Batch) -> float:
    """The loss of a packed batch, read a document at a time (eager mixes them at times), gradients left in place."""
    reference.zero_grad()
    total = int((batch["labels"][:, 1:] != -100).sum())
    loss = 0.0
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        for document in ids.tensor_split((positions == 0).nonzero().flatten()[1:]):
            row = document[None]
            part = run_eager(reference, {"input_ids": row, "labels": row, "num_items_in_batch": total}).loss
            part.backward()
            loss += part.item()
    return loss


def check_step(reference: Any, model: Any, batch: Batch, tolerance: float = 1e-5) -> float:
    """One forward and backward of both on the global `batch`; returns the reference's loss.

    The reference runs on every rank, over all rows; the compiled model gets this rank's.
    """
    expected = eager_step(reference, batch)
    out = _check_ours(reference, expected.loss.item(), model, batch, tolerance)
    if getattr(expected, "aux_loss", None) is not None:
        assert abs(out.aux_loss.item() - expected.aux_loss.item()) < tolerance
    return expected.loss.item()


def check_documents(reference: Any, model: Any, batch: Batch, tolerance: float = 1e-5) -> float:
    """Like `check_step` for a packed batch."""
    loss = eager_documents(reference, batch)
    _check_ours(reference, loss, model, batch, tolerance)
    return loss


def _check_ours(reference: Any, loss: float, model: Any, batch: Batch, tolerance: float) -> Any:
    model.zero_grad()
    out = model(**own_rows(batch, runtime_of(model).axes.sizes["sp"]))
    out.loss.backward()
    assert abs(out.loss.item() - loss) < tolerance * max(1.0, abs(loss)), f"loss {out.loss.item()}, eager {loss}"
    errors = gradient_errors(reference, model)
    wrong = {fqn: error for fqn, error in errors.items() if not error < tolerance}
    assert not wrong, wrong
    return out


# --- global batches of different kinds, four rows each --------------------------------------------------------------


def plain(length: int = 16, vocabulary: int = VOCABULARY) -> Batch:
    ids = ids_of(4, length, vocabulary, seed=length)
    return {"input_ids": ids, "labels": ids.clone()}


def ragged(length: int = 23, vocabulary: int = VOCABULARY) -> Batch:
    """Rows with different numbers of labels: 0, few, all."""
    batch = plain(length, vocabulary)
    for row, first in enumerate((5, length, 1, length - 2)):
        batch["labels"][row, first:] = -100
    return batch


def padded(side: str, length: int = 16, vocabulary: int = VOCABULARY) -> Batch:
    """Rows of different lengths behind a 2-D mask. The first real token is no label: what precedes it is padding."""
    batch = plain(length, vocabulary)
    mask = torch.ones(4, length, dtype=torch.long)
    for row, count in enumerate((0, 3, length - 4, 6)):
        if side == "right":
            mask[row, length - count :] = 0
        else:
            mask[row, :count] = 0
            batch["labels"][row, count] = -100
    batch["labels"][mask == 0] = -100
    return batch | {"attention_mask": mask}


def packed(length: int = 16, vocabulary: int = VOCABULARY) -> Batch:
    """Several documents a row, told by positions that restart."""
    batch = plain(length, vocabulary)
    layouts = ((length,), (5, length - 5), (1, 1, 6, length - 8), (length - 1, 1))
    positions = [torch.cat([torch.arange(n) for n in row]) for row in layouts]
    batch["position_ids"] = torch.stack(positions)
    batch["labels"][batch["position_ids"] == 0] = -100
    return batch
