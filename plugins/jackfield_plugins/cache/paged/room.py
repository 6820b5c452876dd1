"""Whether there are pages: for a sequence that wants to enter, for a step, for a request at all."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.contracts import Sequence, Step
    from jackfield_plugins.cache.paged.groups import LayerGroup


class Room:
    """Counts the pages of `groups`, which hold `num_tokens` tokens; None: as many as needed.

    `running` are the sequences that hold pages. A step feeds `chunk` tokens of one at most; None:
    all that it has. What those that run are owed is counted once for all that enter in one step;
    `recount` is called when they, or their pages, have changed otherwise.
    """

    def __init__(
        self,
        groups: Collection[LayerGroup],
        num_tokens: int | None,
        running: dict[int, Sequence],
        chunk: int | None,
    ) -> None:
        self._groups = groups
        self._chunk = chunk
        self._num_tokens = num_tokens
        self._running = running
        self.recount()

    def recount(self) -> None:
        """Forget what was counted."""
        self._counted = 0  # of those that run, in the order of their entering
        self._debts = [0 for _ in self._groups]

    def for_more(self, sequence: Sequence, shared: Seq[list[int]]) -> bool:
        """Whether what the sequence has so far fits beside what the others have so far.

        In each group it shares the pages `shared`. Each of the others keeps a page to grow into, so
        that nobody enters to be preempted at once.
        """
        if self._num_tokens is None or self._alone(sequence):
            return True
        tokens = len(sequence.tokens)
        for group, pages, owed in zip(self._groups, shared, self._owed(), strict=True):
            needed = group.pages_for(tokens, tokens, self._chunk) - len(pages)
            revived = sum(map(group.allocator.is_kept, pages))
            if needed + revived + owed > group.allocator.num_free:
                return False
        return True

    def for_swapped(self, sequence: Sequence, counts: Seq[int]) -> bool:
        """The same for a sequence that needs so many pages in each group, and one to grow into."""
        return self._alone(sequence) or all(
            count + 1 + owed <= group.allocator.num_free
            for group, count, owed in zip(self._groups, counts, self._owed(), strict=True)
        )

    def _alone(self, sequence: Sequence) -> bool:
        """Whether nobody runs but its own group, which was found to fit when it came."""
        return all(other in sequence.members for other in self._running.values())

    def _owed(self) -> list[int]:
        """The pages of each group that running sequences need for what they have, and to grow."""
        come = len(self._running) - self._counted  # the last ones
        for sequence in islice(reversed(self._running.values()), come):
            for at, group in enumerate(self._groups):
                self._debts[at] += self._owed_to(group, sequence)
        self._counted = len(self._running)
        return self._debts

    def _owed_to(self, group: LayerGroup, sequence: Sequence) -> int:
        tokens = len(sequence.tokens)
        missing = group.missing(sequence.id, sequence.num_cached, tokens)
        most = group.pages_for(tokens, tokens, self._chunk)
        return 1 + min(missing, max(0, most - len(group.tables[sequence.id].pages)))

    def adjust_schedule(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        """As wanted, or as much as the pool of a window holds, which may be less than a prompt."""
        if self._num_tokens is None:
            return wanted
        return [
            min(count, *(g.largest(s.id, s.num_cached) for g in self._groups))
            for s, count in zip(sequences, wanted, strict=True)
        ]

    def for_step(self, step: Step) -> bool:
        if self._num_tokens is None:
            return True
        return all(
            sum(
                group.missing(f.sequence.id, f.start, f.start + f.num_tokens + len(f.drafts))
                for f in step.scheduled
            )
            <= group.allocator.num_free
            or group.missing_of(step.scheduled) <= group.allocator.num_free
            for group in self._groups
        )

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int) -> str | None:
        """Why a request of this size can never be held; None: it can."""
        tokens = prompt_length + max_new_tokens - 1
        size = (tokens, prompt_length, self._chunk)
        if self._num_tokens is None or all(
            copies * group.pages_for(*size) <= group.allocator.capacity for group in self._groups
        ):
            return None
        needed = max(group.places_for(*size) for group in self._groups)
        if copies > 1:  # share no page once they were preempted; each ends with a page of its own
            page_size = next(iter(self._groups)).page_size
            needed = copies * -(-needed // page_size) * page_size
        each = "" if copies == 1 else f", each of {copies} sequences by itself,"
        return (
            f"{prompt_length} prompt tokens and up to {max_new_tokens} new ones{each} need "
            f"{needed} places, and it holds {self._num_tokens}; "
            f"{self._smaller(tokens, prompt_length, copies)}, or "
            f"select 'paged?num_tokens={needed}'"
        )

    def _smaller(self, tokens: int, prompt: int, copies: int) -> str:
        """What makes such a request need less."""
        if all(
            copies * g.pages_for(tokens, prompt, 1) <= g.allocator.capacity for g in self._groups
        ):
            return "feed the prompt in pieces (prefill_chunk_size)"
        fewer = ", or run fewer (num_beams, guidance_scale)" if copies > 1 else ""
        return f"lower max_new_tokens{fewer}"
