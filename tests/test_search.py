"""The planner: what a plan costs, which one is found, and why; as functions and as commands."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from typer.testing import CliRunner, Result

from tests.families import build, ids_of
from tests.world import World
from turbo_compile import turbo_compile
from turbo_compile.cli import app
from turbo_compile.commands.calibrating import calibrate
from turbo_compile.commands.measuring import Effort
from turbo_compile.commands.options import CalibrateOptions
from turbo_compile.costing import cost_of_config, cost_of_model
from turbo_compile.errors import PlanError
from turbo_compile.plans.candidates import Request
from turbo_compile.plans.cluster import cluster_names, cluster_of_device, load_cluster, save_cluster
from turbo_compile.plans.cost import ModelCost
from turbo_compile.plans.knapsack import Kind, frontier
from turbo_compile.plans.plan import Plan
from turbo_compile.plans.search import SearchResult, plan_of, search
from turbo_compile.plans.simulation import simulate
from turbo_compile.plans.strategy import Strategy
from turbo_compile.plans.timeline import predict

# The published sizes of Qwen3-30B-A3B, its 48 layers cut to 12.
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are captured once a session, and not into the user's cache; a command starts outside any process group."""
    monkeypatch.setenv("TURBO_COMPILE_CACHE", str(costs))
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def mixture() -> ModelCost:
    return cost_of_config(Qwen3MoeConfig(**MIXTURE))


@pytest.fixture(scope="session")
def found(mixture: ModelCost) -> SearchResult:
    return search(mixture, load_cluster("h100"), Request(gpus=64, global_batch=128, seq=8192))


# --- what a model costs ----------------------------------------------------------------------------------------------


def test_operations_are_those_torch_counts() -> None:
    """All matmuls of forward and backward, at sizes that differ from those captured."""
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    ids = ids_of(3, 40, 320)
    with FlopCounterMode(display=False) as counted:
        model(ids, labels=ids, use_cache=False)
    cost = cost_of_model(model, torch.float32)
    assert cost.matmul_flops(3, 40) == pytest.approx(counted.get_total_flops(), rel=1e-6)  # on a CPU, without attention
    layers, rows, heads, pairs = 2, 3, 4, 40 * 40 / 2
    assert cost.attention_flops(3, 40) == layers * rows * heads * pairs * 2 * (16 + 16)
    assert cost.parameters == sum(p.numel() for p in model.parameters())


def test_layers_are_counted_without_capturing_them(mixture: ModelCost) -> None:
    assert len(mixture.blocks) == 12 and mixture.experts == 128 and mixture.top_k == 8
    layer = 2048 * (4096 * 2 + 512 * 2) + 2 * 128 + 2 * 2048 + 128 * 2048 + 128 * 3 * 2048 * 768
    assert mixture.parameters == 12 * layer + 2 * 151936 * 2048 + 2048
    assert ModelCost.from_json(mixture.to_json()).to_json() == mixture.to_json()


# --- what a step takes -----------------------------------------------------------------------------------------------


def test_a_simulated_step_is_consistent(mixture: ModelCost) -> None:
    cluster = load_cluster("h100")
    plan = {"mesh": {"fsdp": 32, "sp": 2, "ep": 8}, "batch": {"global": 64, "micro": 1, "seq": 8192}}
    strategy = Strategy.of(Plan.of({**plan, "recompute": "selective"}), mixture)
    line = simulate(mixture, cluster, strategy)
    for stream in ("compute", "gather", "reduce", "all_to_all"):
        own = [each for each in line.events if each.stream == stream]
        assert own and all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own)), stream
    prediction = line.prediction
    assert sum(prediction.time_terms.values()) == pytest.approx(prediction.step_s)
    assert sum(prediction.memory_terms.values()) == pytest.approx(prediction.peak_bytes)
    assert max(held for _, held in line.memory) == pytest.approx(prediction.peak_bytes)
    assert line.memory[-1][1] == pytest.approx(8 * mixture.parameters / 64)  # master, two moments and gradient in bf16
    assert prediction.step_s == pytest.approx(predict(mixture, cluster, strategy).step_s, rel=0.1)


def test_more_of_one_thing_is_never_less_of_it(mixture: ModelCost) -> None:
    cluster = load_cluster("h100")
    base = Strategy.of(Plan.of({"mesh": {"fsdp": 64}, "batch": {"micro": 1, "seq": 4096}}), mixture)

    def at(**changes: Any) -> Any:
        return simulate(mixture, cluster, replace(base, **changes)).prediction

    kept = [at(recompute=mode, fsdp=8, micro=8) for mode in ("none", "selective", "full")]
    assert kept[0].peak_bytes > kept[1].peak_bytes > kept[2].peak_bytes
    assert kept[0].step_s < kept[1].step_s < kept[2].step_s
    assert at(micro=2).step_s > at().step_s and at(micro=2).peak_bytes > at().peak_bytes
    assert at(accumulation=8).step_s == pytest.approx(8 * at().step_s, rel=0.2)
    assert at(reshard=False).peak_bytes > at().peak_bytes
    assert at(prefetch=0).step_s > at(prefetch=1).step_s
    assert at(imbalance=2.0).step_s > at().step_s
    assert at(fsdp=1, dp=64).step_s > at(fsdp=1, dp=1).step_s  # replicas reduce their gradients


