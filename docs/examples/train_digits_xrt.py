"""Trains a small CNN on scikit-learn's handwritten digits with several replicas.

Written as for torch_xla 1.12 and its XRT runtime; nothing in it knows pjrt_compat.

    pjrt-compat run docs/examples/train_digits_xrt.py --num_cores 4
"""

import argparse
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


# Every replica starts from the same weights, without a broadcast.
torch.manual_seed(1)
WRAPPED_MODEL = xmp.MpModelWrapper(Net())
SERIAL_EXEC = xmp.MpSerialExecutor()


def load_datasets():
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def show_progress(flags, epoch, step, steps, loss, rate):
    done = (epoch - 1) * steps + step
    filled = int(30 * done / (flags.num_epochs * steps))
    text = "[{}{}] epoch {}/{} loss {:.4f} {:6.0f} images/s".format(
        "#" * filled, "." * (30 - filled), epoch, flags.num_epochs, loss, rate
    )
    if xm.is_master_ordinal():
        print(text, end="\r" if sys.stdout.isatty() else "\n", flush=True)


def train_digits(flags):
    torch.manual_seed(1)
    train_dataset, test_dataset = SERIAL_EXEC.run(load_datasets)
    train_sampler = DistributedSampler(
        train_dataset,
        num_replicas=xm.xrt_world_size(),
        rank=xm.get_ordinal(),
        shuffle=True,
    )
    test_sampler = DistributedSampler(
        test_dataset, num_replicas=xm.xrt_world_size(), rank=xm.get_ordinal(), shuffle=False
    )
    train_loader = DataLoader(
        train_dataset,
        batch_size=flags.batch_size,
        sampler=train_sampler,
        num_workers=flags.num_workers,
        drop_last=True,
    )
    test_loader = DataLoader(test_dataset, batch_size=45, sampler=test_sampler)

    device = xm.xla_device()
    model = WRAPPED_MODEL.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=flags.lr, momentum=0.9)
    train_device_loader = pl.MpDeviceLoader(train_loader, device)
    test_device_loader = pl.MpDeviceLoader(test_loader, device)
    steps = len(train_loader)

    def train_epoch(epoch):
        tracker = xm.RateTracker()
        model.train()
        for step, (data, target) in enumerate(train_device_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(flags.batch_size)
            if (step + 1) % flags.log_steps == 0 or step + 1 == steps:
                xm.add_step_closure(
                    lambda step, loss: show_progress(
                        flags,
                        epoch,
                        step + 1,
                        steps,
                        loss.item(),
                        tracker.global_rate() * xm.xrt_world_size(),
                    ),
                    args=(step, loss),
                )
        return tracker.global_rate()

    def test():
        model.eval()
        correct, total = 0, 0
        with torch.no_grad():
            for data, target in test_device_loader:
                pred = model(data).argmax(dim=1)
                correct += pred.eq(target).sum().item()
                total += target.size(0)
        correct = xm.mesh_reduce("test_correct", correct, sum)
        total = xm.mesh_reduce("test_total", total, sum)
        return 100.0 * correct / total

    started = time.time()
    accuracy, rates = 0.0, []
    for epoch in range(1, flags.num_epochs + 1):
        train_sampler.set_epoch(epoch)
        rates.append(train_epoch(epoch))
        accuracy = test()
    rate = xm.mesh_reduce("rate", float(np.median(rates)), sum)
    if flags.save:
        xm.rendezvous("before_save")
        xm.save(model.state_dict(), flags.save)
        state = torch.load(flags.save)
        same = all(torch.equal(v.cpu(), state[k]) for k, v in model.state_dict().items())
        agreed = xm.mesh_reduce("agreed", same, all)
        assert agreed, "the replicas ended with different weights"
    xm.master_print(
        "\naccuracy {:.2f} %, {:.0f} images/s, {} replica(s), {} epochs in {:.1f} s".format(
            accuracy, rate, xm.xrt_world_size(), flags.num_epochs, time.time() - started
        ),
        flush=True,
    )
    return accuracy


def _mp_fn(index, flags):
    torch.set_default_dtype(torch.float32)
    accuracy = train_digits(flags)
    if accuracy < flags.target_accuracy:
        xm.master_print(
            "accuracy {} is below the target {}".format(accuracy, flags.target_accuracy),
            fd=sys.stderr,
        )
        sys.exit(21)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_cores", type=int, default=8)
    parser.add_argument("--num_epochs", type=int, default=15)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.04)
    parser.add_argument("--log_steps", type=int, default=10)
    parser.add_argument("--target_accuracy", type=float, default=95.0)
    parser.add_argument("--save", default="")
    FLAGS = parser.parse_args()
    xmp.spawn(_mp_fn, args=(FLAGS,), nprocs=FLAGS.num_cores)
