"""Hooks of other trainers, and the hooks to use instead."""

from typing import Final

INSTEAD: Final = {
    # PyTorch Lightning
    "on_batch_end": "on_train_batch_end",
    "on_batch_start": "on_train_batch_start",
    "on_before_zero_grad": "on_before_optimizer_zero_grad",
    "on_epoch_end": "on_train_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_exception": "on_fit_exception",
    "on_predict_epoch_end": "on_predict_end",
    "on_predict_epoch_start": "on_predict_start",
    "on_sanity_check_end": "on_validate_end",
    "on_sanity_check_start": "on_validate_start",
    "on_test_batch_end": "on_validate_batch_end",
    "on_test_batch_start": "on_validate_batch_start",
    "on_test_end": "on_validate_end",
    "on_test_epoch_end": "on_validate_end",
    "on_test_epoch_start": "on_validate_start",
    "on_test_start": "on_validate_start",
    "on_validation_batch_end": "on_validate_batch_end",
    "on_validation_batch_start": "on_validate_batch_start",
    "on_validation_end": "on_validate_end",
    "on_validation_epoch_end": "on_validate_end",
    "on_validation_epoch_start": "on_validate_start",
    "on_validation_start": "on_validate_start",
    # Hugging Face
    "on_epoch_begin": "on_train_epoch_start",
    "on_evaluate": "on_validate_end",
    "on_init_end": "post_setup",
    "on_log": "on_metrics",
    "on_optimizer_step": "on_after_optimizer_step",
    "on_predict": "on_predict_end",
    "on_prediction_step": "on_validate_batch_end",
    "on_save": "on_after_save_checkpoint",
    "on_step_begin": "on_train_batch_start",
    "on_step_end": "on_step_boundary",
    "on_substep_end": "on_train_batch_end",
    "on_train_begin": "on_fit_start",  # in Keras, too
    # Keras
    "on_batch_begin": "on_train_batch_start",
    "on_predict_batch_begin": "on_predict_batch_start",
    "on_predict_begin": "on_predict_start",
    "on_test_batch_begin": "on_validate_batch_start",
    "on_test_begin": "on_validate_start",
    "on_train_batch_begin": "on_train_batch_start",
    # pytorch-accelerated
    "on_eval_epoch_end": "on_validate_end",
    "on_eval_epoch_start": "on_validate_start",
    "on_eval_step_end": "on_validate_batch_end",
    "on_eval_step_start": "on_validate_batch_start",
    "on_evaluation_run_end": "on_validate_end",
    "on_evaluation_run_start": "on_enter_validate",
    "on_stop_training_error": "on_fit_end",
    "on_training_run_end": "on_fit_end",
    "on_training_run_epoch_end": "run_validation",
    "on_training_run_start": "on_fit_start",
}
"""For each hook of another trainer that is not one here: the hook to use."""

MEANING: Final = {
    "args": ("args",),
    "control": (),
    "logs": ("metrics",),
    "pl_module": ("model",),
    "state": ("state_dict",),
}
"""For each parameter of other trainers' hooks: the parameters here that have this meaning."""

OF_CEREBRAS: Final = frozenset(
    {
        *("pre_setup", "setup", "post_setup", "finalize", "on_enter_fit", "on_fit_start"),
        *("on_fit_end", "on_fit_exception", "on_enter_train", "on_train_start", "on_train_end"),
        *("on_train_exception", "on_train_step_start", "on_train_step_end", "on_train_batch_start"),
        *("on_train_batch_end", "run_validation", "on_enter_validate", "on_validate_start"),
        *("on_validate_end", "on_validate_exception", "on_validate_step_start"),
        *("on_validate_step_end", "on_validate_batch_start", "on_validate_batch_end"),
        *("on_enter_validate_all", "on_before_forward", "on_after_forward", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step", "on_after_optimizer_step"),
        *("on_before_optimizer_zero_grad", "on_after_optimizer_zero_grad"),
        *("on_before_scheduler_step", "on_after_scheduler_step", "on_save_checkpoint"),
        *("on_save_trainer_state", "on_after_save_trainer_state", "postprocess_checkpoint"),
        *("on_after_save_checkpoint", "on_before_load_checkpoint", "preprocess_checkpoint"),
        *("on_load_checkpoint", "on_load_trainer_state"),
    }
)
"""Hooks that the trainer of the Cerebras Model Zoo has too; all others are additions."""
