"""Callbacks for kinds of models: language models, adapters, experts, Hugging Face."""
