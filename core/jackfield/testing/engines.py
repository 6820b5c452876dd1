"""An engine that runs a backend under test, and every logit that it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.api import load
from jackfield.contracts.requirements import INVARIANT_DEVICES
from jackfield.planning.solving import ARGUMENTS
from jackfield.testing.checks import NotTriedError, WrongError
from jackfield.testing.models import Reference
from jackfield.testing.subject import Subject

if TYPE_CHECKING:
    import torch

    from jackfield.engine.engine import Engine


@dataclass(eq=False)
class Computed:
    """What an engine computed: prefix -> float64 logits `[vocab]` of what follows it.

    A prefix that was computed several times (beams, drafts, after a preemption) has several.
    """

    logits: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)
    steps: int = 0

    def compare(self, reference: Reference) -> str:
        """Compare all of them; a remark with the largest difference.

        Raises WrongError that names the first position that is off.
        """
        worst = 0.0
        bounds: dict[tuple[int, ...], float] = {}
        for prefix in sorted(self.logits, key=len, reverse=True):
            bounds[prefix] = next(
                (b for known, b in bounds.items() if known[: len(prefix)] == prefix), -1.0
            )
            if bounds[prefix] < 0:
                bounds[prefix] = reference.bound(prefix)
        for prefix in sorted(self.logits, key=len):
            right = reference.logits(prefix)[-1]
            for found in self.logits[prefix]:
                off = float((found - right).abs().max())
                if not off <= bounds[prefix]:
                    raise WrongError(
                        f"the logits behind {len(prefix)} tokens are off by {off:.3g} (computed "
                        f"again, alone, in float64; at most {bounds[prefix]:.3g} is rounding)"
                    )
                worst = max(worst, off)
        return f"{sum(map(len, self.logits.values()))} logits, at most {worst:.2g} off"


@contextlib.contextmanager
def engine_with(
    subject: Subject, model: Any, **arguments: Any
) -> Iterator[tuple[Engine, Computed]]:
    """As `engine_of`, and every logit that it computes."""
    with engine_of(subject, model, **arguments) as engine:
        yield engine, watched(engine)


@contextlib.contextmanager
def engine_of(subject: Subject, model: Any, **arguments: Any) -> Iterator[Engine]:
    """An engine of a `model`, live or named, on the subject's device, in which `subject` is chosen.

    `arguments` are those of `jackfield.load`. Raises what that raises, and NotTriedError where the
    device keeps no `deterministic`, whatever runs on it.
    """
    if arguments.get("deterministic"):
        on_invariant_device(subject)
    if isinstance(model, str):  # it is loaded now
        arguments = {"device_map": subject.device, **arguments}
    else:
        model.to(subject.device)
    chosen: Any = {ARGUMENTS[subject.kind]: subject.selection, **arguments}
    with load(model, **chosen) as engine:
        engine._loop.decoding.timing.clock = lambda: 0.0  # what is drafted hangs on no clock
        yield engine


def on_invariant_device(subject: Subject) -> None:
    """Raise NotTriedError where bits hang on the batch on the subject's device."""
    kind = subject.device.partition(":")[0]
    if kind not in INVARIANT_DEVICES:
        raise NotTriedError(f"deterministic=True is not kept on {kind}, whatever attends there")


def watched(engine: Engine) -> Computed:
    """What `engine` computes from now on."""
    computed = Computed()
    decoder = engine._loop.decoding
    choose = decoder.choose
    engine._loop.overlaps = False  # so that all tokens that are fed are known

    def noting(step: Any, logits: torch.Tensor) -> Any:
        computed.steps += 1
        width = logits.shape[1]
        for row, item in zip(logits, step.scheduled, strict=True):
            fed = [*item.sequence.tokens[: item.start + item.num_tokens], *item.drafts]
            for back in range(min(width, item.num_tokens + len(item.drafts))):
                prefix = tuple(fed[: len(fed) - back])
                own = row[width - 1 - back].double().cpu().clone()
                computed.logits.setdefault(prefix, []).append(own)
        return choose(step, logits)

    decoder.choose = noting  # type: ignore[method-assign]
    return computed
