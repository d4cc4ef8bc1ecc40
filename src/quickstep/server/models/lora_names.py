"""The LoRA adapters that clients may name: as models, or by number in llama.cpp's API."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from quickstep.engine.adapters import adapter_names_in, mix_name, path_in
from quickstep.errors import RequestError
from quickstep.server.fields.shared_fields import LoRAScale
from quickstep.server.options import bounded

_LOG = logging.getLogger("quickstep.server")


class LoRANames:
    """The names of adapters: those of the start, those in `directory`, and those loaded since.

    `most_in_mix` adapters may apply to one request together.
    """

    def __init__(
        self, names: tuple[str, ...] = (), directory: str | None = None, most_in_mix: int = 0
    ) -> None:
        self._names = dict.fromkeys(names)
        self._directory = directory
        self._most_in_mix = most_in_mix
        self._numbered: dict[str, None] = {}  # in the order of their numbers
        self._misnamed: set[str] = set()  # folders that were reported
        self._default_scales: Mapping[str, float] = {}

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            return True
        return isinstance(name, str) and path_in(self._directory, name) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order of loading, then those of the directory."""
        misnamed: set[str] = set()
        in_directory = adapter_names_in(self._directory, misnamed)
        for name in misnamed - self._misnamed:
            _LOG.warning(
                "the folder %s in --lora-dir is left out: no request can name it; rename it",
                ascii(name),
            )
        self._misnamed |= misnamed
        return tuple(dict.fromkeys((*self._names, *in_directory)))

    def add(self, name: str) -> None:
        """One was loaded."""
        self._names[name] = None

    def remove(self, name: str) -> None:
        """One was unloaded."""
        self._names.pop(name, None)
        self._default_scales = {
            named: scale for named, scale in self._default_scales.items() if named != name
        }

    def numbered(self) -> dict[int, str]:
        """The names by number. A name keeps its number, whatever is loaded and unloaded."""
        names = self.names
        self._numbered |= dict.fromkeys(names)
        known = set(names)
        return {number: name for number, name in enumerate(self._numbered) if name in known}

    def mix(self, scales: Sequence[LoRAScale]) -> str:
        """For `Request.adapter`: the adapters of these numbers at their scales.

        Raises:
            RequestError: A number is unknown, a scale is out of range, or they are too many.
        """
        return mix_name(self._named(scales))

    @property
    def default_scales(self) -> Mapping[str, float]:
        """By name, what applies to requests that name the model itself; empty for nothing."""
        return self._default_scales

    @property
    def default_mix(self) -> str:
        """`default_scales` as an adapter for `Request.adapter`."""
        return mix_name(self._default_scales)

    def set_default(self, scales: Sequence[LoRAScale]) -> None:
        """Set `default_scales`. Raises RequestError as `mix`."""
        named = self._named(scales)
        mix_name(named)
        self._default_scales = named

    def _named(self, scales: Sequence[LoRAScale]) -> dict[str, float]:
        bounded("lora", sum(lora.scale != 0 for lora in scales), self._most_in_mix, "adapters")
        wanted = {lora.id: lora.scale for lora in scales}
        if max(wanted, default=-1) >= len(self._numbered):
            self.numbered()  # lists the directory, so only for new numbers
        names, named = tuple(self._numbered), {}
        for number, scale in wanted.items():
            name = names[number] if number < len(names) else None
            if name is None or name not in self:
                raise RequestError(
                    f"there is no adapter {number}; GET /lora-adapters lists them", param="lora"
                )
            named[name] = scale
        return named
