"""Wrong compilers: a right one that traces steps, with one thing done wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from wrong import Wrong

from jackfield.contracts import BindContext, Compilation, Compiler, CompilerCapabilities


class Traced(Compilation):
    """A right one: each shape is traced once, and what was traced is run."""

    def __init__(self) -> None:
        self.graphs = 0

    def compile(self, step: Any) -> Any:
        def lower(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return self.lowered(graph)

        def own() -> Any:
            import types

            code = step.__code__.replace()
            return types.FunctionType(code, step.__globals__, "step", None, step.__closure__)

        shapes: dict[Any, Any] = {}

        def run(ids: Any, positions: Any, keep: Any) -> Any:
            shape = (*ids.shape, keep if keep is None else len(keep))
            if shape not in shapes:
                shapes[shape] = torch.compile(own(), backend=lower, fullgraph=True, dynamic=False)
            return shapes[shape](ids, positions, keep)

        return self.made(run)

    def lowered(self, graph: Any) -> Any:
        return graph

    def made(self, run: Any) -> Any:
        return run


def compiler(
    capabilities: Any = None, refuse: Any = None, **members: Any
) -> Callable[[], Compiler]:
    """A compiler whose compilation has these members in place of `Traced`'s."""

    class Made(Compiler):
        name = "traced"

        def bind(self, context: BindContext) -> Any:
            return type("Made", (Traced,), members)()

    Made.capabilities = capabilities or CompilerCapabilities(devices=frozenset({"cpu"}))
    if refuse is not None:
        Made.refuse = refuse  # type: ignore[method-assign]
    return Made


Change = Callable[..., Any]


def step(change: Change) -> Callable[[], Compiler]:
    """`change(run, kept, ids, positions, keep)`, in which `kept` is a dict of the engine's own."""

    def made(self: Any, run: Any) -> Any:
        kept: dict[Any, Any] = {}
        return lambda *given: change(run, kept, *given)

    return compiler(made=made)


def process(act: Callable[[], Any]) -> Callable[[], Compiler]:
    def made(self: Any, run: Any) -> Any:
        act()
        return run

    return compiler(made=made)


def _first(run: Any, kept: Any, *given: Any) -> Any:
    return kept.setdefault("logits", run(*given))


def _by_shape(run: Any, kept: Any, ids: Any, *rest: Any) -> Any:
    return kept.setdefault(ids.shape, run(ids, *rest))


def _by_place(run: Any, kept: Any, ids: Any, *rest: Any) -> Any:
    return kept.setdefault((ids.data_ptr(), ids.shape), run(ids, *rest))


def _first_positions(run: Any, kept: Any, ids: Any, positions: Any, keep: Any) -> Any:
    return run(ids, kept.setdefault(positions.shape, positions.clone()), keep)


def _frozen(self: Any, graph: Any) -> Any:
    kept: dict[int, Any] = {}

    def run(*given: Any) -> Any:
        for at, one in enumerate(given):
            if isinstance(one, torch.nn.Parameter):
                kept.setdefault(at, one.detach().clone())
        return graph(*[kept.get(at, one) for at, one in enumerate(given)])

    return run


def _at_its_place(self: Any, graph: Any) -> Any:
    kept: dict[int, Any] = {}

    def run(*given: Any) -> Any:
        for at, one in enumerate(given):
            if isinstance(one, torch.nn.Parameter):
                kept.setdefault(at, one.data)
        return graph(*[kept.get(at, one) for at, one in enumerate(given)])

    return run


def _of_rows(run: Any, kept: Any, ids: Any, *rest: Any) -> Any:
    found = run(ids, *rest)
    found[4:] = 0
    return found


def _in_place(run: Any, kept: Any, ids: Any, *rest: Any) -> Any:
    found = run(ids, *rest)
    ids.zero_()
    return found


def _rows(wrong: Callable[[int], bool]) -> Change:
    """The last row is 0 for some numbers of rows."""

    def change(run: Any, kept: Any, ids: Any, *rest: Any) -> Any:
        found = run(ids, *rest)
        if wrong(len(ids)):
            found[-1:] = 0
        return found

    return change


def _width(wrong: Callable[[int], bool]) -> Change:
    """The last column is 0 for some numbers of tokens."""

    def change(run: Any, kept: Any, ids: Any, *rest: Any) -> Any:
        found = run(ids, *rest)
        if wrong(ids.shape[1]):
            found[:, -1:] = 0
        return found

    return change


