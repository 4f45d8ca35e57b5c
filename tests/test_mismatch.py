"""A mismatch between replicas is an error on all of them, in any order of arrival."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest

from tests import programs
from tests.jobs import Layout, assert_passed, check_names

MODULE = "tests.checks_mismatch"
LAYOUTS = [Layout(2), Layout(4, "cpu:2x2"), Layout(4, "cpu:1x4")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", check_names(MODULE))
def test_on_every_replica(name: str, layout: Layout) -> None:
    assert_passed(MODULE, name, layout)


FAILED_MEETINGS = """
    import pjrt_compat
    import sys, time
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_multiprocessing as xmp

    def say(*words):
        sys.stdout.write(" ".join(map(str, (xm.get_ordinal(),) + words)) + chr(10))
        sys.stdout.flush()

    def meet(call):
        try:
            return call()
        except pjrt_compat.PjrtCompatError as error:
            return type(error).__name__

    def too_late(index):
        xm.rendezvous("go")
        started = time.monotonic()

        def at(seconds):
            time.sleep(max(0.0, started + seconds - time.monotonic()))

        x = torch.ones(1, device=xm.xla_device())
        at(3 if index == 1 else 0)
        say("rendezvous", meet(lambda: list(xm.rendezvous("slow", b"%d" % index))))
        at(7 if index == 1 else 4)
        say("all_reduce", meet(lambda: xm.all_reduce("sum", x).tolist()))
        at(8)
        say("after", len(xm.rendezvous("after")))

    def used_again(index):
        meet(lambda: xm.rendezvous("torn", b"", [0, 1] if index == 0 else []))
        xm.rendezvous("between")
        say("again", meet(lambda: list(xm.rendezvous("torn", b"%d" % index))))

    if __name__ == "__main__":
        xmp.spawn(globals()[sys.argv[1]], nprocs=4)
"""


def test_a_meeting_that_failed_has_failed_for_those_who_come_later_too(tmp_path: Path) -> None:
    """One replica is later than the time limit; then all go on together."""
    outcome = programs.run_source(
        FAILED_MEETINGS,
        tmp_path,
        "too_late",
        PJRT_COMPAT_TOPOLOGY="cpu:2x2",
        PJRT_COMPAT_TIMEOUT="1",
        timeout=90,
    )
    assert outcome.code == 0, outcome.err
    lines = sorted(outcome.out.split("\n")[:-1])
    expected = []
    for ordinal in range(4):
        expected += [
            "{} {} ReplicaLostError".format(ordinal, n) for n in ("all_reduce", "rendezvous")
        ]
        expected += ["{} after 4".format(ordinal)]
    assert lines == sorted(expected)


@pytest.mark.parametrize("topology", [None, "cpu:2x2", "cpu:1x4"])
def test_a_tag_that_failed_never_gives_wrong_payloads_afterwards(
    tmp_path: Path, topology: Optional[str]
) -> None:
    """Replicas that disagree on how often they have met get an error, or the right answer."""
    outcome = programs.run_source(
        FAILED_MEETINGS,
        tmp_path,
        "used_again",
        PJRT_COMPAT_TOPOLOGY=topology,
        PJRT_COMPAT_TIMEOUT="3",
        timeout=90,
    )
    right = "again [b'0', b'1', b'2', b'3']"
    for line in outcome.out.splitlines():
        assert line[2:] == right or line.endswith("Error"), outcome.out
    assert outcome.out.count("again") == 4, outcome.err
