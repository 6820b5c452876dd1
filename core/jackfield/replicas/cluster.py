"""A cluster of Ray: joined or started, asked for room, given a deployment, and left."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.errors import ExecutionError, UsageError, first_line, shown
from jackfield.replicas import encryption
from jackfield.replicas.room import Place

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from jackfield.serving.settings import ServerSettings

MISSING = "replicas need Ray; pip install jackfield[ray]"
REACHED_WITHIN = 10.0  # seconds in which a cluster must answer at its address
PLACED_WITHIN = 300.0  # seconds for room that was free to be given to replicas
_OBJECTS = 100 * 2**20  # bytes of Ray's own store: requests and answers are small
_DEPLOYMENT = "replica"
_CHECK_EVERY, _CHECKED_WITHIN = 5.0, 10.0  # seconds
_LOOK_EVERY = 0.2
#: What replicas are handed of the environment where the cluster runs already.
_VARIABLES = (
    "HF_HOME", "HF_HUB_OFFLINE", "JACKFIELD_DISABLE", "JACKFIELD_KERNEL_LOCK",
    "JACKFIELD_LOAD_TIMEOUT", "JACKFIELD_PLUGINS", "JACKFIELD_TRUSTED_PUBLISHERS",
    "OMP_NUM_THREADS",
)  # fmt: skip


@dataclass(frozen=True)
class Count:
    """How many replicas: from `least` to `most`, by what is asked of them."""

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> Count:
        """Of "2" or "1:4". Raises UsageError."""
        least, mark, most = text.partition(":")
        try:
            found = cls(int(least), int(most) if mark else int(least))
        except ValueError:
            raise UsageError(f"--replicas {shown(text)}: write a number, or MIN:MAX") from None
        if found.least < 1 or found.most < found.least:
            raise UsageError(
                f"--replicas {shown(text)}: there must be at least one, and MAX is not below MIN"
            )
        return found


@dataclass(frozen=True)
class Deployment:
    """What is to run: `count` replicas of the server that `settings` describes.

    `busy` is how many requests at once one replica is meant for, where their number varies.
    """

    name: str
    settings: ServerSettings
    count: Count
    busy: int

    @property
    def ranks(self) -> int:
        """How many processes share the model of one replica."""
        sizes = (model.arguments.get("tp_size") for model in self.settings.models.values())
        return max(size or 1 for size in sizes)

    @property
    def grace(self) -> float:
        """Seconds in which a replica that is replaced ends its answers."""
        return max(1.0, self.settings.drain)


@contextlib.contextmanager
def joined(address: str | None) -> Iterator[Cluster]:
    """The cluster at `address` ("host:port" or "auto"), or None: one of this machine's own, which
    ends with the block.

    Raises UsageError where Ray is not there or nothing answers, ExecutionError where Ray fails.
    """
    if address is not None and address != "auto":
        _check_form(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # tell nobody
    try:
        import grpc
        import ray
        from ray import serve
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error.name} is not here)") from None
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "logging_level": logging.ERROR, "configure_logging": False, "log_to_driver": False,
    }  # fmt: skip
    if address is not None and address != "auto":
        _check_reached(grpc, address)
    try:
        if address is None:
            ray.init(
                "local", include_dashboard=False, object_store_memory=_OBJECTS,
                _node_ip_address="127.0.0.1", **quiet,
            )  # fmt: skip
        else:
            ray.init(address, **quiet)
    except Exception as error:  # noqa: BLE001 - Ray raises all kinds
        what = "Ray cannot be started here" if address is None else f"--ray-address {address}"
        how = "" if address is None else "; where it wants a token, set RAY_AUTH_MODE=token"
        raise UsageError(f"{what}: {first_line(error)}{how}") from None
    try:
        serve.start(proxy_location="Disabled")
        yield Cluster(address is None)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _check_form(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and "/" not in host):
        raise UsageError(f"--ray-address {shown(address)}: write HOST:PORT, or auto")


def _check_reached(grpc: Any, address: str) -> None:
    """Raise UsageError where no cluster answers: Ray itself would wait for minutes, and exit."""
    with encryption.channel(grpc, address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=REACHED_WITHIN)
        except grpc.FutureTimeoutError:
            raise UsageError(
                f"--ray-address {address}: no cluster of Ray answers there within "
                f"{REACHED_WITHIN:g} s; start one with `ray start --head`, or leave "
                "the address out"
            ) from None


class Cluster:
    """One that this process has joined. `own`: it began and ends with it."""

    def __init__(self, own: bool) -> None:
        self._own = own

    @property
    def host(self) -> str:
        """The address of this machine, as the others of the cluster reach it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def has(self, name: str) -> bool:
        from ray import serve

        return name in serve.status().applications

    def deploy(self, asked: Deployment, expected: Mapping[str, str]) -> DeploymentHandle[Any]:
        """Run it, or replace the replicas that run under its name, one after the other.

        Returns when all are there. Raises UsageError where there is no room for them, and
        ExecutionError where one does not start; nothing stays of what did not run before.
        """
        from ray import serve
        from ray.serve import RunTarget

        before = self.has(asked.name)
        place = Place.of(asked.ranks, asked.count.most, self._own)
        place.check(asked.count.least, replaces=before)
        application = _application(asked, place, expected, self._own)
        serve.run_many(
            [RunTarget(application, name=asked.name, route_prefix=None)],
            wait_for_applications_running=False,
        )
        try:
            self._wait(asked.name)
        except BaseException:
            if not before:
                self.delete(asked.name)
            raise
        return serve.get_deployment_handle(_DEPLOYMENT, asked.name)

    def _wait(self, name: str) -> None:
        from ray import serve

        late = time.monotonic() + PLACED_WITHIN
        while True:
            state = serve.status().applications[name]
            message = " ".join(d.message for d in state.deployments.values())
            if state.status == "RUNNING":
                return
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise ExecutionError(f"no replica starts: {_cause(message or state.message)}")
            if time.monotonic() > late and "to be scheduled" in message:
                raise ExecutionError(
                    f"replicas have found no place within {PLACED_WITHIN:g} s; `ray status` shows "
                    "what takes it"
                )
            time.sleep(_LOOK_EVERY)

    def replicas(self, name: str) -> int:
        """How many of them run."""
        from ray import serve

        found = serve.status().applications[name].deployments[_DEPLOYMENT]
        return int(found.replica_states.get("RUNNING", 0))

    def delete(self, name: str) -> None:
        """End its replicas, once their answers have ended."""
        from ray import serve

        serve.delete(name)


