"""All verdicts on a backend with what they were found with: a text, JSON, one HTML page."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from jackfield.devices import name_of
from jackfield.testing.checks import Verdict
from jackfield.testing.subject import Subject

#: What a verdict may depend on.
LIBRARIES = ("jackfield", "torch", "transformers", "numpy", "triton")


@dataclass(frozen=True)
class Report:
    """The verdicts on one backend.

    Attributes:
        backend: "attention 'mine' of my-package 1.0".
        selection: What was checked, with its options.
        kind: Its kind.
        seed: Of all random numbers.
        versions: Those of Python, of the libraries and of the backend's own distribution.
        hardware: The processor or GPU that computed.
        verdicts: One a check, in the order in which they ran.
    """

    backend: str
    selection: str
    kind: str
    seed: int
    versions: dict[str, str]
    hardware: str
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and something was tried."""
        outcomes = self.counts
        return not outcomes["failed"] and outcomes["passed"] > 0

    @property
    def warnings(self) -> list[str]:
        """What a reader might take for proven, and is not."""
        own = [v for v in self.verdicts if not v.name.startswith(("everyone.", "running."))]
        compared = [v for v in own if v.outcome in ("passed", "failed") and v.name != "fits"]
        untried = [v for v in own if v.outcome == "not tried"]
        if not untried or compared:
            return []
        return [f"nothing that it computes was compared with anything: {untried[0].message}"]

    @property
    def counts(self) -> Counter[str]:
        """How many checks had each outcome."""
        return Counter(verdict.outcome for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "selection": self.selection,
            "kind": self.kind,
            "passed": self.passed,
            "counts": dict(self.counts),
            "warnings": self.warnings,
            "seed": self.seed,
            "versions": self.versions,
            "hardware": self.hardware,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }

    def html(self) -> str:
        """One page that needs nothing beside it."""
        page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(page).render(report=self)


def report_of(subject: Subject, verdicts: list[Verdict]) -> Report:
    """The report on `subject`, made on this machine."""
    own = subject.registered
    versions = {"python": platform.python_version(), own.distribution: own.version}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Report(
        str(own),
        subject.selection,
        own.kind,
        subject.seed,
        versions,
        name_of(subject.device),
        verdicts,
    )
