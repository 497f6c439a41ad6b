"""Folders of models in the format of Hugging Face."""
