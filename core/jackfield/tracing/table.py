"""A trace as text: where the time went, by kind of work, by backend, by layer, by request."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from jackfield.tracing.accounts import ATTENTION, WRITES, Account, Accounts, Path, Record
from jackfield.tracing.lives import DECODE, EMITTING, PREFILL, WAITING, Life

SHOWN = 20  # requests
ACROSS = 6  # layers in a line


def table(record: Record, accounts: Accounts) -> str:
    """All of it, in ms and shares of the time that was traced."""
    parts = [
        headline(record, accounts),
        _aligned(_work(record, accounts)),
        _aligned(_backends(record, accounts)) if accounts.backends else "",
        _layers(record, accounts),
        _aligned(_requests(record)) if record.requests else "",
        _aligned(_beside(record)) if record.beside else "",
        "\n".join(f"note: {text}" for text in notes(record, accounts)),
    ]
    return "\n\n".join(filter(None, parts))


def headline(record: Record, accounts: Accounts) -> str:
    prompts, requests = accounts.steps - accounts.decode_steps, len(record.requests)
    return (
        f"{seconds(record.end - record.begin)} traced: {requests} request{'s'[: requests != 1]}, "
        f"{accounts.steps} steps ({prompts} with prompts), {accounts.tokens} tokens computed"
    )


def notes(record: Record, accounts: Accounts) -> Iterator[str]:
    """What the reader has to know of the figures."""
    yield from record.notes
    if accounts.unseen:
        yield (
            f"no layer could be seen in {accounts.unseen} of {accounts.steps} steps: their "
            "attention runs inside a compiled step, or in the model's own code"
        )


def seconds(ns: int) -> str:
    """1234567890 as '1.235 s', 1234567 as '1.235 ms'."""
    return f"{ns / 1e9:.3f} s" if ns >= 1e9 else f"{ns / 1e6:.3f} ms"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"


def _share(ns: int, whole: int) -> str:
    return f"{ns / whole:.1%}" if whole else "-"


def rows(record: Record, accounts: Accounts) -> Iterator[tuple[Path, Account]]:
    """Every kind of work behind the one that it is part of; what is left as "rest", and "idle"."""
    yield from _below(accounts, ())
    idle = record.end - record.begin - sum(accounts.rows[one].total for one in accounts.below(()))
    yield ("idle",), Account(0, idle, idle)


def _below(accounts: Accounts, path: Path) -> Iterator[tuple[Path, Account]]:
    for one in accounts.below(path):
        found = accounts.rows[one]
        yield one, found
        if accounts.below(one):
            yield from _below(accounts, one)
            own, device = found.own, found.device_own
            yield (*one, "rest"), Account(0, own, own, device, device)


def _work(record: Record, accounts: Accounts) -> Iterator[list[str]]:
    whole, device = record.end - record.begin, record.device is not None
    yield ["what", "calls", "ms", "share", *(["device ms"] if device else [])]
    for path, found in rows(record, accounts):
        cells = ["  " * (len(path) - 1) + path[-1], str(found.calls or "")]
        cells += [_ms(found.total), _share(found.total, whole)]
        yield cells + ([_ms(found.device) if found.device else ""] if device else [])


def _backends(record: Record, accounts: Accounts) -> Iterator[list[str]]:
    """What each backend did itself, without what it called of others."""
    whole, device = record.end - record.begin, record.device is not None
    yield ["backend", "calls", "ms", "share", *(["device ms"] if device else [])]
    for who, found in sorted(accounts.backends.items(), key=lambda one: -one[1].own):
        cells = [who, str(found.calls), _ms(found.own), _share(found.own, whole)]
        yield cells + ([_ms(found.device_own) if found.device_own else ""] if device else [])


def _layers(record: Record, accounts: Accounts) -> str:
    if not accounts.layers:
        return ""
    where = "on the device" if record.device is not None else "on the host"
    lines = []
    for kind in (ATTENTION, WRITES):
        times = [(layer, of[kind]) for layer, of in sorted(accounts.layers.items()) if kind in of]
        if times:
            lines.append(f"{kind} by layer, ms {where}")
            cells = [f"{layer:>4}: {_ms(spent):>8}" for layer, spent in times]
            lines += ["".join(cells[at : at + ACROSS]) for at in range(0, len(cells), ACROSS)]
    return "\n".join(lines)


def _requests(record: Record) -> Iterator[list[str]]:
    yield [
        "request", "prompt", "new", "waiting ms", "prefill ms", "decode ms", "emitting ms",
        "first token ms", "steps", "ended",
    ]  # fmt: skip
    for life in record.requests[:SHOWN]:
        spent = [_ms(life.spent(name, record.end)) for name in (WAITING, PREFILL, DECODE, EMITTING)]
        first = "-" if life.first_token is None else _ms(life.first_token - life.came)
        steps = f"{life.prefill_steps}+{life.decode_steps}"
        yield [
            str(life.id), str(life.prompt_tokens), str(life.new_tokens), *spent, first, steps,
            _ended(life),
        ]  # fmt: skip
    if len(record.requests) > SHOWN:
        yield [f"… {len(record.requests) - SHOWN} more"]


def _ended(life: Life) -> str:
    said = [life.outcome or "goes on"]
    said += ["began before"] if life.began else []
    said += [f"{life.preemptions} preemptions"] if life.preemptions else []
    return ", ".join(said)


def _beside(record: Record) -> Iterator[list[str]]:
    """Work of other threads, which no step waited for."""
    found: dict[str, tuple[int, int]] = {}
    end: dict[tuple[int, str], int] = {}
    for one in record.beside:
        if one.begin < end.get(one.thread, one.begin):
            continue  # within another of its thread
        end[one.thread] = one.end
        calls, spent = found.get(one.work.name, (0, 0))
        found[one.work.name] = (calls + 1, spent + one.end - one.begin)
    yield ["in other threads", "calls", "ms"]
    for name, (calls, spent) in found.items():
        yield [name, str(calls), _ms(spent)]


def _aligned(lines: Iterator[list[str]]) -> str:
    """Columns: the first one to the left, numbers to the right, a text behind them as it is."""
    found = list(lines)
    count = max(map(len, found))
    widths = [max(len(line[at]) for line in found if at < len(line)) for at in range(count)]
    return "\n".join(_line(line, widths) for line in found)


def _line(cells: Seq[str], widths: Seq[int]) -> str:
    first, *others = zip(cells, widths, strict=False)
    text = first[0].ljust(first[1])
    return (text + "".join(f"  {cell.rjust(width)}" for cell, width in others)).rstrip()
