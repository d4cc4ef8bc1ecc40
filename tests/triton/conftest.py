"""Triton reads this when a kernel is defined, so it is set before any test imports one."""

import os

os.environ["TRITON_INTERPRET"] = "1"
