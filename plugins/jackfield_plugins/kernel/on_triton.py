"""What kernels in Triton have in common."""

from __future__ import annotations

from typing import Any

from jackfield.contracts import Kernel, Requirements
from jackfield_plugins.interpreting import interpreting, without_triton


class TritonKernel(Kernel):
    """One that `auto` takes on a GPU, and that is interpreted on a CPU."""

    def rank(self, requirements: Requirements) -> int | None:
        """For `auto`, where steps are recorded: else launching takes longer."""
        return 10 if requirements.device == "cuda" and requirements.recorded else None

    def available(self) -> list[str]:
        return without_triton()

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if requirements.device == "cpu" and not interpreting():
            reasons.append("runs on a CPU only under TRITON_INTERPRET=1, set before Python starts")
        return reasons
