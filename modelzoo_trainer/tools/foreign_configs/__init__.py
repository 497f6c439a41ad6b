"""Convert configurations of other training libraries: llm-foundry, torchtune."""
