"""A profile: selections that were measured, as TOML, with what was measured, where and when.

Read only where a caller names one. What he leaves open is taken from it; what he names himself
wins. Nothing of a profile names a file or a model: it selects installed backends, of their options
those that are numbers, truth values and words of a closed set, and sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.devices import name_of
from jackfield.errors import CheckpointError, UsageError, quoted, shown
from jackfield.planning.profile_options import free_option
from jackfield.planning.solving import ARGUMENTS
from jackfield.spelling import AUTO, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from jackfield.planning.planning import Plan
    from jackfield.registry.backends import Choice

logger = logging.getLogger("jackfield")

FORMAT = 1
LARGEST = 1_000_000  # bytes of a profile
ANEW = "`jackfield tune` writes one"

#: What of a batch a profile may say.
SIZES = ("max_batch_size", "max_batch_tokens", "prefill_chunk_size")
#: Every argument of `jackfield.load` that one may have.
SELECTABLE = (*ARGUMENTS.values(), "dtype", "device_map", *SIZES)

#: What figures depend on, beside the distributions of the backends.
_LIBRARIES = ("jackfield", "torch", "transformers")


@dataclass(frozen=True)
class Profile:
    """What a profile says.

    Attributes:
        file: Its name, for messages.
        selections: Arguments of `jackfield.load`, some of `SELECTABLE`.
        made: How it came to be, as `surroundings` has it, and more; empty: nobody says.
        evidence: What was measured, a row each.
    """

    file: str
    selections: Mapping[str, Any]
    made: Mapping[str, Any] = field(default_factory=dict)
    evidence: Sequence[Mapping[str, Any]] = ()


def read_profile(file: str | Path) -> Profile:
    """Read a profile. Raises UsageError where there is none, or where it has an error."""
    path = Path(file)
    try:
        if not path.is_file():
            raise UsageError(f"there is no profile {shown(path)}; {ANEW}")
        text = path.read_bytes()[: LARGEST + 1]
    except OSError as error:
        raise UsageError(f"the profile {shown(path)} cannot be read: {error.strerror}") from None
    if len(text) > LARGEST:
        raise UsageError(f"{shown(path)} is no profile: it has more than {LARGEST} bytes; {ANEW}")
    try:
        found = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the profile {shown(path)} is not TOML: {shown(error)}") from None
    _check(found, f"the profile {shown(path)}")
    made, evidence = found.get("made", {}), found.get("evidence", [])
    return Profile(str(path), found["selections"], made, evidence)


def _check(found: Mapping[str, Any], what: str) -> None:
    if found.get("format") != FORMAT:
        said = f"is of format {quoted(found['format'])}" if "format" in found else "has no format"
        raise UsageError(f"{what} {said}, and this jackfield reads format = {FORMAT}; {ANEW}")
    for name in found:
        if name not in (known := ("format", "selections", "made", "evidence")):
            raise UsageError(
                f"{what} has no table {shown(name)!r} (it has {', '.join(known)})"
                f"{nearest(name, known)}"
            )
    selections, made = found.get("selections"), found.get("made", {})
    evidence = found.get("evidence", [])
    if not isinstance(selections, dict):
        raise UsageError(f'{what} needs a table [selections], such as attn_implementation = "sdpa"')
    if not isinstance(made, dict) or not isinstance(made.get("versions", {}), dict):
        raise UsageError(f"{what}: made must be a table, and made.versions one in it")
    if not isinstance(made.get("named", {}), dict):
        raise UsageError(f"{what}: made.named must be a table")
    if not isinstance(evidence, list) or not all(isinstance(one, dict) for one in evidence):
        raise UsageError(f"{what}: evidence must be tables, each below [[evidence]]")
    for name, value in selections.items():
        _check_selection(name, value, what)


def _check_selection(name: str, value: Any, what: str) -> None:
    if name not in SELECTABLE:
        raise UsageError(
            f"{what} selects no {shown(name)!r} (it may have {', '.join(SELECTABLE)})"
            f"{nearest(name, SELECTABLE)}"
        )
    if name in SIZES:
        if type(value) is not int or value < 1:
            raise UsageError(
                f"{what}: {name} must be a whole number, at least 1, not {quoted(value)}"
            )
        return
    texts = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    named = name in ("decoding", "device_map") and isinstance(value, dict)
    truth = name == "compile" and isinstance(value, bool)
    if not (isinstance(value, str) or truth or named or (texts and name in ARGUMENTS.values())):
        raise UsageError(f'{what}: {name} must be a text such as "auto", not {quoted(value)}')
    if (free := free_text(name, value)) is not None:
        raise UsageError(
            f"{what}: {name}={quoted(value)} has the option {free!r}, which is any text and may "
            f"name a file or a model; drop it, and name {name} yourself"
        )


def free_text(name: str, value: Any) -> str | None:
    """The option of a selection that no profile may set; None: it has none."""
    kind = next((kind for kind, argument in ARGUMENTS.items() if argument == name), None)
    return None if kind is None else free_option(kind, value)


@dataclass(frozen=True)
class Taken:
    """A profile that a caller named: what he left open comes from it.

    `names` are the arguments that do, `overruled` those that he named himself, with what the
    profile has of them; `missing` what it was measured with, cannot name, and he did not.
    """

    profile: Profile
    names: tuple[str, ...]
    overruled: Mapping[str, Any]
    missing: Mapping[str, Any] = field(default_factory=dict)

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
    apart += [
        f"it was measured with {shown(name)}={quoted(value)}, which you have to name yourself"
        for name, value in profile.missing.items()
    ]
    if made.get("finished") is False:
        apart.append("tuning was stopped before its end")
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
    overruled = {n: v for n, v in offered.items() if n in named and not _same(n, named[n], v)}
    missing = {
        n: v for n, v in profile.made.get("named", {}).items() if n in known and n not in named
    }
    return {**found, **left_open, "profile": Taken(profile, tuple(left_open), overruled, missing)}


def _is_open(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == AUTO)


def _same(name: str, one: Any, other: Any) -> bool:
    if name == "dtype":
        one = str(one).removeprefix("torch.")
    return type(one) is type(other) and one == other


def surroundings(plan: Plan, config: PreTrainedConfig) -> dict[str, Any]:
    """What the figures of a plan depend on beside its selections, as a profile has it."""
    device = plan.device or "cpu"
    cores = f", {os.cpu_count()} cores" if device == "cpu" else ""
    versions = {name: version(name) for name in _LIBRARIES}
    versions |= {c.registered.distribution: c.registered.version for c in plan.choices.values()}
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
