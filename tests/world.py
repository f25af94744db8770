"""A small world of gloo processes that outlives the tests: `world.run(function, ...)` calls it on every rank.

A function is named by its module and qualified name, arguments and results are pickled. An exception comes back as a
`RankFailure` with its traceback. A call that raises, dies or hangs may leave collectives half done, so the processes
are then ended and started afresh at the next call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=30)


class RankFailure(AssertionError):
    """A function failed on a rank, or did not come back in time."""


class World:
    """`size` processes in one gloo group, each with one thread. They start at the first `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._logs: list[Any] = []
        self._store: dist.TCPStore | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """`function(*arguments)` on every rank; the results by rank.

        Raises RankFailure with the traceback of every rank that failed, or the stacks of those that hang.
        """
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failed:
            raise RankFailure("\n".join(failed))
        return [value for _, value in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[tuple[bool, Any]]:
        """Like `run`, but a rank that failed gives (False, what is known of the failure) instead of raising."""
        if not self._processes:
            self._start()
        message = pickle.dumps((function.__module__, function.__qualname__, arguments))
        for connection in self._connections:
            connection.send_bytes(message)
        deadline = time.monotonic() + timeout
        outcomes = [self._receive(rank, deadline) for rank in range(self.size)]
        if not all(ok for ok, _ in outcomes):
            self.stop()
        return outcomes

    def stop(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        for log in self._logs:
            log.close()
        self._processes, self._connections, self._logs = [], [], []

    def _start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            environment.pop(name, None)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun hosts it
        with tempfile.TemporaryDirectory() as folder, Listener(os.path.join(folder, "parent")) as listener:
            for rank in range(self.size):
                numbers = [str(number) for number in (self._store.port, rank, self.size)]
                command = [sys.executable, "-m", "tests.world", str(listener.address), *numbers]
                log = tempfile.TemporaryFile()
                # Each ends by itself when its connection does, should this process die first.
                self._processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                self._logs.append(log)
            by_rank = {}
            for _ in range(self.size):
                connection = listener.accept()
                by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(self.size)]
        for connection in self._connections:
            connection.send("join")  # all at once: on a busy machine the last starts long after the first

    def _receive(self, rank: int, deadline: float) -> tuple[bool, Any]:
        connection = self._connections[rank]
        try:
            if connection.poll(max(0.1, deadline - time.monotonic())):
                ok, value = pickle.loads(connection.recv_bytes())
                return ok, value
        except (EOFError, ConnectionError):
            self._processes[rank].wait()
            return False, f"died with exit code {self._processes[rank].returncode}\n{self._tail(rank)}"
        self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        return False, f"did not come back in time; it was here:\n{self._tail(rank)}"

    def _tail(self, rank: int) -> str:
        self._logs[rank].seek(0)
        return self._logs[rank].read().decode(errors="replace")[-4000:]


def main(address: str, port: int, rank: int, size: int) -> None:
    """One rank: join the group, then serve calls until the parent hangs up."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    gc.set_threshold(50_000, 20, 20)
    with Client(address) as parent:
        parent.send(rank)
        parent.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                parent.send_bytes(_serve(*pickle.loads(parent.recv_bytes())))


def _serve(module: str, name: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        return pickle.dumps((True, function(*arguments)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
