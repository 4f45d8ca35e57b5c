"""One spawned job, many checks: every function ``check_*`` of a module runs on every replica.

``import torch_xla`` and the start of replicas cost seconds, so the tests of a module share one job
per layout. A check that fails on one replica must fail on all, or the others would wait for it at
their next meeting; checks that provoke errors catch them.

A checks module may hold ``job_*`` functions too: these are left alone, for tests of whole jobs.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from tests import programs

ROOT = Path(__file__).resolve().parent.parent


class Layout(NamedTuple):
    """Replicas and the topology asked for; None leaves it to pjrt_compat."""

    replicas: int
    topology: Optional[str] = None

    def __str__(self) -> str:
        return self.topology or "cpu:{}x1".format(self.replicas)


def check_names(module: str) -> List[str]:
    """Names of a module's checks, in order, without importing it."""
    path = ROOT / (module.replace(".", "/") + ".py")
    return [
        node.name[len("check_") :]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


@functools.lru_cache(maxsize=None)
def outcomes(
    module: str, layout: Layout, start_method: str = "spawn", timeout: float = 150
) -> Dict[str, Dict[str, str]] | AssertionError:
    """Runs all checks once; per check the traceback of each ordinal, empty where it passed.

    A job that does not end well is returned as the error, so that it is not run again.
    """
    try:
        return run_checks(module, layout, start_method, timeout)
    except AssertionError as error:
        return error


def run_checks(
    module: str, layout: Layout, start_method: str, timeout: float
) -> Dict[str, Dict[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.jobs", module, directory]
        result = programs.run(
            [*command, str(layout.replicas), start_method],
            timeout=timeout,
            PYTHONPATH=str(ROOT),
            PJRT_COMPAT_TOPOLOGY=layout.topology,
        )
        collected: Dict[str, Dict[str, str]] = {name: {} for name in check_names(module)}
        for ordinal in range(layout.replicas):
            path = Path(directory) / str(ordinal)
            assert path.exists(), "replica {} left no result\n{}".format(ordinal, result.err)
            for name, text in json.loads(path.read_text()).items():
                collected[name][str(ordinal)] = text
    assert result.code == 0, result.err
    return collected


def assert_passed(module: str, name: str, layout: Layout, start_method: str = "spawn") -> None:
    """Fails with the tracebacks of the replicas on which the check failed."""
    result = outcomes(module, layout, start_method)
    if isinstance(result, AssertionError):
        raise result
    found = result[name]
    assert len(found) == layout.replicas, "ran on {} only".format(sorted(found))
    failed = ["ordinal {}:\n{}".format(o, text) for o, text in found.items() if text]
    assert not failed, "\n".join(failed)


def run_on_replica(ordinal: int, module: str, directory: str) -> None:
    """Body of each replica."""
    checks = importlib.import_module(module)
    results = {}
    for name in check_names(module):
        try:
            getattr(checks, "check_" + name)()
            results[name] = ""
        except Exception:  # every failure is a result
            results[name] = traceback.format_exc()
    (Path(directory) / str(ordinal)).write_text(json.dumps(results))


def main(module: str, directory: str, replicas: str, start_method: str) -> None:
    import pjrt_compat  # noqa: F401  isort: skip
    import torch_xla.distributed.xla_multiprocessing as xmp

    if int(replicas) == 1:
        xmp.spawn(run_on_replica, args=(module, directory), nprocs=1)
        return
    xmp.spawn(
        run_on_replica,
        args=(module, directory),
        nprocs=int(replicas),
        start_method=start_method,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