def _application(asked: Deployment, place: Place, expected: Mapping[str, str], own: bool) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from jackfield.replicas.on_ray import Deployed, PrefixRouter

    count = asked.count
    varies = {"min_replicas": count.least, "max_replicas": count.most}
    many: dict[str, Any] = (
        {"num_replicas": count.least} if count.least == count.most
        else {"autoscaling_config": {**varies, "target_ongoing_requests": asked.busy}}
    )  # fmt: skip
    if place.ranks > 1:
        # on one machine where there is room for them
        bundles = [place.each] * place.ranks
        many |= {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    given = {} if own else {n: os.environ[n] for n in _VARIABLES if n in os.environ}
    deployment = serve.deployment(
        name=_DEPLOYMENT,
        max_ongoing_requests=asked.settings.max_requests + 64,  # the application says no itself
        ray_actor_options={
            "num_cpus": place.processors,
            "num_gpus": place.gpus,
            "runtime_env": {"env_vars": given},
        },
        health_check_period_s=_CHECK_EVERY,
        health_check_timeout_s=_CHECKED_WITHIN,
        graceful_shutdown_timeout_s=asked.grace,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        **many,
    )(Deployed)
    return deployment.bind(asked.settings, dict(expected))


def _cause(message: str) -> str:
    """The last line of a traceback in what Ray says."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("jackfield.errors.")]
    line = (told or lines or ["Ray does not say why"])[-1]
    return shown(line.partition(": ")[2] or line, 500) if told else shown(line, 500)
