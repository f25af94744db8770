"""Run a compiled model: the Hugging Face object, its forward replaced by captured programs, its weights by shards."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_outputs
from transformers.utils import ModelOutput

from turbo_compile import _torch, exchange, optimizers
from turbo_compile.batch import Batch, read_batch
from turbo_compile.boundaries.sequence import MODEL_ENTRY
from turbo_compile.capture import Signature
from turbo_compile.errors import CaptureError, RankError, TurboCompileError, UnsupportedOp
from turbo_compile.huggingface import refuse_parts
from turbo_compile.ir.mesh import Axes
from turbo_compile.ir.program import source
from turbo_compile.kernels import counter_random
from turbo_compile.lower import Executable
from turbo_compile.parameters import Sharded, accept_full_tensors, gathered
from turbo_compile.plans.plan import Plan
from turbo_compile.ranks import agree, failing_together
from turbo_compile.structure import Structure, refuse_copies, refuse_new_embeddings

Build = Callable[[Signature], Executable]
BY_TOKEN = ("logits", "logprobs", "entropy")  # outputs that have each token of this rank


@dataclass(slots=True)
class Runtime:
    """One compiled model at work. `build` makes the executable of a signature; each is made once.

    (Once for each mode of the modules, to be exact: some may be in eval() while the model trains.)
    """

    model: PreTrainedModel
    plan: Plan
    structure: Structure
    sharded: Sharded
    build: Build
    vocabulary: int
    reduce_dtype: torch.dtype
    pending: dict[str, Tensor]
    executables: dict[tuple[Signature, Any], Executable] = field(default_factory=dict)
    synchronised: bool = True
    flags: tuple[bool, ...] = ()  # requires_grad of each parameter when `trainable` was read
    trainable: frozenset[str] = frozenset()
    mask_reader: str = ""  # a part of the model that reads the padding mask outside attention
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    @property
    def axes(self) -> Axes:
        return self.sharded.axes

    # --- one call -----------------------------------------------------------------------------------------------------

    def __call__(self, **arguments: Any) -> ModelOutput | tuple[Any, ...]:
        batch, total, longest = self._read(arguments)
        signature = self._signature(batch)
        executable = self._executable(signature, batch)
        state = _State(self, executable, self._fields(batch, total, longest))
        with failing_together("the forward"):
            results = _Step.apply(state, self.anchor) if signature.differentiable else state.forward()
        return self._output(dict(zip(signature.outputs, results, strict=True)), batch)

    def _read(self, arguments: dict[str, Any]) -> tuple[Batch, int, int]:
        """What this rank takes of its batch; of all ranks' together, the tokens with a target and the longest row."""
        device = self.axes.device
        ranks, rank = self.axes.sizes["sp"], self.axes.coordinates["sp"]
        try:
            self.structure.check()
            batch = read_batch(arguments, self.model.config, device, self.vocabulary)
            self._refuse_left_padding(arguments)
        except Exception as error:
            agree("", (0, 0, 0), error, device)  # tells the other ranks
            raise
        own = batch.cut(MODEL_ENTRY, rank, ranks) if ranks > 1 else batch
        told = agree(self._about(batch), (own.tokens, batch.longest, batch.checksum), None, device)
        tokens, longest, checksums = zip(*told, strict=True)
        _check_same_rows(checksums, ranks)
        return own, sum(tokens), max(longest)

    def _refuse_left_padding(self, arguments: dict[str, Any]) -> None:
        """A model that reads the padding mask outside attention is given none, which matters before real tokens."""
        mask = arguments.get("attention_mask")
        if self.mask_reader and mask is not None and bool((mask[:, 1:].bool() & ~mask[:, :-1].bool()).any()):
            raise UnsupportedOp(
                f"{self.mask_reader} reads the padding mask, which a compiled model hands to attention alone; "
                "pad on the right"
            )

    def _about(self, batch: Batch) -> str:
        """What every rank must be about to do alike; a mask, or rows and lengths of its own, are no matter."""
        keys = ", ".join(key for key in batch.keys if key != "attention_mask")
        said = ["train" if self.model.training else "eval"]
        said += ["no_grad"] if not torch.is_grad_enabled() else []
        said += ["no_sync"] if not self.synchronised else []
        said += ["logits"] if batch.return_logits else []
        said += ["logprobs"] if batch.return_logprobs else []
        said += ["router logits"] if batch.router else []
        said += [f"{float(batch.num_items):g} items"] if batch.num_items is not None else []
        trainable = self._trainable()
        frozen = [fqn for fqn in self.sharded.parameters if fqn not in trainable]
        said += [f"{len(frozen)} frozen from {frozen[0]} to {frozen[-1]}"] if frozen else []
        return f"{keys} ({', '.join(said)})"

    def _signature(self, batch: Batch) -> Signature:
        trainable = self._trainable()
        differentiable = torch.is_grad_enabled() and bool(trainable)
        training = self.model.training
        return Signature(
            loss=batch.has_loss,
            logits=not batch.has_loss or batch.return_logits or not (training or batch.return_logprobs),
            training=training,
            differentiable=differentiable,
            router=batch.router and batch.has_loss,
            logprobs=batch.return_logprobs,
            trainable=trainable if differentiable else frozenset(),
            shape=batch.shape if self.plan.batch.shapes == "static" else None,
        )

    def _trainable(self) -> frozenset[str]:
        """The parameters that require a gradient now."""
        flags = tuple(map(operator.attrgetter("requires_grad"), self.sharded.parameters.values()))
        if flags != self.flags:
            self.flags = flags
            self.trainable = frozenset(itertools.compress(self.sharded.parameters, flags))
        return self.trainable

    def _executable(self, signature: Signature, batch: Batch) -> Executable:
        key = signature, self.structure.mode()
        if key not in self.executables:
            with failing_together("compilation"), torch.autocast(self.axes.device.type, enabled=False):
                self.executables[key] = self.build(signature)
            self.structure.hooked()
        executable = self.executables[key]
        _check_guards(executable, batch)
        return executable

    def _fields(self, batch: Batch, total: int, longest: int) -> dict[str, Tensor]:
        device = self.axes.device
        fields = dict(batch.fields)
        items = batch.num_items if batch.num_items is not None else max(total, 1)
        fields["denominator"] = torch.as_tensor(items, dtype=torch.float32, device=device).reshape(())
        seed = torch.randint(2**62, (), dtype=torch.long).to(device)
        fields["longest"] = torch.tensor(longest, device=device)
        fields["seed"] = counter_random.fork(seed, self.axes.rank)
        return fields

    def _output(self, results: dict[str, Tensor], batch: Batch) -> ModelOutput | tuple[Any, ...]:
        for name in BY_TOKEN:
            if name in results and results[name].shape[1] != batch.length:
                results[name] = results[name][:, : batch.length]  # without what filled the last chunk up
        kind = _output_class(self.model, "aux_loss" in results)
        out = kind(**{name: value for name, value in results.items() if name not in ("logprobs", "entropy")})
        for name in ("logprobs", "entropy"):  # which no class of transformers has
            if name in results:
                out[name] = results[name]
        return out if batch.return_dict else out.to_tuple()

    # --- what the model's methods do ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside keep their gradients unreduced; the next backward outside adds and reduces them."""
        before, self.synchronised = self.synchronised, False
        try:
            yield
        finally:
            self.synchronised = before

    def drop_pending(self) -> None:
        self.pending.clear()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns what it was, on all ranks."""
        if self.pending:
            raise TurboCompileError(
                "clip_grad_norm_ while gradients of no_sync calls wait to be reduced: run a backward outside no_sync "
                "first, or drop them with zero_grad"
            )
        layouts = self.sharded.layouts
        split: list[Tensor] = []
        whole: list[Tensor] = []
        for fqn, parameter in self.sharded.parameters.items():
            if parameter.grad is not None:
                (split if layouts[fqn].sharded else whole).append(_torch.local_of(parameter.grad))
        norm = self._norm(split, whole, float(norm_type))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradients in (split, whole):
            if gradients:
                torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
        return norm

    def _norm(self, split: list[Tensor], whole: list[Tensor], p: float) -> Tensor:
        """The p-norm of gradients, some cut over `shard`, some whole on every rank."""
        if math.isinf(p):
            parts = [t.abs().max().float() for t in (*split, *whole) if t.numel()]
            total = torch.stack(parts).max() if parts else torch.zeros((), device=self.axes.device)
            if self.axes.sizes["shard"] > 1:
                dist.all_reduce(total, dist.ReduceOp.MAX, self.axes.groups["shard"])
            return total
        total = self._power_sum(split, p)
        if self.axes.sizes["shard"] > 1:
            dist.all_reduce(total, group=self.axes.groups["shard"])
        return (total + self._power_sum(whole, p)) ** (1.0 / p)

    def _power_sum(self, gradients: list[Tensor], p: float) -> Tensor:
        if not gradients:
            return torch.zeros((), dtype=self.reduce_dtype, device=self.axes.device)
        norms = torch._foreach_norm(gradients, p, dtype=self.reduce_dtype)
        return torch.stack(norms).pow(p).sum()

    def save_pretrained(self, save_directory: Any, **keywords: Any) -> None:
        """Write a Hugging Face checkpoint, weights in the dtype they came with. All ranks call it; rank 0 writes.

        Raises:
            RankError: on the other ranks, with its reason, if rank 0 could not write.
        """
        if keywords.pop("state_dict", None) is not None:
            raise TurboCompileError("save_pretrained gathers the weights itself; leave state_dict out")
        writes, error = self.axes.rank == 0, None
        with gathered(self.model, self.sharded, keep=writes):
            if writes:
                try:
                    type(self.model).save_pretrained(self.model, save_directory, **keywords)
                except Exception as failure:
                    error = failure
        agree("save_pretrained", (), error, self.axes.device)  # the others wait for rank 0, and hear of its failure

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise TurboCompileError(
            "generate needs a key-value cache, which a compiled training program does not keep; "
            "save_pretrained(dir) and load the checkpoint with from_pretrained(dir) to generate"
        )

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> NoReturn:
        raise TurboCompileError(
            "gradient checkpointing is part of the plan of a compiled model: set recompute: full, or selective"
        )

    def gather_sequence(self, tensor: Tensor) -> Tensor:
        """Whole rows [B, S, ...] from this rank's tokens of them [B, s, ...], such as its logits; differentiable.

        Every rank of an sp group calls it, and computes the same from the result: the gradient it hands back is the
        mean over the group. Without sequence parallelism it returns `tensor`.
        """
        if self.axes.sizes["sp"] == 1:
            return tensor
        return exchange.gather_sequence(tensor, self.axes.groups["sp"])

    def stay(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> PreTrainedModel:
        """What `model.to(...)` and its kind do: nothing, or an error where weights would change device or dtype."""
        for fqn, parameter in self.sharded.parameters.items():
            local = _torch.local_of(parameter)
            wanted = function(local.detach())
            if (wanted.device, wanted.dtype) != (local.device, local.dtype):
                raise TurboCompileError(
                    f"the weights of a compiled model stay {local.dtype} on {local.device} ({fqn} was asked to become "
                    f"{wanted.dtype} on {wanted.device}); move the model before turbo_compile, or set dtype.master"
                )
        return self.model


def _check_same_rows(checksums: Sequence[int], ranks: int) -> None:
    """Ranks that share a sequence must be given the same rows: each takes its own chunk of them."""
    for first in range(0, len(checksums), ranks):
        for rank in range(first + 1, first + ranks):
            if checksums[rank] != checksums[first]:
                raise RankError(
                    f"ranks {first} and {rank} share a sequence (mesh.sp={ranks}) and were given different rows; "
                    "all ranks of an sp group pass the same batch, and each takes its chunk"
                )


def _check_guards(executable: Executable, batch: Batch) -> None:
    program = executable.program
    values = {program.batch_symbol: batch.shape[0], program.sequence_symbol: batch.shape[1]}
    for guard in program.guards:
        holds = guard.subs(values)
        if holds == sympy.false:
            raise CaptureError(
                f"{program.name} was captured for sizes with {guard} (B, S = {program.batch_symbol}, "
                f"{program.sequence_symbol}), which does not hold for {batch.shape}; set batch.shapes: static"
            )


def _output_class(model: PreTrainedModel, router: bool) -> type[ModelOutput]:
    """The class the model's own forward returns."""
    annotation = str(inspect.signature(type(model).forward).return_annotation)
    for name in ("MoeCausalLMOutputWithPast", "CausalLMOutputWithCrossAttentions", "CausalLMOutputWithPast"):
        if name in annotation:
            found: type[ModelOutput] = getattr(modeling_outputs, name)
            return found
    return modeling_outputs.MoeCausalLMOutputWithPast if router else modeling_outputs.CausalLMOutputWithPast


