"""What runs in the process of a contender (`worker.py` starts it): one round after another."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jackfield.benchmarking.contenders import OURS
from jackfield.benchmarking.programs import Ours, Program
from jackfield.benchmarking.workload import Request
from jackfield.errors import JackfieldError, error_text
from jackfield.estimates.measuring import Meter
from jackfield.parallel.wire import Wire

if TYPE_CHECKING:
    from jackfield.engine.report import Report


def serve(number: int) -> None:
    """Do what comes over the socket with that file number, until nothing comes any more."""
    wire = Wire(socket.socket(fileno=number))
    child = Child()
    while True:
        try:
            message = wire.receive()
        except (EOFError, OSError):
            return
        wire.send(child.answer(message))


class Child:
    """A program and what was measured of its process."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._meter: Meter | None = None
        self._requests: list[Request] = []
        self._before: Report | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What is sent back: ``found``, or ``error`` and ``message``."""
        try:
            act: Callable[..., Any] = getattr(self, f"do_{message.pop('do')}")
            return {"found": act(**message)}
        except JackfieldError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - of any model, plugin or program
            return {"error": "ExecutionError", "message": error_text(error)}

    def do_load(self, program: str, arguments: dict[str, Any], requests: list[Any]) -> Any:
        """Load what runs; `requests` are those of each round, as (prompt, new tokens, arrival)."""
        self._requests = [Request(tuple(prompt), new, at) for prompt, new, at in requests]
        made = self._program = program_of(program, arguments, self._requests)
        self._meter = Meter(made.devices)
        made.load()
        return made.about()

    def do_round(self, number: int) -> Any:
        """Run every request once; the memory that was used before counts for no peak."""
        assert self._program is not None
        gc.collect()
        return self._program.round(self._requests, number).to_dict()

    def do_settled(self) -> None:
        """The warm-up is over: peaks and calls count from here."""
        assert self._program is not None
        assert self._meter is not None
        self._meter.reset()
        self._before = self._program.report()

    def do_finish(self) -> Any:
        """What was measured of the whole: the peak of memory, and what was observed to run."""
        assert self._program is not None
        assert self._meter is not None
        report = self._program.report()
        seen = None if report is None else report.since(self._before).to_dict()
        return {"peak_bytes": self._meter.peak(), "report": seen}

    def do_operators(self, number: int) -> Any:
        """How often one more round calls each operator of torch; None where that is not told."""
        from jackfield.benchmarking.operators import called

        program = self._program
        assert program is not None
        return called(lambda: program.round(self._requests, number))

    def do_limits(self, **asked: Any) -> Any:
        from jackfield.benchmarking.roofline import limits

        return limits(self._requests, **asked)

    def do_quality(self, text: list[int], answers: list[Any]) -> Any:
        """How well the engine predicts a text, and answers questions."""
        from jackfield.benchmarking.quality import quality

        assert isinstance(self._program, Ours)
        return quality(self._program.engine, text, answers)

    def do_judge(self, **asked: Any) -> Any:
        from jackfield.benchmarking.parity import regrets

        return regrets(**asked)


def program_of(name: str, arguments: dict[str, Any], requests: list[Request]) -> Program:
    """The program of that name, not loaded. Raises UsageError where it cannot run here."""
    if name == OURS:
        return Ours(arguments, requests)
    from jackfield.benchmarking.rivals import RIVAL_PROGRAMS

    return RIVAL_PROGRAMS[name](arguments, requests)
