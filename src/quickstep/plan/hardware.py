"""Devices, links between them and prices: the data of `hardware.yaml`, and `--hardware`.

`find_hardware` turns `h100x8` into a `Hardware`; a user's file adds devices. `measured_device` is
the device of `this`, from figures that the caller has measured: nothing is measured here.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.yaml_file import read_yaml

THIS = "this"
_BUNDLED = Path(__file__).parent / "hardware.yaml"
_MAX_DEVICES = 1024


class Achieved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of a data sheet's figures that inference reaches, 0 to 1.

    Attributes:
        capacity: Of the memory, what is left by the driver and other programs.
        memory: Of the memory bandwidth, by a step that reads weights and KV.
        compute: Of the peak, by matrix products and attention with many tokens.
        link: Of the link's bandwidth, by a collective operation.
        step_overhead_s: Seconds of every step that depend on nothing.
    """

    capacity: float
    memory: float
    compute: float
    link: float
    step_overhead_s: float

    def __post_init__(self) -> None:
        for name in ("capacity", "memory", "compute", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be above 0, at most 1")
        if not self.step_overhead_s >= 0:
            raise ValueError(f"step_overhead_s is {self.step_overhead_s}, it must be at least 0")


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An interconnect: 10^9 bytes per second of one device in one direction; microseconds of a
    collective operation on few bytes.
    """

    gb_per_s: float
    latency_us: float
    source: str

    def __post_init__(self) -> None:
        if not self.gb_per_s > 0:
            raise ValueError(f"gb_per_s is {self.gb_per_s}, it must be above 0")


class DevicePrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """US dollars for an hour of one device, when (year and month) and where."""

    usd_per_hour: float
    date: str
    source: str


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU, or all cores of a CPU socket.

    Attributes:
        label: Its name for people.
        memory_gb: 10^9 bytes.
        memory_gb_per_s: 10^9 bytes per second, the peak.
        bfloat16_tflops: 10^12 operations per second in 16 bits without sparsity; a multiply-add
            counts as two.
        int8_tops: The same for 8-bit integers; None if that is not faster.
        link: How devices of one machine are connected, a key of `HardwareTable.links`.
        achieved: A key of `HardwareTable.achieved`.
        source: Where the figures come from.
    """

    label: str
    memory_gb: float
    memory_gb_per_s: float
    bfloat16_tflops: float
    link: str
    achieved: str
    source: str
    int8_tops: float | None = None
    price: DevicePrice | None = None

    def __post_init__(self) -> None:
        for name in ("memory_gb", "memory_gb_per_s", "bfloat16_tflops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be above 0")


class HardwareTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a hardware file."""

    devices: dict[str, DeviceSpec] = msgspec.field(default_factory=dict)
    links: dict[str, Link] = msgspec.field(default_factory=dict)
    achieved: dict[str, Achieved] = msgspec.field(default_factory=dict)


class Hardware(msgspec.Struct, frozen=True):
    """`count` devices of one kind, connected by `link`.

    Attributes:
        name: The device's key in the table.
    """

    name: str
    device: DeviceSpec
    link: Link
    achieved: Achieved
    count: int

    @property
    def memory_bytes(self) -> int:
        """Usable bytes of one device."""
        return int(self.device.memory_gb * 1e9 * self.achieved.capacity)

    @property
    def bytes_per_s(self) -> float:
        """Achieved memory bandwidth of one device."""
        return self.device.memory_gb_per_s * 1e9 * self.achieved.memory

    @property
    def link_bytes_per_s(self) -> float:
        """Achieved bandwidth of a link."""
        return self.link.gb_per_s * 1e9 * self.achieved.link

    def flops_per_s(self, in_integers: bool) -> float:
        """Achieved operations per second of one device, in 16-bit floats or 8-bit integers."""
        peak = self.device.bfloat16_tflops
        if in_integers and self.device.int8_tops is not None:
            peak = max(peak, self.device.int8_tops)
        return peak * 1e12 * self.achieved.compute


def read_hardware(file: Path | None = None) -> HardwareTable:
    """The bundled table, with the entries of a user's file added.

    Raises:
        ConfigError: The file cannot be read, or names a link or fractions that do not exist.
    """
    table = read_yaml(_BUNDLED, HardwareTable, "the table")
    if file is None:
        return table
    added = read_yaml(file, HardwareTable, "--hardware-file")
    merged = HardwareTable(
        table.devices | added.devices,
        table.links | added.links,
        table.achieved | added.achieved,
    )
    for name, device in added.devices.items():
        for what, key, known in (
            ("link", device.link, merged.links),
            ("achieved", device.achieved, merged.achieved),
        ):
            if key not in known:
                raise ConfigError(
                    f"--hardware-file {file}: {what} of {name} is {key!r}, known are "
                    f"{', '.join(known)}"
                )
    return merged


def parse_hardware(text: str) -> tuple[str, int]:
    """`h100x8` is ("h100", 8), `h100` is ("h100", 1). Raises ConfigError."""
    name, x, digits = text.strip().lower().rpartition("x")
    if not (x and name and digits.isdecimal()) or name == "rt":  # rtx4090 is a name
        return text.strip().lower(), 1
    count = int(digits)
    if not 1 <= count <= _MAX_DEVICES:
        raise ConfigError(f"--hardware has {count} devices, it must be 1 to {_MAX_DEVICES}")
    return name, count


def find_hardware(
    text: str, table: HardwareTable, link: str | None = None, price: float | None = None
) -> Hardware:
    """The hardware that `text` names, such as `h100x8`.

    `link` replaces the device's own link, `price` its dollars per hour.

    Raises:
        ConfigError: The device or the link is unknown.
    """
    name, count = parse_hardware(text)
    device = table.devices.get(name)
    if device is None:
        near = difflib.get_close_matches(name, table.devices, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise ConfigError(
            f"--hardware {text} is unknown; {hint} are {', '.join(table.devices)} and {THIS}; "
            "--hardware-file adds others"
        )
    if price is not None:
        device = replace(device, price=DevicePrice(price, "", "--price"))
    between = table.links[device.link] if link is None else find_link("--link", link, table)
    return Hardware(name, device, between, table.achieved[device.achieved], count)


def find_link(flag: str, name: str, table: HardwareTable) -> Link:
    """The link that `flag` names. Raises ConfigError."""
    if name not in table.links:
        raise ConfigError(f"{flag} {name} is unknown; known are {', '.join(table.links)}")
    return table.links[name]


def measured_device(memory_bytes: int, read_bytes_per_s: float, flops_per_s: float) -> DeviceSpec:
    """The device of `this`: free memory, and figures of `bench.limits`."""
    return DeviceSpec(
        label="this machine",
        memory_gb=memory_bytes / 1e9,
        memory_gb_per_s=read_bytes_per_s / 1e9,
        bfloat16_tflops=flops_per_s / 1e12,
        link="100gbe",
        achieved="measured",
        source="measured on this machine",
    )
