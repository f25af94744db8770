"""The model a user holds: accumulation, clipping, optimizers, state dicts, dropout, modes; alone and on two ranks.

Each `check` is a function that every rank calls; the ranks share one compiled Llama, its weights reset between checks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.families import build, ids_of
from tests.parity import check_step, compiled, gradient_errors, own_rows, plain, ragged, relative, run_eager, whole
from tests.world import World
from turbo_compile import TurboCompileError, UnsupportedOp, turbo_compile
from turbo_compile.runtime import runtime_of


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@functools.cache
def _pair(**changes: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    reference = build("llama", **changes)
    return reference, compiled(reference), copy.deepcopy(reference.state_dict())


def fresh(**changes: Any) -> tuple[Any, Any]:
    """The eager model and the compiled one, as if just made."""
    reference, model, weights = _pair(**changes)
    for each in (reference, model):
        each.load_state_dict(weights)
        each.requires_grad_(True)
        each.zero_grad()
        each.train()
    return reference, model


def backward(model: Any, batch: dict[str, Any], rows: Callable[..., Any] = own_rows, **more: Any) -> float:
    loss = model(**rows(batch), **more).loss
    loss.backward()
    return loss.item()


def check_gradients(reference: Any, model: Any, tolerance: float = 1e-5) -> None:
    wrong = {fqn: error for fqn, error in gradient_errors(reference, model).items() if not error < tolerance}
    assert not wrong, wrong


def check_weights(reference: Any, model: Any, tolerance: float = 1e-5) -> None:
    ours = dict(model.named_parameters())
    for fqn, p in reference.named_parameters():
        got = whole(ours[fqn].detach())
        torch.testing.assert_close(got, p.detach(), rtol=0, atol=tolerance, msg=lambda m, f=fqn: f"{f}: {m}")


# --- accumulation -----------------------------------------------------------------------------------------------------


def accumulation() -> None:
    """Three calls, two of them deferred, are one eager backward over all their rows."""
    reference, model = fresh()
    parts = [plain(16), ragged(16), plain(16)]
    parts[2] = {key: value.flip(1) for key, value in parts[2].items()}
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    total = int((joined["labels"][:, 1:] != -100).sum())
    expected = run_eager(reference, joined).loss
    expected.backward()
    loss = 0.0
    with model.no_sync():
        loss += backward(model, parts[0], num_items_in_batch=total)
        with model.no_sync():
            loss += backward(model, parts[1], num_items_in_batch=total)
        assert all(p.grad is None for p in model.parameters())
    loss += backward(model, parts[2], num_items_in_batch=total)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    check_gradients(reference, model)
    assert not runtime_of(model).pending


def deferring_leaves_gradients_alone() -> None:
    reference, model = fresh()
    backward(model, plain())
    before = {fqn: whole(p.grad).clone() for fqn, p in model.named_parameters()}
    with model.no_sync():
        backward(model, ragged())
    assert all(torch.equal(whole(p.grad), before[fqn]) for fqn, p in model.named_parameters())
    backward(model, plain(18))
    for batch in (plain(), ragged(), plain(18)):
        run_eager(reference, batch).loss.backward()
    check_gradients(reference, model)


def pending_gradients() -> None:
    """A step while gradients wait is an error and changes nothing; zeroing, either way, drops them."""
    reference, model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    drops = (model.zero_grad, optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False))
    for drop in drops:
        with model.no_sync():
            backward(model, plain())
        with pytest.raises(TurboCompileError, match="pending"):
            optimizer.step()
        check_weights(reference, model, 0.0)
        drop()
        check_step(reference, model, ragged())
        optimizer.zero_grad()


def two_forwards_before_a_backward() -> None:
    reference, model = fresh()
    batches = (plain(16), ragged(23))
    outs = [model(**own_rows(batch)) for batch in batches]
    (2.0 * outs[1].loss + outs[0].loss).backward()
    (2.0 * run_eager(reference, batches[1]).loss + run_eager(reference, batches[0]).loss).backward()
    check_gradients(reference, model)
    for each in (reference, model):
        each.zero_grad()
    first, second = (model(**own_rows(batch)).loss for batch in batches)
    first.backward()
    second.backward()
    for batch in batches:
        run_eager(reference, batch).loss.backward()
    check_gradients(reference, model)


def a_second_backward_is_an_error() -> None:
    reference, model = fresh()
    loss = model(**own_rows(plain())).loss
    loss.backward(retain_graph=True)
    with pytest.raises(TurboCompileError, match="backward a second time"):
        loss.backward()
    check_step(reference, model, plain())


def gradients_accumulate() -> None:
    reference, model = fresh()
    for batch in (plain(), ragged()):
        backward(model, batch)
        run_eager(reference, batch).loss.backward()
    check_gradients(reference, model)


# --- what is trained --------------------------------------------------------------------------------------------------


def requires_grad_flips() -> None:
    """What is frozen between calls gets no gradient from the next call on, and gets one again when it is thawed."""
    reference, model = fresh()
    for each in (reference, model):
        each.model.embed_tokens.requires_grad_(False)
        each.model.layers[0].requires_grad_(False)
        each.model.layers[1].mlp.requires_grad_(False)
    check_step(reference, model, plain())
    assert model.model.layers[0].mlp.up_proj.weight.grad is None
    for each in (reference, model):
        each.requires_grad_(True)
    check_step(reference, model, ragged())


def ranks_agree_on_what_is_trained() -> None:
    reference, model = fresh()
    model.model.layers[rank()].requires_grad_(False)
    if ranks() > 1:
        with pytest.raises(TurboCompileError, match=r"rank 1 with .*frozen from model\.layers\.1"):
            model(**own_rows(plain()))
    model.requires_grad_(True)
    check_step(reference, model, plain())


def nothing_to_train() -> None:
    reference, model = fresh()
    model.requires_grad_(False)
    out = model(**own_rows(plain()))
    assert not out.loss.requires_grad
    assert out.loss.item() == pytest.approx(run_eager(reference, plain()).loss.item(), abs=1e-5)


def hooks_see_gradients() -> None:
    reference, model = fresh()
    seen: list[str] = []
    weights = model.model.layers[0].mlp.up_proj.weight, model.model.norm.weight
    handles = [
        weights[0].register_hook(lambda g: g * 2),
        weights[1].register_post_accumulate_grad_hook(lambda p: seen.append(str(type(p.grad).__name__))),
    ]
    backward(model, plain())
    run_eager(reference, plain()).loss.backward()
    reference.model.layers[0].mlp.up_proj.weight.grad *= 2
    check_gradients(reference, model)
    assert seen == ["DTensor"]
    for handle in handles:
        handle.remove()


# --- clipping ---------------------------------------------------------------------------------------------------------


def clipping() -> None:
    reference, model = fresh()
    for norm_type, limit in ((2.0, 0.5), (float("inf"), 0.01), (2.0, 1e9), (3.0, 0.5), (1, 0.5)):
        check_step(reference, model, ragged())
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type)
        norm = model.clip_grad_norm_(limit, norm_type)
        assert type(norm) is Tensor and norm.dim() == 0
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
        check_gradients(reference, model)
    model.zero_grad()
    assert model.clip_grad_norm_(1.0).item() == 0.0


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=1e-2),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=1e-2),
}


def optimizer_steps(name: str) -> None:
    reference, model = fresh()
    optimizers = [OPTIMIZERS[name](list(each.parameters())) for each in (reference, model)]
    for batch in (plain(16), ragged(16)):
        check_step(reference, model, batch, tolerance=1e-2 if name == "Muon" else 1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_weights(reference, model, 1e-3 if name == "Muon" else 1e-4)  # Muon orthogonalises in bf16
    optimizers[1].load_state_dict(optimizers[1].state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_on_two_ranks(world: World, name: str) -> None:
    world.run(optimizer_steps, name)


def optimizers_that_cannot() -> None:
    reference, model = fresh()
    for kind in (torch.optim.Adafactor, torch.optim.Rprop):
        optimizer = kind(model.parameters())
        backward(model, plain())
        with pytest.raises(TurboCompileError, match=f"{kind.__name__} does not work on sharded parameters"):
            optimizer.step()
        optimizer.zero_grad()
    check_weights(reference, model, 0.0)


def optimizers_of_plain_models_are_left_alone() -> None:
    fresh()
    other = nn.Linear(4, 4)
    for kind in (torch.optim.Adafactor, torch.optim.Rprop):
        optimizer = kind(other.parameters())
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- weights in and out -----------------------------------------------------------------------------------------------


def state_dict_round_trip() -> None:
    reference, model = fresh()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert list(state) == list(reference.state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert model.load_state_dict(state).missing_keys == []
    check_weights(reference, model, 0.0)
    check_step(reference, model, plain())


def loads_full_tensors() -> None:
    reference, model = fresh()
    other = build("llama", seed=7)
    for each in (reference, model):
        assert each.load_state_dict(other.state_dict()).missing_keys == []
    check_weights(other, model, 0.0)
    check_step(reference, model, plain())
    partial = {"model.norm.weight": torch.full((32,), 0.5)}
    missing = model.load_state_dict(partial, strict=False).missing_keys
    assert len(missing) == len(reference.state_dict()) - 1
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(other.state_dict() | {"stranger": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"model.norm.weight": torch.ones(31)}, strict=False)
    with pytest.raises(TurboCompileError, match="assign"):
        model.load_state_dict(other.state_dict(), assign=True)


def a_tied_key_may_be_missing() -> None:
    reference, model = fresh(tie_word_embeddings=True)
    other = build("llama", seed=7, tie_word_embeddings=True)
    for absent in ("lm_head.weight", "model.embed_tokens.weight"):
        fresh(tie_word_embeddings=True)
        state = {key: value for key, value in other.state_dict().items() if key != absent}
        assert model.load_state_dict(state).missing_keys == []
        check_weights(other, model, 0.0)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    reference.load_state_dict(other.state_dict())
    check_step(reference, model, plain())


def moved_to_where_it_is() -> None:
    """Trainers call `model.to(device)`: nothing moves, and what would have to is refused."""
    reference, model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = list(model.parameters())
    assert model.to("cpu").float() is model
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for cast in (model.bfloat16, lambda: model.to(torch.float64), lambda: model.to("meta")):
        with pytest.raises(TurboCompileError, match="stay torch.float32 on cpu"):
            cast()
    check_step(reference, model, plain())
    with model.no_sync():
        backward(model, plain())
    with pytest.raises(TurboCompileError, match="pending"):
        optimizer.step()


def saves(folder: str) -> None:
    reference, model = fresh()
    check_step(reference, model, plain())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    model.save_pretrained(folder)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    check_step(reference, model, ragged())


def check_saved(folder: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    reference = build("llama")
    run_eager(reference, plain()).loss.backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    check_weights(reference, loaded)
    assert type(loaded) is type(reference)


def test_save_pretrained(world: World, tmp_path: Path) -> None:
    world.run(saves, str(tmp_path / "two"))
    check_saved(str(tmp_path / "two"))
    saves(str(tmp_path / "one"))
    check_saved(str(tmp_path / "one"))


def one_process_initialisation(family: str, **changes: Any) -> Any:
    with torch.device("meta"):
        model = build(family, **changes)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.initialize_weights()
    model.tie_weights()
    return model


def meta_initialisation() -> None:
    """Every rank's random state differs; the values are those of one process under rank 0's seed."""
    for family, changes in (("llama", {"tie_word_embeddings": True}), ("gpt_oss", {}), ("gpt2", {}), ("gemma3", {})):
        expected = one_process_initialisation(family, **changes)
        with torch.device("meta"):
            model = build(family, **changes)
        torch.manual_seed(5 + rank())
        turbo_compile(model, backend="eager")
        check_weights(expected, model, 0.0)
        for name, buffer in expected.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), buffer)
        if model.config.tie_word_embeddings:
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def meta_model_trains() -> None:
    reference = build("llama")
    with torch.device("meta"):
        model = build("llama")
    turbo_compile(model, backend="eager")
    model.load_state_dict(reference.state_dict())
    check_step(reference, model, plain())


# --- dtypes -----------------------------------------------------------------------------------------------------------


def computing_in_half_precision(folder: str) -> None:
    """fp32 masters, bf16 compute: gradients and weights are fp32; a model that came in bf16 goes out in bf16."""
    weights = build("qwen3").bfloat16()
    reference = copy.deepcopy(weights).float()
    plan = {"mesh": {"fsdp": ranks()}, "dtype": {"compute": "bf16", "master": "fp32", "reduce": "fp32"}}
    model = turbo_compile(weights, plan, backend="eager")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    backward(model, plain())
    run_eager(reference, plain()).loss.backward()
    errors = gradient_errors(reference, model)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert 1e-4 < max(errors.values()) < 0.2, "computed in bf16, and right"
    model.save_pretrained(folder)


def test_dtypes(world: World, tmp_path: Path) -> None:
    world.run(computing_in_half_precision, str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    check_weights(build("qwen3").bfloat16(), loaded, 0.0)
    assert loaded.config.dtype == torch.bfloat16


# --- calls ------------------------------------------------------------------------------------------------------------


def items_in_batch() -> None:
    reference, model = fresh()
    expected = run_eager(reference, ragged()).loss.item() * int((ragged()["labels"][:, 1:] != -100).sum()) / 100
    for count in (100, 100.0, torch.tensor(100), torch.tensor([100])):
        assert backward(model, ragged(), num_items_in_batch=count) == pytest.approx(expected, abs=1e-5)
    assert len([s for s, _ in runtime_of(model).executables if s.loss and s.training]) <= 4, "no number is compiled in"


def no_valid_token() -> None:
    _, model = fresh()
    batch = plain() | {"labels": torch.full((4, 16), -100)}
    assert backward(model, batch) == 0.0
    for p in model.parameters():
        assert not whole(p.grad).any()


def ranks_may_differ_in_size() -> None:
    """Rows of other lengths and counts on each rank, and one without a valid token: still the mean over all tokens."""
    reference, model = fresh()
    for sizes in (((1, 12), (3, 20)), ((2, 9), (2, 16))):
        parts = [{"input_ids": ids_of(*size, seed=i)} for i, size in enumerate(sizes[: ranks()])]
        for part in parts:
            part["labels"] = part["input_ids"].clone()
        if sizes[0][0] == 2 and ranks() > 1:
            parts[0]["labels"][:] = -100
        total = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        reference.zero_grad()
        model.zero_grad()
        losses = [run_eager(reference, part | {"num_items_in_batch": total}).loss for part in parts]
        sum(losses[1:], losses[0]).backward()
        loss = backward(model, parts[rank()], rows=lambda part: part)
        assert loss == pytest.approx(sum(loss.item() for loss in losses), abs=1e-5)
        check_gradients(reference, model)


def a_mask_on_one_rank() -> None:
    """A padding mask that masks nothing says nothing: ranks need not agree to pass one."""
    reference, model = fresh()
    mask = {"attention_mask": torch.ones(4, 16)} if rank() == 0 else {}
    reference.zero_grad()
    loss = backward(model, plain() | mask)
    expected = run_eager(reference, plain()).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    check_gradients(reference, model)


def scaled_losses() -> None:
    """The caller's tangent is used as it is."""
    reference, model = fresh()
    (model(**own_rows(plain())).loss * 0.125).backward()
    (run_eager(reference, plain()).loss * 0.125).backward()
    check_gradients(reference, model)