def _positions_below(most: int) -> Change:
    return lambda run, _, ids, at, keep: run(ids, at.clamp(max=most - 1), keep)


def _first_columns(run: Any, kept: Any, ids: Any, at: Any, keep: Any) -> Any:
    """Columns by how many they are."""
    known = keep if keep is None else kept.setdefault((ids.shape, len(keep)), keep.clone())
    return run(ids, at, known)


SCRATCH: dict[Any, Any] = {}


def _one_scratch(run: Any, kept: Any, ids: Any, at: Any, keep: Any) -> Any:
    """Inputs are laid where those of all engines lie."""
    own = SCRATCH.setdefault(ids.shape, (torch.empty_like(ids), torch.empty_like(at)))
    own[0].copy_(ids)
    own[1].copy_(at)
    return run(*own, keep)


RESULT: dict[Any, Any] = {}


def _one_result(run: Any, kept: Any, *given: Any) -> Any:
    """Logits are laid where those of all engines lie."""
    found = run(*given)
    own = RESULT.setdefault((found.shape, found.dtype), torch.empty_like(found))
    own.copy_(found)
    return own


def _vocabulary_below(most: int) -> Change:
    def change(run: Any, kept: Any, *given: Any) -> Any:
        found = run(*given)
        found[..., most:] = 0
        return found

    return change


def _tokens_below(most: int) -> Change:
    return lambda run, _, ids, at, keep: run(ids.clamp(max=most - 1), at, keep)


def _in_an_engine(self: Any, graph: Any) -> Any:
    """Overwrites the ids of steps that have an attention."""
    if not any("attend" in str(node.target) for node in graph.graph.nodes):
        return graph

    def run(*given: Any) -> Any:
        found = graph(*given)
        for one in given:
            if isinstance(one, torch.Tensor) and one.dtype == torch.int64:
                one.zero_()
                break
        return found

    return run


