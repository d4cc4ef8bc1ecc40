"""Several engines that serve one model."""
