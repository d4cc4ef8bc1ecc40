"""What an engine's process has loaded is left out of collections of garbage."""

from __future__ import annotations

import gc

from quickstep.config import EngineConfig
from quickstep.engine.process import worker


class _Loaded:
    """Stands for an engine."""


def test_what_was_loaded_is_not_walked_by_collections(monkeypatch):
    monkeypatch.setattr(worker, "open_engine", lambda config, progress: _Loaded())
    try:
        engine = worker.open_settled(EngineConfig(), lambda done, total: None)
        assert gc.get_freeze_count() > 0
        assert not any(one is engine for one in gc.get_objects())
    finally:
        gc.unfreeze()
