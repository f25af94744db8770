"""Every Triton kernel, run by Triton's interpreter on drawn shapes, agrees with its reference in fp64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

NAMES = (
    "dispatch",
    "combine",
    "take",
    "put",
    "activate",
    "activate_backward",
    "grouped_mm",
    "grouped_sum",
    "gathered_mm",
    "gated_mm",
    "grouped_experts",
    "pack_heads",
    "unpack_heads",
    "pack_sequence",
    "unpack_sequence",
)


@cache
def _results() -> dict[str, Any]:
    """All cases' errors, from one process: an interpreter's start is worth several cases."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.triton_runner", "interpret"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    return {line["case"]: line["error"] for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_fp64(name: str) -> None:
    error = _results()[name]
    assert not error, error


def test_every_case_is_tested() -> None:
    assert set(_results()) == set(NAMES)