def _low(run: Any, kept: Any, *given: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return run(*given).float()


def _half(run: Any, kept: Any, *given: Any) -> Any:
    found = run(*given)
    return found.half().to(found.dtype)


def _sets_limits() -> None:
    torch._dynamo.config.recompile_limit = 999


def _anew(self: Any, step_: Any) -> Any:
    def run(*given: Any) -> Any:
        torch._dynamo.reset()
        return Traced.compile(self, step_)(*given)

    return run


SHARED: dict[Any, Any] = {}


def _shared(self: Any, step_: Any) -> Any:
    return SHARED.setdefault("step", Traced.compile(self, step_))


KEPT: list[Any] = []


def _keeps(self: Any, step_: Any) -> Any:
    KEPT.append(step_)
    return Traced.compile(self, step_)


def _noisy_rows(run: Any, kept: Any, ids: Any, *rest: Any) -> Any:
    return run(ids, *rest) * (1 + 1e-7 * len(ids))


def _none(self: Any, requirements: Any, options: Any) -> list[str]:
    return []


INVARIANT = CompilerCapabilities(devices=frozenset({"cpu"}), batch_invariant=True)
ROUND = "other numbers|in the same tensors|off by"

ZOO: tuple[Wrong, ...] = (
    Wrong("first logits for ever", step(_first), "returns|other numbers|off by"),
    Wrong("first logits of a shape for ever", step(_by_shape), "other numbers|off by"),
    Wrong("first logits of a tensor's place", step(_by_place), "other numbers"),
    Wrong("positions of the first step", step(_first_positions), "other numbers|off by"),
    Wrong("positions one further", step(lambda run, _, ids, at, keep: run(ids, at + 1, keep)),
          "one further"),
    Wrong("positions forgotten", step(lambda run, _, ids, at, keep: run(ids, at * 0, keep)),
          "taken for zeros"),
    Wrong("columns one earlier", step(
        lambda run, _, ids, at, keep: run(ids, at, keep if keep is None else keep - 1)
    ), "one earlier|raised"),
    Wrong("all columns", step(lambda run, _, ids, at, keep: run(ids, at, None)), "returns"),
    Wrong("rows in reverse order", step(lambda run, _, *given: run(*given).flip(0)), "reverse"),
    Wrong("rows beyond the fourth are zero", step(_of_rows), "5 rows of 3"),
    Wrong("logits of the first token alone", step(lambda run, _, *given: run(*given)[:, :1]),
          "returns"),
    Wrong("logits without rows", step(lambda run, _, *given: run(*given)[0]), "returns"),
    Wrong("nothing returned", step(lambda run, _, *given: run(*given) and None), "returns|raised"),
    Wrong("changes the ids", step(_in_place), "changes the ids"),
    Wrong("computes in bfloat16", step(_low), "off by|returns"),
    Wrong("rounds logits to float16", step(_half), "off by"),
    Wrong("weights as they were at first", compiler(lowered=_frozen),
          "changed in place .*: the weights are those of before"),
    Wrong("weights where they were at first", compiler(lowered=_at_its_place),
          "moved to other memory"),
    Wrong("returns the step", compiler(compile=lambda self, step_: step_), "very step"),
    Wrong("counts no graphs", compiler(
        compile=lambda self, step_: torch.compile(step_, backend="eager", fullgraph=True)
    ), "counts none"),
    Wrong("compiles in every step", compiler(compile=_anew), "more graphs|compiled"),
    Wrong("one step for all models", compiler(compile=_shared), "model|off by"),
    Wrong("keeps its models", compiler(compile=_keeps), r"alive.*: through compiler\.KEPT\[\d+\]"),
    Wrong("fills up to nothing", compiler(fill=lambda self, count: 0), r"fill\(1\)"),
    Wrong("fills up to a float", compiler(fill=lambda self, count: float(count)), r"fill\(1\)"),
    Wrong("fills up to a thousand", compiler(fill=lambda self, count: max(count, 1000)), "fill"),
    Wrong("fills up further each time", compiler(fill=lambda self, count: count + 1), "fill"),
    Wrong("compiling breaks", compiler(compile=lambda self, step_: self.nothing), "raised"),
    Wrong("closing breaks the second time", compiler(
        close=lambda self: setattr(self, "graphs", self.graphs.missing)
    ), "missing"),
    Wrong("seeds torch", process(lambda: torch.manual_seed(0)), "seed of torch"),
    Wrong("sets torch's limits", process(_sets_limits), "torch._dynamo.config changed"),
    Wrong("switches gradients off", process(lambda: torch.set_grad_enabled(False)), "gradients"),
    Wrong("declares batch_invariant", compiler(
        INVARIANT, made=lambda self, run: lambda *given: _noisy_rows(run, None, *given)
    ), "other bits|deterministic|refuse"),
    Wrong("refuses nothing", compiler(refuse=_none), "`refuse` accepts"),
    Wrong("seven rows", step(_rows(lambda count: count == 7)), "in row 6 of 7"),
    Wrong("odd rows beyond eight", step(_rows(lambda count: count > 8 and count % 2 == 1)),
          "in row (8|10|12|14|16|18|20|22|24|26|28|30|32) of"),
    Wrong("more than sixteen rows", step(_rows(lambda count: count > 16)), "in row [123]. of"),
    Wrong("nine tokens", step(_width(lambda count: count == 9)), "in column .* of 9|in column 8"),
    Wrong("more than sixteen tokens in a row", step(_width(lambda count: count > 16)),
          "in column [123]. of"),
    Wrong("positions up to 63", step(_positions_below(64)), "positions from 64 to 255"),
    Wrong("positions up to 4095", step(_positions_below(4096)), "positions from 4096 to"),
    Wrong("positions of 16 bits", step(
        lambda run, _, ids, at, keep: run(ids, at % 65_536, keep)
    ), "cut to 16 bits"),
    Wrong("columns by how many they are", step(_first_columns), "then as many others"),
    Wrong("one scratch for all engines", step(_one_scratch), "two threads at once"),
    Wrong("one result for all engines", step(_one_result),
          "a step of another engine has run: .*: they are the other's"),
    Wrong("logits of 32768 tokens", step(_vocabulary_below(32_768)),
          "in tokens 32768 to .* of"),
    Wrong("ids below 32768", step(_tokens_below(32_768)), "a vocabulary of"),
    Wrong("returns float16", step(lambda run, _, *given: run(*given).half()),
          "returns logits in torch.float16, where torch.float32 is due"),
    Wrong("changes the ids of engines", compiler(lowered=_in_an_engine), "changes the ids"),
    Wrong("attention twice", step(lambda run, _, *given: (run(*given), run(*given))[1]),
          "called|twice|attention"),
)  # fmt: skip
