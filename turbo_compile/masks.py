"""Attention masks in a captured graph: read the tag a mask carries, hand it to attention, refuse other uses."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from turbo_compile.boundaries.attention import attention
from turbo_compile.boundaries.documents import mask_layout_op
from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.graphs import placeholders
from turbo_compile.ir.segments import clone_module

_MAY_READ_A_MASK = (attention, torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int)


def is_mask(node: fx.Node) -> bool:
    return node.target is mask_layout_op


def with_masks(model: str, module: fx.GraphModule, actual: list[Any]) -> fx.GraphModule:
    """A block's graph whose attentions have the window their mask asked for.

    `actual` are the values the block is called with. Two calls of one graph with masks of different windows become two
    segments.

    Raises:
        UnsupportedOp: attention was told another window than its mask has, or the mask is used for something else.
    """
    module = clone_module(module)
    tags: dict[Any, tuple[Any, ...]] = {
        placeholder: value.args[1:]
        for placeholder, value in zip(placeholders(module.graph), actual, strict=True)
        if isinstance(value, fx.Node) and is_mask(value)
    }
    for node in module.graph.nodes:
        if node.target is attention:
            _apply(model, node, tags)
    for placeholder in tags:
        strangers = [user for user in placeholder.users if user.target not in _MAY_READ_A_MASK]
        if strangers:
            raise UnsupportedOp(
                f"{model} uses its attention mask outside attention ({strangers[0].format_node()}); "
                "only masks handed to an attention interface are known"
            )
    return module


def _apply(model: str, node: fx.Node, tags: dict[Any, tuple[Any, ...]]) -> None:
    names = [argument.name for argument in attention._schema.arguments]
    arguments = dict(zip(names, node.args, strict=True))
    layout = arguments["layout"]
    if layout not in tags:
        raise UnsupportedOp(
            f"an attention of {model} gets its mask as {layout}, which transformers.masking_utils did not make; "
            "a mask that is not causal plus padding plus documents has no rule"
        )
    causal, window = tags[layout]
    told = arguments["window"]
    if told is not None and window is not None and told != window:
        raise UnsupportedOp(f"an attention of {model} has window {told}, but its mask has window {window}")
    arguments.update(causal=causal, window=window)
    node.args = tuple(arguments[name] for name in names)
