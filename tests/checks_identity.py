"""Checks of identity, devices and environment, run on every replica."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List

import torch
import torch.utils.data
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr

from pjrt_compat.state import STATE

MODEL = xmp.MpModelWrapper(torch.nn.Linear(2, 2))


def mine() -> Any:
    """The replica as the launcher made it, found without the functions under test."""
    if STATE.process_replica is not None:
        return STATE.process_replica
    by_thread = {t: o for o, t in STATE.meeting_place.threads.items()}
    ordinal = by_thread[threading.get_ident()]
    return next(r for r in STATE.local_replicas if r.ordinal == ordinal)


def check_contract_16_ordinals_and_world_size_are_those_of_the_replica() -> None:
    replica = mine()
    assert xm.get_ordinal() == xm.get_ordinal(defval=-1) == replica.ordinal
    assert xm.xrt_world_size() == xm.xrt_world_size(defval=-1) == replica.world_size
    assert xm.get_local_ordinal() == xm.get_local_ordinal(defval=-1) == replica.local_ordinal
    assert xm.is_master_ordinal() == xm.is_master_ordinal(local=False) == (replica.ordinal == 0)


def check_the_modern_names_agree() -> None:
    replica = mine()
    assert xr.global_ordinal() == replica.ordinal
    assert xr.world_size() == replica.world_size
    assert xr.local_ordinal() == replica.local_ordinal


def check_all_ordinals_exist_once() -> None:
    ordinals = xm.mesh_reduce("ordinals", xm.get_ordinal(), list)
    assert ordinals == list(range(xm.xrt_world_size()))


def check_contract_20_the_bare_device_is_the_replicas_own() -> None:
    device = xm.xla_device()
    assert device == torch.device("xla", mine().device_index)
    assert torch_xla._XLAC._xla_get_default_device() == str(device)
    assert xm.get_xla_supported_devices() == [str(device)]
    assert xm.xla_device(device.index) == device
    tensor = torch.ones(2, device=device)
    assert tensor.device == device


def check_contract_21_hardware_names_are_those_of_xrt() -> None:
    device = xm.xla_device()
    assert xm.xla_device_hw(device) == "CPU"
    assert xm.xla_real_devices([device]) == ["CPU:{}".format(xm.get_ordinal())]
    assert xm.xla_device(devkind="CPU") == device
    assert xm.get_xla_supported_devices("TPU") is None
    try:
        xm.xla_device(devkind="TPU")
        raise RuntimeError("a device of a kind that is not there")
    except AssertionError as error:
        assert "No devices of TPU kind" in str(error)


def check_another_replicas_device_is_refused() -> None:
    wrong = mine().device_index + 1
    try:
        xm.xla_device(wrong)
        raise RuntimeError("xla:{} was given".format(wrong))
    except ValueError as error:
        assert "xla:{}".format(mine().device_index) in str(error)
        assert "without arguments" in str(error)


def check_set_replication_with_ones_own_device_is_accepted() -> None:
    device = xm.xla_device()
    xm.set_replication(device, [device])
    assert xm.xla_device() == device


def check_contract_19_environment_variables_of_xrt_are_the_replicas_own() -> None:
    replica = mine()
    assert os.environ["XRT_SHARD_ORDINAL"] == str(replica.ordinal)
    assert os.environ.get(xenv.LOCAL_ORDINAL) == str(replica.local_ordinal)
    assert os.getenv("XRT_SHARD_WORLD_SIZE") == str(replica.world_size)
    assert os.environ[xenv.MP_DEVICE] == "CPU:{}".format(replica.ordinal)
    assert os.environ["XRT_HOST_WORLD_SIZE"] == "1"
    assert os.environ["PJRT_LOCAL_PROCESS_RANK"] == str(replica.process)
    assert os.environ["PJRT_LOCAL_PROCESS_COUNT"] == str(replica.processes)
    copy = dict(os.environ)
    assert copy["XRT_SHARD_ORDINAL"] == str(replica.ordinal)
    assert "XRT_SHARD_ORDINAL" in os.environ


def check_what_a_replica_writes_to_its_variables_is_its_own() -> None:
    os.environ["XRT_LOCAL_WORKER"] = "worker:{}".format(xm.get_ordinal())
    xm.rendezvous("written")
    assert os.environ["XRT_LOCAL_WORKER"] == "worker:{}".format(xm.get_ordinal())


def check_a_subprocess_gets_the_replicas_variables_when_handed_a_copy() -> None:
    out = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.environ['XRT_SHARD_ORDINAL'])"],
        env=os.environ.copy(),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    assert int(out) == xm.get_ordinal()


def seen_here() -> Dict[str, Any]:
    return {
        "ordinal": xm.get_ordinal(),
        "local": xm.get_local_ordinal(),
        "world": xm.xrt_world_size(),
        "device": str(xm.xla_device()),
    }


def in_thread(function: Any) -> Any:
    found: List[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    return found[0]


def check_helper_threads_belong_to_the_replica_that_started_them() -> None:
    expected = seen_here()
    assert in_thread(seen_here) == expected
    assert in_thread(lambda: in_thread(seen_here)) == expected
    default = in_thread(torch_xla._XLAC._xla_get_default_device)
    assert default == expected["device"]


def check_a_thread_subclass_with_its_own_run_belongs_to_the_replica() -> None:
    found: List[Any] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            found.append(seen_here())

    worker = Worker()
    worker.start()
    worker.join(60)
    assert found == [seen_here()]


def check_work_given_to_a_thread_pool_belongs_to_the_replica_that_gave_it() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(seen_here).result() for _ in range(4)]
    assert results == [seen_here()] * 4
    # One pool for all replicas of the process: each piece of work keeps its own identity.
    assert SHARED_POOL.submit(seen_here).result() == seen_here()


SHARED_POOL = ThreadPoolExecutor(1)


class Remember(torch.autograd.Function):
    seen: Dict[int, List[int]] = {}

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.ordinal = xm.get_ordinal()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Remember.seen.setdefault(ctx.ordinal, []).append(xm.get_ordinal())
        assert xm.xla_device() == gradient.device
        return gradient * 2


def check_contract_13_backward_runs_with_the_ordinal_of_the_forward() -> None:
    """Collectives in autograd functions ask for the ordinal in backward."""

    def differentiate() -> float:
        x = torch.ones(3, device=xm.xla_device(), requires_grad=True)
        Remember.apply(x).sum().backward()
        return float(x.grad.sum())  # type: ignore[union-attr]

    Remember.seen[xm.get_ordinal()] = []
    assert differentiate() == 6.0
    assert in_thread(differentiate) == 6.0
    assert Remember.seen[xm.get_ordinal()] == [xm.get_ordinal()] * 2


def check_contract_31_step_closures_run_as_the_replica() -> None:
    """Step closures see the replica's context, also when run asynchronously."""
    found: List[Any] = []
    done = threading.Event()
    x = torch.ones(2, device=xm.xla_device()) * 3

    def closure(value: torch.Tensor) -> None:
        found.append((seen_here(), float(value.sum())))

    def last(value: torch.Tensor) -> None:
        closure(value)
        done.set()

    xm.add_step_closure(closure, args=(x,))
    xm.add_step_closure(last, args=(x,), run_async=True)
    xm.mark_step()
    assert done.wait(60)
    assert found == [(seen_here(), 6.0)] * 2


