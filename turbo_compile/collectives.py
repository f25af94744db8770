"""Collectives as the outer graph names them: a start and a wait, over a mesh axis.

The functions here stand in a graph; they never run. Lowering replaces each by the real exchange on its axis' process
group, so that a program's text is the same on every rank. Backwards are declared once: see `passes_gradient` and
`exchange_back`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.fx as fx

from turbo_compile.ir.graphs import argument


def all_gather(group: Any, axis: str) -> NoReturn:
    """Start gathering every parameter of a group from its shards over `axis`, in the dtype compute wants."""
    raise _not_lowered("all_gather")


def reduce_scatter(gradients: Any, axis: str) -> NoReturn:
    """Start summing a group's gradients over `axis`, in the reduce dtype, each rank keeping its shard."""
    raise _not_lowered("reduce_scatter")


def all_reduce(value: Any, axis: str) -> NoReturn:
    """Start summing a value over `axis`."""
    raise _not_lowered("all_reduce")


def all_to_all(values: tuple[Any, ...], axis: str, to: str) -> NoReturn:
    """Start exchanging values [B, S, H, D] over `axis`, all in one message; the wait gives as many.

    `to="heads"`: from a chunk of the tokens of all heads to all tokens of a chunk of the heads. `to="sequence"`: back.
    """
    raise _not_lowered("all_to_all")


def all_to_all_counts(values: tuple[Any], axis: str) -> NoReturn:
    """Start telling each rank of `axis` how many rows come for its experts, from where each expert's rows end [E].

    The wait gives the route that rows then take, and where the rows of this rank's experts end. Its sizes are read by
    the host: the one read of a layer and step.
    """
    raise _not_lowered("all_to_all_counts")


def all_to_all_rows(values: tuple[Any, Any], axis: str, to: str) -> NoReturn:
    """Start exchanging rows [N, H] along a route: (rows, route).

    `to="experts"`: rows sorted by expert go to the ranks that hold them, and lie there sorted by expert.
    `to="tokens"`: back to where they came from, in the order they had.
    """
    raise _not_lowered("all_to_all_rows")


def wait(started: Any) -> NoReturn:
    """The result of a started collective."""
    raise _not_lowered("wait")


def add_gradients(
    a: tuple[Any, ...], b: tuple[Any, ...], places: tuple[tuple[int | None, int | None], ...] | None = None
) -> tuple[Any, ...]:
    """The sum of two uses of a group, gradient by gradient.

    `places` says, where the uses train different parameters of the group, which gradient of each makes the sum.
    """
    if places is None:
        return tuple(x + y for x, y in zip(a, b, strict=True))
    return tuple(b[j] if i is None else a[i] if j is None else a[i] + b[j] for i, j in places)  # type: ignore[index]


STARTS = (all_gather, reduce_scatter, all_reduce, all_to_all, all_to_all_counts, all_to_all_rows)
_OTHER = {"heads": "sequence", "sequence": "heads", "experts": "tokens", "tokens": "experts"}


def passes_gradient(node: fx.Node) -> bool:
    """Whether the tangent of this outer node is the tangent of its first argument.

    The sum of a value over ranks hands its tangent to every rank unchanged: each rank's share of a loss counts once.
    """
    if node.target is all_reduce:
        return True
    return node.target is wait and argument(node).target is all_reduce


def exchanged(node: fx.Node) -> tuple[fx.Node, ...]:
    """What an all_to_all's start or wait exchanges; nothing for any other node."""
    if node.target is wait:
        node = argument(node)
    values: tuple[fx.Node, ...] = argument(node) if node.target is all_to_all else ()
    return values


def routed(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The rows and the route of an all_to_all_rows' start or wait; None for any other node."""
    if node.target is wait:
        node = argument(node)
    return argument(node) if node.target is all_to_all_rows else None


def send_back(graph: fx.Graph, done: fx.Node, tangent: fx.Node, route: fx.Node) -> fx.Node:
    """Append the backward of the all_to_all_rows that `done` waits for: the same route the other way."""
    _, axis, to = argument(done).args
    start = graph.call_function(all_to_all_rows, ((tangent, route), axis, _OTHER[to]))
    return graph.call_function(wait, (start,))


def exchange(graph: fx.Graph, values: tuple[fx.Node, ...], axis: str, to: str) -> fx.Node:
    """Append an all_to_all of `values` and its wait to `graph`; returns the wait."""
    start = graph.call_function(all_to_all, (values, axis, to))
    return graph.call_function(wait, (start,))


def exchange_back(graph: fx.Graph, done: fx.Node, tangents: tuple[fx.Node, ...]) -> fx.Node:
    """Append the backward of the all_to_all that `done` waits for: the opposite one, of the tangents of its values."""
    _, axis, to = argument(done).args
    return exchange(graph, tangents, axis, _OTHER[to])


def _not_lowered(name: str) -> RuntimeError:
    return RuntimeError(f"{name} stands in a graph; lower the program before running it")
