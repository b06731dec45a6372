"""Reinforcement learning of language models: trio-based, typed, exact. Importing this loads neither torch nor
transformers.
"""

__version__ = "0.1.0"
