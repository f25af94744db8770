"""Run one function on every rank: in this process under a launcher, else in local processes of our own.

One failing rank ends all, and its reason is told once; when this process goes, however it goes, its ranks go too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from turbo_compile.commands.failures import RankFailed
from turbo_compile.commands.settings import launched
from turbo_compile.errors import PlanError, RankError, TurboCompileError

_LAST_WORDS_S = 5.0  # how long the other ranks may take to say what stopped them
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Finished:
    result: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    message: str
    details: str
    expected: bool
    echo: bool  # it stopped because another rank did


def on_ranks(work: str, argument: Any, ranks: int) -> Any:
    """Call `work`, a "module:function", with `argument` on `ranks` ranks; returns what rank 0 returned.

    Under a launcher this process is one of them, and the result is its own. By name, since a process that only
    starts others need not load what they run.

    Raises:
        RankFailed: a local rank failed, with the reason of the first.
    """
    world = launched()
    if world is None and ranks > 1:
        return _start(work, argument, ranks)
    if world is not None:
        if world != ranks:
            raise PlanError(f"the launcher started {world} ranks, but the plan and --ranks ask for {ranks}")
        _quiet_unless_first()
        _join(None)
    result = _named(work)(argument)
    _part()
    return result


def local_device() -> torch.device:
    """Where this rank computes: an accelerator of its own if there is one for each local rank, else the CPU."""
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", rank) if 0 < ranks <= torch.cuda.device_count() else torch.device("cpu")


# --- in the parent ---------------------------------------------------------------------------------------------------


def _start(work: str, argument: Any, ranks: int) -> Any:
    # The store lives here, so that it outlives every rank and its port is taken before anybody is told.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    ends: dict[Connection, int] = {}
    try:
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(work, argument, rank, ranks, store.port, theirs))
            process.start()
            theirs.close()  # so that the rank's death is the end of the pipe
            processes.append(process)
            ends[mine] = rank
        return _follow(ends, processes)
    finally:
        _stop(processes)


def _follow(ends: dict[Connection, int], processes: list[BaseProcess]) -> Any:
    """Wait for all ranks; returns rank 0's result, or raises what the first rank to fail by itself said."""
    result: Any = None
    failures: dict[int, _Failed] = {}
    deadline: float | None = None
    while ends and not any(not failure.echo for failure in failures.values()):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(ends), left)
        if not ready:
            break
        for end in ready:
            rank = ends.pop(end)  # type: ignore[call-overload]
            said = _hear(end, processes[rank])  # type: ignore[arg-type]
            if isinstance(said, _Failed):
                failures[rank] = said
                deadline = deadline or time.monotonic() + _LAST_WORDS_S
            elif rank == 0:
                result = said.result
    if failures:
        rank, first = min(failures.items(), key=lambda item: (item[1].echo, item[0]))
        raise RankFailed(rank, first.message, first.details, first.expected)
    return result


def _hear(end: Connection, process: BaseProcess) -> _Finished | _Failed:
    try:
        said: _Finished | _Failed = end.recv()
    except EOFError:
        process.join(_LAST_WORDS_S)
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return _Failed(f"a rank {how}{hint} without saying why", "", expected=True, echo=False)
    return said


def _stop(processes: list[BaseProcess]) -> None:
    """End what still runs: a moment to finish by itself, then terminated, then killed."""
    patience = 1.0 if sys.exc_info()[0] is not None else _LAST_WORDS_S
    _await(processes, patience)
    for process in processes:
        process.terminate()
    _await(processes, _LAST_WORDS_S)
    for process in processes:
        process.kill()
    _await(processes, _LAST_WORDS_S)


def _await(processes: list[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


# --- in a rank -------------------------------------------------------------------------------------------------------


def _rank(work: str, argument: Any, rank: int, ranks: int, port: int, end: Connection) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    _quiet_unless_first()
    try:
        _join(dist.TCPStore(_HOST, port, is_master=False))
        result = _named(work)(argument)
        said: _Finished | _Failed = _Finished(result if rank == 0 else None)
    except KeyboardInterrupt:
        return
    except Exception as error:
        expected = isinstance(error, TurboCompileError)
        said = _Failed(str(error), traceback.format_exc(), expected, _is_echo(error))
    end.send(said)
    end.close()
    if isinstance(said, _Finished):
        _part()


def _is_echo(error: Exception) -> bool:
    """Whether an error only says that another rank is gone."""
    torn = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl", "by peer"))
    return isinstance(error, RankError) or (isinstance(error, RuntimeError) and torn)


def _named(work: str) -> Any:
    module, _, function = work.partition(":")
    return getattr(import_module(module), function)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _join(store: dist.Store | None) -> None:
    """Join the process group: through `store`, or as the launcher's environment says."""
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend)
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _quiet_unless_first() -> None:
    """Warnings once, not once a rank."""
    if os.environ.get("RANK", "0") != "0":
        warnings.simplefilter("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
