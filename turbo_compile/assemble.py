"""From Dynamo's graph to a `Program`: blocks become calls, the glue between them segments, the same thing one name."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor
from transformers import PreTrainedModel

from turbo_compile import _torch, seeds
from turbo_compile.errors import CaptureError, UnsupportedOp
from turbo_compile.huggingface import block_modules, tied_names
from turbo_compile.ir.graphs import argument, placeholders, results_of
from turbo_compile.ir.program import Call, Parameter, Program, Segment, Source, source
from turbo_compile.ir.segments import (
    eliminate_dead,
    extract,
    fingerprint,
    is_size,
    keep_outputs,
    read_sizes_once,
    reorder,
    value_of,
    writes,
)
from turbo_compile.ir.spelling import expression_of
from turbo_compile.kernels import counter_random
from turbo_compile.masks import is_mask, with_masks
from turbo_compile.regions import is_anchor, levels, write_out_of_place

FIELDS = (
    "ids",
    "positions",
    "layout",
    "valid",
    "targets",
    "denominator",
    "seed",
    "longest",
)  # what a batch is, in entry's order


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that travel together: the outer placeholder, and the captured nodes of its members."""

    node: fx.Node
    members: tuple[fx.Node, ...]


class Assembly:
    """One captured graph on its way to a `Program`; `program()` does the work, once."""

    def __init__(
        self, model: PreTrainedModel, trainable: frozenset[str], outputs: tuple[str, ...], captured: fx.GraphModule
    ) -> None:
        self.model = model
        self.name = type(model).__name__
        self.trainable = trainable
        self.outputs = outputs
        self.captured = captured
        self.mode = _torch.fake_mode_of(captured)
        self.shape_env: Any = self.mode.shape_env
        self.blocks = block_modules(model)
        self.owner = tied_names(model)
        self.fqn: dict[fx.Node, str] = {}
        self.batch: dict[fx.Node, str] = {}
        self.parameters: dict[str, Parameter] = {}
        self.segments: dict[str, Segment] = {}
        self.named: dict[str, str] = {}
        self.groups: dict[tuple[str, ...], fx.Node] = {}
        self.outer = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.calls = 0

    def program(self) -> Program:
        graph = self.captured.graph
        self._read_placeholders()
        eliminate_dead(graph)
        anchors = [node for node in graph.nodes if node.op == "call_function" and is_anchor(node)]
        level = levels(graph, anchors)
        write_out_of_place(graph, level)
        self.readers = self._readers(level)
        results = results_of(graph)
        for index in range(len(anchors) + 1):
            glue = [node for node in graph.nodes if level.get(node) == index]
            self._add_glue(glue, results, index, len(anchors))
            if index < len(anchors):
                self._add_anchor(anchors[index])
        self._check_blocks()
        self.outer.output(tuple(self.env[result] for result in results))
        self.outer.lint()
        return self._finished()

    # --- placeholders -----------------------------------------------------------------------------------------------

    def _read_placeholders(self) -> None:
        """Say of every captured placeholder which parameter, buffer or batch field it is."""
        buffers: set[str] = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        for node in placeholders(self.captured.graph):
            fqn = _torch.source_fqn(node)
            name = str(node.target).removeprefix("L_").removesuffix("_").lower()
            if fqn in self.owner:
                self.fqn[node] = self.owner[fqn]
            elif fqn is not None and fqn in buffers:
                self.fqn[node] = fqn
            elif fqn is None and name in FIELDS and isinstance(value_of(node), Tensor):
                self.batch[node] = name
            elif isinstance(value_of(node), Tensor) or node.users:
                raise CaptureError(
                    f"{self.name} reads {fqn or node.target}, which is neither an input, a parameter nor a buffer; "
                    "register it as a buffer"
                )

    def _readers(self, level: dict[fx.Node, int]) -> dict[str, set[Any]]:
        """For each parameter, the calls and glue regions that read it."""
        readers: dict[str, set[Any]] = {}
        for node, fqn in self.fqn.items():
            for user in node.users:
                readers.setdefault(fqn, set()).add(user if is_anchor(user) else level.get(user))
        return readers

    def _is_parameter(self, node: fx.Node) -> bool:
        return self.fqn.get(node) in self.owner

    def _placeholder(self, what: Source, value: Any, name: str) -> fx.Node:
        """A placeholder of the outer graph, before every call."""
        first = next((node for node in self.outer.nodes if node.op != "placeholder"), None)
        with self.outer.inserting_before(first):
            node = self.outer.placeholder(re.sub(r"\W", "_", name))
        node.meta.update(source=what, val=value)
        return node

    def _input(self, node: fx.Node) -> fx.Node:
        """The outer value of a captured node that is no parameter."""
        if node not in self.env:
            if node in self.batch:
                field = self.batch[node]
                self.env[node] = self._placeholder(Source("batch", (field,)), value_of(node), field)
            elif node in self.fqn:
                fqn = self.fqn[node]
                self.env[node] = self._placeholder(Source("buffer", (fqn,)), value_of(node), f"b_{fqn}")
            elif is_mask(node):
                self.env[node] = self._input(argument(node))
            else:
                raise CaptureError(
                    f"{self.name}: {node.format_node()} is read across segments in a way that has no rule"
                )
        return self.env[node]

    def _field(self, field: str) -> fx.Node:
        """The outer placeholder of a batch field, whether or not the model read it."""
        made = next((node for node in self.outer.nodes if node.name == field and node.op == "placeholder"), None)
        if made is not None:
            return made
        captured = next((node for node, name in self.batch.items() if name == field), None)
        if captured is not None:
            return self._input(captured)
        device = value_of(placeholders(self.captured.graph)[0]).device
        with self.mode:
            value = torch.zeros((), dtype=torch.long, device=device)
        return self._placeholder(Source("batch", (field,)), value, field)

    def _grouped(self, parameters: list[fx.Node], reader: Any, label: str) -> list[Group]:
        """The parameters of one call as groups: its own together, each one shared with another call by itself."""
        own = tuple(node for node in parameters if self.readers[self.fqn[node]] == {reader})
        shared = [(self.fqn[node], (node,)) for node in parameters if node not in own]
        return [self._group(name, members) for name, members in ([(label, own)] if own else []) + shared]

    def _group(self, name: str, members: tuple[fx.Node, ...]) -> Group:
        names = tuple(self.fqn[node] for node in members)
        if names not in self.groups:
            values = tuple(value_of(node) for node in members)
            self.groups[names] = self._placeholder(Source("group", names), values, f"w_{name}")
            for fqn, value in zip(names, values, strict=True):
                self.parameters[fqn] = Parameter(fqn, value.shape, value.dtype, fqn in self.trainable)
        return Group(self.groups[names], members)

    # --- glue and calls ---------------------------------------------------------------------------------------------

    def _add_glue(self, nodes: list[fx.Node], results: list[fx.Node], index: int, last: int) -> None:
        """What lies between two anchors, as one segment, if anybody reads it."""
        inside = set(nodes)

        def leaves(node: fx.Node) -> bool:
            return node in results or any(user not in inside for user in node.users)

        wanted = [node for node in nodes if leaves(node) and not is_size(node) and not is_mask(node)]
        if not wanted:
            return
        nodes = self._needed(nodes, wanted)
        kind = "prologue" if index == 0 else "epilogue" if index == last else "between"
        label = kind if kind != "between" else f"between.{index}"
        read = dict.fromkeys(value for node in nodes for value in node.all_input_nodes)
        groups = self._grouped([node for node in read if self._is_parameter(node)], index, label)
        module, inputs = extract(nodes, [member for group in groups for member in group.members], wanted)
        self._add_call(kind, module, groups, [self._input(node) for node in inputs], label, wanted)

    def _needed(self, nodes: list[fx.Node], wanted: list[fx.Node]) -> list[fx.Node]:
        """`wanted` and all they are computed from; a write counts as needed, since its target may be read later."""
        needed = set(wanted)
        for node in reversed(nodes):
            if writes(node):
                if node.args[0] not in nodes:
                    raise UnsupportedOp(
                        f"{self.name} writes in place to a value that another block made: {node.format_node()}"
                    )
                needed.add(node)
            if node in needed:
                needed.update(node.all_input_nodes)
        return [node for node in nodes if node in needed]

    def _add_anchor(self, node: fx.Node) -> None:
        if node.target is _torch.invoke_subgraph:
            self._add_block(node)
            return
        target: Any = node.target
        self.env[node] = self.outer.call_function(target, fx.map_arg(node.args, self._input))
        self.env[node].meta["val"] = value_of(node)

    def _add_block(self, node: fx.Node) -> None:
        actual: list[Any] = list(node.args[2:])
        constants = [item for item in actual if not isinstance(item, fx.Node)]
        if constants:
            raise CaptureError(
                f"a block of {self.name} takes {constants[0]}, which changes from call to call, as a number"
            )
        module = with_masks(self.name, getattr(self.captured, argument(node).target), actual)
        parameters = [item for item in actual if self._is_parameter(item)]
        fqn = self._block_of(parameters)
        groups = self._grouped(parameters, node, fqn)
        ordered = [member for group in groups for member in group.members]
        inputs = [item for item in actual if item not in ordered]
        module = reorder(module, [actual.index(item) for item in (*ordered, *inputs)])
        outputs = sorted(node.users, key=lambda user: argument(user, 1))
        keep_outputs(module, [argument(output, 1) for output in outputs])
        read_sizes_once(module)
        kind = _kind(self.name, type(self.blocks[fqn]).__name__)
        self._add_call(kind, module, groups, [self._input(item) for item in inputs], fqn, outputs)

    def _add_call(
        self,
        kind: str,
        module: fx.GraphModule,
        groups: list[Group],
        inputs: list[fx.Node],
        fqn: str,
        outputs: list[fx.Node],
    ) -> None:
        """One call of the segment `module`, which is named once for all calls that compute the same."""
        inputs = self._with_seed(module, inputs)
        inputs = self._with_sizes(module, inputs)
        widths = tuple(len(group.members) for group in groups)
        key = f"{fingerprint(module)} {widths}"
        if key not in self.named:
            self.named[key] = _fresh(kind, self.segments)
            module.graph.lint()
            module.recompile()
            self.segments[self.named[key]] = Segment(self.named[key], module, sum(widths))
        call = self.outer.call_module(self.named[key], (*(group.node for group in groups), *inputs))
        call.meta.update(
            groups=len(groups),
            group_names=tuple(source(group.node).names for group in groups),
            call=Call(fqn, self.calls),
            val=tuple(value_of(output) for output in outputs),
        )
        self.calls += 1
        for index, output in enumerate(outputs):
            self.env[output] = self.outer.call_function(operator.getitem, (call, index))
            self.env[output].meta.update(val=value_of(output), name=re.sub(r"_\d+$", "", output.name))

    def _with_seed(self, module: fx.GraphModule, inputs: list[fx.Node]) -> list[fx.Node]:
        """Hand a segment that draws random numbers a seed of this call's own."""
        seeds.refuse_unknown_randomness(self.name, module.graph)
        if not any(seeds.draws(node) for node in module.graph.nodes):
            return inputs
        outer = self._field("seed")
        if outer not in inputs:
            with module.graph.inserting_after(placeholders(module.graph)[-1]):
                module.graph.placeholder("seed").meta["val"] = outer.meta["val"]
            inputs = [*inputs, outer]
        place = inputs.index(outer)
        seeds.number_sites(module.graph, placeholders(module.graph)[place - len(inputs)])
        forked = self.outer.call_function(counter_random.fork, (outer, self.calls))
        forked.meta["val"] = outer.meta["val"]
        return [*inputs[:place], forked, *inputs[place + 1 :]]

    def _with_sizes(self, module: fx.GraphModule, inputs: list[fx.Node]) -> list[fx.Node]:
        """Hand a segment each symbol that its inputs have only in products, like B*S rows: compilers want it bare."""
        tensors = [node.meta["val"] for node in placeholders(module.graph) if isinstance(node.meta["val"], Tensor)]
        sizes = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
        expressions = [expression_of(size) for size in sizes]
        bare = {expression for expression in expressions if expression.is_symbol}
        missing = {symbol for expression in expressions for symbol in expression.free_symbols} - bare
        if not missing:
            return inputs
        ids = self._field("ids")
        for dim, size in enumerate(ids.meta["val"].shape):
            if not isinstance(size, torch.SymInt) or size.node.expr not in missing:
                continue
            # Inductor binds a size to the symbol it was made with: make it with the one all shapes were unified to.
            value = self.shape_env.create_symintnode(size.node.expr, hint=size.node.hint)
            with module.graph.inserting_after(placeholders(module.graph)[-1]):
                module.graph.placeholder(f"size_{dim}").meta["val"] = value
            number = self.outer.call_function(torch.ops.aten.sym_size.int, (ids, dim))
            number.meta["val"] = value
            inputs = [*inputs, number]
        return inputs

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _block_of(self, parameters: list[fx.Node]) -> str:
        """The block that most of a call's parameters belong to."""
        owners = [block for block in self.blocks for node in parameters if self.fqn[node].startswith(f"{block}.")]
        if not owners:
            raise CaptureError(f"a block of {self.name} has no parameter of its own, so its calls cannot be told apart")
        return max(dict.fromkeys(owners), key=owners.count)

    def _check_blocks(self) -> None:
        """Every block instance is exactly one call."""
        called = [node.meta["call"].fqn for node in self.outer.nodes if node.op == "call_module"]
        for block, module in self.blocks.items():
            if called.count(block) != 1:
                raise CaptureError(
                    f"{block} ({type(module).__name__}) became {called.count(block)} calls instead of one: "
                    "it is skipped, or called twice"
                )

    def _finished(self) -> Program:
        ids = self._field("ids").meta["val"]
        batch, sequence = (sympy.sympify(expression_of(size)) for size in ids.shape)
        guards = (self.shape_env.simplify(guard.expr) for guard in self.shape_env.guards)
        return Program(
            name=self.name,
            graph=self.outer,
            segments=self.segments,
            parameters=self.parameters,
            blocks=tuple(self.blocks),
            outputs=self.outputs,
            fake_mode=self.mode,
            batch_symbol=batch,
            sequence_symbol=sequence,
            guards=tuple(guard for guard in guards if guard is not sympy.true),
        )


def _kind(model: str, block: str) -> str:
    """`decoder_layer` for the `Qwen3DecoderLayer` of `Qwen3ForCausalLM`: what is left without the family's name."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(model, block, strict=False))
    common = len(list(same))
    short = block[common:] if block[common : common + 1].isupper() else block
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short).lower()


def _fresh(name: str, taken: dict[str, Segment]) -> str:
    count = 1
    while (candidate := name if count == 1 else f"{name}_{count}") in taken:
        count += 1
    return candidate
