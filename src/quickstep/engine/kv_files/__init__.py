"""KV blocks in files, which survive a restart."""
