"""A request's tokens for one of transformers' streamers (`put`, then `end`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield.errors import SettingsError, quoted

if TYPE_CHECKING:
    from jackfield.contracts import Sequence
    from jackfield.engine.completions import Completion
    from jackfield.engine.requests import Request


def check_streamer(streamer: Any, sequences: int) -> None:
    """Raise SettingsError unless it can be told the tokens of so many sequences."""
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


def tell(streamer: Any, sequence: Sequence, request: Request) -> Completion:
    """Put the prompt, then each token as it comes, then end, in the thread that calls.

    As in transformers a streamer hears of no end where an error is raised.
    """
    import torch

    streamer.put(torch.tensor([sequence.tokens[: sequence.prompt_length]], device="cpu"))
    completion = put_tokens(streamer, request)
    streamer.end()
    return completion


def put_tokens(streamer: Any, request: Request) -> Completion:
    """Put each token as it comes."""
    import torch

    for delta in request:
        for token in delta.token_ids:
            streamer.put(torch.tensor([token], device="cpu"))
    return request.result()
