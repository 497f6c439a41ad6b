"""Runs of a small BERT on CSV files: resume, validation, the settings of the model."""

from __future__ import annotations

import pytest

from modelzoo_trainer import Callback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.csv.bert import BertCSVDynamicMaskDataProcessor
from modelzoo_trainer.zoo.models.bert.pretraining import Bert
from tests.doubles import make_trainer
from tests.zoo.data.csv.test_bert import sentence
from tests.zoo.data.csv.written import write_folder, write_vocabulary
from tests.zoo.models.bert_cases import SIZES


class Seen(Callback):
    def __init__(self):
        self.trained, self.validated, self.losses = [], [], []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.trained.append({key: one.tolist() for key, one in batch.items()})

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self.validated.append(batch["input_ids"].tolist())


@pytest.fixture
def fit(tmp_path):
    """Train to a step in a folder, from its newest checkpoint."""
    rows = [sentence(number) for number in range(10)]
    folder = write_folder(tmp_path / "data", rows[:7], rows[7:])
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")

    def loader(**arguments):
        return BertCSVDynamicMaskDataProcessor(
            data_dir=folder,
            vocab_file=vocabulary,
            batch_size=4,
            max_sequence_length=12,
            max_predictions_per_seq=3,
            **arguments,
        ).create_dataloader()

    def run(name, steps, *, is_mlm_only=True, **arguments):
        seen = Seen()
        trainer = make_trainer(
            tmp_path / name,
            seen,
            model=lambda: Bert(**SIZES, disable_nsp=is_mlm_only, dropout_rate=0.0),
            max_steps=steps,
            eval_frequency=4,
        )
        trainer.fit(loader(**arguments), loader(shuffle=False, drop_last=False))
        trainer.save_checkpoint()
        trainer.close()
        return seen

    return run


@pytest.mark.slow
def test_a_resumed_run_has_the_same_masks_and_losses(fit):
    whole = fit("whole", 8)
    first, second = fit("parts", 3), fit("parts", 8)
    assert first.trained + second.trained == whole.trained
    assert first.losses + second.losses == whole.losses
    assert "next_sentence_label" not in whole.trained[0]  # as the model has it


def test_the_masks_of_a_validation_stay_and_those_of_training_change(fit):
    seen = fit("run", 8, is_mlm_only=False)
    once = len(seen.validated) // 2
    assert seen.validated[:once] == seen.validated[once:]
    assert [len(batch) for batch in seen.validated[:once]] == [4, 4, 2]
    assert "next_sentence_label" in seen.trained[0]
    by_row = {str(row) for batch in seen.trained for row in batch["input_ids"]}
    assert len(by_row) > 10  # of 10 rows


def test_another_setting_than_that_of_the_model_stops_before_the_first_step(fit):
    with pytest.raises(ConfigError, match=r"disable_nsp is false, .* Bert is true"):
        fit("run", 1, disable_nsp=False)
