"""Options of commands that may run on a cluster of Ray."""

from __future__ import annotations

from typing import Annotated

from jackfield.cli.options import flag

ReplicasOption = Annotated[
    str | None,
    flag("--replicas", "N", "Processes that answer on Ray; MIN:MAX by what is asked of them."),
]
RayAddressOption = Annotated[
    str | None,
    flag("--ray-address", "ADDRESS", "A cluster of Ray: HOST:PORT, or auto; else one is begun."),
]
WITHOUT_REPLICAS = "--ray-address is of replicas; say how many with --replicas N"
