"""Peak FLOP/s of devices according to their manufacturers.

Rates are for dense matrix products (manufacturers also give larger sparse rates), accumulated in
float32. The float32 rate is without TF32.
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from .backend import Backend

_TF32: Final = "tf32"
Rates = dict["torch.dtype | str", float]


def _rates(half: float, tf32: float, full: float, *, bfloat16: bool = True) -> Rates:
    """Return rates from TFLOP/s; float16 and bfloat16 are equal."""
    rates: Rates = {torch.float16: half, _TF32: tf32, torch.float32: full}
    if bfloat16:
        rates[torch.bfloat16] = half
    return {kind: 1e12 * rate for kind, rate in rates.items()}


# The first pattern found in the device's name is used: more specific ones come first.
_TABLE: Final[tuple[tuple[str, Rates], ...]] = (
    # https://resources.nvidia.com/en-us-blackwell-architecture (HGX B200, one of eight)
    (r"\bB200\b", _rates(2250, 1100, 75)),
    # https://www.nvidia.com/en-us/data-center/h200/ (half of the figures "with sparsity")
    (r"\bH200 NVL\b", _rates(835.5, 417.5, 60)),
    (r"\bH200\b|\bGH200\b", _rates(989.5, 494.5, 67)),
    # https://www.nvidia.com/en-us/data-center/h100/ and the H100 PCIe product brief
    (r"\bH100 NVL\b", _rates(835.5, 417.5, 60)),
    (r"\bH100 PCIe\b", _rates(756, 378, 51)),
    (r"\bH100\b", _rates(989.5, 494.5, 67)),
    # https://www.nvidia.com/en-us/data-center/a100/
    (r"\bA100\b", _rates(312, 156, 19.5)),
    # https://www.nvidia.com/en-us/data-center/products/a30-gpu/
    (r"\bA30\b", _rates(165, 82, 10.3)),
    # https://www.nvidia.com/en-us/data-center/a40/
    (r"\bA40\b", _rates(149.7, 74.8, 37.4)),
    # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    (r"\bA10\b", _rates(125, 62.5, 31.2)),
    # https://www.nvidia.com/en-us/design-visualization/rtx-a6000/ (half of "with sparsity")
    (r"\bRTX A6000\b", _rates(154.8, 77.4, 38.7)),
    # https://www.nvidia.com/en-us/data-center/l40s/
    (r"\bL40S\b", _rates(362.05, 183, 91.6)),
    # https://www.nvidia.com/en-us/data-center/l40/
    (r"\bL40\b", _rates(181.05, 90.5, 90.5)),
    # https://www.nvidia.com/en-us/data-center/l4/ (half of the figures "with sparsity")
    (r"\bL4\b", _rates(121, 60, 30.3)),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    (r"\bRTX 4090\b(?! D| Laptop)", _rates(165.2, 82.6, 82.6)),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    (r"\bRTX 3090\b(?! Ti)", _rates(71, 35.6, 35.6)),
    # https://www.nvidia.com/en-us/data-center/v100/; there is neither bfloat16 nor TF32 before A100
    (r"\bV100-SXM", _rates(125, 15.7, 15.7, bfloat16=False)),
    (r"\bV100-PCIE", _rates(112, 14, 14, bfloat16=False)),
    # https://www.nvidia.com/en-us/data-center/tesla-t4/
    (r"\bT4\b", _rates(65, 8.1, 8.1, bfloat16=False)),
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html, .../mi325x.html
    (r"\bMI3(00|25)X\b", _rates(1307.4, 653.7, 163.4)),
)


def device_name(backend: Backend) -> str:
    """Return the manufacturer's name of a backend's device, or the backend's name."""
    kind = backend.device.type
    if kind in ("cpu", "meta"):
        return backend.name
    module: Any = getattr(torch, kind, None)
    name = getattr(module, "get_device_name", None)
    return backend.name if name is None else str(name(backend.device))


def peak_flops(backend: Backend, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a backend's device; None = not known.

    Args:
        backend: An open backend.
        dtype: The dtype of matrix products; for float32, torch's TF32 setting is considered.
    """
    rates = rates_of(device_name(backend))
    if rates is None:
        return None
    return rates.get(_TF32 if dtype is torch.float32 and uses_tf32() else dtype)


def uses_tf32() -> bool:
    """Return whether float32 matrix products on CUDA are computed in TF32."""
    # torch.get_float32_matmul_precision raises after this setting was used.
    settings: Any = torch.backends
    of_products = settings.cuda.matmul.fp32_precision
    setting: str = settings.fp32_precision if of_products == "none" else of_products
    return setting == "tf32"


def rates_of(name: str) -> Rates | None:
    """Return the rates of a device by dtype; None if it is not in the table.

    `name`: the manufacturer's. MIG instances are not in the table.
    """
    if re.search(r"\bMIG\b", name):
        return None
    return next((rates for pattern, rates in _TABLE if re.search(pattern, name)), None)
