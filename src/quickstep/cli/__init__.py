"""Layer 6: the `quickstep` command."""
