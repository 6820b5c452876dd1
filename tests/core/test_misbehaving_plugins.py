"""Plugins that do what they must not when they load, all installed at once, beside a good one.

Each is told by name, and no command's output or exit code shows a trace of any. A case is what
stands in front of a good module, the state that it ends in, and what is told of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Site

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX processes")

IN_HOOK = "HOOK: "  # the code stands in the hook instead

ENDS = {  # seen in a process of its own, and refused here
    "leaves": ("import os; os._exit(0)", "ended its process with exit code 0,"),
    "leaves with a code": (f"{IN_HOOK}import os; os._exit(3)", "exit code 3,"),
    "becomes another program": ("import os; os.execv('/bin/true', ['true'])", "exit code 0,"),
    "kills": ("import os; os.kill(os.getpid(), 9)", "SIGKILL,"),
    "terminates": ("import os; os.kill(os.getpid(), 15)", "SIGTERM,"),
    "aborts": ("import os; os.abort()", "SIGABRT,"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "SIGSEGV,"),
    "interrupts": ("import _thread; _thread.interrupt_main()", "SIGINT,"),
    "presses Ctrl-C": ("import os; os.kill(os.getpid(), 2)", "SIGINT,"),
    "loops": ("while True: pass", "did not end within 3 s,"),
    "sleeps": ("import time; time.sleep(600)", "did not end within 3 s,"),
    "loops in its hook": (f"{IN_HOOK}\n    while True: pass", "did not end within 3 s,"),
    "holds the interpreter": (
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        "did not end within 3 s,",
    ),
    "never gives up": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "did not end within 3 s,",
    ),
    "prints at the end": (
        "import atexit; atexit.register(print, 'bye')",
        "writes to standard output after it was loaded: 'bye'",
    ),
    "writes at the end": (
        "import atexit, os; atexit.register(os.write, 1, b'bye')",
        "writes to standard output after it was loaded: 'bye'",
    ),
    "exits at the end": (
        "import atexit, os; atexit.register(os._exit, 7)",
        "exit code 7 after it was loaded",
    ),
    "leaves a thread": (
        "import threading as t, time; t.Thread(target=time.sleep, args=[99], daemon=False).start()",
        "did not end within 3 s after it was loaded",
    ),
}

KEPT = "it wrote to standard output while it loaded: 'noise'"
PUT_BACK = "while it loaded, which was put back"

TOLD = {  # loaded all the same
    "prints": ("print('noise')", KEPT),
    "prints in its hook": (f"{IN_HOOK}print('noise')", KEPT),
    "prints much": (
        "print('noise ' * 10**5)",
        "it wrote to standard output while it loaded: 'noise",
    ),
    "writes": ("import sys; sys.stdout.write('noise')", KEPT),
    "writes bytes": ("import sys; sys.stdout.buffer.write(b'noise')", KEPT),
    "writes to the first stream": ("import sys; sys.__stdout__.write('noise')", KEPT),
    "writes in a thread": (
        "import threading as t\nt = t.Thread(target=print, args=['noise'])\nt.start(); t.join()",
        KEPT,
    ),
    "prints to stderr": (
        "import sys; print('noise', file=sys.stderr)",
        "it wrote to standard error while it loaded: 'noise'",
    ),
    "warns": ("import warnings; warnings.warn('noise')", "wrote to standard error.*noise"),
    "writes by number": ("import os; os.write(1, b'noise')", "file descriptor 1"),
    "starts a program": ("import os; os.system('echo noise')", "file descriptor 1"),
    "prints in C": ("import ctypes; ctypes.CDLL(None).printf(b'noise')", "file descriptor 1"),
    "replaces stdout": ("import sys, io; sys.stdout = io.StringIO()", f"sys.stdout {PUT_BACK}"),
    "has no stdout": ("import sys; sys.stdout = None", f"sys.stdout {PUT_BACK}"),
    "deletes stdout": ("import sys; del sys.stdout", f"sys.stdout {PUT_BACK}"),
    "has no stderr": ("import sys; sys.stderr = None", f"sys.stderr {PUT_BACK}"),
    "redirects for ever": (
        "import contextlib, io; contextlib.redirect_stdout(io.StringIO()).__enter__()",
        f"sys.stdout {PUT_BACK}",
    ),
    "closes stdout": ("import sys; sys.stdout.close()", ""),
    "closes its buffer": ("import sys; sys.stdout.buffer.close()", ""),
    "closes descriptor 1": ("import os; os.close(1)", "closed or replaced file descriptor 1"),
    "closes descriptor 2": ("import os; os.close(2)", "closed or replaced file descriptor 2"),
    "moves descriptor 1": (
        "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
        "closed or replaced file descriptor 1",
    ),
    "sets an alarm": ("import signal; signal.alarm(1)", "timer of SIGALRM"),
    "goes elsewhere": ("import os; os.chdir('/')", f"the current folder {PUT_BACK}"),
    "sets a variable": ("import os; os.environ['HF_HUB_OFFLINE'] = '7'", "environment variables"),
    "empties the environment": ("import os; os.environ.clear()", "environment variables"),
    "goes first in sys.path": ("import sys; sys.path.insert(0, '/nowhere')", "sys.path"),
    "empties sys.path": ("import sys; sys.path.clear()", "import failed|sys.path"),
    "makes warnings errors": (
        "import warnings; warnings.simplefilter('error')",
        "the filters of all warnings",
    ),
    "hides warnings": ("import warnings; warnings.simplefilter('ignore')", "filters of all"),
    "resets warnings": ("import warnings; warnings.resetwarnings()", "filters of all"),
    "logs": ("import logging; logging.basicConfig(level=0)", "the root logger"),
    "logs to stdout": (
        "import logging, sys\nlogging.basicConfig(stream=sys.stdout)\nlogging.warning('noise')",
        "the root logger",
    ),
    "stops logging": ("import logging; logging.disable()", "the root logger"),
    "hooks errors": ("import sys; sys.excepthook = print", "sys.excepthook"),
    "hooks threads' errors": ("import threading; threading.excepthook = print", "another hook"),
    "takes print away": ("import builtins; builtins.print = None", "the builtins"),
    "adds a builtin": ("import builtins; builtins.noise = 1", "the builtins"),
    "shows warnings": ("import warnings; warnings.showwarning = print", "another hook"),
    "seeds": ("import random; random.seed(0)", "Python's random numbers"),
    "speaks another language": (
        "from locale import LC_CTYPE as C, setlocale as s; s(C, 'C' if s(C) != 'C' else 'C.UTF-8')",
        "the locale or another setting",
    ),
    "lets all write": ("import os; os.umask(0)", "another setting of Python"),
    "goes deep": (
        "import sys; sys.setrecursionlimit(sys.getrecursionlimit() + 9)",
        "another setting of Python",
    ),
    "collects no garbage": ("import gc; gc.disable()", "another setting of Python"),
    "hurries sockets": (
        "import socket; socket.setdefaulttimeout(0.01)",
        "another setting of Python",
    ),
    "forks": ("import os; os.fork()", ""),
    "changes its name": (
        "NAMES: name = property(lambda self, said=[]: said.append(1) or 'NAME'[len(said) // 9 :])",
        "",
    ),
}

FAILS = {  # an error like any other
    "handles signals": (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import failed: ValueError: signal only works in main thread",
    ),
    "plans while it loads": (
        "from jackfield.registry import discovery; discovery.registry()",
        "a plugin asks for backends while it is loaded",
    ),
    "has a name of its own kind": (
        "NAMES: name = type('Name', (str,), {'__eq__': lambda a, b: 1 / 0, '__hash__': None})('x')",
        "must stay the plain string",
    ),
}

#: case -> code, state, what is told
CASES: dict[str, tuple[str, str, str]] = {
    **{name: (code, "failed", told) for name, (code, told) in ENDS.items()},
    **{name: (code, "loaded", told) for name, (code, told) in TOLD.items()},
    **{name: (code, "failed", told) for name, (code, told) in FAILS.items()},
}
NUMBERS = {name: f"bad{number:02}" for number, name in enumerate(CASES)}


def source(name: str, good: str) -> str:
    code = CASES[name][0]
    if code.startswith(IN_HOOK):
        return good.replace("    return [", f"    {code.removeprefix(IN_HOOK)}\n    return [")
    if code.startswith("NAMES: "):
        return good.replace(
            f"name = '{NUMBERS[name]}'", code.removeprefix("NAMES: ").replace("NAME", NUMBERS[name])
        )
    return f"{code}\n{good}"


class Machine:
    """A site with every case and a good plugin, and commands run there as processes."""

    def __init__(self, folder: Path, site: Site) -> None:
        self.cache = folder / "cache"
        for name in CASES:
            site.add(NUMBERS[name], source(name, site.attention(NUMBERS[name])))
        site.add("good", site.attention("good"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(site.folder),
            "XDG_CACHE_HOME": str(self.cache),
            "JACKFIELD_LOAD_TIMEOUT": "3",
            "JACKFIELD_DISABLE": "attention-cpu-decode",  # it would be compiled for this folder
        }

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "jackfield", *arguments],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, new_site: type[Site]) -> Machine:
    folder = tmp_path_factory.mktemp("machine")
    return Machine(folder, new_site(folder / "site"))


@pytest.fixture(scope="module")
def listed(machine: Machine) -> dict[str, Any]:
    """distribution -> its record, of the first process that ever saw these plugins."""
    done = machine.run("plugins", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return {record["distribution"]: record for record in json.loads(done.stdout)["plugins"]}


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_by_name(listed: dict[str, Any], name: str) -> None:
    _, state, told = CASES[name]
    record = listed[NUMBERS[name]]
    assert (record["entry_point"], record["version"]) == (f"{NUMBERS[name]}-ep", "1.5")
    assert record["state"] == (state or record["state"])
    assert re.search(told, "; ".join([str(record["cause"]), *record["problems"]])), record
    if state == "loaded":
        assert record["backends"] == [f"attention:{NUMBERS[name]}"]


def test_everything_else_works(listed: dict[str, Any]) -> None:
    good = listed["good"]
    assert (good["state"], good["problems"]) == ("loaded", [])
    assert listed["jackfield"]["state"] == "loaded"


@pytest.mark.usefixtures("listed")
def test_no_output_and_no_exit_code_is_spoilt(machine: Machine) -> None:
    """And what was seen once is known: nothing is waited for again."""
    again = machine.run("plugins", "--json")
    assert (again.returncode, again.stderr) == (0, "")
    hung = [r for r in json.loads(again.stdout)["plugins"] if "3 s" in str(r["cause"])]
    assert len(hung) == sum("3 s" in told for _, _, told in CASES.values())
    assert all(f"delete {machine.cache}" in r["cause"] for r in hung)
    text = machine.run("generate", "--chat", "Hello!", "--attention", "eager")
    assert (text.returncode, text.stdout) == (0, "Hello! How can I help you?\n"), text
    for record in json.loads(again.stdout)["plugins"]:
        if record["state"] != "disabled" and (record["cause"] or record["problems"]):
            who = f"{record['entry_point']} of {record['distribution']} 1.5: "
            assert who in text.stderr


@pytest.mark.long  # each of these processes imports transformers for seconds
@pytest.mark.usefixtures("listed")
def test_no_output_of_other_commands_is_spoilt(machine: Machine) -> None:
    plan = machine.run("explain", "--json", "--attention", "eager")
    assert plan.returncode == 0
    assert json.loads(plan.stdout)
    assert machine.run("explain", "--attention", "nobody").returncode == 2
    sick = machine.run("doctor", "--json")
    assert sick.returncode == 1
    assert not json.loads(sick.stdout)["ok"]


HOST = """
import json, os, random, sys, threading, warnings
from jackfield.registry.discovery import discover, installed

