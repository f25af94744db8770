"""What tests share: a world, and snapshots: texts kept so that a change shows as a diff (`pytest --update`)."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.world import World

# Captures make millions of small objects that live on: looking for garbage among them costs an eighth of the suite.
gc.set_threshold(50_000, 20, 20)

# Otherwise as Hypothesis found it (its own profile under CI): a busy machine is no reason to fail.
settings.register_profile("no_deadline", parent=settings(), deadline=None)
settings.load_profile("no_deadline")

SNAPSHOTS = Path(__file__).parent / "snapshots"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the snapshots under tests/snapshots/")


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`snapshot(text)` compares with tests/snapshots/<module>/<test>.txt; a name tells several in one test apart."""

    def check(text: str, name: str = "") -> None:
        stem = re.sub(r"[^\w.-]+", "-", request.node.name + (f".{name}" if name else "")).strip("-")
        file = SNAPSHOTS / request.node.path.stem / f"{stem}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"no snapshot {file.relative_to(SNAPSHOTS)}: run pytest --update, and read what it writes"
        assert text == file.read_text(encoding="utf-8"), "the snapshot differs; if that is meant, run pytest --update"

    return check


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two ranks that live as long as the session."""
    ranks = World(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    """Four ranks, for as long as a file needs them."""
    ranks = World(4)
    yield ranks
    ranks.stop()
