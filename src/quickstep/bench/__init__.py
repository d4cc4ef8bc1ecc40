"""Measured speed of the engine beside the measured limits of the machine."""
