"""Kernel `cpp-silu`: the gate of a gated MLP (Shazeer 2020, arXiv:2002.05202) in compiled C++."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from jackfield import hookimpl
from jackfield.contracts import BindContext, FusedLayer, Kernel, KernelCapabilities

if TYPE_CHECKING:  # this module is imported whenever jackfield looks for backends: keep it light
    import torch
    from torch import nn

#: transformers' classes that all compute down(act(gate(x)) * up(x)).
LAYERS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
SILU = frozenset({"SiLU", "SiLUActivation"})


class CppSiluBackend(Kernel):
    """What is declared here is what `jackfield check` proves; anything else is refused."""

    name = "cpp-silu"
    capabilities = KernelCapabilities(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}))

    def available(self) -> list[str]:
        if importlib.util.find_spec(f"{__name__}._silu") is None:
            return ["its library was not compiled; pip install it again, with a C++ compiler"]
        return []

    def fits(self, module: nn.Module, options: Any) -> bool:
        """Asked of every module, before there are weights and again when they are read."""
        activation = type(getattr(module, "act_fn", None)).__name__
        return type(module).__name__ in LAYERS and activation in SILU

    def bind(self, context: BindContext) -> FusedLayer:
        from jackfield_cpp_silu.operator import silu_mul

        def make(module: nn.Module) -> Any:
            """What takes the place of `module.forward`: same arguments, same result."""

            def forward(x: torch.Tensor) -> torch.Tensor:
                # Its linears are called, not read: a quantizer may have put others there.
                return module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))

            return forward

        return FusedLayer(make)


@hookimpl
def jackfield_kernel() -> list[Kernel]:
    return [CppSiluBackend()]
