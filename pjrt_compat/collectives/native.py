"""Collectives as XLA operations in the graph, for devices whose runtime has them.

Each function hands over to torch_xla's own implementation, with the keywords that this release
knows.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import torch

from pjrt_compat.collectives.contract import Call, Groups, Tensors, native


def _present(**keywords: Any) -> Dict[str, Any]:
    """Keywords of later releases, passed on only when they were given."""
    return {name: value for name, value in keywords.items() if value is not None}


def all_reduce(
    reduce_type: str, inputs: Tensors, scale: float, groups: Groups, pin_layout: bool
) -> Tensors:
    result: Tensors = native("all_reduce")(
        reduce_type, inputs, scale=scale, groups=groups, pin_layout=pin_layout
    )
    return result


def all_gather(
    value: torch.Tensor,
    dim: int,
    groups: Groups,
    output: Optional[torch.Tensor],
    pin_layout: bool,
    channel_id: Optional[int],
    use_global_device_ids: Optional[bool],
) -> torch.Tensor:
    later = _present(channel_id=channel_id, use_global_device_ids=use_global_device_ids)
    result: torch.Tensor = native("all_gather")(
        value, dim=dim, groups=groups, output=output, pin_layout=pin_layout, **later
    )
    return result


def reduce_scatter(
    reduce_type: str,
    value: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups,
    output: Optional[torch.Tensor],
    pin_layout: bool,
    channel_id: Optional[int],
    use_global_device_ids: Optional[bool],
) -> torch.Tensor:
    later = _present(channel_id=channel_id, use_global_device_ids=use_global_device_ids)
    result: torch.Tensor = native("reduce_scatter")(
        reduce_type,
        value,
        scale,
        scatter_dim,
        shard_count,
        groups=groups,
        output=output,
        pin_layout=pin_layout,
        **later,
    )
    return result


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups,
    pin_layout: bool,
) -> torch.Tensor:
    result: torch.Tensor = native("all_to_all")(
        value,
        split_dimension,
        concat_dimension,
        split_count,
        groups=groups,
        pin_layout=pin_layout,
    )
    return result


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    result: torch.Tensor = native("collective_permute")(value, pairs)
    return result


def broadcast(
    call: Call, tensors: List[torch.Tensor], root: int, groups: Groups, pin_layout: bool
) -> List[torch.Tensor]:
    """The root's values: everyone else adds nothing.

    Receivers select a neutral element instead of multiplying by zero, so a NaN of theirs does not
    survive. It is -0.0 for floating point, because x + -0.0 is x for every x. Whether a replica is
    the root arrives as data: the graph is the same on all of them.
    """
    contributions = []
    with torch.no_grad():
        for tensor in tensors:
            value = tensor.to(torch.int32) if tensor.dtype == torch.bool else tensor.detach()
            neutral = -0.0 if value.is_floating_point() or value.is_complex() else 0
            is_root = torch.tensor(call.ordinal == root).to(tensor.device)
            contributions.append(torch.where(is_root, value, torch.full_like(value, neutral)))
    native("all_reduce")("sum", contributions, groups=groups, pin_layout=pin_layout)
    return [sent.to(tensor.dtype) for sent, tensor in zip(contributions, tensors)]
