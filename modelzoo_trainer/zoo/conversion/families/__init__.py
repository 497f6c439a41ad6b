"""The families of Hugging Face models that are decoders here: one module each, with `FAMILIES`."""
