"""Whole jobs for tests/test_spawn.py: each ``job_*`` function is a replica's body or a launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch_xla.core.xla_model as xm


def job_fails(index: int, ordinal: int) -> None:
    if index == ordinal:
        raise ValueError("replica {} is broken".format(index))
    xm.rendezvous("never")


def job_exits(index: int, ordinal: int, code: Any) -> None:
    if index == ordinal:
        sys.exit(code)
    if code:
        xm.rendezvous("never")


def job_is_killed(index: int, ordinal: int) -> None:
    if index == ordinal:
        os.kill(os.getpid(), signal.SIGKILL)
    xm.all_reduce("sum", torch.ones(2, device=xm.xla_device()))


def job_hard_exit(index: int, ordinal: int) -> None:
    if index == ordinal:
        os._exit(3)
    time.sleep(600)


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("unpicklable {} {}".format(a, b))


def job_raises_what_does_not_pickle(index: int) -> None:
    if index == 1:
        raise Unpicklable(1, 2)
    xm.rendezvous("never")


def job_writes(index: int, directory: str, *rest: Any) -> None:
    with open(os.path.join(directory, str(index)), "w") as file:
        file.write("{} {} {}".format(xm.get_ordinal(), xm.xrt_world_size(), rest))


def job_waits_then_writes(index: int, directory: str) -> None:
    time.sleep(1)
    job_writes(index, directory)


def job_touches_everything(index: int, values: list) -> None:
    values.append(index)
    os.environ["TOUCHED"] = str(index)
    os.chdir("/")
    sys.argv.append("touched")


def job_waits_for_ever(index: int, directory: str) -> None:
    xm.rendezvous("all here")
    job_writes(index, directory, os.getpid())
    time.sleep(600)
