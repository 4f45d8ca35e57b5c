"""Random collectives, drawn alike on every replica, against a model in NumPy.

The model reduces from left to right in ascending order of ordinal, in the tensor's own dtype, so
results must agree bit for bit. Two things are left open: the bits of a NaN that arithmetic makes,
and the sign of a zero that min and max choose. Products of complex numbers are compared closely
only, because compilers contract them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch_xla.core.xla_model as xm

FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]
DTYPES = [*FLOATS, *INTEGERS, "bool", "complex64"]
OPERATIONS = ["reduce", "gather", "scatter", "exchange", "permute", "broadcast"]
CASES = int(os.environ.get("COLLECTIVE_CASES", "200"))
# Where each replica leaves a digest of all results, for comparison between layouts.
DIGESTS = os.environ.get("COLLECTIVE_DIGESTS", "")

Groups = Optional[List[List[int]]]


def me() -> int:
    return xm.get_ordinal()


def world() -> int:
    return xm.xrt_world_size()


# -- numbers ---------------------------------------------------------------------------------------
# NumPy has no bfloat16: the model keeps its values in float32 and rounds after every operation.


def storage(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as ``dtype`` holds them; to nearest even for bfloat16."""
    values = np.asarray(values).astype(storage(dtype))
    if dtype != "bfloat16":
        return values
    bits = np.atleast_1d(values).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    kept = np.where(np.isnan(np.atleast_1d(values)), bits & np.uint32(0xFFFF0000), kept)
    return kept.astype(np.uint32).view(np.float32).reshape(values.shape)


def combined(reduce_type: str, dtype: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if dtype == "bool":
        either = reduce_type in ("sum", "or", "max")
        return np.asarray(np.logical_or(a, b) if either else np.logical_and(a, b))
    functions: Dict[str, Any] = {
        "sum": np.add,
        "mul": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
    }
    with np.errstate(all="ignore"):
        return rounded(functions[reduce_type](a, b), dtype)


def reduced(reduce_type: str, dtype: str, values: Sequence[np.ndarray], scale: float) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = combined(reduce_type, dtype, total, value)
    if scale == 1.0:
        return total
    with np.errstate(all="ignore"):
        return rounded(total * rounded(np.array(scale), dtype), dtype)


def to_torch(values: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(values, order="C"))
    return tensor.to(torch.bfloat16) if dtype == "bfloat16" else tensor


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def random_values(random: np.random.RandomState, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Values of one replica; a third of the floats' arrays hold NaN, infinities and both zeros."""
    if dtype == "bool":
        return np.asarray(random.rand(*shape) < 0.5)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        values = random.randint(max(limits.min, -99), min(limits.max, 99), size=shape)
        return np.asarray(values).astype(dtype)
    values = np.asarray(random.randn(*shape))
    if dtype == "complex64":
        return np.asarray(values + 1j * random.randn(*shape)).astype(dtype)
    if random.rand() < 0.33:
        special = random.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40], size=shape)
        values = np.where(random.rand(*shape) < 0.3, special, values)
    return rounded(values, dtype)


def agree(result: torch.Tensor, expected: np.ndarray, dtype: str, reduce_type: str) -> None:
    """``reduce_type`` is empty where values are only moved."""
    assert str(result.dtype) == "torch." + dtype, (result.dtype, dtype)
    assert tuple(result.shape) == expected.shape, (tuple(result.shape), expected.shape)
    found = to_numpy(result)
    if dtype == "complex64" and reduce_type == "mul":
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        return
    np.testing.assert_array_equal(found, expected)
    if dtype in FLOATS and reduce_type not in ("min", "max"):
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


# -- drawing ---------------------------------------------------------------------------------------


def random_groups(random: np.random.RandomState, even: bool) -> Groups:
    """None, or a partition in random order, into groups of one size where these must be."""
    if random.rand() < 0.4:
        return None
    size = world()
    order = [int(o) for o in random.permutation(size)]
    if even:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        length = int(random.choice(divisors))
        return [order[i : i + length] for i in range(0, size, length)]
    cuts = sorted({0, size, *(int(c) for c in random.randint(0, size, size=2))})
    return [order[a:b] for a, b in zip(cuts[:-1], cuts[1:])]


