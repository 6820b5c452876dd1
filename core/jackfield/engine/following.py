"""A rank other than 0: no scheduler, sampler or text; it repeats rank 0's calls of the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from jackfield.bridge.devices import settle
from jackfield.contracts import (
    KVCache,
    ModelInputs,
    ScheduledSequence,
    Sequence,
    Settings,
    Step,
    Tokens,
)
from jackfield.engine.bound import BoundModel, install_all
from jackfield.errors import ExecutionError, RanksError, error_text
from jackfield.guarded import all_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jackfield.bridge.lora import HeldLora
    from jackfield.engine.adapters import Adapters
    from jackfield.parallel.ranks import Follower

logger = logging.getLogger("jackfield")


class FollowedSequence(Sequence):
    """One of rank 0, whose group or pair is there: here it knows the others that were told of."""

    __slots__ = ("_members", "adapter")

    def __init__(
        self,
        *given: Any,
        beside: FollowedSequence | None = None,
        sample: int,
        adapter: HeldLora | None = None,
    ) -> None:
        super().__init__(*given, sample=sample)
        self.adapter = adapter
        self._members: list[Sequence] = [] if beside is None else beside._members
        self._members.append(self)

    @property
    def members(self) -> Seq[Sequence]:
        """Itself, and what runs beside it: the beams, or its pair."""
        return self._members


class Replay:
    """Does to `cache` what rank 0 did to its own, and calls `forward` where it did.

    Raises ExecutionError where the cache does something else than that of rank 0: caches that
    processes share must do the same in each of them.
    """

    def __init__(
        self,
        cache: KVCache,
        forward: Callable[[ModelInputs], Any],
        adapters: Adapters | None = None,
    ) -> None:
        self._cache, self._forward, self._adapters = cache, forward, adapters
        self._sequences: dict[int, FollowedSequence] = {}
        self._step = Step(())

    @torch.inference_mode()
    def play(self, acts: Iterable[list[Any]]) -> None:
        """What rank 0 sent: (name, arguments) of each call, in their order."""
        for name, *arguments in acts:
            getattr(self, f"on_{name}")(*arguments)

    def on_new(self, said: dict[str, Any]) -> None:
        given: dict[str, Any] = {
            n: tuple(v) if type(v) is list else v for n, v in said["settings"].items()
        }
        prompt, rest = said["tokens"][: said["prompt_length"]], said["tokens"]
        made = FollowedSequence(
            said["id"], prompt, Settings(**given), sample=said["sample"],
            beside=self._sequences.get(said["beside"]), adapter=self._held(said["adapter"]),
        )  # fmt: skip
        list.extend(made.tokens, rest[len(prompt) :])
        self._sequences[made.id] = made

    def _held(self, number: int | None) -> HeldLora | None:
        return None if self._adapters is None else self._adapters.numbered(number)

    def on_tokens(self, number: int, tokens: list[int]) -> None:
        list.extend(self._sequences[number].tokens, tokens)

    def on_become(self, number: int, source: int, sample: int, tokens: list[int]) -> None:
        """A beam that goes on as another does, with `tokens` behind those that are known of it."""
        origin, here = self._sequences[source], self._sequences.get(number)
        if here is None:
            prompt = origin.tokens[: origin.prompt_length]
            here = FollowedSequence(
                number, prompt, origin.settings,
                beside=origin, sample=sample, adapter=origin.adapter,
            )  # fmt: skip
            self._sequences[number] = here
        here.tokens = Tokens([*origin.tokens, *tokens])

    def on_admit(self, number: int, cached: int, preemptions: int, arrival: float) -> None:
        sequence = self._sequences[number]
        sequence.preemptions, sequence.arrival = preemptions, arrival
        entered = self._cache.admit(sequence)
        if not entered or sequence.num_cached != cached:
            here = f"has {sequence.num_cached}" if entered else "admits it not"
            raise ExecutionError(
                f"{self._cache} on rank 0 has {cached} tokens of request {number}, and here it "
                f"{here}: it does not do the same in every process, so it cannot be shared"
            )

    def on_step(self, fed: list[list[Any]]) -> None:
        self._step = Step(
            [
                ScheduledSequence(self._sequences[number], start, count, tuple(drafts))
                for number, start, count, drafts in fed
            ]
        )
        inputs = self._cache.prepare(self._step)
        with self._adapters.adapting(self._step, inputs) if self._adapters else nullcontext():
            self._forward(inputs)

    def on_commit(self, kept: list[int]) -> None:
        self._cache.commit(self._step, kept)

    def on_release(self, numbers: list[int]) -> None:
        self._cache.release([self._sequences.pop(number) for number in numbers])

    def on_preempt(self, number: int) -> None:
        self._cache.preempt(self._sequences[number])

    def on_fork(self, pairs: list[list[int]], dropped: list[int]) -> None:
        known = self._sequences
        copies = [(known[source], known[into]) for source, into in pairs]
        self._cache.fork(copies, [known[number] for number in dropped])

    def on_forget(self) -> None:
        self._cache.forget()


def follow(bound: BoundModel, ranks: Follower) -> NoReturn:
    """Take part in each step of rank 0 until it closes its engine; then the process ends.

    Raises SystemExit: 0 at the end, 1 where rank 0 is gone or a step fails, which rank 0 is told.
    """
    restore: list[Callable[[], None]] = [bound.close]
    code = 0
    try:
        restore = install_all([bound])
        settle(bound.model)
        replay = Replay(bound.cache, bound.forward, bound.adapters)
        ranks.exchange("ready")
        ranks.watch()
        while (acts := ranks.next()) is not None:
            replay.play(acts)
    except RanksError as error:
        logger.error("rank %d ends: %s", ranks.rank, error)
        code = 1
    except BaseException as error:
        ranks.fail(error_text(error))
        logger.error("rank %d ends: %s", ranks.rank, error_text(error), exc_info=error)
        code = 1
    finally:
        all_of(restore)
    raise SystemExit(code)
