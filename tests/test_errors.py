"""Bad input gets a clear error, and nothing hangs or is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.jobs import Layout, assert_passed, check_names
from tests.programs import ROOT

MODULE = "tests.checks_errors"
LAYOUTS = [Layout(4), Layout(4, "cpu:2x2"), Layout(4, "cpu:1x4")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_on_every_replica(name: str, layout: Layout) -> None:
    assert_passed(MODULE, name, layout)


LEFT_ALONE = """
    import pjrt_compat
    import sys, time
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_multiprocessing as xmp

    def meets(index):
        if index != 1:
            xm.rendezvous("the last one")

    def reduces(index):
        if index != 1:
            xm.all_reduce("sum", torch.ones(1, device=xm.xla_device()))

    def waits(index):
        if index != 1:
            xm.rendezvous("late")
        else:
            time.sleep(600)

    def main():
        started = time.monotonic()
        try:
            xmp.spawn(globals()[sys.argv[1]], nprocs=4)
        except torch.multiprocessing.ProcessExitedException as error:
            print(time.monotonic() - started)
            print(error)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("topology", [None, "cpu:2x2", "cpu:1x4"])
@pytest.mark.parametrize(
    ("job", "call"), [("meets", "rendezvous('the last one')"), ("reduces", "xm.all_reduce(")]
)
def test_a_call_made_by_only_some_replicas_names_the_missing_one(
    tmp_path: Path, job: str, call: str, topology: str
) -> None:
    outcome = programs.run_source(
        LEFT_ALONE, tmp_path, job, PJRT_COMPAT_TOPOLOGY=topology, timeout=60
    )
    assert outcome.code == 0, outcome.err
    assert "ReplicaLostError" in outcome.out
    assert "replica(s) [1] has returned without joining" in outcome.out
    assert call in outcome.out


@pytest.mark.parametrize("topology", [None, "cpu:1x4"])
def test_a_time_limit_names_the_missing_replica_and_its_line(tmp_path: Path, topology: str) -> None:
    outcome = programs.run_source(
        LEFT_ALONE,
        tmp_path,
        "waits",
        PJRT_COMPAT_TOPOLOGY=topology,
        PJRT_COMPAT_TIMEOUT="2",
        timeout=60,
    )
    assert outcome.code == 0, outcome.err
    assert "still missing: replica 1 (is at" in outcome.out
    assert "program.py" in outcome.out
    assert "in waits" in outcome.out


def test_a_long_wait_is_spoken_about_once(tmp_path: Path) -> None:
    source = (
        LEFT_ALONE.replace("time.sleep(600)", "time.sleep(5); xm.rendezvous('late')")
        .replace(
            "import sys, time", "import sys, time\n    import pjrt_compat.replicas.watch as watch"
        )
        .replace("def waits(index):", "def waits(index):\n        watch.WATCHDOG_SECONDS = 1.0")
    )
    outcome = programs.run_source(source, tmp_path, "waits", timeout=60)
    assert outcome.code == 0, outcome.err
    lines = [line for line in outcome.err.splitlines() if "still missing" in line]
    assert len(lines) == 1, outcome.err
    assert "replica 1 (is at" in lines[0]
    assert "PJRT_COMPAT_TIMEOUT" in lines[0]


def test_a_collective_in_the_launcher_of_a_running_job_is_refused(tmp_path: Path) -> None:
    outcome = programs.run_source(
        """
        import pjrt_compat, time
        import torch
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.xla_multiprocessing as xmp

        def f(index):
            time.sleep(1)

        if __name__ == "__main__":
            x = torch.ones(1, device=xm.xla_device())
            context = xmp.spawn(f, nprocs=2, join=False)
            try:
                xm.all_reduce("sum", x)
            except pjrt_compat.PjrtCompatError as error:
                print(error)
            while not context.join():
                pass
            assert xm.all_reduce("sum", x).tolist() == [1.0]
        """,
        tmp_path,
    )
    assert outcome.code == 0, outcome.err
    assert "outside a replica" in outcome.out


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"PJRT_COMPAT_TOPOLOGY": "v7-8"}, "unknown topology 'v7-8'"),
        ({"PJRT_COMPAT_TOPOLOGY": "v3-32"}, "nprocs=2 cannot be had in topology v3-32"),
        ({"PJRT_COMPAT_TOPOLOGY": "cpu:3x1"}, "nprocs=2 cannot be had in topology cpu:3x1"),
        ({"PJRT_COMPAT_TIMEOUT": "soon"}, "PJRT_COMPAT_TIMEOUT='soon' is not a number"),
    ],
)
def test_a_bad_setting_is_refused_by_name(
    tmp_path: Path, variables: dict[str, str], text: str
) -> None:
    outcome = programs.run(
        [
            "{}".format(__import__("sys").executable),
            "-c",
            "import pjrt_compat, torch_xla.distributed.xla_multiprocessing as xmp\n"
            "from tests import checks_spawn as jobs\n"
            "xmp.spawn(jobs.job_exits, args=(0, 0), nprocs=2)",
        ],
        PYTHONPATH=str(ROOT),
        **variables,
    )
    assert outcome.code == 1
    assert text in outcome.err
