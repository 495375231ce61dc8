"""SureFit fine-tunes language models and gets it right the first time."""

__version__ = "0.1.0"
