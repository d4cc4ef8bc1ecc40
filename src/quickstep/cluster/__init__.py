"""Several engines of one model that serve together: streams that outlive their engine."""
