"""Cases from public bug reports of other training stacks, each with its right values.

The reference is plain eager on one process with the same global batch. The anchors (losses and norms that eager gave
when a case was written) guard the recipe: a case whose model or batch is mistyped fails there first. H11, dropout and
recompute, is in test_differentiate.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.families import ids_of
from tests.parity import compiled, gradient_errors, own_rows, run_eager, whole
from tests.world import World
from turbo_compile import turbo_compile

_NO_SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_QWEN3 = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_QWEN3 |= {"num_key_value_heads": 2, "head_dim": 8, **_NO_SPECIAL}
_FSDP = {"mesh": {"fsdp": 2}}
_SP = {"mesh": {"sp": 2}}
_BOTH = pytest.mark.parametrize("plan", [_FSDP, _SP], ids=["fsdp", "sp"])


def make(kind: Any, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return kind(config).to(dtype).train()


def norm_of(tensors: list[Tensor]) -> float:
    return float(torch.stack([whole(t).norm() for t in tensors]).norm())


def gradient_norm(model: nn.Module) -> float:
    return norm_of([p.grad for p in model.parameters() if p.grad is not None])


def check_gradients(reference: Any, model: Any, tolerance: float = 1e-5) -> None:
    wrong = {fqn: error for fqn, error in gradient_errors(reference, model).items() if not error < tolerance}
    assert not wrong, wrong


def check_weights(reference: Any, model: Any, tolerance: float = 1e-4) -> None:
    ours = dict(model.named_parameters())
    assert list(ours) == [fqn for fqn, _ in reference.named_parameters()]
    for fqn, p in reference.named_parameters():
        torch.testing.assert_close(whole(ours[fqn].detach()), p.detach(), rtol=0, atol=tolerance)


def train_both(reference: Any, model: Any, batch: dict[str, Any], optimizers: tuple[Any, Any], steps: int) -> None:
    for _ in range(steps):
        for trained, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            rows = batch if trained is reference else own_rows(batch)
            run_eager(trained, rows).loss.backward()
            optimizer.step()


def adamw(*models: Any) -> tuple[Any, ...]:
    return tuple(torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in models)


# --- H01: a tied embedding under fsdp ---------------------------------------------------------------------------------


def tied_qwen3() -> Any:
    sizes = {"vocab_size": 101, "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": True}
    return make(Qwen3ForCausalLM, Qwen3Config(**_QWEN3, **sizes))


def tied_batch() -> dict[str, Tensor]:
    ids = ids_of(4, 16, 101, seed=1)
    return {"input_ids": ids, "labels": ids}


def filled_from_meta(reference: Any) -> Any:
    """The model made on meta, compiled, then filled from a state dict that has no key for the tied head."""
    with torch.device("meta"):
        model = type(reference)(reference.config).train()
    model = turbo_compile(model, _FSDP, backend="eager")
    state = {key: value.clone() for key, value in reference.state_dict().items() if key != "lm_head.weight"}
    model.load_state_dict(state)
    return model


def h01(meta: bool) -> None:
    reference, batch = tied_qwen3(), tied_batch()
    model = filled_from_meta(reference) if meta else compiled(reference, _FSDP)
    expected = run_eager(reference, batch).loss
    expected.backward()
    assert expected.item() == pytest.approx(4.812699, abs=1e-5)
    assert gradient_norm(reference) == pytest.approx(2.613914, abs=1e-5)

    loss = model(**own_rows(batch)).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    check_gradients(reference, model)  # the table's: embedding and head part, once each

    train_both(reference, model, batch, adamw(reference, model), 3)
    check_weights(reference, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p is model.lm_head.weight for p in model.parameters()) == 1
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    assert torch.equal(whole(state["lm_head.weight"]), whole(state["model.embed_tokens.weight"]))


@pytest.mark.parametrize("meta", [False, True], ids=["from weights", "from meta"])
def test_h01_tied_embedding(world: World, meta: bool) -> None:
    world.run(h01, meta)


# --- H02: unequal numbers of valid tokens, accumulated ----------------------------------------------------------------


def h02(plan: dict[str, Any]) -> None:
    reference = tied_qwen3()
    ids = ids_of(8, 16, 101, seed=2)
    labels = ids.clone()
    for row, first in enumerate((2, 5, 16, 16, 9, 3, 16, 12)):
        labels[row, first:] = -100
    expected = run_eager(reference, {"input_ids": ids, "labels": labels}).loss
    expected.backward()
    assert expected.item() == pytest.approx(4.710798, abs=1e-5)
    assert gradient_norm(reference) == pytest.approx(2.107011, abs=1e-5)

    halves = [{"input_ids": ids[rows], "labels": labels[rows]} for rows in (slice(0, 4), slice(4, 8))]
    model = compiled(reference, plan)
    sp = plan["mesh"].get("sp", 1)
    for deferred in (True, False):
        model.zero_grad()
        total = 0.0
        for half in halves:
            if deferred and half is halves[0]:
                with model.no_sync():
                    loss = model(**own_rows(half, sp), num_items_in_batch=71).loss
                    loss.backward()
                assert all(p.grad is None for p in model.parameters())
            else:
                loss = model(**own_rows(half, sp), num_items_in_batch=71).loss
                loss.backward()
            total += loss.item()
        assert total == pytest.approx(expected.item(), abs=1e-5)
        check_gradients(reference, model)


@_BOTH
def test_h02_unequal_tokens_accumulated(world: World, plan: dict[str, Any]) -> None:
    world.run(h02, plan)


# --- H03, H04: a label at the edge between chunks; heads that do not spread evenly ------------------------------------


def llama_97(heads: int = 4, key_heads: int = 1, hidden: int = 32, **more: Any) -> Any:
    sizes = {"vocab_size": 97, "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 2}
    own = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "tie_word_embeddings": False}
    rest = {"max_position_embeddings": 128, "initializer_range": 0.1, **_NO_SPECIAL}
    return make(LlamaForCausalLM, LlamaConfig(**sizes, **own, **rest, **more))


def check_anchored(reference: Any, model: Any, batch: dict[str, Tensor], loss: float, norm: float) -> None:
    reference.zero_grad()
    model.zero_grad()
    expected = run_eager(reference, batch).loss
    expected.backward()
    assert (expected.item(), gradient_norm(reference)) == pytest.approx((loss, norm), abs=1e-5)
    ours = model(**batch).loss
    ours.backward()
    assert ours.item() == pytest.approx(loss, abs=1e-5)
    check_gradients(reference, model)


def h03() -> None:
    reference = llama_97()
    model = compiled(reference, _SP)
    ids = ids_of(2, 8, 97, seed=1)
    columns = torch.arange(8).expand(2, 8)
    label_sets = (
        (ids, 4.692486, 4.626730),
        (ids.masked_fill(columns != 4, -100), 4.638631, 11.429794),
        (ids.masked_fill((columns >= 1) & (columns <= 3), -100), 4.631587, 5.239778),
    )
    for labels, loss, norm in label_sets:
        check_anchored(reference, model, {"input_ids": ids, "labels": labels}, loss, norm)


def test_h03_label_at_the_chunk_edge(world: World) -> None:
    world.run(h03)


def h04() -> None:
    ids = ids_of(2, 8, 97, seed=1)
    pairs = (
        ((4, 1, 32), {}, 4.692486, 4.626730),
        ((6, 3, 48), {"head_dim": 8}, 5.123273, 5.404003),
        ((3, 1, 48), {"head_dim": 8}, 4.772722, 5.403052),
        ((3, 3, 48), {"head_dim": 8}, 4.784268, 5.816276),
    )
    for sizes, more, loss, norm in pairs:
        reference = llama_97(*sizes, **more)
        check_anchored(reference, compiled(reference, _SP), {"input_ids": ids, "labels": ids}, loss, norm)


def test_h04_few_and_odd_heads(world: World) -> None:
    world.run(h04)


# --- H05: packed documents stay apart ---------------------------------------------------------------------------------


def alone(reference: Any, ids: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Each document by itself: summed token loss over their number, and the logits in a row."""
    losses, logits = [], []
    for document in ids[0].split(lengths):
        out = run_eager(reference, {"input_ids": document[None]}).logits[0]
        logits.append(out)
        losses.append(nn.functional.cross_entropy(out[:-1], document[1:], reduction="sum"))
    return torch.stack(losses).sum() / (ids.shape[1] - len(lengths)), torch.cat(logits)


