"""Scores and masks that users write: the functions to write them with, a collection, and their translation."""

from __future__ import annotations

from tilewise.mods.functions import maximum, minimum, where

__all__ = ["maximum", "minimum", "where"]
