"""What programs took from a model when they were captured, and whether the model still has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from turbo_compile.errors import TurboCompileError


@dataclass(slots=True)
class Structure:
    """The modules and weights of a compiled model as they were.

    `held`: where each lies (a module's dict and a name in it), the object, its FQN; the root itself is not among them.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    held: tuple[tuple[dict[str, Any], str, Any, str], ...]
    hooks: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        modules = tuple((fqn, module) for fqn, module in model.named_modules() if fqn)
        held = tuple(
            (holder, name, value, f"{fqn}.{name}" if fqn else name)
            for fqn, module in model.named_modules()
            for holder in (module._modules, module._parameters)
            for name, value in holder.items()
        )
        return cls(modules, held, ()).hooked()

    def hooked(self) -> Structure:
        """The same, with the hooks its modules have now (capturing a model installs some of transformers' own)."""
        self.hooks = tuple(len(module._forward_hooks) + len(module._forward_pre_hooks) for _, module in self.modules)
        return self

    def mode(self) -> tuple[Any, ...]:
        """What may change between calls, and asks for a program of its own: training or not, dropout."""
        return tuple((module.training, module.__dict__.get("p")) for _, module in self.modules)

    def check(self) -> None:
        """
        Raises:
            TurboCompileError: a module or weight was replaced, or a hook put on one; names it.
        """
        for holder, name, value, fqn in self.held:
            if holder.get(name) is not value:
                raise TurboCompileError(
                    f"{fqn} was replaced after turbo_compile, which would train the old one; replace it before, or "
                    "copy new values into it with load_state_dict"
                )
        for (fqn, module), count in zip(self.modules, self.hooks, strict=True):
            if len(module._forward_hooks) + len(module._forward_pre_hooks) > count:
                raise TurboCompileError(
                    f"a hook was registered on {fqn} after the model was captured, which would never run; register it "
                    "before turbo_compile, so that it becomes part of the program"
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
