"""What a quantizer does not declare must be refused when a plan is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import transformers

from jackfield.api import plan
from jackfield.errors import PlanError, SelectionError, shown
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.quantizer.loads import Loads
from jackfield.testing.refusals import refused, undeclared


def checks(loads: Loads) -> Iterator[Check]:
    """One for each capability that is not declared, and for what no quantizer can."""
    can = loads.backend.capabilities
    for name, needs in undeclared(can):
        (what,) = needs
        check = _refused if what == "dtype" else _asked
        yield check(loads, f"{what}s: {name}", f"{what}.{name}", **needs)
    if not can.batch_invariant:
        yield _refused(loads, "batch_invariant", "deterministic", deterministic=True)
    if not can.offload:
        spread = {"model.embed_tokens": "cpu", "model.layers.0": "disk"}
        yield _asked(
            loads,
            "offload",
            "offload",
            execution_devices=("cpu",),
            offloaded=tuple(spread.values()),
        )
    if not can.compiles:
        yield _asked(loads, "compiles", "compiled", compiled=True)
    if not can.adapters:
        yield _asked(loads, "adapters", "adapter", adapter="LORA")
    elif not can.merges:
        yield _asked(loads, "merges", "merge", adapter="LORA", merge_adapter=True)
    yield _asked(loads, "contract", "others", stored={"quant_method": "somebody-elses"})
    yield Check("refused.live", "contract", _live(loads), refusal=True)


def _refused(loads: Loads, capability: str, name: str, **arguments: Any) -> Check:
    """Planning is asked for it."""

    def run(_: object) -> str:
        main = loads.main()
        given = {**loads.arguments(loads.dtype()), **arguments}
        return _expect(loads, capability, lambda: plan(loads.original(main).folder, **given))

    return Check(f"refused.{name}", capability, run, refusal=True)


def _asked(loads: Loads, capability: str, name: str, **changes: Any) -> Check:
    """The backend itself is asked: what this machine has not, no plan gets to."""

    def run(_: object) -> str:
        plain = loads.planned(loads.main(), loads.dtype()).requirements
        return refused(loads.subject, plain, **changes)

    return Check(f"refused.{name}", capability, run, refusal=True)


def _expect(loads: Loads, capability: str, act: Callable[[], Any]) -> str:
    try:
        act()
    except SelectionError as error:
        raise NotTriedError(shown(error, 300)) from None
    except PlanError as error:
        if loads.subject.registered.name not in str(error):
            raise WrongError(
                f"does not declare {capability}, and is not refused by name: {shown(error, 300)}"
            ) from error
        return shown(error, 300)
    raise WrongError(f"does not declare {capability}, and is planned with it")


def _live(loads: Loads) -> Callable[[Any], str]:
    """A model that is loaded, and whole, cannot be quantized while it is read."""

    def run(_: object) -> str:
        main = loads.main()
        if not loads.stores(main, loads.dtype()):
            raise NotTriedError("it stores every weight as it is")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(loads.original(main).folder)
        return _expect(
            loads, "live models", lambda: plan(model, quantization=loads.subject.selection)
        )

    return run