def shifted_labels() -> None:
    reference, model = fresh()
    batch = ragged(16)
    shifted = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    loss = backward(model, batch | {"shift_labels": shifted})
    expected = run_eager(reference, ragged(16)).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    check_gradients(reference, model)


def logits_and_losses_of_the_caller() -> None:
    """Without labels the logits are differentiable; gradients of the caller's losses are averaged over ranks."""
    reference, model = fresh()
    batch = plain()
    logits = run_eager(reference, {"input_ids": batch["input_ids"]}).logits
    out = model(input_ids=own_rows(batch)["input_ids"])
    assert out.loss is None and out.logits.requires_grad
    torch.testing.assert_close(out.logits, own_rows({"logits": logits})["logits"], rtol=0, atol=1e-4)
    out.logits.float().square().mean().backward()
    logits.float().square().mean().backward()
    check_gradients(reference, model)


def logits_beside_the_loss() -> None:
    reference, model = fresh()
    expected = own_rows({"logits": run_eager(reference, plain()).logits.detach()})["logits"]
    assert model(**own_rows(plain())).logits is None
    out = model(**own_rows(plain()), return_logits=True)
    assert not out.logits.requires_grad
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-4)
    out.loss.backward()
    run_eager(reference, plain()).loss.backward()
    check_gradients(reference, model)


