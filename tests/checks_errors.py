"""Checks that bad input gets a clear error, on every replica that must know, and harms nothing."""

from __future__ import annotations

from typing import Any, Callable, Tuple, Type, Union

import torch
import torch_xla.core.xla_model as xm

from pjrt_compat.errors import ReplicaMismatchError
from pjrt_compat.state import STATE

Kinds = Union[Type[BaseException], Tuple[Type[BaseException], ...]]


def me() -> int:
    return xm.get_ordinal()


def world() -> int:
    return xm.xrt_world_size()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=xm.xla_device())


def raises(kind: Kinds, function: Callable[[], Any], *texts: str) -> None:
    try:
        function()
    except kind as error:
        for text in texts:
            assert text in str(error), "{!r} lacks {!r}".format(str(error), text)
        return
    raise RuntimeError("nothing was raised")


def still_works() -> None:
    assert float(xm.all_reduce("sum", ones(1))) == world()


def check_groups_that_overlap() -> None:
    groups = [list(range(world())), [0]]
    raises(ValueError, lambda: xm.all_reduce("sum", ones(1), groups=groups), "overlap", "[0]")


def check_groups_without_the_caller() -> None:
    others = [[o for o in range(world()) if o != me()]]
    text = "holds ordinal {}".format(me())
    raises(ValueError, lambda: xm.all_gather(ones(1), groups=others), text)


def check_groups_with_unknown_ordinals() -> None:
    groups = [list(range(world() + 1))]
    text = "world has {}".format(world())
    raises(ValueError, lambda: xm.all_reduce("sum", ones(1), groups=groups), text)


def check_groups_that_are_no_lists() -> None:
    for groups in ([0, 1], "01", [["a"]]):
        raises(TypeError, lambda g=groups: xm.all_reduce("sum", ones(1), groups=g), "list of lists")  # type: ignore[misc]


def check_groups_of_different_sizes_where_shapes_depend_on_them() -> None:
    groups = [[0], list(range(1, world()))]
    if world() > 2:
        raises(ValueError, lambda: xm.all_gather(ones(1), groups=groups), "same number")


def check_an_unknown_reduce_type() -> None:
    raises(ValueError, lambda: xm.all_reduce("avg", ones(1)), "'avg'", "'sum'")


def check_a_reduce_type_the_dtype_lacks() -> None:
    raises(TypeError, lambda: xm.all_reduce("and", ones(1)), "integer or bool", "float32")


def check_values_that_are_no_tensors() -> None:
    raises(TypeError, lambda: xm.all_reduce("sum", 3), "int")
    raises(TypeError, lambda: xm.all_gather([ones(1), "x"]), "list of tensors")
    raises(TypeError, lambda: xm.broadcast(None), "NoneType")


def check_a_tensor_on_the_cpu() -> None:
    raises(ValueError, lambda: xm.all_reduce("sum", torch.ones(1)), "cpu", "xm.xla_device()")


def check_a_tensor_of_another_replica() -> None:
    if len(STATE.local_replicas) > 1:
        index = (xm.xla_device().index + 1) % len(STATE.local_replicas)
        foreign = torch.ones(1, device=torch.device("xla", index))
        raises(ValueError, lambda: xm.all_reduce("sum", foreign), "another replica's device")
    xm.rendezvous("after foreign")


def check_a_tensor_without_dimensions() -> None:
    raises(ValueError, lambda: xm.all_gather(ones()), "0-dimensional", "reshape(1)")


def check_a_dimension_out_of_range() -> None:
    raises(ValueError, lambda: xm.all_gather(ones(2, 2), dim=2), "dim=2", "(2, 2)")
    raises(
        ValueError,
        lambda: xm.reduce_scatter("sum", ones(4), 1.0, -2, world()),
        "scatter_dim=-2",
    )


def check_a_dimension_that_does_not_divide() -> None:
    x = ones(world() + 1)
    raises(ValueError, lambda: xm.reduce_scatter("sum", x, 1.0, 0, world()), "does not divide")
    raises(ValueError, lambda: xm.all_to_all(x, 0, 0, world()), "does not divide")


def check_a_count_that_is_not_the_groups() -> None:
    x = ones(12)
    count = world() + 1
    text = "must be the size of the group, {}".format(world())
    raises(ValueError, lambda: xm.reduce_scatter("sum", x, 1.0, 0, count), "shard_count", text)
    raises(ValueError, lambda: xm.all_to_all(x, 0, 0, count), "split_count", text)


