"""Which decoding strategies an engine offers to its requests, and under which names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jackfield.errors import PlanError, SelectionError, SettingsError, quoted
from jackfield.guarded import fault
from jackfield.planning.candidates import Candidates
from jackfield.planning.solving import reasons_against
from jackfield.registry.backends import Choice
from jackfield.requests.arguments import Strategies
from jackfield.requests.checked_numbers import CheckedNumbers
from jackfield.requests.vocabulary import DRAFTING, EARLY_EXIT, USE_MTP, asks_for_nothing
from jackfield.spelling import AUTO, Selectable, nearest

if TYPE_CHECKING:
    from jackfield.contracts import Requirements
    from jackfield.registry.backends import Registry
    from jackfield.requests.wishes import Wishes


def split(value: Strategies) -> tuple[str | None, Selectable, dict[str, Selectable]]:
    """The default's name (None: the backend's own) and selection, and the others by name."""
    if not isinstance(value, Mapping):
        return None, value, {}
    if not value:
        raise SelectionError("an empty mapping offers no decoding; name at least one")
    for name in value:
        if not name or not isinstance(name, str):
            raise SelectionError(f"decodings are offered under names, and {name!r} is none")
    first, *_ = value
    return first, value[first], {k: v for k, v in value.items() if k != first}


def chosen_beside(
    registry: Registry, needs: Requirements, others: Mapping[str, Selectable]
) -> dict[str, Choice]:
    """A choice for each of `others`: the first of its candidates that does not refuse."""
    return {name: _first(registry, needs, value, name) for name, value in others.items()}


def _first(registry: Registry, needs: Requirements, value: Selectable, name: str) -> Choice:
    reasons = []
    for candidate in Candidates(registry, "decoding", value, needs).of(needs):
        against = reasons_against(candidate.registered, needs, candidate.options)
        if not against:
            return Choice(candidate.registered, candidate.options, candidate.how)
        reasons.append(f"{candidate.registered.name} ({'; '.join(against)})")
    raise PlanError(
        f"decoding={{{name!r}: {value!r}}} cannot run {needs.architecture} here: "
        f"{', '.join(reasons) or 'nothing may be chosen by itself'}; drop it or name another"
    )


def implied(needs: Requirements, choices: Mapping[str, Choice]) -> Requirements:
    """`needs`, and what each of `choices` demands of the kinds decided later."""
    for choice in choices.values():
        needs = choice.registered.ask("imply", needs, choice.options)
    return needs


def offered(
    registry: Registry,
    needs: Requirements,
    chosen: Choice,
    default: str | None,
    others: Mapping[str, Choice],
) -> dict[str, Choice]:
    """All decodings by name, the default first; what "auto" takes is always among them.

    `chosen` is the default, called `default` (None: as its backend is).
    """
    found = {default or chosen.registered.name: chosen, **others}
    for plain in _plain(registry, needs):
        name = plain.registered.name
        if found.setdefault(name, plain).registered is not plain.registered:
            raise SelectionError(
                f"the name {name!r} stands for plain decoding; offer "
                f"{found[name].registered.name!r} under another name"
            )
    return found


def _plain(registry: Registry, needs: Requirements) -> Iterator[Choice]:
    """The decoding without drafts that "auto" takes, if any plugin has one."""
    for candidate in Candidates(registry, "decoding", AUTO, needs).of(needs):
        backend = candidate.registered.backend
        drafts = backend.capabilities.rollback  # type: ignore[attr-defined]
        if not drafts and not reasons_against(candidate.registered, needs, candidate.options):
            yield Choice(candidate.registered, candidate.options, "always offered")
            return


#: Settings that name a decoding by themselves, as they do in transformers.
NAMING = ("num_beams", "prompt_lookup_num_tokens", USE_MTP)


def pick(decodings: Mapping[str, Choice], wishes: Wishes) -> str:
    """The name of the decoding that a request asks for, or the default. Raises SettingsError.

    One that names none and asks for beams, or whose model does, gets the first that has them, one
    for a single beam the first that has not, one for looked up tokens the first that looks
    them up, one for drafts of the model's heads the first that reads them, and one for drafts of
    the model's first layers the first that has so many; where there is none of the kind, the
    default says so.
    """
    _check_early_exit(decodings, wishes)
    picked = _picked(decodings, wishes)
    _check_heads(decodings[picked], picked, wishes)
    return picked


def _picked(decodings: Mapping[str, Choice], wishes: Wishes) -> str:
    names, given = list(decodings), wishes.given
    asked = given.get("decoding")
    if asked is None:
        wanted = {
            name: not asks_for_nothing(name, given[name])
            for name in NAMING
            if name in given and not _is_default(wishes, name)
        }
        fitting = (
            offered
            for offered in names
            if all((name in settings_of(decodings[offered])) == has for name, has in wanted.items())
            if (layers := _asked_exit(wishes)) is None or exits_early(decodings[offered]) == layers
        )
        return next(fitting, names[0])
    if not isinstance(asked, str) or asked not in decodings:
        near = nearest(asked, names) if isinstance(asked, str) else ""
        raise SettingsError(
            f"decoding={quoted(asked)} is not offered by this engine, which has {', '.join(names)}"
            f"{near}; offer it with jackfield.load(decoding={{'name': 'plugin:…'}})"
        )
    return asked


def _check_early_exit(decodings: Mapping[str, Choice], wishes: Wishes) -> None:
    """Raise SettingsError where the draft model ends at another layer than a request wants.

    Where none is part of the model, the request is refused as for any other setting.
    """
    if (layers := _asked_exit(wishes)) is None:
        return
    for name, choice in decodings.items():
        if (end := exits_early(choice)) not in (None, layers):
            raise SettingsError(
                f"{EARLY_EXIT}={layers}: the draft model of this engine ends at layer {end} "
                f"(decoding {name!r}); ask for {end}, or load it with decoding="
                f"'assisted?{EARLY_EXIT}={layers}'"
            )


def _check_heads(decoding: Choice, name: str, wishes: Wishes) -> None:
    """Raise SettingsError where a request says both that heads draft and that they do not."""
    if USE_MTP not in wishes.given or wishes.of_the_model(USE_MTP):
        return
    if not isinstance(wanted := wishes.given[USE_MTP], bool):
        raise SettingsError(f"{USE_MTP} must be True or False, not {quoted(wanted)}")
    if not wanted and decoding.backend.capabilities.heads:
        raise SettingsError(
            f"{USE_MTP}=False, and the decoding {name!r} drafts with the model's heads; drop one"
        )


def _asked_exit(wishes: Wishes) -> int | None:
    """At which layer a request wants drafts to end. Raises SettingsError for what is no number."""
    if EARLY_EXIT not in wishes.given or wishes.of_the_model(EARLY_EXIT):
        return None
    return CheckedNumbers(wishes.given).integer(EARLY_EXIT, 1, at_least=1)


def settings_of(decoding: Choice) -> frozenset[str]:
    """What a decoding with its options honours."""
    heads = {USE_MTP} if decoding.backend.capabilities.heads else set()
    exits = {EARLY_EXIT} if exits_early(decoding) is not None else set()
    return _honoured(decoding) | heads | exits


def exits_early(decoding: Choice) -> int | None:
    """At which layer the draft model of a decoding ends; None: it has none that is of the model.

    Raises PluginError for what is no number of layers.
    """
    if not decoding.backend.capabilities.assistant:
        return None
    registered = decoding.registered
    layers = registered.ask("early_exit", decoding.options)
    if layers is not None and (type(layers) is not int or layers < 1):
        raise fault(registered, f"early_exit must return 1 or more, or None, got {quoted(layers)}")
    return layers


def _is_default(wishes: Wishes, name: str) -> bool:
    """Whether a model's own config says it and needs no other decoding for it."""
    return wishes.of_the_model(name) and (
        name in DRAFTING or asks_for_nothing(name, wishes.given[name])
    )


