"""Random ops in a captured segment: each draws from a seed of its own, so that recompute draws the same again."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from turbo_compile.boundaries.attention import attention
from turbo_compile.errors import UnsupportedOp
from turbo_compile.ir.graphs import argument
from turbo_compile.kernels import counter_random

_DROPOUT = (torch.nn.functional.dropout, torch.dropout)
_UNKNOWN = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu"),
    *("bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers that can be numbered: dropout in training, or attention with dropout."""
    if node.target in _DROPOUT:
        _, p, training = _bound(node)
        return training and p > 0
    return node.target is attention and bool(argument(node, -1) > 0)


def refuse_unknown_randomness(model: str, graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and name in _UNKNOWN:
            raise UnsupportedOp(f"{model} draws random numbers with {name}; only dropout is known")


def number_sites(graph: fx.Graph, seed: fx.Node) -> None:
    """Give every random op of a segment its own numbers under `seed`, in order of appearance."""
    for site, node in enumerate([node for node in graph.nodes if draws(node)]):
        with graph.inserting_before(node):
            if node.target is attention:
                _fork_attention(graph, node, seed, site)
            else:
                _replace_dropout(graph, node, seed, site)


def _replace_dropout(graph: fx.Graph, node: fx.Node, seed: fx.Node, site: int) -> None:
    value, p, _ = _bound(node)
    new = graph.call_function(counter_random.dropout, (value, p, seed, site))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _fork_attention(graph: fx.Graph, node: fx.Node, seed: fx.Node, site: int) -> None:
    forked = graph.call_function(counter_random.fork, (seed, site))
    forked.meta["val"] = seed.meta["val"]
    place = [each.name for each in attention._schema.arguments].index("seed")
    node.args = (*node.args[:place], forked, *node.args[place + 1 :])


def _bound(node: fx.Node) -> tuple[Any, float, bool]:
    """Input, probability and mode of a dropout call, however its arguments were passed."""
    bound: dict[str, Any] = {"p": 0.5, "training": True}
    bound.update(zip(("input", "p", "training"), node.args, strict=False))
    bound.update(node.kwargs)
    return bound["input"], float(bound["p"]), bool(bound.get("train", bound["training"]))
