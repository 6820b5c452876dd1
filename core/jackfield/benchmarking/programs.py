"""What can be measured: an engine of jackfield, and other programs on the same weights."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jackfield.benchmarking.workload import Request
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield.engine.completions import Completion
    from jackfield.engine.engine import Engine
    from jackfield.engine.report import Report


@dataclass(frozen=True)
class Ran:
    """One round: seconds in all, and of each request those to its first token and to its last.

    Times of a request count from its arrival; None where the program does not tell its first one.
    """

    seconds: float
    first: list[float | None]
    ended: list[float]
    tokens: list[list[int]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Program(ABC):
    """Runs requests greedily, each to exactly as many new tokens as it asks for.

    `devices` are those whose memory is measured.
    """

    devices: Sequence[str] = ("cpu",)

    def __init__(self, arguments: dict[str, Any], requests: Sequence[Request]) -> None:
        self.arguments = arguments
        self.requests = requests

    @abstractmethod
    def load(self) -> None:
        """Read the weights."""

    @abstractmethod
    def round(self, requests: Sequence[Request], number: int) -> Ran:
        """Run all requests; nothing that an earlier round computed may be used again."""

    def about(self) -> dict[str, Any]:
        """What it is, once it is loaded: JSON."""
        return {}

    def report(self) -> Report | None:
        """What was observed to run since it was loaded; None: it does not tell."""
        return None


class Ours(Program):
    """An engine of jackfield."""

    def __init__(self, arguments: dict[str, Any], requests: Sequence[Request]) -> None:
        super().__init__(arguments, requests)
        from jackfield.api import prepare

        self._ready = prepare(**arguments)
        plan = self._ready.plan
        self.devices = plan.requirements.execution_devices or (plan.device or "cpu",)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def load(self) -> None:
        self._engine = self._ready.load()
        self._engine.compile_ahead()

    def about(self) -> dict[str, Any]:
        from jackfield.bridge.footprint import loaded_bytes

        plan = self.engine.plan
        size = loaded_bytes(self.engine.model, plan["quantizer"].registered)
        return {"plan": plan.to_dict(), "weight_bytes": size}

    def round(self, requests: Sequence[Request], number: int) -> Ran:
        # A salt of its own for each round: pages of the same prompts are not found again.
        common: dict[str, Any] = {
            "do_sample": False, "eos_token_id": None, "cache_salt": f"round {number}",
        }  # fmt: skip
        settings = [{"max_new_tokens": one.new_tokens} for one in requests]
        prompts = [list(one.prompt) for one in requests]
        began = time.perf_counter()
        if any(one.arrival for one in requests):
            done = self._arriving(requests, prompts, settings, common, began)
        else:
            done = self.engine.generate(prompts, settings=settings, **common)
        seconds = time.perf_counter() - began
        for one in done:
            if one.error is not None:
                raise ExecutionError(one.error)
        return Ran(
            seconds,
            [one.usage.first_seconds for one in done],
            [one.usage.seconds for one in done],
            [one.token_ids for one in done],
        )

    def _arriving(
        self,
        requests: Sequence[Request],
        prompts: Sequence[list[int]],
        settings: Sequence[dict[str, Any]],
        common: dict[str, Any],
        began: float,
    ) -> list[Completion]:
        started = []
        for one, prompt, own in zip(requests, prompts, settings, strict=True):
            time.sleep(max(0.0, began + one.arrival - time.perf_counter()))
            started.append(self.engine.submit(prompt, **own, **common))
        return [request.result() for request in started]

    def report(self) -> Report:
        return self.engine.report()
