"""Shapes of linear layers and of what they are given."""

from __future__ import annotations

from hypothesis import strategies as st

#: All dimensions of an input but its last.
LEADING = st.one_of(
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
    st.tuples(st.just(1), st.just(300)),
)
#: Inputs and outputs of a layer.
SIZES = st.tuples(*[st.sampled_from((1, 7, 16, 33, 64, 130))] * 2)
