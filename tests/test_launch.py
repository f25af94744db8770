"""Local ranks: one that fails ends all and is heard, and none outlives the command that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from turbo_compile.commands.failures import RankFailed
from turbo_compile.commands.launch import on_ranks
from turbo_compile.errors import TurboCompileError

ROOT = Path(__file__).resolve().parents[1]


def behave(how: str) -> int:
    """What a rank does in the tests below: rank 1 misbehaves, rank 0 waits for it."""
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("a bug")
        if how == "refuses":
            raise TurboCompileError("what to do instead")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleeps":
        Path(os.environ["READY"], str(dist.get_rank())).touch()
        time.sleep(600)
    dist.barrier()  # fails on rank 0 when rank 1 is gone: the reason to tell is rank 1's
    return dist.get_rank() + 10


@pytest.mark.parametrize(
    ("how", "message", "expected"),
    [
        ("raises", "a bug", False),
        ("refuses", "what to do instead", True),
        ("dies", "was killed by SIGKILL", True),
    ],
)
def test_one_failing_rank_ends_all_and_tells_its_own_reason(how: str, message: str, expected: bool) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=message) as failure:
        on_ranks(f"{__name__}:behave", how, 2)
    assert failure.value.rank == 1
    assert failure.value.expected is expected
    assert "in behave" in failure.value.details or how == "dies"
    assert time.monotonic() - began < 60


def test_ranks_that_succeed_hand_back_what_the_first_returned() -> None:
    assert on_ranks(f"{__name__}:behave", "well", 2) == 10


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ranks_end_with_the_command(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """After Ctrl-C, and even when the command is killed and can do nothing more."""
    body = (
        "import sys, turbo_compile.commands.launch as launch\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        f"        launch.on_ranks('{__name__}:behave', 'sleeps', 2)\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(130)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(body)
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = os.environ | {"READY": str(tmp_path), "PYTHONPATH": paths}
    parent = subprocess.Popen(
        [sys.executable, str(script)], env=environment, start_new_session=True, preexec_fn=_hear_interrupts
    )
    try:
        _wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), 90)
        parent.send_signal(sent)
        assert parent.wait(90) == code
        _wait_until(lambda: not _group_lives(parent.pid), 30)
    finally:
        if _group_lives(parent.pid):
            os.killpg(parent.pid, signal.SIGKILL)


def _hear_interrupts() -> None:
    """A shell starts what it runs in the background deaf to Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def _group_lives(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True
