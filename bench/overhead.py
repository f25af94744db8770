"""Python a step costs, a parameter: forward and backward of a model too small to compute anything, profiled.

    python bench/overhead.py [--layers 32]

Time inside compiled segments is taken out (it is kernels and their launch, whoever calls them); what is left is this
package's own work in a step: reading the batch, the outer graphs, handing out gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from models import qwen3

from turbo_compile import turbo_compile
from turbo_compile.lower import Compiled
from turbo_compile.runtime import runtime_of


class Stopwatch:
    """Adds up the time spent in the callables it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, run: Compiled) -> Compiled:
        def timed(arguments: list[Any]) -> Any:
            start = time.perf_counter()
            results = run(arguments)
            self.seconds += time.perf_counter() - start
            return results

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = turbo_compile(qwen3(options.layers, hidden=128, vocabulary=128), {"mesh": {"fsdp": 1}})
    parameters = list(model.parameters())
    ids = torch.randint(0, 128, (1, 4))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        for parameter in parameters:
            parameter.grad = None

    for _ in range(5):
        step()
    watch = Stopwatch()
    for executable in runtime_of(model).executables.values():
        for graph in (executable.forward, executable.backward):
            for module in graph.modules() if graph is not None else ():
                if hasattr(module, "run"):
                    module.run = watch.around(module.run)
    own, whole = [], []
    for _ in range(options.steps):
        watch.seconds = 0.0
        start = time.perf_counter()
        step()
        whole.append(time.perf_counter() - start)
        own.append(whole[-1] - watch.seconds)
    count = len(parameters)
    print(f"{count} parameters, {options.layers} layers, median of {options.steps} steps")
    print(f"whole step              {statistics.median(whole) / count * 1e6:6.1f} us a parameter")
    print(f"outside compiled code   {statistics.median(own) / count * 1e6:6.1f} us a parameter")


if __name__ == "__main__":
    main()
