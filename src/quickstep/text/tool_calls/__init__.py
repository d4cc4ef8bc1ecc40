"""A model's output text to a message: content, reasoning and tool calls, delta by delta."""
