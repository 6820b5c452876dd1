"""A fresh virtual environment with jackfield from its wheel, and the libraries that are here."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: What is not to be seen of the environment that runs the tests: jackfield itself.
OWN = re.compile(r"_?_?(editable__+)?(_editable_impl_)?jackfield", re.IGNORECASE)


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built without the network."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("jackfield-*.whl")
    return built


@dataclass
class Fresh:
    """A virtual environment. `seconds`: processor time of all that was run in it."""

    folder: Path
    seconds: float = 0.0

    def run(self, script: str, cwd: Path) -> tuple[str, Path]:
        """What a shell script says that stops at the first failure, and the folder it ends in."""
        where = self.folder / "cwd"
        # Nothing is downloaded, and pip does not want to make an environment to build in.
        quiet = {
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_NO_WARN_SCRIPT_LOCATION": "1",
        }
        environment = {**os.environ, **quiet, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        before = _spent()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{script}\npwd > '{where}'"],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seconds += _spent() - before
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout, Path(where.read_text().strip())


def fresh(folder: Path, wheel: Path) -> Fresh:
    """An environment in which `wheel` is installed."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    made = Fresh(folder / "venv")
    python = made.folder / "bin/python"
    links = folder / "site-packages"  # a name by which tools know what is not the user's own
    links.mkdir()
    for there in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for part in there.iterdir():
            link = links / part.name
            if not OWN.match(part.name) and part.suffix != ".pth" and not link.exists():
                link.symlink_to(part)
    own = sysconfig.get_path("purelib", vars={"base": str(made.folder)})
    (Path(own) / "libraries.pth").write_text(f"{links}\n")
    for tool in ("pip", "pytest"):
        script = made.folder / "bin" / tool
        script.write_text(f'#!/bin/sh\nexec "{python}" -m {tool} "$@"\n')
        script.chmod(0o755)
    made.run(f"pip install -q --no-deps '{wheel}'", folder)
    return made


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
