"""How many prompt tokens a step may feed, so that it takes no longer than `target_step_seconds`.

The length of a step is the time between two tokens of a stream. What prompt tokens add to it is
measured, as seconds per token over the last few steps (a secant through the cost of decoding). So
steps converge to the target, also when a long context, another batch or other load on the machine
changes the cost.

Where decoding alone takes more than half of the target, the tokens of prompts get as much time as
decoding, or up to `MOST_SHARE` times as much where so many more sequences read than decode: who
waits for a first token is one of those that time is shared among. What a step takes longer for any
prompt at all (the overhead, e.g. since it runs uncompiled) is not charged to them: fewer tokens
would not lessen it, only make more steps that pay.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jackfield.engine.steps import ScheduledRunning

TARGET_STEP_SECONDS = 0.05
LEAST = 24  # prompt tokens of a step beside some that decode
GRAIN = 8  # what is more comes in units of so many
ALONE = 256  # the least where nobody decodes: with fewer, reading weights costs more than computing
FIRST = 128  # before anything is known
PATIENT = 4  # times the target where nobody decodes
LATELY = 0.7  # what a step counts for when the next has been measured
UNTIL_NONE = 32  # steps beside prompts that take longer than the target, then one without
UNTIL_KNOWN = 4  # the same where it was never measured what so many take that decode
MOST_SHARE = 3.0  # times what decoding takes
MOST_OVERHEAD = 0.75  # of what prompts cost
SURE_APART = 32  # tokens from the mean at which a step counts about half for the overhead
OUTLIER = 4.0  # times what was expected: more than that is not the tokens' doing


class TokenBudget:
    """Learns from every step what prompt tokens cost, and says how many the next may feed.

    `most` tokens are never exceeded, those that decode included; `least` prompt tokens fit in any
    step as far as `most` lets them, but for one in a while that has none. Not thread-safe.
    """

    def __init__(self, target_seconds: float, most: int, least: int = LEAST) -> None:
        self._target = target_seconds
        self._most = most
        self._least = least
        self._decode_seconds: dict[int, float] = {}  # of a step without prompts, by `_size`
        self._mixed = 0  # steps beside prompts, longer than the target, since one without
        self._prompt_seconds = 0.0  # of the last steps, each counting less than the one after it
        self._prompt_tokens = 0.0
        self._steps = 0.0  # what those count for
        self._overhead = 0.0  # seconds that any prompt adds, however short
        self._spread = 0.0  # how far apart the sizes of steps were by which it is known, squared
        self._last = 0  # prompt tokens of the last step that was measured
        self._unmeasured = (0, 0.0)  # prompt tokens and seconds of steps that nobody waited for

    def tokens(self, decoding: int, reading: int = 0, *, crowded: bool = False) -> int:
        """How many tokens the next step may feed, `decoding` of them by sequences that decode,
        beside `reading` others.

        `crowded`: others wait until one of these ends, so the tokens of prompts get no more time
        than decoding takes. That it stays known, one step after `UNTIL_NONE` that took longer than
        the target is without prompts.
        """
        if decoding and self._mixed >= self._until_none(decoding):
            self._mixed = 0  # whatever becomes of it: who waits for a prompt waits for one step
            return min(self._most, decoding)
        fitting = self._fitting(decoding, reading, crowded)
        return min(self._most, decoding + max(self._least, fitting))

    def _until_none(self, decoding: int) -> int:
        return UNTIL_NONE if _size(decoding) in self._decode_seconds else UNTIL_KNOWN

    def _fitting(self, decoding: int, reading: int, crowded: bool) -> int:
        """How many prompt tokens fit: `FIRST`, or up to twice those of the last measured step.

        Where decoding alone takes longer than half of the target, they get a time by how many read
        for each that decodes; where others wait, as long as decoding takes.
        """
        base = self._decoding_takes(decoding)
        equal = bool(base) and (crowded or 2 * base >= self._target)
        share = 1.0 if crowded else min(max(1.0, reading / max(1, decoding)), MOST_SHARE)
        left = share * base if equal else self._target - base
        seconds = left if decoding else PATIENT * self._target
        least = LEAST if decoding else ALONE
        if not self._prompt_tokens:
            return max(FIRST, least)
        each = self._prompt_seconds / self._prompt_tokens
        trusted = max(2 * self._last, FIRST)
        fitting = trusted if each * trusted <= seconds else int(seconds / each)
        if equal and fitting < trusted:
            own = each - self._overhead * self._steps / self._prompt_tokens
            fitting = max(fitting, min(2 * self._last, int(seconds / own)))
        return max(least, fitting // GRAIN * GRAIN)

    def count(self, scheduled: Seq[ScheduledRunning], seconds: float, *, waited: bool) -> None:
        """One step took so long. Not `waited`: a device may still be busy with it.

        Its tokens then count with the next one that was waited for.
        """
        prompts = sum(item.num_tokens for item in scheduled if item.num_tokens > 1)
        queued, so_far = self._unmeasured
        prompts, seconds = prompts + queued, seconds + so_far
        if not waited:
            self._unmeasured = prompts, seconds
            return
        self._unmeasured = (0, 0.0)
        decoding = sum(item.num_tokens == 1 for item in scheduled)
        known = self._decode_seconds
        if not prompts:
            self._mixed = 0
            known[_size(decoding)] = self._smooth(known.get(_size(decoding)), seconds)
        elif prompts >= min(LEAST, self._least):
            if decoding and not queued and seconds > self._target:
                self._mixed += 1
            base = 0.0
            if decoding and known:  # a step without prompts takes no longer than one with them
                size = self._known_size(decoding)
                base = known[size] = min(known[size], seconds)
            self._learn(prompts, seconds - base)

    def _decoding_takes(self, decoding: int) -> float:
        """Seconds of a step in which so many decode alone; 0 where nothing is known of it."""
        known = self._decode_seconds
        return known[self._known_size(decoding)] if decoding and known else 0.0

    def _known_size(self, decoding: int) -> int:
        """What stands for so many: as many were measured, or else fewer, or else more."""
        known = self._decode_seconds
        return max((size for size in known if size <= _size(decoding)), default=min(known))

    def _learn(self, prompts: int, seconds: float) -> None:
        if self._prompt_tokens:
            expected = prompts * self._prompt_seconds / self._prompt_tokens
            seconds = min(seconds, OUTLIER * max(expected, self._target / 10))
            self._learn_overhead(prompts, seconds)
        self._prompt_seconds = LATELY * self._prompt_seconds + seconds
        self._prompt_tokens = LATELY * self._prompt_tokens + prompts
        self._steps = LATELY * self._steps + 1
        self._last = prompts

    def _learn_overhead(self, prompts: int, seconds: float) -> None:
        """Where the line through this step and the mean of the last ones meets no tokens at all.

        The farther apart they are, the more it counts. All else that changes the cost of a step
        (a longer context) is taken for the tokens' doing.
        """
        tokens = self._prompt_tokens / self._steps
        mean = self._prompt_seconds / self._steps
        if apart := prompts - tokens:
            found = seconds - (seconds - mean) / apart * prompts
            weight = apart**2
            self._spread = max(LATELY * self._spread, SURE_APART**2) + weight
            self._overhead += weight / self._spread * (found - self._overhead)
        self._overhead = min(max(0.0, self._overhead), MOST_OVERHEAD * min(mean, seconds))

    def _smooth(self, before: float | None, seconds: float) -> float:
        if before is None:
            return min(seconds, 2 * self._target)  # graphs may have been made in it
        return before + (1 - LATELY) * (min(seconds, OUTLIER * before) - before)


def _size(decoding: int) -> int:
    """Equal for numbers of sequences, at least 1, up to the same power of two."""
    return (decoding - 1).bit_length()
