"""The printer and the dump: text that a person reads, short for deep models, the same in every run."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from tests.programs import chain, copied_step
from turbo_compile.differentiate import differentiate
from turbo_compile.ir.dump import open_dump
from turbo_compile.ir.elide import Line, elide_repeats
from turbo_compile.ir.page import page
from turbo_compile.ir.program import StepProgram
from turbo_compile.ir.runner import run, title
from turbo_compile.ir.segment_text import model_line, show_segments
from turbo_compile.ir.text import show
from turbo_compile.passes import forward_passes, step_passes
from turbo_compile.passes.prefetch import Prefetch
from turbo_compile.passes.shard import ShardParameters
from turbo_compile.plans.plan import Plan


@pytest.fixture(scope="module")
def step() -> StepProgram:
    """A step with everything the printer knows: router counts, a sum of gradients, HSDP."""
    program = chain(routed=True, tied=True, frozen={"model.layers.1.up.weight"})
    run(forward_passes(Plan()), program)
    made = differentiate(program, ("loss",))
    run(step_passes(Plan(mesh={"dp": 2}), made.blocks), made)
    return made


def test_program_text(snapshot):
    snapshot(show(chain(routed=True), after="capture"))


def test_step_text(step, snapshot):
    text = show(step, after="Prefetch(1)")
    assert re.search(r"saves \d+ B/token", text)
    snapshot(re.sub(r"saves [\d.]+ .*", "saves values", text))  # how much is torch's partitioner's choice


def test_segment_text(snapshot):
    snapshot("\n".join(show_segments(chain(routed=True)).values()))


def test_differentiated_segments_name_what_they_save(step):
    texts = show_segments(step)
    assert set(texts) == {
        f"{name}_none.{way}" for name in ("prologue", "block", "epilogue") for way in ("forward", "backward")
    } | {f"block_v2_none.{way}" for way in ("forward", "backward")}
    forward, backward = texts["block_none.forward"], texts["block_none.backward"]
    assert "called   1 time: model.layers.0\n" in forward
    assert re.search(r"saved parameters: %up\.weight, %down\.weight +# gathered again", forward)
    saved = re.findall(r"saved value (%\w+: fp32\[.*?\])", forward)
    assert saved and all(re.search(rf"^  {re.escape(value)} +# saved value$", backward, re.M) for value in saved)
    assert re.search(r"gradient of %up\.weight: %\w+ +# parameter", backward)
    for text in texts.values():
        made = re.findall(r"(?:^  |, )(%[\w.]+): ", text, re.M)
        assert len(made) == len(set(made)), text


def test_text_is_the_same_in_every_run_whatever_torch_calls_its_symbols(step):
    other = chain(routed=True, tied=True, frozen={"model.layers.1.up.weight"}, symbols="batch")
    assert other.batch_symbol != step.batch_symbol
    run(forward_passes(Plan()), other)
    again = differentiate(other, ("loss",))
    run(step_passes(Plan(mesh={"dp": 2}), again.blocks), again)
    assert show(again) == show(step)
    assert show_segments(again) == show_segments(step)
    symbols = re.compile(rf"\b({step.batch_symbol}|{step.sequence_symbol})\b")
    assert not any(symbols.search(text) for text in (show(step), *show_segments(step).values()))


def test_static_shapes_stay_numbers():
    program = chain()
    fixed = replace(program, batch_symbol=program.batch_symbol * 0 + 2, sequence_symbol=program.batch_symbol * 0 + 8)
    assert show(fixed).splitlines()[0].startswith("program  Chain   B=2 S=8; ")


def test_a_pass_renames_nothing_it_did_not_make():
    program = chain(tied=True)
    step = differentiate(program, ("loss",))
    before = show(step)
    ShardParameters(dict.fromkeys(step.blocks, True)).run(step)
    sharded = show(step)
    Prefetch(1).run(step)
    made = r"%[\w.]+(?=(?:, %[\w.]+)* = )"
    values = [set(re.findall(made, text)) for text in (before, sharded, show(step))]
    assert values[0] < values[1] == values[2]
    assert all(re.match(r"%[gr](\d|\.)", name) for name in values[1] - values[0])


# --- repeats ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> StepProgram:
    made = differentiate(chain(94), ("loss",))
    run((ShardParameters(dict.fromkeys(made.blocks, True)), Prefetch(1)), made)
    return made


def test_94_layers_take_no_more_text_than_a_page_and_leave_nothing_uncounted(deep):
    short, whole = show(deep).splitlines(), show(deep, elide=False).splitlines()
    assert len(short) <= 70
    counts = [re.search(r"(?:these (\d+) lines|this line) again, (\d+) times", line) for line in short]
    left_out = sum(int(found[1] or 1) * int(found[2]) for found in counts if found)
    assert len(short) - sum(found is not None for found in counts) + left_out == len(whole)
    assert "...  layers.1 to layers.92: these 3 lines again, 92 times" in short
    assert set(short) - set(whole) == {line for line, found in zip(short, counts, strict=True) if found}


def _blocks(kinds: str) -> list[Line]:
    lines = []
    for index, kind in enumerate(kinds):
        lines.append(Line(f"%g{index} = gather(%w{index})"))
        lines.append(Line(f"%h{index + 1} = {kind}(%g{index})", label=str(index)))
    return lines


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [
        ("a" * 10, 3),
        ("ab" * 10, 5),
        ("aaaaab" * 10, 13),
        ("a" * 10 + "b" * 10, 6),
        ("b" + "a" * 10 + "b", 7),
        ("aaa", 6),
        ("abcdefgh", 16),
    ],
)
def test_repeats_of_any_period_are_shown_once(kinds, shown):
    assert len(elide_repeats(_blocks(kinds))) == shown


def test_a_number_that_breaks_step_ends_a_run():
    lines = _blocks("a" * 12)
    lines[15] = Line("%h8 = a(%g3)", label="7")
    text = [line.code for line in elide_repeats(lines)]
    assert "%h8 = a(%g3)" in text


# --- lines of the model, options of a pass ---------------------------------------------------------------------------


def test_the_line_of_the_model_is_the_innermost_outside_torch_and_this_package():
    graph = fx.Graph()
    node = graph.placeholder("x")
    inside = Path(torch.__file__).parent / "nn" / "modules" / "linear.py"
    ours = Path(show.__code__.co_filename).parents[1] / "huggingface.py"
    frames = ["/home/turbo_compile_user/run.py", "/site/modeling_tiny.py", str(inside), str(ours)]
    node.meta["stack_trace"] = "".join(f'  File "{file}", line {n}, in f\n    x\n' for n, file in enumerate(frames, 1))
    assert model_line(node) == "modeling_tiny.py:2"
    assert model_line(graph.placeholder("y")) == ""


def test_a_pass_is_titled_with_its_options():
    blocks = [f"model.layers.{index}" for index in range(4)]
    assert title(Prefetch(2)) == "Prefetch(depth=2)"
    reshard = dict(zip(blocks, (True, True, True, False), strict=True))
    expected = "ShardParameters(reshard={model.layers.0-2: True, model.layers.3: False}, replicated=False)"
    assert title(ShardParameters(reshard)) == expected


# --- the dump --------------------------------------------------------------------------------------------------------


def _dumped(directory: Path) -> None:
    plan = Plan(mesh={"dp": 2, "fsdp": 2}, dtype={"reduce": "bf16"}, fuse=[])
    dump = open_dump(directory, plan, rank=0)
    program = chain()
    run(forward_passes(plan), program, dump=dump)
    step = differentiate(program, ("loss",))
    run(step_passes(plan, step.blocks), step, dump=dump)
    run(forward_passes(plan), chain(), dump=dump)


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("dump")
    directory.joinpath("07-Gone.txt").write_text("of an earlier dump")
    directory.joinpath("notes.txt").write_text("of a person")
    _dumped(directory)
    return directory


def test_a_dump_has_a_file_for_each_stage_and_segment(dump):
    stages = ["capture", "SumOverRanks", "differentiate", "Recompute", "ShardParameters", "Prefetch"]
    expected = {f"{number:02d}-{stage}.txt" for number, stage in enumerate(stages)}
    expected |= {"plan.yaml", "summary.txt", "index.html", "notes.txt", "segments", "2"}
    assert {path.name for path in dump.iterdir()} == expected
    names = ("prologue", "block", "epilogue")
    segments = {f"{name}.txt" for name in names}
    segments |= {f"{name}_none.{way}.txt" for name in names for way in ("forward", "backward")}
    assert {path.name for path in dump.joinpath("segments").iterdir()} == segments
    assert Plan.of(dump / "plan.yaml").mesh.fsdp == 2
    assert (dump / "05-Prefetch.txt").read_text().splitlines()[2] == "after    Prefetch(depth=1)"


def test_a_second_program_gets_a_folder_of_its_own(dump):
    assert {path.name for path in (dump / "2").glob("0*")} == {"00-capture.txt", "01-SumOverRanks.txt"}


def test_summary_counts_what_a_step_moves(dump, snapshot):
    text = (dump / "summary.txt").read_text()
    rows = [line for line in text.splitlines() if line[:2].isdigit()]
    milliseconds = text.splitlines()[2].index("  ms")
    timed = [row[:2] for row in rows if re.fullmatch(r"\d+\.\d", row[milliseconds:].strip())]
    assert timed == ["01", "03", "04", "05"]
    snapshot("\n".join(line[:milliseconds].rstrip() if line in rows else line for line in text.splitlines()))


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("TURBO_COMPILE_DUMP", raising=False)
    assert open_dump(tmp_path / "dump", Plan(), rank=1) is None
    assert open_dump(None, Plan(), rank=0) is None
    monkeypatch.setenv("TURBO_COMPILE_DUMP", str(tmp_path / "variable"))
    assert open_dump(None, Plan(), rank=0) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["variable"]


class _Texts(HTMLParser):
    """The text of each <pre> by its attributes, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[tuple[tuple[str, str | None], ...], str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: tuple[tuple[str, str | None], ...] | None = None

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "pre":
            self.open = tuple(attrs) or (("number", str(len(self.texts))),)
            self.texts[self.open] = ""

    def handle_endtag(self, tag):
        self.open = None if tag == "pre" else self.open

    def handle_data(self, data):
        if self.open is not None:
            self.texts[self.open] += data


def _read(html: str) -> _Texts:
    parser = _Texts()
    parser.feed(html)
    return parser


def test_the_page_holds_every_stage_and_difference_and_fetches_nothing(dump):
    parsed = _read((dump / "index.html").read_text())
    stages = sorted(dump.glob("0*.txt"))
    for number, file in enumerate(stages):
        for side in ("left", "right"):
            assert parsed.texts[("data-side", side), ("data-stage", str(number))] == file.read_text()
    pairs = {dict(key)["data-pair"] for key in parsed.texts if "data-pair" in dict(key)}
    assert pairs == {f"{a}-{b}" for a in range(len(stages)) for b in range(len(stages)) if a != b}
    changed = parsed.texts[(("data-pair", "4-5"),)]
    assert "+bwd  %g1 = wait(%g1.start)" in changed and "-bwd  %g1 = wait(%g1.start)" in changed
    assert not [tag for tag, attributes in parsed.tags if {"src", "href"} & set(attributes)]


def test_the_page_escapes_what_it_shows():
    hostile = "<script>alert(1)</script> & </pre>"
    html = page(hostile, [], [(hostile, hostile)])
    parsed = _read(html)
    assert list(parsed.texts.values()) == [hostile]
    assert [tag for tag, _ in parsed.tags].count("script") == 1


def test_copies_print_alike(step):
    assert show(copied_step(step)) == show(step)
