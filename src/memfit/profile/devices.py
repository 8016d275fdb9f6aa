"""What is known about devices that may not be here: memory, bandwidth, arithmetic. Users add theirs with `register`."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Sustained figures, not datasheet peaks: about 80 % of the vendor's numbers unless measured."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    fp32_flops: float  # with TF32 where the device has it
    half_flops: float  # bf16 and fp16
    link_bytes_per_s: float  # to the host, each way
    launch_ns: int = 3_000


_GIB = 2**30
DEVICES = {
    d.name: d
    for d in (
        # h200: copy bandwidth, bf16 rate and link measured on one H200 with torch 2.11
        Device(
            name="h200", memory_bytes=139 * _GIB, memory_bytes_per_s=4.3e12, fp32_flops=380e12, half_flops=760e12, link_bytes_per_s=43e9
        ),
        Device(name="h100", memory_bytes=79 * _GIB, memory_bytes_per_s=2.9e12, fp32_flops=380e12, half_flops=760e12, link_bytes_per_s=43e9),
        Device(
            name="a100-80g", memory_bytes=79 * _GIB, memory_bytes_per_s=1.7e12, fp32_flops=120e12, half_flops=250e12, link_bytes_per_s=22e9
        ),
        Device(
            name="a100-40g", memory_bytes=39 * _GIB, memory_bytes_per_s=1.3e12, fp32_flops=120e12, half_flops=250e12, link_bytes_per_s=22e9
        ),
        Device(name="l40s", memory_bytes=44 * _GIB, memory_bytes_per_s=0.7e12, fp32_flops=140e12, half_flops=280e12, link_bytes_per_s=22e9),
        Device(name="a10g", memory_bytes=22 * _GIB, memory_bytes_per_s=0.5e12, fp32_flops=50e12, half_flops=100e12, link_bytes_per_s=20e9),
        Device(
            name="rtx4090", memory_bytes=23 * _GIB, memory_bytes_per_s=0.85e12, fp32_flops=65e12, half_flops=130e12, link_bytes_per_s=22e9
        ),
        Device(
            name="rtx3090", memory_bytes=23 * _GIB, memory_bytes_per_s=0.8e12, fp32_flops=28e12, half_flops=56e12, link_bytes_per_s=20e9
        ),
        Device(name="v100", memory_bytes=15 * _GIB, memory_bytes_per_s=0.75e12, fp32_flops=12e12, half_flops=90e12, link_bytes_per_s=11e9),
        Device(name="t4", memory_bytes=14 * _GIB, memory_bytes_per_s=0.25e12, fp32_flops=6e12, half_flops=40e12, link_bytes_per_s=10e9),
        Device(name="p100", memory_bytes=15 * _GIB, memory_bytes_per_s=0.55e12, fp32_flops=8e12, half_flops=15e12, link_bytes_per_s=11e9),
        Device(
            name="cpu",
            memory_bytes=16 * _GIB,
            memory_bytes_per_s=20e9,
            fp32_flops=100e9,
            half_flops=50e9,
            link_bytes_per_s=5e9,
            launch_ns=2_000,
        ),
    )
}


def device(name: str) -> Device:
    """A device of the table by name ("h200", "rtx4090"); case and spaces do not matter."""
    key = name.lower().replace(" ", "").replace("_", "-")
    if key not in DEVICES:
        raise BadInput(
            f"device {name!r} is not known: choose one of {', '.join(DEVICES)}, or add it with memfit.profile.devices.register(Device(...))."
        )
    return DEVICES[key]


def register(new: Device) -> None:
    """Add a device, or replace one of the same name."""
    DEVICES[new.name.lower()] = new
