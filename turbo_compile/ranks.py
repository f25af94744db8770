"""What ranks must agree on before a collective, and how one rank's failure reaches the others."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from turbo_compile import _torch
from turbo_compile.errors import RankError, TurboCompileError

_FAILURE = "turbo_compile/failure"


def agree(what: str, numbers: Sequence[int], error: Exception | None, device: torch.device) -> list[list[int]]:
    """Compare `what` this rank is about to do with the others; returns every rank's `numbers`, as many on each.

    `error` is what is wrong with this rank's batch, if anything: it is raised here, and on the other ranks as the
    reason they stop. No rank enters the step unless all do.

    Raises:
        RankError: another rank failed, or is about to do something else.
    """
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
        store.set(f"{_FAILURE}/reason", f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")
        raise


def first_rank_first(work: Callable[[], object], timeout: timedelta = timedelta(hours=1)) -> None:
    """Rank 0 does `work`, the others wait on the store and then do it too, finding its results in the compile cache.

    Raises:
        RankError: rank 0 failed; the message is its reason.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        work()
        return
    store = _torch.default_store()
    turn = store.add(f"turbo_compile/turn/{rank}", 1)
    key = f"turbo_compile/done/{turn}"
    if rank == 0:
        try:
            work()
        except BaseException as error:
            store.set(key, f"rank 0 failed: {type(error).__name__}: {error}")
            raise
        store.set(key, "")
        return
    store.wait([key], timeout)
    reason = store.get(key).decode()
    if reason:
        raise RankError(reason)
    work()


def _reason(store: dist.Store) -> str | None:
    key = f"{_FAILURE}/reason"
    try:
        store.wait([key], timedelta(seconds=2))
    except dist.DistError:  # nobody left a reason
        return None
    return store.get(key).decode()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
