"""What was observed to run: counted where it happens, not copied from what was selected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jackfield.bridge.adapter import AdapterUse
from jackfield.bridge.tally import Tally
from jackfield.engine.speculation import Speculation
from jackfield.registry.backends import Registered


@dataclass(frozen=True)
class Compiled:
    """How many programs a compiler has made, and the seconds that this took.

    `whole` steps were played that are recorded with their attention, which steps of up to `rows`
    sequences are now, of these sizes; `given_up` says why not more are that were planned.
    `num_bytes` is what recordings take on the device; `kept` programs are on disk for the next
    process.
    """

    graphs: int = 0
    seconds: float = 0.0
    whole: int = 0
    rows: tuple[int, ...] = ()
    given_up: str | None = None
    num_bytes: int = 0
    kept: int = 0

    def since(self, before: Compiled) -> Compiled:
        """What was compiled and played after `before`."""
        return replace(
            self,
            graphs=self.graphs - before.graphs,
            seconds=self.seconds - before.seconds,
            kept=self.kept - before.kept,
            whole=self.whole - before.whole,
        )

    def __str__(self) -> str:
        text = f"{self.graphs} graphs compiled in {self.seconds:.1f} s"
        if self.rows:
            text += f", {self.whole} steps played whole (of {', '.join(map(str, self.rows))} rows)"
        return text + (f", {self.given_up}" if self.given_up else "")


@dataclass(frozen=True)
class Observation:
    """One backend and how often it was called, in all and (attention) by phase and layer.

    `source` is whose kernel it ran on, for a backend that has a choice. `compiled` is what a
    compiler has made. `beams` is how many a search had for the one request that is reported.
    """

    kind: str
    name: str
    distribution: str
    version: str
    calls: int
    prefill: Mapping[int, int]
    decode: Mapping[int, int]
    source: str | None = None
    compiled: Compiled | None = None
    beams: int | None = None

    def since(self, before: Observation) -> Observation:
        """What was counted after `before`."""
        compiled = self.compiled and self.compiled.since(before.compiled or Compiled())
        return replace(
            self,
            compiled=compiled,
            calls=self.calls - before.calls,
            prefill=dict(Counter(self.prefill) - Counter(before.prefill)),
            decode=dict(Counter(self.decode) - Counter(before.decode)),
        )

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "kind": self.kind,
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "calls": self.calls,
        }
        if self.source is not None:
            row["source"] = self.source
        if self.beams is not None:
            row["beams"] = self.beams
        if self.prefill or self.decode:
            row |= {"prefill": dict(self.prefill), "decode": dict(self.decode)}
        if self.compiled is not None:
            row["compiled"] = asdict(self.compiled)
        return row

    @property
    def who(self) -> str:
        """Which backend, of which distribution and version, on whose kernel."""
        source = f", on {self.source}" if self.source else ""
        source += f", {self.beams} beams" if self.beams else ""
        return f"{self.kind} {self.name} ({self.distribution} {self.version}{source})"

    @property
    def did(self) -> str:
        """How often it was called, and what it compiled."""
        return f"{self.calls} calls" + (f", {self.compiled}" if self.compiled else "")


@dataclass(frozen=True)
class Report:
    """Which backend, of which distribution and version, was called how often.

    `speculation` is what drafts did, of one request or of the engine; None: nobody drafts.
    `adapter` is what was found in the modules: None where they have none. `verified` is what was
    compared since the engine was loaded with `verify`; None: nothing is. `adapters` says in how
    many steps each one that requests may name was computed; a request's own is its `adapter`.
    """

    observations: tuple[Observation, ...]
    speculation: Speculation | None = None
    adapter: AdapterUse | None = None
    verified: Verified | None = None
    adapters: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Observation:
        for observation in self.observations:
            if observation.kind == kind:
                return observation
        raise KeyError(kind)

    def __contains__(self, kind: object) -> bool:
        return any(observation.kind == kind for observation in self.observations)

    def since(self, before: Report | None) -> Report:
        """What was observed after `before` (None: from the start)."""
        if before is None:
            return self
        earlier = {(o.kind, o.name): o for o in before.observations}
        spec, then = self.speculation, before.speculation
        return Report(
            tuple(o.since(earlier[o.kind, o.name]) for o in self.observations),
            spec.since(then) if spec and then else spec,
            self.adapter,
            self.verified,
            {name: n - before.adapters.get(name, 0) for name, n in self.adapters.items()},
        )

    def of_request(self, decoding: Observation, drafted: Speculation | None) -> Report:
        """The same with what one request's own decoding did."""
        others = [o for o in self.observations if o.kind != decoding.kind]
        at = next(i for i, o in enumerate(self.observations) if o.kind == decoding.kind)
        mine = (*others[:at], decoding, *others[at:])
        return replace(self, observations=mine, speculation=drafted)

    def to_dict(self) -> dict[str, Any]:
        """Observations by kind; a decoding beside the default one as "decoding NAME"."""
        found: dict[str, Any] = {}
        for o in self.observations:
            found[f"{o.kind} {o.name}" if o.kind in found else o.kind] = o.to_dict()
        if self.speculation is not None:
            found["speculation"] = self.speculation.to_dict()
        if self.adapter is not None:
            found["adapter"] = self.adapter.to_dict()
        if self.verified is not None:
            found["verified"] = asdict(self.verified)
        if self.adapters:
            found["adapters"] = dict(self.adapters)
        return found

    def __str__(self) -> str:
        text = "; ".join(
            f"{o.who}: {o.did}"
            for o in self.observations
            if o.calls or o.kind != "decoding"  # one that nobody asked for
        )
        return "; ".join(
            map(str, filter(None, (text, self.speculation, self.adapter, self.verified)))
        )


