"""jackfield from its checkout, without pip: the metadata that an installation would write.

Only the standard library, so that it works, and says what is missing, on a bare machine.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
#: What has to be on the path beside an installation's metadata.
PATHS = tuple(
    str(ROOT / folder)
    for folder in ("core", "plugins", "tests/gpu", "tests/conformance", "tests/benchmarks")
)


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]  # type: ignore[no-any-return]


def write_metadata(folder: Path) -> None:
    """Leave in `folder` what tells importlib of jackfield, its version, needs and plugins."""
    about = project()
    info = folder / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {about['name']}",
        f"Version: {about['version']}",
        f"Requires-Python: {about['requires-python']}",
        *(f"Requires-Dist: {needed}" for needed in about["dependencies"]),
    ]
    for extra, needs in about["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [_of_extra(needed, extra) for needed in needs]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    entries = ["[jackfield]"]
    entries += [f"{k} = {v}" for k, v in about["entry-points"]["jackfield"].items()]
    (info / "entry_points.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")


def _of_extra(needed: str, extra: str) -> str:
    requirement, _, marker = needed.partition(";")
    condition = f"({marker.strip()}) and " if marker else ""
    return f"Requires-Dist: {requirement.strip()} ; {condition}extra == '{extra}'"


def missing() -> dict[str, list[str]]:
    """What jackfield itself and its extras need and this Python lacks, by who needs it."""
    about = project()
    groups = {"jackfield": about["dependencies"], **about["optional-dependencies"]}
    own = {"dev", "docs", "lint"}  # what nobody needs to run anything
    return {
        name: [needed for needed in needs if lacks(needed)]
        for name, needs in groups.items()
        if name not in own
    }


def lacks(needed: str) -> bool:
    """Whether a requirement is not met by what is installed."""
    name = re.match(r"[\w.-]+", needed)
    assert name is not None
    try:
        have = importlib.metadata.version(name[0])
    except importlib.metadata.PackageNotFoundError:
        return True
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return False  # `packaging` itself is named as missing
    return not Requirement(needed).specifier.contains(have, prereleases=True)
