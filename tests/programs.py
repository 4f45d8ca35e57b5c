"""Starting real Python programs under the shim, with a hard time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Dict, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
# Variables that would decide for the program under test.
_OURS = ("PJRT_", "XRT_", "XLA_", "TPU_", "CPU_NUM", "GPU_NUM", "COLAB_", "_PJRT", "PYTHONPATH")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def clean_environment(**variables: Optional[str]) -> Dict[str, str]:
    """The present environment without anything that chooses a device or activates the shim."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    environment.update({k: v for k, v in variables.items() if v is not None})
    return environment


def run(
    command: list[str], cwd: Path | str = ROOT, timeout: float = 120, **variables: Optional[str]
) -> Outcome:
    """Runs a command in a session of its own; everything it started is killed on time-out."""
    variables.setdefault("PJRT_DEVICE", "CPU")
    process = subprocess.Popen(
        command,
        cwd=str(cwd),
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(
            "no end after {} s\n--- out\n{}\n--- err\n{}".format(timeout, out[-4000:], err[-8000:])
        ) from None
    return Outcome(process.returncode, out, err)


def run_source(
    source: str, directory: Path, *arguments: str, timeout: float = 120, **variables: Optional[str]
) -> Outcome:
    """Writes a program into ``directory`` and runs it there, with the package importable."""
    path = directory / "program.py"
    path.write_text(textwrap.dedent(source))
    variables.setdefault("PYTHONPATH", str(ROOT))
    return run([sys.executable, str(path), *arguments], cwd=directory, timeout=timeout, **variables)
