"""The sandbox that chat templates run in: bounded in time, in memory, and in what they may call."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.runtime import Context


MOST = 16_000_000  # characters and items that a template may make in all, and …
TIMES = 32  # … as many times what the chat has
_LARGEST_INT = 4096  # bits
_METHODS = frozenset(
    {
        "center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust",
        "to_bytes", "translate", "zfill",
    }
)  # fmt: skip
_FILTERS = frozenset(
    {
        "batch", "center", "format", "indent", "join", "pprint", "replace", "round", "slice",
        "string", "sum", "tojson", "truncate", "urlize", "wordwrap", "xmlattr",
    }
)  # fmt: skip


class Exceeded(BaseException):
    """Not an Exception, since jinja survives some of these."""


class _Meter(threading.local):
    """What the rendering of this thread may still make."""

    left = 0

    def charge(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise Exceeded("makes far more text than the messages have")


def _parts(value: Any, most: int) -> Iterator[Any]:
    """A value and all that it is made of, all the way down; `most` of these at most."""
    stack = [value]
    while stack and most > 0:
        most -= 1
        yield (one := stack.pop())
        if isinstance(one, Mapping):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            stack += one


def size_of(value: Any, most: int) -> int:
    """Characters and items in a value, all the way down; it is not counted on above `most`."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    found = 0
    for one in _parts(value, most + 1):
        found += 1 + (len(one) if isinstance(one, str | bytes) else 0)
        if found > most:
            break
    return found


def _numbers(value: Any, most: int) -> list[int]:
    """The sizes of all whole numbers in a value."""
    return [abs(one) for one in _parts(value, most) if isinstance(one, int)]


class _Generator(CodeGenerator):
    """Has what joins texts and what makes containers go through the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(environment.shown, (")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")))")

    def _made(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:  # the names of an assignment
            super().visit_Tuple(node, frame)


class Environment(ImmutableSandboxedEnvironment):
    """transformers' own environment for chat templates, with prices."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, own: Any) -> None:
        super().__init__(
            trim_blocks=own.trim_blocks,
            lstrip_blocks=own.lstrip_blocks,
            extensions=[type(extension) for extension in own.extensions.values()],
            optimized=False,
            finalize=self.shown,
        )
        self.meter = _Meter()
        self.globals.update({k: v for k, v in own.globals.items() if k not in ("range", "lipsum")})
        del self.globals["lipsum"]
        self.filters = {name: self._priced(name, act) for name, act in own.filters.items()}

    def made(self, value: Any) -> Any:
        """A container that a template wrote down."""
        self.meter.charge(size_of(value, self.meter.left))
        return value

    def shown(self, value: Any) -> Any:
        """What becomes text."""
        if not isinstance(value, str):
            self.meter.charge(size_of(value, self.meter.left))
        return value

    def concat(self, parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.meter.charge(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and type(left) is int and type(right) is int:
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits + right.bit_length() > _LARGEST_INT:
                raise Exceeded("computes with numbers of thousands of digits")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(times, int):
                    self.meter.charge(len(sized) * max(0, times))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.meter.charge(len(left) + len(right))
        elif operator == "%" and isinstance(left, str | bytes):
            self._charge_product("format", (str(left), right), {})
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """As in jinja, whose names leave those of the arguments free."""
        method = getattr(__obj, "__wrapped__", __obj)
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if name in _METHODS and owner is not None:
            __self._charge_product(name, (owner, *args), kwargs)
        found = super().call(__context, __obj, *args, **kwargs)
        if isinstance(found, list | tuple | dict):  # also `split` and `dict`
            __self.meter.charge(len(found))
        return found

    def _priced(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is charged for."""
        first = 1 if hasattr(act, "jinja_pass_arg") else 0  # behind what jinja itself hands in

        @functools.wraps(act)
        def priced(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(a) if isinstance(a, GeneratorType) else a for a in args)
            if name in _FILTERS:
                self._charge_product(name, args[first:], kwargs)
            found = act(*args, **kwargs)
            if hasattr(found, "__len__"):
                self.meter.charge(len(found))
            return found

        return priced

    def _charge_product(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Charge what can come of these: each may be repeated as often as another is large."""
        if name == "replace":  # what is looked for makes nothing larger
            args = [*args[:1], *args[2:]]
            kwargs = {key: value for key, value in kwargs.items() if key != "old"}
        values = [*args, *kwargs.values()]
        widths = [1]
        if name in ("format", "format_map"):
            form = next((v for v in values if isinstance(v, str)), "")
            widths += [int(digits[:9]) for digits in re.findall(r"\d+", form)]
            if re.search(r"\*|\{[^{}]*\{", form):  # a number among the values is a width
                widths += _numbers(values, self.meter.left)
            values = [v for v in values if not isinstance(v, int | float)]
        product = max(widths)
        for value in values:
            numeric = isinstance(value, int) and not isinstance(value, bool)
            product *= max(1, abs(value) if numeric else size_of(value, self.meter.left))
            if product > self.meter.left:
                break
        self.meter.charge(product)
