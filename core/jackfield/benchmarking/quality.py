"""How well an engine's model predicts a text, and answers questions with one right answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jackfield.estimates.perplexity import perplexity

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine


def quality(
    engine: Engine, text: Sequence[int], answers: Sequence[tuple[Any, str, int]]
) -> dict[str, Any]:
    """``perplexity`` of token ids, and how many of the ``total`` answers are ``right``.

    An answer is (prompt, what is right, new tokens at most); greedy, and right where it is the same
    but for white space around it.
    """
    right = 0
    if answers:
        settings = [{"max_new_tokens": most} for _, _, most in answers]
        prompts = [prompt for prompt, _, _ in answers]
        done = engine.generate(prompts, settings=settings, do_sample=False)
        right = sum(
            (one.text or "").strip() == wanted.strip()
            for one, (_, wanted, _) in zip(done, answers, strict=True)
        )
    read = perplexity(engine, text)
    return {"perplexity": read.value, "right": right, "total": len(answers)}
