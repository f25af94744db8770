"""Sequence parallelism: each rank a chunk of every row, numbers equal to those of eager on whole rows.

Every family under every mesh is `python bench/families.py --meshes 1x2,2x2,1x4`.
"""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.families import FAMILIES, MIXTURES, WINDOW, WITH_ROUTER_LOSS, build, ids_of
from tests.parity import (
    check_documents,
    check_step,
    compiled,
    gradient_errors,
    packed,
    padded,
    plain,
    ragged,
    run_eager,
)
from tests.simulated import Simulation
from tests.world import World
from turbo_compile import collectives
from turbo_compile.api import trace
from turbo_compile.boundaries.sequence import MODEL_ENTRY, cut, own_length
from turbo_compile.capture import Signature
from turbo_compile.dtypes import choose_dtypes
from turbo_compile.errors import InvalidProgram, RankError
from turbo_compile.ir.program import Sliced
from turbo_compile.ir.verify import verify
from turbo_compile.kernels import heads
from turbo_compile.kernels.heads import Heads
from turbo_compile.plans.plan import Plan
from turbo_compile.runtime import runtime_of

# --- families --------------------------------------------------------------------------------------------------------


MESHES = ({"sp": 2}, {"fsdp": 2, "sp": 2}, {"sp": 4})


@pytest.mark.parametrize(("family", "mesh"), list(zip(FAMILIES, cycle(MESHES), strict=False)))
def test_every_family(family: str, mesh: dict[str, int]) -> None:
    ranks = Simulation(build(family, **_router(family)), {"mesh": mesh})
    for batch in (plain(16), padded("left", 15)):
        ranks.check_step(batch)
    if family not in MIXTURES:
        ranks.check_documents(packed(21))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_two_chunks(world: World, family: str) -> None:
    world.run(_family, family, {"mesh": {"sp": 2}})


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("gemma3", {"mesh": {"fsdp": 2, "sp": 2}, "recompute": "selective", "schedule": {"reshard": False}}),
        ("llama", {"mesh": {"dp": 2, "sp": 2}, "recompute": "full"}),
        ("gpt_oss", {"mesh": {"sp": 4}, "replicate_below": 1000}),
    ],
)
def test_plans(family: str, plan: dict[str, Any]) -> None:
    ranks = Simulation(build(family, **_router(family)), plan)
    for batch in (ragged(19), padded("right", 18)):
        ranks.check_step(batch)


def test_static_shapes(world: World) -> None:
    world.run(_static)


def _static() -> None:
    reference = build("gpt_oss", **_router("gpt_oss"))
    model = compiled(reference, {"mesh": {"sp": 2}, "batch": {"shapes": "static"}})
    for batch in (plain(16), padded("left", 19)):
        check_step(reference, model, batch)
    assert len(runtime_of(model).executables) == 2


def _router(family: str) -> dict[str, Any]:
    """A share of the router's loss large enough to see."""
    return {"output_router_logits": True, "router_aux_loss_coef": 0.5} if family in WITH_ROUTER_LOSS else {}


def _family(family: str, plan: dict[str, Any]) -> None:
    """One model, many layouts: nothing of a call stays in the next, and no length compiles anew."""
    reference = build(family)
    model = compiled(reference, plan)
    for batch in (plain(16), ragged(19), padded("left", 15), padded("right", 18)):
        check_step(reference, model, batch)
    check_documents(reference, model, packed(21))
    assert len(runtime_of(model).executables) == 1


