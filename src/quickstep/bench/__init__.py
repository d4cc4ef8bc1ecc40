"""Benchmarks: speed of the engine and of servers, accuracy of formats, limits of the machine."""