begun, acted = threading.Event(), threading.Event()
drawn = []

def act():
    begun.wait()
    drawn.extend(random.random() for _ in range(9))
    os.environ["HOST_SET"] = "yes"
    sys.path.append("/of/the/host")
    os.write(1, b"by number\\n")
    print("by name", flush=True)
    if sys.argv[1] == "good":
        os.chdir("/")
        warnings.simplefilter("ignore")
        newer = threading.Thread(target=print, args=["by a newer thread"])
        newer.start()
        newer.join()
    acted.set()

threading.Thread(target=act).start()
(plugin,) = (p for p in discover(installed()[0], {}).plugins if p.distribution != "jackfield")
print(json.dumps({
    "state": plugin.state,
    "problems": plugin.problems,
    "drawn again": random.random() in drawn,
    "variables": [n for n in ("HOST_SET", "PLUGIN_SET") if n in os.environ],
    "paths": [p for p in sys.path if p.startswith("/of")],
    "folder": os.getcwd(),
    "filter": warnings.filters[0][0],
}), file=sys.stderr)
"""

#: the host's other thread acts while the module is imported
MEETS = """
import sys
import time
host = sys.modules["__main__"]
if hasattr(host, "begun"):
    host.begun.set()
    host.acted.wait()
"""

BAD = """
import os, sys, warnings
os.environ["PLUGIN_SET"] = "yes"
sys.path.append("/of/the/plugin")
os.chdir("/usr")
warnings.simplefilter("error")
print("noise")
os.close(0)
"""


@pytest.mark.parametrize("kind", ["good", "bad"])
def test_what_threads_of_the_host_do_meanwhile_stays(site: Site, tmp_path: Path, kind: str) -> None:
    site.add(kind, MEETS + (BAD if kind == "bad" else "") + site.attention(kind))
    done = subprocess.run(
        [sys.executable, "-c", HOST, kind],
        env={
            **os.environ, "PYTHONPATH": str(site.folder), "XDG_CACHE_HOME": str(tmp_path / "kept")
        },
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(done.stderr)
    printed = ["by number", "by name", *(["by a newer thread"] if kind == "good" else [])]
    assert done.stdout.splitlines() == printed
    problems = found.pop("problems")
    assert found == {
        "state": "loaded",
        "drawn again": False,
        "variables": ["HOST_SET"],
        "paths": ["/of/the/host"],
        "folder": "/" if kind == "good" else str(tmp_path),
        "filter": "ignore" if kind == "good" else "default",
    }
    parts = "the current folder, environment variables, sys.path, the filters of all warnings"
    assert problems == ([] if kind == "good" else [
        "it wrote to standard output while it loaded: 'noise'",
        "it closed or replaced file descriptor 0: it was put back",
        f"it changed {parts} while it loaded, which was put back",
    ])  # fmt: skip


def test_ctrl_c_waits_for_no_trial_and_blames_nobody(tmp_path: Path, new_site: type[Site]) -> None:
    site = new_site(tmp_path / "site")
    for name in ("bad", "worse"):
        site.add(name, f"import time; time.sleep(60)\n{site.attention(name)}")
    environment = {
        **os.environ, "PYTHONPATH": str(site.folder), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JACKFIELD_LOAD_TIMEOUT": "30", "JACKFIELD_DISABLE": "jackfield",
    }  # fmt: skip
    command = [sys.executable, "-c", WAITS_AND_IS_STOPPED]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert time.monotonic() - begun < 25
    assert done.stdout == "stopped\n", done
    assert not [*(tmp_path / "cache").rglob("*.json")]


WAITS_AND_IS_STOPPED = """
import os, signal, threading, time
from jackfield.registry import trial_process
from jackfield.registry.discovery import registry
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have none
def stop():
    while len(trial_process._running) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=stop, daemon=True).start()
try:
    registry()
except KeyboardInterrupt:
    print("stopped")
"""


SPOILS_C = {
    "prints": "import ctypes; ctypes.CDLL(None).printf(b'noise')",
    "replaces": "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
    "replaces and prints": (
        "import os, ctypes; os.dup2(os.open(os.devnull, os.O_WRONLY), 1); "
        "ctypes.CDLL(None).printf(b'noise')"
    ),
}
HOST_THAT_PRINTS_IN_C = """
import ctypes
ctypes.CDLL(None).printf(b"of the host\\n")
from jackfield.registry.discovery import registry
registry()
"""


@pytest.mark.parametrize("how", SPOILS_C)
def test_what_c_code_of_the_host_printed_before_comes_out_and_a_plugins_does_not(
    site: Site, tmp_path: Path, how: str
) -> None:
    """C keeps what it prints for later, when file descriptor 1 leads elsewhere."""
    site.add("bad", f"{SPOILS_C[how]}\n{site.attention('bad')}")
    environment = {
        **os.environ, "PYTHONPATH": str(site.folder), "XDG_CACHE_HOME": str(tmp_path / "kept")
    }  # fmt: skip
    command = [sys.executable, "-c", HOST_THAT_PRINTS_IN_C]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "of the host\n", done
