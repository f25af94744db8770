"""What ranks must agree on before a collective, and how one rank's failure reaches the others."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from turbo_compile import _torch
from turbo_compile.errors import RankError, TurboCompileError

_FAILURE = "turbo_compile/failure"
_BEAT = timedelta(seconds=5)
_MISSED = 12  # beats without a sign of life after which a rank is given up
_agreed = 0  # calls the ranks of this process group have entered together


def agree(what: str, numbers: Sequence[int], error: Exception | None, device: torch.device) -> list[list[int]]:
    """Compare `what` this rank is about to do with the others; returns every rank's `numbers`, as many on each.

    `error` is what is wrong with this rank's batch, if anything: it is raised here, and on the other ranks as the
    reason they stop. No rank enters the step unless all do.

    Raises:
        RankError: another rank failed, or is about to do something else.
    """
    global _agreed
    world = dist.get_world_size()
    if world == 1:
        if error is not None:
            raise error
        return [list(numbers)]
    rank, store = dist.get_rank(), _torch.default_store()
    mine = torch.tensor([_digest(what if error is None else "error"), *numbers], dtype=torch.long, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    if error is not None:
        store.set(f"{_FAILURE}/batch/{rank}", str(error))
    with failing_together("the call"):
        dist.all_gather(everyone, mine)
    if error is not None:
        raise error
    _agreed += 1
    digests, *told = torch.stack(everyone).T.tolist()
    if _digest("error") in digests:
        failed = digests.index(_digest("error"))
        raise RankError(f"rank {failed} stopped: {store.get(f'{_FAILURE}/batch/{failed}').decode()}")
    if any(digest != digests[0] for digest in digests):
        store.set(f"{_FAILURE}/call/{rank}", what)
        dist.barrier()
        said = [store.get(f"{_FAILURE}/call/{r}").decode() for r in range(world)]
        different = next(r for r in range(world) if digests[r] != digests[0])
        raise RankError(
            f"ranks call the model differently: rank 0 with {said[0]}; rank {different} with {said[different]}"
        )
    return [list(each) for each in zip(*told, strict=True)]


@contextlib.contextmanager
def failing_together(doing: str) -> Iterator[None]:
    """Leave the reason of a failure in the store; turn a collective that broke into the reason another rank left."""
    try:
        yield
    except TurboCompileError:
        raise
    except Exception as error:
        if dist.get_world_size() == 1:
            raise
        store = _torch.default_store()
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower():
            reason = _reason(store)
            if reason is not None:
                raise RankError(f"{doing} stopped, because {reason}") from error
            raise RankError(f"{doing} stopped: another rank is gone or did not answer in time ({error})") from error
        store.set(_reason_key(), f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")
        raise


def first_rank_first(work: Callable[[], object], beat: timedelta = _BEAT) -> None:
    """Rank 0 does `work`, the others wait on the store and then do it too, finding its results in the compile cache.

    They wait for as long as rank 0 shows signs of life: a compilation may take an hour.

    Raises:
        RankError: rank 0 failed; the message is its reason. Or it is gone.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        work()
        return
    store = _torch.default_store()
    turn = store.add(f"turbo_compile/turn/{rank}", 1)
    key, pulse = f"turbo_compile/done/{turn}", f"turbo_compile/pulse/{turn}"
    if rank == 0:
        try:
            with _beating(store, pulse, beat):
                work()
        except BaseException as error:
            store.set(key, f"rank 0 failed: {type(error).__name__}: {error}")
            raise
        store.set(key, "")
        return
    _wait_while_alive(store, key, pulse, beat)
    reason = store.get(key).decode()
    if reason:
        raise RankError(reason)
    work()


@contextlib.contextmanager
def _beating(store: dist.Store, pulse: str, beat: timedelta) -> Iterator[None]:
    """Count beats in the store while the body runs."""
    over = threading.Event()

    def count() -> None:
        while not over.wait(beat.total_seconds()):
            store.add(pulse, 1)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wait_while_alive(store: dist.Store, key: str, pulse: str, beat: timedelta) -> None:
    """Return when `key` is in the store; raise when its maker stops counting beats, or the store is gone."""
    beats, missed = -1, 0
    while missed < _MISSED:
        if _appears(store, key, beat):
            return
        counted = store.add(pulse, 0)
        beats, missed = counted, missed + 1 if counted == beats else 0
    raise RankError(f"rank 0 has shown no sign of life for {_MISSED * beat.total_seconds():.0f} s while it compiled")


def _reason(store: dist.Store) -> str | None:
    return store.get(_reason_key()).decode() if _appears(store, _reason_key(), timedelta(seconds=2)) else None


def _reason_key() -> str:
    """A failure is of one call: whoever survives it and goes on is not told its reason again."""
    return f"{_FAILURE}/reason/{_agreed}"


def _appears(store: dist.Store, key: str, within: timedelta) -> bool:
    """Whether somebody sets `key` in time. (`wait` would warn on stderr each time that nobody does.)"""
    end = time.monotonic() + within.total_seconds()
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
