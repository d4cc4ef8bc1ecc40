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
MEASURED = "measured"  # the key of `HardwareTable.achieved` for this machine
ESTIMATED = "gpu"  # a key of `achieved`: parts of devices that were not measured
_BUNDLED = Path(__file__).parent / "hardware.yaml"
_MAX_DEVICES = 1024
_PARTS = ("capacity", "memory", "compute", "link", "kv", "fp8", "int8", "int4", "experts")
_HOST_TIMES = ("step_overhead_s", "half_tokens", "layer_overhead_s", "row_overhead_s")


class Achieved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of a data sheet's figures that inference reaches, 0 to 1, and the time of the host.

    Attributes:
        capacity: Of the memory, what is left by the driver and other programs.
        memory: Of the memory bandwidth, by a step that reads weights and KV.
        compute: Of the peak, by matrix products and attention with many tokens.
        link: Of the link's bandwidth, by a collective operation.
        step_overhead_s: Seconds of every step that depend on nothing.
        kv: Of the memory bandwidth, by attention; None is `memory`.
        fp8: Of the peak in fp8 (16 bits where there is none), by products with weights in fp8; None
            is `compute`, in 16 bits.
        int8: Of the peak in 8-bit integers, by products with weights in int8; None is `compute`.
        int4: Of the peak in 16 bits, by products with weights of 4 bits; None is `compute`, in
            8-bit integers.
        experts: Of these parts, by the products of a mixture of experts.
        half_tokens: Tokens of a step up to which products reach half of these parts.
        layer_overhead_s: Seconds of every layer in a step.
        row_overhead_s: Seconds of every row in a step: the host's.
    """

    capacity: float
    memory: float
    compute: float
    link: float
    step_overhead_s: float
    kv: float | None = None
    fp8: float | None = None
    int8: float | None = None
    int4: float | None = None
    experts: float = 1.0
    half_tokens: float = 0.0
    layer_overhead_s: float = 0.0
    row_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None and not 0 < part <= 1:
                raise ValueError(f"{name} is {part}, it must be above 0, at most 1")
        for name in _HOST_TIMES:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 0")

    def slowed(self, factor: float) -> Achieved:
        """With which each step takes so many times as long, as far as no part exceeds 1."""
        changed: dict[str, float] = {}
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None and name not in ("capacity", "experts"):
                changed[name] = min(1.0, part / factor)
        for name in ("step_overhead_s", "layer_overhead_s", "row_overhead_s"):
            changed[name] = getattr(self, name) * factor
        return replace(self, **changed)


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
        fp8_tflops: The same for 8-bit floats; None if it has none.
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
    fp8_tflops: float | None = None
    price: DevicePrice | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, as far as `achieved` says so."""
        return self.achieved == ESTIMATED

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

    @property
    def kv_bytes_per_s(self) -> float:
        """Achieved memory bandwidth of one device by attention."""
        kv = self.achieved.kv
        return self.bytes_per_s if kv is None else self.device.memory_gb_per_s * 1e9 * kv

    def flops_per_s(self, quantization: str | None) -> float:
        """Achieved operations per second of one device, in products with weights in a format: one
        of `QUANTIZATIONS`, None for 16 bits.
        """
        peak, part = self.peak_and_part(quantization)
        return peak * part

    def peak_and_part(self, quantization: str | None) -> tuple[float, float]:
        """Operations per second of the data sheet for a format, and the part that is achieved."""
        device, achieved = self.device, self.achieved
        kind = "" if quantization is None else quantization.partition("-")[0]
        part = getattr(achieved, kind) if kind else None
        peak = device.bfloat16_tflops
        if kind == "int8" or (kind == "int4" and part is None):
            peak = max(peak, device.int8_tops or 0.0)
        elif kind == "fp8" and part is not None:
            peak = max(peak, device.fp8_tflops or 0.0)
        return peak * 1e12, achieved.compute if part is None else part


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
        achieved=MEASURED,
        source="measured on this machine",
    )