def h05(attention: str, plan: dict[str, Any]) -> None:
    sizes = {"vocab_size": 97, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": False}
    reference = make(Qwen3ForCausalLM, Qwen3Config(**_QWEN3, **sizes, attn_implementation=attention))
    assert reference.config._attn_implementation == attention
    model = compiled(reference, plan)
    ids = ids_of(1, 16, 97, seed=3)
    for lengths, anchor in (((5, 1, 1, 6, 3), 4.566109), ((8, 8), None), ((16,), None)):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = ids.masked_fill(positions == 0, -100)
        reference.zero_grad()
        model.zero_grad()
        expected, logits = alone(reference, ids, lengths)
        expected.backward()
        if anchor is not None:
            assert expected.item() == pytest.approx(anchor, abs=1e-5)
        out = model(input_ids=ids, position_ids=positions, labels=labels, return_logits=True)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(expected.item(), abs=1e-5)
        ours = model.gather_sequence(out.logits)[0]
        torch.testing.assert_close(ours, logits.detach(), rtol=0, atol=1e-4)
        check_gradients(reference, model)
    assert reference.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@_BOTH
def test_h05_packed_documents(world: World, attention: str, plan: dict[str, Any]) -> None:
    world.run(h05, attention, plan)


# --- H07: the router's auxiliary loss is a statistic of the global batch ----------------------------------------------


def h07(plan: dict[str, Any]) -> None:
    sizes = {"vocab_size": 97, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    sparse = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False}
    rest = {"initializer_range": 0.2, "max_position_embeddings": 128}
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    reference = make(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_QWEN3, **sizes, **sparse, **rest, **router))
    model = compiled(reference, plan)
    ids = ids_of(4, 12, 97, seed=1)
    mask = torch.ones_like(ids)
    mask[0, 9:] = mask[3, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected = run_eager(reference, batch)
    expected.loss.backward()
    assert expected.aux_loss.item() == pytest.approx(2.007760, abs=1e-5)
    assert (expected.loss.item(), gradient_norm(reference)) == pytest.approx((6.217978, 2.657560), abs=1e-5)
    out = model(**own_rows(batch, plan["mesh"].get("sp", 1)))
    out.loss.backward()
    assert (out.loss.item(), out.aux_loss.item()) == pytest.approx((6.217978, 2.007760), abs=1e-5)
    check_gradients(reference, model)


@_BOTH
def test_h07_router_loss_of_the_global_batch(world: World, plan: dict[str, Any]) -> None:
    world.run(h07, plan)


# --- H08: a frozen base with hand-made adapters -----------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen linear plus (x Aᵀ Bᵀ) * 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(0.1 * torch.randn(3, base.in_features))
        self.B = nn.Parameter(0.1 * torch.randn(base.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.A.T @ self.B.T) * 2


def adapted_llama() -> Any:
    model = llama_97(key_heads=2)
    model.requires_grad_(False)
    torch.manual_seed(3)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
    return model


def h08(plan: dict[str, Any]) -> list[Tensor]:
    reference = adapted_llama()
    model = compiled(reference, plan)
    sp = plan["mesh"].get("sp", 1)
    before = {fqn: whole(p.detach()).clone() for fqn, p in model.named_parameters()}
    flags = {fqn: p.requires_grad for fqn, p in model.named_parameters()}
    assert flags == {fqn: p.requires_grad for fqn, p in reference.named_parameters()} and sum(flags.values()) == 8
    batch = {"input_ids": ids_of(4, 12, 97, seed=1)}
    batch["labels"] = batch["input_ids"]
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (reference, model)]
    ours, theirs = (torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1) for ps in reversed(trained))
    anchors = ((4.828808, 0.744173), (4.716471, 0.747618), (4.621384, 0.647834))
    for loss_anchor, norm_anchor in anchors:
        ours.zero_grad()
        theirs.zero_grad()
        expected = run_eager(reference, batch).loss
        expected.backward()
        loss = model(**own_rows(batch, sp)).loss
        loss.backward()
        check_gradients(reference, model, 1e-4)
        norm = torch.nn.utils.clip_grad_norm_(trained[0], 1.0)
        assert (expected.item(), norm.item()) == pytest.approx((loss_anchor, norm_anchor), abs=1e-5)
        assert loss.item() == pytest.approx(loss_anchor, abs=1e-5)
        assert model.clip_grad_norm_(1.0).item() == pytest.approx(norm_anchor, abs=1e-5)
        theirs.step()
        ours.step()
    check_weights(reference, model)
    assert flags == {fqn: p.requires_grad for fqn, p in model.named_parameters()}
    for fqn, p in model.named_parameters():
        if not p.requires_grad:
            assert p.grad is None and p not in ours.state
            assert torch.equal(whole(p), before[fqn])
    return [whole(p.detach()) for p in trained[1]]


