"""What a run was given and what it decided, as plain data, and the same run again."""
