"""The hardware table: every entry has its source, names are parsed, a file adds entries."""

from __future__ import annotations

import pytest

from quickstep.errors import ConfigError
from quickstep.plan.hardware import find_hardware, parse_hardware, read_hardware

TABLE = read_hardware()


@pytest.mark.parametrize("name", list(TABLE.devices))
def test_every_device_has_sources_and_names_what_exists(name: str) -> None:
    device = TABLE.devices[name]
    assert device.source
    assert device.link in TABLE.links
    assert device.achieved in TABLE.achieved
    if device.price is not None:
        assert device.price.usd_per_hour > 0
        assert device.price.source
        assert device.price.date >= "2026"
    assert parse_hardware(name) == (name, 1) or name == "mi300x"
    assert find_hardware(f"{name}x4", TABLE).count == 4


def test_names_with_a_count_are_parsed() -> None:
    assert parse_hardware("H100x8") == ("h100", 8)
    assert parse_hardware("rtx4090") == ("rtx4090", 1)
    assert parse_hardware("rtx4090x2") == ("rtx4090", 2)
    assert find_hardware("mi300x", TABLE).count == 1
    assert find_hardware("mi300xx8", TABLE).count == 8
    with pytest.raises(ConfigError, match="has 0 devices"):
        parse_hardware("h100x0")


def test_an_unknown_device_or_link_is_one_sentence_with_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"--hardware h10 is unknown; did you mean h100"):
        find_hardware("h10", TABLE)
    with pytest.raises(ConfigError, match="--link token-ring is unknown; known are nvlink3"):
        find_hardware("h100", TABLE, link="token-ring")


def test_figures_are_those_of_the_data_sheet_times_what_is_achieved() -> None:
    h100 = find_hardware("h100x2", TABLE, price=2.0)
    assert h100.bytes_per_s == 3350e9 * h100.achieved.memory
    assert h100.flops_per_s("int8") == 2 * h100.flops_per_s(None) + 1e8 * (
        h100.achieved.compute * 1e3
    )
    assert h100.memory_bytes == 80e9 * h100.achieved.capacity
    assert h100.device.price is not None
    assert h100.device.price.usd_per_hour == 2.0
    assert find_hardware("h100", TABLE, link="100gbe").link.gb_per_s == 12.5


FILE = """
devices:
  toy: {label: Toy, memory_gb: 1, memory_gb_per_s: 10, bfloat16_tflops: 0.1, link: pcie4,
        achieved: cpu, source: a toy}
"""


def test_a_file_adds_devices(tmp_path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(FILE)
    table = read_hardware(file)
    assert find_hardware("toyx3", table).count == 3
    assert "h100" in table.devices
    file.write_text(FILE.replace("pcie4", "string"))
    with pytest.raises(ConfigError, match="link of toy is 'string', known are nvlink3"):
        read_hardware(file)
    file.write_text(FILE.replace("memory_gb: 1,", "memory_gb: 0,"))
    with pytest.raises(ConfigError, match="memory_gb is 0"):
        read_hardware(file)
