"""What a server does with fallback chains: `core.fallback` decides, `Chain` carries it out."""
