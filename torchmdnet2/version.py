"""The package's version; a separate module, since model files and reports name it."""

__version__ = "0.1.0"
