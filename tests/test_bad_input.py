"""Bad input is a clear error before harm: it says what and where, reaches every rank, and costs the model nothing."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, RobertaConfig, RobertaForCausalLM

from tests.families import VOCABULARY, build, ids_of
from tests.parity import check_step, compiled, padded
from tests.world import World
from turbo_compile import PlanError, TurboCompileError, UnsupportedOp, turbo_compile
from turbo_compile.ranks import first_rank_first
from turbo_compile.runtime import runtime_of

Call = dict[str, Any]
B, S = 2, 8


def tiny() -> Any:
    return build("qwen3", layers=1)


def good() -> Call:
    ids = ids_of(B, S)
    return {"input_ids": ids, "labels": ids.clone()}


def with_label(label: int) -> Call:
    call = good()
    call["labels"][1, 3] = label
    return call


# --- turbo_compile() refuses a plan or a model, which stays as it was -------------------------------------------------

# plan -> what the message must say
PLANS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "unknown section": ({"meshes": {"fsdp": 1}}, ("meshes", "mesh")),
    "unknown key": ({"mesh": {"fdsp": 1}}, ("fdsp", "fsdp")),
    "unmatched glob": (
        {"parameters": {"model.layer.*": {"placement": "Replicate"}}},
        ("model.layer.*", "model.layers.0"),
    ),
    "unmatched block": (
        {"recompute": {"model.layers.0-3": "full"}},
        ("recompute", "no model.layers.1-3", "model.layers.0"),
    ),
    "mesh larger than the world": ({"mesh": {"fsdp": 2}}, ("mesh", "2", "1")),
    "sp": ({"mesh": {"sp": 2}}, ("sp", "2")),
    "ep": ({"mesh": {"fsdp": 2, "ep": 2}}, ("ep", "2")),
    "missing file": ("no/such/plan.yaml", ("no/such/plan.yaml",)),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_does_not_fit_is_refused_and_the_model_kept(case: str) -> None:
    plan, words = PLANS[case]
    model = tiny()
    before = {fqn: (p, p.detach().clone()) for fqn, p in model.named_parameters()}
    with pytest.raises(PlanError) as refusal:
        turbo_compile(model, plan, backend="eager")
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "forward" not in vars(model)
    for fqn, p in model.named_parameters():
        assert p is before[fqn][0] and torch.equal(p, before[fqn][1]), f"{fqn} was touched"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(TurboCompileError, match="'inductr' is unknown; it can be inductor or eager"):
        turbo_compile(tiny(), backend="inductr")


def test_what_is_no_hugging_face_model_is_refused() -> None:
    with pytest.raises(TurboCompileError, match="PreTrainedModel, not Linear"):
        turbo_compile(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


# --- a compiled model refuses a call, and the next one is right -------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return turbo_compile(tiny(), backend="eager")


@pytest.fixture(scope="module")
def expected() -> float:
    return tiny()(**good(), use_cache=False).loss.item()


def changed(**changes: Any) -> Callable[[], Call]:
    return lambda: good() | changes


# a call -> its error and what the message must say
CALLS: dict[str, tuple[Callable[[], Call], type[TurboCompileError], tuple[str, ...]]] = {
    "wrong device": (changed(labels=ids_of(B, S).to("meta")), TurboCompileError, ("labels", "meta", "cpu")),
    "label too large": (lambda: with_label(VOCABULARY), TurboCompileError, ("labels", f"{VOCABULARY}", "row 1")),
    "label negative": (lambda: with_label(-1), TurboCompileError, ("labels", "-1", "-100")),
    "labels shorter": (changed(labels=ids_of(B, S - 1)), TurboCompileError, ("labels", "(2, 7)", "(2, 8)")),
    "mask shorter": (
        changed(attention_mask=torch.ones(B, S - 1, dtype=torch.long)),
        TurboCompileError,
        ("attention_mask", "(2, 7)", "(2, 8)"),
    ),
    "positions of other rows": (
        changed(position_ids=torch.zeros(3, S, dtype=torch.long)),
        TurboCompileError,
        ("position_ids", "(3, 8)", "(2, 8)"),
    ),
    "a row without batch": (changed(input_ids=ids_of(1, S)[0]), TurboCompileError, ("input_ids", "(B, S)", "(8,)")),
    "no tokens": (changed(input_ids=ids_of(B, 0), labels=ids_of(B, 0)), TurboCompileError, ("input_ids", "(2, 0)")),
    "no ids": (lambda: {"labels": ids_of(B, S)}, TurboCompileError, ("input_ids", "labels")),
    "a list": (changed(input_ids=[[3, 4], [5, 6]]), TurboCompileError, ("input_ids", "tensor", "list")),
    "mask 3-D": (changed(attention_mask=torch.ones(B, S, S)), UnsupportedOp, ("attention_mask", "(2, 8, 8)", "2-D")),
    "mask 4-D": (changed(attention_mask=torch.ones(B, 1, S, S)), UnsupportedOp, ("attention_mask", "(2, 1, 8, 8)")),
    "embeddings": (changed(inputs_embeds=torch.zeros(B, S, 32)), UnsupportedOp, ("inputs_embeds", "input_ids")),
    "cache": (changed(past_key_values=object()), UnsupportedOp, ("past_key_values", "cache")),
    "hidden states": (changed(output_hidden_states=True), UnsupportedOp, ("output_hidden_states",)),
    "attentions": (changed(output_attentions=True), UnsupportedOp, ("output_attentions",)),
    "logits to keep": (changed(logits_to_keep=1), UnsupportedOp, ("logits_to_keep", "slice")),
    "documents of other lengths": (
        changed(cu_seq_lens_q=torch.tensor([0, 5, 12]), cu_seq_lens_k=torch.tensor([0, 5, 12])),
        TurboCompileError,
        ("cu_seq_lens_q", "16", "[0, 5, 12]"),
    ),
    "attention across documents": (
        changed(cu_seq_lens_q=torch.tensor([0, 5, 16]), cu_seq_lens_k=torch.tensor([0, 8, 16])),
        UnsupportedOp,
        ("cu_seq_lens_q", "cu_seq_lens_k"),
    ),
    "unknown argument": (changed(token_type_ids=ids_of(B, S)), TurboCompileError, ("token_type_ids", "input_ids")),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call_is_refused_and_the_next_one_is_right(model: Any, expected: float, case: str) -> None:
    call, kind, words = CALLS[case]
    with pytest.raises(kind) as refusal:
        model(**call())
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert trained(model) == pytest.approx(expected, abs=1e-5)


def trained(model: Any) -> float:
    """The loss of a good batch, forward and backward."""
    model.zero_grad()
    loss = model(**good()).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    return float(loss.item())


def test_a_compiled_model_is_refused(model: Any, expected: float) -> None:
    with pytest.raises(TurboCompileError, match="already compiled"):
        turbo_compile(model, backend="eager")
    assert trained(model) == pytest.approx(expected, abs=1e-5)


def test_generate_says_what_to_do(model: Any) -> None:
    with pytest.raises(TurboCompileError, match=r"cache.*save_pretrained"):
        model.generate(ids_of(1, 4))


def test_a_part_of_a_compiled_model_is_refused(model: Any, expected: float) -> None:
    with pytest.raises(TurboCompileError):
        model.model(input_ids=ids_of(B, S))
    assert trained(model) == pytest.approx(expected, abs=1e-5)


def test_a_second_backward_is_refused(model: Any, expected: float) -> None:
    loss = model(**good()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(TurboCompileError, match="backward a second time"):
        loss.backward()
    assert trained(model) == pytest.approx(expected, abs=1e-5)


# --- one rank's bad call stops all, with its reason -------------------------------------------------------------------


@functools.cache
def shared_model() -> Any:
    """The compiled model of a rank: it outlives every refused call of this file."""
    return turbo_compile(tiny(), backend="eager")


def call_of(name: str) -> Call:
    ids = ids_of(B, S)
    return {
        "good": good,
        "label outside": lambda: with_label(VOCABULARY + 5),
        "wrong device": lambda: good() | {"labels": ids.to("meta")},
        "no labels": lambda: {"input_ids": ids},
        "positions": lambda: good() | {"position_ids": torch.arange(S).expand(B, S)},
        "count": lambda: good() | {"num_items_in_batch": torch.tensor(14)},
        "mask": lambda: good() | {"attention_mask": torch.ones(B, S, dtype=torch.long)},
        "longer": lambda: {"input_ids": ids_of(B, S + 3), "labels": ids_of(B, S + 3)},
        "logits": lambda: good() | {"return_logits": True},
        "no logits": lambda: good() | {"return_logits": False},
    }[name]()


def told(calls: list[str], evaluating: int | None = None) -> tuple[str, str, float]:
    """Each rank makes its call of `calls`: the error's class, what it says, and the loss of a good batch afterwards."""
    model, rank = shared_model(), dist.get_rank()
    model.train(rank != evaluating)
    kind = said = ""
    try:
        model(**call_of(calls[rank]))
    except TurboCompileError as error:
        kind, said = type(error).__name__, str(error)
    model.train()
    return kind, said, trained(model)


