"""Whether torch can trace programs here."""

from __future__ import annotations


def cannot_trace() -> list[str]:
    """Why torch does not trace programs under this Python."""
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        return [str(error).partition("\n")[0]]
    return []