@dataclass(frozen=True)
class Ran:
    """What had run when a request came (None: nothing) and when it ended, and its own part.

    `decoding` names its decoding, whose search had so many `beams`; `drafted` is what its drafts
    did, `adapter` the one that computed it.
    """

    before: Report | None
    after: Report
    decoding: str
    beams: int | None = None
    drafted: Speculation | None = None
    adapter: AdapterUse | None = None

    def report(self) -> Report:
        """What ran in between; of the decodings only its own."""
        found = self.after.since(self.before)
        name = ("decoding", self.decoding)
        own = next(o for o in found.observations if (o.kind, o.name) == name)
        if self.beams is not None:
            own = replace(own, beams=self.beams)
        found = replace(found, adapter=self.adapter or found.adapter, adapters={})
        return found.of_request(own, found.speculation and self.drafted)


@dataclass(frozen=True)
class Verified:
    """What `verify` compared: steps, sequences in them, and those left out as too long.

    `logits` is how far a logit was off at most, `rounded` by which share of their length the cache
    rounds keys or values (behind one that does, attention and logits are not compared), `seconds`
    what it took.
    """

    steps: int = 0
    sequences: int = 0
    too_long: int = 0
    logits: float = 0.0
    rounded: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"{self.sequences} sequences in {self.steps} steps verified in {self.seconds:.2f} s"
        if self.rounded:
            text += f" (the cache rounds by {self.rounded:.1%}: attention and logits not compared)"
        else:
            text += f", logits at most {self.logits:.2g} off"
        return text + (f", {self.too_long} too long to compare" if self.too_long else "")


def observe(
    kind: str, registered: Registered, seen: Tally | int, source: str | None = None
) -> Observation:
    """The observation of one backend, from its tally of layer calls or a plain count."""
    # In one go each: another thread may be counting.
    layers = ({}, {}) if isinstance(seen, int) else (dict(seen.prefill), dict(seen.decode))
    whole = seen if isinstance(seen, int) else sum(map(sum, (n.values() for n in layers)))
    return Observation(
        kind, registered.name, registered.distribution, registered.version, whole, *layers, source
    )
