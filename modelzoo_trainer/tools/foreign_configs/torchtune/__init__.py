"""Convert the training files of torchtune (https://github.com/pytorch/torchtune)."""
