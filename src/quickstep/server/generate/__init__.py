"""What all APIs share: from a parsed request to a run on the engine."""
