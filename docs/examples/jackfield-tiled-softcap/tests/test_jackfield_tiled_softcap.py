"""What jackfield checks of an attention, one test each, and what is only known here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jackfield_tiled_softcap import kernels, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("softcap", [None, 0.05])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 9), (33, 65)])
def test_the_kernel_is_the_reference(
    queries: int, keys: int, masked: bool, softcap: float | None
) -> None:
    query = torch.randn(2, 4, queries, 20, device=DEVICE)
    key, value = torch.randn(2, 2, 2, keys, 20, device=DEVICE).unbind()
    seen = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)
    given = (query, key, value, seen[None, None] if masked else None, 0.3, softcap)
    torch.testing.assert_close(kernels.attend(*given), reference.attend(*given))


@pytest.mark.jackfield_backend("plugin:tiled-softcap", kind="attention")
def test_declared(jackfield_check: Callable[[], None]) -> None:
    jackfield_check()
