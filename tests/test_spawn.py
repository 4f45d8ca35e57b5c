"""``xmp.spawn``: how replicas start, end and fail, as XRT's did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional

import pytest

from tests import programs
from tests.programs import ROOT, Outcome

PRELUDE = """
    import pjrt_compat
    import os, sys, time
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_multiprocessing as xmp
    sys.path.insert(0, os.environ["TESTS_ROOT"])
    from tests import checks_spawn as jobs
    from torch.multiprocessing import ProcessExitedException
"""


def launch(
    body: str, directory: Path, *arguments: str, topology: Optional[str] = None, timeout: float = 90
) -> Outcome:
    """Runs ``body`` as the main part of a launcher program."""
    lines = ["import sys"] + [line[4:] for line in PRELUDE.strip("\n").splitlines()]
    lines += ["if __name__ == '__main__':"]
    lines += ["    " + line for line in body.strip("\n").splitlines()]
    return programs.run_source(
        "\n".join(lines),
        directory,
        *arguments,
        timeout=timeout,
        TESTS_ROOT=str(ROOT),
        PJRT_COMPAT_TOPOLOGY=topology,
    )


FAILURES = """
import contextlib

def failure(fn, args, nprocs=4, **kw):
    started = time.monotonic()
    try:
        xmp.spawn(fn, args=args, nprocs=nprocs, **kw)
    except ProcessExitedException as error:
        assert time.monotonic() - started < LIMIT, time.monotonic() - started
        return error
    raise SystemExit("the launcher did not raise")

LIMIT = 30.0  # the first start imports torch_xla
error = failure(jobs.job_fails, (2,))
LIMIT = 10.0
assert error.exit_code == 17, error.exit_code
assert error.error_index == 2, error.error_index
assert "replica 2 of 4" in str(error) and "ValueError: replica 2 is broken" in str(error), error
assert "in job_fails" in str(error), error

error = failure(jobs.job_exits, (1, 21))
assert error.exit_code == 21, error.exit_code

error = failure(jobs.job_exits, (3, "a message"))
assert error.exit_code == 1, error.exit_code

xmp.spawn(jobs.job_exits, args=(1, 0), nprocs=4)
xmp.spawn(jobs.job_exits, args=(1, None), nprocs=4)

error = failure(jobs.job_raises_what_does_not_pickle, ())
assert error.exit_code == 17 and "unpicklable 1 2" in str(error), error

error = failure(jobs.job_hard_exit, (1,))
assert error.exit_code == 3, error.exit_code

started = time.monotonic()
error = failure(jobs.job_is_killed, (3,))
assert time.monotonic() - started < 5 + 3, time.monotonic() - started
assert error.exit_code == -9 and "SIGKILL" in str(error), error
assert "replica" in str(error) and "3" in str(error), error
print("all failures surfaced")
"""


@pytest.mark.parametrize("topology", [None, "cpu:2x2", "cpu:1x4"])
def test_contract_26_the_first_failure_ends_the_job_and_the_launcher_says_whose_it_was(
    tmp_path: Path, topology: Optional[str]
) -> None:
    """Exit codes 17 and sys.exit's own, tracebacks and signals."""
    outcome = launch(FAILURES, tmp_path, topology=topology, timeout=180)
    assert outcome.code == 0, outcome.err
    assert "all failures surfaced" in outcome.out
    assert "Exception in device=CPU:2: replica 2 is broken" in outcome.err
    assert "ValueError: replica 2 is broken" in outcome.err
    assert "a message" in outcome.err


