"""Plans: what is accepted, what is refused and in which words, and that nothing is lost on the way through a file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbo_compile.errors import PlanError
from turbo_compile.plans.plan import Batch, Mesh, ParameterRule, Plan, Schedule, check_supported, environment
from turbo_compile.plans.ranges import compress, match_globs, resolve_ranges
from turbo_compile.plans.sections import parse_placement
from turbo_compile.plans.source import from_mapping
from turbo_compile.plans.values import FrozenMap, divisors

DESIGN_EXAMPLE = """\
mesh: {dp: 1, fsdp: 32, sp: 4, ep: 8}
batch: {global: 64, micro: 1, seq: 32768, shapes: dynamic}
dtype: {compute: bf16, reduce: fp32, master: fp32}
parameters:
  model.layers.*.mlp.experts: {placement: Shard(0), axis: edp}
replicate_below: 0
recompute: {model.layers.0-31: none, model.layers.32-63: full}
schedule: {reshard: true, prefetch: 1, overlap: true}
experts: {capacity: exact}
sequence: {boundary: auto}
fuse: auto
expected: {step_s: 1.42, peak_gib: 71.3, exposed_comm_s: 0.11}
"""

LAYERS = [f"model.layers.{index}" for index in range(4)]


def refused(fragments: list[str], call: Any, *args: Any, **kwargs: Any) -> PlanError:
    """The PlanError `call` raises, whose message holds every fragment."""
    with pytest.raises(PlanError) as caught:
        call(*args, **kwargs)
    for fragment in fragments:
        assert fragment in str(caught.value)
    return caught.value


# --- what a plan is ---------------------------------------------------------------------------------------------


def test_a_plan_takes_nested_dicts_or_the_sections_classes() -> None:
    plan = Plan(mesh={"fsdp": 2, "sp": 2}, dtype={"compute": "bf16"}, batch={"global": 8})
    assert plan.mesh == Mesh(fsdp=2, sp=2)
    assert plan.dtype.compute == "bf16"
    assert plan == Plan(mesh=Mesh(fsdp=2, sp=2), dtype=plan.dtype, batch=Batch(global_=8))


def test_defaults() -> None:
    plan = Plan()
    assert plan.mesh.world == 1
    assert (plan.dtype.compute, plan.dtype.reduce, plan.dtype.master) == ("model", "auto", "model")
    assert (plan.recompute, plan.schedule, plan.replicate_below, plan.fuse) == ("none", Schedule(True, 1), 0, "auto")
    assert plan.parameters == {} and plan.expected is None and plan.batch.shapes == "dynamic"
    assert set(plan.origins.values()) == {"default"}


def test_mesh_sizes() -> None:
    mesh = Mesh(dp=3, fsdp=2, sp=4, ep=2)
    assert (mesh.world, mesh.shard, mesh.edp) == (24, 8, 4)
    mesh.check_world(24)


def test_a_plan_cannot_change_and_can_be_a_key() -> None:
    rules = {"*": {"placement": "Replicate"}}
    plan = Plan(parameters=rules, recompute={"model.layers.0-3": "full"}, fuse=["attention"])
    rules["late"] = {}
    assert list(plan.parameters) == ["*"]
    with pytest.raises(FrozenInstanceError):
        plan.fuse = "auto"  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.parameters["x"] = ParameterRule()  # type: ignore[index]
    twin = pickle.loads(pickle.dumps(plan))
    assert twin == plan and twin.origins == plan.origins and {plan: 1}[twin] == 1


def test_replace_makes_a_checked_plan() -> None:
    assert replace(Plan(recompute="full"), mesh={"fsdp": 2}) == Plan(recompute="full", mesh={"fsdp": 2})
    refused(["mesh.fsdp"], replace, Plan(), mesh={"fsdp": 0})


def test_the_order_of_globs_is_part_of_the_plan() -> None:
    a, b = {"a": {"placement": "Replicate"}}, {"b": {"placement": "Replicate"}}
    assert Plan(parameters=a | b) != Plan(parameters=b | a)


# --- files ------------------------------------------------------------------------------------------------------


def test_the_documented_example_is_read_and_written_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(DESIGN_EXAMPLE)
    plan = Plan.of(file)
    assert plan.mesh.edp == 16
    assert plan.batch == Batch(64, 1, 32768)
    assert plan.parameters == {"model.layers.*.mlp.experts": ParameterRule("Shard(0)", "edp")}
    assert plan.recompute == {"model.layers.0-31": "none", "model.layers.32-63": "full"}
    assert plan.expected is not None and plan.expected["peak_gib"] == 71.3
    assert plan.to_yaml() == DESIGN_EXAMPLE
    assert Plan.of(str(file)) == plan
    assert Plan.of(plan) is plan


def test_every_default_is_written_out() -> None:
    text = Plan().to_yaml()
    for key in (
        "dp: 1",
        "global: null",
        "reduce: auto",
        "parameters: {}",
        "prefetch: 1",
        "capacity: exact",
        "expected",
    ):
        assert key in text
    assert "origins" not in text and "global_" not in text


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)
sizes = st.integers(1, 1024)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    fsdp, sp = draw(sizes), draw(sizes)
    words = st.sampled_from(["none", "selective", "full"])
    ranges = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda at: f"model.layers.{min(at)}-{max(at)}")
    floats = ["bf16", "fp16", "fp32", "fp64"]
    rule = st.builds(ParameterRule, st.sampled_from(["Shard(0)", "Replicate"]), st.sampled_from(["shard", "ep", "edp"]))
    numbers = st.floats(0, 1e12, allow_nan=False) | st.integers(0, 9)
    return Plan(
        mesh={"dp": draw(sizes), "fsdp": fsdp, "sp": sp, "ep": draw(st.sampled_from(divisors(fsdp * sp)))},
        batch={"seq": draw(st.none() | sizes), "shapes": draw(st.sampled_from(["dynamic", "static"]))},
        dtype={
            "compute": draw(st.sampled_from(["model", *floats])),
            "reduce": draw(st.sampled_from(["auto", *floats])),
        },
        parameters=draw(st.dictionaries(names, rule, max_size=3)),
        replicate_below=draw(st.integers(0, 2**40)),
        recompute=draw(words | st.dictionaries(ranges, words, min_size=1, max_size=3)),
        schedule={
            "reshard": draw(st.booleans() | st.dictionaries(ranges, st.booleans(), min_size=1, max_size=3)),
            "prefetch": draw(st.integers(0, 9)),
        },
        fuse=draw(st.just("auto") | st.lists(names, unique=True, max_size=3)),
        expected=draw(st.none() | st.dictionaries(names, numbers, max_size=3)),
    )


@given(plans())
def test_round_trips(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    plan.save(file)
    again = Plan.of(file)
    assert again == plan and hash(again) == hash(plan)
    assert again.to_yaml() == plan.to_yaml()
    assert Plan.of(plan.to_dict()) == plan
    assert Plan.layers(plan) == plan


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*Plan().to_dict(), "mehs"]), anything)
def test_a_wrong_value_is_a_plan_error_and_nothing_else(key: str, value: object) -> None:
    try:
        plan = Plan(**{key: value})
    except PlanError as error:
        assert error.key.startswith(key) and key in str(error)
    else:
        assert Plan.of(plan.to_dict()) == plan


# --- refused values ---------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"mehs": {}}, ["a plan has no key 'mehs'", "did you mean 'mesh'"]),
    ({"mesh": {"fdsp": 2}}, ["mesh has no key 'fdsp'", "did you mean 'fsdp'", "dp, fsdp, sp or ep"]),
    ({"mesh": {2: 2}}, ["mesh has no key 2"]),
    ({"mesh": 2}, ["mesh must be a mapping, not 2"]),
    ({"mesh": {"fsdp": 0}}, ["mesh.fsdp must be a positive whole number, not 0"]),
    ({"mesh": {"fsdp": -2}}, ["mesh.fsdp", "-2"]),
    ({"mesh": {"fsdp": 2.0}}, ["mesh.fsdp", "2.0"]),
    ({"mesh": {"fsdp": True}}, ["mesh.fsdp", "True"]),
    ({"mesh": {"fsdp": "two"}}, ["mesh.fsdp", "'two'"]),
    ({"mesh": {"fsdp": 2, "sp": 3, "ep": 4}}, ["mesh.ep=4 does not divide fsdp x sp = 6", "1, 2, 3 or 6"]),
    ({"batch": {"global_": 2}}, ["batch has no key 'global_'", "did you mean 'global'"]),
    ({"batch": {"micro": 0}}, ["batch.micro"]),
    ({"batch": {"shapes": "statc"}}, ["batch.shapes", "did you mean 'static'"]),
    (
        {"batch": {"global": 6, "micro": 1}, "mesh": {"fsdp": 4}},
        ["batch.global=6", "micro x dp x fsdp = 1 x 1 x 4 = 4"],
    ),
    ({"dtype": {"compute": "float32"}}, ["dtype.compute", "did you mean 'fp32'"]),
    ({"dtype": {"compute": "auto"}}, ["dtype.compute"]),
    ({"dtype": {"reduce": "model"}}, ["dtype.reduce", "auto, bf16"]),
    ({"dtype": {"master": 32}}, ["dtype.master", "32"]),
    ({"parameters": ["*"]}, ["parameters must be a mapping"]),
    ({"parameters": {3: {}}}, ["parameters", "not 3"]),
    ({"parameters": {"a.b": "Shard(0)"}}, ["parameters.a.b must be a mapping"]),
    ({"parameters": {"a": {"plcement": "Shard(0)"}}}, ["parameters.a has no key 'plcement'", "'placement'"]),
    ({"parameters": {"a": {"placement": "shard(0)"}}}, ["parameters.a", "did you mean 'Shard(0)'"]),
    ({"parameters": {"a": {"placement": "Partial"}}}, ["parameters.a", "Shard(0) or Replicate"]),
    ({"parameters": {"a": {"axis": "dp"}}}, ["parameters.a", "shard, ep or edp"]),
    ({"replicate_below": -1}, ["replicate_below", "at least 0", "-1"]),
    ({"replicate_below": "1MiB"}, ["replicate_below", "1MiB"]),
    ({"recompute": "some"}, ["recompute", "none, selective or full"]),
    ({"recompute": True}, ["recompute", "True"]),
    ({"recompute": {}}, ["recompute is an empty mapping"]),
    ({"recompute": {"model.layers.0-3": "all"}}, ["recompute.model.layers.0-3", "'all'"]),
    ({"recompute": {"model.layers.3-0": "full"}}, ["model.layers.3-0 runs backwards", "write model.layers.0-3"]),
    ({"schedule": {"reshard": "no"}}, ["schedule.reshard must be true or false"]),
    ({"schedule": {"reshard": {"a.0": "yes"}}}, ["schedule.reshard.a.0 must be true or false"]),
    ({"schedule": {"prefetch": -1}}, ["schedule.prefetch", "at least 0"]),
    ({"experts": {"capacity": "bound"}}, ["experts.capacity", "did you mean 'bounded'"]),
    ({"sequence": {"boundary": "entry"}}, ["sequence.boundary", "model_entry"]),
    ({"fuse": "attention"}, ["fuse must be auto or a list"]),
    ({"fuse": ["a", 1]}, ["fuse must be auto or a list"]),
    ({"fuse": ["a", "a"]}, ["fuse lists a more than once"]),
    ({"expected": {"step_s": "fast"}}, ["expected.step_s must be a number"]),
    ({"expected": {"step_s": float("nan")}}, ["expected.step_s"]),
    ({"expected": {1: 1.0}}, ["expected", "not 1"]),
]


@pytest.mark.parametrize(("values", "fragments"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_refused(values: dict[str, Any], fragments: list[str]) -> None:
    for make in (lambda: Plan(**values), lambda: Plan.of(values)):
        error = refused(fragments, make)
        assert error.key.partition(".")[0] == next(iter(values))
        assert isinstance(error, ValueError)
        assert pickle.loads(pickle.dumps(error)).key == error.key


def test_the_classes_refuse_the_same() -> None:
    refused(["mesh.fsdp"], Mesh, fsdp=-1)
    refused(["placement"], ParameterRule, placement="Shard(x)")


@pytest.mark.parametrize("value", [None, 3, ["plan.yaml"]])
def test_what_is_no_plan(value: Any) -> None:
    refused(["a plan is a Plan, a dict or the path of a YAML file", repr(value)], Plan.of, value)


FILES = [
    ("mesh:\n  fsdp: 2\n  fsdp: 4\n", ["plan.yaml:3:", "mesh.fsdp is written twice", "line 2"]),
    ("mesh: {}\n\nmesh: {fsdp: 2}\n", ["plan.yaml:3:", "mesh is written twice", "line 1"]),
    ("mesh: {fsdp: 2\n", ["plan.yaml:2:", "bad YAML"]),
    ("fuse: auto\n\tmesh: {}\n", ["plan.yaml:2:", "bad YAML"]),
    ("parameters:\n  *.mlp: {}\n", ["plan.yaml:2:", "quote a value that begins with *"]),
    ("mesh: {}\nfuse: 2020-99-99\n", ["plan.yaml:2:", "bad YAML"]),
    ("- mesh\n", ["plan.yaml:1:", "a plan is a mapping", "['mesh']"]),
    ("? [a]\n: 1\n", ["plan.yaml:1:", "a key must be one word"]),
    ("{}\n---\n{}\n", ["plan.yaml:2:", "another document"]),
    ("mesh: &again {dp: *again}\n", ["plan.yaml:1:", "nested too deep"]),
    ("mesh: !!python/object:os.system {}\n", ["plan.yaml:1:", "constructor"]),
    ("mesh: !!set {dp}\n", ["plan.yaml:1:", "mesh must be a mapping"]),
    ("mesh: \x00\n", ["plan.yaml:", "unprintable"]),
    ("fuse: auto\nmesh:\n  fdsp: 2\n", ["plan.yaml:3:", "mesh has no key 'fdsp'"]),
    ("fuse: auto\nmehs: {}\n", ["plan.yaml:2:", "a plan has no key 'mehs'"]),
    ("parameters:\n  a.b: {axis: shard}\n  c.d: {axis: dp}\n", ["plan.yaml:3:", "parameters.c.d"]),
    ("recompute:\n  model.layers.3-0: full\n", ["plan.yaml:2:", "backwards"]),
]


@pytest.mark.parametrize(("text", "fragments"), FILES, ids=[text for text, _ in FILES])
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, fragments: list[str]) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    refused(fragments, Plan.of, file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    refused(["cannot read the plan file", "missing.yaml", "No such file"], Plan.of, tmp_path / "missing.yaml")
    refused(["cannot read the plan file", "directory"], Plan.of, tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"fuse: \xe9\n")
    refused(["latin.yaml", "not UTF-8"], Plan.of, tmp_path / "latin.yaml")


def test_an_empty_file_is_the_default_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("# nothing yet\n")
    assert Plan.of(tmp_path / "plan.yaml") == Plan()


# --- layers -----------------------------------------------------------------------------------------------------


def test_the_later_source_wins_and_origins_say_which(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("mesh: {fsdp: 2, dp: 2}\ndtype:\n  compute: fp16\n  master: fp32\nrecompute: full\n")
    model = from_mapping({"mesh": {"fsdp": 16}, "replicate_below": 1024}, "model")
    env = environment({"TURBO_COMPILE_MESH_FSDP": "4", "TURBO_COMPILE_DTYPE_COMPUTE": "bf16", "HOME": "/"})
    plan = Plan.layers(model, file, env, None, {"mesh": {"fsdp": 8}})
    assert plan == Plan(
        mesh={"fsdp": 8, "dp": 2},
        dtype={"compute": "bf16", "master": "fp32"},
        recompute="full",
        replicate_below=1024,
    )
    origins = {key: origin for key, origin in plan.origins.items() if origin != "default"}
    assert origins == {
        "mesh.dp": f"{file}:1",
        "mesh.fsdp": "argument",
        "dtype.compute": "TURBO_COMPILE_DTYPE_COMPUTE",
        "dtype.master": f"{file}:4",
        "replicate_below": "model",
        "recompute": f"{file}:5",
    }


def test_globs_merge_and_a_repeated_one_moves_last() -> None:
    first = {"parameters": {"a": {"axis": "ep"}, "b": {"axis": "ep"}}}
    plan = Plan.layers(from_mapping(first, "model"), {"parameters": {"a": {"placement": "Replicate"}}})
    assert list(plan.parameters.items()) == [("b", ParameterRule(axis="ep")), ("a", ParameterRule("Replicate"))]
    assert plan.origins["parameters.a"] == "argument" and plan.origins["parameters.b"] == "model"


def test_ranges_and_lists_are_replaced_as_a_whole() -> None:
    ranges = {"recompute": {"model.layers.0-3": "full"}, "schedule": {"reshard": {"model.layers.0-3": False}}}
    plan = Plan.layers(ranges, {"recompute": {"model.layers.0-1": "none"}, "schedule": {"reshard": True}})
    assert plan.recompute == {"model.layers.0-1": "none"} and plan.schedule.reshard is True


def test_a_plan_as_a_source_gives_what_was_written_not_its_defaults() -> None:
    env = environment({"TURBO_COMPILE_MESH_SP": "2", "TURBO_COMPILE_REPLICATE_BELOW": "9", "TURBO_COMPILE_FUSE": "[a]"})
    for argument in (Plan(mesh={"fsdp": 4}), Plan(mesh=Mesh(fsdp=4))):
        plan = Plan.layers(env, argument)
        assert plan == Plan(mesh={"sp": 2, "fsdp": 4}, replicate_below=9, fuse=["a"])
        assert plan.origins["mesh.sp"] == "TURBO_COMPILE_MESH_SP" and plan.origins["mesh.fsdp"] == "argument"
    assert Plan.layers(env, Plan(mesh={"sp": 1})).mesh.sp == 1
    assert Plan.layers(Plan.layers(env), {}).origins == Plan.layers(env).origins


def test_an_environment_section_gives_way_to_its_own_keys() -> None:
    env = environment({"TURBO_COMPILE_MESH": "{fsdp: 2, sp: 2}", "TURBO_COMPILE_MESH_FSDP": "8"})
    assert Plan.layers(env).mesh == Mesh(fsdp=8, sp=2)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBO_COMPILE_BATCH_GLOBAL", "12")
    assert Plan.layers(environment()).batch.global_ == 12


@pytest.mark.parametrize(
    ("variable", "value", "fragments"),
    [
        ("TURBO_COMPILE_MESH_FDSP", "2", ["TURBO_COMPILE_MESH_FDSP", "did you mean 'TURBO_COMPILE_MESH_FSDP'"]),
        ("TURBO_COMPILE_MESH_FSDP", "two", ["TURBO_COMPILE_MESH_FSDP: mesh.fsdp", "'two'"]),
        ("TURBO_COMPILE_MESH_FSDP", "", ["TURBO_COMPILE_MESH_FSDP: mesh.fsdp", "None"]),
        ("TURBO_COMPILE_MESH", "2", ["TURBO_COMPILE_MESH: mesh must be a mapping"]),
        ("TURBO_COMPILE_MESH", "{fsdp: 2", ["TURBO_COMPILE_MESH:1: bad YAML"]),
        ("TURBO_COMPILE_MESH", "{fsdp: 0}", ["TURBO_COMPILE_MESH: mesh.fsdp"]),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, fragments: list[str]) -> None:
    refused(fragments, lambda: Plan.layers(environment({variable: value})))


def test_variables_that_are_no_plan_keys_are_left_alone() -> None:
    assert Plan.layers(environment({"TURBO_COMPILE_DUMP": "dump"})) == Plan()


def test_a_section_that_is_no_mapping_is_not_hidden_by_a_later_source() -> None:
    refused(["model: mesh must be a mapping"], Plan.layers, from_mapping({"mesh": 2}, "model"), {"mesh": {"fsdp": 2}})


# --- against the world and the model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "ranks", "works"),
    [
        (Mesh(fsdp=2, sp=2), 8, "fsdp=4, dp=2 or sp=4 would work"),
        (Mesh(fsdp=2, sp=2), 3, "fsdp=3 with dp=1, sp=1 would work"),
        (Mesh(fsdp=2, ep=2), 3, "fsdp=3 with dp=1, sp=1, ep=1 would work"),
        (Mesh(fsdp=2, sp=2, ep=4), 12, "fsdp=6, dp=3 or sp=6 would work"),
        (Mesh(dp=2, fsdp=4, ep=4), 4, "dp=1 would work"),
    ],
)
def test_a_mesh_that_does_not_span_the_world(mesh: Mesh, ranks: int, works: str) -> None:
    refused([f"multiplies to {mesh.world}", f"the world has {ranks} ranks", works], mesh.check_world, ranks)


@given(st.builds(lambda dp, fsdp, sp: Mesh(dp, fsdp, sp), *[st.integers(1, 6)] * 3), st.integers(1, 64))
def test_a_suggested_mesh_spans_the_world(mesh: Mesh, ranks: int) -> None:
    if mesh.world == ranks:
        return mesh.check_world(ranks)
    error = refused([], mesh.check_world, ranks)
    first = str(error).split("; ")[1].split(" would work")[0].split(" or ")[0].split(", ")[0]
    axis, size = first.split(" with")[0].split("=")
    others = (
        {"dp": 1, "fsdp": 1, "sp": 1} if "with" in str(error) else {"dp": mesh.dp, "fsdp": mesh.fsdp, "sp": mesh.sp}
    )
    Mesh(**{**others, axis: int(size)}).check_world(ranks)


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"fuse": ["qk_norm"]}, ["fuse lists 'qk_norm'", "attention, linear_cross_entropy"]),
        ({"fuse": ["merged_linears"]}, ["'merged_linears'", "only linear_cross_entropy and grouped_experts"]),
        ({"experts": {"capacity": "bounded"}}, ["experts.capacity"]),
        ({"parameters": {"a": {"placement": "Shard(1)"}}}, ["parameters.a.placement=Shard(1)"]),
    ],
)
def test_what_this_version_cannot_do_yet(values: Mapping[str, Any], fragments: list[str]) -> None:
    refused(fragments, check_supported, Plan(**values))


def test_what_this_version_can_do() -> None:
    check_supported(
        Plan(mesh={"dp": 2, "fsdp": 2, "sp": 2, "ep": 2}, fuse=[], parameters={"a": {"placement": "Replicate"}})
    )


def test_placements() -> None:
    assert parse_placement("Shard(0)") == 0 and parse_placement("Replicate") is None
    assert ParameterRule("Shard(1)").dim == 1
    for word in ("Shard", "Shard(-1)", "Shard(0) ", "Partial", None):
        refused(["placement cannot be", repr(word)], parse_placement, word)


def test_ranges_resolve() -> None:
    assert resolve_ranges("full", LAYERS) == dict.fromkeys(LAYERS, "full")
    assert resolve_ranges(False, LAYERS) == dict.fromkeys(LAYERS, False)
    spec = {"model.layers.1-2": "full", "model.layers.3": "selective", "model.layers.0": "none"}
    assert list(resolve_ranges(spec, LAYERS).items()) == [
        ("model.layers.0", "none"),
        ("model.layers.1", "full"),
        ("model.layers.2", "full"),
        ("model.layers.3", "selective"),
    ]
    assert resolve_ranges({"model.layers.1-1": False}, LAYERS, default=True)["model.layers.0"] is True
    towers = ["visual.blocks.0", "visual.blocks.1", "merger", "text-2.layers.0"]
    assert list(resolve_ranges({"visual.blocks.0-1": 1, "merger": 2, "text-2.layers.0": 3}, towers).values()) == [
        1,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("spec", "fragments"),
    [
        ({"model.layers.0-2": "full"}, ["recompute says nothing of model.layers.3;"]),
        ({"model.layers.1": "full"}, ["says nothing of model.layers.0 and model.layers.2-3"]),
        (
            {"model.layers.0-2": "full", "model.layers.1-3": "none"},
            ["0-2 and model.layers.1-3 both cover model.layers.1-2"],
        ),
        ({"model.layers.0-3": "full", "model.layers.2": "none"}, ["both cover model.layers.2;"]),
        ({"model.layers.0-5": "full"}, ["the model has no model.layers.4-5", "its blocks are model.layers.0-3"]),
        ({"model.layers.0-99999999999": "full"}, ["the model has no model.layers.4-99999999999"]),
        ({"model.layer.0-3": "full"}, ["the model has no model.layer.0-3", "model.layers.0-3"]),
        ({"model.layers.7": "full"}, ["the model has no model.layers.7"]),
        ({"layers": "full"}, ["the model has no layers"]),
        ({"model.layers.3-0": "full"}, ["runs backwards", "write model.layers.0-3"]),
    ],
)
def test_ranges_that_do_not_fit_the_model(spec: Mapping[str, str], fragments: list[str]) -> None:
    refused(fragments, resolve_ranges, spec, LAYERS)


def test_a_range_error_names_its_key_in_the_plan() -> None:
    refused(["schedule.reshard"], resolve_ranges, {"model.layers.0": True}, LAYERS, what="schedule.reshard")
    refused(["it has no blocks"], resolve_ranges, {"model.layers.0": "full"}, [])
    refused(
        ["no model.layers.1 or model.layers.3;"],
        resolve_ranges,
        {"model.layers.0-3": 1},
        ["model.layers.0", "model.layers.2"],
    )


@given(st.sets(st.integers(0, 30)), st.sets(st.sampled_from(["head", "a.b"])))
def test_compressed_names_resolve_to_themselves(indices: set[int], others: set[str]) -> None:
    blocks = [*sorted(others), *(f"model.layers.{index}" for index in sorted(indices))]
    runs = compress(blocks)
    assert resolve_ranges(dict.fromkeys(runs, 1), blocks) == dict.fromkeys(blocks, 1)
    assert len(runs) == len(others) + sum(index - 1 not in indices for index in indices)


MODULES = [f"{layer}.{part}" for layer in LAYERS for part in ("self_attn", "mlp", "mlp.experts")]


def test_globs_match_and_the_last_wins() -> None:
    found = match_globs({"*.mlp*": 1, "model.layers.2.mlp": 2}, MODULES)
    assert found["model.layers.0.mlp"] == found["model.layers.2.mlp.experts"] == 1
    assert found["model.layers.2.mlp"] == 2
    assert "model.layers.0.self_attn" not in found and len(found) == 8


def test_an_unmatched_glob_is_an_error_that_names_near_modules() -> None:
    error = refused(
        ["parameters: 'model.layers.*.mlp.expert' matches no module", "did you mean 'model.layers."],
        match_globs,
        {"*": 1, "model.layers.*.mlp.expert": 2},
        MODULES,
    )
    assert error.key == "parameters.model.layers.*.mlp.expert"
    refused(["MODEL", "matches no module"], match_globs, {"MODEL.*": 1}, MODULES)


def test_a_frozen_map_is_a_mapping() -> None:
    frozen: FrozenMap[int] = FrozenMap({"a": 1, "b": 2})
    assert dict(frozen) == {"a": 1, "b": 2} and len(frozen) == 2 and frozen["a"] == 1
    assert frozen == {"a": 1, "b": 2} and frozen != {"b": 2, "a": 1} and frozen != 3
    assert hash(frozen) == hash(FrozenMap([("a", 1), ("b", 2)]))