class Ordinals(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([xm.get_ordinal(), xm.xrt_world_size(), xm.get_local_ordinal()])


def check_contract_16_loader_workers_know_their_replica() -> None:
    """Ordinals are asked in DataLoader workers, without a runtime."""
    expected = [xm.get_ordinal(), xm.xrt_world_size(), xm.get_local_ordinal()]
    for context in (None, "fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Ordinals(), batch_size=2, num_workers=1, multiprocessing_context=context
        )
        assert [batch.tolist() for batch in loader] == [[expected, expected]] * 2, context


def check_contract_29_device_loaders_deliver_to_the_replicas_device() -> None:
    """ParallelLoader and MpDeviceLoader work in a replica."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(8, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    device = xm.xla_device()
    batches = [b[0] for b in pl.ParallelLoader(loader, [device]).per_device_loader(device)]
    assert [b.device for b in batches] == [device] * 4
    again = [b[0].cpu() for b in pl.MpDeviceLoader(loader, device)]
    assert torch.equal(torch.cat(again), torch.arange(8.0).reshape(8, 1))


def check_contract_24_a_wrapped_model_is_private_to_the_replica() -> None:
    """Each replica trains its own copy of the wrapped model."""
    model = MODEL.to(xm.xla_device())
    assert {p.device for p in model.parameters()} == {xm.xla_device()}
    with torch.no_grad():
        model.weight.fill_(float(xm.get_ordinal()))
    xm.rendezvous("filled")
    assert MODEL.to(xm.xla_device()) is model
    assert model.weight.cpu().unique().tolist() == [float(xm.get_ordinal())]


def check_contract_24_the_serial_executor_runs_one_replica_at_a_time() -> None:
    """Every replica runs the function and gets its own result."""
    assert xmp.MpSerialExecutor().run(xm.get_ordinal) == xm.get_ordinal()


def check_contract_18_master_print_prints_on_the_master_only() -> None:
    import io

    stream = io.StringIO()
    xm.master_print("a", 1, fd=stream, flush=True)
    assert stream.getvalue() == ("a 1\n" if xm.get_ordinal() == 0 else "")


def check_contract_8_names_bound_by_other_modules_are_ours() -> None:
    """Frameworks hand xm.save over as a callback, or bind it by name."""
    from torch_xla.core.xla_model import get_ordinal, save

    assert save is xm.save and get_ordinal is xm.get_ordinal
    assert save.__module__.startswith("pjrt_compat")


def check_contract_17_the_index_is_the_ordinal_and_on_one_host_the_local_one() -> None:
    assert mine().ordinal == mine().local_ordinal == xm.get_local_ordinal()


def check_contract_28_one_seed_gives_all_processes_the_same_weights() -> None:
    """Replicas that are threads share torch's generator, so they draw one after the other here."""

    def draw() -> torch.Tensor:
        torch.manual_seed(1)
        return torch.nn.Linear(4, 4).weight.detach()

    for turn in range(xm.xrt_world_size()):
        if turn == xm.get_ordinal() or not mine().shares_process:
            weight = draw()
        xm.rendezvous("turn")
    weights = xm.mesh_reduce("weights", weight, list)
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert not torch.equal(torch.rand(3), torch.rand(3))
