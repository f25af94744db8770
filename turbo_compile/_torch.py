"""Every private torch symbol the project uses, under one roof, with the torch versions that have it.

Public torch is imported where it is needed. What is listed here moves between releases; each name was seen to exist
in torch 2.11, 2.12, 2.13 and 2.14 unless its comment says otherwise.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.misc import GetAttrVariable
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

from turbo_compile.ir.graphs import output_node, placeholders, results_of

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "ShapeEnv",
    "capture_graph",
    "compile_graph",
    "default_store",
    "dtensor_like",
    "export_joint",
    "fake_mode_of",
    "fake_process_group_store",
    "fresh_size",
    "gradient_hooks",
    "inductor_options",
    "invoke_subgraph",
    "local_of",
    "mark_dynamic",
    "mark_must_recompute",
    "mark_must_save",
    "partition_joint",
    "source_fqn",
]

invoke_subgraph = torch.ops.higher_order.invoke_subgraph
_SOURCE_STEP = re.compile(r"(?:_modules|_parameters|_buffers)\['([^']+)'\]")


def capture_graph(function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.GraphModule:
    """The torch-level graph of `function(*arguments)`, nested compile regions kept as `invoke_subgraph` calls."""
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(inline_single_use_invoke_subgraph=False, assume_static_by_default=True),
        warnings.catch_warnings(),
        _attributes_in_their_region(),
    ):
        # Batch fields handed to boundaries and what transformers records: meant, and gone after the capture.
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        return dynamo_graph_capture_for_export(function)(*arguments)


@contextlib.contextmanager
def _attributes_in_their_region() -> Iterator[None]:
    """Have `weight.T` traced where it is read: Dynamo traces it where `weight` came from, outside the nested region."""

    def create(base: fx.Proxy, name: str) -> fx.Proxy:
        return InstructionTranslator.current_tx().output.create_proxy("call_function", getattr, (base, name), {})

    owner: Any = GetAttrVariable
    before = owner.create_getattr_proxy
    owner.create_getattr_proxy = staticmethod(create)
    try:
        yield
    finally:
        owner.create_getattr_proxy = staticmethod(before)


def mark_dynamic(tensor: torch.Tensor) -> None:
    """Have every size of an example input traced as a symbol."""
    for dim in range(tensor.dim()):
        torch._dynamo.mark_dynamic(tensor, dim)


def fake_mode_of(captured: fx.GraphModule) -> FakeTensorMode:
    """The fake mode whose symbols the captured graph's values carry."""
    return captured.meta["fake_mode"]


def fresh_size(mode: FakeTensorMode, name: str, hint: int) -> torch.SymInt:
    """A new symbol of `mode` for a size that is `hint` in the example."""
    shape_env: Any = mode.shape_env
    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    made: torch.SymInt = shape_env.create_symintnode(symbol, hint=hint, source=source)
    return made


def source_fqn(node: fx.Node) -> str | None:
    """The dotted module path of a parameter or buffer placeholder; None for an argument of the captured function."""
    source: Any = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name if isinstance(source.name, str) else source.name()
    return ".".join(_SOURCE_STEP.findall(name)) or None


def export_joint(
    stack: contextlib.ExitStack, module: fx.GraphModule, inputs: tuple[Any, ...], mode: FakeTensorMode
) -> tuple[fx.GraphModule, Any]:
    """The joint forward and backward graph of `module` on fake `inputs`, and AOTAutograd's facts about it.

    An op with Triton kernels stays one node, on every device: its placement, cost and backward are known by its name.
    """
    stack.enter_context(torch._functorch.config.patch(decompose_custom_triton_ops=False))
    stack.enter_context(tracing(TracingContext(mode)))
    joint = aot_export_joint_with_descriptors(stack, module, inputs, decompositions=select_decomp_table())
    return joint.graph_module, joint._aot_state.fw_metadata


def partition_joint(joint: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into forward and backward, saving what min-cut and the nodes' tags say."""
    inputs = [node.meta["val"] for node in placeholders(joint.graph)]
    return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=outputs)


def mark_must_recompute(node: fx.Node) -> None:
    node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)


def mark_must_save(node: fx.Node) -> None:
    node.meta.update(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=0)


def compile_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, *, backward: bool
) -> Callable[[list[Any]], Sequence[Any]]:
    """Inductor's code for an ATen graph. The callable takes its inputs as one list, and empties it."""
    visible = [index for index, result in enumerate(results_of(graph.graph)) if isinstance(result, fx.Node)]
    # Every output keeps the strides it was traced with: the next segment is compiled for them.
    output_node(graph.graph).meta["user_visible_output_idxs"] = visible
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), inductor_options():
        return compile_fx_inner(graph, list(inputs), is_backward=backward)


@contextlib.contextmanager
def inductor_options() -> Iterator[None]:
    """Inductor settings for segments: no checks, at run time or by its cache, of sizes that the program already fixes.

    (The cache would check an input such as B * S by the name B had where the model was called, and fail.)
    """
    unchecked = {"size_asserts": False, "nan_asserts": False, "unsafe_skip_cache_dynamic_shape_guards": True}
    with torch._inductor.config.patch({**unchecked, "graph_partition": False}):
        yield


def fake_process_group_store() -> Any:
    """A store that lets one process pose as any rank of any world (importing it registered the `fake` backend)."""
    return FakeStore()


def default_store() -> Any:
    """The key-value store behind the process group: how ranks talk when a collective might hang."""
    return _get_default_store()


def dtensor_like(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """A DTensor around `local` with the mesh, placements and shape of `like`, which is one.

    Ten times cheaper than `from_local`; `__init__`, which does nothing but switch Dynamo off and on, is left out.
    """
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)  # type: ignore[attr-defined]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without the autograd of `to_local`."""
    return tensor._local_tensor  # type: ignore[attr-defined]


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """A leaf's `register_hook` hooks and its `register_post_accumulate_grad_hook` hooks, in order."""
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return list((before or {}).values()), list((after or {}).values())
