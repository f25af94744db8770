"""The commands, as a user runs them: a model on paper, a parity table, a small training run, errors in one line."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, Gemma3TextConfig, GPT2Config, Phi3Config
from typer.testing import CliRunner, Result

from turbo_compile import testing
from turbo_compile.cli import app
from turbo_compile.commands import checking
from turbo_compile.commands.corpus import byte_tokenizer, pack, pad, read_documents
from turbo_compile.commands.models import tiny
from turbo_compile.commands.options import TrainOptions
from turbo_compile.commands.training import train_model
from turbo_compile.errors import TurboCompileError
from turbo_compile.plans.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A command is a process of its own: each starts and ends outside any process group."""
    _leave_group()
    yield
    _leave_group()


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3))
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from turbo_compile.cli import main; main()", *map(str, arguments)]


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_shows_the_step_of_any_number_of_ranks(config: Path, tmp_path: Path) -> None:
    done = run("inspect", config, "--set", "mesh.fsdp=1024", "--set", "recompute=full", "-o", tmp_path / "dump")
    assert done.exit_code == 0, done.output
    assert "fwd  %h1, %s0 = decoder_layer.full(%g0, %h0" in done.output
    assert "1024 ranks: fsdp=1024" in done.output
    assert "all_gather@shard" in done.output and "reduce_scatter@shard" in done.output
    assert "in 2 blocks" in done.output
    assert (tmp_path / "dump" / "index.html").exists()
    assert Plan.of(tmp_path / "dump" / "plan.yaml").mesh.fsdp == 1024
    assert not dist.is_initialized()


def test_inspect_reads_a_plan_file_under_settings_of_the_command_line(config: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("mesh: {dp: 2, fsdp: 4}\ndtype: {compute: bf16}\n")
    done = run("inspect", config, "--plan", plan, "--set", "mesh.dp=3")
    assert "12 ranks: dp=3, fsdp=4" in done.output
    assert "all_reduce@dp" in done.output
    assert "bf16[B, S, 32]" in done.output


# --- check -----------------------------------------------------------------------------------------------------------


def test_check_prints_the_table_and_passes(config: Path) -> None:
    done = run("check", config, "--backend", "eager")
    assert done.exit_code == 0, done.output
    assert "model.layers.1.mlp.down_proj.weight" in done.output
    assert re.search(r"ok: worst is \S+ with \S+ \(limit 1e-05\)", done.output)


def test_check_that_fails_exits_with_1(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "check", functools.partial(testing.check, tolerance=1e-12))
    done = run("check", config, "--tiny", "--backend", "eager")
    assert done.exit_code == 1
    assert "FAILED: worst is" in done.output


def test_tiny_keeps_the_structure() -> None:
    gemma = tiny(Gemma3TextConfig())
    assert gemma.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    deepseek = tiny(DeepseekV3Config())
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)  # one dense, one of experts
    assert deepseek.num_key_value_heads == deepseek.num_attention_heads
    gpt2 = tiny(GPT2Config())
    assert (gpt2.n_layer, gpt2.n_embd, gpt2.resid_pdrop, gpt2.eos_token_id) == (2, 64, 0.0, None)
    factors = [1.0] * 48
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    phi3 = tiny(Phi3Config(rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=128))
    assert len(phi3.rope_parameters["short_factor"]) == phi3.hidden_size // phi3.num_attention_heads // 2


# --- train -----------------------------------------------------------------------------------------------------------


