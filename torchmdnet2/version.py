"""The package's version; a module of its own, since model files and reports name it."""

__version__ = "0.1.0"
