"""`cbatch check`: what a run would meet, without the model's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from cbatch import plan
from cbatch.config import EngineConfig, RunConfig
from cbatch.errors import OK, SOME_FAILED, RowError
from cbatch.machine import available_memory, gpu_memory, resolve_device
from cbatch.output.record import RecordShape
from cbatch.output.target import Target
from cbatch.rows.inputs import resolve
from cbatch.rows.reader import read
from cbatch.rows.request import Row

_SHOWN = 20  # bad rows
_BAR = 40  # characters


def check(config: RunConfig) -> int:
    """Read and tokenize everything and print a report; SOME_FAILED if a row could not be completed."""
    from cbatch.model.loader import locate

    target = Target(config.output) if config.output.output else None
    sources = resolve(config.input.inputs, target.owns if target else lambda _: False)
    shape = target.shape if target else RecordShape(config.output.prefix)
    plan.check_first_rows(sources, config, shape)
    files = locate(config.engine.model)
    files.check()
    builder = plan.prompt_builder(config, files)

    lengths: Counter[int] = Counter()
    longest = failed = 0
    first: Row | None = None
    errors: Counter[str] = Counter()
    for row in read(sources, config.input.skip, config.input.limit):
        try:
            if not row.problem:
                shape.check(row)
            request = builder(row)
        except RowError as error:
            failed += 1
            errors[error.kind] += 1
            if failed <= _SHOWN:
                print(f"{error.kind}: {error}")
            continue
        first = first or row
        lengths[len(request.token_ids)] += 1
        longest = max(longest, min(len(request.token_ids) + request.params.max_tokens, builder.max_model_len))
    if failed > _SHOWN:
        print(f"... and {failed - _SHOWN:,} more")
    good = lengths.total()
    print(f"Rows        {good + failed:,}: {good:,} good, {failed:,} bad" + _counts(errors))
    if first is not None:
        for line in _prompt_lines(lengths):
            print(line)
        for line in _memory_lines(config.engine, files.config, lengths, builder.sampling.max_tokens, longest):
            print(line)
        print(f"First prompt ({first.where}, {'chat' if builder.chat else 'raw'}), as the model sees it:")
        print(builder.render(first))
    return SOME_FAILED if failed else OK


def _counts(errors: Counter[str]) -> str:
    return " (" + ", ".join(f"{count:,} {kind}" for kind, count in errors.most_common()) + ")" if errors else ""


def _prompt_lines(lengths: Counter[int]) -> Iterator[str]:
    """Totals and a histogram of the prompt lengths, in powers of two."""
    total = sum(length * count for length, count in lengths.items())
    yield f"Tokens      {total:,} in prompts: {min(lengths):,} to {max(lengths):,}, {total / lengths.total():.0f} on average"
    buckets: Counter[int] = Counter()
    for length, count in lengths.items():
        buckets[length.bit_length()] += count
    most = max(buckets.values())
    for bits in range(min(buckets), max(buckets) + 1):
        span = f"{2 ** (bits - 1):,} to {2**bits - 1:,}"
        yield f"  {span:>17} {'#' * -(-buckets[bits] * _BAR // most):<{_BAR}} {buckets[bits]:,}"


def _memory_lines(
    engine: EngineConfig, model_config: Any, lengths: Counter[int], max_tokens: int, longest: int
) -> Iterator[str]:
    """How many blocks the rows need and how many of them fit; from the model's configuration, so an estimate."""
    import torch

    from cbatch.model.kv_cache import LayerShape, cache_dtype, count_blocks
    from cbatch.model.loader import resolve_block_size, resolve_dtype

    text, device = model_config.get_text_config(), resolve_device(engine.device)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    block_size = resolve_block_size(engine.block_size, device.split(":")[0])
    dtype = cache_dtype(engine, torch.device(device), resolve_dtype(engine.dtype, device, model_config), block_size, [])
    block_bytes = text.num_hidden_layers * LayerShape(heads, size, size, 0).bytes_per_token(dtype) * block_size
    fit = count_blocks(
        block_bytes,
        engine.kv_cache_memory,
        most_useful=1 << 40,
        budget=lambda: _free_memory(device, engine.gpu_memory_utilization) // 2,
    )
    mean = sum(length * count for length, count in lengths.items()) / lengths.total() + max_tokens
    blocks = -(-round(mean) // block_size)
    yield (
        f"KV cache    a row takes {blocks:,} blocks of {block_size} tokens ({blocks * block_bytes / 1024**2:.1f} MiB) "
        f"on average with {max_tokens:,} new tokens, {-(-longest // block_size):,} at most; "
        f"about {fit:,} blocks fit here, {fit // blocks:,} rows at once"
    )


def _free_memory(device: str, gpu_memory_utilization: float) -> int:
    """Bytes that are free on a device."""
    if device == "cpu":
        return available_memory()
    free, total = gpu_memory(device)
    return max(0, free - int(total * (1 - gpu_memory_utilization)))
