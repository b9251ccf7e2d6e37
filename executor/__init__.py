"""Apply a plan: the native PyTorch runtime, and exporters to other launchers.

Nothing is loaded here; only the modules that run a plan import torch.
"""
