"""The benchmark of the Triton attention runs, against its rival at its best; clocks are fake."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import benchmark_triton as benchmark
import extras
import pytest
import torch
from torch.nn.attention import varlen

from jackfield_plugins.attention.varlen import Rows, Scoring
from jackfield_plugins.attention.varlen_probe import reference

Calls = list[dict[str, Any]]


def kernel(calls: Calls, *, pages: bool) -> Any:
    """torch's function as 2.11 has it, or later ones, which read `pages`."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor, max_q: int, max_k: int, *, return_aux: Any = None,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:  # fmt: skip
        calls.append({"window": window_size, "keys": cu_seq_k.tolist(), "most": (max_q, max_k)})
        rows = Rows(cu_seq_q, cu_seq_k, max_q, max_k)
        scoring = Scoring(scale, causal=window_size[1] == 0)
        return reference(query, key, value, rows, scoring).to(query.dtype)

    def of_pages(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor, max_q: int, max_k: int, *, return_aux: Any = None,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert enable_gqa
        if block_table is not None:
            assert key.shape[1] % 256 == 0
            rows = list(zip(block_table, seqused_k, strict=True))
            key, value = (
                torch.cat([t[own].flatten(0, 1)[:n] for own, n in rows]) for t in (key, value)
            )
        calls.append({"pages": block_table is not None})
        return attend(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale,
            window_size=window_size,
        )  # fmt: skip

    return of_pages if pages else attend


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Nothing to record."""

    def elapsed_time(self, other: Event) -> float:
        return 2.0


@pytest.fixture(params=[False, True], ids=["torch 2.11", "later"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Calls:
    extras.needs("triton")
    found: Calls = []
    for name, value in {"DEVICE": "cpu", "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "ROUNDS": 1,
                        "ROTATED_BYTES": 1 << 16, "SCALING": 0.25}.items():  # fmt: skip
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(varlen, "varlen_attn", kernel(found, pages=request.param))
    for name, said in {"Event": Event, "synchronize": lambda: None, "_sleep": lambda _: None,
                       "get_device_name": lambda: "a GPU"}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, said)
    return found


def run(act: Any, *given: Any) -> dict[str, float]:
    """The figures of a benchmark."""
    info: dict[str, float] = {}
    made = SimpleNamespace(
        pedantic=lambda time, args, rounds: time(*args, rounds=1), extra_info=info, name="it"
    )
    act(*given, made, SimpleNamespace(disabled=contextlib.nullcontext))
    return info


def test_decode(calls: Calls) -> None:
    """Keys are split by that kernel where it is told of no window."""
    figures = run(benchmark.benchmark_decode, 2, 40, 16, 1e9)
    assert figures["ratio"] == 1
    assert figures["share"] == figures["share_of_torch"] > 0
    told = [call for call in calls if "window" in call]
    assert told
    assert all(call["window"] == (-1, -1) for call in told)
    assert all(call["keys"] == [0, 40, 80] and call["most"] == (1, 40) for call in told)
    assert all(call["pages"] for call in calls if "pages" in call)


def test_prefill(calls: Calls) -> None:
    assert run(benchmark.benchmark_prefill, 2, 20)["ratio"] == 1
    told = [call for call in calls if "window" in call]
    assert all(call["window"] == (-1, 0) and call["keys"] == [0, 20, 40] for call in told)
    assert not any(call["pages"] for call in calls if "pages" in call)


def test_a_rival_that_says_something_else_is_no_rival(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: right(*a, **k) + 0.1)
    with pytest.raises(AssertionError):
        run(benchmark.benchmark_decode, 2, 40, 16, 1e9)