def test_frequencies_that_follow_the_longest_row() -> None:
    """Phi-3's longrope and the dynamic kind: chosen by the largest position of the whole batch, on every rank."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3]}
    long |= {"long_factor": [2.0, 2.5, 3.0, 4.0], "factor": 8.0}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for reference in (
        build("phi3", 1, rope_parameters=long, original_max_position_embeddings=16),
        build("llama", 1, rope_parameters=dynamic, max_position_embeddings=16),
    ):
        ranks = Simulation(reference, {"mesh": {"fsdp": 2, "sp": 2}})
        for batch in (plain(12), plain(24), plain(10)):
            ranks.check_step(batch)


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "query", "key"), [(2, 4, 1), (2, 6, 3), (2, 3, 1), (4, 6, 2), (4, 3, 3), (8, 12, 4)])
def test_every_rank_holds_the_key_heads_its_query_heads_use(ranks: int, query: int, key: int) -> None:
    spread = Heads.over(ranks, query, key)
    assert spread.query % spread.key == 0
    repeated = [k for k in range(key) for _ in range(spread.repeats)]
    for rank in range(ranks):
        for local in range(spread.query):
            head = rank * spread.query + local
            if head < query:
                place = rank * spread.key + local // (spread.query // spread.key)
                assert repeated[place] == head // (query // key)


def test_packing_there_and_back() -> None:
    """Four ranks in one process: what each packs for the others, unpacked, is every token of its heads, and back."""
    ranks, B, S = 4, 2, 8
    q, k = torch.randn(B, S, 8, 3), torch.randn(B, S, 4, 5)
    chunks = [(q.chunk(ranks, 1)[rank], k.chunk(ranks, 1)[rank]) for rank in range(ranks)]
    sent = torch.stack([heads.pack_heads(values, ranks) for values in chunks])
    for rank in range(ranks):
        mine = heads.unpack_heads(sent[:, rank], [(2, 3), (1, 5)])
        assert torch.equal(mine[0], q.chunk(ranks, 2)[rank]) and torch.equal(mine[1], k.chunk(ranks, 2)[rank])
    back = torch.stack([heads.pack_sequence([x.chunk(ranks, 2)[r] for x in (q, k)], ranks) for r in range(ranks)])
    for rank in range(ranks):
        mine = heads.unpack_sequence(back[:, rank], [(2, 3), (1, 5)])
        assert torch.equal(mine[0], chunks[rank][0]) and torch.equal(mine[1], chunks[rank][1])
        assert all(value.is_contiguous() for value in mine)


SHAPES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(4, 1), (4, 2), (6, 3), (3, 1), (3, 3), (5, 5), (8, 2)]),
        "width": st.sampled_from([4, 8, 12]),
        "window": st.sampled_from([None, WINDOW, 2]),
        "mesh": st.sampled_from([{"sp": 4}, {"fsdp": 2, "sp": 2}, {"dp": 2, "sp": 2}, {"sp": 8}]),
        "batches": st.lists(
            st.fixed_dictionaries(
                {
                    "rows": st.integers(1, 3),
                    "length": st.integers(6, 24),
                    "cuts": st.sets(st.integers(2, 23), max_size=3),
                }
            ),
            min_size=3,
            max_size=5,
        ),
    }
)


@given(SHAPES)
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
def test_drawn_shapes(drawn: dict[str, Any]) -> None:
    query, key = drawn["heads"]
    window = {"sliding_window": drawn["window"]} if drawn["window"] else {"sliding_window": None}
    sizes = {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": drawn["width"]}
    ranks = Simulation(build("mistral", 1, hidden_size=24, **sizes, **window), {"mesh": drawn["mesh"]})
    for each in drawn["batches"]:
        rows, length = each["rows"] * 2, each["length"]
        ids = ids_of(rows, length)
        starts = sorted({0, *(cut for cut in each["cuts"] if cut < length), length})
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)]).expand(rows, -1)
        batch = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
        ranks.check_documents(batch)


# --- what a rank holds -----------------------------------------------------------------------------------------------


def test_a_batch_is_filled_up_and_cut() -> None:
    fields = {
        "ids": torch.arange(5)[None],
        "positions": torch.arange(5)[None],
        "layout": torch.zeros(1, 5, dtype=torch.int32),
        "valid": torch.ones(1, 5, dtype=torch.bool),
        "targets": torch.tensor([[1, 2, 3, 4, -100]]),
    }
    first, second = (cut(MODEL_ENTRY, fields, rank, 2) for rank in range(2))
    assert first["ids"].tolist() == [[0, 1, 2]] and second["ids"].tolist() == [[3, 4, 0]]
    assert second["targets"].tolist() == [[4, -100, -100]]
    assert second["valid"].tolist() == [[True, True, False]]
    assert first["layout"].tolist() == second["layout"].tolist() == [[0, 0, 0, 0, 0, -6]]
    assert [own_length(5, rank, 4) for rank in range(4)] == [2, 2, 1, 0]


def test_logits_are_a_slice_and_can_be_gathered(four: World) -> None:
    four.run(_logits)


def _logits() -> None:
    reference = build("qwen3")
    model = compiled(reference, {"mesh": {"sp": 4}})
    batch = plain(13)
    expected = run_eager(reference, {"input_ids": batch["input_ids"]}).logits
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    (expected * weights).sum().backward()

    mine = model(input_ids=batch["input_ids"]).logits
    rank = torch.distributed.get_rank()
    torch.testing.assert_close(mine, expected.detach()[:, rank * 4 : (rank + 1) * 4], rtol=0, atol=1e-4)
    whole = model.gather_sequence(mine)
    torch.testing.assert_close(whole, expected.detach(), rtol=0, atol=1e-4)
    (whole * weights).sum().backward()
    _check_gradients(reference, model)

    model.zero_grad()  # a loss of this rank's own tokens: gradients are summed over the group
    mine = model(input_ids=batch["input_ids"]).logits
    (mine * weights[:, rank * 4 : (rank + 1) * 4]).sum().backward()
    _check_gradients(reference, model)


def _check_gradients(reference: Any, model: Any) -> None:
    wrong = {fqn: error for fqn, error in gradient_errors(reference, model).items() if not error < 1e-5}
    assert not wrong, wrong


# --- losses ----------------------------------------------------------------------------------------------------------


def test_no_token_with_a_target_anywhere(world: World) -> None:
    world.run(_no_target)


def _no_target() -> None:
    model = compiled(build("llama"), {"mesh": {"sp": 2}})
    batch = plain(10)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(not p.grad.to_local().any() for p in model.parameters())


def test_dropout_differs_between_chunks_and_is_drawn_again_in_backward(world: World) -> None:
    losses = world.run(_slope)
    assert losses[0] == losses[1]


def _slope() -> float:
    """The slope of the loss along its gradient is the gradient's norm, masks held fixed by the seed."""
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    reference = build("gpt2", dtype=torch.float64, **dropout)
    model = compiled(reference, {"mesh": {"sp": 2}, "recompute": "full"})
    batch = plain(10)

    def loss_at() -> Any:
        torch.manual_seed(11)
        return model(**batch).loss

    loss = loss_at()
    loss.backward()
    norm = model.clip_grad_norm_(1e9).item()
    step = 1e-3
    moved = []
    with torch.no_grad():
        for sign in (1, -2):
            for p in model.parameters():
                p.to_local().add_(p.grad.to_local(), alpha=sign * step / norm)
            moved.append(loss_at().item())
    assert (moved[0] - moved[1]) / (2 * step) == pytest.approx(norm, rel=0.01)
    return loss.item()


