"""One answer as it was measured."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from jackfield.client.address import told
from jackfield.client.events import DONE, Events, piece_of
from jackfield.client.wire import Reply


@dataclass
class Timed:
    """A request: `due` is when it was to be sent, all times in seconds of one clock.

    `came` has the time of each piece of text, of an empty text that of its end; `tokens` is what
    the server counted, or else how many pieces there were. `error` says what went wrong, in a word
    or two that others have in common.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    came: MutableSequence[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    prompt_tokens: int | None = None
    counted: bool = False
    error: str | None = None
    text: str = ""

    @property
    def to_first(self) -> float:
        return self.came[0] - self.due

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first; None where only one piece came."""
        several = self.tokens > 1 and len(self.came) > 1
        return (self.came[-1] - self.came[0]) / (self.tokens - 1) if several else None

    @property
    def whole(self) -> float:
        return self.ended - self.due

    @property
    def gaps(self) -> Sequence[float]:
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]

    def read(self, reply: Reply) -> None:
        """Take what an answer says, each event at the time when its last byte came."""
        body = b"".join(data for _, data in reply.pieces)
        if reply.status != 200:
            self.error = f"{reply.status} {told(body).get('code') or ''}".strip()
            return
        events, done = Events(), False
        for now, data in reply.pieces:
            for event in events.feed(data):
                if event == DONE:
                    done = True
                else:
                    done = self._take(event, now) or done
        if self.error is None and not done:
            self.error = "cut off"
        if self.error is None and not self.came:
            self.error = "no text"
        if not self.counted:
            self.tokens = len(self.came)

    def _take(self, event: str, now: float) -> bool:
        """Whether the event says how the text ended."""
        piece = piece_of(event)
        if piece.error is not None:
            self.error = "error in the stream"
        ends_at_once = piece.finish_reason is not None and not self.came
        if piece.text or piece.reasoning or ends_at_once:
            self.came.append(now)
            self.text += piece.text
        if piece.usage and isinstance(made := piece.usage.get("completion_tokens"), int):
            self.tokens, self.counted = made, True
            self.prompt_tokens = piece.usage.get("prompt_tokens")
        return piece.finish_reason is not None
