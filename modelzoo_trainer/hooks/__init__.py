"""Hooks: their declarations and how callbacks are called, with or without a trainer."""
