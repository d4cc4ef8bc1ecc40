"""Layer 6: the `quickstep` command."""

INTERRUPTED = 130  # the exit code after Ctrl-C
