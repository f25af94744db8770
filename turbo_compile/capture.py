"""Capture an unmodified Hugging Face model as a program of shared segments.

Dynamo traces the model once, on fake tensors, with every block a nested region and every boundary (attention, experts,
router statistics, loss) an op of ours, put in place through transformers' own interfaces and taken out again after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from transformers import PreTrainedModel

from turbo_compile import _torch
from turbo_compile.assemble import Assembly
from turbo_compile.errors import CaptureError, TurboCompileError
from turbo_compile.huggingface import Inputs, boundaries_installed, fake_weights, refuse_recurrences
from turbo_compile.ir.program import Program

_BATCH, _SEQUENCE = 2, 17 * 11  # of the synthetic batch: a length unlike any size of a model


@dataclass(frozen=True, slots=True)
class Signature:
    """Which program a call needs: what it returns, how the model stands, and which parameters are trained.

    `shape` is (B, S) when shapes are static, else None. `router` asks for the load-balancing loss, `logprobs` for the
    targets' log-probabilities and the entropies.
    """

    loss: bool
    logits: bool
    training: bool
    differentiable: bool
    router: bool = False
    logprobs: bool = False
    trainable: frozenset[str] = frozenset()
    shape: tuple[int, int] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        named = (
            ("loss", self.loss),
            ("aux_loss", self.loss and self.router),
            ("logits", self.logits),
            ("logprobs", self.logprobs),
            ("entropy", self.logprobs),
        )
        return tuple(name for name, wanted in named if wanted)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The outputs that gradients flow from: the loss and log-probabilities, or the logits when there is none."""
        if not self.differentiable:
            return ()
        if self.logprobs:
            return "loss", "logprobs", "entropy"
        return ("loss",) if self.loss else ("logits",)


def capture(
    model: PreTrainedModel, signature: Signature, dtypes: dict[str, torch.dtype], device: torch.device
) -> Program:
    """The forward program of `model` for `signature`, its parameters in `dtypes` (by FQN).

    Raises:
        CaptureError: the model cannot be traced as one graph; the message names the line of the model.
        UnsupportedOp: a boundary is used in a way that has no rule.
    """
    refuse_recurrences(model)
    modes = {module: module.training for module in model.modules()}
    if model.training != signature.training:
        model.train(signature.training)
    try:
        with boundaries_installed(model, signature.router) as inputs, fake_weights(model, dtypes, device):
            captured = _trace(model, signature, inputs, device)
    finally:
        for module, training in modes.items():
            module.training = training
    return Assembly(model, signature.trainable, signature.outputs, captured).program()


def _trace(model: PreTrainedModel, signature: Signature, inputs: Inputs, device: torch.device) -> fx.GraphModule:
    rows, length = signature.shape or (_BATCH, _SEQUENCE)
    tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
    batch = {
        "ids": tokens,
        "positions": tokens.clone(),
        "layout": tokens.to(torch.int32),
        "valid": tokens.bool(),
        "targets": tokens.clone(),
        "denominator": torch.ones((), dtype=torch.float32, device=device),
        "seed": torch.zeros((), dtype=torch.long, device=device),
        "longest": torch.zeros((), dtype=torch.long, device=device),
    }
    if signature.shape is None:
        for tensor in batch.values():
            _torch.mark_dynamic(tensor)
    inputs.token_logprobs = signature.logprobs
    forward = type(model).forward  # a compiled model's own forward is the runtime
    keywords: dict[str, Any] = {"use_cache": False}
    if signature.router or getattr(model.config, "output_router_logits", False):
        keywords["output_router_logits"] = signature.router  # what the call says, over the configuration

    def entry(
        ids: Tensor,
        positions: Tensor,
        layout: Tensor,
        valid: Tensor,
        targets: Tensor,
        denominator: Tensor,
        seed: Tensor,
        longest: Tensor,
    ) -> tuple[Tensor, ...]:
        read = (positions, layout, valid, targets) if signature.loss else (positions, layout, valid)
        for other in read:  # a call without labels has no targets: no size may come from them
            torch._check(other.shape[0] == ids.shape[0])
            torch._check(other.shape[1] == ids.shape[1])
        inputs.layout, inputs.valid, inputs.seed = layout, valid, seed
        inputs.targets, inputs.denominator, inputs.longest = targets, denominator, longest
        if signature.loss:
            out = forward(
                model,
                input_ids=ids,
                position_ids=positions,
                labels=targets,
                shift_labels=targets,
                num_items_in_batch=denominator,
                **keywords,
            )
        else:
            out = forward(model, input_ids=ids, position_ids=positions, **keywords)
        token: dict[str, Any] = {"logprobs": inputs.logprobs, "entropy": inputs.entropy}
        return tuple(token[name] if name in token else out[name] for name in signature.outputs)

    try:
        return _torch.capture_graph(entry, tuple(batch.values()))
    except TurboCompileError:
        raise
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error


def _explain(model: PreTrainedModel, error: Exception) -> str:
    """What stopped Dynamo, and at which line of the model."""
    text = str(error)
    reason = text.split("\n")[0].strip() or type(error).__name__
    hint = re.search(r"(?:UnsupportedOp|TurboCompileError)[^\n]*", text)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*([^\n]+)', text)
    own = [frame for frame in frames if "turbo_compile" not in frame[0] and "/torch/" not in frame[0]]
    where = "; at {}:{} in {}: {}".format(*own[-1]) if own else ""
    return f"{type(model).__name__} cannot be captured as one graph: {hint.group(0) if hint else reason}{where}"
