"""Capture an unmodified Hugging Face model as a program of shared segments.

Dynamo traces the model once, on fake tensors, with every block a nested region and every boundary (attention, experts,
router statistics, loss) an op of ours, put in place through transformers' own interfaces and taken out again after.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor, nn
from transformers import PreTrainedModel

from turbo_compile import _torch
from turbo_compile.errors import CaptureError, TurboCompileError, UnsupportedOp
from turbo_compile.huggingface import Inputs, block_modules, boundaries_installed, fake_weights
from turbo_compile.ir.program import Call, Parameter, Program, Segment, Source, source
from turbo_compile.ir.segments import clone_module, eliminate_dead, extract, fingerprint, is_size, reorder, value_of, writes
from turbo_compile.kernels import counter_random

_BATCH, _SEQUENCE = 2, 17 * 11  # of the synthetic batch: a length unlike any size of a model
_DROPOUT = (torch.nn.functional.dropout, torch.dropout)
_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_MAY_READ_A_MASK = (
    torch.ops.turbo_compile.attention.default,
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
)
_RANDOM = ("rand", "randn", "randint", "bernoulli", "multinomial", "normal", "alpha_dropout", "feature_dropout")


@dataclass(frozen=True, slots=True)
class Signature:
    """Which program a call needs: what it returns, how the model stands, and which parameters are trained.

    `shape` is (B, S) when shapes are static, else None. `router` asks for the load-balancing loss; `masked` says that
    the batch comes with a padding mask.
    """

    loss: bool
    logits: bool
    training: bool
    differentiable: bool
    router: bool = False
    trainable: frozenset[str] = frozenset()
    shape: tuple[int, int] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        named = (("loss", self.loss), ("aux_loss", self.loss and self.router), ("logits", self.logits))
        return tuple(name for name, wanted in named if wanted)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The outputs that gradients flow from: the loss, or the logits when there is none."""
        if not self.differentiable:
            return ()
        return ("loss",) if self.loss else ("logits",)


def capture(model: PreTrainedModel, signature: Signature, dtypes: dict[str, torch.dtype], device: torch.device) -> Program:
    """The forward program of `model` for `signature`, its parameters in `dtypes` (by FQN).

    Raises:
        CaptureError: the model cannot be traced as one graph; the message names the line of the model.
        UnsupportedOp: a boundary is used in a way that has no rule.
    """
    training = model.training
    model.train(signature.training)
    try:
        with boundaries_installed(model) as inputs, fake_weights(model, dtypes, device):
            captured = _trace(model, signature, inputs, device)
    finally:
        model.train(training)
    return _Builder(model, signature, captured).program()


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
    }
    if signature.shape is None:
        for tensor in batch.values():
            for dim in range(tensor.dim()):
                torch._dynamo.mark_dynamic(tensor, dim)
    forward = type(model).forward  # a compiled model's own forward is the runtime
    keywords: dict[str, Any] = {"use_cache": False}
    if signature.router:
        keywords["output_router_logits"] = True

    def entry(
        ids: Tensor, positions: Tensor, layout: Tensor, valid: Tensor, targets: Tensor, denominator: Tensor, seed: Tensor
    ) -> tuple[Tensor, ...]:
        for other in (positions, layout, valid, targets):
            torch._check(other.shape[0] == ids.shape[0])
            torch._check(other.shape[1] == ids.shape[1])
        inputs.layout, inputs.valid, inputs.seed = layout, valid, seed
        inputs.targets, inputs.denominator = targets, denominator
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
        return tuple(out[name] for name in signature.outputs)

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
    where = "; at {0}:{1} in {2}: {3}".format(*own[-1]) if own else ""
    return f"{type(model).__name__} cannot be captured as one graph: {hint.group(0) if hint else reason}{where}"


