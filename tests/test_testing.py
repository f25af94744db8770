"""The parity check itself: it passes what is right, and names what was planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.world import World
from turbo_compile import testing
from turbo_compile.errors import TurboCompileError
from turbo_compile.testing import Report, check, deal

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
PLANTED = "model.layers.0.mlp.up_proj.weight"


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def headless() -> PreTrainedModel:
    model = llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def batch(rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test starts and ends outside any process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Have something done to the compiled model before it is compared."""

    def install(spoil: Callable[[Any], None]) -> None:
        compile_ = testing.turbo_compile

        def spoiled(*arguments: Any, **keywords: Any) -> Any:
            model = compile_(*arguments, **keywords)
            spoil(model)
            return model

        monkeypatch.setattr(testing, "turbo_compile", spoiled)

    return install


def test_a_right_model_passes_over_several_steps_and_seeds() -> None:
    report = check(llama, "auto", batch(), steps=2, seeds=(0, 1))
    assert report.ok, report
    names = [fqn for fqn, _ in llama().named_parameters()]
    assert [row.fqn for row in report.rows] == ["loss", *names]
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-6)
    assert 0 < report.worst.error < 1e-5


def test_two_ranks_get_half_the_rows_each_and_one_report(world: World) -> None:
    first, second = world.run(check, llama, {"mesh": {"fsdp": 2}}, batch(rows=4))
    assert first.ok and second.ok, str(first)
    assert first.loss == second.loss


def test_a_wrong_gradient_is_named(plant: Callable[..., None]) -> None:
    plant(lambda model: model.get_parameter(PLANTED).register_hook(lambda gradient: gradient * 1.001))
    report = check(llama, "auto", batch())
    assert not report.ok
    assert report.worst.fqn == PLANTED
    assert report.worst.error == pytest.approx(1e-3, rel=0.01)
    assert [row.fqn for row in report.rows if row.error > 1e-5] == [PLANTED]
    assert "FAILED" in str(report) and PLANTED in report.verdict()


def test_a_missing_and_a_surplus_gradient_are_problems(plant: Callable[..., None]) -> None:
    plant(lambda model: model.get_parameter(PLANTED).requires_grad_(False))
    report = check(llama, "auto", batch())
    assert report.problems == (f"{PLANTED} has no gradient, in the reference it has one",)
    assert not report.ok


def test_a_gradient_that_is_not_finite_is_a_problem(plant: Callable[..., None]) -> None:
    plant(lambda model: model.get_parameter(PLANTED).register_hook(lambda gradient: gradient * float("nan")))
    report = check(llama, "auto", batch())
    assert report.problems == (f"{PLANTED} is not finite",)
    assert not report.ok


def test_a_gradient_that_vanishes_is_compared_absolutely(plant: Callable[..., None]) -> None:
    """Below a head of zeros no gradient arrives: any noise there would be infinitely large, relatively."""
    noise = [1e-10]
    plant(lambda model: model.get_parameter(PLANTED).register_hook(lambda gradient: gradient + noise[0]))
    report = check(headless, "auto", batch())
    vanishing = [row.fqn for row in report.rows if row.vanishing]
    assert PLANTED in vanishing and "lm_head.weight" not in vanishing
    assert report.ok, report
    assert " abs" in str(report)
    noise[0] = 1e-6
    assert check(headless, "auto", batch()).worst.fqn == PLANTED


def test_documents_stay_apart_in_the_reference_even_with_a_mask_of_ones() -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    packed = batch() | {"position_ids": positions, "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    assert check(llama, "auto", packed).ok


def test_low_precision_is_judged_by_what_eager_loses(plant: Callable[..., None]) -> None:
    plan = {"dtype": {"compute": "bf16"}}
    report = check(llama, plan, batch())
    assert report.ok and report.ratio is not None and 0.3 < report.ratio < 1.25, report
    assert report.worst.error > 1e-4  # far beyond the tolerance of fp32, which does not judge here
    assert "ratio" in str(report)

    def off_by_a_tenth(model: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.1)

    plant(off_by_a_tenth)
    worse = check(llama, plan, batch())
    assert not worse.ok and worse.ratio is not None and worse.ratio > 1.25


def test_a_factory_that_ignores_the_seed_is_refused() -> None:
    count = iter(range(10))

    def other() -> PreTrainedModel:
        torch.manual_seed(next(count))
        return llama()

    with pytest.raises(TurboCompileError, match=r"another model\.embed_tokens\.weight each time"):
        check(other, "auto", batch())


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(TurboCompileError, match="give the batch labels"):
        check(llama, "auto", {"input_ids": batch()["input_ids"]})


def test_rows_are_dealt_in_contiguous_slices() -> None:
    whole = batch(rows=4) | {"num_items_in_batch": torch.tensor(7), "return_dict": True}
    parts = [deal(whole, index, 2) for index in range(2)]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), whole["input_ids"])
    assert all(part["num_items_in_batch"] == 7 and part["return_dict"] is True for part in parts)
    with pytest.raises(TurboCompileError, match="4 rows does not divide over dp x fsdp = 3"):
        deal(whole, 0, 3)
    with pytest.raises(TurboCompileError, match="restart position_ids"):
        deal(whole | {"cu_seq_lens_q": torch.tensor([0, 48])}, 0, 2)


def test_a_long_table_is_cut_at_the_worst() -> None:
    rows = tuple(testing.Row(f"p{index}", index * 1e-9) for index in range(100))
    report = Report((testing.Row("loss", 0.0), *rows), 1.0, 1.0, 1e-5, 1.25)
    text = str(report)
    assert "p99" in text and "p60" in text and "p59" not in text
    assert "and 60 more" in text
