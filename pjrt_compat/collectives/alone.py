"""Collectives of a program that runs alone: a world of one replica.

What XRT did without replication (v1.12.0 ``torch_xla/core/xla_model.py``): nothing is exchanged,
and ``all_reduce`` applies no scale.
"""

from __future__ import annotations

from typing import List, Sequence

import torch


def same(tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Copies of the tensors: the result of a gather, an exchange or a broadcast with oneself."""
    return [tensor.detach().clone() for tensor in tensors]


def scaled(tensors: Sequence[torch.Tensor], scale: float) -> List[torch.Tensor]:
    """The result of ``reduce_scatter``, which scales even in a world of one."""
    copies = same(tensors)
    return copies if scale == 1.0 else [copy.mul_(scale) for copy in copies]


def permuted(tensor: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """What a replica that sends to itself receives, or zeros."""
    return same([tensor])[0] if pairs else torch.zeros_like(tensor)
