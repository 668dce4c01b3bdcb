"""The language. Importing it gives expressions their text (terms/printer.py), those of folds included."""

from eqfuse.terms import folds

__all__ = ["folds"]