def check_an_output_of_a_wrong_shape_or_dtype() -> None:
    x = ones(2)
    raises(ValueError, lambda: xm.all_gather(x, output=ones(2)), "`output`", str(2 * world()))
    wrong = ones(2 * world(), dtype=torch.int32)
    raises(ValueError, lambda: xm.all_gather(x, output=wrong), "float32", "int32")
    raises(ValueError, lambda: xm.all_gather([x], output=[]), "`output` has 0")


def check_a_root_that_is_not_there() -> None:
    raises(ValueError, lambda: xm.broadcast(ones(1), world()), "root_ordinal")
    raises(TypeError, lambda: xm.broadcast(ones(1), "0"), "root_ordinal")
    if world() > 2:
        groups = [list(range(0, world(), 2)), list(range(1, world(), 2))]
        text = "each group's own root"
        raises(ValueError, lambda: xm.broadcast(ones(1), (me() + 1) % 2, groups), text)


def check_pairs_that_are_no_permutation() -> None:
    raises(ValueError, lambda: xm.collective_permute(ones(1), [[0, 1], [0, 0]]), "more than once")
    raises(ValueError, lambda: xm.collective_permute(ones(1), [[0, 99]]), "99")


def check_a_path_that_is_unknown() -> None:
    import os

    xm.rendezvous("before")
    os.environ["PJRT_COMPAT_COLLECTIVES"] = "fast"
    xm.rendezvous("set")
    raises(RuntimeError, lambda: xm.all_reduce("sum", ones(1)), "'fast'", "auto, host or native")
    xm.rendezvous("seen")
    os.environ.pop("PJRT_COMPAT_COLLECTIVES", None)
    xm.rendezvous("after")


def check_shapes_that_differ_between_replicas() -> None:
    """Raised on all, and it says who passed what and where."""
    for _ in range(2):
        size = 2 if me() == 1 else 3
        raises(
            ReplicaMismatchError,
            lambda n=size: xm.all_gather(ones(n)),  # type: ignore[misc]
            "replica 1 is in xm.all_gather([float32(2,)]",
            "xm.all_gather([float32(3,)]",
            "checks_errors.py",
        )
        xm.rendezvous("after shapes")
    still_works()


def check_dtypes_that_differ_between_replicas() -> None:
    dtype = torch.int32 if me() == 0 else torch.float32
    text = "replica 0 is in xm.all_reduce([int32(2,)]"
    raises(ReplicaMismatchError, lambda: xm.all_reduce("sum", ones(2, dtype=dtype)), text)
    xm.rendezvous("after dtypes")
    still_works()


def check_operations_that_differ_between_replicas() -> None:
    if me() == 0:
        raises(ReplicaMismatchError, lambda: xm.all_gather(ones(2)), "all_gather", "all_reduce")
    else:
        raises(ReplicaMismatchError, lambda: xm.all_reduce("sum", ones(2)), "replica 0 is in")
    xm.rendezvous("after operations")
    still_works()


def check_reduce_types_and_groups_that_differ_between_replicas() -> None:
    kind = "sum" if me() else "max"
    raises(ReplicaMismatchError, lambda: xm.all_reduce(kind, ones(2)), "'max'", "'sum'")
    xm.rendezvous("after types")
    groups = [[o] for o in range(world())] if me() == 0 else None
    raises(ReplicaMismatchError, lambda: xm.all_reduce("sum", ones(2), groups=groups), "groups=")
    xm.rendezvous("after groups")
    still_works()


def check_a_payload_of_a_wrong_type() -> None:
    raises(TypeError, lambda: xm.rendezvous("t", 3), "payload", "int", "mesh_reduce")
    raises(TypeError, lambda: xm.rendezvous(3), "tag must be str")


def check_replicas_that_are_unknown_or_lack_the_caller() -> None:
    raises(ValueError, lambda: xm.rendezvous("t", b"", [me(), world()]), str(world()))
    others = [o for o in range(world()) if o != me()]
    raises(ValueError, lambda: xm.rendezvous("t", b"", others), "caller's ordinal")


def check_one_tag_met_with_different_replicas() -> None:
    """An error on all of them, as from XRT's mesh service."""
    if world() == 2:
        return  # Both lists would name everybody.
    replicas = [0, 1] if me() == 0 else []
    raises(
        ReplicaMismatchError,
        lambda: xm.rendezvous("torn", b"", replicas),
        "'torn'",
        "different `replicas`",
        "[0, 1]",
    )
    xm.rendezvous("after torn")
    still_works()
