"""What a sequence takes of what it gained in a step, and how its text ends."""

from __future__ import annotations

from functools import partial

from jackfield.contracts import Accepted
from jackfield.engine.sequences import RunningSequence
from jackfield.engine.steps import Event
from jackfield.sampling.fenced import OwnFailure, fenced


def taken(sequence: RunningSequence, gain: Accepted) -> Event:
    """What the sequence took of its gain. A text that cannot be made ends this request alone."""
    before = len(sequence.tokens)
    try:
        extend = partial(sequence.extend, gain)
        # Without a detokenizer no code runs here that could harm others.
        decodes = sequence.detokenizer is not None
        taken, text = fenced("text", sequence.id, extend) if decodes else extend()
        if gain.error is not None:  # also where the last of these tokens is an end
            sequence.finish_reason = "error"
        return Event(sequence, taken, text)
    except OwnFailure as failure:
        sequence.fail(failure)
        return Event(sequence, sequence.tokens[before:], "")


def ended(sequence: RunningSequence, gain: Accepted) -> Event:
    """What a search says with one of its sequences."""
    if gain.error is not None:
        sequence.fail(gain.error)
    return taken(sequence, gain)


def cancelled(sequence: RunningSequence, gain: Accepted, why: str | None) -> Event:
    """End a sequence with what it has, and with what it still gains."""
    event = taken(sequence, gain)
    if sequence.finish_reason == "error":
        return event
    sequence.finish_reason, sequence.error, text = "cancelled", why, event.text
    try:
        text += fenced("text", sequence.id, sequence.flush)
    except OwnFailure as failure:
        sequence.fail(failure)
    return Event(sequence, event.tokens, text)
