"""Every Triton kernel compiles for GPUs that are not here: no spilled register, shared memory within the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")


@cache
def _results() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton_runner", "compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_kernels_fit(target: str) -> None:
    found = [result for result in _results() if result["target"] == target]
    assert len(found) >= 15
    wrong = {result["case"]: result["error"] for result in found if result["error"]}
    assert not wrong, "\n".join(f"{case}: {error}" for case, error in wrong.items())
