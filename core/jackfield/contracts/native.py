"""Native calls: what a compiler runs in place of an operator of torch, without Python.

A backend that brings operators of its own may offer each beside its Python function, as a function
in C. A compiler that runs whole steps natively asks for the call once, when it lays a step out;
later steps run it again and again on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Bytes of `arguments` that a call of an attention or a cache has at most.
ROOM = 1024


class NativeCall(NamedTuple):
    """A call of a function in C: `bool function(const void *arguments)`.

    Of an attention or a cache, `arguments` are `ROOM` bytes (1,024) at most: others come in each
    step.

    It returns false where it cannot compute what it was given; then nothing was written outside of
    its outputs. It must not keep `arguments`, raise, or call Python: the GIL is not held.

    Attributes:
        function: Its address.
        arguments: What `arguments` points to, copied to a place that is aligned as C has it. It
            holds addresses of the tensors that the call was made for.
        keeps: What has to live for as long as the call is run.
        together: The address of `bool together(const void *const *arguments, int64_t count)`, which
            does what `count` calls of `function` do, with the same numbers; 0: there is none. A
            compiler runs products of one input so, that do not read each other's outputs: threads
            then start and wait once for all of them. Calls with the same `together` have the same
            `function`, or one whose arguments it can read as well.
        by_row: Each row of the first argument gives its row of the output, whatever others there
            are. Where it makes the logits, `[1, tokens, in]` to `[1, tokens, vocab]`, a call may be
            asked for again for those tokens alone whose logits are wanted.
    """

    function: int
    arguments: bytes
    keeps: tuple[Any, ...] = ()
    together: int = 0
    by_row: bool = False


#: `native(out, *arguments, **named) -> NativeCall | None`: the call that computes an operator of
#: torch into `out`. All tensors are the step's own, at the places where they lie in every step,
#: `out` with the shape, strides and dtype of the operator's output. None: not for these. Arguments
#: come as the schema of the operator has them: those that equal its defaults are left out, so give
#: the function the same defaults, and those behind a `*` come by name. The operator returns what it
#: makes, and changes none of its arguments.
Native = Callable[..., "NativeCall | None"]

#: Operators by their names, e.g. "jackfield.groupwise_linear.default".
NativeOperators = Mapping[str, Native]


def _not_native(*_: Any) -> None:
    return None


def _never(_: Mapping[int, Any]) -> bool:
    return False


def _nobody_counts(_: Sequence[int]) -> None:
    return


@dataclass(frozen=True)
class NativeOffers:
    """What the backends of a plan offer as functions in C to the compiler of its steps.

    Attributes:
        operators: Operators in the step.
        attention: `attention(output, *arguments)`, with the arguments of the operator
            `jackfield::attend`, returns the calls that do in this step what the operator does,
            into `output`: what stores, but where the layer reads what another one keeps, and what
            attends. None: call the operator. Asked again for each layer in each step, before
            any of it runs.
        again: `again(outputs)` says whether the calls that were given last for these `outputs`, by
            layer, do in this step what they are for; they need not be asked for then.
        attended: `attended(layers)`, called after the calls have run: otherwise they are not
            counted.
    """

    operators: NativeOperators = field(default_factory=dict)
    attention: Callable[..., Sequence[NativeCall] | None] = _not_native
    again: Callable[[Mapping[int, Any]], bool] = _never
    attended: Callable[[Sequence[int]], None] = _nobody_counts
