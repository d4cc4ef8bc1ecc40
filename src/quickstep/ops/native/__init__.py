"""The ops on libquickstep, the C++ kernels."""
