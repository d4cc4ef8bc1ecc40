"""What takes plans and returns results in order: on this thread, or next to a device."""
