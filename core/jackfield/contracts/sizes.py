"""The size of keys and values, in bytes."""

from __future__ import annotations

from jackfield.contracts.requirements import BYTES, Requirements


def known(requirements: Requirements, numbers: tuple[int, ...]) -> bool:
    """Whether it is known how much each layer keeps, of a token or as a state.

    Args:
        requirements: The job.
        numbers: Its `kv_numbers` or `packed_numbers`.
    """
    states = requirements.state_bytes is not None
    layers = zip(numbers, requirements.layer_types, strict=True)
    return bool(numbers) and all(n or (states and t == "linear_attention") for n, t in layers)


def kv_bytes(requirements: Requirements, tokens: int) -> int:
    """Bytes of the keys, values and states of one request of `tokens` tokens, without padding.

    Windows are cut. `requirements.kv_numbers` must be `known`.
    """
    numbers = sum(
        count * (tokens if window is None else min(tokens, window))
        for count, window in zip(requirements.kv_numbers, requirements.windows, strict=True)
    )
    return numbers * BYTES[requirements.dtype] + (requirements.state_bytes or 0)
