"""The command line: parsing and exit codes only."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Dict, List, Optional, Tuple

from pjrt_compat import __version__
from pjrt_compat.bootstrap import AUTOLOAD_DIRECTORY
from pjrt_compat.tools import pth

USAGE_ERROR = 2
NOT_FOUND = 127
_OPTIONS_WITH_VALUE = ("--topology", "--log")


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command line; returns the exit code, unless ``run`` has replaced the process."""
    ours, programs = split_behind_script(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(ours)
    options.arguments = programs
    return int(options.function(options))


def split_behind_script(arguments: List[str]) -> Tuple[List[str], List[str]]:
    """Our part of a ``run`` command line, up to SCRIPT, and the program's own part.

    argparse alone would take the first ``--`` out of the program's part.
    """
    if arguments[:1] != ["run"]:
        return arguments, []
    place = 1
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "-":
        place += 2 if arguments[place] in _OPTIONS_WITH_VALUE else 1
    return arguments[: place + 1], arguments[place + 1 :]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pjrt-compat",
        description="Run code written for PyTorch/XLA's XRT runtime on PJRT, unmodified.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        help="run a program under the shim",
        allow_abbrev=False,
        usage="pjrt-compat run [options] [-m] SCRIPT [ARGUMENT ...]",
    )
    run.add_argument(
        "--topology", help="layout of the replicas on CPU: cpu:PxT or a TPU type such as v3-8"
    )
    run.add_argument(
        "--as-tpu", action="store_true", help="answer TPU when the program asks for the hardware"
    )
    run.add_argument("--log", metavar="LEVEL", help="show pjrt_compat's log: debug, info, warning")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    run.add_argument("script", metavar="SCRIPT")
    run.set_defaults(function=run_program)

    autoload = commands.add_parser(
        "pth", help="let this Python environment honour PJRT_COMPAT=1 by itself"
    )
    autoload.add_argument("action", choices=("install", "remove", "status"))
    autoload.set_defaults(function=lambda options: pth.perform(options.action))
    return parser


def run_program(options: argparse.Namespace) -> int:
    """Replaces this process by the program; its exit code is the program's own.

    Returns an exit code only when there is nothing to run.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        print(
            "pjrt-compat: Python was started with -E, -I or -S, which keep the shim out of the "
            "program; leave them out",
            file=sys.stderr,
        )
        return USAGE_ERROR
    if not options.module and options.script != "-" and not os.path.exists(options.script):
        print("pjrt-compat: no such file: {}".format(options.script), file=sys.stderr)
        return NOT_FOUND
    if options.topology:
        from pjrt_compat.errors import TopologyError
        from pjrt_compat.replicas.layouts import parse_topology

        try:
            parse_topology(options.topology)
        except TopologyError as error:
            print("pjrt-compat: {}".format(error), file=sys.stderr)
            return USAGE_ERROR
    os.environ.update(run_environment(options))
    command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    command += ["-m"] if options.module else []
    command += [options.script, *options.arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
    raise AssertionError("execv does not return")


def run_environment(options: argparse.Namespace) -> Dict[str, str]:
    """The variables that make a program run under the shim."""
    former = os.environ.get("PYTHONPATH")
    kept = [e for e in former.split(os.pathsep) if e != AUTOLOAD_DIRECTORY] if former else []
    strict = os.environ.get("PJRT_COMPAT", "").strip() == "strict"
    chosen = {
        "PJRT_COMPAT": "strict" if strict else "1",
        "PYTHONPATH": os.pathsep.join([AUTOLOAD_DIRECTORY, *kept]),
        "_PJRT_COMPAT_ROUTE": "run",
        "PJRT_COMPAT_TOPOLOGY": options.topology,
        "PJRT_COMPAT_AS_TPU": "1" if options.as_tpu else None,
        "PJRT_COMPAT_LOG": options.log,
    }
    return {name: value for name, value in chosen.items() if value is not None}
