"""Helpers of the core callbacks."""
