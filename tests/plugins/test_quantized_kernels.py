"""What layers of quantizers run on is told: in the report and by `explain`, layer by layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build
from torch import nn

import jackfield
from jackfield.bridge.footprint import stored_as
from jackfield.registry.backends import Registered
from jackfield_plugins.quantizer import gptq
from jackfield_plugins.quantizer.bnb_8bit import Bnb8bit
from jackfield_plugins.quantizer.gptq import Gptq

GPU, HOST = (
    SimpleNamespace(device=torch.device("cuda:0")),
    SimpleNamespace(device=torch.device("cpu")),
)


@pytest.mark.parametrize(
    ("where", "nvcc", "said"),
    [
        (HOST, False, "by MarlinLinear of gptqmodel"),
        (GPU, True, "by MarlinLinear of gptqmodel"),
        (
            GPU,
            False,
            "by MarlinLinear of gptqmodel (no nvcc is here to compile its faster kernels with)",
        ),
    ],
)
def test_gptq_names_its_kernel(
    where: Any, nvcc: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptq, "_has_nvcc", lambda: nvcc)
    assert Gptq().runs_on(type("MarlinLinear", (), {"qweight": where})()) == said  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "threshold", "waits"),
    [(GPU, 6.0, True), (GPU, 0.0, False), (HOST, 6.0, False)],
)
def test_bnb_says_that_it_waits(where: Any, threshold: float, waits: bool) -> None:
    layer: Any = SimpleNamespace(weight=where, state=SimpleNamespace(threshold=threshold))
    said = Bnb8bit().runs_on(layer)
    assert (said is not None) is waits
    assert said is None or "above 6 ('bnb-8bit?threshold=0' looks for none)" in said


class Halves(Bnb8bit):
    """Takes every linear layer for one of its own; they run on two kernels."""

    seen = 0

    def converted(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def runs_on(self, module: nn.Module) -> str | None:
        return "on one kernel" if module.out_features == 120 else None  # type: ignore[comparison-overlap]


def test_kernels_are_counted_where_they_differ() -> None:
    model = build("llama", torch.float32)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    told = stored_as(model, Registered(Halves(), "d", "1", "e"))
    assert told == "15 of 15 linear layers, 1 on one kernel"


def test_explain_has_what_the_report_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # a pool of its own size: otherwise it is by the memory that is free when it is asked
    with jackfield.load(
        build("llama", torch.float32), cache_implementation="paged?num_tokens=512"
    ) as engine:
        plain = engine.explain()
        assert "weights: 14 of" not in plain
        monkeypatch.setattr(engine._bound, "stored", "14 of 15 linear layers, by X")
        assert engine.explain() == f"{plain}\n  weights: 14 of 15 linear layers, by X"