# --- which plan is found ---------------------------------------------------------------------------------------------


def test_the_same_question_has_the_same_answer(mixture: ModelCost, found: SearchResult) -> None:
    again = search(mixture, load_cluster("h100"), found.request)
    assert [each.strategy for each in again.ranked] == [each.strategy for each in found.ranked]
    assert again.considered == found.considered > 1000
    assert found.best.prediction.reserved_bytes <= found.budget_bytes
    assert found.best.simulated and found.best in found.ties and found.best in found.frontier


def test_what_is_fixed_stays_fixed(mixture: ModelCost) -> None:
    fixed = {"ep": 8, "sp": 4, "recompute": "full", "micro": 2}
    result = search(mixture, load_cluster("h200"), Request(64, 128, 8192, fixed=fixed))
    for each in (*result.ranked, *result.over):
        at = each.strategy
        assert (at.ep, at.sp, at.recompute, at.micro) == (8, 4, "full", 2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"fixed": {"sp": 3}}, ["sp=3", "does not divide 64"]),
        ({"fixed": {"dp": 2, "fsdp": 4, "sp": 2}}, ["multiplies to 16", "64 GPUs"]),
        ({"fixed": {"ep": 7}}, ["ep=7", "128 experts", "ep can be 1, 2, 4"]),
        ({"fixed": {"tp": 2}}, ["tp"]),
        ({"global_batch": 7}, ["no mesh of 64 GPUs", "divide the global batch", "64 rows"]),
        ({"gpus": 1, "global_batch": 1}, ["no plan", "the smallest needs", "GiB a GPU", "with 2 GPUs"]),
        ({"memory": 1.5}, ["memory", "between 0 and 1"]),
    ],
)
def test_a_question_without_an_answer(mixture: ModelCost, asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        search(mixture, load_cluster("h100"), Request(**({"gpus": 64, "global_batch": 128, "seq": 8192} | asked)))
    for word in words:
        assert word in str(caught.value), str(caught.value)


KINDS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=3,
)


@given(KINDS, st.integers(0, 60))
@settings(max_examples=40)
def test_the_mix_of_recomputation_is_the_best_there_is(drawn: list[Any], budget: int) -> None:
    kinds = [Kind(count, {"full": (5.0, 0.0), "selective": a, "none": b}) for count, a, b in drawn]
    each = [list(itertools.combinations_with_replacement(kind.modes.values(), kind.count)) for kind in kinds]
    best = math.inf
    for choice in itertools.product(*each):
        taken = [mode for part in choice for mode in part]
        if sum(held for _, held in taken) <= budget:
            best = min(best, sum(seconds for seconds, _ in taken))
    mix = frontier(kinds).best(budget)
    assert mix is not None
    assert best == sum(
        count * seconds
        for kind, counts in zip(kinds, mix, strict=True)
        for count, (seconds, _) in zip(counts, kind.modes.values(), strict=True)
    )


# --- clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_says_where_its_numbers_are_from(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    save_cluster(cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == cluster
    assert all(cluster.sources.values()) and len(cluster.sources) > 15


def test_a_device_is_known_by_its_driver() -> None:
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100"}
    names |= {"AMD Instinct MI300X": "mi300x", "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA B200": "b200"}
    assert {device: cluster_of_device(device).name for device in names} == names
    with pytest.warns(UserWarning, match="no cluster file for 'Voodoo 2'.*calibrate"):
        assert cluster_of_device("Voodoo 2").name == "generic"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("accelerator", "hbm_bytes_per_s"), -1.0, "hbm_bytes_per_s"),
        (("accelerator", "matmul_efficiency"), 1.7, "matmul_efficiency"),
        (("levels", 0, "bytes_per_s"), 1e30, "bytes_per_s"),
        (("accelerator", "flops"), 1.0, "flops"),
    ],
)
def test_a_cluster_file_with_a_number_that_cannot_be(path: Any, value: float, words: str, tmp_path: Path) -> None:
    save_cluster(load_cluster("h100"), tmp_path / "c.yaml")
    data = yaml.safe_load((tmp_path / "c.yaml").read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = {"value": value, "source": "a slip"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match=words):
        load_cluster(tmp_path / "c.yaml")


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTURE))
    return file


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


ASKED = ("--cluster", "h200", "--gpus", 32, "--global-batch", 64, "--seq", 4096)