WAYS = """
directory = sys.argv[1]

def fresh(name):
    path = os.path.join(directory, name)
    os.mkdir(path)
    return path

def written(path):
    return {name: open(os.path.join(path, name)).read() for name in sorted(os.listdir(path))}

# Contracts 17 and 22: keywords, nprocs, the index given to fn, the return value.
path = fresh("spawn")
assert xmp.spawn(fn=jobs.job_writes, args=(path, "x"), nprocs=3) is None
assert written(path) == {str(i): "%d 3 ('x',)" % i for i in range(3)}, written(path)

path = fresh("forkserver")
xmp.spawn(jobs.job_writes, args=(path,), nprocs=2, start_method="forkserver")
assert written(path) == {"0": "0 2 ()", "1": "1 2 ()"}

# nprocs=1 calls fn here.
path = fresh("one")
seen = []
assert xmp.spawn(lambda i: seen.append((i, os.getpid(), xm.xrt_world_size())), nprocs=1) is None
assert seen == [(0, os.getpid(), 1)], seen
assert xm.get_ordinal(defval=-1) == -1

# join=False returns a context at once.
path = fresh("background")
context = xmp.spawn(jobs.job_waits_then_writes, args=(path,), nprocs=2, join=False)
assert written(path) == {}
assert len(context.processes) == 2 and len(context.pids()) == 2
assert context.join(timeout=0.01) is False
while not context.join():
    pass
assert written(path) == {"0": "0 2 ()", "1": "1 2 ()"}

context = xmp.spawn(jobs.job_waits_then_writes, args=(path,), nprocs=2, join=False, daemon=True)
assert all(process.daemon for process in context.processes)
while not context.join():
    pass

# Contract 25: what a replica changes does not leak to the parent.
values, cwd, argv = [], os.getcwd(), list(sys.argv)
xmp.spawn(jobs.job_touches_everything, args=(values,), nprocs=2)
assert values == [] and "TOUCHED" not in os.environ
assert os.getcwd() == cwd and sys.argv == argv

# Variables set before a spawn reach its replicas, also when the fork server is older than they.
os.environ["LATE_VARIABLE"] = "set"
def see(i, queue):
    queue.put((i, os.environ["LATE_VARIABLE"], xm.get_ordinal()))

# Contract 23: fork passes closures, lambdas, queues and locks by inheritance.
queue = torch.multiprocessing.SimpleQueue()
xmp.spawn(see, args=(queue,), nprocs=2, start_method="fork")
assert sorted(queue.get() for _ in range(2)) == [(0, "set", 0), (1, "set", 1)]
# A forked replica does not stumble over what earlier jobs have left behind.
import gc
for turn in range(2):
    xmp.spawn(lambda i: gc.collect(), nprocs=2, start_method="fork")
lock = torch.multiprocessing.Lock()
path = fresh("lambda")
xmp.spawn(lambda i: jobs.job_writes(i, path, lock.acquire(False)), nprocs=1)
xmp.spawn(lambda i: jobs.job_writes(i, path), nprocs=2, start_method="fork")
assert written(path)["1"] == "1 2 ()"

# Contract 27: a daemon thread of the parent feeds the replicas while spawn blocks.
import threading
feed, answers = torch.multiprocessing.Queue(), torch.multiprocessing.SimpleQueue()
def feeding():
    for number in range(6):
        time.sleep(0.1)
        feed.put(number)
threading.Thread(target=feeding, daemon=True).start()
xmp.spawn(lambda i: answers.put([feed.get() for _ in range(3)]), nprocs=2, start_method="fork")
assert sorted(answers.get() + answers.get()) == list(range(6))

# With spawn they cannot be pickled, and the message says what to do.
for bad, args in ((lambda i: None, ()), (jobs.job_writes, (lock,))):
    try:
        xmp.spawn(bad, args=args, nprocs=2)
        raise SystemExit("pickled")
    except Exception as error:
        assert "start_method='fork'" in str(error), repr(error)

# Bad arguments.
for call, expected in (
    (lambda: xmp.spawn(3, nprocs=2), TypeError),
    (lambda: xmp.spawn(jobs.job_writes, args=7, nprocs=2), TypeError),
    (lambda: xmp.spawn(jobs.job_writes, start_method="thread", nprocs=2), ValueError),
    (lambda: xmp.spawn(jobs.job_writes, nprocs=0), ValueError),
    (lambda: xmp.spawn(jobs.job_writes, nprocs="2"), TypeError),
):
    try:
        call()
        raise SystemExit("accepted")
    except expected as error:
        assert "xmp.spawn" in str(error), error

# Contract 20: asking before spawn is free; using a device forbids fork only.
assert str(xm.xla_device()) == "xla:0"
assert (xm.get_ordinal(), xm.xrt_world_size(), xm.get_local_ordinal()) == (0, 1, 0)
assert xm.is_master_ordinal() and xm.get_xla_supported_devices() == ["xla:0"]
torch.ones(2).to(xm.xla_device())
path = fresh("used")
xmp.spawn(jobs.job_writes, args=(path,), nprocs=2)
assert len(written(path)) == 2
if hasattr(__import__("torch_xla")._XLAC, "_xla_runtime_is_initialized"):
    try:
        xmp.spawn(jobs.job_writes, args=(path,), nprocs=2, start_method="fork")
        raise SystemExit("forked with a running runtime")
    except pjrt_compat.PjrtCompatError as error:
        assert "start_method='spawn'" in str(error), error
import gc, glob, tempfile
gc.collect()
print("all ways work")
"""


def test_contracts_17_20_22_23_25_and_27_every_way_to_spawn_does_what_xrt_did(
    tmp_path: Path,
) -> None:
    """Contracts 20, 22, 23, 25: arguments, start methods, contexts, isolation."""
    outcome = launch(WAYS, tmp_path, str(tmp_path), timeout=180)
    assert outcome.code == 0, outcome.err
    assert "all ways work" in outcome.out


def process_is_alive(pid: int) -> bool:
    try:
        state = Path("/proc/{}/stat".format(pid)).read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def start_waiting_job(directory: Path) -> tuple[subprocess.Popen, list[int]]:
    """A launcher whose two replicas wait for ever; returns their process ids too."""
    program = directory / "program.py"
    program.write_text(
        "import pjrt_compat, sys\n"
        "import torch_xla.distributed.xla_multiprocessing as xmp\n"
        "from tests import checks_spawn as jobs\n"
        "if __name__ == '__main__':\n"
        "    xmp.spawn(jobs.job_waits_for_ever, args=(sys.argv[1],), nprocs=2)\n"
    )
    results = directory / "results"
    results.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(program), str(results)],
        env=programs.clean_environment(PJRT_DEVICE="CPU", PYTHONPATH=str(ROOT)),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    pids = []
    while time.monotonic() < deadline and len(pids) < 2:
        time.sleep(0.2)
        texts = [path.read_text() for path in results.iterdir()]
        pids = [int(text.rpartition("(")[2].split(",")[0]) for text in texts if ")" in text]
    assert len(pids) == 2, "the job did not start"
    return process, pids


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_replica_outlives_its_launcher(tmp_path: Path, how: signal.Signals) -> None:
    process, pids = start_waiting_job(tmp_path)
    try:
        os.kill(process.pid, how)
        process.wait(20)
        deadline = time.monotonic() + 10
        while any(process_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in pids if process_is_alive(pid)]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
