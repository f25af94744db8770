"""How parameters lie on the mesh: rows over an axis, or whole on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from turbo_compile.errors import PlanError
from turbo_compile.plans.plan import ParameterRule, Plan
from turbo_compile.plans.ranges import match_globs


@dataclass(frozen=True, slots=True)
class Layout:
    """One parameter on the `shard` axis: `Shard(0)` over `ranks`, or `Replicate` when `ranks` is 1.

    Rank r holds rows [r*chunk, (r+1)*chunk), fewer or none at the end: what `torch.chunk` gives.
    """

    shape: torch.Size
    ranks: int
    sharded: bool

    @property
    def chunk(self) -> int:
        """Rows a rank holds, padding included."""
        return -(-self.shape[0] // self.ranks) if self.sharded else self.shape[0]

    def rows(self, rank: int) -> tuple[int, int]:
        """The first row rank `rank` holds, and the one after its last."""
        if not self.sharded:
            return 0, self.shape[0]
        rows = self.shape[0]
        return min(rank * self.chunk, rows), min((rank + 1) * self.chunk, rows)

    @property
    def padded(self) -> torch.Size:
        """The full shape with rows padded to a multiple of the ranks."""
        return torch.Size((self.chunk * (self.ranks if self.sharded else 1), *self.shape[1:]))


def layouts(
    plan: Plan, parameters: Mapping[str, tuple[torch.Size, torch.dtype]], experts: tuple[str, ...] = ()
) -> dict[str, Layout]:
    """Where each parameter lies under `plan`: its rule, else sharded unless it is a scalar or below `replicate_below`.

    Those of the modules in `experts`, which ranks compute some of, are always sharded.

    Raises:
        PlanError: a glob of `plan.parameters` matches no module.
    """
    rules = rules_by_parameter(plan.parameters, parameters)
    ranks = plan.mesh.shard
    placed = {}
    for fqn, (shape, dtype) in parameters.items():
        rule = rules.get(fqn)
        small = shape.numel() * dtype.itemsize < plan.replicate_below
        if rule is not None and rule.dim is None and fqn.startswith(tuple(f"{module}." for module in experts)):
            raise PlanError(f"{fqn} is spread over ep and cannot be Replicate", key="parameters")
        small = small and not fqn.startswith(tuple(f"{module}." for module in experts))
        sharded = len(shape) > 0 and (rule.dim == 0 if rule is not None else not small)
        placed[fqn] = Layout(shape, ranks, sharded and ranks > 1)
    return placed


def rules_by_parameter(rules: Mapping[str, ParameterRule], parameters: Iterable[str]) -> dict[str, ParameterRule]:
    """The rule of each parameter that has one: a glob names parameters or modules, whose parameters it then covers."""
    parameters = list(parameters)
    paths = {path for fqn in parameters for path in _prefixes(fqn)}
    matched = match_globs(rules, sorted(paths))
    chosen: dict[str, ParameterRule] = {}
    for fqn in parameters:
        own = [matched[path] for path in _prefixes(fqn) if path in matched]
        if own:
            chosen[fqn] = own[-1]
    return chosen


def _prefixes(fqn: str) -> list[str]:
    """`a`, `a.b`, `a.b.c`: the modules around a parameter, and itself."""
    parts = fqn.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
