"""Compile time against depth: capture to first backward, cold cache, one process; and torch.compile beside it.

    python bench/compile.py

Each measurement is a fresh process with an empty Inductor cache. Prints seconds, and two ratios: 64 layers over 4 of
turbo_compile, and 64 layers of turbo_compile over 16 layers of `torch.compile(model)`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

CONTENDERS = (("turbo_compile", 4), ("turbo_compile", 16), ("turbo_compile", 64), ("torch.compile", 16))


def measure_here(contender: str, layers: int) -> float:
    import torch
    from models import qwen3

    from turbo_compile import turbo_compile

    torch.set_num_threads(1)
    model = qwen3(layers, hidden=128, vocabulary=512)
    ids = torch.randint(0, 512, (2, 64))
    start = time.perf_counter()
    if contender == "turbo_compile":
        compiled = turbo_compile(model, {"mesh": {"fsdp": 1}})
    else:
        compiled = torch.compile(model, dynamic=True)
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.perf_counter() - start


def measure(contender: str, layers: int) -> float:
    """Seconds in a process of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--here", contender, str(layers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", nargs=2, metavar=("CONTENDER", "LAYERS"), help="measure one in this process")
    options = parser.parse_args()
    if options.here:
        print(measure_here(options.here[0], int(options.here[1])))
        return
    seconds = {}
    for contender, layers in CONTENDERS:
        seconds[contender, layers] = measure(contender, layers)
        print(f"{contender:14} {layers:3} layers  {seconds[contender, layers]:6.1f} s", flush=True)
    deep = seconds["turbo_compile", 64]
    print(f"64 layers over 4 layers: {deep / seconds['turbo_compile', 4]:.2f}")
    print(f"64 layers over torch.compile's 16 layers: {deep / seconds['torch.compile', 16]:.2f}")


if __name__ == "__main__":
    main()
