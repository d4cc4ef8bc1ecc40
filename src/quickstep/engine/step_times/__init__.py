"""How long steps take: calibration on this machine, and stored fits of the cost model."""
