"""What decides how fast a device computes, and what would be faster."""

from __future__ import annotations

import torch

from .accelerator import AcceleratorBackend
from .attention_kernels import attention_kernel
from .backend import Backend
from .peak_rates import peak_flops, uses_tf32


def speed_of(backend: Backend, dtype: torch.dtype) -> str:
    """Return the settings of an accelerator that decide its speed; "" for other devices.

    Args:
        backend: Open.
        dtype: Of matrix products.
    """
    if not isinstance(backend, AcceleratorBackend):
        return ""
    parts = [f"matrix products in {_name(dtype)}"]
    if dtype is torch.float32 and _has_tf32(backend):
        parts[0] += f" with{'' if uses_tf32() else 'out'} TF32"
    kernel = attention_kernel(backend.device, dtype)
    parts += [f"{kernel} attention"] if kernel else []
    return ", ".join([*parts, "not compiled" if backend._compile is None else "compiled"])


def faster_than(backend: Backend, dtype: torch.dtype) -> str:
    """Return what would be faster than the settings of an accelerator; "" = nothing known.

    Args:
        backend: Open.
        dtype: Of matrix products.
    """
    if backend.device.type == "cpu" and dtype is torch.bfloat16 and not has_bfloat16():
        return (
            "this CPU has no instructions for bfloat16, which is many times slower than float32 on "
            "it: set precision.enabled: false"
        )
    if not isinstance(backend, AcceleratorBackend) or dtype is not torch.float32:
        return ""
    if torch.bfloat16 not in backend.caps.autocast_dtypes:
        return ""
    advice = "precision: {fp16_type: bfloat16} makes matrix products faster"
    now, then = peak_flops(backend, dtype), peak_flops(backend, torch.bfloat16)
    if now and then:
        advice += f", up to {then / now:.0f} times on this device"
    if not uses_tf32() and _has_tf32(backend):
        advice += "; in float32, backend.matmul_precision: high (TF32) does"
    return advice


def has_bfloat16() -> bool:
    """Return whether the CPU multiplies in bfloat16, as far as torch knows."""
    known = getattr(torch.cpu, "get_capabilities", None)  # new in torch 2.12
    capabilities = {} if known is None else known()
    if capabilities.get("architecture") != "x86_64":
        return True
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def _has_tf32(backend: Backend) -> bool:
    return backend.device.type == "cuda" and torch.version.hip is None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
