"""Attentions and compilers of a stranger, each wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    Compilation,
    Compiler,
    CompilerCapabilities,
)
from jackfield.registry.discovery import registry
from jackfield.spelling import parse


class UntoldError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text either")


def raising(error: BaseException) -> Callable[..., Any]:
    def wrong(*_: Any, **__: Any) -> Any:
        raise error

    return wrong


def attention(change: Callable[[BoundAttention], Any]) -> Attention:
    """sdpa of jackfield, bound and then changed."""

    class Wrong(Attention):
        name = "wrong"
        capabilities = AttentionCapabilities(
            layouts=frozenset({"padded", "packed"}), features=frozenset({"grouped_query"})
        )

        def bind(self, context: BindContext) -> Any:
            sdpa: Any = registry().find("attention", parse("jackfield/sdpa")).backend
            return change(sdpa.bind(replace(context, options=sdpa.options())))

    return Wrong()


def output(change: Callable[[torch.Tensor], Any]) -> Attention:
    """What it returns, changed, in both layouts."""

    def changed(bound: BoundAttention) -> BoundAttention:
        packed: Any = bound.packed

        def forward(*args: Any, **kwargs: Any) -> Any:
            return change(bound.forward(*args, **kwargs)[0]), None

        def in_pages(*args: Any, **kwargs: Any) -> Any:
            return change(packed(*args, **kwargs))

        return replace(bound, forward=forward, packed=in_pages)

    return attention(changed)


def both(function: Callable[..., Any]) -> Attention:
    return attention(lambda bound: replace(bound, forward=function, packed=function))


class Late:
    """Right for the first few calls."""

    def __init__(self, change: Callable[[torch.Tensor], Any], after: int) -> None:
        self.change, self.left = change, after

    def __call__(self, tensor: torch.Tensor) -> Any:
        self.left -= 1
        return tensor if self.left >= 0 else self.change(tensor)


#: In both layouts.
ATTENTIONS: dict[str, Callable[[], Attention]] = {
    "raises": lambda: both(raising(ValueError("boom"))),
    "raises several lines": lambda: both(raising(ValueError("boom\nand\nmore"))),
    "ends the process": lambda: both(raising(SystemExit(3))),
    "raises what cannot be told": lambda: both(raising(UntoldError())),
    "one row too few": lambda: output(lambda t: t[:, :-1] if t.dim() == 4 else t[:-1]),
    "no tensor": lambda: output(lambda t: None),
    "a list": lambda: output(lambda t: [t]),
    "heads before tokens": lambda: output(lambda t: t.transpose(-3, -2)),
    "heads joined": lambda: output(lambda t: t.flatten(-2)),
    "half a head": lambda: output(lambda t: t[..., :4]),
    "another dtype": lambda: output(lambda t: t.to(torch.float16)),
    "whole numbers": lambda: output(lambda t: t.long()),
    "another device": lambda: output(lambda t: t.to("meta")),
    "sparse": lambda: output(lambda t: t.to_sparse()),
    "sparse in rows": lambda: output(
        lambda t: t.to_sparse_csr() if t.dim() == 2 else t.to_sparse(2)
    ),
    "nested": lambda: output(lambda t: torch.nested.nested_tensor(list(t))),
    "wrong from the third call on": lambda: output(Late(lambda t: t[..., :1], 2)),
}

#: In the padded layout alone.
PADDED: dict[str, Callable[[], Attention]] = {
    "no pair": lambda: attention(
        lambda bound: replace(bound, forward=lambda *a, **k: bound.forward(*a, **k)[0])
    ),
    "a pair in a list of three": lambda: attention(
        lambda bound: replace(bound, forward=lambda *a, **k: [*bound.forward(*a, **k), 1])
    ),
    "mask raises": lambda: attention(
        lambda bound: replace(bound, mask=raising(KeyError("mask_function")))
    ),
}

PACKED: dict[str, Callable[[], Attention]] = {
    "declares pages and binds none": lambda: attention(lambda bound: replace(bound, packed=None)),
    "a pair in pages": lambda: attention(
        lambda bound: replace(bound, packed=lambda *a, **k: (bound.packed(*a, **k), None))  # type: ignore[misc]
    ),
}


class Eager(Compilation):
    """Traces a step, and runs what was traced."""

    graphs = 0

    def compile(self, step: Any) -> Any:
        def lower(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return self.lowered(graph)

        return self.made(torch.compile(step, backend=lower, fullgraph=True))

    def lowered(self, graph: Any) -> Any:
        return graph

    def made(self, compiled: Any) -> Any:
        return compiled


def compiler(**members: Any) -> Compiler:
    made = type("Wrong", (Eager,), members)

    class Wrong(Compiler):
        name = "wrong"
        capabilities = CompilerCapabilities()

        def bind(self, context: BindContext) -> Any:
            return made()

    return Wrong()


def after(change: Callable[..., Any]) -> Compiler:
    """Its compiled step, and what it returns, changed."""

    def made(self: Any, compiled: Any) -> Any:
        return lambda *args: change(compiled, *args)

    return compiler(made=made)


def first_logits() -> Compiler:
    kept: list[Any] = []

    def step(compiled: Any, *args: Any) -> Any:
        if not kept:
            kept.append(compiled(*args))
        return kept[0]

    return after(step)


COMPILERS: dict[str, Callable[[], Compiler]] = {
    "returns the step": lambda: compiler(compile=lambda self, step: step),
    "calls the step": lambda: compiler(
        compile=lambda self, step: lambda *args: (step(*args), 1)[0], graphs=1
    ),
    "returns nothing": lambda: compiler(compile=lambda self, step: None),
    "compile raises": lambda: compiler(compile=raising(RuntimeError("no compiler"))),
    "counts no graphs": lambda: compiler(
        compile=lambda self, step: torch.compile(step, backend="eager", fullgraph=True)
    ),
    "gives the first logits for ever": first_logits,
    "its step raises": lambda: after(raising(OSError("lost"))),
    "its step exits": lambda: after(raising(SystemExit(1))),
    "no logits": lambda: after(lambda compiled, *args: compiled(*args) and None),
    "logits of one token": lambda: after(lambda compiled, *args: compiled(*args)[:, :1]),
    "logits without rows": lambda: after(lambda compiled, *args: compiled(*args)[0]),
    "a graph without attention": lambda: after(
        lambda compiled, ids, positions, keep: torch.zeros(
            len(ids), ids.shape[1] if keep is None else len(keep), 120
        )
    ),
    "runs it twice": lambda: after(lambda compiled, *args: (compiled(*args), compiled(*args))[1]),
    "fills up to less": lambda: compiler(fill=lambda self, count: 0),
    "fills up to a float": lambda: compiler(fill=lambda self, count: float(count)),
    "fill raises": lambda: compiler(fill=raising(ValueError("no size"))),
}
