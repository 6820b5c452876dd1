"""`tune`: from a model and a workload to the content of a profile."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.api import prepare
from jackfield.benchmarking.contenders import Contender
from jackfield.benchmarking.nursery import Nursery, usable
from jackfield.benchmarking.running import check_plans
from jackfield.benchmarking.workload import Workload
from jackfield.errors import PromptError, UsageError
from jackfield.estimates.comparing import built_in_text
from jackfield.tuning.bounds import Bounds, Budget
from jackfield.tuning.climbing import Climb
from jackfield.tuning.outcome import Outcome
from jackfield.tuning.processes import Processes, Question
from jackfield.tuning.registered import RegisteredLadder

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text
    from jackfield.planning.planning import Plan

#: Tokens of a text that quality is measured by, from its beginning.
READ = 512


@dataclass(frozen=True)
class Terms:
    """What a selection may lose, and what quality is measured by.

    `text` None: the built-in one, or where the model has no tokenizer the longest prompt of the
    workload. `answers` are (prompt, answer, new tokens at most). With `quantize`, weights are
    quantized, too, and caches may round.
    """

    bounds: Bounds = field(default_factory=Bounds)
    text: str | None = None
    answers: Sequence[tuple[Any, str, int]] = ()
    quantize: bool = False


def tune(
    model: str,
    fixed: Mapping[str, Any],
    workload: Workload,
    terms: Terms,
    budget: Budget,
    reader: Text,
    tell: Callable[[str], None],
) -> Outcome:
    """Climb the ladder of what is installed, from what `auto` chooses beside `fixed` arguments.

    `reader` reads texts for the model; `tell` is called with a sentence a step. Raises UsageError
    where the model does not fit, or for a budget too small, ExecutionError where auto itself fails.
    """
    if not math.isfinite(budget.seconds):
        raise UsageError(f"a budget is a number of seconds, not {budget.seconds}")
    with contextlib.ExitStack() as open_ones:
        nursery = open_ones.enter_context(Nursery()) if usable() else None
        auto = prepare(model, **fixed).plan  # raises what `jackfield.load` would
        check_plans([Contender("auto", {"model": model, **fixed})])
        question = Question(_text(terms, workload, reader), terms.answers)
        ladder = RegisteredLadder(model, fixed, workload, quantize=terms.quantize)
        lossy = terms.quantize
        start = Processes({"model": model}, workload, question, budget.left, lossy, nursery)
        if nursery is not None:
            imported(nursery, budget)
        unit = "request" if workload.waits else "round"
        climb = Climb(ladder, start, terms.bounds, budget, tell, unit)
        return climb.run({**fixed, **_where(auto, fixed)})


def _where(auto: Plan, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Where auto puts the model, for all that is planned later: memory that is held by then would
    have it put elsewhere.
    """
    spread = auto.placement is not None and auto.placement.spread
    if spread or fixed.get("device_map") is not None or fixed.get("max_memory") is not None:
        return {}
    return {"device_map": auto.device or "cpu"}


def imported(nursery: Nursery, budget: Budget) -> None:
    """Wait until processes can be forked. Raises UsageError where that takes the whole budget."""
    try:
        nursery.ready(max(0.1, budget.left()))
    except TimeoutError:
        raise UsageError(
            f"a budget of {budget.seconds:g} s is too small for one step: within it not even the "
            "libraries are imported here; give more with --budget"
        ) from None


def _text(terms: Terms, workload: Workload, reader: Text) -> Sequence[int]:
    if reader.tokenizer is None:
        if terms.text is not None or terms.answers:
            raise PromptError("this model has no tokenizer, and --text and --quality are texts")
        return max((one.prompt for one in workload.requests), key=len)[:READ]
    ids = reader.encode(built_in_text() if terms.text is None else terms.text)
    if len(ids) < 2:
        raise PromptError("--text needs a text of at least two tokens")
    return ids[:READ]
