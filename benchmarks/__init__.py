"""Measurements, run on purpose on a quiet machine; tests never assert their numbers."""
