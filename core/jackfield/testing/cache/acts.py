"""What may happen to sequences in a cache: each act is one thing, read back token by token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from jackfield.contracts import ScheduledSequence, Sequence, Settings, Step
from jackfield.testing.cache.driver import Driver
from jackfield.testing.checks import NotTriedError, WrongError
from jackfield.testing.models import VOCAB


def _admitted(driver: Driver, tokens: Seq[int] | int, *, salt: str = "") -> Sequence:
    """A sequence that enters: there is room for the few of these acts."""
    if (sequence := driver.admit(tokens, salt=salt)) is None:
        raise WrongError(f"admit says no beside {len(driver.running)} short sequences")
    return sequence


def prompt(driver: Driver, length: int) -> None:
    """A prompt as a whole, then some tokens."""
    driver.admit(length)
    for _ in range(4):
        driver.step()


def decode(driver: Driver, length: int) -> None:
    """Many single tokens: pages are filled, windows move on."""
    driver.admit(length)
    for _ in range(45):
        driver.step()


def chunks(driver: Driver, size: int) -> None:
    """A prompt in pieces of a size, beside a shorter one."""
    driver.admit(23)
    driver.admit(4)
    for _ in range(40):
        left = max(len(s.tokens) - s.num_cached for s in driver.running)
        driver.step({s.id: size for s in driver.running})
        if left <= size:
            break
    for _ in range(3):
        driver.step()


def ragged(driver: Driver, lengths: tuple[int, ...]) -> None:
    """Rows of several lengths, which leave one after the other."""
    made = [_admitted(driver, length) for length in lengths]
    driver.step()
    for sequence in [*made[1::2], *made[:1]]:
        driver.step()
        driver.step()
        if sequence in driver.running and len(driver.running) > 1:
            driver.release(sequence)
    driver.step()


def again(driver: Driver, length: int) -> None:
    """A text after another one has left: nothing of it is read."""
    for number in range(4):
        driver.admit(length + 3 * number)
        driver.admit(length)
        driver.step()
        driver.step()
        driver.release_all()


def joins(driver: Driver, length: int) -> None:
    """Some enter while others run, and leave while others go on."""
    for number in range(8):
        driver.admit(length + 5 * (number % 3))
        driver.step()
        driver.step({s.id: 3 for s in driver.running})
        if number % 3 == 2:
            driver.release(driver.running[number % len(driver.running)])


def waits(driver: Driver, length: int) -> None:
    """A sequence that takes no part in some steps."""
    first, second = _admitted(driver, length), _admitted(driver, length + 4)
    driver.step()
    for number in range(8):
        waiting = (first, second)[number // 3 % 2]
        driver.step({waiting.id: 0})
    driver.step()


def rejected(driver: Driver, case: tuple[int, int]) -> None:
    """Drafts of which a number is right, again and again, by itself."""
    drafts, kept = case
    sequence = _admitted(driver, 6)
    driver.step()
    for _ in range(9):
        driver.step(drafts={sequence.id: drafts}, kept={sequence.id: kept})
    driver.step()


def rejected_by_row(driver: Driver, lengths: tuple[int, ...]) -> None:
    """Rows that keep different numbers of their drafts; one leaves, the others go on."""
    made = [_admitted(driver, length) for length in lengths]
    driver.step()
    for number in range(6):
        here = driver.running
        drafts = {s.id: (s.id + number) % 4 for s in here}
        driver.step(drafts=drafts, kept={s.id: (s.id * 2 + number) % 3 for s in here})
        driver.step()
        if number == 3:
            driver.release(made[1])


def truncated(driver: Driver, case: tuple[int, int]) -> None:
    """As of a draft model: the last tokens become others, whatever step they came in."""
    length, back = case
    made = [_admitted(driver, length), _admitted(driver, length + 3)]
    driver.step()
    for number in range(5):
        driver.step()
        sequence = made[number % 2]
        if sequence.num_cached > back:
            driver.truncate(sequence, sequence.num_cached - back)
    driver.step()
    driver.step()


def truncated_and_shared(driver: Driver, length: int) -> None:
    """A draft model's text becomes another one; who asks for the first finds that, or nothing."""
    first = _admitted(driver, length)
    driver.step()
    tokens = list(first.tokens[:length])
    for back in (1, 5, length // 2):
        driver.truncate(first, first.num_cached - back)
        for _ in range(back + 2):
            driver.step()
        other = _admitted(driver, [*tokens, 3])
        driver.step()
        driver.release(other)


def filled(driver: Driver, length: int) -> None:
    """Prompts that come, leave and come again until a small pool was filled several times."""
    known = [driver.tokens(length)]
    known += [[(t + 5 * n) % VOCAB for t in known[0]] for n in range(1, 9)]
    for number in range(60):
        tokens = known[number * (1 + number // 9) % 9]
        if len(driver.running) > 2:
            driver.release(driver.running[0])
        while driver.admit(tokens) is None:
            driver.release(driver.running[0])
        driver.step()
        driver.step()
        for sequence in list(driver.aside):
            if not driver.resume(sequence):
                driver.release(sequence)
        driver.step()
    usage = driver.cache.usage()
    if usage is not None and usage.pages * usage.page_size > 60 * length:
        raise NotTriedError(
            f"its pool has {usage.pages * usage.page_size} tokens, and no option `num_tokens` "
            "makes it small"
        )


def forked(driver: Driver, length: int) -> None:
    """Copies write behind what they share, and stay apart."""
    first, second = _admitted(driver, length), _admitted(driver, length + 2)
    driver.step()
    (copy,) = driver.fork([first])
    driver.step()
    driver.step()
    several = driver.fork([copy, copy, second], dropped=[first])
    for _ in range(3):
        driver.step()
    driver.fork([several[0]], dropped=[several[1], second])
    for _ in range(6):
        driver.step()
    driver.release(several[0])
    driver.step()


def forked_with_drafts(driver: Driver, length: int) -> None:
    """A copy's drafts are taken back, and the other still has what they share."""
    first = _admitted(driver, length)
    driver.step()
    (copy,) = driver.fork([first])
    for kept in (0, 1, 2, 0):
        driver.step(drafts={copy.id: 3, first.id: 1}, kept={copy.id: kept})
    driver.step()


def preempted(driver: Driver, length: int) -> None:
    """One gives its memory up for another, and comes back with what it had generated."""
    first, second = _admitted(driver, length), _admitted(driver, length + 4)
    driver.step()
    driver.step()
    for sequence in (second, first, second):
        driver.preempt(sequence)
        _check_gone(sequence)
        driver.admit(length + 1)
        driver.step()
        driver.step()
        if not driver.resume(sequence):
            driver.release(*driver.running)
            driver.resume(sequence)
        driver.step()
        driver.step()


def _check_gone(sequence: Any) -> None:
    if sequence.num_cached:
        raise WrongError(f"preempt leaves num_cached at {sequence.num_cached}, not 0")


def preempted_and_released(driver: Driver, length: int) -> None:
    """Requests that are cancelled while they wait for their memory."""
    first, second = _admitted(driver, length), _admitted(driver, length + 4)
    driver.step()
    driver.preempt(second)
    driver.release(second)
    driver.step()
    driver.release(first)
    again(driver, length)


def shared(driver: Driver, length: int) -> None:
    """Prompts that begin alike: of one that runs, and of one that has left."""
    first = _admitted(driver, length)
    driver.step()
    same = list(first.tokens[:length])
    _alike(driver, [*same[:-1], same[-1] + 1])
    _alike(driver, [*same, 1, 2, 3])
    driver.step()
    driver.release(first)
    _alike(driver, [same[0] + 1, *same[1:], 4])  # the same pages behind another beginning
    _alike(driver, same)
    _alike(driver, [*same[: length // 2], *driver.tokens(length)])
    for _ in range(4):
        driver.step()
    driver.release_all()
    _alike(driver, [*same[:-1], 0, 5, 9])
    driver.step()


def _alike(driver: Driver, tokens: list[int]) -> None:
    driver.admit(tokens)
    driver.step()
    driver.step()


def salted(driver: Driver, length: int) -> None:
    """The same prompt with another salt has nothing in common with the first."""
    first = _admitted(driver, length, salt="one")
    driver.step()
    for number, salt in enumerate(("two", "", "one", "two", "three")):
        if number == 3:
            driver.release_all()
        other = _admitted(driver, first.tokens[:length], salt=salt)
        if other.num_cached and (salt == "three" or (number < 3 and salt != "one")):
            raise WrongError(
                f"admit says that {other.num_cached} tokens are there, which a request with "
                "another cache_salt has fed"
            )
        driver.step()
        driver.step()


def forgotten(driver: Driver, length: int) -> None:
    """After `forget` the model computes something else: nothing is found again."""
    first = _admitted(driver, length)
    driver.step()
    tokens = list(first.tokens[:length])
    driver.release_all()
    driver.cache.forget()
    driver.done.append("forget")
    again_here = _admitted(driver, tokens)
    if again_here.num_cached:
        raise WrongError(
            f"admit says that {again_here.num_cached} tokens are there, and forget was called: "
            "they are another model's"
        )
    driver.step()


def failed_step(driver: Driver, length: int) -> None:
    """A step that ends without `commit`: all are released, and the next ones find nothing of it."""
    for stepped, layers in ((True, 1), (False, 0), (False, 1)):
        tokens = driver.tokens(length)
        driver.admit(tokens)
        driver.admit(length + 3)
        if stepped:
            driver.step()
        fail(driver, layers)
        driver.release_all()
        driver.admit(tokens)  # asked again
        driver.step()
        driver.step()
        driver.release_all()
    again(driver, length)


def fail(driver: Driver, layers: int) -> None:
    """A step of all that run, without `commit`; whoever calls it releases them."""
    items = [
        ScheduledSequence(s, s.num_cached, len(s.tokens) - s.num_cached) for s in driver.running
    ]
    driver.done.append(f"fail in a step after {layers} layers")
    step = Step(items)
    driver.cache.fits(step)
    driver.run(step, layers)


def never_admitted(driver: Driver, length: int) -> None:
    """`release` of sequences that it does not know, or twice: ignored."""
    stranger = Sequence(10**6, [1, 2, 3], Settings(max_new_tokens=3))
    driver.cache.release([stranger])
    first = _admitted(driver, length)
    driver.step()
    driver.cache.release([stranger])
    driver.step()
    driver.release(first)
    driver.cache.release([first])
    again(driver, length)


def fixed_addresses(driver: Driver, length: int) -> None:
    """Keys and values stay where they are, and what layers return has one shape."""
    driver.admit(length)
    driver.admit(length + 2)
    driver.step()
    driver.step()
    before = driver.where
    for _ in range(6):
        driver.step()
        if driver.where != before:
            at = next(i for i, w in enumerate(driver.where) if w != before[i])
            raise WrongError(
                f"keys or values of layer {at} moved, or have another shape: address and shape "
                f"{driver.where[at]}, {before[at]} in the step before"
            )