# what rank 0 and rank 1 call -> what rank 0 is told, what rank 1 is
ONE_BAD_RANK = {
    "label outside": (["good", "label outside"], "rank 1 stopped: labels hold 106 (row 1", "outside the vocabulary"),
    "wrong device": (["wrong device", "good"], "labels is on meta", "rank 0 stopped: labels is on meta"),
    "two reasons": (["label outside", "wrong device"], "outside the vocabulary", "labels is on meta"),
    "labels on one rank": (["good", "no labels"], "rank 1 with input_ids (train)", "rank 0 with input_ids, labels"),
    "positions on one rank": (["positions", "good"], "position_ids", "position_ids"),
    "count on one rank": (["good", "count"], "num_items_in_batch", "num_items_in_batch"),
    "logits on one rank": (["logits", "no logits"], "(train, logits)", "(train, logits)"),
}


@pytest.mark.parametrize("case", ONE_BAD_RANK)
def test_one_ranks_bad_call_stops_all(world: World, expected: float, case: str) -> None:
    calls, *words = ONE_BAD_RANK[case]
    for (kind, said, loss), word in zip(world.run(told, calls), words, strict=True):
        assert kind in ("RankError", "TurboCompileError") and word in said, (kind, said)
        assert loss == pytest.approx(expected, abs=1e-5)


