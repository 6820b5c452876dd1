"""How much time went where: spans added up by kind of work, by backend, by layer."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jackfield.tracing.lives import Life
from jackfield.tracing.recorder import Beside, Span

#: Kinds of work, in the order of a step.
STEP, SCHEDULING, DRAFTING, PREPARING = "steps", "scheduling", "drafting", "preparing"
ENCODING, FORWARD, COMPILED = "encoder", "forward", "compiled step"
WRITES, ATTENTION, KERNELS = "cache writes", "attention", "kernels"
VERIFYING, SAMPLING = "verifying", "sampling"
STRUCTURES, SEARCHING, COMMITTING = "structures", "beam search", "committing"
TEXT, EMITTING, BETWEEN, ENTERING = "text", "emitting", "between steps", "entering"
KINDS = (
    STEP, SCHEDULING, DRAFTING, PREPARING, ENCODING, FORWARD, COMPILED, WRITES, ATTENTION, KERNELS,
    VERIFYING, SAMPLING, STRUCTURES, SEARCHING, COMMITTING, TEXT, EMITTING, BETWEEN, ENTERING,
)  # fmt: skip

Path = tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """What a trace has found, in ns of `time.perf_counter_ns`.

    `spans` are of the thread that takes steps, outer ones before those within them; `beside` are of
    other threads. `device` is the one whose times the spans have beside the host's. `notes` say
    what could not be seen, and why.
    """

    begin: int
    end: int
    spans: Seq[Span]
    beside: Seq[Beside] = ()
    requests: Seq[Life] = ()
    model: str = ""
    device: str | None = None
    notes: Seq[str] = ()


@dataclass
class Account:
    """Calls of one sort of work and what they took, in ns; `own` without what was within them.

    `device` and `device_own` are the same on the device, of those calls that it was measured for.
    """

    calls: int = 0
    total: int = 0
    own: int = 0
    device: int = 0
    device_own: int = 0

    def add(self, node: Node, *, again: bool = False) -> None:
        """Add a span; `again`: it is within one of this account, which has its calls and times."""
        self.own += node.host - node.within
        self.device_own += node.device - node.device_within
        if not again:
            self.calls += 1
            self.total += node.host
            self.device += node.device


@dataclass
class Node:
    """A span and where it stands: within which others, of which kinds.

    `again`: within one of its own kind, whose path it has. `within` is what is within it, in ns.
    """

    span: Span
    path: Path
    again: bool = False
    within: int = 0
    device_within: int = 0

    @property
    def host(self) -> int:
        return self.span.end - self.span.begin

    @property
    def device(self) -> int:
        times = self.span.device
        return 0 if times is None else int(times[1] - times[0])


def outer_first(spans: Iterable[Span]) -> list[Span]:
    """Spans that are noted as they end, in the order in which they begin."""
    numbered = sorted(enumerate(spans), key=lambda one: (one[1].begin, -one[1].end, -one[0]))
    return [span for _, span in numbered]


def nested(spans: Seq[Span]) -> list[Node]:
    """Each span, outer ones first, with the kinds of those that it is within."""
    nodes: list[Node] = []
    stack: list[Node] = []
    for span in spans:
        while stack and not stack[-1].span.begin <= span.begin <= span.end <= stack[-1].span.end:
            stack.pop()
        outer = stack[-1].path if stack else ()
        again = outer[-1:] == (span.work.kind,)
        node = Node(span, outer if again else (*outer, span.work.kind), again)
        if stack:
            stack[-1].within += node.host
            stack[-1].device_within += node.device
        nodes.append(node)
        stack.append(node)
    return nodes


@dataclass
class Accounts:
    """What a record adds up to.

    `rows` are by path of kinds, `backends` by who did it, `layers` by layer and kind (ns of the
    host, and of the device where it was measured). `unseen` steps ran their attention where no
    layer could be seen.
    """

    rows: dict[Path, Account] = field(default_factory=dict)
    backends: dict[str, Account] = field(default_factory=dict)
    layers: dict[int, dict[str, int]] = field(default_factory=dict)
    steps: int = 0
    decode_steps: int = 0
    tokens: int = 0
    _seeing: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, record: Record) -> Accounts:
        found = cls()
        for node in nested(record.spans):
            found._add(node, on_device=record.device is not None)
        return found

    @property
    def unseen(self) -> int:
        return self.steps - len(self._seeing)

    def _add(self, node: Node, *, on_device: bool) -> None:
        work, detail = node.span.work, node.span.detail
        self.rows.setdefault(node.path, Account()).add(node, again=node.again)
        if work.backend is not None:
            self.backends.setdefault(work.backend, Account()).add(node)
        if work.kind == STEP and detail is not None:
            self.steps += 1
            self.decode_steps += detail.decode
            self.tokens += detail.tokens
        if work.kind in (WRITES, ATTENTION) and FORWARD in node.path:  # an encoder's are its own
            self._seeing.add(self.steps)
            times = self.layers.setdefault(detail, {})
            spent = node.device if on_device else node.host
            times[work.kind] = times.get(work.kind, 0) + spent

    def below(self, path: Path) -> list[Path]:
        """The rows right below a row, in the order of a step."""
        found = [one for one in self.rows if len(one) == len(path) + 1 and one[:-1] == path]
        return sorted(found, key=lambda one: KINDS.index(one[-1]))
