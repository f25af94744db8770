"""What programs took from a model when they were captured, and whether the model still has it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NoReturn

from torch import nn

from turbo_compile.errors import TurboCompileError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(slots=True)
class Structure:
    """The modules and weights of a compiled model as they were.

    `held`: where each lies (a module's dict and a name in it), the object, its FQN; the root itself is not among them.
    Every call checks all of it, so what is compared lies side by side, for loops that Python does not interpret.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    held: tuple[tuple[dict[str, Any], str, Any, str], ...]
    holders: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    attributes: tuple[dict[str, Any], ...]
    hooks: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        modules = tuple((fqn, module) for fqn, module in model.named_modules() if fqn)
        held = tuple(
            (holder, name, value, f"{fqn}.{name}" if fqn else name)
            for fqn, module in model.named_modules()
            for holder in (module._modules, module._parameters)
            for name, value in holder.items()
        )
        return cls(
            modules=modules,
            held=held,
            holders=tuple(holder for holder, _, _, _ in held),
            names=tuple(name for _, name, _, _ in held),
            values=tuple(value for _, _, value, _ in held),
            attributes=tuple(vars(module) for _, module in modules),
        ).hooked()

    def hooked(self) -> Structure:
        """The same, with the hooks its modules have now (capturing a model installs some of transformers' own)."""
        self.hooks = self._hooks()
        return self

    def _hooks(self) -> tuple[int, ...]:
        before, after = (map(dict.__getitem__, self.attributes, repeat(kind)) for kind in _HOOKS)
        return (*map(len, before), *map(len, after))

    def mode(self) -> tuple[Any, ...]:
        """What may change between calls, and asks for a program of its own: training or not, dropout."""
        training, dropout = (map(dict.get, self.attributes, repeat(key)) for key in ("training", "p"))
        return (*training, *dropout)

    def check(self) -> None:
        """
        Raises:
            TurboCompileError: a module or weight was replaced, or a hook put on one; names it.
        """
        if not all(map(operator.is_, map(dict.get, self.holders, self.names), self.values)):
            fqn = next(fqn for holder, name, value, fqn in self.held if holder.get(name) is not value)
            raise TurboCompileError(
                f"{fqn} was replaced after turbo_compile, which would train the old one; replace it before, or "
                "copy new values into it with load_state_dict"
            )
        hooks = self._hooks()
        if any(map(operator.gt, hooks, self.hooks)):
            added = list(map(operator.gt, hooks, self.hooks)).index(True)
            raise TurboCompileError(
                f"a hook was registered on {self.modules[added % len(self.modules)][0]} after the model was captured, "
                "which would never run; register it before turbo_compile, so that it becomes part of the program"
            )


def refuse_new_embeddings(*_: Any, **__: Any) -> NoReturn:
    """What `resize_token_embeddings` of a compiled model does."""
    raise TurboCompileError("the embeddings of a compiled model are sharded; resize them before turbo_compile")


def refuse_copies(*_: Any) -> NoReturn:
    """What copying or pickling a compiled model does."""
    raise TurboCompileError(
        "a compiled model holds this rank's shards and compiled code, which cannot be copied or pickled; "
        "save_pretrained(dir) writes it whole, and state_dict() gives the shards"
    )
