"""Of several GPUs, the one where the model is: launches on GPUs that are not there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, Gpu
from torch._subclasses.fake_tensor import FakeTensorMode

from jackfield.contracts import PackedLayer, PackedStep, PageTables, Span

pytest.importorskip("triton", reason="needs jackfield[triton]")

from jackfield_plugins.attention.triton import variants
from jackfield_plugins.attention.triton.launch import PagedAttention
from jackfield_plugins.kernel.rms_norm import Meaning
from jackfield_plugins.kernel.triton_rms_norm import launch as norm

PLACE = "cuda:1"


class There(torch.Tensor):
    """Says that it is on that GPU; views of a fake tensor cannot be made without CUDA."""

    device = property(lambda self: torch.device(PLACE))  # type: ignore[assignment]


def there(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype).as_subclass(There)


class Launches:
    """In place of every kernel of a module: notes the current device of each launch."""

    def __init__(self, module: ModuleType, cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
        self.on: dict[str, int] = {}
        kernels = [n for n, v in vars(module).items() if hasattr(v, "fn") and hasattr(v, "run")]
        for name in kernels:
            patch.setattr(module, name, _Kernel(lambda name=name: self._note(name, cuda)))
        self.kernels = set(kernels)

    def _note(self, name: str, cuda: FakeCuda) -> None:
        self.on[name] = cuda.current


class _Kernel:
    def __init__(self, launched: Any) -> None:
        self.__name__, self._launched = "fake", launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self._launched()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda([Gpu(), Gpu()]).install(monkeypatch)


def test_the_norm_is_launched_where_its_rows_are(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Launches(norm, cuda, monkeypatch)
    with FakeTensorMode():
        rows, weight = torch.empty(3, 64, device=PLACE), torch.empty(64, device=PLACE)
        norm.rms_norm(rows, weight, Meaning(1e-6, 0, rounds_first=True))
    assert seen.on == dict.fromkeys(seen.kernels, 1)
    assert len(seen.kernels) == 1
    assert cuda.current == 0


def test_attention_is_launched_where_its_pages_are(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Launches(variants, cuda, monkeypatch)
    counts = there(3, dtype=torch.int32)
    spans = [Span(0, 40, 40), Span(40, 1, 9000)]
    step = PackedStep(spans, counts, counts[:2], 40, 9000)
    table = there(2, 282, dtype=torch.int32)
    held = [list(range(2)), list(range(2, 284))]
    tables = PageTables(step, None, 32, table, counts[:2], held, [0, 0])
    pages = there(300, 32, 2, 64, dtype=torch.bfloat16)
    query = there(41, 4, 64, dtype=torch.bfloat16)
    PagedAttention()(query, PackedLayer(pages, pages, tables), scaling=0.1)
    assert seen.on == dict.fromkeys(seen.kernels, 1)
    assert len(seen.kernels) == 3  # prefill, decode, and the sum of its splits
    assert cuda.current == 0
