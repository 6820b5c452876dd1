"""The table of docs/attention.md says what the backends declare."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jackfield.contracts import FEATURES
from jackfield.registry.discovery import registry
from jackfield.spelling import parse

PAGE = (Path(__file__).parents[2] / "docs/attention.md").read_text()
ROWS = {
    name: rest.split(" | ") for name, rest in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M)
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_the_backend_declares(name: str) -> None:
    devices, dtypes, features, _ = ROWS[name]
    declared = registry().find("attention", parse(name)).backend.capabilities
    assert set(devices.partition(" (")[0].split()) == declared.devices
    assert set(dtypes.split()) == declared.dtypes
    assert (set(FEATURES) if features == "all" else set(features.split())) == declared.features
