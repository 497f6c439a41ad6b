"""What makers say that their devices can do."""

from types import SimpleNamespace

import pytest
import torch

from backends import make_backend, peak_rates
from backends.peak_rates import device_name, peak_flops, rates_of

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_a_device_is_known_by_its_name(name, rate):
    assert rates_of(name)[BF16] == rate


@pytest.mark.parametrize(
    "name", ["cpu", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20", "A1000"]
)
def test_another_device_is_not_taken_for_it(name):
    assert rates_of(name) is None


def test_a_type_that_the_device_lacks_has_no_rate():
    assert BF16 not in rates_of("Tesla T4")
    assert torch.float64 not in rates_of("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("precision", "rate"), [("highest", 19.5e12), ("high", 156e12), ("medium", 156e12)]
)
def test_of_float32_the_setting_for_tf32_counts(monkeypatch, precision, rate):
    monkeypatch.setattr(peak_rates, "device_name", lambda backend: "NVIDIA A100-SXM4-40GB")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert peak_flops(make_backend("cpu", {}), torch.float32) == rate
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GB200"])
def test_a_part_of_a_device_and_several_are_not_one(name):
    assert rates_of(name) is None


@pytest.mark.parametrize(
    ("whole", "products", "rate"),
    [
        ("none", "tf32", 156e12),
        ("none", "ieee", 19.5e12),
        ("tf32", "none", 156e12),
        ("tf32", "ieee", 19.5e12),
    ],
)
def test_the_newer_setting_for_tf32_counts(monkeypatch, whole, products, rate):
    monkeypatch.setattr(peak_rates, "device_name", lambda backend: "NVIDIA A100-SXM4-40GB")
    backend = make_backend("cpu", {})
    matmul = SimpleNamespace(fp32_precision=products)
    settings = SimpleNamespace(fp32_precision=whole, cuda=SimpleNamespace(matmul=matmul))
    monkeypatch.setattr(torch, "backends", settings)
    assert peak_flops(backend, torch.float32) == rate


@pytest.mark.parametrize("name", ["cpu", "meta", "fake"])
def test_without_a_maker_nothing_is_known(name):
    backend = make_backend(name, {})
    assert peak_flops(backend, BF16) is None
    assert device_name(backend) == name


def test_the_maker_is_asked_for_the_name(monkeypatch):
    class Module:
        @staticmethod
        def get_device_name(device):
            return f"NVIDIA H200 ({device})"

    class Device(type(make_backend("cpu", {}))):
        device = torch.device("cuda", 1)

    monkeypatch.setattr(torch, "cuda", Module)
    assert device_name(Device()) == "NVIDIA H200 (cuda:1)"
    assert peak_flops(Device(), BF16) == 989.5e12
