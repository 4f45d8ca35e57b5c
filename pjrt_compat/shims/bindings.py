"""Functions that old programs call on ``torch_xla._XLAC`` and that are gone."""

from __future__ import annotations

from pjrt_compat.replicas import runtime


def _xla_set_use_full_mat_mul_precision(use_full_mat_mul_precision: bool = True) -> None:
    """Chooses full float32 precision of matrix multiplications, or the device's default.

    XRT: ``_XLAC._xla_set_use_full_mat_mul_precision`` (v1.12.0
    ``torch_xla/csrc/init_python_bindings.cpp``), replaced in 2.5 by ``_xla_set_mat_mul_precision``.
    """
    precision = "highest" if use_full_mat_mul_precision else "default"
    runtime.bindings()._xla_set_mat_mul_precision(precision)
