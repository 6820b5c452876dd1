"""What a cache holds, against what it says that it holds, and against what it promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jackfield.contracts import Cache, KVCache
from jackfield.testing.cache import acts
from jackfield.testing.cache.bench import FREE, Bench
from jackfield.testing.cache.driver import Driver
from jackfield.testing.cache.scenes import BEAMS
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.memory import new_tensors

New = Callable[[], list[torch.Tensor]]

#: Beside keys and values: tables, masks, lengths.
SMALL = 64 * 1024


def memory_checks(bench: Bench) -> Iterator[Check]:
    def driven(run: Any, *, counts: bool = False) -> Any:
        def check(case: Any) -> str | None:
            needs: dict[str, Any] = {"decoding": BEAMS} if bench.declared.forks else {}
            bench.plan(bench.sharp, **needs)
            with new_tensors() as new, bench.drive(**needs) as driver:
                own = (new,) if counts else ()
                found: str | None = run(bench, driver, case, *own)
                return found

        return check

    yield Check("bytes.request", "request_bytes", driven(_request), (1, 9, 33, 70))
    yield Check(
        "bytes.allocated", "allocated_bytes", driven(_allocated, counts=True),
        ((9, 1), (33, 3), (40, 9)),
    )  # fmt: skip
    yield Check("bytes.held", "held_bytes", driven(_held), (9, 40))
    yield Check("leaks.released", "contract", driven(_released), (5, 40))
    yield Check("leaks.rounds", "contract", driven(_rounds, counts=True), (9,))
    yield Check("leaks.closed", "contract", lambda _: _closed(bench))
    yield Check("bytes.refused", "contract", driven(_refused), ((9, 8), (5, 40)))


def _sizes(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Bytes of each piece of memory, by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _total(new: New) -> int:
    return sum(_sizes(new()).values())


def _promised(bench: Bench, name: str, *arguments: Any) -> int | None:
    own = bench.subject
    needs = bench.plan(bench.sharp).requirements
    found: int | None = own.registered.ask(name, needs, own.options, *arguments)
    return found


def _forecast(bench: Bench, why: str) -> Exception:
    """A promise that is not kept; one that nobody made, where the defaults count tokens alone."""
    own = type(bench.subject.backend)
    names = ("request_bytes", "pool_bytes", "pool_of", "allocated_bytes")
    if any(getattr(own, name) is not getattr(Cache, name) for name in names):
        return WrongError(why)
    return NotTriedError(f"{why}; that is the default, and a plan forecasts by it: override it")


def _settled(driver: Driver) -> None:
    """Some decode steps, after which what a prompt took for a moment is gone."""
    for _ in range(3):
        driver.step()


def _request(bench: Bench, driver: Driver, length: int) -> str:
    driver.admit(length, most=8)
    driver.step()
    _settled(driver)
    held = driver.cache.held_bytes()
    tokens = driver.running[0].num_cached
    promised = _promised(bench, "request_bytes", bench_tokens(bench, length, tokens))
    if held is None or promised is None:
        raise NotTriedError("it says None to one of request_bytes and held_bytes")
    if held > promised:
        raise _forecast(
            bench, f"holds {held} bytes for {tokens} tokens, and request_bytes says {promised}"
        )
    if promised > 4 * held + _roomy(bench):
        raise _forecast(
            bench,
            f"request_bytes says {promised} for {tokens} tokens, of which {held} are held: a plan "
            "would let in far too few",
        )
    return f"{held} bytes held, {promised} promised"


def bench_tokens(bench: Bench, length: int, cached: int) -> int:
    """How many tokens a request is told to have: all that it can get where shapes are fixed."""
    return length + 8 if bench.declared.static_shapes else cached


def _roomy(bench: Bench) -> int:
    """A page in every layer, as far as nobody knows how large pages are."""
    needs = bench.plan(bench.sharp).requirements
    return 64 * sum(needs.packed_numbers) * 8


def _allocated(bench: Bench, driver: Driver, case: tuple[int, int], new: New) -> str:
    length, requests = case
    for _ in range(requests):
        driver.admit(length, most=8)
    driver.step()
    _settled(driver)
    tokens = length + 8
    promised = _promised(bench, "allocated_bytes", tokens, requests)
    if promised is None:
        raise NotTriedError("allocated_bytes says None")
    usage = driver.cache.usage()
    pool = usage.num_bytes if usage is not None else 0
    if (by_free := _promised(bench, "pool_of", FREE)) != _promised(bench, "pool_of", 0):
        promised = max(promised, by_free or 0)
    states = _total(new) - _kept_states(driver)
    taken = max(pool, states)
    if taken > promised + SMALL:
        raise _forecast(
            bench,
            f"{requests} requests of {tokens} tokens take {taken} bytes, and allocated_bytes says "
            f"{promised}",
        )
    return f"{taken} bytes taken, {promised} promised"


def _kept_states(driver: Driver) -> int:
    """Bytes that the kit itself keeps: keys and values to compare with."""
    pairs = driver.judge.states._known.values()
    return sum(s.untyped_storage().nbytes() for pair in pairs for s in pair)


def _held(bench: Bench, driver: Driver, length: int) -> str:
    if driver.cache.held_bytes() is None:
        raise NotTriedError("held_bytes says None")
    for _ in range(3):
        driver.admit(length)
    driver.step()
    _settled(driver)
    held = driver.cache.held_bytes() or 0
    needs = bench.plan(bench.sharp).requirements
    least = 0
    size = torch.finfo(getattr(torch, needs.dtype)).bits // 8
    for sequence in driver.running:
        for numbers, window in zip(needs.kv_numbers, needs.windows, strict=True):
            tokens = sequence.num_cached
            seen = tokens if window is None else min(tokens, window - 1)
            least += seen * numbers * size
    rounds = driver.judge.worst > 0
    if held < (least // 16 if rounds else least):
        raise WrongError(
            f"held_bytes says {held}, and {least} are the keys and values that are seen"
        )
    usage = driver.cache.usage()
    if usage is not None and held > usage.num_bytes:
        raise WrongError(f"held_bytes says {held}, and all pools have {usage.num_bytes}")
    if usage is not None and not 0 < usage.pages_used <= usage.pages - usage.pages_kept:
        raise WrongError(
            f"usage says {usage.pages_used} pages are used and {usage.pages_kept} kept, of "
            f"{usage.pages}, while three requests run"
        )
    return f"{held} bytes of {3 * (length + 3)} tokens"


def _released(bench: Bench, driver: Driver, length: int) -> None:
    for number in range(3):
        driver.admit(length + number)
    driver.step()
    _settled(driver)
    if driver.cache.continuous:
        driver.preempt(driver.running[1])
        driver.step()
    driver.release_all()
    driver.check_empty()


def _rounds(bench: Bench, driver: Driver, length: int, new: New) -> str:
    """The same requests again and again take what they took."""
    sizes = []
    for number in range(9):
        tokens = [driver.tokens(length + 5 * (i % 2)) for i in range(3)]
        for own in tokens:
            driver.admit(own, most=16)
        for _ in range(4):
            driver.step()
        if driver.cache.continuous:  # who comes back has what it had, and no more memory
            driver.preempt(driver.running[0])
            driver.resume(driver.aside[0])
            driver.step()
        several = len(driver.running) > 1
        if driver.copies and several:  # who is dropped is gone, and nobody releases it
            driver.fork([driver.running[0]], dropped=[driver.running[1]])
            driver.step()
        acts.fail(driver, 1)
        driver.release_all()
        driver.cache.forget()
        driver.judge.texts.clear()
        driver.judge.rejected.clear()
        driver.judge.states._known.clear()
        driver.done.clear()
        if number in (2, 8):
            sizes.append(_total(new))
    grown = sizes[1] - sizes[0]
    if grown > 6 * 256:
        raise WrongError(
            f"{grown} bytes of tensors more after six times the same requests: what has left is "
            "still held"
        )
    return f"{grown} bytes more after six rounds"


def _closed(bench: Bench) -> str:
    """Memory is free after `close`, also while somebody still has the cache."""
    made = bench.plan(bench.sharp)
    model = bench.model(bench.sharp)
    with torch.inference_mode(), new_tensors() as new:
        cache = bench.bind(made, model)
        if type(cache.inner).close is KVCache.close:  # type: ignore[attr-defined]
            raise NotTriedError("has no `close`: its memory is free when nobody has it any more")
        driver = Driver(cache, made.requirements, bench.rounding(cache))
        driver.admit(40)
        driver.step()
        driver.release_all()
        driver.judge.states._known.clear()
        driver.inputs = None
        cache.close()
        tensors = sorted(new(), key=lambda t: t.untyped_storage().nbytes(), reverse=True)
    if (left := sum(_sizes(tensors).values())) > SMALL:
        told = [f"{t.dtype} {list(t.shape)} on {t.device}" for t in tensors[:3]]
        raise WrongError(
            f"{left} bytes are still there after close, while the object is ({', '.join(told)})"
        )
    return f"{left} bytes left"


def _refused(bench: Bench, driver: Driver, case: tuple[int, int]) -> str | None:
    """What `refuse` lets in can be held, up to its last token."""
    length, new = case
    if (why := driver.cache.refuse(length, new)) is not None:
        return why
    driver.admit(length, most=new)
    while driver.running[0].num_new < new:
        driver.step()
    return None