# --- one step --------------------------------------------------------------------------------------------------------


class _State:
    """What one call keeps between its forward and its backward."""

    def __init__(self, runtime: Runtime, executable: Executable, fields: dict[str, Tensor]) -> None:
        self.runtime = runtime
        self.executable = executable
        self.fields = fields
        self.synchronised = runtime.synchronised
        self.bundles: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.spent = False
        self.versions = 0

    def forward(self) -> tuple[Tensor, ...]:
        arguments = [self._placeholder(node) for node in self.executable.inputs]
        with torch.no_grad(), self._as_planned():
            results, bundles, kept = self.executable.forward(*arguments)
        self.fields = {}
        self.bundles = dict(zip(self.executable.bundle_names, bundles, strict=True))
        self.kept = list(kept)
        self.versions = self._versions()
        return tuple(results)

    def _versions(self) -> int:
        """A number that grows whenever a weight is written to."""
        return sum(map(operator.attrgetter("_version"), self.runtime.sharded.parameters.values()))

    def _as_planned(self) -> contextlib.AbstractContextManager[Any]:
        """Without a caller's autocast: the plan says what is computed in which dtype."""
        return torch.autocast(self.runtime.axes.device.type, enabled=False)

    def _placeholder(self, node: Any) -> Any:
        found = source(node)
        if found.kind == "batch":
            return self.fields[found.names[0]]
        if found.kind == "buffer":
            return self.runtime.model.get_buffer(found.names[0])
        return self._group(found.names)

    def _group(self, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        parameters = self.runtime.sharded.parameters
        return tuple(_torch.local_of(parameters[fqn]) for fqn in names)

    def tangent(self, name: str, tangent: Tensor) -> Tensor:
        """A caller's tangent as the step wants it: of the loss as it is; by token averaged over the ranks' batches."""
        if name == "loss":
            return tangent
        sizes = self.runtime.axes.sizes
        return tangent / (sizes["dp"] * sizes["fsdp"])

    def backward(self, tangents: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of every gradient, by FQN; nothing when the reduction is deferred."""
        if self.spent:
            raise TurboCompileError("backward a second time: a compiled step frees what it saved; call the model again")
        if self._versions() != self.versions:
            raise TurboCompileError(
                "the weights changed between a forward and its backward, whose gradients would be of neither; "
                "call optimizer.step() after the backward of every call"
            )
        self.spent = True
        kept = iter(self.kept)
        self.kept = []
        arguments = []
        for node in self.executable.backward_inputs:
            found = source(node)
            if found.kind == "saved":
                arguments.append(self.bundles.pop(found.names[0]))
            elif found.kind == "kept":
                arguments.append([next(kept)])
            elif found.kind == "tangent":
                arguments.append([tangents[found.names[0]]])
            else:
                arguments.append(self._group(found.names))
        run = self.executable.backward if self.synchronised else self.executable.backward_unreduced
        assert run is not None
        with torch.no_grad():
            gradients = run(*arguments)
            if not self.synchronised:
                self._defer(gradients)
                return {}
        groups = self.executable.program.gradient_groups
        reduced = {fqn for names in groups for fqn in names}
        if left := [fqn for fqn in self.runtime.pending if fqn not in reduced]:
            raise TurboCompileError(
                f"gradients of {left[0]} wait from a no_sync call, and this backward does not train it; "
                "unfreeze it, or drop them with zero_grad"
            )
        self.runtime.pending.clear()
        return {fqn: t for names, ts in zip(groups, gradients, strict=True) for fqn, t in zip(names, ts, strict=True)}

    def _defer(self, unreduced: tuple[tuple[Tensor, ...], ...]) -> None:
        pending = self.runtime.pending
        groups = self.executable.program.gradient_groups
        for names, gradients in zip(groups, unreduced, strict=True):
            for fqn, gradient in zip(names, gradients, strict=True):
                if fqn in pending:
                    pending[fqn].add_(gradient)
                else:
                    pending[fqn] = gradient.to(self.runtime.reduce_dtype, copy=True)


class _Step(torch.autograd.Function):
    """The one autograd node of a call. Its backward runs the backward graph and leaves each parameter its gradient.

    Parameters are not its inputs: handing a DTensor through autograd costs more Python than all the rest of a step. The
    node hangs on an anchor, and `_leave` does what autograd does at a leaf, hooks included.
    """

    @staticmethod
    def forward(ctx: Any, state: _State, anchor: Tensor) -> tuple[Tensor, ...]:
        results = state.forward()
        ctx.state = state
        program = state.executable.program
        still = (r for name, r in zip(program.outputs, results, strict=True) if name not in program.differentiable)
        ctx.mark_non_differentiable(*still)
        ctx.set_materialize_grads(False)
        ctx.metas = {name: r.to("meta") for name, r in zip(program.outputs, results, strict=True)}
        ctx.device = results[0].device
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[None, None]:
        state: _State = ctx.state
        program = state.executable.program
        given = {
            name: torch.zeros_like(ctx.metas[name], device=ctx.device) if tangent is None else tangent
            for name, tangent in zip(program.outputs, tangents, strict=True)
            if name in program.differentiable
        }
        with failing_together("the backward"):
            gradients = state.backward({name: state.tangent(name, t) for name, t in given.items()})
        parameters = state.runtime.sharded.parameters
        for fqn, gradient in gradients.items():
            _leave(parameters[fqn], gradient)
        return None, None


def _leave(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Accumulate this rank's part of a gradient into `parameter.grad`, calling the hooks a leaf has."""
    if gradient.dtype != parameter.dtype:
        gradient = gradient.to(parameter.dtype)
    before, after = _torch.gradient_hooks(parameter)
    if before:
        whole = _torch.dtensor_like(gradient, parameter)
        for hook in before:
            changed = hook(whole)
            whole = whole if changed is None else changed
        gradient = _torch.local_of(whole)
    if parameter.grad is None:
        parameter.grad = _torch.dtensor_like(gradient, parameter)
    else:
        _torch.local_of(parameter.grad).add_(gradient)
    for hook in after:
        hook(parameter)


# --- the model the user holds ----------------------------------------------------------------------------------------


def attach(runtime: Runtime, dead: list[Tensor]) -> None:
    """Make `runtime.model` run compiled: the same object, class and names, with a new forward and new methods."""
    model = runtime.model
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def forward(*positional: Any, **keywords: Any) -> Any:
        return runtime(**dict(zip(names, positional, strict=False)), **keywords)

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]  # trainers read its names
    model.forward = forward
    model.plan = runtime.plan
    model.no_sync = runtime.no_sync
    model.clip_grad_norm_ = runtime.clip_grad_norm_
    model.save_pretrained = runtime.save_pretrained
    model.generate = runtime.generate
    model.gather_sequence = runtime.gather_sequence
    model.gradient_checkpointing_enable = runtime.gradient_checkpointing_enable
    model.resize_token_embeddings = refuse_new_embeddings
    model.__reduce_ex__ = refuse_copies
    model._apply = runtime.stay
    zero_grad = model.zero_grad

    def zero_and_drop(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        runtime.drop_pending()

    model.zero_grad = zero_and_drop
    model.__dict__["_turbo_compile_runtime"] = runtime
    accept_full_tensors(model, runtime.sharded)
    _guard_submodules(model)
    runtime.structure.hooked()
    live = list(runtime.sharded.parameters.values())
    optimizers.watch(dead, live, lambda: bool(runtime.pending), lambda: runtime.drop_pending())


def is_compiled(model: nn.Module) -> bool:
    return "_turbo_compile_runtime" in model.__dict__


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a compiled model: its executables by signature, for inspection and benchmarks."""
    runtime: Runtime = model.__dict__["_turbo_compile_runtime"]
    return runtime


def _guard_submodules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(refuse_parts)
