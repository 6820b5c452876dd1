"""What replicas ask of a cluster, and whether it has that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jackfield.errors import UsageError

_PARTS = 10_000  # of one processor, in which Ray counts


@dataclass(frozen=True)
class Place:
    """What one replica takes: `ranks` processes, with so many processors and GPUs each."""

    ranks: int
    processors: float
    gpus: float

    @classmethod
    def of(cls, ranks: int, most: int, own: bool) -> Place:
        """Of one of at most `most` replicas of `ranks` processes each.

        A GPU for each process where the cluster has some. On a cluster of this machine's own they
        share its processors.
        """
        import ray

        there = ray.cluster_resources()
        share = max(1.0, there.get("CPU", 1) // most)
        processors = share * _PARTS // ranks / _PARTS if own else 1.0
        return cls(ranks, processors, 1.0 if there.get("GPU") else 0.0)

    @property
    def each(self) -> dict[str, float]:
        """Of one process, in Ray's words."""
        found = {"CPU": self.processors}
        return {**found, "GPU": self.gpus} if self.gpus else found

    def check(self, count: int, *, replaces: bool) -> None:
        """Raise UsageError where the cluster is too small for `count` replicas or, where they
        replace none, too much of it is taken.
        """
        import ray

        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        there = {name: sum(machine.get(name, 0.0) for machine in machines) for name in self.each}
        free = there if replaces else ray.available_resources()
        places = min(sum(self._fit(machine) for machine in machines), self._fit(free))
        if places // self.ranks < count:
            many = f"{self.ranks} times " if self.ranks > 1 else ""
            raise UsageError(
                f"{count} replicas have no place: each asks for {many}{self._told(self.each)}; the "
                f"cluster has {self._told(there)}, of which {self._told(free)} free; ask for "
                "fewer, or add machines"
            )

    def _fit(self, there: Mapping[str, float]) -> int:
        """How many processes."""
        return int(min(there.get(name, 0.0) // amount for name, amount in self.each.items()))

    def _told(self, amounts: Mapping[str, float]) -> str:
        return " and ".join(f"{amounts.get(name, 0.0):g} {name}" for name in self.each)
