"""No type of model says something else where two processes share it."""

from __future__ import annotations

import pytest
import shared_sweep
import zoo


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_type_has_a_third_outcome() -> None:
    rows = dict(shared_sweep.run(zoo.TYPES))
    assert {name: row for name, row in rows.items() if row.startswith("WRONG")} == {}
    assert sum(row == "equal" for row in rows.values()) >= 40