def test_train_on_two_ranks_leaves_a_checkpoint_that_loads(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--ranks", 2, "--steps", 3, "--batch", 4, "--seq", 32, "--backend", "eager", "--output", out)
    done = subprocess.run(command("train", config, *options), cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    first, last = map(float, re.search(r"([\d.]+) at the first step, ([\d.]+) at the last", done.stdout).groups())  # type: ignore[union-attr]
    assert 0 < last < first < 6
    assert re.search(r"tokens/s, after [\d.]+ s of compilation", done.stdout)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.model_type == "qwen3"
    ids = torch.tensor([tokenizer("It is a truth universally acknowledged")["input_ids"]])
    with torch.no_grad():
        assert model(ids, labels=ids).loss < first


def options_for(config: Path, tmp_path: Path, plan: dict[str, Any], **changed: Any) -> TrainOptions:
    values: dict[str, Any] = {
        "data": None,
        "backend": "eager",
        "steps": 2,
        "lr": 1e-2,
        "batch": 4,
        "seq": 16,
        "pack": True,
        "seed": 0,
    }
    return TrainOptions(model=str(config), plan=Plan(**plan), output=tmp_path / "out", **(values | changed))


def test_micro_batches_accumulate_to_the_same_step(config: Path, tmp_path: Path) -> None:
    whole = train_model(options_for(config, tmp_path, {}))
    parts = train_model(options_for(config, tmp_path, {"batch": {"micro": 1}}))
    assert parts.first_loss == pytest.approx(whole.first_loss, abs=1e-5)
    assert parts.last_loss == pytest.approx(whole.last_loss, abs=1e-4)
    assert whole.last_loss < whole.first_loss


def test_documents_are_packed_and_kept_apart(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "abc"}\n\n{"text": "dé"}\n{"text": "xyzw"}\n', encoding="utf-8")
    tokenizer = byte_tokenizer()
    corpus = pack(read_documents(file), tokenizer, 257, 6)
    end = tokenizer.eos_token_id
    assert corpus.ids.tolist() == [[*b"abc", end, *"dé".encode()[:2]], ["dé".encode()[2], end, *b"xyzw"]]
    assert corpus.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]]
    assert (corpus.labels == -100).int().tolist() == [[1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]
    assert tokenizer.decode(tokenizer("naïve ☃\n")["input_ids"]) == "naïve ☃\n"
    seen = [corpus.batch(step, 1, 0)["input_ids"][0, 0].item() for step in range(2)]
    assert sorted(seen) == sorted(corpus.ids[:, 0].tolist())  # a pass over the text takes every row once


def test_documents_in_rows_of_their_own_are_cut_and_padded(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    corpus = pad(["abc", "", "defghij", "klmn", "opqrstuv"], tokenizer, 257, 4)
    end, x = tokenizer.eos_token_id, tokenizer.pad_token_id
    rows = [[*b"abc", end], [*b"defg"], [*b"hij", end], [*b"klmn"], [*b"opqr"], [*b"stuv"]]  # a last `end` is alone
    assert corpus.ids.tolist() == rows
    ignored = corpus.labels == -100
    assert ignored[:, 0].tolist() == [True, True, False, True, True, False] and not ignored[:, 1:].any()
    corpus = pad(["a", "bcdef"], tokenizer, 257, 5)
    assert corpus.ids.tolist() == [[*b"a", end, x, x, x], [*b"bcdef"]]
    assert corpus.mask is not None and corpus.mask.tolist() == [[1, 1, 0, 0, 0], [1] * 5]
    assert corpus.labels.tolist() == [[-100, end, -100, -100, -100], [-100, *b"cdef"]]
    assert corpus.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert set(corpus.batch(0, 2, 0)) == {"input_ids", "position_ids", "labels", "attention_mask"}
    with pytest.raises(TurboCompileError, match="token 256, but the model's vocabulary ends at 255"):
        pad(["a"], tokenizer, 256, 5)
    with pytest.raises(TurboCompileError, match="no document of two tokens"):
        pad([""], tokenizer, 257, 5)


def test_packed_or_padded_documents_give_the_same_loss(config: Path, tmp_path: Path) -> None:
    """Four documents of at most eight tokens: two packed rows of twelve, or four padded ones."""
    texts = ["the end", "abc", "a truth", "xyz"]  # 8 + 4 tokens a row of 12
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpora = [make(texts, byte_tokenizer(), 257, 12) for make in (pack, pad)]
    assert [tuple(corpus.ids.shape) for corpus in corpora] == [(2, 12), (4, 12)]
    assert [int((corpus.labels[:, 1:] != -100).sum()) for corpus in corpora] == [7 + 3 + 7 + 3] * 2
    values = {"data": file, "seq": 12, "lr": 1e-3}
    packed = train_model(options_for(config, tmp_path, {}, batch=2, **values))
    for plan in ({}, {"batch": {"micro": 1}}):
        padded = train_model(options_for(config, tmp_path, plan, batch=4, pack=False, **values))
        assert padded.first_loss == pytest.approx(packed.first_loss, abs=1e-5)
        assert padded.last_loss == pytest.approx(packed.last_loss, abs=1e-5)
    assert packed.last_loss < packed.first_loss


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "missing.json"), "there is no model at missing.json"),
        (("inspect", "CONFIG", "--set", "mesh.fsp=2"), "--set mesh.fsp: mesh has no key 'fsp'; did you mean 'fsdp'?"),
        (("inspect", "CONFIG", "--set", "fsdp"), "--set fsdp: write it as key=value"),
        (("inspect", "CONFIG", "--plan", "missing.yaml"), "cannot read the plan file missing.yaml"),
        (("inspect", "CONFIG", "--set", "fuse=[qk_norm]"), "fuse lists 'qk_norm'; it can be attention"),
        (("check", "CONFIG", "--ranks", "2", "--set", "mesh.fsdp=3"), "multiplies to 3, but the world has 2 ranks"),
        (("train", "CONFIG", "--data", "missing.txt"), "cannot read missing.txt: No such file"),
        (("train", "CONFIG", "--batch", "5000"), "fewer than a batch of 5000"),
        (("train", "CONFIG", "--seq", "500000"), "fewer than one row of 500000"),
        (("train", "CONFIG", "--no-pack", "--batch", "5000"), "makes 1129 rows of 128 tokens"),
        (("train", "CONFIG", "--set", "batch.micro=3", "--batch", "4"), "--batch 4 is not a multiple of micro"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*(str(config) if argument == "CONFIG" else argument for argument in arguments))
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("error: ") and message in line


def test_traceback_shows_where(config: Path) -> None:
    with pytest.raises(TurboCompileError):
        run("inspect", config, "--set", "mesh.fsp=2", "--traceback")


def test_a_line_of_data_without_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "fine"}\n{"txt": 1}\n')
    with pytest.raises(TurboCompileError, match=r"text\.jsonl:2: a line must be an object with a \"text\""):
        read_documents(file)


def test_a_launcher_of_another_size_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("train", config, "--ranks", 3, "--set", "mesh.fsdp=3")
    assert done.exit_code == 2
    assert "the launcher started 2 ranks" in done.stderr


def test_help_answers_without_torch() -> None:
    code = "import sys, turbo_compile.cli; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    listed = run("--help").output
    assert all(name in listed for name in ("inspect", "check", "train"))