def random_shape(random: np.random.RandomState, least_dims: int) -> List[int]:
    kind = random.rand()
    dims = int(random.randint(least_dims, 4))
    shape = [int(n) for n in random.randint(1, 5, size=dims)]
    if shape and kind < 0.08:
        shape[int(random.randint(len(shape)))] = 0
    elif shape and kind < 0.2:
        # About the length above which replicas share the work, and far above it.
        shape[0] = int(random.choice([1023, 2048, 4097, 8191, 30011]))
    return shape


def on_device(random: np.random.RandomState, values: np.ndarray, dtype: str) -> torch.Tensor:
    """The values on this replica's device, sometimes as a view that is not contiguous."""
    device = xm.xla_device()
    tensor = to_torch(values, dtype)
    if random.rand() < 0.15 and values.ndim > 1:
        return tensor.transpose(0, 1).contiguous().to(device).transpose(0, 1)
    return tensor.to(device)


class Drawn:
    """What all cases have: a group, a dtype, values of all replicas."""

    def __init__(self, random: np.random.RandomState) -> None:
        self.random = random
        self.operation = str(random.choice(OPERATIONS))
        self.groups = random_groups(random, self.operation in ("gather", "scatter", "exchange"))
        self.members = next(
            (group for group in self.groups or [] if me() in group), list(range(world()))
        )
        self.dtype = str(random.choice(DTYPES))
        self.reduce_type = str(random.choice(self.reduce_types()))
        self.scale = 1.0
        if random.rand() < 0.5 and self.dtype != "bool":
            self.scale = float(random.choice([0.5, 2.0, 1.0 / world()]))
        # Every replica draws for every group, so that all stay in step.
        self.root_index = int(random.randint(1 << 20))

    def reduce_types(self) -> List[str]:
        if self.dtype == "complex64":
            return ["sum", "mul"]
        return ["sum", "mul", "min", "max"] + ([] if self.dtype in FLOATS else ["and", "or"])

    def values(self, shape: Sequence[int]) -> List[np.ndarray]:
        return [random_values(self.random, shape, self.dtype) for _ in range(world())]

    def several(self, least_dims: int, factor_dim: bool = False) -> Tuple[List[Any], int]:
        """Values of one to three tensors, and a dimension they all have.

        With ``factor_dim`` that dimension splits over the group.
        """
        dim = int(self.random.randint(-max(least_dims, 1), max(least_dims, 1)))
        found = []
        for _ in range(int(self.random.choice([1, 1, 2, 3]))):
            shape = random_shape(self.random, least_dims)
            if factor_dim:
                shape[dim] *= len(self.members)
            found.append(self.values(shape))
        return found, dim

    def check(self, results: Sequence[torch.Tensor], expected: Sequence[np.ndarray]) -> None:
        moved = self.operation not in ("reduce", "scatter")
        assert len(results) == len(expected)
        for result, values in zip(results, expected):
            agree(result, values, self.dtype, "" if moved else self.reduce_type)

    def __str__(self) -> str:
        return "{} of {}, {}, scale {}, groups {}".format(
            self.operation, self.dtype, self.reduce_type, self.scale, self.groups
        )


def run_reduce(case: Drawn) -> List[torch.Tensor]:
    tensors, _ = case.several(0)
    inputs = [on_device(case.random, values[me()], case.dtype) for values in tensors]
    members = sorted(case.members)
    expected = [
        reduced(case.reduce_type, case.dtype, [v[o] for o in members], case.scale) for v in tensors
    ]
    if len(inputs) == 1:
        result = xm.all_reduce(case.reduce_type, inputs[0], case.scale, case.groups)
        np.testing.assert_array_equal(to_numpy(inputs[0]), tensors[0][me()])
        results = [result]
    else:
        assert xm.all_reduce(case.reduce_type, inputs, case.scale, groups=case.groups) is inputs
        results = inputs
    case.check(results, expected)
    return results


def call_with_lists(case: Drawn, function: Any, inputs: List[Any], shapes: Any) -> List[Any]:
    """Calls for one tensor or a list, sometimes into an output."""
    single = len(inputs) == 1
    if case.random.rand() < 0.3:
        like = inputs[0]
        outputs = [torch.zeros(s, dtype=like.dtype, device=like.device) for s in shapes]
        returned = function(inputs[0] if single else inputs, outputs[0] if single else outputs)
        for a, b in zip([returned] if single else returned, outputs):
            assert a is b
        return outputs
    result = function(inputs[0] if single else inputs, None)
    return [result] if single else list(result)