def evaluation() -> None:
    """In eval and under no_grad, with labels and without, logits and loss are eager's and nothing is kept."""
    reference, model = fresh()
    reference.eval()
    model.eval()
    batch = ragged(16)
    expected = run_eager(reference, batch)
    logits = own_rows({"logits": expected.logits.detach()})["logits"]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for keys in (("input_ids",), ("input_ids", "labels")):
                out = model(**own_rows({key: batch[key] for key in keys}))
                torch.testing.assert_close(out.logits, logits, rtol=0, atol=1e-4)
                assert not out.logits.requires_grad
                assert (out.loss is None) == (keys == ("input_ids",))
            assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    backward(model, batch)  # with gradients: eval is no bar to training
    expected.loss.backward()
    check_gradients(reference, model)


def outputs_as_eager_gives_them() -> None:
    reference, model = fresh()
    ids = own_rows(plain())["input_ids"]
    assert type(model(input_ids=ids)) is type(run_eager(reference, {"input_ids": ids}))
    as_tuple = model(input_ids=ids, labels=ids, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == 1 and as_tuple[0].dim() == 0
    assert model(ids, labels=ids).loss.item() == pytest.approx(as_tuple[0].item())


def the_same_object() -> None:
    reference = build("llama")
    model = turbo_compile(copy.deepcopy(reference), backend="eager")
    assert type(model) is type(reference) and model.config.to_dict() == reference.config.to_dict()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in reference.named_modules()]
    plain_model = build("llama")
    assert turbo_compile(plain_model, backend="eager") is plain_model


