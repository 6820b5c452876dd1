"""Values of JSON, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def json_values(text: Any, size: int, leaves: int) -> Any:
    """Values of at most `size` items at each level and about `leaves` in all; `text` are the texts
    in them, and the names of objects.
    """
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | text,
        lambda inner: st.lists(inner, max_size=size) | st.dictionaries(text, inner, max_size=size),
        max_leaves=leaves,
    )
