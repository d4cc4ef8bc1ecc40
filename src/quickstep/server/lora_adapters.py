"""The names of LoRA adapters that clients may use as models."""

from __future__ import annotations

from quickstep.engine.adapters import adapter_names_in, path_in

__all__ = ["ServedAdapters"]


class ServedAdapters:
    """The names of adapters: those of the start, those in `directory`, and those loaded since."""

    def __init__(self, names: tuple[str, ...] = (), directory: str | None = None) -> None:
        self._names = dict.fromkeys(names)
        self._directory = directory

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