def what_is_refused() -> None:
    reference, model = fresh()
    ids = own_rows(plain())["input_ids"]
    with pytest.raises(TurboCompileError, match="generate.*save_pretrained"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(TurboCompileError, match="LlamaModel|LlamaDecoderLayer|call the whole model"):
        model.model(input_ids=ids)
    with pytest.raises(TurboCompileError, match="call the whole model"):
        model.lm_head(torch.ones(1, 32))
    with pytest.raises(TurboCompileError, match="recompute"):
        model.gradient_checkpointing_enable()
    for switch in ("output_hidden_states", "output_attentions"):
        with pytest.raises(UnsupportedOp, match=switch):
            model(input_ids=ids, **{switch: True})
    with pytest.raises(UnsupportedOp, match="inputs_embeds"):
        model(inputs_embeds=torch.ones(2, 4, 32))
    check_step(reference, model, plain())


def early_optimizer() -> None:
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    turbo_compile(model, backend="eager")
    with pytest.raises(TurboCompileError, match="made before turbo_compile"):
        optimizer.step()


def checkpointing_asked_before_means_full_recompute() -> None:
    reference = build("llama")
    eager = copy.deepcopy(reference)
    reference.gradient_checkpointing_enable()
    model = turbo_compile(reference, backend="eager")
    check_step(eager, model, plain())
    program = next(iter(runtime_of(model).executables.values())).program
    assert any(name.endswith("_full") for name in program.computes)


def autocast_changes_nothing() -> None:
    """The plan says what is computed in which dtype; a caller's autocast does not."""
    reference, model = fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**own_rows(plain())).loss
    loss.backward()
    expected = run_eager(reference, plain()).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    check_gradients(reference, model)


