"""Checks of compilers in engines: every logit against a recomputation, in float64."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts.requirements import DTYPES
from jackfield.errors import PlanError, shown
from jackfield.planning.solving import ARGUMENTS
from jackfield.testing import holders
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.compiler.steps import main_dtype, tried
from jackfield.testing.engines import Computed, engine_with
from jackfield.testing.models import Reference, build
from jackfield.testing.subject import Subject
from jackfield.testing.threads import in_threads
from jackfield.testing.torch_settings import kept

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

CACHES = ("paged", "static", "dynamic")
LIMIT = 300.0
PROMPTS = [[5, 6, 7, 8, 9], [31, 32, 33], [41]]
#: Ranges of how many sequences run at once, of each of which one is drawn.
BATCHES = ((1, 1), (2, 4), (5, 8), (9, 16), (17, 33))


def checks(subject: Subject) -> Iterator[Check]:
    """All of them."""
    known = subject.backend.capabilities.dtypes
    dtypes = tuple(d for d in DTYPES if d in known and d != "float16")
    yield Check("engine.dtypes", "dtypes", _of(subject, _dtypes), cases=dtypes, limit=LIMIT)
    yield Check("engine.caches", "contract", _of(subject, _caches), cases=CACHES, limit=LIMIT)
    yield Check("engine.batches", "contract", _of(subject, _batches), limit=LIMIT)
    yield Check("engine.weights", "contract", _of(subject, _weights), limit=LIMIT)
    yield Check("engine.threads", "contract", _of(subject, _threads), limit=LIMIT)
    yield Check("engine.adapters", "contract", _of(subject, _adapters), limit=LIMIT)
    yield Check("engine.closed", "contract", _of(subject, _closed), limit=LIMIT)
    if subject.backend.capabilities.batch_invariant:
        yield Check("engine.alone", "batch_invariant", _of(subject, _alone), limit=LIMIT)


def _of(subject: Subject, check: Callable[[Subject, Any], str | None]) -> Callable[[Any], Any]:
    """`tried`, and a plan that refuses the compiler is wrong."""
    run = tried(subject, check)

    def planned(case: Any) -> str | None:
        try:
            return run(case)
        except PlanError as error:
            # A plan names everything that was asked for; what is refused stands first.
            if str(error).startswith(ARGUMENTS["compiler"]):
                raise WrongError(f"declares it, and is refused: {shown(error, 400)}") from error
            raise NotTriedError(shown(error, 400)) from None

    return planned


def _model(subject: Subject, dtype: str = "float32") -> Any:
    known = subject.backend.capabilities.dtypes
    name = dtype if dtype in known else min(known)
    return build("grouped_query", getattr(torch, name), seed=subject.seed)


def _went_through(subject: Subject, engine: Any, most: int) -> str:
    """Whether compiled steps ran at all, and how many graphs they took."""
    if not subject.backend.compiles:
        return "not compiled"
    used = engine.report()["compiler"]
    if not used.calls:
        raise WrongError("no step of the engine went through what it compiled")
    graphs = used.compiled.graphs
    if graphs > most:
        raise WrongError(f"compiled {graphs} graphs, where {most} shapes came")
    return f"{used.calls} steps, {graphs} graphs"


@contextlib.contextmanager
def _engine(subject: Subject, model: Any, **arguments: Any) -> Iterator[tuple[Engine, Computed]]:
    """As `engine_with`; what a compiled step is lent must be as it was. Raises WrongError."""
    changed: list[str] = []
    with engine_with(subject, model, **arguments) as (engine, computed):
        forward = engine._bound.compiled
        if forward is not None:
            forward._compiled = _reading(forward._compiled, changed)
        yield engine, computed
    if changed:
        raise WrongError(f"a compiled step changes the {changed[0]} that it was lent, in place")


def _reading(run: Any, changed: list[str]) -> Any:
    """`run`, where `changed` gets the names of what it changes in place."""

    def step(*given: torch.Tensor | None) -> Any:
        before = [None if one is None else one.clone() for one in given]
        found = run(*given)
        for one, own, name in zip(given, before, ("ids", "positions", "columns"), strict=True):
            if one is not None and own is not None and not torch.equal(one, own):
                changed.append(name)
        return found

    return step


def _dtypes(subject: Subject, dtype: str) -> str:
    model = _model(subject, dtype)
    reference = Reference(model)
    with _engine(subject, model, cache_implementation="paged") as (engine, computed):
        engine.generate(PROMPTS[:2], max_new_tokens=5)
        how = _went_through(subject, engine, 12)
    return f"{computed.compare(_floored(reference))}; {how}"


class _Floored(Reference):
    """Eager attention has its softmax in float32, always."""

    def __init__(self, known: Reference) -> None:
        vars(self).update(vars(known))

    def bound(self, tokens: tuple[int, ...]) -> float:
        """At least what float32 leaves."""
        return max(super().bound(tokens), 1e-5 * float(self.logits(tokens).std()))


def _floored(reference: Reference) -> Reference:
    return _Floored(reference)


def _caches(subject: Subject, cache: str) -> str:
    model = _model(subject)
    reference = Reference(model)
    try:
        with _engine(subject, model, cache_implementation=cache) as (engine, computed):
            engine.generate(PROMPTS, max_new_tokens=7)
            how = _went_through(subject, engine, 16)
    except PlanError as error:
        raise NotTriedError(shown(error, 300)) from None
    return f"{computed.compare(_floored(reference))}; {how}"


def _batches(subject: Subject, _: object) -> str:
    """One to some dozen sequences, in any order; what came before compiles nothing again."""
    model, drawn = _model(subject), subject.random("batches")
    reference = Reference(model)
    counts = [drawn.randint(*ends) for ends in BATCHES]
    drawn.shuffle(counts)
    with _engine(subject, model, cache_implementation="paged") as (engine, computed):
        for round_ in range(2):
            before = _graphs(engine)
            for count in counts:
                engine.generate([[7 + k, 8, 9 + k] for k in range(count)], max_new_tokens=4)
            if round_ and _graphs(engine) != before:
                more = _graphs(engine) - before
                raise WrongError(f"compiled {more} more graphs for batches that it had before")
        how = _went_through(subject, engine, 24)
    return f"{computed.compare(_floored(reference))}; {how}"


def _graphs(engine: Any) -> int:
    compiled = engine.report()["compiler"].compiled
    return 0 if compiled is None else int(compiled.graphs)


def _cache(subject: Subject) -> str:
    """One that finds no prompt again; whole steps are recorded in pages only."""
    return "paged?prefix_sharing=false" if subject.backend.capabilities.records else "dynamic"


def _weights(subject: Subject, _: object) -> str:
    """Weights that their owner changes in place, and that lie elsewhere."""
    model = _model(subject)
    with _engine(subject, model, cache_implementation=_cache(subject)) as (engine, computed):
        engine.generate([[5, 6, 7]], max_new_tokens=3)
        before = Reference(model)
        computed.compare(_floored(before))
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.5)
            model.model.layers[0].mlp.up_proj.weight.neg_()
        _again(engine, computed, model, "after weights were changed in place", before)
        before = Reference(model)
        with torch.no_grad():
            own = model.model.layers[1].mlp.down_proj.weight
            own.data = own.data.roll(1, 0).clone()
        return _again(engine, computed, model, "after a weight was moved to other memory", before)


def _again(
    engine: Any, computed: Any, model: Any, what: str, before: Reference | None = None
) -> str:
    """Compare what is computed now. `before` is the model as it was."""
    computed.logits.clear()
    engine.generate([[5, 6, 7]], max_new_tokens=3)
    try:
        return str(computed.compare(_floored(Reference(model))))
    except WrongError as error:
        why = "; the logits are those of the weights before" if _is(computed, before) else ""
        raise WrongError(f"{what}: {error}{why}") from None


def _is(computed: Any, reference: Reference | None) -> bool:
    """Whether all that was computed is what `reference` says; but for what it never compiled."""
    if reference is None:
        return False
    known, computed.logits = computed.logits, dict(list(computed.logits.items())[1:])
    try:
        computed.compare(_floored(reference))
    except WrongError:
        return False
    finally:
        computed.logits = known
    return True


def _threads(subject: Subject, _: object) -> str:
    """Two engines of two models, which serve at once."""
    models = [build("grouped_query", getattr(torch, main_dtype(subject)), seed=subject.seed + n)
              for n in range(2)]  # fmt: skip
    remarks = ["", ""]
    with contextlib.ExitStack() as opened:
        engines = [
            opened.enter_context(_engine(subject, model, cache_implementation="paged"))
            for model in models
        ]

        def run(who: int) -> None:
            engine, computed = engines[who]
            engine.generate(PROMPTS[who:], max_new_tokens=16)
            try:
                remarks[who] = computed.compare(_floored(Reference(models[who])))
            except WrongError as error:
                raise WrongError(f"two engines in two threads at once: {error}") from None

        acts = [partial(run, who) for who in range(2)]
        in_threads(acts, "two engines in two threads at once", LIMIT)
    return remarks[0]


def _adapters(subject: Subject, _: object) -> str:
    """A LoRA adapter that is switched on and off between requests."""
    if importlib.util.find_spec("peft") is None:
        raise NotTriedError("needs PEFT: pip install 'jackfield[peft]'")
    import peft

    model = _model(subject)
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    with kept(), torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        model.add_adapter(config)
    remark = ""
    with engine_with(subject, model, cache_implementation=_cache(subject)) as (engine, computed):
        for switch in (engine.enable_adapter, engine.disable_adapter, engine.enable_adapter):
            switch()
            remark = _again(engine, computed, model, f"after {switch.__name__}")
        _went_through(subject, engine, 16)
    return remark


def _closed(subject: Subject, _: object) -> None:
    """What was bound is given back, and nobody keeps the engine."""
    model = _model(subject)
    model.to(subject.device)
    ids = torch.tensor([[5, 6, 7]], device=model.device)
    with torch.inference_mode():
        before = model(ids).logits.clone()
    with engine_with(subject, model, cache_implementation="paged") as (engine, _computed):
        engine.generate([[5, 6, 7]], max_new_tokens=3)
        seen = weakref.ref(engine)
    del engine, _computed
    gc.collect()
    if seen() is not None:
        raise WrongError(holders.kept("keeps the engine alive once it is closed", seen))
    with torch.inference_mode():
        if not torch.equal(model(ids).logits, before):
            raise WrongError("leaves the model saying something else once it is closed")
    kept = weakref.ref(model)
    del model
    gc.collect()
    if kept() is not None:
        raise WrongError(holders.kept("keeps the model alive once its engine is closed", kept))


def _alone(subject: Subject, _: object) -> str:
    model, found = _model(subject), []
    for prompts in (PROMPTS[:1], PROMPTS):
        with engine_with(subject, model, deterministic=True) as (engine, computed):
            engine.generate(prompts, max_new_tokens=4)
            found.append(computed.logits)
    one, many = found
    for prefix, logits in one.items():
        if not torch.equal(logits[0], many[prefix][0]):
            raise WrongError(f"behind {len(prefix)} tokens has other bits alone than among others")
    return f"{len(one)} logits"
