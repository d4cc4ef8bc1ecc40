"""Command line flags that several commands share."""
