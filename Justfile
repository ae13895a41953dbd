set positional-arguments := true

python := ".venv/bin/python"

# List the recipes
default:
    @just --list

# Make a virtual environment with cbatch and its tools in it
setup:
    test -x {{python}} || python3 -m venv .venv
    test .venv/installed -nt pyproject.toml || {{python}} -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
    touch .venv/installed

# Generate completions for the samples with a small real model, and show the first
demo: setup
    .venv/bin/cbatch run samples/prompts.jsonl -o out/demo --overwrite
    head -n 3 out/demo/part-00000.jsonl

# Run the tests on all CPUs, a file at a time, with a process more because many wait; arguments go to pytest
test *args: setup
    {{python}} -m pytest -n $(({{num_cpus()}} + 1)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"

# Prove and measure the GPU path on a GPU; needs torch, triton and transformers, no installation
gpu-check *args:
    PYTHONPATH=. $(test -x {{python}} && echo {{python}} || echo python3) -m tests.gpu_check "$@"

# Measure what 8 bits cost a model: just quality MODEL
quality *args: setup
    {{python}} -m tests.quality "$@"

# Check style and types
lint: setup
    .venv/bin/ruff check .
    .venv/bin/ruff format --check --quiet .
    .venv/bin/mypy

# Everything that must pass before a commit
check: lint test