def _honoured(decoding: Choice) -> frozenset[str]:
    found: frozenset[str] = decoding.backend.capabilities.settings
    return found


def elsewhere(registry: Registry, decodings: Mapping[str, Choice], setting: str) -> str:
    """Which decoding honours a setting, and how to have it."""
    here = [repr(name) for name, choice in decodings.items() if setting in settings_of(choice)]
    if here:
        return f": decoding={' or '.join(here)}"
    if setting in (EARLY_EXIT, USE_MTP):
        return f": {DRAFTING[setting]}"
    for registered in registry.of_kind("decoding"):
        if setting in registered.backend.capabilities.settings:  # type: ignore[attr-defined]
            name, default = next(iter(decodings.items()))
            offers = {
                name: registry.address(default.registered),
                registered.name: registry.address(registered),
            }
            return f": jackfield.load(decoding={offers}) offers one"
    return " (none that is installed)"


def unmet_of_model(
    registry: Registry, decodings: Mapping[str, Choice], own: Wishes
) -> tuple[str, Any, str, str | None] | None:
    """What a model's `own` config asks for that no request without settings gets: the setting, its
    value, the decoding that such a request has, and one that is not offered and would honour it.

    None: such a request gets all.
    """
    from jackfield.requests.honouring import unmet

    picked = pick(decodings, own)
    for setting, value in unmet(own, settings_of(decodings[picked])):
        honouring = (
            registered.name
            for registered in registry.of_kind("decoding")
            if setting in registered.backend.capabilities.settings  # type: ignore[attr-defined]
        )
        return setting, value, picked, next(honouring, None)
    return None
