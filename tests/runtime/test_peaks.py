"""Each device has its own peak, and an unknown one has none."""

from __future__ import annotations

import pytest

from moegraph.runtime.peaks import peak_flops, utilisation


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_bf16_peaks_by_name(device: str, tera: float) -> None:
    assert peak_flops(device, "bf16") == tera * 1e12


def test_an_h200_is_not_an_a100() -> None:
    assert peak_flops("NVIDIA H200", "bf16") != peak_flops("NVIDIA A100-SXM4-80GB", "bf16")


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "Intel(R) Xeon(R) Platinum 8480+",
        "NVIDIA GeForce GTX 1080",
        "NVIDIA A1000",
        "NVIDIA H2000",
        "NVIDIA A10G",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "",
    ],
)
def test_an_unknown_device_has_no_peak(device: str) -> None:
    assert peak_flops(device, "bf16") is None


def test_peaks_by_dtype() -> None:
    assert peak_flops("NVIDIA H200", "fp16") == 989e12
    assert peak_flops("NVIDIA H200", "fp8") == peak_flops("NVIDIA H200", "mxfp8") == 1979e12
    assert peak_flops("NVIDIA H200", "tf32") == 494.5e12
    assert peak_flops("NVIDIA H200", "fp32") == 67e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_flops("NVIDIA B300", "fp64") is None


def test_utilisation_reproduces_the_published_42_percent_of_a_b300() -> None:
    mfu = utilisation(52_000, 18.19e9, peak_flops("NVIDIA B300", "bf16"))
    assert mfu is not None
    assert f"{100 * mfu:.0f}" == "42"
    assert utilisation(8 * 52_000, 18.19e9, peak_flops("NVIDIA B300", "bf16"), devices=8) == pytest.approx(mfu)


def test_without_a_peak_there_is_no_utilisation() -> None:
    assert utilisation(52_000, 18.19e9, None) is None
