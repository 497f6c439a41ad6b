"""What the server of `published.py` imports once, so that each run starts at once."""

import torch._dynamo  # noqa: F401  # by the first optimizer

import modelzoo_trainer.callbacks
import modelzoo_trainer.cli.command
import modelzoo_trainer.config.build
import modelzoo_trainer.config.report
import modelzoo_trainer.config.shipped
import modelzoo_trainer.data
import modelzoo_trainer.loggers
import modelzoo_trainer.models.decoder
import modelzoo_trainer.optim
import modelzoo_trainer.trainer  # noqa: F401
