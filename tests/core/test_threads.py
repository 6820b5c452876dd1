"""No thread of a request's caller computes beside those of the engine."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from jackfield.engine.threads import give_back_threads

# In a process of its own: it counts threads, and how many torch has is of the whole process.
STORY = """
import asyncio, json, os, sys, threading, torch, jackfield

def threads():
    return len(os.listdir("/proc/self/task"))

def team():
    before = threads()
    torch.ones(600, 600)
    return threads() - before

torch.set_num_threads(3)
told = {"an operation": team()}
engine = jackfield.load("demo", attn_implementation="sdpa")
told["after load"] = team()
first = engine.generate("Once", max_new_tokens=8)
told["after generate"] = team()
told["setting"] = torch.get_num_threads()

def warm():
    torch.ones(600, 600)
    engine.compile_ahead()
    told["after compile_ahead"] = team()

thread = threading.Thread(target=warm)
thread.start(), thread.join()

async def aside():  # the thread that reads a prompt is not the one that hands it over
    async for _ in engine.astream("Once", max_new_tokens=2):
        pass

own = engine._sequence

def computing(*given):
    told["after astream"] = team()
    return own(*given)

engine._sequence = computing

async def twice():
    await aside()
    await aside()

asyncio.run(twice())
engine._sequence = own
torch.set_num_threads(1)
again = engine.generate("Once", max_new_tokens=8)
told["one thread"] = again[0].text == first[0].text
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> Any:
    if sys.platform != "linux":
        pytest.skip("counts threads in /proc")
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    ran = subprocess.run(
        [sys.executable, "-c", STORY],
        env=surroundings, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("after", ["load", "generate", "compile_ahead", "astream"])
def test_a_caller_has_no_threads_left_that_would_compute_beside_the_engine(
    told: Any, after: str
) -> None:
    assert told["an operation"] == 2  # three with its own
    assert told[f"after {after}"] == 2  # made anew, so they had been given back


def test_a_setting_of_torch_outlives_its_threads(told: Any) -> None:
    assert told["setting"] == 3


def test_the_number_of_threads_is_no_other_text(told: Any) -> None:
    assert told["one thread"]


def test_what_was_given_back_is_made_again() -> None:
    a = torch.arange(360_000, dtype=torch.float64).reshape(600, 600)
    product = a @ a
    give_back_threads()
    assert torch.equal(a @ a, product)
    give_back_threads()
    give_back_threads()
    assert torch.equal(a @ a, product)


FORKED = """
import os, signal, torch
BEFORE

torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
if os.fork() == 0:
    signal.alarm(30)
    torch.set_num_threads(THREADS)
    from jackfield.engine.threads import give_back_threads
    give_back_threads()
    assert torch.ones(1 << 20).add_(1).sum() == 1 << 21
    give_back_threads()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(
    ("before", "threads"),
    [("import jackfield.engine.threads", 1), ("import jackfield.engine.threads", 2), ("", 1)],
    ids=["one thread", "two threads", "imported by the child"],
)
def test_a_forked_process_waits_for_no_threads_of_its_parent(before: str, threads: int) -> None:
    """Where it computes with several, torch itself would, had the parent not given them back."""
    if not hasattr(os, "fork"):
        pytest.skip("nothing is forked here")
    story = FORKED.replace("BEFORE", before).replace("THREADS", str(threads))
    assert subprocess.run([sys.executable, "-c", story], timeout=90, check=False).returncode == 0
