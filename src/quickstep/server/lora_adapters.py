"""The LoRA adapters that clients may name: as models, or by number in llama.cpp's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quickstep.engine.adapters import adapter_names_in, mix_name, path_in
from quickstep.errors import RequestError

__all__ = ["ServedAdapters"]


class ServedAdapters:
    """The names of adapters: those of the start, those in `directory`, and those loaded since."""

    def __init__(self, names: tuple[str, ...] = (), directory: str | None = None) -> None:
        self._names = dict.fromkeys(names)
        self._directory = directory
        self._numbers: dict[str, int] = {}
        self._default_scales: Mapping[str, float] = {}

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            return True
        return isinstance(name, str) and path_in(self._directory, name) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order of loading, then those of the directory."""
        return tuple(dict.fromkeys((*self._names, *adapter_names_in(self._directory))))

    def add(self, name: str) -> None:
        """One was loaded."""
        self._names[name] = None

    def remove(self, name: str) -> None:
        """One was unloaded."""
        self._names.pop(name, None)
        self._default_scales = {one: s for one, s in self._default_scales.items() if one != name}

    def numbered(self) -> dict[int, str]:
        """The names by number. A name keeps its number, whatever is loaded and unloaded."""
        for name in self.names:
            self._numbers.setdefault(name, len(self._numbers))
        return {self._numbers[name]: name for name in self.names}

    def mix(self, scales: Iterable[tuple[int, float]]) -> str:
        """The adapter for `Request.adapter` that is those of these numbers at their scales.

        Raises:
            RequestError: A number is unknown, or a scale is out of range.
        """
        return mix_name(self._named(scales))

    @property
    def default_scales(self) -> Mapping[str, float]:
        """What applies to requests that name the model itself; () for nothing."""
        return self._default_scales

    @property
    def default_mix(self) -> str:
        """It as an adapter for `Request.adapter`."""
        return mix_name(self._default_scales)

    def set_default(self, scales: Iterable[tuple[int, float]]) -> None:
        """Set `default_scales`. Raises RequestError as `mix`."""
        named = self._named(scales)
        mix_name(named)
        self._default_scales = named

    def _named(self, scales: Iterable[tuple[int, float]]) -> dict[str, float]:
        names, named = self.numbered(), {}
        for number, scale in scales:
            if number not in names:
                raise RequestError(
                    f"there is no adapter {number}; GET /lora-adapters lists them", param="lora"
                )
            named[names[number]] = scale
        return named
