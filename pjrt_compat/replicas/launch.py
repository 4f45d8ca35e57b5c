"""``xmp.spawn`` on torch.multiprocessing: processes that hold one replica each, or several threads.

XRT's rules (v1.12.0 ``torch_xla/distributed/xla_multiprocessing.py``): a worker that fails prints
``Exception in device=TPU:3: ...`` with its traceback to stderr and exits with 17; the first failure
ends the others; the launcher raises ``ProcessExitedException``.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException

from pjrt_compat.errors import PjrtCompatError, warn_once
from pjrt_compat.replicas import identity, isolation, runtime
from pjrt_compat.replicas.identity import Replica
from pjrt_compat.replicas.layouts import Topology
from pjrt_compat.replicas.rendezvous import MeetingPlace
from pjrt_compat.replicas.store import StoreAddress, StoreServer
from pjrt_compat.replicas.topology import plan_job
from pjrt_compat.replicas.watch import answer_where
from pjrt_compat.state import STATE

FAILURE_EXIT_CODE = 17
# What a failed process may take to end by itself before it is made to.
_LAST_WORDS_SECONDS = 3.0
_PRELOAD = "pjrt_compat.replicas.preload"
# A fork server keeps what libraries read from these when they were loaded.
_LOAD_TIME_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "LD_", "XLA_", "LIBTPU_", "TF_", "PYTHON")

_log = logging.getLogger("pjrt_compat")


class Plan(NamedTuple):
    """What every process of a job is told."""

    topology: Topology
    device_kind: str
    address: StoreAddress
    reports: str
    set_threads: bool


class Job:
    """A launched job, as its launcher sees it."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.server = StoreServer()
        self.reports = tempfile.TemporaryDirectory(prefix="pjrt_compat_")
        self.started = time.monotonic()
        self.context: Optional[ReplicaContext] = None

    def close(self) -> None:
        """Forgets the job: its store and its reports are gone afterwards."""
        if self in STATE.jobs:
            STATE.jobs.remove(self)
        self.reports.cleanup()
        self.server.close()

    def is_running(self) -> bool:
        return self.context is None or any(p.is_alive() for p in self.context.processes)

    def plan(self) -> Plan:
        return Plan(
            self.topology,
            runtime.device_kind(),
            self.server.address,
            self.reports.name,
            "OMP_NUM_THREADS" not in os.environ,
        )


class ReplicaContext(ProcessContext):
    """The ``ProcessContext`` of a job; its errors also say which replica failed and how.

    ``join(timeout=None)`` returns True when all replicas have ended, False on time-out, and raises
    ``torch.multiprocessing.ProcessExitedException`` when one has failed.
    """

    def __init__(self, job: Job, context: ProcessContext) -> None:
        self.__dict__.update(context.__dict__)
        self.job = job
        job.context = self

    def join(self, *args: Any, **kwargs: Any) -> bool:
        try:
            finished = super().join(*args, **kwargs)
        except ProcessExitedException as error:
            raise self._explained(error) from None
        except KeyboardInterrupt:
            self._end_all()
            raise
        if finished:
            self._close()
        return finished

    def _explained(self, error: ProcessExitedException) -> ProcessExitedException:
        reports = self._reports()
        self._close()
        per_process = self.job.topology.replicas_per_process
        hosted = list(range(error.error_index * per_process, (error.error_index + 1) * per_process))
        failed = [ordinal for ordinal in reports if ordinal in hosted]
        if failed:
            ordinal = failed[0]
            text = "replica {} of {} failed with exit code {}\n\n{}".format(
                ordinal, self.job.topology.world_size, error.exit_code, reports[ordinal]
            )
        else:
            ordinal = hosted[0]
            names = ", ".join(str(o) for o in hosted)
            text = "{} (replica {} of {}){}".format(
                error.msg,
                names,
                self.job.topology.world_size,
                "; it left no traceback"
                if error.exit_code < 0 or error.exit_code == FAILURE_EXIT_CODE
                else "",
            )
        return ProcessExitedException(
            text, ordinal, error.pid, error.exit_code, signal_name=error.signal_name
        )

    def _reports(self) -> Dict[int, str]:
        """Tracebacks that replicas left, in the order they were written."""
        found: List[Tuple[int, int, str]] = []
        if not os.path.isdir(self.job.reports.name):
            return {}  # told before, by an earlier join()
        for entry in os.scandir(self.job.reports.name):
            with open(entry.path, encoding="utf-8") as file:
                found.append((entry.stat().st_mtime_ns, int(entry.name), file.read()))
        return {ordinal: text for _, ordinal, text in sorted(found)}

    def _end_all(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._close()

    def _close(self) -> None:
        if self.job in STATE.jobs:
            self.job.close()
            _log.info(
                "%s, %d names patched: ended after %.1f s",
                self.job.topology,
                len(STATE.registry.handles) if STATE.registry is not None else 0,
                time.monotonic() - self.job.started,
            )


# -- the launcher ----------------------------------------------------------------------------------


def spawn(
    fn: Callable[..., Any],
    args: Tuple[Any, ...],
    nprocs: Optional[int],
    join: bool,
    daemon: bool,
    start_method: str,
) -> Optional[ReplicaContext]:
    """Runs ``fn(ordinal, *args)`` on every replica. See ``shims.xla_multiprocessing.spawn``."""
    _check_arguments(fn, args, start_method)
    topology = plan_job(nprocs)
    _log.info("%s, device kind %s", topology, runtime.device_kind())
    if topology.world_size == 1:
        run_here(fn, args)
        return None
    _check_runtime_is_down(start_method)
    job = Job(topology)
    STATE.jobs.append(job)
    try:
        context = _start(job, fn, args, daemon, start_method)
    except BaseException:
        job.close()
        raise
    if not join:
        return context
    while not context.join():
        pass
    return None


def _check_arguments(fn: Any, args: Any, start_method: str) -> None:
    if not callable(fn):
        raise TypeError("xmp.spawn: fn must be callable, not {!r}".format(fn))
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            "xmp.spawn: args must be a tuple, not {} ({!r}); for one argument write "
            "args=(value,)".format(type(args).__name__, args)
        )
    if start_method not in multiprocessing.get_all_start_methods():
        raise ValueError(
            "xmp.spawn: start_method must be one of {}, not {!r}".format(
                ", ".join(multiprocessing.get_all_start_methods()), start_method
            )
        )