class _Builder:
    """From Dynamo's graph to a `Program`: find the blocks, gather the glue between them, name everything."""

    def __init__(self, model: PreTrainedModel, signature: Signature, captured: fx.GraphModule) -> None:
        self.model = model
        self.signature = signature
        self.captured = captured
        self.mode = _torch.fake_mode_of(captured)
        self.blocks = block_modules(model)
        self.fqn: dict[fx.Node, str] = {}
        self.batch: dict[fx.Node, str] = {}
        self.parameters: dict[str, Parameter] = {}
        self.owner = _owners(model)
        self._read_placeholders()

    def _read_placeholders(self) -> None:
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        for node in self.captured.graph.nodes:
            if node.op != "placeholder":
                continue
            fqn = _torch.source_fqn(node)
            value = value_of(node)
            if fqn is None:
                name = str(node.target).removeprefix("L_").removesuffix("_").lower()
                if isinstance(value, Tensor) and name in ("ids", "positions", "layout", "valid", "targets", "denominator", "seed"):
                    self.batch[node] = name
                elif isinstance(value, Tensor) or node.users:
                    raise CaptureError(
                        f"{type(self.model).__name__} reads a tensor that is neither an input, a parameter nor a buffer "
                        f"({node.target}); register it as a buffer"
                    )
            elif fqn in self.owner:
                self.fqn[node] = self.owner[fqn]
            elif fqn in buffers:
                self.fqn[node] = fqn
            else:
                raise CaptureError(f"{type(self.model).__name__}: {fqn} is neither a parameter nor a buffer")

    # --- regions: block calls in order, the glue before, between and after them -----------------------------------

    def program(self) -> Program:
        graph = self.captured.graph
        eliminate_dead(graph)
        calls = [node for node in graph.nodes if node.op == "call_function" and _is_anchor(node)]
        level = _levels(graph, calls)
        _write_out_of_place(graph, level)
        self.outer = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.segments: dict[str, Segment] = {}
        self.named: dict[str, str] = {}
        self.used_groups: dict[tuple[str, ...], fx.Node] = {}
        self.call_count = 0
        self.users = self._uses(calls, level)
        self.masks = _masks(graph)
        results = next(node for node in graph.nodes if node.op == "output").args[0]
        self.results = [item for item in results if isinstance(item, fx.Node)]  # type: ignore[union-attr]
        glue: list[list[fx.Node]] = [[] for _ in range(len(calls) + 1)]
        for node in graph.nodes:
            if node in level and not _is_anchor(node):
                glue[level[node]].append(node)
        for index in range(len(calls) + 1):
            self._emit_glue(glue[index], index, len(calls))
            if index < len(calls):
                self._emit_anchor(calls[index])
        self._check_blocks()
        self.outer.output(tuple(self.env[node] for node in self.results))
        self.outer.lint()
        return self._finish()

    def _uses(self, calls: list[fx.Node], level: dict[fx.Node, int]) -> dict[str, set[Any]]:
        """For each parameter, the calls and glue regions that read it."""
        users: dict[str, set[Any]] = {}
        for node, fqn in self.fqn.items():
            if fqn not in self.owner:
                continue
            for user in node.users:
                where = user if _is_anchor(user) else level.get(user)
                if where is not None:
                    users.setdefault(fqn, set()).add(where)
        return users

    def _placeholder(self, source: Source, value: Any, name: str) -> fx.Node:
        """A placeholder of the outer graph, made once, before every call."""
        first = next((node for node in self.outer.nodes if node.op != "placeholder"), None)
        with self.outer.inserting_before(first) if first is not None else self.outer.inserting_after(None):
            node = self.outer.placeholder(re.sub(r"\W", "_", name))
        node.meta.update(source=source, val=value)
        return node

    def _input(self, node: fx.Node) -> fx.Node:
        """The outer value for a captured node that is no parameter."""
        if node in self.env:
            return self.env[node]
        if node in self.batch:
            self.env[node] = self._placeholder(Source("batch", (self.batch[node],)), value_of(node), self.batch[node])
        elif node in self.fqn:
            fqn = self.fqn[node]
            self.env[node] = self._placeholder(Source("buffer", (fqn,)), value_of(node), f"b_{fqn}")
        else:
            raise CaptureError(f"{node.name} of {type(self.model).__name__} crosses segments in a way that is not known")
        return self.env[node]

    def _groups(self, parameters: list[fx.Node], where: Any, label: str) -> list[tuple[fx.Node, list[fx.Node]]]:
        """Parameters of one call as groups: its own together, each one shared with another call by itself."""
        own = [node for node in parameters if self.users[self.fqn[node]] == {where}]
        shared = [node for node in parameters if node not in own]
        groups = ([(label, own)] if own else []) + [(self.fqn[node], [node]) for node in shared]
        made = []
        for name, members in groups:
            names = tuple(self.fqn[node] for node in members)
            if names not in self.used_groups:
                values = tuple(value_of(node) for node in members)
                self.used_groups[names] = self._placeholder(Source("group", names), values, f"w_{name}")
                for fqn, value in zip(names, values, strict=True):
                    self.parameters[fqn] = Parameter(fqn, value.shape, value.dtype, fqn in self.signature.trainable)
            made.append((self.used_groups[names], members))
        return made

    def _is_parameter(self, node: fx.Node) -> bool:
        return node in self.fqn and self.fqn[node] in self.owner

    def _emit_glue(self, nodes: list[fx.Node], index: int, last: int) -> None:
        inside = set(nodes)
        compute = [node for node in nodes if not is_size(node)]
        wanted = [
            node
            for node in compute
            if node in self.results or any(user not in inside and not _is_mask(node) for user in node.users)
        ]
        needed = set(wanted) | {node for node in nodes if writes(node)}
        for node in needed:
            if writes(node) and node.args[0] not in inside:
                raise UnsupportedOp(
                    f"{type(self.model).__name__} writes in place, outside a block, to a value made before the block: {node.format_node()}"
                )
        for node in reversed(nodes):
            if node in needed:
                needed.update(argument for argument in node.all_input_nodes if argument in inside)
        nodes = [node for node in nodes if node in needed]
        if not wanted:
            return
        name = "prologue" if index == 0 else "epilogue" if index == last else "between"
        label = name if name != "between" else f"between.{index}"
        parameters = [n for n in dict.fromkeys(a for node in nodes for a in node.all_input_nodes) if self._is_parameter(n)]
        groups = self._groups(parameters, index, label)
        ordered = [member for _, members in groups for member in members]
        module, inputs = extract(nodes, ordered, wanted)
        self._call(name, module, groups, [self._input(node) for node in inputs], label, wanted)

    def _emit_anchor(self, node: fx.Node) -> None:
        if node.target is not _torch.invoke_subgraph:
            arguments = fx.map_arg(node.args, self._input)
            self.env[node] = self.outer.call_function(node.target, arguments, {})  # type: ignore[arg-type]
            self.env[node].meta["val"] = value_of(node)
            return
        module = getattr(self.captured, str(node.args[0].target))  # type: ignore[union-attr]
        actual = list(node.args[2:])
        module = self._block_module(module, actual)
        if any(not isinstance(item, fx.Node) for item in actual):
            raise CaptureError(f"a block of {type(self.model).__name__} takes a constant {actual} that Dynamo did not fold")
        nodes: list[fx.Node] = actual  # type: ignore[assignment]
        parameters = [item for item in nodes if self._is_parameter(item)]
        fqn = self._block_fqn([self.fqn[item] for item in parameters])
        groups = self._groups(parameters, node, fqn)
        ordered = [member for _, members in groups for member in members]
        module = reorder(module, lambda i: False) if not ordered else _parameters_first(module, nodes, ordered)
        inputs = [item for item in nodes if item not in ordered]
        outer_inputs = [self._block_input(item) for item in inputs]
        outputs = [user for user in sorted(node.users, key=lambda user: user.args[1])]  # type: ignore[arg-type, return-value]
        module = _keep_outputs(module, [user.args[1] for user in outputs])  # type: ignore[misc]
        self._call(_block_name(self.model, self.blocks[fqn]), module, groups, outer_inputs, fqn, outputs)

    def _block_input(self, node: fx.Node) -> fx.Node:
        if _is_mask(node):
            return self._input(node.args[0])  # type: ignore[arg-type]
        return self._input(node)

    def _block_module(self, module: fx.GraphModule, actual: list[Any]) -> fx.GraphModule:
        """The block's graph with the window its mask asked for, checked against what attention was told."""
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        tags = {p: a.args[1:] for p, a in zip(placeholders, actual, strict=True) if isinstance(a, fx.Node) and _is_mask(a)}
        module = clone_module(module)
        placeholders_new = [node for node in module.graph.nodes if node.op == "placeholder"]
        renamed = {new: tags[old] for old, new in zip(placeholders, placeholders_new, strict=True) if old in tags}
        for node in module.graph.nodes:
            if node.target is torch.ops.turbo_compile.attention.default:
                _apply_mask(self.model, node, renamed)
        for node, _ in renamed.items():
            strangers = [user for user in node.users if user.target not in _MAY_READ_A_MASK]
            if strangers:
                raise UnsupportedOp(
                    f"{type(self.model).__name__} uses its attention mask outside attention ({strangers[0].format_node()}); "
                    "only masks handed to an attention interface are known"
                )
        return module

    def _call(
        self,
        name: str,
        module: fx.GraphModule,
        groups: list[tuple[fx.Node, list[fx.Node]]],
        inputs: list[fx.Node],
        fqn: str,
        outputs: list[fx.Node],
    ) -> None:
        """One call of the segment `module`, named once for all calls that compute the same."""
        module, inputs = self._seeded(module, inputs)
        module, inputs = self._sized(module, inputs)
        widths = tuple(len(members) for _, members in groups)
        key = f"{fingerprint(module)} {widths}"
        if key not in self.named:
            self.named[key] = _fresh(name, self.segments)
            module.graph.lint()
            module.recompile()
            self.segments[self.named[key]] = Segment(self.named[key], module, sum(widths))
        call = self.outer.call_module(self.named[key], (*(group for group, _ in groups), *inputs))
        call.meta.update(
            groups=len(groups),
            group_names=tuple(source(group).names for group, _ in groups),
            call=Call(fqn, self.call_count),
            val=tuple(value_of(output) for output in outputs),
        )
        self.call_count += 1
        for index, output in enumerate(outputs):
            self.env[output] = self.outer.call_function(operator.getitem, (call, index))
            self.env[output].meta["val"] = value_of(output)

    def _seeded(self, module: fx.GraphModule, inputs: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Give every random op of the segment a number of its own under the call's seed, and the call a seed of its own."""
        random = [node for node in module.graph.nodes if _draws(node)]
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method") and _target_name(node) in _RANDOM:
                raise UnsupportedOp(
                    f"{type(self.model).__name__} draws random numbers with {_target_name(node)}; only dropout is known"
                )
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        offset = len(placeholders) - len(inputs)
        seeds = [i for i, node in enumerate(inputs) if self._is_seed(node)]
        if not random:
            return module, inputs
        if seeds:
            seed = placeholders[offset + seeds[0]]
            inputs = list(inputs)
        else:
            with module.graph.inserting_after(placeholders[-1]):
                seed = module.graph.placeholder("seed")
            outer = next((n for n, name in self.batch.items() if name == "seed"), None)
            source = self.env.get(outer) if outer is not None else self.env.get("seed")  # type: ignore[call-overload]
            if source is None:
                with self.mode:
                    value = torch.zeros((), dtype=torch.long, device=value_of(placeholders[0]).device)
                source = self._placeholder(Source("batch", ("seed",)), value, "seed")
                self.env[outer if outer is not None else "seed"] = source  # type: ignore[index]
            seed.meta["val"] = source.meta["val"]
            seeds, inputs = [len(inputs)], [*inputs, source]
        for site, node in enumerate(random):
            _seed_site(module.graph, node, seed, site)
        forked = self.outer.call_function(counter_random.fork, (inputs[seeds[0]], self.call_count))
        forked.meta["val"] = seed.meta["val"]
        inputs[seeds[0]] = forked
        return module, inputs

    def _sized(self, module: fx.GraphModule, inputs: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Hand the segment each symbol that its inputs only have inside products, like B*S rows: compilers want it bare."""
        values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape if isinstance(size, torch.SymInt)]
        bare = {size.node.expr for size in sizes if size.node.expr.is_symbol}
        missing = set().union(*(size.node.expr.free_symbols for size in sizes)) - bare
        if not missing:
            return module, inputs
        last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
        ids = self._input(next(node for node, name in self.batch.items() if name == "ids"))
        for dim, size in enumerate(ids.meta["val"].shape):
            if not isinstance(size, torch.SymInt) or size.node.expr not in missing:
                continue
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(f"size_{dim}")
            # Inductor binds a size to the symbol it was made with: make it with the one all shapes were unified to.
            last.meta["val"] = self.mode.shape_env.create_symintnode(size.node.expr, hint=size.node.hint)  # type: ignore[union-attr]
            number = self.outer.call_function(torch.ops.aten.sym_size.int, (ids, dim))
            number.meta["val"] = size
            inputs = [*inputs, number]
        return module, inputs

    def _is_seed(self, node: fx.Node) -> bool:
        found = node.meta.get("source")
        return found is not None and found.names == ("seed",)

    # --- what must hold ---------------------------------------------------------------------------------------------

    def _block_fqn(self, parameters: list[str]) -> str:
        """The block whose parameters a call reads."""
        votes = [block for fqn in parameters if (block := _longest_prefix(fqn, self.blocks)) is not None]
        if not votes:
            raise CaptureError(f"a block of {type(self.model).__name__} has no parameter of its own; its calls cannot be told apart")
        return max(dict.fromkeys(votes), key=votes.count)

    def _check_blocks(self) -> None:
        """Every block instance is exactly one call, and its parameters are read by that call."""
        called = [node.meta["call"].fqn for node in self.outer.nodes if node.op == "call_module"]
        for block, module in self.blocks.items():
            if called.count(block) != 1:
                raise CaptureError(
                    f"{block} ({type(module).__name__}) became {called.count(block)} calls instead of one; "
                    "it may be skipped, or called twice, for this input"
                )

    def _finish(self) -> Program:
        ids = next((value_of(node) for node, name in self.batch.items() if name == "ids"), None)
        if ids is None:
            raise CaptureError(f"{type(self.model).__name__} does not read its input_ids")
        batch, sequence = (sympy.sympify(getattr(getattr(s, "node", s), "expr", s)) for s in ids.shape)
        guards = []
        for guard in self.mode.shape_env.guards:  # type: ignore[union-attr]
            condition = self.mode.shape_env.simplify(guard.expr)  # type: ignore[union-attr]
            if condition is not sympy.true:
                guards.append(condition)
        return Program(
            name=type(self.model).__name__,
            graph=self.outer,
            segments=self.segments,
            parameters=self.parameters,
            blocks=tuple(self.blocks),
            outputs=self.signature.outputs,
            fake_mode=self.mode,
            batch_symbol=batch,
            sequence_symbol=sequence,
            guards=tuple(guards),
        )


# --- small questions about captured graphs ---------------------------------------------------------------------------


def _is_anchor(node: fx.Node) -> bool:
    """Whether a node stands in the outer graph by itself: a block call or an outer boundary."""
    return node.target in (_torch.invoke_subgraph, torch.ops.turbo_compile.router_counts.default)


def _is_mask(node: fx.Node) -> bool:
    return node.target is torch.ops.turbo_compile.mask_layout.default


def _masks(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if _is_mask(node)]


def _levels(graph: fx.Graph, calls: list[fx.Node]) -> dict[fx.Node, int]:
    """For each node, how many calls must have run before it can: the region of glue it belongs to."""
    position = {call: index + 1 for index, call in enumerate(calls)}
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node in position:
            level[node] = position[node]
            continue
        if node.target is operator.getitem and node.args[0] in position and node.args[0].target is _torch.invoke_subgraph:
            continue  # the output of a call is the call itself
        level[node] = max((_level_of(argument, level, position) for argument in node.all_input_nodes), default=0)
    return {node: value for node, value in level.items() if node not in position}


def _write_out_of_place(graph: fx.Graph, level: dict[fx.Node, int]) -> None:
    """`loss += aux` across segments makes a new value: a segment never writes to what another one made."""
    for node in graph.nodes:
        if node.target in _IN_PLACE and level.get(node) != level.get(node.args[0]):
            node.target = _IN_PLACE[node.target]


def _level_of(node: fx.Node, level: dict[fx.Node, int], position: dict[fx.Node, int]) -> int:
    if node in level:
        return level[node]
    if node.target is operator.getitem and node.args[0] in position:
        return position[node.args[0]]  # type: ignore[index]
    return 0


def _owners(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same parameter (tied weights have one owner)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _longest_prefix(fqn: str, blocks: dict[str, nn.Module]) -> str | None:
    matches = [block for block in blocks if fqn.startswith(block + ".")]
    return max(matches, key=len, default=None)


def _block_name(model: nn.Module, block: nn.Module) -> str:
    """`decoder_layer` for `Qwen3DecoderLayer` of `Qwen3ForCausalLM`."""
    mine, whole = type(block).__name__, type(model).__name__
    common = 0
    while common < min(len(mine), len(whole)) and mine[common] == whole[common]:
        common += 1
    short = mine[common:] if common < len(mine) and mine[common].isupper() else mine
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short).lower()


def _fresh(name: str, taken: dict[str, Segment]) -> str:
    count = 1
    while (candidate := name if count == 1 else f"{name}_{count}") in taken:
        count += 1
    return candidate


def _parameters_first(module: fx.GraphModule, actual: list[fx.Node], ordered: list[fx.Node]) -> fx.GraphModule:
    """The block's graph taking its parameters first, in the order of `ordered`."""
    rank = {node: index for index, node in enumerate(ordered)}
    old = [node for node in module.graph.nodes if node.op == "placeholder"]
    order = sorted(range(len(old)), key=lambda i: (rank.get(actual[i], len(rank)), i))
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i in order:
        env[old[i]] = graph.node_copy(old[i])
        env[old[i]].meta["val"] = value_of(old[i])
    for node in module.graph.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda argument: env[argument])
    return fx.GraphModule(module, graph)


def _keep_outputs(module: fx.GraphModule, indices: list[int]) -> fx.GraphModule:
    """The graph with only the outputs that somebody reads."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    results = output.args[0]
    output.args = (tuple(results[index] for index in indices),)  # type: ignore[index]
    eliminate_dead(module.graph)
    module.recompile()
    return module


def _apply_mask(model: nn.Module, node: fx.Node, tags: dict[fx.Node, tuple[Any, ...]]) -> None:
    """Hand an attention op the window of the mask it was given; refuse when the model told it another."""
    names = [argument.name for argument in torch.ops.turbo_compile.attention.default._schema.arguments]
    arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    layout = arguments["layout"]
    if layout not in tags:
        raise UnsupportedOp(
            f"an attention of {type(model).__name__} gets its mask as {layout}, which is not one that "
            "transformers.masking_utils made; a mask that is not causal plus padding plus documents has no rule"
        )
    causal, window = tags[layout]  # type: ignore[index]
    told = arguments.get("window")
    if told is not None and window is not None and told != window:
        raise UnsupportedOp(f"an attention of {type(model).__name__} has window {told}, but its mask has window {window}")
    arguments.update(causal=causal, window=window if window is not None else None)
    node.args, node.kwargs = tuple(arguments[name] for name in names), {}


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers that we number: dropout in training, or attention with dropout."""
    if node.target in _DROPOUT:
        bound = _bound_dropout(node)
        return bool(bound[2]) and bound[1] > 0
    if node.target is torch.ops.turbo_compile.attention.default:
        return node.args[-1] > 0  # type: ignore[operator]
    return False


def _bound_dropout(node: fx.Node) -> tuple[Any, float, bool]:
    names = ("input", "p", "training", "inplace")
    bound = {"p": 0.5, "training": True} | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return bound["input"], bound["p"], bound.get("training", bound.get("train", True))


def _seed_site(graph: fx.Graph, node: fx.Node, seed: fx.Node, site: int) -> None:
    with graph.inserting_before(node):
        if node.target in _DROPOUT:
            value, p, _ = _bound_dropout(node)
            new = graph.call_function(counter_random.dropout, (value, p, seed, site))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            return
        names = [argument.name for argument in torch.ops.turbo_compile.attention.default._schema.arguments]
        forked = graph.call_function(counter_random.fork, (seed, site))
        forked.meta["val"] = seed.meta["val"]
        arguments = list(node.args)
        arguments[names.index("seed")] = forked
        node.args = tuple(arguments)


def _target_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