@pytest.mark.parametrize("plan", [_FSDP, _FSDP | {"recompute": "full"}, _SP], ids=["fsdp", "recompute", "sp"])
def test_h08_frozen_base_with_adapters(world: World, plan: dict[str, Any]) -> None:
    first, second = world.run(h08, plan)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- H10: export a tied model to Hugging Face files -------------------------------------------------------------------


def h10(folder: str, meta: bool) -> None:
    reference, batch = tied_qwen3(), tied_batch()
    model = filled_from_meta(reference) if meta else compiled(reference, _FSDP)
    optimizers = adamw(reference, model)
    train_both(reference, model, batch, optimizers, 2)
    model.save_pretrained(folder)
    train_both(reference, model, batch, optimizers, 1)  # exporting leaves training able to go on
    check_weights(reference, model)


@pytest.mark.parametrize("meta", [False, True], ids=["from weights", "from meta"])
def test_h10_export(world: World, tmp_path: Path, meta: bool) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    world.run(h10, str(ours), meta)
    reference, batch = tied_qwen3(), tied_batch()
    (optimizer,) = adamw(reference)
    for _ in range(2):
        optimizer.zero_grad()
        run_eager(reference, batch).loss.backward()
        optimizer.step()
    reference.save_pretrained(theirs)
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    assert {"config.json", "generation_config.json"} <= {p.name for p in ours.iterdir()}

    saved, expected = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert set(saved) == set(expected) and len(saved) == 24 and "lm_head.weight" not in saved
    for key, value in expected.items():
        assert saved[key].dtype == value.dtype
        torch.testing.assert_close(saved[key], value, rtol=0, atol=1e-5)

    loaded = AutoModelForCausalLM.from_pretrained(ours).train()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    out, expected_out = run_eager(loaded, batch), run_eager(reference, batch)
    torch.testing.assert_close(out.logits, expected_out.logits, rtol=0, atol=1e-4)
    loaded.zero_grad()
    reference.zero_grad()
    out.loss.backward()
    expected_out.loss.backward()
    check_gradients(reference, loaded, 1e-4)
