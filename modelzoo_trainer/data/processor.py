"""What the shipped data processors have in common: how their samples become a dataloader."""

from typing import Any

from torch.utils.data import DataLoader

from modelzoo_trainer.data.dataloaders import BatchDataset, LoadingOptions, make_dataloader
from modelzoo_trainer.interceptors import Advised, event


class DataProcessor(Advised):
    """Base of data processors; their constructors set `options` and `dataset`.

    The steps of a constructor are events of the class: to have functions around them give the
    class a list `callbacks`, or call it as `Class.with_functions(("post-load", f))(...)`.
    """

    options: LoadingOptions
    dataset: BatchDataset

    @event("create-dataloader")
    def create_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the samples."""
        return make_dataloader(self.dataset, self.options)