# --- a model that changes after it was compiled -----------------------------------------------------------------------


def changes_that_would_be_lost_are_refused() -> None:
    _, model = fresh()
    batch = own_rows(plain())
    model(**batch).loss.backward()
    mlp = model.model.layers[0].mlp
    kept = mlp.down_proj
    mlp.down_proj = torch.nn.Linear(kept.in_features, kept.out_features, bias=False)
    with pytest.raises(TurboCompileError, match="layers.0.mlp.down_proj was replaced"):
        model(**batch)
    mlp.down_proj = kept
    handle = mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(TurboCompileError, match="a hook was registered on model.layers.0.mlp"):
        model(**batch)
    handle.remove()
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TurboCompileError, match="cannot be copied or pickled"):
            refused(model)
    with pytest.raises(TurboCompileError, match="resize them before"):
        model.resize_token_embeddings(7)
    model(**batch).loss.backward()


def a_step_between_forward_and_backward_is_an_error() -> None:
    _, model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (model(**own_rows(plain())).loss for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(TurboCompileError, match="weights changed between"):
        second.backward()


def forward_names_its_arguments() -> None:
    _, model = fresh()
    assert {"input_ids", "labels"} <= set(inspect.signature(model.forward).parameters)


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropout_of_one_module_may_change() -> None:
    model = compiled(build("gpt2", resid_pdrop=0.3, embd_pdrop=0.0, attn_pdrop=0.0))
    batch = {"input_ids": ids_of(2, 12), "labels": ids_of(2, 12)}
    assert model(**batch).loss.item() != model(**batch).loss.item()
    for block in model.transformer.h:
        block.attn.resid_dropout.p = 0.0
        block.mlp.dropout.eval()
    assert model(**batch).loss.item() == model(**batch).loss.item()


def dropout() -> list[Tensor]:
    """The seed decides: same seed, same loss, whatever is drawn in between; rows and calls differ; eval has none."""
    drops = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    reference = build("gpt2", **drops)
    model = compiled(reference)
    row = ids_of(1, 12).expand(2, -1)

    def seeded(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [model(input_ids=row, labels=row).loss.item() for _ in range(2)]

    first = seeded(11)
    assert first == seeded(11) and first != seeded(12)
    assert first[0] != first[1], "two calls draw different masks"
    logits = model(input_ids=row, labels=row, return_logits=True).logits
    assert relative(logits[0], logits[1]) > 0.1, "equal rows draw different masks"
    model.eval()
    reference.eval()
    with torch.no_grad():
        out = model(input_ids=row, labels=row)
        eager = run_eager(reference, {"input_ids": row, "labels": row}).loss.item()
        assert out.loss.item() == pytest.approx(eager, abs=1e-5)
    return [logits[0].detach()]


CHECKS = [
    accumulation,
    deferring_leaves_gradients_alone,
    pending_gradients,
    two_forwards_before_a_backward,
    a_second_backward_is_an_error,
    gradients_accumulate,
    requires_grad_flips,
    ranks_agree_on_what_is_trained,
    nothing_to_train,
    hooks_see_gradients,
    clipping,
    optimizers_that_cannot,
    optimizers_of_plain_models_are_left_alone,
    state_dict_round_trip,
    loads_full_tensors,
    a_tied_key_may_be_missing,
    moved_to_where_it_is,
    meta_initialisation,
    meta_model_trains,
    items_in_batch,
    no_valid_token,
    ranks_may_differ_in_size,
    a_mask_on_one_rank,
    scaled_losses,
    shifted_labels,
    logits_and_losses_of_the_caller,
    logits_beside_the_loss,
    evaluation,
    outputs_as_eager_gives_them,
    the_same_object,
    what_is_refused,
    early_optimizer,
    checkpointing_asked_before_means_full_recompute,
    autocast_changes_nothing,
    changes_that_would_be_lost_are_refused,
    a_step_between_forward_and_backward_is_an_error,
    forward_names_its_arguments,
    dropout_of_one_module_may_change,
    dropout,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_alone(check: Callable[[], Any]) -> None:
    check()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(world: World, check: Callable[[], Any]) -> None:
    world.run(check)
