"""Settings of torch that belong to the process: how they are read, and put back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def _config_of(module: str) -> Callable[[], dict[str, Any]]:
    """Reads what somebody has set in a config of torch; nothing where nobody has imported it."""

    def read() -> dict[str, Any]:
        config: Any = sys.modules.get(module)
        known = {} if config is None else config._config
        others = {name: getattr(config, name) for name in known if not config._is_default(name)}
        return {name: value for name, value in others.items() if value != known[name].default}

    return read


def _set_config(module: str) -> Callable[[dict[str, Any]], None]:
    def put_back(before: dict[str, Any]) -> None:
        config: Any = sys.modules[module]
        for name in _config_of(module)():
            setattr(config, name, before.get(name, config._config[name].default))

    return put_back


#: What of torch nobody may leave changed -> how it is read.
SETTINGS: Mapping[str, Callable[[], Any]] = {
    "torch's default dtype": torch.get_default_dtype,
    "whether torch records gradients": torch.is_grad_enabled,
    "torch's inference mode": torch.is_inference_mode_enabled,
    "how many threads torch has": torch.get_num_threads,
    "torch's default device": lambda: str(torch.get_default_device()),
    "torch's autocast": lambda: torch.is_autocast_enabled("cpu"),
    "torch's deterministic mode": torch.are_deterministic_algorithms_enabled,
    "which kernels torch's attention may choose": lambda: (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    ),
    "the precision of torch's products": torch.get_float32_matmul_precision,
    "torch._dynamo.config": _config_of("torch._dynamo.config"),
    "torch._inductor.config": _config_of("torch._inductor.config"),
}

_PUT_BACK: Mapping[str, Callable[[Any], Any]] = {
    "torch's default dtype": torch.set_default_dtype,
    "whether torch records gradients": torch.set_grad_enabled,
    "how many threads torch has": torch.set_num_threads,
    "torch's default device": torch.set_default_device,
    "torch's autocast": lambda on: torch.set_autocast_enabled("cpu", on),
    "torch's deterministic mode": torch.use_deterministic_algorithms,
    "which kernels torch's attention may choose": lambda on: (
        torch.backends.cuda.enable_flash_sdp(on[0]),
        torch.backends.cuda.enable_math_sdp(on[1]),
        torch.backends.cuda.enable_mem_efficient_sdp(on[2]),
    ),
    "the precision of torch's products": torch.set_float32_matmul_precision,
    "torch._dynamo.config": _set_config("torch._dynamo.config"),
    "torch._inductor.config": _set_config("torch._inductor.config"),
}


class TorchSettings:
    """The settings as they are now, and the seed: drawing changes numbers, seeding changes whose.

    Each check begins with what the process had, so that what one leaves is seen in that one.
    """

    def __init__(self) -> None:
        self._before = {what: read() for what, read in SETTINGS.items()}
        self._seed, self._numbers = torch.initial_seed(), torch.get_rng_state()

    def put_back(self) -> list[str]:
        """Put back what has changed since; says what it is."""
        found = [what for what, read in SETTINGS.items() if read() != self._before[what]]
        for what in found:
            if what in _PUT_BACK:
                _PUT_BACK[what](self._before[what])
        if torch.initial_seed() != self._seed:
            torch.set_rng_state(self._numbers)
            found.append("the seed of torch's random numbers (torch.manual_seed)")
        return found


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put back what changes meanwhile: with the first adapter, PEFT imports libraries that set some
    of them, and no backend is to be blamed."""
    before = TorchSettings()
    try:
        yield
    finally:
        before.put_back()
