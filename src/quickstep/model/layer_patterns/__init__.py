"""What differs from layer to layer, as configs state it: a module for each kind of pattern.

Each function reads its keys from a `ConfigFields`; `architectures.py` names the ones that an
architecture uses. Standard library only.
"""