def test_search_then_explain_then_predict(config: Path, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.yaml", tmp_path / "report.html"
    done = run("search", config, *ASKED, "--fix", "ep=8", "-o", plan, "--html", page, "--top", 3)
    assert done.exit_code == 0, done.output
    for word in ("step s", "MFU", "peak GiB", "exposed", "considered", "plan.yaml"):
        assert word in done.output
    saved = Plan.of(plan)
    assert saved.mesh.ep == 8 and saved.mesh.world == 32 and saved.dtype.compute == "bf16"
    assert saved.dtype.master == "fp32" and saved.expected is not None
    html = page.read_text()
    for word in ("<svg", "gather", "all_to_all", "where the seconds go", "runner-up", "optimizer", "plan.yaml"):
        assert word in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html

    done = run("explain", plan)
    assert done.exit_code == 0, done.output
    for word in ("matmul", "optimizer", "chosen by the search", "--fix ep=8", "asked", "runner-up"):
        assert word in done.output, done.output

    done = run("predict", "--plan", plan, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["best"]["step_s"] == pytest.approx(saved.expected["step_s"], abs=1e-5)


def test_search_as_json(config: Path) -> None:
    told = json.loads(run("search", config, *ASKED, "--json", "--top", 2).output)
    assert len(told["ranked"]) == 2 and told["ranked"][0]["step_s"] <= told["ranked"][1]["step_s"]
    assert Plan.of(told["plan"]).mesh.world == 32


def test_inspect_shows_the_predicted_step(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXTURE | {"num_hidden_layers": 2, "vocab_size": 512}))
    out = tmp_path / "dump"
    done = run("inspect", config, "--set", "mesh.fsdp=8", "--set", "mesh.ep=4", "--cluster", "h100", "-o", out)
    assert done.exit_code == 0, done.output
    html = (out / "index.html").read_text()
    for word in ("predicted on h100", "all_to_all", "model.layers.1", "optimizer", "GiB", "-Prefetch", "data-pair"):
        assert word in html, word


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cluster", "h1000"), ["h1000", "h100", "mi300x"]),
        (("--cluster", "h100", "--gpus", 8), ["--global-batch", "--seq"]),
        ((*ASKED, "--fix", "ep=8,ep=4"), ["ep"]),
        ((*ASKED, "--fix", "ep"), ["ep"]),
        ((*ASKED, "--set", "mesh.sp=4", "--fix", "sp=2"), ["sp=2", "contradicts", "mesh.sp=4"]),
    ],
)
def test_a_command_that_cannot_be_understood(config: Path, arguments: Any, words: list[str]) -> None:
    done = run("search", config, *arguments)
    assert done.exit_code == 2 and "Traceback" not in done.output
    for word in words:
        assert word in " ".join(done.output.split()), done.output


def _calibrated(path: str) -> None:
    effort = Effort(sizes=(32, 128), lengths=(64, 128), moved_bytes=2**22, messages=(2**12, 2**18), rounds=2)
    with mock.patch.object(Effort, "of", lambda *_: effort):
        calibrate(CalibrateOptions(Path(path), (), quick=True))


def test_a_machine_is_measured_into_a_file_that_search_takes(world: World, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    world.run(_calibrated, str(file))
    measured = load_cluster(file)
    assert 1e8 < measured.accelerator.peak("fp32") < 1e14 and measured.levels[-1].bytes_per_s > 1e5
    done = run("search", config, "--cluster", file, "--gpus", 1024, "--global-batch", 1024, "--seq", 512, "--top", 1)
    assert done.exit_code in (0, 2) and "Traceback" not in done.output, done.output
    assert "on 1024 x" in done.output or "no plan" in done.output


# --- at run time -----------------------------------------------------------------------------------------------------


def _auto() -> tuple[str, list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("turbo_compile").addHandler(handler)
    model = build("qwen3")
    ids = ids_of(4, 16)
    model = turbo_compile(model, "auto", cluster="cpu", backend="eager", example={"input_ids": ids, "labels": ids})
    logging.getLogger("turbo_compile").removeHandler(handler)
    return model.plan.to_yaml(), told


def test_auto_is_searched_once_and_the_same_everywhere(world: World) -> None:
    (plan, told), (other, untold) = world.run(_auto)
    assert plan == other and Plan.of(yaml.safe_load(plan)).found_by["cluster"] == "cpu"
    assert len(told) == 1 and told[0].startswith("plan: ") and "predicted on cpu" in told[0] and not untold


def _train(plan: str) -> list[float]:
    torch.manual_seed(0)
    model = turbo_compile(build("qwen3"), plan, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sp = model.plan.mesh.sp
    batch = ids_of(4, 16).tensor_split(4 // sp)[torch.distributed.get_rank() // sp]
    losses = []
    for _ in range(10):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_found_plan_is_saved_loaded_and_trained(four: World, tmp_path: Path) -> None:
    model = cost_of_model(build("qwen3"), torch.float32)
    base = Plan.of({"dtype": {"compute": "fp32", "master": "fp32"}})
    result = search(model, load_cluster("cpu"), Request(4, 4, 16, fixed={"sp": 2}), base)
    plan_of(result.best, model, base).save(tmp_path / "plan.yaml")
    losses = four.run(_train, str(tmp_path / "plan.yaml"))
    assert all(each == losses[0] for each in losses) and losses[0][-1] < losses[0][0] - 1
