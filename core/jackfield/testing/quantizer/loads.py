"""Models that the quantizer under test has read, each once for all checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from jackfield.api import load, plan
from jackfield.bridge.footprint import tensors_of
from jackfield.contracts import BindContext
from jackfield.contracts.quantizing import plain_bytes
from jackfield.contracts.requirements import DTYPES
from jackfield.errors import CheckpointError, PlanError, shown
from jackfield.testing.checks import NotTriedError, WrongError
from jackfield.testing.quantizer.folders import Original, write
from jackfield.testing.subject import Subject

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine
    from jackfield.planning.planning import Plan


@dataclass(frozen=True, eq=False)
class Layer:
    """A converted layer, and what it stands for: float64 `[out_features, in_features]`, and a bias.

    `error` is how far its outputs may be from those of the weight, as a share of their norm.
    """

    path: str
    module: nn.Module
    weight: torch.Tensor
    bias: torch.Tensor
    dtype: torch.dtype
    error: float

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """Its output, as it is."""
        with torch.inference_mode():
            return self.module(given)  # type: ignore[no-any-return]

    def right(self, given: torch.Tensor) -> torch.Tensor:
        """What the whole weights say, float64, without the bias."""
        return given.double() @ self.weight.T

    def rounding(self, given: torch.Tensor) -> float:
        """What a linear layer of torch in this dtype is off by, as a share of the norm.

        The bias, which is rounded with the sum, is a part of it.
        """
        with torch.inference_mode():
            weight, bias = self.weight.to(self.dtype), self.bias.to(self.dtype)
            plain = nn.functional.linear(given, weight, bias).double() - self.bias
        right = self.right(given)
        return float((plain - right).norm() / right.norm())

    def bound(self, given: torch.Tensor) -> float:
        """The largest error that is right: what is declared, and rounding."""
        return self.error + 2 * self.rounding(given) + 1e-6

    def inputs(self, *rows: int, seed: int = 0) -> torch.Tensor:
        """Gaussian inputs `[*rows, in_features]` in its dtype."""
        drawn = torch.Generator().manual_seed(seed + sum(rows))
        return torch.randn(*rows, self.weight.shape[1], generator=drawn).to(self.dtype)


class Loads:
    """What the quantizer of `subject` makes of the kit's models; engines stay open."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._originals: dict[str, Original] = {}
        self._engines: dict[tuple[str, str], Engine] = {}
        self._plans: dict[tuple[str, str | None], Plan | PlanError] = {}

    @property
    def backend(self) -> Any:
        return self.subject.backend

    @property
    def into(self) -> Path | None:
        """Where files may be written; None: among the temporary ones."""
        return self.subject.folder if self.subject.folder.is_absolute() else None

    def original(self, name: str) -> Original:
        """A model as it was before it was quantized."""
        if name not in self._originals:
            self._originals[name] = write(name, self.into, self.subject.seed)
        return self._originals[name]

    def add(self, name: str, original: Original) -> None:
        """Have one more model, under a name of its own."""
        self._originals.setdefault(name, original)

    def arguments(self, dtype: str | None) -> dict[str, Any]:
        """Of `jackfield.load`: this quantizer, in `dtype`; None: in one that it chooses."""
        chosen = {"quantization": self.subject.selection, "device_map": self.subject.device}
        return chosen if dtype is None else {**chosen, "dtype": dtype}

    def dtypes(self) -> list[str]:
        """Those that are declared, in the contract's order."""
        return [name for name in DTYPES if name in self.backend.capabilities.dtypes]

    def dtype(self) -> str:
        """The one that checks use which need no more than one; float32 where that is declared."""
        return "float32" if "float32" in self.dtypes() else self.dtypes()[0]

    def main(self, kind: str = "small") -> str:
        """Which size of the model `small` or `rows` it takes. Raises for one that takes none."""
        wide = {"small": "wide", "rows": "rows wide"}[kind]
        first: PlanError | None = None
        for name in (kind, wide):
            try:
                self.planned(name, self.dtype())
            except PlanError as error:
                first = first or error
            else:
                return name
        assert first is not None
        raise self._untried(first)

    def asks_for_a_config(self) -> bool:
        """Whether it quantizes nothing of itself: it makes no config."""
        if self.backend.available():
            return False
        return self.backend.make_config(context(self.subject)) is None

    def _untried(self, error: PlanError) -> Exception:
        text = shown(error, 400)
        if not self.backend.quantizes:
            return NotTriedError(
                "it only reads checkpoints, and the kit has none of its own to give"
            )
        if self.backend.available() or self.subject.device not in self.backend.capabilities.devices:
            return NotTriedError(text)
        if self.asks_for_a_config():
            return NotTriedError(f"it quantizes by a config of the caller's alone: {text}")
        return WrongError(
            f"was asked for {self.dtype()} on {self.subject.device}, which it declares, and "
            f"refuses each model of the kit: {text}"
        )

    def planned(self, name: str, dtype: str | None = None) -> Plan:
        """The plan for one of the models. Raises what planning raises."""
        if (name, dtype) not in self._plans:
            found: Plan | PlanError
            try:
                found = plan(self.original(name).folder, **self.arguments(dtype))
            except PlanError as error:
                found = error
            self._plans[name, dtype] = found
        known = self._plans[name, dtype]
        if isinstance(known, PlanError):
            raise known
        return known

    def engine(self, name: str, dtype: str) -> Engine:
        """An engine of one of the models, open."""
        if (name, dtype) not in self._engines:
            found = load(self.original(name).folder, **self.arguments(dtype))
            self._engines[name, dtype] = found
        return self._engines[name, dtype]

    def accepted(self, name: str, dtype: str) -> Engine:
        """The same. Raises NotTriedError where the model is refused when it is planned."""
        try:
            self.planned(name, dtype)
        except PlanError as error:
            raise NotTriedError(f"refused by name, as it may: {shown(error, 300)}") from None
        return self.engine(name, dtype)

    def layers(self, name: str, dtype: str) -> list[Layer]:
        """The converted layers of one of the models."""
        return self.layers_of(self.engine(name, dtype).model, name, dtype)

    def layers_of(self, model: nn.Module, name: str, dtype: str) -> list[Layer]:
        """The converted layers of `model`, which is the model `name` after it was read."""
        original = self.original(name)
        error = self.subject.backend.relative_error(self.subject.options)
        found = []
        for path, module in model.named_modules():
            if not self.backend.converted(module):
                continue
            weight = original.matrices.get(path)
            if weight is None:  # the head, which some store too
                weight = original.state[f"{path}.weight"]
            own = allowed(module, weight) if error is None else error
            found.append(
                Layer(path, module, weight, original.bias(path, len(weight)),
                      getattr(torch, dtype), own)
            )  # fmt: skip
        return found

    def stores(self, name: str, dtype: str) -> bool:
        """Whether anything is to be stored otherwise, as planned; True where nobody says."""
        choice = self.planned(name, dtype)
        needs = choice.requirements
        size = self.backend.weight_bytes(needs, self.subject.options)
        return size is None or size != plain_bytes(needs)

    @contextlib.contextmanager
    def another(self, location: Any, **arguments: Any) -> Iterator[Engine]:
        """An engine for one check. Raises WrongError where the files are said to be broken."""
        try:
            engine = load(location, **arguments)
        except CheckpointError as error:
            raise WrongError(
                f"what it wrote or read is taken for broken: {shown(error, 400)}"
            ) from error
        with engine:
            yield engine


def of_main(
    loads: Loads, check: Callable[[Loads, str, str], str | None], dtype: str
) -> Callable[[Any], str | None]:
    """What runs `check(loads, name, dtype)` on the main model, if that is taken in `dtype`."""

    def run(_: object) -> str | None:
        name = loads.main()
        if dtype != loads.dtype():
            loads.accepted(name, dtype)
        return check(loads, name, dtype)

    return run


def allowed(module: nn.Module, weight: torch.Tensor) -> float:
    """What an error may be that nobody declares: by the bits that a number takes.

    Of the uniform grids of a whole row, six times the finest step is more than any leaves.
    """
    held = {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors_of(module)}
    bits = 8 * sum(size for _, size in held) / weight.numel()
    return float(min(0.9, 6 * 2**-bits))


def context(subject: Subject) -> BindContext:
    """What plain transformers code binds with."""
    nothing: Any = None
    return BindContext(model=None, config=nothing, requirements=nothing, options=subject.options)
