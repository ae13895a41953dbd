from __future__ import annotations

import pytest
import torch

from cbatch.errors import UsageError
from cbatch.kernels.attention import AttentionSpec
from cbatch.model import ops
from cbatch.model.kv_cache import KVCache, cache_dtype, check_heads

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_token_takes_as_many_bytes_as_its_layer_says(dtype: torch.dtype) -> None:
    specs = [AttentionSpec(2, 16, 16, 0.25), AttentionSpec(1, 24, 8, 0.2, window=128)]
    cache = KVCache(dict(enumerate(specs)), num_blocks=3, block_size=5, dtype=dtype, device=CPU)
    for spec, k, v in zip(specs, cache.k.values(), cache.v.values(), strict=True):
        assert k.nbytes + v.nbytes == 15 * spec.bytes_per_token(dtype)
        assert k.shape == (3, 5, spec.num_kv_heads, spec.key_size)
        assert v.shape == (3, 5, spec.num_kv_heads, spec.value_size)


def test_of_int8_a_token_takes_a_scale_for_each_head_too() -> None:
    spec = AttentionSpec(2, 64, 48, 0.125)
    cache = KVCache({0: spec}, num_blocks=3, block_size=32, dtype=torch.int8, device=CPU)
    assert cache.k[0].nbytes + cache.v[0].nbytes == 96 * spec.bytes_per_token(torch.int8)
    assert spec.bytes_per_token(torch.int8) == 2 * (64 + 4 + 48 + 4)


BFLOAT16, GPU, SPEC = torch.bfloat16, torch.device("cuda"), AttentionSpec(2, 64, 64, 0.125)


@pytest.mark.parametrize(
    ("name", "device", "capability", "spec", "message"),
    [
        ("int8", GPU, (9, 0), SPEC, "on a GPU there is fp8"),
        ("fp8", CPU, (9, 0), SPEC, "on a CPU there is int8"),
        ("fp8", GPU, (8, 6), SPEC, "Some GPU has no fp8, which needs compute capability 8.9"),
        ("fp8", GPU, (9, 0), AttentionSpec(2, 64, 32, 0.125), "does not take this model's heads of 64 and 32 values"),
        ("int8", CPU, (9, 0), AttentionSpec(2, 24, 24, 0.125), "does not take this model's heads of 24 and 24 values"),
    ],
)
def test_a_cache_that_a_device_or_a_model_can_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    device: torch.device,
    capability: tuple[int, int],
    spec: AttentionSpec,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    with pytest.raises(UsageError, match=f"--kv-cache-dtype {name}.*{message}"):
        check_heads(cache_dtype(name, device, BFLOAT16, 32), [SPEC, spec], ops.choose(device))


def test_a_cache_has_the_dtype_asked_for_or_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    for name, device, expected in (
        ("auto", CPU, BFLOAT16),
        ("int8", CPU, torch.int8),
        ("fp8", GPU, torch.float8_e4m3fn),
    ):
        assert cache_dtype(name, device, BFLOAT16, 32) == expected
