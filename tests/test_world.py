"""The world that other tests run in: results by rank, failures told, hangs ended."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.world import RankFailure, World


def total(value: float) -> float:
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor.item()


def failing(how: list[str]) -> None:
    match how[dist.get_rank()]:
        case "raise":
            raise ValueError("as asked")
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(3)


def test_failures_are_told_and_the_world_goes_on(world: World) -> None:
    with pytest.raises(RankFailure) as failure:
        world.run(failing, ["raise", "hang"], timeout=3)
    assert "rank 0: Traceback" in str(failure.value) and "ValueError: as asked" in str(failure.value)
    assert "rank 1: did not come back in time" in str(failure.value) and "in failing" in str(failure.value)
    with pytest.raises(RankFailure, match="^rank 1: died with exit code 3"):
        world.run(failing, ["", "die"])
    assert world.run(total, 1.0) == [3.0, 3.0]
