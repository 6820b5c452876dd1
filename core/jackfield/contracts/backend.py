"""What every backend has, whatever its kind."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.contracts.assistant import Assistant
from jackfield.contracts.requirements import Requirements
from jackfield.devices import input_device
from jackfield.errors import error_text
from jackfield.spelling import option_flaws

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")


@dataclass(frozen=True)
class NoOptions:
    """For a backend that takes no options."""


@dataclass(frozen=True, kw_only=True)
class BindContext:
    """What a backend is bound to.

    Lives: as long as the backend keeps it; nothing of it is to be changed, the model included
    (`FusedLayer.make`, `BoundAttention` and `Quantization.finish` say what may be).

    Attributes:
        model: The model with its weights, on its devices, in eval mode once it runs. None where
            transformers itself is still loading it (attention), and where it is loaded with what is
            bound (quantizer).
        config: The model's config.
        requirements: The job, with what all kinds imply.
        options: An instance of the backend's own `options` class.
        assistant: The draft model, of a decoding that declares one; the model's heads, of one that
            declares `heads`.
        tokenizer: What a quantizer may measure texts with; None where the model has none.
        step_bytes: What a cache leaves free on its device for the memory of steps, in bytes.
        memory_share: The share of the rest that a cache may take; below 1 where the engine has
            another model (a draft model) there.
        free: What a cache is to take as free on its device, in bytes, where several processes have
            agreed on it, since their caches must be of one size. None: it looks by itself.
        max_chunk_size: How many tokens of one sequence a step feeds a cache at most, drafts aside.
            None: any number.
    """

    model: PreTrainedModel | None
    config: PreTrainedConfig
    requirements: Requirements
    options: Any
    assistant: Assistant | None = None
    tokenizer: Any | None = None
    step_bytes: int = 0
    memory_share: float = 1.0
    free: int | None = None
    max_chunk_size: int | None = None

    @property
    def device(self) -> torch.device:
        """Where a step's inputs belong; other layers may be in `requirements.execution_devices`."""
        assert self.model is not None
        return input_device(self.model)


