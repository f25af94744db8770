"""Expert parallelism: experts spread over ranks, numbers equal to eager on one process, whatever the routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.families import WITH_ROUTER_LOSS, build, ids_of
from tests.parity import (
    check_documents,
    check_step,
    compiled,
    own_rows,
    packed,
    padded,
    plain,
    ragged,
    run_eager,
    whole,
)
from tests.simulated import Simulation
from tests.test_cases import check_gradients, gradient_norm, make
from tests.world import World
from turbo_compile.boundaries.experts import owner_first
from turbo_compile.errors import PlanError
from turbo_compile.ir.text import show
from turbo_compile.parameters import full_tensor


def _family(family: str, plan: dict[str, Any], backend: str = "eager") -> None:
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if family != "deepseek_v3" else {}
    reference = build(family, **router)
    model = compiled(reference, plan, backend)
    for batch in (plain(16), ragged(19), padded("left", 15)):
        check_step(reference, model, batch)
    if not router:
        check_documents(reference, model, packed(21))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_two_ranks_share_the_experts(world: World, family: str) -> None:
    world.run(_family, family, {"mesh": {"fsdp": 2, "ep": 2}})


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("mixtral", {"fsdp": 2, "ep": 2}),
        ("deepseek_v3", {"fsdp": 4, "ep": 4}),
        ("qwen3_moe", {"fsdp": 4, "ep": 2}),
        ("gpt_oss", {"fsdp": 2, "sp": 2, "ep": 2}),
        ("glm4_moe", {"fsdp": 2, "ep": 2}),
        ("glm4_moe", {"sp": 2, "ep": 2}),
        ("olmoe", {"fsdp": 4, "ep": 4}),
        ("olmoe", {"fsdp": 4, "ep": 2}),
        ("qwen3_next", {"fsdp": 2, "ep": 2}),
        ("bailing_hybrid", {"fsdp": 2, "ep": 2}),
    ],
)
def test_with_other_axes(family: str, mesh: dict[str, int]) -> None:
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if family in WITH_ROUTER_LOSS else {}
    ranks = Simulation(build(family, **router), {"mesh": mesh})
    for batch in (plain(16), ragged(19), padded("left", 15)):
        ranks.check_step(batch)
    if not router:
        ranks.check_documents(packed(21))


def test_a_shared_expert_computes_while_rows_travel() -> None:
    """In forward and in backward; switched off, the same numbers in another order."""
    found = []
    for overlap in (True, False):
        plan = {"mesh": {"fsdp": 2, "ep": 2}, "schedule": {"overlap": overlap}}
        ranks = Simulation(build("deepseek_v3"), plan)
        lines = show(ranks.executables[0].program).splitlines()
        for way in ("fwd", "bwd"):
            own = [line for line in lines if line.startswith(way)]
            sent = next(at for at, line in enumerate(own) if "tokens -> experts" in line)
            arrived = next(at for at, line in enumerate(own) if at > sent and "wait(" in line and ".own = " in line)
            computed = next(at for at, line in enumerate(own) if " shared.none" in line)
            assert (sent < computed < arrived) == overlap, own
        found.append(ranks.step(plain(16)))
    (losses, gradients), (other_losses, other_gradients) = found
    assert losses == other_losses
    assert all(torch.equal(gradient, other_gradients[fqn]) for fqn, gradient in gradients.items())


def test_inductor(world: World) -> None:
    """With chunks and experts on the same ranks, so blocks are cut at both."""
    world.run(_family, "qwen3_moe", {"mesh": {"sp": 2, "ep": 2}, "recompute": "selective"}, "inductor", timeout=300)


def test_experts_of_a_rank_follow_each_other() -> None:
    """Eight experts in stretches of one over 2 shards x 4 ranks: rank 1 computes with experts 1 and 5."""
    numbers = owner_first(torch.arange(8), 8, 4, 2)
    assert numbers.argsort().view(4, 2).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def _skewed() -> None:
    """All tokens to one expert of one rank, then of the other: nothing for the rest, and no row uninitialised."""
    reference = build("qwen3_moe", 1)
    model = compiled(reference, {"mesh": {"fsdp": 2, "ep": 2}})
    router = reference.model.layers[0].mlp.gate.weight
    for favourites in ((0, 1), (3, 2)):
        with torch.no_grad():
            router.zero_()
            router[list(favourites)] = 1.0
            reference.model.embed_tokens.weight.abs_()
            model.load_state_dict(reference.state_dict())
        for _ in range(2):
            check_step(reference, model, plain(9))


def test_every_token_to_one_rank(world: World) -> None:
    world.run(_skewed)


# --- the runtime, with experts and chunks on four ranks --------------------------------------------------------------


def test_what_a_training_loop_does(four: World) -> None:
    four.run(_loop, timeout=300)


def _loop() -> None:
    reference = build("qwen3_moe", 2)
    model = compiled(reference, {"mesh": {"fsdp": 2, "sp": 2, "ep": 2}})
    first, second = plain(12), ragged(17)

    def agree() -> None:
        check_gradients(reference, model)
        reference.zero_grad()
        model.zero_grad()

    (run_eager(reference, first).loss + 2 * run_eager(reference, second).loss).backward()
    losses = [model(**own_rows(batch, 2)).loss for batch in (first, second)]
    (losses[0] + 2 * losses[1]).backward()
    agree()

    for batch in (first, second):
        run_eager(reference, batch).loss.backward()
    with model.no_sync():
        model(**own_rows(first, 2)).loss.backward()
    model(**own_rows(second, 2)).loss.backward()
    agree()

    for trained in (lambda fqn: "experts" not in fqn, lambda fqn: "layers.1.mlp.experts" in fqn):
        for each in (reference, model):
            for fqn, p in each.named_parameters():
                p.requires_grad_(trained(fqn))
        run_eager(reference, first).loss.backward()
        model(**own_rows(first, 2)).loss.backward()
        agree()

    for fqn, value in reference.state_dict().items():
        assert torch.equal(full_tensor(model.state_dict()[fqn]), value), fqn


# --- cases from public bug reports -----------------------------------------------------------------------------------


def _mixture() -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1}
    rest = {"mlp_only_layers": [], "tie_word_embeddings": False, "initializer_range": 0.2}
    special = {"max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return make(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **heads, **sparse, **rest, **special))


def h06() -> None:
    reference = _mixture()
    ids = ids_of(4, 12, 97, seed=1)
    batch = {"input_ids": ids, "labels": ids}
    loss = run_eager(reference, batch).loss
    loss.backward()
    assert (loss.item(), gradient_norm(reference)) == pytest.approx((5.186987, 2.530391), abs=1e-5)
    first = reference.model.layers[0].mlp
    norms = (first.gate.weight.grad.norm().item(), first.experts.gate_up_proj.grad.norm().item())
    assert norms == pytest.approx((0.246130, 0.634466), abs=1e-5)
    model = compiled(reference, {"mesh": {"fsdp": 2, "ep": 2}})
    for _ in range(2):
        model.zero_grad()
        ours = model(**own_rows(batch)).loss
        ours.backward()
        assert ours.item() == pytest.approx(5.186987, abs=1e-5)
        check_gradients(reference, model)


def test_h06_gradients_of_experts_and_router(world: World) -> None:
    world.run(h06)


def h09() -> None:
    ids = ids_of(4, 12, 97, seed=1)
    batch = {"input_ids": ids, "labels": ids}
    for norm_type, anchor in ((2.0, 4.135030), (float("inf"), 0.343241)):
        reference = _mixture()
        with torch.no_grad():
            for layer in reference.model.layers:
                layer.mlp.experts.down_proj[2:] *= 6
        model = compiled(reference, {"mesh": {"fsdp": 2, "ep": 2}})
        run_eager(reference, batch).loss.backward()
        model(**own_rows(batch)).loss.backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
        assert expected.item() == pytest.approx(anchor, abs=1e-5)
        assert model.clip_grad_norm_(0.5, norm_type).item() == pytest.approx(anchor, abs=1e-5)
        for each in (reference, model):
            torch.optim.SGD(each.parameters(), lr=1.0).step()
        for fqn, p in model.named_parameters():
            torch.testing.assert_close(
                whole(p.detach()), reference.get_parameter(fqn).detach(), rtol=0, atol=1e-5, msg=fqn
            )
        torch.optim.AdamW(model.parameters()).step()
        assert set(model.state_dict()) == set(reference.state_dict())
        assert full_tensor(model.model.layers[0].mlp.experts.down_proj).shape[0] == 4


def test_h09_one_clip_norm(world: World) -> None:
    world.run(h09)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_a_dense_model_has_no_experts_to_spread(world: World) -> None:
    world.run(_dense)


def _dense() -> None:
    with pytest.raises(PlanError, match="has no experts"):
        compiled(build("llama", 1), {"mesh": {"fsdp": 2, "ep": 2}})
    odd = build("qwen3_moe", 1, num_experts=3)
    with pytest.raises(PlanError, match="does not divide them; fsdp x sp can be 1 or 3"):
        compiled(odd, {"mesh": {"fsdp": 2, "ep": 2}})
