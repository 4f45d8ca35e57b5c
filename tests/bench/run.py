"""Measures the ratios of the specification's bars in one run and writes docs/performance.md.

    python tests/bench/run.py [--print]

Every figure is a ratio of two things measured in the same job, one after the other and repeated, so
that a loaded machine slows both.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "performance.md"
REPEATS = 5


class Measure(NamedTuple):
    what: str
    ours: float
    reference: float
    unit: str
    bar: float
    higher_is_better: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.reference

    @property
    def met(self) -> bool:
        return self.ratio >= self.bar if self.higher_is_better else self.ratio <= self.bar


def best(function: Callable[[], Any], calls: int, repeats: int = REPEATS) -> float:
    """Seconds per call, the best of several rounds."""
    rounds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        rounds.append((time.perf_counter() - started) / calls)
    return min(rounds)


# -- bodies of replicas ----------------------------------------------------------------------------


def direct_gloo(name: str) -> Any:
    """A gloo process group between the processes of the job, made without our code path."""
    import datetime

    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    from pjrt_compat.state import STATE

    assert STATE.meeting_place is not None and STATE.meeting_place.clients is not None
    store = dist.PrefixStore("bench " + name, STATE.meeting_place.clients.connect())
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=120)
    return dist.ProcessGroupGloo(store, xm.get_ordinal(), xm.xrt_world_size(), options)


def body_meet_in_processes(index: int, path: str) -> None:
    import torch_xla.core.xla_model as xm

    group = direct_gloo("barrier")
    group.barrier().wait()
    xm.rendezvous("warm")
    ours = best(lambda: xm.rendezvous("bench"), 100)
    reference = best(lambda: group.barrier().wait(), 100)
    report(path, ours, reference)


def body_meet_in_threads(index: int, path: str) -> None:
    import threading

    import torch_xla.core.xla_model as xm

    barrier = SHARED.setdefault("barrier", threading.Barrier(xm.xrt_world_size()))
    xm.rendezvous("warm")
    reference = best(barrier.wait, 300)
    ours = best(lambda: xm.rendezvous("bench"), 300)
    report(path, ours, reference)


SHARED: Dict[str, Any] = {}


def body_reduce_in_processes(index: int, path: str) -> None:
    import torch
    import torch_xla.core.xla_model as xm

    group = direct_gloo("reduce")
    value = torch.rand(16 << 20)
    on_device = value.to(xm.xla_device())
    host_reduce(value)
    group.allreduce([value.clone()]).wait()
    copy = value.clone()
    ours = best(lambda: host_reduce(value), 2)
    xm.rendezvous("between")
    reference = best(lambda: group.allreduce([copy]).wait(), 2)
    xm.rendezvous("between")
    whole = best(lambda: xm.all_reduce("sum", on_device).cpu(), 1, 3)
    report(path, ours, reference, whole)


def host_reduce(value: Any) -> Any:
    """The exchange of ``xm.all_reduce`` without the copies from and to the device."""
    from pjrt_compat.collectives import contract, host

    call = contract.begin("all_reduce", None)
    flat = value.reshape(-1)
    exchange = host.begin(call, "bench", flat)
    return host.all_reduce_flat(exchange, flat, "sum", 1.0)


def body_reduce_in_threads(index: int, path: str) -> None:
    import torch

    value = torch.rand(16 << 20)
    host_reduce(value)
    report(path, best(lambda: host_reduce(value), 2), 1.0)


def body_nothing(index: int, path: str) -> None:
    import torch
    import torch_xla.core.xla_model as xm

    torch.ones(1, device=xm.xla_device()).cpu()


def report(path: str, *values: float) -> None:
    import torch_xla.core.xla_model as xm

    everyones = xm.mesh_reduce("report", values, list)
    if xm.get_ordinal() == 0:
        Path(path).write_text(json.dumps([max(column) for column in zip(*everyones)]))


# -- programs --------------------------------------------------------------------------------------


def job(body: str, replicas: int, topology: str = "") -> List[float]:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "result")
        python(["-m", "tests.bench.run", "--job", body, str(replicas), path], topology)
        return json.loads(Path(path).read_text()) if os.path.exists(path) else []


def python(arguments: List[str], topology: str = "", active: bool = True) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment.update(PJRT_DEVICE="CPU", PYTHONPATH=str(ROOT))
    if topology:
        environment["PJRT_COMPAT_TOPOLOGY"] = topology
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, check=True, stdout=-1, text=True
    ).stdout


IDENTITY = """
import json, sys, time
import pjrt_compat
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
from tests.bench.run import best
def f(index):
    native = pjrt_compat.get_original("torch_xla.runtime:global_ordinal")
    import torch; torch.ones(1, device=xm.xla_device())
    print(json.dumps([best(xm.get_ordinal, 20000), best(native, 20000)]))
xmp.spawn(f, nprocs=1)
"""

STEP = """
import json, sys, time
if sys.argv[1] == "xrt":
    import pjrt_compat
