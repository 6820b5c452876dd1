"""Chains as calls of the kernel: values that only a chain reads get places in a small buffer."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from jackfield.contracts.native import NativeCall
from jackfield_plugins.compiler.native.chains import Chain, Given, Made, Step
from jackfield_plugins.compiler.native.linears import address
from jackfield_plugins.compiler.native.pointwise import DTYPES, IN_WHOLE, OPERATIONS

DIMS, _INPUTS = 6, 3
CHUNK = 512  # numbers that an operation works on at a time where none needs a whole row
_LINE = 16  # numbers; places in the buffer are multiples of it: some operations write vectors
_HEAD = struct.Struct(f"@{9 + DIMS}q")  # `struct Chain` in chain.h
_STEP = struct.Struct(f"@{9 + _INPUTS + DIMS}q8s")  # `struct Step`
_FEWER = (torch.bfloat16, torch.float16, torch.bool)  # hold less than what is computed in


def chained(
    out: torch.Tensor | list[torch.Tensor], *given: torch.Tensor, chain: Chain
) -> NativeCall | None:
    """The call that makes `out`, what is kept of a chain; None: it has too many dimensions."""
    outs = out if isinstance(out, list) else [out]
    arguments = _Layout(chain, given, outs).packed()
    return None if arguments is None else NativeCall(address("chain"), arguments, (given, outs))


@dataclass(eq=False)
class _Do:
    """A step of the kernel; `to` and `inputs` are numbers of values."""

    operation: str
    width: int
    to: int = -1
    inputs: tuple[int, ...] = ()
    at: int = 0  # where it begins in `to`
    rounded: int = -1
    once: bool = False
    tensor: torch.Tensor | None = None  # of the chain's outer dimensions, `width` wide
    number: bytes = bytes(8)


@dataclass(eq=False)
class _Layout:
    chain: Chain
    given: Sequence[torch.Tensor]
    outs: Sequence[torch.Tensor]
    _do: list[_Do] = field(default_factory=list)
    _widths: list[int] = field(default_factory=list)  # of values
    _once: set[int] = field(default_factory=set)  # values that are the same for each row
    _had: dict[Any, int] = field(default_factory=dict)  # values by what is read
    _made: list[int] = field(default_factory=list)  # values of the chain's steps

    def packed(self) -> bytes | None:
        """`struct Chain` with its steps."""
        kept = self.chain.kept
        for at, step in enumerate(self.chain.steps):
            value = self._cat(step) if step.operation == "cat" else self._operation(at, step)
            self._made.append(value)
            if at in kept:
                tensor = self._spread(self.outs[kept.index(at)], step.width)
                once = self._are_once([value]) and self._is_same(tensor)
                self._do.append(_Do("store", step.width, -1, (value,), once=once, tensor=tensor))
        return self._struct()

    def _operation(self, at: int, step: Step) -> int:
        """Have it done; the value that it makes."""
        width = self._width(step.inputs[0]) if step.operation.startswith("fold") else step.width
        inputs = tuple(self._read(one, width) for one in step.inputs)
        read = any(Made(at) in later.inputs for later in self.chain.steps)
        rounds = read and step.out.dtype in _FEWER
        if step.operation == "copy" and not (
            rounds and self._dtype(step.inputs[0]) != step.out.dtype
        ):
            return inputs[0]
        to = self._value(step.width, self._are_once(inputs))
        self._do.append(
            _Do(
                step.operation,
                width,
                to,
                inputs,
                rounded=DTYPES[step.out.dtype] if rounds else -1,
                once=to in self._once,
                number=self._number(step.factor),
            )
        )
        return to

    def _cat(self, step: Step) -> int:
        parts = [_Do("copy", self._width(one)) for one in step.inputs]
        for part, one in zip(parts, step.inputs, strict=True):
            if isinstance(one, Made):
                part.inputs = (self._made[one.at],)
            else:
                part.operation, part.tensor = "load", self._spread(self.given[one.at], part.width)
        once = all(
            self._is_same(part.tensor) if part.tensor is not None else self._are_once(part.inputs)
            for part in parts
        )
        to, begin = self._value(step.width, once), 0
        for part in parts:
            part.to, part.at, part.once = to, begin, once
            begin += part.width
        self._do += parts
        return to

    def _read(self, one: Any, width: int) -> int:
        """The value that holds an input of a step, as wide as the step needs it."""
        if isinstance(one, Made) and self._widths[self._made[one.at]] == width:
            return self._made[one.at]
        key = (type(one), repr(one), width)
        if key not in self._had:
            self._had[key] = self._fetched(one, width)
        return self._had[key]

    def _fetched(self, one: Any, width: int) -> int:
        if isinstance(one, Made):
            inputs = (self._made[one.at],)
            do = _Do("spread", width, inputs=inputs, once=self._are_once(inputs))
        elif isinstance(one, Given):
            tensor = self._spread(self.given[one.at], width)
            do = _Do("load", width, once=self._is_same(tensor), tensor=tensor)
        else:
            do = _Do("number", width, once=True, number=self._number(one))
        do.to = self._value(width, do.once)
        self._do.append(do)
        return do.to

    def _value(self, width: int, once: bool) -> int:
        self._widths.append(width)
        if once:
            self._once.add(len(self._widths) - 1)
        return len(self._widths) - 1

    def _spread(self, tensor: torch.Tensor, width: int) -> torch.Tensor:
        return tensor.expand(*self.chain.outer, width)

    def _is_same(self, tensor: torch.Tensor) -> bool:
        """Whether it lies at one place for all rows. Unless whole rows are kept, nothing is."""
        outer = zip(self.chain.outer, tensor.stride(), strict=False)
        return self.chain.by_row and all(n == 1 or stride == 0 for n, stride in outer)

    def _are_once(self, values: Sequence[int]) -> bool:
        return self.chain.by_row and all(value in self._once for value in values)

    def _width(self, one: Given | Made) -> int:
        made = isinstance(one, Made)
        return self.chain.steps[one.at].width if made else self.given[one.at].shape[-1]

    def _dtype(self, one: Given | Made) -> torch.dtype:
        made = isinstance(one, Made)
        return self.chain.steps[one.at].out.dtype if made else self.given[one.at].dtype

    def _number(self, number: float) -> bytes:
        if self.chain.computed != IN_WHOLE:
            return struct.pack("@d", number)
        ends = {float("inf"): 2**63 - 1, -float("inf"): -(2**63)}  # of what there is
        return struct.pack("@q", ends[number] if number in ends else int(number))

    def _struct(self) -> bytes | None:
        size, strides, width, chunk = self._rows()
        if len(size) > DIMS:
            return None
        counts = [do.width if self.chain.by_row else chunk for do in self._do]
        block = max(1, min(CHUNK // width, size[-1]))
        widths = self._widths if self.chain.by_row else [chunk] * len(self._widths)
        places, room = self._places([width * block for width in widths])
        fill = [0] * (DIMS - len(size))
        work = prod(size) * sum(do.width if self.chain.by_row else width for do in self._do)
        whole = _HEAD.pack(
            self.chain.computed, len(size), *size, *fill, width, chunk, block,
            torch.get_num_threads(), room, work, len(self._do),
        )  # fmt: skip
        following = iter(strides)
        for do, count in zip(self._do, counts, strict=True):
            to = (0, 0) if do.to < 0 else (widths[do.to], places[do.to] + do.at)
            inputs = [places[one] for one in do.inputs] + [0] * (_INPUTS - len(do.inputs))
            where = [0] * (DIMS + 3)
            if do.tensor is not None:
                *outer, last = next(following)
                where = [do.tensor.data_ptr(), DTYPES[do.tensor.dtype], *outer, *fill, last]
            whole += _STEP.pack(
                OPERATIONS[do.operation],
                count,
                *to,
                *inputs,
                do.rounded,
                do.once,
                *where,
                do.number,
            )
        return whole

    def _rows(self) -> tuple[list[int], list[list[int]], int, int]:
        """How many rows there are, at least in one dimension; the strides of the tensors, the last
        along a row; how wide rows are, and how much of one is worked on at a time."""
        outer, width = list(self.chain.outer), max(do.width for do in self._do)
        columns = [list(do.tensor.stride()) for do in self._do if do.tensor is not None]
        if self.chain.by_row:
            size, regular = joined(outer, [column[:-1] for column in columns])
            strides = [[*r, column[-1]] for r, column in zip(regular, columns, strict=True)]
            return size, strides, width, width
        (*size, width), strides = joined([*outer, width], columns)
        if not size:
            size, strides = [1], [[0, *one] for one in strides]
        return size, strides, width, min(width, CHUNK)

    def _places(self, widths: Sequence[int]) -> tuple[list[int], int]:
        """Where each value lies in the buffer, and how large that is.

        A value's place is another's once it was read last; those that stay for all rows share none.
        """
        last = {value: at for at, do in enumerate(self._do) for value in (do.to, *do.inputs)}
        places, end = [-1] * len(widths), 0
        free: dict[int, list[int]] = defaultdict(list)  # by size
        for at, do in enumerate(self._do):
            if do.to >= 0 and places[do.to] < 0:
                size = _lines(widths[do.to])
                used = free[size] and do.to not in self._once
                places[do.to] = free[size].pop() if used else end
                end = max(end, places[do.to] + size)
            for value in {do.to, *do.inputs} - {-1} - self._once:
                if last[value] == at:
                    free[_lines(widths[value])].append(places[value])
        return places, end


def _lines(width: int) -> int:
    return -(-width // _LINE) * _LINE


def joined(size: list[int], columns: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """The same numbers in fewer dimensions: those of one are left out, regular neighbours are one.

    `columns` are strides of tensors of this size.
    """
    kept: list[tuple[int, list[int]]] = []
    for d, n in enumerate(size):
        strides = [column[d] for column in columns]
        if n == 1:
            continue
        if kept and all(a == n * b for a, b in zip(kept[-1][1], strides, strict=True)):
            kept[-1] = (kept[-1][0] * n, strides)
        else:
            kept.append((n, strides))
    kept = kept or [(1, [0] * len(columns))]
    return [n for n, _ in kept], [[s[at] for _, s in kept] for at in range(len(columns))]
