"""Imported by the fork server, so that the replicas it forks have torch_xla already."""

import torch_xla  # noqa: F401
import torch_xla.distributed.parallel_loader  # noqa: F401
import torch_xla.distributed.xla_multiprocessing  # noqa: F401

import pjrt_compat  # noqa: F401  (activates before torch_xla)

import pjrt_compat.replicas.launch  # noqa: F401  isort: skip
