"""Blending as a library of its own: rotate, plan, choose. Torch and numpy, no engine."""
