"""Set before any test imports a library that reads them; subprocesses inherit them."""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only wait for each other
# With the first C buffers nothing, which hides what is written too late; with the second each
# process that a test starts compiles all of jackfield's files.
os.environ.pop("PYTHONUNBUFFERED", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# torch asks the processor which vectors it has, and then compiles a trial of each and imports torch
# anew to load it, in every process that compiles with inductor.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell without job control starts what runs in its background with SIGINT ignored, and so would
# every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What somebody warmed (`jackfield warm`) is chosen by `auto`.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build/cache")

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from command_line import cli as cli  # a fixture, for every folder
from forking import Forks
from hypothesis import settings
from samples import drawn

from jackfield.cli import QUIET
from jackfield.contracts import Backend
from jackfield.engine import draft_timing
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry

# No deadline: a machine may be loaded. `make test-all` draws many examples, an ordinary run some.
settings.register_profile("some", deadline=None, max_examples=30)
settings.register_profile("many", deadline=None, max_examples=400)
settings.load_profile("some")

draft_timing.CLOCK = lambda: 0.0  # which drafts there are hangs on no clock where no test sets one

# pytest listens to all that does not propagate, and torch, once it is heard, describes each graph
# that it traces: a third of the time of a test that does.
logging.getLogger("torch.__trace").propagate = True

if not torch.cuda.is_available():
    # Read when Triton is imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before `-m "not long"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `one_in(n)` those that are not drawn are long."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        (n,) = same[0].get_closest_marker("one_in").args  # type: ignore[union-attr]
        mine = drawn([item.nodeid for item in same], n)
        for item in same:
            if item.nodeid not in mine:
                item.add_marker("long")


@pytest.fixture(autouse=True, scope="module")
def _variables_of_its_own() -> Iterator[None]:
    """Of what a file's imports set (tokenicer names folders of the hub), no later file hears."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ |= before


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """The collector does not look again at what there was before: libraries, a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """For processes that begin with torch and transformers imported, as quietly as `jackfield`."""
    made = Forks(
        "jackfield.api", "jackfield_plugins.attention.varlen",
        "jackfield_plugins.hub_kernels.repository", "kernels",
        "transformers.models.llama.modeling_llama", env={**os.environ, **QUIET},
    )  # fmt: skip
    yield made
    made.close()


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Callable[[Backend], str]:
    """Has a backend in the registry for one test, as a stranger's; returns what selects it."""

    def offered(backend: Backend) -> str:
        mine = Registered(backend, "stranger", "1.2", "ep")
        known = [r for r in registry().backends[backend.kind] if r.name != backend.name]
        monkeypatch.setitem(registry().backends, backend.kind, [*known, mine])
        return f"plugin:stranger/{backend.name}"

    return offered
