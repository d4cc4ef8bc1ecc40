"""Quickstep and today's engines: same machine, same weights, same requests, interleaved."""
