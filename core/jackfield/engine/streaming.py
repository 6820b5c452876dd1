"""A request's tokens for one of transformers' streamers (`put`, then `end`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from jackfield.errors import SettingsError, quoted

if TYPE_CHECKING:
    from jackfield.engine.completions import Completion, Delta
    from jackfield.engine.requests import Request
    from jackfield.engine.sequences import RunningSequence


def check_streamer(streamer: Any, sequences: int) -> None:
    """Raise SettingsError unless it can be told the tokens of so many sequences."""
    if isinstance(streamer, type):
        name = streamer.__name__
        raise SettingsError(f"streamer is the class {name}; give one of it: {name}(tokenizer)")
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise SettingsError(
            f"streamer must have put and end, as transformers' TextStreamer has, not "
            f"{quoted(streamer)}"
        )
    if sequences != 1:
        raise SettingsError(
            f"streamer is told one text, and {sequences} are asked for; generate them one by one, "
            "or submit them"
        )


def tell(streamer: Any, sequence: RunningSequence, request: Request) -> Completion:
    """Put the prompt, then each token as it comes, then end, in the thread that calls.

    As in transformers a streamer hears of no end where an error is raised.
    """
    import torch

    deltas = iter(request)
    first = tuple(islice(deltas, 1)) if sequence.finds_its_language else ()
    streamer.put(torch.tensor([sequence.tokens[: sequence.prompt_length]], device="cpu"))
    _put(streamer, chain(first, deltas))
    streamer.end()
    return request.result()


def put_tokens(streamer: Any, request: Request) -> Completion:
    """Put each token as it comes."""
    _put(streamer, request)
    return request.result()


def _put(streamer: Any, deltas: Iterable[Delta]) -> None:
    import torch

    for delta in deltas:
        for token in delta.token_ids:
            streamer.put(torch.tensor([token], device="cpu"))