import torch, torch_xla
import torch_xla.core.xla_model as xm
def main(index):
    torch.manual_seed(0)
    device = xm.xla_device() if sys.argv[1] == "xrt" else torch_xla.device()
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(20)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.randn(16, 32).to(device)
    rounds = []
    for round in range(8):
        started = time.process_time()
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            xm.optimizer_step(optimizer)
            if sys.argv[1] == "xrt":
                xm.get_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal()
                xm.mark_step()
            else:
                torch_xla.sync()
        rounds.append(time.process_time() - started)
    print(json.dumps(min(rounds[2:]) / 50))
if sys.argv[1] == "xrt":
    import torch_xla.distributed.xla_multiprocessing as xmp
    xmp.spawn(main, nprocs=1)
else:
    main(0)
"""


def measure_start(active: bool) -> float:
    """CPU seconds of an interpreter start that never imports torch_xla."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PJRT")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.pop("PYTHONPATH", None)
    if active:
        environment["PJRT_COMPAT"] = "1"
        environment["PYTHONPATH"] = str(ROOT / "pjrt_compat" / "_autoload")
    rounds = []
    for _ in range(REPEATS):
        before = os.times()
        for _ in range(20):
            subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
        after = os.times()
        spent = after.children_user - before.children_user
        spent += after.children_system - before.children_system
        rounds.append(spent / 20)
    return min(rounds)


def launch_seconds(replicas: int) -> float:
    rounds = []
    for _ in range(2):
        started = time.perf_counter()
        # Two replicas are the smallest job that starts processes at all.
        job("body_nothing", replicas)
        rounds.append(time.perf_counter() - started)
    return min(rounds)


def measure() -> List[Measure]:
    found = []
    ours, reference = json.loads(python(["-c", IDENTITY]))
    found.append(
        Measure("xm.get_ordinal() / xr.global_ordinal()", ours * 1e9, reference * 1e9, "ns", 1 / 3)
    )
    ours, reference = job("body_meet_in_threads", 8, "cpu:1x8")
    what = "rendezvous of 8 replica threads / threading.Barrier"
    found.append(Measure(what, ours * 1e6, reference * 1e6, "us", 3.0))
    ours, reference = job("body_meet_in_processes", 8)
    what = "rendezvous of 8 processes / gloo barrier"
    found.append(Measure(what, ours * 1e6, reference * 1e6, "us", 1.5))
    ours, reference, whole = job("body_reduce_in_processes", 4)
    threads = job("body_reduce_in_threads", 4, "cpu:1x4")[0]
    what = "host all_reduce speed, 64 MB f32, 4 processes / gloo allreduce"
    found.append(Measure(what, 64 / ours, 64 / reference, "MB/s", 0.8, True))
    what = "the same with the copies from and to the device / gloo allreduce"
    found.append(Measure(what, 64 / whole, 64 / reference, "MB/s", 0.0, True))
    what = "host all_reduce, 64 MB f32, 4 threads / gloo allreduce of 4 processes"
    found.append(Measure(what, threads * 1e3, reference * 1e3, "ms", 1.0))
    one, eight = launch_seconds(2), launch_seconds(8)
    found.append(Measure("launch of 8 CPU replicas / launch of 2", eight, one, "s", 1.5))
    steps = [
        (float(python(["-c", STEP, "xrt"])), float(python(["-c", STEP, "modern"])))
        for _ in range(3)
    ]
    ours, reference = (statistics.median(column) * 1e3 for column in zip(*steps))
    what = "CPU time of a training step, 1 replica / modern-API program"
    found.append(Measure(what, ours, reference, "ms", 1.01))
    ours, reference = measure_start(True), measure_start(False)
    what = "interpreter start with PJRT_COMPAT=1, no torch_xla / without (difference <= 5 ms)"
    found.append(Measure(what, ours * 1e3, reference * 1e3, "ms", 1 + 5e-3 / reference))
    return found


def page(found: List[Measure]) -> str:
    import importlib.metadata as metadata

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, stdout=-1, text=True
    ).stdout.strip()
    versions = ", ".join(
        "{} {}".format(name, metadata.version(name)) for name in ("torch", "torch_xla", "wrapt")
    )
    lines = [
        "# Performance",
        "",
        "Written by `make bench`; do not edit. Commit {}, {}, Python {}, {} cores.".format(
            commit, versions, platform.python_version(), os.cpu_count()
        ),
        "",
        "Each row is a ratio of two things measured in the same run. Absolute figures belong to",
        "the machine of the run.",
        "",
        "| what | ours | reference | ratio | bar | met |",
        "|---|---|---|---|---|---|",
    ]
    for m in found:
        sign = ">=" if m.higher_is_better else "<="
        bar = "{} {:.2f}".format(sign, m.bar) if m.bar else "none"
        met = ("yes" if m.met else "**no**") if m.bar else ""
        lines.append(
            "| {} | {:.4g} {} | {:.4g} {} | {:.3f} | {} | {} |".format(
                m.what, m.ours, m.unit, m.reference, m.unit, m.ratio, bar, met
            )
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--job":
        import pjrt_compat  # noqa: F401  isort: skip
        import torch_xla.distributed.xla_multiprocessing as xmp

        from tests.bench import run

        _, _, body, replicas, path = sys.argv
        xmp.spawn(getattr(run, body), args=(path,), nprocs=int(replicas))
        return
    text = page(measure())
    print(text)
    if "--print" not in sys.argv:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
