"""The whole matrix of parity: every supported family, both backends, several meshes, fp32 and bf16.

    python bench/families.py [--families llama,gpt2] [--backends eager,inductor]
    python bench/families.py --meshes 1x2,2x2,1x4               # fsdp x sp: sequence parallelism, up to four processes

Each cell is one `turbo-compile check` of the family's default configuration at toy size; the last column is its
verdict. About 12 x 8 cells; the inductor ones compile, so the whole takes most of an hour on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from itertools import product

from rich.console import Console
from rich.table import Table
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt2",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
)
COMMAND = "from turbo_compile.cli import main; main()"


def check(family: str, backend: str, mesh: str, dtype: str) -> tuple[bool, str]:
    """Whether the family's toy model agrees with eager on a mesh of fsdp x sp, and what `check` said."""
    fsdp, sp = mesh.split("x")
    config = CONFIG_MAPPING[family]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        arguments = ["--tiny", "--set", f"mesh.fsdp={fsdp}", "--set", f"mesh.sp={sp}"]
        arguments += ["--backend", backend, "--dtype", dtype]
        command = [sys.executable, "-c", COMMAND, "check", directory, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.returncode == 0, said[-1] if said else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--backends", default="eager,inductor")
    parser.add_argument("--meshes", default="1x1,2x1", help="each fsdp x sp")
    parser.add_argument("--dtypes", default="fp32,bf16")
    options = parser.parse_args()
    table = Table("family", "backend", "fsdp x sp", "dtype", "ok", "verdict")
    failed = 0
    axes = (options.families, options.backends, options.meshes, options.dtypes)
    for family, backend, mesh, dtype in product(*(axis.split(",") for axis in axes)):
        ok, verdict = check(family, backend, mesh, dtype)
        failed += not ok
        table.add_row(family, backend, mesh, dtype, "yes" if ok else "NO", verdict)
        print(family, backend, mesh, dtype, "ok" if ok else f"FAILED: {verdict}", flush=True)
    Console(width=160).print(table)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
