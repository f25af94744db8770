"""The head and the loss, fused and not: peak of live bytes beside the weight and its gradient, and time, on a CPU.

    python bench/head.py [--tokens 4096] [--vocabulary 151936] [--hidden 1024]

Each contender makes a loss from hidden states and backward to them and to the weight: transformers' own (logits, then
cross entropy), our loss over logits, and the fused op. Losses and gradients must agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from step import peak_bytes
from torch import Tensor
from torch.nn.functional import linear
from transformers.loss.loss_utils import ForCausalLMLoss

from turbo_compile.boundaries.linear_cross_entropy import linear_cross_entropy
from turbo_compile.boundaries.loss import causal_lm_loss

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
Measured = tuple[int, float, Tensor, tuple[Tensor, ...]]


def transformers_own(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ForCausalLMLoss(linear(hidden, weight), None, weight.shape[0], shift_labels=targets)


def loss_over_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return causal_lm_loss(linear(hidden, weight), targets, torch.tensor(float(targets.numel())))


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    count = torch.tensor(float(targets.numel()))
    return linear_cross_entropy(hidden, weight, None, targets, count, 1.0, 0.0, [True, True, False])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(1, options.tokens, options.hidden, requires_grad=True)
    weight = (0.02 * torch.randn(options.vocabulary, options.hidden)).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (1, options.tokens))
    table = Table(title=f"{options.tokens} tokens, {options.vocabulary} words, hidden {options.hidden}, fp32")
    for column in ("", "peak live MiB", "peak / transformers", "s", "time / transformers"):
        table.add_column(column, justify="right" if column else "left")
    found = {name: measure(head, hidden, weight, targets) for name, head in HEADS.items()}
    (peak, seconds, loss, gradients) = found["transformers: logits, cross entropy"]
    for name, (own_peak, own_seconds, own_loss, own_gradients) in found.items():
        torch.testing.assert_close(own_loss, loss)
        for ours, theirs in zip(own_gradients, gradients, strict=True):
            assert (ours - theirs).norm() < 1e-4 * theirs.norm(), name
        ratios = f"{own_peak / peak:.3f}", f"{own_seconds:.1f}", f"{own_seconds / seconds:.2f}"
        table.add_row(name, f"{own_peak / 2**20:,.0f}", *ratios)
    Console(width=110).print(table)


HEADS: dict[str, Head] = {
    "transformers: logits, cross entropy": transformers_own,
    "our loss over logits": loss_over_logits,
    "linear_cross_entropy": fused,
}


def measure(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[int, float, Tensor, tuple[Tensor, ...]]:
    """Peak of live bytes less the weight's gradient, seconds, the loss, and both gradients."""
    made: list[Tensor] = []

    def step(_: Tensor) -> None:
        loss = head(hidden, weight, targets)
        made.extend((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))

    peak, _ = peak_bytes(step, targets)
    start = time.perf_counter()
    step(targets)
    seconds = time.perf_counter() - start
    loss, *gradients = made[:3]
    return peak - weight.numel() * weight.element_size(), seconds, loss, tuple(gradients)


if __name__ == "__main__":
    main()
