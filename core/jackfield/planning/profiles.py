"""What a caller leaves open comes from the profile that he names, and what differs is said.

Nothing reads a profile (`profile_files.py`) that nobody named, and what he names himself wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jackfield.devices import name_of
from jackfield.errors import CheckpointError, UsageError, quoted, shown
from jackfield.planning.profile_files import SIZES, Profile, read_profile
from jackfield.planning.profile_options import as_told, same
from jackfield.planning.solving import ARGUMENTS
from jackfield.spelling import AUTO

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from jackfield.planning.planning import Plan
    from jackfield.registry.backends import Choice

logger = logging.getLogger("jackfield")

#: What figures depend on and no profile selects: it only says how it was when it was made.
NAMED = (
    "adapter", "adapters", "assistant", "assistant_model", "deterministic", "expert_parallel",
    "max_memory", "merge_adapter", "revision", "target_step_seconds", "tp_plan", "tp_size",
)  # fmt: skip
#: What figures depend on, beside the distributions of the backends.
_LIBRARIES = ("jackfield", "torch", "transformers")


@dataclass(frozen=True)
class Taken:
    """A profile that a caller named: what he left open comes from it.

    `names` are the arguments that do, `overruled` those that he named himself, with what the
    profile has of them; `apart` says what else he named otherwise than it was when it was made.
    """

    profile: Profile
    names: tuple[str, ...]
    overruled: Mapping[str, Any]
    apart: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, Any]:
        return {n: v for n, v in self.profile.selections.items() if n in SIZES}

    @property
    def with_sizes(self) -> Taken:
        """The same, of a call that takes no sizes."""
        return replace(self, names=tuple(dict.fromkeys((*self.names, *self.sizes))))

    @property
    def origin(self) -> str:
        return f"from profile {shown(self.profile.file)}"


@contextlib.contextmanager
def of_profile(profile: Taken | None) -> Iterator[None]:
    """Errors about selections say which of them are from the profile."""
    try:
        yield
    except UsageError as error:
        if profile is None or not profile.names or isinstance(error, CheckpointError):
            raise
        names = ", ".join(profile.names)
        raise type(error)(
            f"{error} ({profile.origin}: {names}; name others, or drop the profile)"
        ) from error


def check_architecture(profile: Taken | None, here: str) -> None:
    """Raise UsageError where the profile is of another architecture."""
    was = here if profile is None else profile.profile.made.get("architecture", here)
    if profile is not None and was != here:
        raise UsageError(
            f"the profile {shown(profile.profile.file)} is of {shown(was)}, and this model is "
            f"{here}; `jackfield tune` writes one of it"
        )


def compared(profile: Taken | None, plan: Plan, config: PreTrainedConfig) -> Plan:
    """`plan`, whose choices say which of them come from the profile.

    Warns in one line of what is not as it was measured, where something is not.
    """
    if profile is None:
        return plan
    made = profile.profile.made
    apart = [
        f"{name} is as you name it, in place of {quoted(value)}"
        for name, value in profile.overruled.items()
    ]
    apart += _apart(made, surroundings(plan, config))
    apart += profile.apart
    if made.get("finished") is False:
        apart.append("tuning did not come to its end, so it was not compared with auto")
    if apart:
        file, said = shown(profile.profile.file), "; ".join(apart)
        logger.warning("the profile %s: %s; its figures may not hold", file, said)
    return _marked(profile, plan)


def _marked(profile: Taken, plan: Plan) -> Plan:
    kinds = {kind for kind, name in ARGUMENTS.items() if name in profile.names}

    def mark(choice: Choice) -> Choice:
        named = choice.registered.kind in kinds and choice.how != AUTO
        return replace(choice, how=profile.origin) if named else choice

    return replace(
        plan,
        choices={kind: mark(choice) for kind, choice in plan.choices.items()},
        decodings={name: mark(choice) for name, choice in plan.decodings.items()},
        kernels=tuple(map(mark, plan.kernels)),
    )


def taken(words: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Arguments of a call that takes `known`, with what they leave open as their profile has it.

    `profile` becomes a `Taken`. Raises UsageError where it names a file that is no profile.
    """
    found = dict(words)
    if found.get("profile") is None:
        return found
    profile = read_profile(found["profile"])
    offered = {name: v for name, v in profile.selections.items() if name in known}
    named = {name: v for name, v in found.items() if not _is_open(v)}
    left_open = {name: value for name, value in offered.items() if name not in named}
    overruled = {n: v for n, v in offered.items() if n in named and not same(n, named[n], v)}
    apart = tuple(_named_apart(profile.made.get("named"), named, known))
    return {**found, **left_open, "profile": Taken(profile, tuple(left_open), overruled, apart)}


def _is_open(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == AUTO)


def _named_apart(
    was: Mapping[str, Any] | None, named: Mapping[str, Any], known: Collection[str]
) -> Iterator[str]:
    """What a caller names otherwise than it was named when the profile was made; of one that does
    not say (None), nothing.
    """
    if was is None:
        return
    for name in sorted({*NAMED, *was} & {*known}):
        old, new = was.get(name), as_told(named.get(name))
        if name == "tp_size" and new == 1:  # what a call has anyway
            new = None
        if old is None and new is not None:
            yield f"it was measured without {name}, and this is {name}={quoted(new)}"
        elif old is not None and new is None:
            yield f"it was measured with {name}={quoted(old)}, which you have to name yourself"
        elif old != new and not same(name, named[name], old):
            yield f"it was measured with {name}={quoted(old)}, and this is {quoted(new)}"


def surroundings(plan: Plan, config: PreTrainedConfig) -> dict[str, Any]:
    """What the figures of a plan depend on beside its selections, as a profile has it."""
    device = plan.device or "cpu"
    cores = f", {os.cpu_count()} cores" if device == "cpu" else ""
    versions = {name: version(name) for name in _LIBRARIES}
    chosen = [*plan.choices.values(), *plan.decodings.values(), *plan.kernels]
    versions |= {c.registered.distribution: c.registered.version for c in chosen}
    return {
        "architecture": plan.requirements.architecture,
        "config": _digest(config),
        "hardware": f"{name_of(device)}{cores}",
        "versions": dict(sorted(versions.items())),
    }


def _digest(config: PreTrainedConfig) -> str:
    """Of what says how large a model is and how it computes; not of its name, and who wrote it."""
    text = json.dumps(_lasting(config.to_dict()), sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _lasting(inner)
            for key, inner in value.items()
            if not str(key).startswith("_") and key not in ("transformers_version", "dtype")
        }
    return value


def _apart(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between what a profile was made with, as far as it says, and what is here."""
    if was.get("config", now["config"]) != now["config"]:
        yield "it was measured with another config of the model"
    if (hardware := was.get("hardware", now["hardware"])) != now["hardware"]:
        yield f"it was measured on {shown(hardware)}, and this is {now['hardware']}"
    for name, old in was.get("versions", {}).items():
        if old != (new := now["versions"].get(name, old)):
            yield f"it was measured with {shown(name)} {shown(old)}, and this is {new}"
