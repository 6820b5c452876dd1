"""Ranks find one another: torch's process group for tensors, a connection each for all else."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from jackfield.errors import ExecutionError, UsageError, first_line
from jackfield.parallel.ranks import STEP_WITHIN, Follower, Leader, Ranks
from jackfield.parallel.wire import Wire
from jackfield.parallel.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]  # all of these are public

JOIN_WITHIN = 120.0  # seconds for all ranks to come
_PREFIX, _KEY = "jackfield/{}", "leader"
_engines: Counter[tuple[str, int]] = Counter()  # of this process, that met there


def hosted(size: int) -> tuple[Store, int]:
    """A store for `size` ranks of this machine, and its port. Raises ExecutionError."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    with _named("127.0.0.1", 0):
        store = TCPStore(
            "127.0.0.1", 0, size, True, timedelta(seconds=JOIN_WITHIN), wait_for_workers=False
        )
    return PrefixStore(_PREFIX.format(1), store), store.port


def found(world: World) -> Store:
    """The store where the ranks of `world` meet. Raises ExecutionError where there is none."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    with _named(world.address, world.port):
        store = _rendezvous(world)
    place = (world.address, world.port)
    _engines[place] += 1
    return PrefixStore(_PREFIX.format(_engines[place]), store)


@functools.cache
def _rendezvous(world: World) -> Store:
    """One for all engines of this process: others may come for the next before this is closed."""
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    def meet() -> Store:
        within = timedelta(seconds=JOIN_WITHIN)
        store: Store = next(iter(rendezvous("env://", world.rank, world.size, timeout=within)))[0]
        return store

    return _within(2 * JOIN_WITHIN, meet)


def _within(seconds: float, act: Callable[[], Store]) -> Store:
    """What `act` returns. Raises TimeoutError: torch waits for ever for a silent program."""
    done: Future[Store] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised to who waits
            done.set_exception(error)

    threading.Thread(target=run, name="jackfield-rendezvous", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise TimeoutError("nobody who belongs to it answers there") from None


@contextlib.contextmanager
def _named(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        where = f"{address}:{port}" if port else address
        raise ExecutionError(
            f"ranks cannot meet at {where} within {JOIN_WITHIN:g} s ({first_line(error)}); look "
            "whether another program has that port, and whether MASTER_ADDR can be reached"
        ) from error


def lead(
    store: Store,
    address: str,
    size: int,
    late: Callable[[], str | None] = lambda: None,
    ended: Callable[[int], str | None] = lambda rank: None,
) -> Leader:
    """Rank 0 of `size`: wait for the others. Raises ExecutionError where one does not come.

    `late` is asked meanwhile why somebody never will.
    """
    token, wires = secrets.token_hex(16), dict[int, Wire]()
    with _listening(address) as server:
        server.settimeout(0.2)
        host, port = server.getsockname()[:2]
        store.set(_KEY, json.dumps({"host": address, "port": port, "token": token}))
        end = time.monotonic() + JOIN_WITHIN
        while len(wires) < size - 1:
            if (why := late()) is not None or time.monotonic() > end:
                missing = [str(rank) for rank in range(1, size) if rank not in wires]
                for wire in wires.values():
                    wire.close()
                raise ExecutionError(
                    why
                    or f"rank {' and '.join(missing)} of {size} did not come to {host}:{port} "
                    f"within {JOIN_WITHIN:g} s; start all of them"
                )
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                _admit(Wire(connection), token, size, wires)
    return Leader(wires, ended)


def _listening(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0))
    except OSError:  # a name of this machine for others alone
        return socket.create_server(("", 0))


def _admit(wire: Wire, token: str, size: int, wires: dict[int, Wire]) -> None:
    """Take a rank in; whoever has not its token is sent away."""
    try:
        said = wire.receive(5.0)
        if secrets.compare_digest(str(said["token"]), token) and 0 < said["rank"] < size:
            wires[said["rank"]] = wire
            return
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        pass
    wire.close()


def join(store: Store, world: World) -> Follower:
    """Another rank: come to rank 0. Raises ExecutionError where it is not there."""
    with _named(world.address, world.port):
        store.set_timeout(timedelta(seconds=JOIN_WITHIN))
        where: dict[str, Any] = json.loads(store.get(_KEY))
        address = (where["host"], where["port"])
        wire = Wire(socket.create_connection(address, JOIN_WITHIN))
        wire.send({"rank": world.rank, "token": where["token"]})
    return Follower(world.rank, world.size, wire)


def share_tensors(store: Store, ranks: Ranks, device: torch.device) -> Callable[[], None]:
    """Have torch's collectives reach all ranks; returns what ends that.

    Raises UsageError where torch has a process group of another size already.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (ranks.rank, ranks.size):
            raise UsageError(
                f"torch.distributed has {dist.get_world_size()} processes here, and the model is "
                f"shared by {ranks.size}; give tp_size={dist.get_world_size()}"
            )
        return lambda: None
    gpu = device.type == "cuda"
    if gpu:
        import torch

        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=STEP_WITHIN),
        device_id=device if gpu else None,
    )
    return dist.destroy_process_group
