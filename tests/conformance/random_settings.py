"""Random settings of a request, for tests of the sampler."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


def random_fields(
    rng: random.Random, most: int, eos: tuple[int, ...], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Up to `most` fields of `Settings`, the test's `own` among those that there are."""
    offers: dict[str, Any] = {
        "temperature": rng.uniform(0.3, 2),
        "top_k": rng.randint(1, 12),
        "top_p": rng.uniform(0.3, 1),
        "min_p": rng.uniform(0, 0.3),
        "top_h": rng.uniform(0.1, 1),
        "typical_p": rng.uniform(0.2, 1),
        "epsilon_cutoff": rng.uniform(0, 0.1),
        "eta_cutoff": rng.uniform(0, 0.3),
        "repetition_penalty": rng.uniform(0.5, 2),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "logprobs": rng.randint(0, 3),
        **own,
    }
    chosen = rng.sample(sorted(offers), rng.randint(0, most))
    return {
        "do_sample": rng.random() < 0.6,
        "seed": rng.randrange(1000),
        "eos_token_ids": eos,
        **{name: offers[name] for name in chosen},
    }