def _check_runtime_is_down(start_method: str) -> None:
    """A started runtime is lost in a forked child, and a TPU it holds is lost to every child."""
    if not runtime.is_up() or (runtime.device_kind() == "CPU" and start_method != "fork"):
        return
    raise PjrtCompatError(
        "xmp.spawn(start_method={!r}) on {}: this process has already used an XLA device, so its "
        "children cannot. Asking for ordinals, the world size or xm.xla_device() before spawn is "
        "fine; creating or moving tensors is not. Move that into the spawned function{}.".format(
            start_method,
            runtime.device_kind(),
            ", or use start_method='spawn'" if runtime.device_kind() == "CPU" else "",
        )
    )


def _start(
    job: Job, fn: Callable[..., Any], args: Sequence[Any], daemon: bool, start_method: str
) -> ReplicaContext:
    if start_method == "spawn":
        # Same meaning for the program, but torch_xla is imported once instead of once a process.
        start_method = "forkserver"
    if start_method == "forkserver":
        prepare_fork_server()
    if start_method == "fork":
        sys.stdout.flush()
        sys.stderr.flush()
    with _explained_pickling(fn):
        context = torch.multiprocessing.start_processes(
            run_process,
            args=(job.plan(), fn, tuple(args)),
            nprocs=job.topology.processes,
            join=False,
            daemon=daemon,
            start_method=start_method,
        )
    return ReplicaContext(job, context)


def prepare_fork_server() -> None:
    """Has the fork server import torch_xla once, and replaces one with an outdated environment."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    present = {k: v for k, v in os.environ.items() if k.startswith(_LOAD_TIME_PREFIXES)}
    if server._forkserver_pid is not None and getattr(server, "_pjrt_compat", None) == present:
        return
    if server._forkserver_pid is not None:
        _retire_fork_server(server)
    modules = [m for m in server._preload_modules if m != _PRELOAD]
    multiprocessing.set_forkserver_preload([*modules, _PRELOAD])
    server._pjrt_compat = present


def _retire_fork_server(server: Any) -> None:
    """Lets go of the fork server: it ends when its last child does, a new one serves the next."""
    os.close(server._forkserver_alive_fd)
    server._forkserver_address = None
    server._forkserver_alive_fd = None
    server._forkserver_pid = None


@contextlib.contextmanager
def _explained_pickling(fn: Callable[..., Any]) -> Iterator[None]:
    """A function or argument that does not pickle gets the advice XRT users need."""
    try:
        yield
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        text = str(error).lower()
        if not any(word in text for word in ("pickle", "inheritance", "fork context")):
            raise
        _advise(error, fn)
        raise
    except Exception as error:
        if type(error).__name__ == "PicklingError":
            _advise(error, fn)
        raise


def _advise(error: Exception, fn: Callable[..., Any]) -> None:
    name = getattr(fn, "__qualname__", repr(fn))
    error.args = (
        "{}\nxmp.spawn: `{}` and its args must be picklable with start_method='spawn'. Define the "
        "function at module level, or use start_method='fork', which passes everything by "
        "inheritance (lambdas, local functions, locks, queues, notebook functions).".format(
            error, name
        ),
    )


def run_here(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """``nprocs=1``: the function runs in this process, as replica 0 of 1."""
    kind = runtime.device_kind()
    if kind != "CPU":
        runtime.native("torch_xla.distributed.xla_multiprocessing:spawn")(
            _call_first, args=(fn, tuple(args)), nprocs=1
        )
        return
    former = STATE.process_replica
    STATE.process_replica = Replica(0, 1, 0, 1, 0, 1, 0, 1, 0, kind)
    try:
        fn(0, *args)
    finally:
        STATE.process_replica = former


def _call_first(index: int, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    fn(0, *args)


# -- a process of the job --------------------------------------------------------------------------


def run_process(process: int, plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Body of each process: becomes its replicas and runs the function on each."""
    runtime.configure_process(
        process, plan.topology.processes, plan.topology.replicas_per_process, plan.device_kind
    )
    if plan.set_threads:
        # All replicas of the host share its cores. The same number in every layout keeps sums
        # that torch splits over threads the same too.
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // plan.topology.local_world_size))
    replicas = make_replicas(process, plan)
    if replicas[0].hosts == 1:
        place = STATE.meeting_place = MeetingPlace.of_process(replicas, plan.address)
        threading.Thread(target=answer_where, args=(place, _launcher_is_gone), daemon=True).start()
    if len(replicas) == 1:
        STATE.process_replica = replicas[0]
        isolation.set_environment(replicas[0])
        code = run_replica(replicas[0], plan, fn, args)
    else:
        code = _run_threads(replicas, plan, fn, args)
    if code:
        _end_soon(code)
    sys.exit(code)


