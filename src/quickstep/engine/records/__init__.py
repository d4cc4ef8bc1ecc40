"""What an engine records: its step log, traces, and recordings that can be replayed."""
