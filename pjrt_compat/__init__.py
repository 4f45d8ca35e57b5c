"""pjrt_compat: run code written for the XRT runtime of PyTorch/XLA on PJRT, unmodified.

``import pjrt_compat`` before torch_xla is all a program needs. See the documentation for the other
routes (``pjrt-compat run``, ``PJRT_COMPAT=1`` with a sitecustomize).
"""

from __future__ import annotations

from pjrt_compat import bootstrap
from pjrt_compat.state import STATE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, List, Optional, Union

    import torch

    from pjrt_compat.patching.status import Status

__version__ = "0.1.0"

__all__ = [
    "PjrtCompatError",
    "PjrtCompatWarning",
    "activate",
    "broadcast",
    "deactivate",
    "get_original",
    "is_active",
    "is_patched",
    "status",
]


def activate(
    *,
    only: Optional[Iterable[str]] = None,
    skip: Optional[Iterable[str]] = None,
    strict: bool = False,
) -> None:
    """Applies the patches now, or when torch_xla is imported.

    Importing the package has done this already unless ``PJRT_COMPAT=0``; call it to narrow the
    choice of patches or to activate again after ``deactivate()``.

    Args:
      only: ids or id prefixes of the patches to apply; None means all.
      skip: ids or id prefixes of the patches to leave out.
      strict: raise ``PatchTargetError`` when a patch cannot be applied.

    Raises:
      PjrtCompatError: ``only`` or ``skip`` names no patch, or ``PJRT_COMPAT=0`` is set.
    """
    from pjrt_compat import patching

    patching.activate(only=only, skip=skip, strict=strict)


def deactivate() -> None:
    """Puts every native object back, in reverse order, and stops activating child processes."""
    from pjrt_compat import patching

    patching.deactivate()


def is_active() -> bool:
    """Whether the shim was asked for and not taken back."""
    return STATE.active


def is_patched(patch_id: str) -> bool:
    """Whether the object installed by the patch ``patch_id`` is in place right now.

    Raises:
      PjrtCompatError: there is no such patch.
    """
    from pjrt_compat import patching

    return patching.is_patched(patch_id)


def get_original(target: str) -> Any:
    """The native object behind a patched name.

    Args:
      target: ``module:attribute``, for example ``torch_xla.core.xla_model:all_reduce``.

    Raises:
      PjrtCompatError: nothing of ours is installed there, or the name did not exist natively.
    """
    from pjrt_compat import patching

    return patching.get_original(target)


def status() -> Status:
    """The state of every patch, re-checked by identity, with versions and topology."""
    from pjrt_compat.patching.status import collect_status

    return collect_status()


def broadcast(
    tensor_or_list: Union[torch.Tensor, List[torch.Tensor]],
    root_ordinal: int = 0,
    groups: Optional[List[List[int]]] = None,
    pin_layout: bool = True,
) -> Union[torch.Tensor, List[torch.Tensor]]:
    """``xm.broadcast``: copies the root replica's values to the others.

    See :func:`pjrt_compat.shims.xla_collectives.broadcast`.
    """
    from pjrt_compat.shims import xla_collectives

    return xla_collectives.broadcast(tensor_or_list, root_ordinal, groups, pin_layout)


def __getattr__(name: str) -> Any:
    if name in ("PjrtCompatError", "PjrtCompatWarning"):
        from pjrt_compat import errors

        return getattr(errors, name)
    raise AttributeError("module {!r} has no attribute {!r}".format(__name__, name))


bootstrap.install("import")