class Backend(ABC):
    """One named implementation of a kind. Instances are made at import: keep `__init__` trivial.

    A plan calls `rank`, `available`, `refuse`, `impossible` and `imply` of every candidate, maybe
    often and in any thread: they must be quick, change nothing and load no weights. `bind` does the
    work.

    Violations: a definition with `flaws` fails to load, and its plugin is reported. What raises
    while a plan is made counts as a reason against the backend; what raises in `bind` or later is a
    PluginError that names it. Errors of `jackfield.errors` keep their type.

    Attributes:
        kind: Set by the base class of the kind.
        bound: What `bind` may return; set by the base class of the kind.
        name: Lower-case words joined by '-', '_' or '.'.
        options: A frozen dataclass whose fields are the keys of ``plugin:name?key=value``; field
            types int, float, bool, str, Literal and ``T | None`` are checked when a selection is
            parsed. A ValueError of its `__post_init__` is reported as the user's mistake.
        auto_rank: Lets ``auto`` choose the backend: the highest accepted rank wins, None means that
            it runs only when it is named. A backend with a rank needs a default for every option.
        auto_notice: What a user must be told, as a warning, where ``auto`` chose the backend.
    """

    kind: ClassVar[str]
    bound: ClassVar[tuple[type, ...]]
    name: ClassVar[str]
    options: ClassVar[type] = NoOptions
    auto_rank: ClassVar[int | None] = None
    auto_notice: ClassVar[str | None] = None

    def rank(self, requirements: Requirements) -> int | None:
        """`auto_rank`; override it where that depends on the job.

        Args:
            requirements: The job, with what the kinds decided before imply.
        """
        del requirements
        return self.auto_rank

    def auto_options(self) -> Any:
        """The options with which ``auto`` tries it: the defaults, unless these are overridden."""
        return self.options()

    def notice(self, requirements: Requirements) -> str | None:
        """`auto_notice`; override it where that depends on the job.

        Args:
            requirements: The job, as it was planned.
        """
        del requirements
        return self.auto_notice

    def available(self) -> list[str]:
        """Why this machine cannot run the backend (an empty list means that it can).

        Must be quick and must not raise; name the extra to install where a library is missing.
        """
        return []

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        """Why this job cannot be done by the backend.

        What takes seconds to find out is left out while `contracts.advice.advising()` says that
        nothing is chosen by the answer.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.

        Returns:
            Each reason as the rest of a sentence that begins with the backend's name ("does not run
            on cuda"); an empty list accepts.
        """
        del requirements, options
        return []

    def impossible(self, requirements: Requirements) -> list[str]:
        """Why no backend of this shape can do this job, whatever `refuse` says; for contracts.

        Args:
            requirements: The job.
        """
        del requirements
        return []

    def imply(self, requirements: Requirements, options: Any) -> Requirements:
        """What the kinds that are decided later must meet, once this backend is chosen.

        The order is compiler, quantizer, scheduler, decoding, cache, attention.

        Args:
            requirements: The job, with what the kinds decided before imply.
            options: An instance of `options`.

        Returns:
            `requirements`, or a copy with more (`dataclasses.replace`); extend what the base class
            of the kind returns. Anything else counts as a reason against the backend.
        """
        del options
        return requirements

    def pins(self, requirements: Requirements, options: Any) -> Mapping[str, str]:
        """What decides what runs, beside the files of the distribution; for `jackfield lock`.

        Args:
            requirements: The job, as it was planned.
            options: An instance of `options`.

        Returns:
            What was fetched or built elsewhere -> its version or the hash of its content
            ("kernel org/name@revision" -> "sha256:…"); empty where there is nothing.
        """
        del requirements, options
        return {}

    def bind(self, context: BindContext) -> Any:
        """Return the object that the engine calls: an instance of one of `bound`.

        Heavy imports belong here. Another object is a PluginError.

        Args:
            context: What it is bound to.
        """
        raise NotImplementedError

    def flaws(self) -> list[str]:
        """What is wrong with the definition itself; checked once, when a plugin is registered."""
        found = []
        name = getattr(self, "name", None)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            found.append(f"`name` must be lower-case words joined by '-', '_' or '.', not {name!r}")
        if type(self.auto_rank) not in (int, type(None)):
            found.append(f"`auto_rank` must be an int or None, not {self.auto_rank!r}")
        if type(self.auto_notice) not in (str, type(None)):
            found.append(f"`auto_notice` must be a str or None, not {self.auto_notice!r}")
        return found + self._flaws_of_options()

    def _flaws_of_options(self) -> list[str]:
        options: Any = self.options  # what a stranger put there
        frozen = getattr(getattr(options, "__dataclass_params__", None), "frozen", False)
        if not isinstance(options, type) or not dataclasses.is_dataclass(options) or not frozen:
            return [f"`options` must be a frozen dataclass, not {options!r}"]
        found = option_flaws(options)
        if self.auto_rank is not None:
            try:
                options()
            except BaseException as error:  # noqa: BLE001 - `auto` must not stumble over it later
                found.append(
                    f"`auto_rank` needs options that all have defaults: {error_text(error)}"
                )
        return found


def unknown(given: Collection[str], known: Collection[str], what: str) -> None:
    """Raise ValueError naming every member of the set `given` that is not in `known`."""
    names(given, what)
    if stray := sorted(set(given) - set(known)):
        raise ValueError(f"unknown {what} {', '.join(stray)}; known: {', '.join(sorted(known))}")


def names(given: Collection[str], what: str) -> None:
    """Raise ValueError unless `given` is a set: a string or a list would half work."""
    if not isinstance(given, Set):
        raise ValueError(f"{what}s must be a frozenset of names, not {given!r}")


class Recordable(Backend):
    """One that takes part in decode steps that are recorded whole, where it declares `recordable`.

    Attributes:
        capabilities: What it declares.
    """

    capabilities: ClassVar[Any]

    def unrecordable(self, requirements: Requirements, options: Any) -> list[str]:
        """Why this job's steps cannot be recorded with what it does in them; empty: they can.

        Args:
            requirements: The job, as in `refuse`.
            options: The options that were selected.
        """
        del requirements, options
        return [] if self.capabilities.recordable else ["does not declare recordable"]
