"""Chains in a graph: what is computed number by number or along rows, a norm for instance, as one.

Each operator by itself reads its numbers from memory, writes them there, and is a call; in a chain
(see `chains.py`) they stay in a core's caches. Every number is rounded as it would be and each
operation is the same code, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch

from jackfield_plugins.compiler.native.chains import FUSED, Chain, Given, Made, Step, by_row
from jackfield_plugins.compiler.native.graph import Graph, Meta, Node, Ref, refs, renumbered
from jackfield_plugins.compiler.native.laying import CHUNK, DIMS
from jackfield_plugins.compiler.native.operators import can_hold, rows_of
from jackfield_plugins.compiler.native.pointwise import IN_FLOAT, step_of

_MOST = 32  # steps of a chain
_ROOM = 1 << 16  # numbers that a chain may hold: a quarter of a MB of the stack
_FOLDS = {
    "aten.sum.dim_IntList": "fold_sum",
    "aten.mean.dim": "fold_mean",
    "aten.amax.default": "fold_most",
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Group = list[int]  # numbers of nodes, in their order


def fused(graph: Graph, others: Container[str]) -> Graph:
    """The same graph with chains for nodes; those whose target is of `others` stay as they are."""
    return _Fusing(graph, others).fused()


class _Fusing:
    def __init__(self, graph: Graph, others: Container[str]) -> None:
        self._graph, self._first = graph, len(graph.inputs)
        self._metas: list[Any] = [one.meta for one in graph.inputs]
        self._metas += [node.out for node in graph.nodes]
        self._steps = {
            at: found
            for at, node in enumerate(graph.nodes)
            if node.target not in others and (found := self._step(node)) is not None
        }
        self._users: dict[int, list[int]] = {graph.output: [len(graph.nodes)]}
        for at, node in enumerate(graph.nodes):
            for value in (*refs(node.args), *refs(node.kwargs)):
                self._users.setdefault(value, []).append(at)

    def fused(self) -> Graph:
        groups = self._groups()
        nodes: list[Node] = []
        numbers = {at: at for at in range(self._first)}  # of values, from before to now
        for at, node in enumerate(self._graph.nodes):
            group = groups.get(at, [at])
            if at != group[-1]:
                continue  # it comes with the last one of its group
            made = self._chain(group, numbers) if len(group) > 1 else renumbered(node, numbers)
            value = self._first + len(nodes)
            nodes.append(made)
            if not isinstance(made.out, list) or len(group) == 1:
                numbers |= dict.fromkeys((self._first + one for one in group), value)
                continue
            for part, one in enumerate(self._kept(group)):
                numbers[self._first + one] = self._first + len(nodes)
                nodes.append(Node("getitem", (Ref(value), part), {}, made.out[part]))
        return replace(self._graph, nodes=nodes, output=numbers[self._graph.output])

    def _groups(self) -> dict[int, Group]:
        """By their numbers, the nodes that are in one; each joins those whose values it reads."""
        groups: dict[int, Group] = {}
        for at, (_, read) in self._steps.items():
            mine = [at]
            for value in read:
                both = sorted({*mine, *groups.get(value - self._first, [])})
                if len(both) > len(mine) and self._fit(both):
                    mine = both
            groups |= dict.fromkeys(mine, mine)
        return groups

    def _fit(self, group: Group) -> bool:
        """Whether these can be one chain, which runs where the last of them does."""
        steps = [self._steps[at][0] for at in group]
        if len(steps) > _MOST or len({step.outer for step in steps} - {()}) > 1:
            return False
        # At most: what is read, what is made, and that as wide as a row.
        values = 2 * len(steps) + sum(len(step.inputs) for step in steps)
        widest = CHUNK
        if by_row(steps):
            read = {one for at in group for one in self._steps[at][1]}
            widths = [n for one in read for n in self._metas[one].shape[-1:]]
            widest = max(CHUNK, *widths, *(step.width for step in steps))
        if values * widest > _ROOM:
            return False
        users = (user for at in group for user in self._users_of(at))
        return all(user in group or user > group[-1] for user in users)

    def _users_of(self, node: int) -> list[int]:
        return self._users.get(self._first + node, [])

    def _kept(self, group: Group) -> Group:
        """Those whose numbers others read."""
        return [at for at in group if any(user not in group for user in self._users_of(at))]

    def _chain(self, group: Group, numbers: dict[int, int]) -> Node:
        given: list[int] = []
        steps = []
        for step, read in (self._steps[at] for at in group):
            new = dict.fromkeys(v for v in read if v - self._first not in group)
            given += [value for value in new if value not in given]
            known: dict[int, Any] = {value: Given(at) for at, value in enumerate(given)}
            known |= {self._first + node: Made(at) for at, node in enumerate(group)}
            inputs = (known[read[o.at]] if isinstance(o, Given) else o for o in step.inputs)
            steps.append(step._replace(inputs=tuple(inputs)))
        kept = self._kept(group)
        chain = Chain(tuple(steps), tuple(map(group.index, kept)), IN_FLOAT)
        outs = [self._graph.nodes[at].out for at in kept]
        args = tuple(Ref(numbers[value]) for value in given)
        return Node(FUSED, args, {"chain": chain}, outs[0] if len(outs) == 1 else outs)

    def _step(self, node: Node) -> tuple[Step, list[int]] | None:
        """A node as a step, and the values that it reads; None: it cannot be in a chain."""
        out, read = node.out, (*refs(node.args), *refs(node.kwargs))
        metas = [out, *(self._metas[value] for value in read)]
        if not all(isinstance(meta, Meta) and 0 not in meta.shape for meta in metas):
            return None
        if not 1 <= len(out.shape) <= DIMS + 1:  # else there may be no call of the chain
            return None
        if node.target in _FOLDS:
            step = _fold(_FOLDS[node.target], out, metas[1], *node.args[1:], **node.kwargs)
        elif node.target == "aten.cat.default":
            step = _cat(out, metas[1:], *node.args[1:])
        else:
            return self._pointwise(node)
        return None if step is None else (step, list(read))

    def _pointwise(self, node: Node) -> tuple[Step, list[int]] | None:
        read: list[tuple[torch.Tensor, int]] = []

        def shown(argument: Any) -> Any:  # a tensor without data
            if not isinstance(argument, Ref):
                return argument
            read.append((_empty(self._metas[argument.at]), argument.at))
            return read[-1][0]

        args = tuple(shown(one) for one in node.args)
        kwargs = {name: shown(one) for name, one in node.kwargs.items()}
        found = step_of(node.target, args, kwargs, _empty(node.out))
        if found is None:
            return None
        step, tensors, computed = found
        if computed != IN_FLOAT or step.out.dtype not in (*_FLOATS, torch.bool):
            return None
        return step, [at for tensor in tensors for one, at in read if one is tensor]


def _empty(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _fold(
    operation: str, out: Meta, x: Meta, dims: Any = None, keepdim: bool = False, **_: Any
) -> Step | None:
    along = [dims] if isinstance(dims, int) else dims
    if not (keepdim and along in ([-1], [len(x.shape) - 1]) and out.shape == (*x.shape[:-1], 1)):
        return None
    # Of other rows torch makes the sum where the fold is alone, in another order.
    if rows_of(_empty(x)) is None or not can_hold(_empty(out), _empty(x)):
        return None
    if x.dtype not in _FLOATS:
        return None
    return Step(operation, (Given(0),), 1.0, out)


def _cat(out: Meta, parts: Sequence[Any], dim: int = 0) -> Step | None:
    alike = all(part.dtype is out.dtype and len(part.shape) == len(out.shape) for part in parts)
    if dim not in (-1, len(out.shape) - 1) or out.dtype not in _FLOATS or not alike:
        return None
    return Step("cat", tuple(map(Given, range(len(parts)))), 1.0, out)
