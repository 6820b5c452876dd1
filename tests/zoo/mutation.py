"""Wrong backends that grow by themselves: the source of a right one, changed in one place.

After DeMillo, Lipton and Sayward 1978 (mutation analysis): flipped comparisons, numbers one off,
swapped arguments, lost statements, lost copies.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

_FLIPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_COPIES = {"clone", "copy", "contiguous", "detach"}
_numbers = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """A module that differs in one place from `what` it was made of; `what` says where and how."""

    what: str
    tree: ast.Module
    origin: str

    def module(self) -> ModuleType:
        """Run it, as a module of a name of its own."""
        module = ModuleType(f"{self.origin}_mutant_{next(_numbers)}")
        sys.modules[module.__name__] = module  # dataclasses look there
        exec(compile(self.tree, f"<{self.what}>", "exec"), vars(module))  # noqa: S102
        return module


def mutants(module: ModuleType, count: int | None = None, seed: int = 0) -> list[Mutant]:
    """`count` mutants of `module`, drawn by `seed` among all that there are; None: all."""
    tree = ast.parse(inspect.getsource(module))
    found = [
        Mutant(f"{module.__name__} line {line}: {what}", changed, module.__name__)
        for line, what, changed in _changed(tree)
    ]
    return found if count is None else random.Random(seed).sample(found, min(count, len(found)))


def _changed(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Each change: its line, what it is, and a tree of its own."""
    places = list(_places(tree))
    for at, (node, _, _) in enumerate(places):
        for number, (what, _) in enumerate(_variants(node)):
            other = copy.deepcopy(tree)
            inner, parent, slot = list(_places(other))[at]
            put = list(_variants(inner))[number][1]
            field, index = slot
            if index is None:
                setattr(parent, field, put)
            else:
                getattr(parent, field)[index] = put
            yield node.lineno, what, ast.fix_missing_locations(other)


def _places(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST, tuple[str, int | None]]]:
    """What functions do: each node with its parent, and where it stands in it."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    nested = {id(n) for f in functions for n in ast.walk(f) if n is not f}
    for function in functions:
        told = function.name in ("__post_init__", "flaws") or function.name.startswith("jackfield_")
        if id(function) not in nested and not told:
            yield from _inside(function, "body")


def _inside(node: ast.AST, *fields: str) -> Iterator[tuple]:
    for field in fields or node._fields:
        value = getattr(node, field, None)
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        several = value if isinstance(value, list) else [value]
        for index, child in enumerate(several):
            if not isinstance(child, ast.AST) or isinstance(child, ast.arguments | ast.Raise):
                continue
            if hasattr(child, "lineno"):
                yield child, node, (field, index if isinstance(value, list) else None)
            yield from _inside(child)


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in its place."""
    shown = ast.unparse(node).partition("\n")[0][:60]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPPED:
        other = _FLIPPED[type(node.ops[0])]
        changed = ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
        yield f"`{shown}` becomes `{ast.unparse(changed)}`", changed
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _FLIPPED:
        changed = copy.copy(node)
        changed.op = _FLIPPED[type(node.op)]()  # type: ignore[assignment]
        yield f"`{shown}` becomes `{ast.unparse(changed)[:60]}`", changed
    if isinstance(node, ast.UnaryOp):
        yield f"`{shown}` loses its sign", node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        others = [not node.value] if node.value in (True, False) and type(node.value) is bool else [
            node.value + 1, node.value - 1
        ]  # fmt: skip
        for other_value in others:
            yield f"`{shown}` becomes `{other_value}`", ast.Constant(other_value)
    if isinstance(node, ast.Call):
        yield from _calls(node, shown)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield f"`{shown}` is turned round", changed
    if isinstance(node, ast.Assign | ast.AugAssign) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ):
        yield f"`{shown}` is lost", ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None:
        yield f"`{shown}` returns None", ast.Return(ast.Constant(None))


def _calls(node: ast.Call, shown: str) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _OTHERS:
        changed = ast.Call(ast.Name(_OTHERS[name], ast.Load()), node.args, node.keywords)
        yield f"`{shown}` becomes {_OTHERS[name]}", changed
    if len(node.args) > 1 and name not in ("min", "max"):
        first, second, *rest = node.args
        swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
        yield f"`{shown}` with its first arguments swapped", swapped
    for at, keyword in enumerate(node.keywords):
        fewer = [*node.keywords[:at], *node.keywords[at + 1 :]]
        yield f"`{shown}` without {keyword.arg}", ast.Call(node.func, node.args, fewer)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _COPIES and not node.args:
        yield f"`{shown}` without {node.func.attr}()", node.func.value
    if name in ("sorted", "list", "reversed") and len(node.args) == 1:
        yield f"`{shown}` without {name}", node.args[0]
