"""gymloop trains LLM agents by reinforcement learning in gyms.

Importing the package is free: no torch, ray or transformers until something that needs them runs.
"""

__version__ = "0.1.0"
