"""HTTP itself: bodies, limits, errors, middleware, event streams."""
