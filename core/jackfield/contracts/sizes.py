"""The size of keys and values, in bytes."""

from __future__ import annotations

from jackfield.contracts.requirements import BYTES, Requirements


def known(numbers: tuple[int, ...]) -> bool:
    """Whether every layer keeps something for each token, and how much is known.

    Args:
        numbers: `Requirements.kv_numbers` or `packed_numbers`.
    """
    return bool(numbers) and all(numbers)


def kv_bytes(requirements: Requirements, tokens: int) -> int:
    """Bytes of the keys and values of one request with `tokens` tokens, windows cut, no padding.

    `requirements.kv_numbers` must be `known`.
    """
    numbers = sum(
        count * (tokens if window is None else min(tokens, window))
        for count, window in zip(requirements.kv_numbers, requirements.windows, strict=True)
    )
    return numbers * BYTES[requirements.dtype]
