"""Replicas that make different calls: an error on all of them, whoever comes first, and no harm.

Every check ends with calls that fit, so that it also shows the job usable after the error.
"""

from __future__ import annotations

import random
import time
from typing import Any, Callable, List

import torch
import torch_xla.core.xla_model as xm

from pjrt_compat.errors import ReplicaMismatchError
from pjrt_compat.replicas import rendezvous, watch

# How long a replica waits before it looks for a reason; short, for there are many mismatches here.
watch.GRACE_SECONDS = rendezvous.GRACE_SECONDS = 0.1


def me() -> int:
    return xm.get_ordinal()


def world() -> int:
    return xm.xrt_world_size()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=xm.xla_device())


def mismatch(function: Callable[[], Any], *texts: str) -> str:
    """The text of the error that the call raises here; it holds ``texts``."""
    try:
        function()
    except ReplicaMismatchError as error:
        for text in texts:
            assert text in str(error), "{!r} lacks {!r}".format(str(error), text)
        return str(error)
    raise RuntimeError("nothing was raised")


def still_works(name: str) -> None:
    xm.rendezvous("after " + name)
    assert float(xm.all_reduce("sum", ones(1))) == world()
    assert len(xm.rendezvous("still " + name, b"x")) == world()


def late(seconds: float) -> None:
    """Later than replicas begin to look for a reason, in ascending order."""
    time.sleep(seconds * me())


def check_the_odd_one_may_come_last() -> None:
    odd = world() - 1
    late(0.25)
    size = 3 if me() == odd else 2
    mismatch(lambda: xm.all_gather(ones(size)), "float32(2,)", "float32(3,)")
    still_works("last")


def check_the_odd_one_may_come_first() -> None:
    late(0.25)
    size = 3 if me() == 0 else 2
    mismatch(lambda: xm.all_gather(ones(size)), "replica 0 is in xm.all_gather([float32(3,)]")
    still_works("first")


def check_everyone_may_call_something_else() -> None:
    calls: List[Callable[[], Any]] = [
        lambda: xm.all_reduce("sum", ones(2)),
        lambda: xm.all_gather(ones(2)),
        lambda: xm.broadcast(ones(2)),
        lambda: xm.collective_permute(ones(2), [[0, 1]]),
    ]
    mismatch(calls[me() % 4], "collective number")
    still_works("something else")


def check_lists_of_different_lengths() -> None:
    inputs = [ones(2) for _ in range(1 + (me() == 1))]
    mismatch(lambda: xm.all_reduce("sum", inputs), "float32(2,), float32(2,)")
    # Nothing was written.
    assert [x.tolist() for x in inputs] == [[1.0, 1.0]] * len(inputs)
    still_works("lists")


def check_arguments_that_change_the_result() -> None:
    first = me() == 0
    x = ones(world(), world())
    cases: List[Callable[[], Any]] = [
        lambda: xm.all_reduce("sum", x, scale=0.5 if first else 1.0),
        lambda: xm.all_gather(x, 0 if first else 1),
        lambda: xm.reduce_scatter("sum", x, 1.0, 0 if first else 1, world()),
        lambda: xm.all_to_all(x, 0, 0 if first else 1, world()),
        lambda: xm.collective_permute(x, [[0, 1]] if first else [[1, 0]]),
        lambda: xm.broadcast(x, 0 if first else 1),
        lambda: xm.broadcast_master_param(torch.nn.Linear(2 if first else 3, 1).to(x.device)),
    ]
    for number, case in enumerate(cases):
        mismatch(case)
        still_works("argument {}".format(number))


def check_arguments_that_mean_the_same_do_fit() -> None:
    """Dimensions counted from either end, and groups as lists or tuples."""
    x = ones(2, 3)
    assert xm.all_gather(x, 1 if me() else -1).shape[1] == 3 * world()
    everyone = list(range(world()))
    groups = (tuple(everyone),) if me() else [everyone]
    assert float(xm.all_reduce("sum", x, groups=groups)[0][0]) == world()
    assert float(xm.all_reduce("sum", x, 1 if me() else 1.0)[0][0]) == world()


def check_roots_that_differ_within_a_group() -> None:
    """Groups have a root each; the replicas of one group must agree on theirs."""
    everyone = list(range(world()))
    for size in (3, 50_000):
        root = 0 if me() == 0 else 1
        mismatch(lambda n=size, r=root: xm.broadcast(ones(n), r, [everyone]), "root")  # type: ignore[misc]
        still_works("roots {}".format(size))
        # Each takes another one for the root, so that nobody would send.
        root = (me() + 1) % world()
        mismatch(lambda n=size, r=root: xm.broadcast(ones(n), r, [everyone]), "root")  # type: ignore[misc]
        still_works("no roots {}".format(size))


def check_one_tag_with_two_sets_of_replicas() -> None:
    if world() < 3:
        return
    for turn in range(2):
        tag = "two sets {}".format(turn)
        replicas = [0, 1] if me() == 0 else None
        if turn:
            late(0.25)
        mismatch(lambda t=tag, r=replicas: xm.rendezvous(t, b"", r or []), tag, "[0, 1]")  # type: ignore[misc]
        still_works(tag)


def check_a_mismatch_is_found_again_and_again() -> None:
    """Arrival is random; neither an error nor a result may stick from one time to the next."""
    chance = random.Random(me())
    for turn in range(6):
        time.sleep(chance.choice([0.0, 0.0, 0.01, 0.3]))
        odd = turn % world()
        dtype = torch.int32 if me() == odd else torch.float32
        text = mismatch(lambda d=dtype: xm.all_reduce("sum", ones(2, dtype=d)))  # type: ignore[misc]
        assert "replica {} is in xm.all_reduce([int32(2,)]".format(odd) in text, text
        for _ in range(2):
            assert float(xm.all_reduce("sum", ones(1))) == world()
    still_works("again")
