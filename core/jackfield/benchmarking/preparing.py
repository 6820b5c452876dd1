"""What a workload needs to know of a model before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.benchmarking.contenders import Contender

if TYPE_CHECKING:
    from jackfield.bridge.tokenizer import Text


def reader(contender: Contender) -> tuple[Text, int | None]:
    """What reads texts for the model of a contender, and the tokens of its context.

    Reads no weight; raises what `jackfield.plan` raises of the model itself.
    """
    from jackfield.bridge.source import find
    from jackfield.bridge.tokenizer import Text
    from jackfield.bridge.tokenizer_files import tokenizer_of

    source = find(contender.arguments["model"], contender.arguments.get("revision"))
    config = source.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    text = Text(tokenizer_of(None, source), source.vocab_size)
    return text, context if isinstance(context, int) else None
