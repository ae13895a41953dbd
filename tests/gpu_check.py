"""Proves and measures the GPU path; under 8 minutes on one GPU, from a bare checkout, without network.

    PYTHONPATH=. python -m tests.gpu_check [--json PATH] [--only NAME]
    PYTHONPATH=. python -m tests.gpu_check --dry-run       everything from end to end on a CPU: interpreter, tiny shapes

Kernels against their float64 reference on real shapes; greedy equality with transformers on tiny models, with and without
CUDA graphs and running ahead; then speed, with random weights in the shape of Llama-3.1-8B and Qwen3-0.6B, against the
copy bandwidth and the matrix rate measured in the same run. One failure does not hide the rest: each check is a row of
the table that is printed last.
"""

from __future__ import annotations

import argparse
import os
import sys

if "--dry-run" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from cbatch.model import ops
from tests.gpu_kernels import check_kernels
from tests.gpu_models import check_models
from tests.gpu_results import Check


def backend(dry: bool) -> ops.Backend:
    """The Triton kernels, on the GPU or in the interpreter."""
    if dry:
        from tests.interpreter import INTERPRETER

        torch.set_num_threads(1)
        return INTERPRETER
    import triton

    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    return ops.choose(torch.device("cuda"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="", help="run the checks whose name holds this")
    options = parser.parse_args()
    check = Check(backend(options.dry_run), options.dry_run, options.only, options.json)
    check_kernels(check)
    check_models(check)
    print(f"\n{check.table()}")
    return int(not all(result.ok for result in check.results))


if __name__ == "__main__":
    sys.exit(main())
