"""Convert the training files of llm-foundry (https://github.com/mosaicml/llm-foundry)."""
