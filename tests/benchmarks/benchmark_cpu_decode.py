"""One query token on the CPU: `cpu_decode` against torch's own attention, called in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from jackfield_plugins.attention.cpu_decode.call import Kernel

CALLS = 40


@pytest.mark.parametrize("keys", [256, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 8])
def benchmark_one_query_token(batch: int, dtype: torch.dtype, keys: int, alternate: Any) -> None:
    kernel = Kernel()
    torch.manual_seed(0)
    query = torch.randn(batch, 14, 1, 64, dtype=dtype)
    key, value = torch.randn(2, batch, 2, keys, 64, dtype=dtype)

    def ours() -> torch.Tensor:
        return kernel.padded(query, key, value)

    def theirs() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)

    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours(), theirs(), atol=bound, rtol=bound)

    def repeated(run: Any) -> Any:
        return lambda: [run() for _ in range(CALLS)] and None

    with torch.inference_mode():
        alternate(repeated(ours), repeated(theirs), CALLS)
