"""``torch_xla.utils.serialization`` as XRT had it."""

from __future__ import annotations

from typing import Any

from pjrt_compat.replicas import runtime
from pjrt_compat.shims import xla_model


def save(data: Any, path: str, master_only: bool = True, global_master: bool = False) -> None:
    """Saves ``data``, each tensor in a file of its own, and waits for all replicas.

    Args and semantics are those of ``xm.save``. XRT ended with a rendezvous (v1.12.0
    ``torch_xla/utils/serialization.py`` ``save``); PJRT releases do not.
    """
    runtime.native("torch_xla.utils.serialization:save")(
        data, path, master_only=master_only, global_master=global_master
    )
    xla_model.rendezvous("torch_xla.utils.serialization.save")