def test_ranks_in_different_modes_stop(world: World, expected: float) -> None:
    for kind, said, loss in world.run(told, ["good", "good"], 1):
        assert kind == "RankError" and "(train)" in said and "(eval)" in said, said
        assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("calls", [["mask", "good"], ["longer", "good"]], ids=["mask on one rank", "lengths differ"])
def test_ranks_may_differ_in_what_only_they_need(world: World, expected: float, calls: list[str]) -> None:
    for kind, said, loss in world.run(told, calls):
        assert (kind, said) == ("", "")
        assert loss == pytest.approx(expected, abs=1e-5)


def mesh_refused(plan: Call) -> str:
    try:
        turbo_compile(tiny(), plan, backend="eager")
    except PlanError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 4}, {"dp": 2, "fsdp": 2}])
def test_a_mesh_that_is_not_the_world_is_refused_on_all_ranks(world: World, mesh: Call) -> None:
    for said in world.run(mesh_refused, {"mesh": mesh}):
        assert "mesh" in said and "2" in said and said != "accepted"


# --- a rank that dies, hangs or fails: the others stop in time, with its reason ---------------------------------------

TIMEOUT_S = 3
FAILING = {"forward": 1, "backward": 1, "compile": 0, "hang": 1, "die": 1, "compile and die": 0}


@pytest.fixture(scope="module")
def mortals() -> Iterator[World]:
    """Ranks of their own: they leave broken groups and dead processes behind."""
    ranks = World(2)
    yield ranks
    ranks.stop()