def make_replicas(process: int, plan: Plan) -> List[Replica]:
    """The replicas of this process, by device index."""
    topology = plan.topology
    per_process = topology.replicas_per_process
    host, hosts = 0, 1
    world_size = topology.world_size
    task = process
    if plan.device_kind != "CPU":
        task = runtime.process_task_id(process)
        host = task // topology.processes
        world_size = runtime.global_device_count()
        hosts = max(1, world_size // topology.local_world_size)
    replicas = []
    for index in range(per_process):
        # XLA's rule on TPU v2 and v3: CLOUD_TPU_TASK_ID * 2 + index.
        ordinal = task * per_process + index
        if plan.device_kind != "CPU":
            ordinal = checked_ordinal(ordinal, index)
        replicas.append(
            Replica(
                ordinal=ordinal,
                world_size=world_size,
                local_ordinal=process * per_process + index,
                local_world_size=topology.local_world_size,
                host=host,
                hosts=hosts,
                process=process,
                processes=topology.processes,
                device_index=index,
                device_kind=plan.device_kind,
            )
        )
    return replicas


def checked_ordinal(expected: int, device_index: int) -> int:
    """The runtime's own id of the device, which decides where slices of a gather land."""
    actual = runtime.replica_id(device_index)
    if actual != expected:
        warn_once(
            "ordinal",
            "the rule CLOUD_TPU_TASK_ID * devices + index gives ordinal {} for device xla:{}, the "
            "runtime says {}. The runtime's number is used, because collectives order by "
            "it.".format(expected, device_index, actual),
        )
    return actual


def run_replica(replica: Replica, plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> int:
    """Runs the function as ``replica``; returns the exit code that XRT's worker would have had."""
    place = STATE.meeting_place
    if place is not None:
        place.threads[replica.ordinal] = threading.get_ident()
    try:
        runtime.set_default_device(replica.device_index)
        fn(replica.ordinal, *args)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
            return 1
        if error.code:
            return error.code
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        _report(replica, plan, error)
        return FAILURE_EXIT_CODE
    if place is not None:
        place.leave(replica.ordinal)
    return 0


def _report(replica: Replica, plan: Plan, error: BaseException) -> None:
    """Prints the failure as XRT did and leaves the traceback for the launcher."""
    print(
        "Exception in device={}: {}".format(isolation.device_name(replica), error), file=sys.stderr
    )
    traceback.print_exc(limit=16, file=sys.stderr)
    sys.stderr.flush()
    # Written elsewhere first: the launcher may read at any moment.
    path = os.path.join(plan.reports, str(replica.ordinal))
    with contextlib.suppress(FileNotFoundError):  # the launcher has gone on without us
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            dir=os.path.dirname(plan.reports),
            delete=False,
        ) as file:
            file.write(traceback.format_exc()[-65536:])
        os.replace(file.name, path)


def _run_threads(
    replicas: Sequence[Replica], plan: Plan, fn: Callable[..., Any], args: Sequence[Any]
) -> int:
    """One thread per replica; the first failure is the process's."""
    STATE.local_replicas = list(replicas)
    isolation.isolate_threads(replicas)
    changed = threading.Condition()
    codes: List[int] = []

    def body(replica: Replica) -> None:
        with identity.running_as(replica):
            code = run_replica(replica, plan, fn, args)
        with changed:
            codes.append(code)
            changed.notify()

    for replica in replicas:
        threading.Thread(
            target=body, args=(replica,), name="replica-{}".format(replica.ordinal), daemon=True
        ).start()
    with changed:
        while len(codes) < len(replicas) and not any(codes):
            changed.wait()
    return next((code for code in codes if code), 0)


def _end_soon(code: int) -> None:
    """Ends the process even when a helper thread of the program refuses to."""

    def end() -> None:
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def _launcher_is_gone() -> None:
    """A launcher that was killed cannot end its replicas; they end themselves."""
    print("pjrt_compat: the launcher of this job is gone; ending", file=sys.stderr, flush=True)
    os._exit(FAILURE_EXIT_CODE)