# --- bad input -------------------------------------------------------------------------------------------------------


def test_rows_that_differ_inside_a_group_are_refused(world: World) -> None:
    world.run(_different)


def _different() -> None:
    model = compiled(build("llama", 1), {"mesh": {"sp": 2}})
    for what in ("ids", "labels", "positions", "length"):
        batch = plain(10)
        batch["position_ids"] = torch.arange(10).expand(4, -1).clone()
        if torch.distributed.get_rank() == 1:
            if what == "length":
                batch = {key: value[:, :8] for key, value in batch.items()}
            elif what == "ids":
                batch["input_ids"][2, 3] += 1
            elif what == "labels":
                batch["labels"][0, 5] = -100
            else:
                batch["position_ids"][1, 4:] -= 4
        with pytest.raises(RankError, match="ranks 0 and 1 share a sequence"):
            model(**batch)
    model(**plain(10))  # and nothing is left behind


def test_lengths_may_differ_between_groups(four: World) -> None:
    four.run(_lengths)


def _lengths() -> None:
    reference = build("llama", 1)
    model = compiled(reference, {"mesh": {"fsdp": 2, "sp": 2}})
    batch = padded("right", 16)
    expected = run_eager(reference, batch).loss
    expected.backward()
    short = torch.distributed.get_rank() // 2
    rows = {key: value[2:] if short else value[:2] for key, value in batch.items()}
    own = int(rows["attention_mask"].sum(1).max())
    loss = model(**{key: value[:, :own] for key, value in rows.items()}).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    _check_gradients(reference, model)


# --- what verification finds -----------------------------------------------------------------------------------------


def test_a_missing_exchange_and_a_sum_over_tokens_fail_verification() -> None:
    """The program says so before any number is wrong."""
    model = build("qwen3", 1)
    step = _traced(model)
    for graph in (step.forward, step.backward):
        (first, *_) = [node for node in graph.nodes if node.target is collectives.all_to_all]
        assert first.args[1] == "sp"
    bare = _traced(model, exchange=False)
    with pytest.raises(InvalidProgram, match="attention needs whole sequences"):
        verify(bare)
    mixing = build("qwen3", 1)
    norm = mixing.model.norm
    norm.forward = lambda hidden: hidden - hidden.mean(dim=1, keepdim=True)
    with pytest.raises(InvalidProgram, match="mixes tokens"):
        _traced(mixing)


def _traced(model: Any, exchange: bool = True) -> Any:
    plan = Plan(mesh={"sp": 2 if exchange else 1})
    trainable = frozenset(name for name, _ in model.named_parameters())
    signature = Signature(loss=True, logits=False, training=True, differentiable=True, trainable=trainable)
    step = trace(model, plan, signature, choose_dtypes(model, plan.dtype), torch.device("cpu"), None)
    if not exchange:  # as if the pass had cut the batch and forgotten the rest
        step.sliced = Sliced(MODEL_ENTRY, 2, 2 * step.sequence_symbol)
    return step