def run_gather(case: Drawn) -> List[torch.Tensor]:
    tensors, dim = case.several(1)
    inputs = [on_device(case.random, values[me()], case.dtype) for values in tensors]
    expected = [np.concatenate([v[o] for o in case.members], dim) for v in tensors]
    pin_layout = bool(case.random.rand() < 0.5)
    results = call_with_lists(
        case,
        lambda value, output: xm.all_gather(
            value, dim, groups=case.groups, output=output, pin_layout=pin_layout
        ),
        inputs,
        [e.shape for e in expected],
    )
    case.check(results, expected)
    return results


def run_scatter(case: Drawn) -> List[torch.Tensor]:
    size = len(case.members)
    tensors, dim = case.several(1, factor_dim=True)
    inputs = [on_device(case.random, values[me()], case.dtype) for values in tensors]
    position = case.members.index(me())
    expected = []
    for values in tensors:
        ordered = [values[o] for o in sorted(case.members)]
        total = reduced(case.reduce_type, case.dtype, ordered, case.scale)
        expected.append(np.split(total, size, dim)[position])
    results = call_with_lists(
        case,
        lambda value, output: xm.reduce_scatter(
            case.reduce_type, value, case.scale, dim, size, groups=case.groups, output=output
        ),
        inputs,
        [e.shape for e in expected],
    )
    case.check(results, expected)
    return results


def run_exchange(case: Drawn) -> List[torch.Tensor]:
    size = len(case.members)
    tensors, dim = case.several(2, factor_dim=True)
    values = tensors[0]
    target = int(case.random.randint(-2, 2))
    x = on_device(case.random, values[me()], case.dtype)
    position = case.members.index(me())
    parts = [np.split(values[o], size, dim)[position] for o in case.members]
    result = xm.all_to_all(x, dim, target, size, case.groups)
    case.check([result], [np.concatenate(parts, target)])
    return [result]


def run_permute(case: Drawn) -> List[torch.Tensor]:
    tensors, _ = case.several(0)
    values = tensors[0]
    count = int(case.random.randint(0, world() + 1))
    sources = case.random.permutation(world())[:count]
    targets = case.random.permutation(world())[:count]
    x = on_device(case.random, values[me()], case.dtype)
    result = xm.collective_permute(x, [[int(s), int(t)] for s, t in zip(sources, targets)])
    received = [values[s] for s, t in zip(sources, targets) if t == me()]
    case.check([result], received or [np.zeros_like(values[0])])
    return [result]


def run_broadcast(case: Drawn) -> List[torch.Tensor]:
    tensors, _ = case.several(0)
    inputs = [on_device(case.random, values[me()], case.dtype) for values in tensors]
    root = case.members[case.root_index % len(case.members)]
    expected = [values[root] for values in tensors]
    if len(inputs) == 1:
        results = [xm.broadcast(inputs[0], root, case.groups)]
        np.testing.assert_array_equal(to_numpy(inputs[0]), tensors[0][me()])
    else:
        assert xm.broadcast(inputs, root_ordinal=root, groups=case.groups) is inputs
        results = inputs
    case.check(results, expected)
    return results


RUNNERS = {
    "reduce": run_reduce,
    "gather": run_gather,
    "scatter": run_scatter,
    "exchange": run_exchange,
    "permute": run_permute,
    "broadcast": run_broadcast,
}


def digest_of(results: Sequence[torch.Tensor]) -> bytes:
    together = hashlib.sha256()
    for tensor in results:
        together.update(to_numpy(tensor).tobytes())
    return together.digest()


def run_cases(seed: int, count: int) -> List[str]:
    """Digests of the results; a case that fails does not stop those that follow."""
    failures, digests = [], []
    for number in range(count):
        # A generator per case: a failure on one replica leaves it in step with the others.
        case = Drawn(np.random.RandomState([seed, world(), number]))
        try:
            results = RUNNERS[case.operation](case)
            digests.append(hashlib.sha256(digest_of(results)).hexdigest())
        except AssertionError as error:
            failures.append("case {} ({}): {}".format(number, case, error))
    assert not failures, "{} of {} cases failed, the first:\n{}".format(
        len(failures), count, "\n".join(failures[:3])
    )
    return digests


def check_random_collectives_agree_with_the_model() -> None:
    # Eight replicas on two cores take their time.
    digests = run_cases(1, CASES if world() < 8 else CASES // 2)
    if DIGESTS:
        (Path(DIGESTS) / str(me())).write_text("\n".join(digests))


def check_a_second_run_gives_the_same_bits() -> None:
    count = min(CASES, 30)
    assert run_cases(2, count) == run_cases(2, count)