def impatient() -> None:
    """A process group that waits only `TIMEOUT_S` for a rank."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    turn = store.add(f"impatient/{rank}", 1)
    dist.destroy_process_group()
    fresh = dist.PrefixStore(f"impatient/{turn}", store)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))


def raises(*_: Any, **__: Any) -> Tensor:
    raise ValueError("planted")


def stopped(how: str) -> tuple[str, str, float]:
    """One rank fails as told during a call; the error this rank sees, and after how many seconds."""
    impatient()
    rank, model = dist.get_rank(), turbo_compile(tiny(), backend="eager")
    if not how.startswith("compile"):
        trained(model)
        dist.barrier()
    began = time.monotonic()
    try:
        fail(model, how if rank == FAILING[how] or how == "compile and die" else "")
        trained(model)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def fail(model: Any, how: str) -> None:
    executables = runtime_of(model).executables
    match how:
        case "die":
            os._exit(7)
        case "hang":
            time.sleep(TIMEOUT_S + 2)
        case "forward":
            executables.update({signature: replace(e, forward=raises) for signature, e in executables.items()})
        case "backward":
            executables.update({signature: replace(e, backward=raises) for signature, e in executables.items()})
        case "compile and die":  # on both ranks: rank 0 goes first
            quick = timedelta(seconds=0.2)
            runtime_of(model).build = lambda _: first_rank_first(lambda: os._exit(7), quick)  # type: ignore[assignment,return-value]
        case "compile":
            runtime_of(model).build = lambda _: first_rank_first(raises)  # type: ignore[assignment,return-value]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("forward", "rank 1 failed: ValueError: planted"),
        ("backward", "rank 1 failed: ValueError: planted"),
        ("compile", "rank 0 failed: ValueError: planted"),
        ("hang", "another rank is gone or did not answer in time"),
        ("die", "another rank is gone or did not answer in time"),  # the ranks start afresh after it
        ("compile and die", "rank 0 has shown no sign of life for 2 s while it compiled"),
    ],
)
def test_a_rank_that_fails_stops_the_others_in_time(mortals: World, how: str, words: str) -> None:
    outcomes = mortals.outcomes(stopped, how)
    failing, other = FAILING[how], 1 - FAILING[how]
    if "die" in how:
        assert not outcomes[failing][0] and "exit code 7" in outcomes[failing][1]
    assert outcomes[other][0], outcomes[other][1]
    kind, said, seconds = outcomes[other][1]
    assert kind == "RankError" and words in said, (kind, said)
    assert seconds < TIMEOUT_S + 10  # the machine may be busy


# --- models that read more than attention does ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_next", "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet) carries a state"),
        ("bailing_hybrid", "model.layers.0.self_attn (BailingHybridDeltaAttention) carries a state"),
    ],
)
def test_recurrences_are_refused_by_name(family: str, words: str) -> None:
    model = build(family, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedOp) as caught:
        turbo_compile(model, backend="eager")(input_ids=ids_of(1, 8), labels=ids_of(1, 8))
    assert words in str(caught.value) and "1 of the 2 blocks" in str(caught.value)


def test_positions_counted_from_the_padding_token_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(UnsupportedOp, match="position_embeddings of RobertaForCausalLM counts positions"):
        turbo_compile(RobertaForCausalLM(RobertaConfig(vocab_size=VOCABULARY, is_decoder=True, **sizes)))


def test_left_padding_of_a_model_whose_positions_read_the_mask_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 48, "dropout": 0.0}
    config = OPTConfig(vocab_size=VOCABULARY, word_embed_proj_dim=32, max_position_embeddings=64, **sizes)
    reference = OPTForCausalLM(config).train()
    model = compiled(reference)
    check_step(reference, model, padded("right", 12))
    with pytest.raises(UnsupportedOp, match="pad on the right"):
        model(**padded("left", 12))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": torch.full((1, 8), VOCABULARY)}, "input_ids hold 101, outside the vocabulary of 101"),
        ({"input_ids": torch.ones(1, 8)}, "token ids are integers"),
        ({"labels": torch.ones(1, 8)}, "labels are token ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 6, 3, 8])}, "must not decrease"),
    ],
)
def test_numbers_that_are_no_tokens_are_refused(changes: dict[str, Tensor], words: str) -> None:
    model = compiled(tiny())
    batch = {"input_ids": torch.arange(3, 11)[None], "labels": torch.arange(3, 11)[None]}
    with pytest.raises(TurboCompileError, match=words):
        model(**(batch | changes))
    short = {key: value.to(torch.int32) for key, value in batch.items()}
    assert model(**short).loss.item() == model(**batch).loss.item()


def test_what_waits_from_no_sync_is_not_lost() -> None:
    model = compiled(tiny())
    batch = {"input_ids": torch.arange(3, 11)[None], "labels": torch.arange(3, 11)[None]}
    with model.no_sync():
        model(**batch).loss.backward()
    with pytest.raises(TurboCompileError, match="clip_grad_norm_ while gradients"):
        model.clip_grad_norm_(1.0)
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(TurboCompileError, match="wait from a no_sync call"):
        model(**batch).loss.backward()
    model.lm_head.weight.requires_grad_(True)
    model.zero_grad()
    model(**batch).loss.backward()
    model.clip_grad_norm_(1.0)


def test_a_forward_or_a_loss_of_the_models_own_is_refused() -> None:
    for name in ("forward", "loss_function"):
        model = tiny()
        setattr(model, name, lambda *_, **__: None)
        with pytest.raises(TurboCompileError, match="of its own"):
            turbo_compile(model, backend="eager")


def test_a_checkpoint_that_cannot_be_written_stops_all(world: World, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    first, second = world.run(_unwritable, str(file))
    assert first != "RankError" and second == "RankError"


def _unwritable(path: str) -> str:
    model = compiled(tiny(), {"mesh": {"fsdp": 2}})
    try:
        model.save_pretrained(f"{path}/folder")
    except Exception as error:
        return type(error).__name__
    return "written"
