"""The processes that torchrun started, as its environment variables tell each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from jackfield.errors import UsageError, quoted


@dataclass(frozen=True)
class World:
    """This process among others.

    `rank` is its number of `size`, `local_rank` that among the `local_size` of its machine.
    `address` and `port` are where they meet.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


def world_of(environment: Mapping[str, str] | None = None) -> World | None:
    """What the variables of torchrun say; None where none started this process.

    Raises UsageError where they say nonsense.
    """
    given = os.environ if environment is None else environment
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    rank, size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    own, beside = _number(given, "LOCAL_RANK", rank), _number(given, "LOCAL_WORLD_SIZE", size)
    for name, number, whole, count in (
        ("RANK", rank, "WORLD_SIZE", size), ("LOCAL_RANK", own, "LOCAL_WORLD_SIZE", beside),
    ):  # fmt: skip
        if not 0 <= number < count:
            raise UsageError(
                f"{name}={number} is not one of {whole}={count} processes; use torchrun"
            )
    address, port = given.get("MASTER_ADDR", "127.0.0.1"), _number(given, "MASTER_PORT", 29500)
    if not (address and 0 < port < 2**16):
        raise UsageError(
            f"MASTER_ADDR={quoted(address)} and MASTER_PORT={port} are no place to meet; "
            "start it with torchrun"
        )
    return World(rank, size, own, beside, address, port)


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name}={quoted(text)} is not a number; start it with torchrun") from None
