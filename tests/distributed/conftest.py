"""Which of these tests are run each time: what takes over a second has another that is like it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

_HERE: Final = Path(__file__).parent
_SLOW: Final = frozenset(
    {
        "test_a_checkpoint_of_another_layout_loads",
        "test_a_checkpoint_that_the_clock_wants_is_written_at_one_step",
        "test_a_decoder_starts_as_if_it_were_built_on_one_host[copies]",
        "test_a_decoder_starts_as_if_it_were_built_on_one_host[sharded]",
        "test_a_decoder_starts_as_if_it_were_built_on_one_host[split, sharded]",
        "test_a_decoder_starts_as_if_it_were_built_on_one_host[split]",
        "test_a_decoder_starts_as_if_it_were_built_on_one_host[uneven]",
        "test_a_launcher_without_a_store_will_do_and_restarts_are_its_part",
        "test_a_loss_that_is_no_number_in_one_process_leaves_the_step_out_in_all[FSDP2]",
        "test_a_loss_that_is_no_number_in_one_process_takes_all_back",
        "test_a_lost_connection_without_another_cause_is_the_failure",
        "test_a_port_in_use_is_named_and_every_process_ends",
        "test_a_process_that_has_said_good_bye_may_end_before_the_others",
        "test_a_process_that_is_killed_ends_those_that_do_not_notice",
        "test_a_process_that_is_late_is_waited_for[save]",
        "test_a_process_that_is_stuck_is_ended_with_the_code_after_its_last_words",
        "test_a_run_goes_on_with_those_of_the_first_process[DDP]",
        "test_a_run_goes_on_with_those_of_the_first_process[backend1]",
        "test_the_first_process_is_named_as_well_although_the_store_dies_with_it",
        "test_a_run_that_is_cut_off_goes_on_with_the_same_bits[DDP]",
        "test_a_shipped_decoder_is_split_by_its_own_plan[gpt2]",
        "test_a_shipped_decoder_is_split_by_its_own_plan[llama, grouped]",
        "test_a_signal_during_a_validation_or_a_save_likewise[SIGTERM-validation-1]",
        "test_a_signal_ends_all_at_the_same_step_and_the_run_goes_on_from_there[15-ranks0-1]",
        "test_a_signal_ends_all_at_the_same_step_and_the_run_goes_on_from_there[2-ranks2-3]",
        "test_a_stop_by_a_metric_of_all_stops_all",
        "test_a_stop_that_one_process_asks_for_is_that_of_all[stopping_0]",
        "test_a_stop_that_one_process_asks_for_is_that_of_all[stopping_when]",
        "test_an_error_of_one_ends_all_and_is_shown_once[save-0]",
        "test_an_error_of_one_ends_all_and_is_shown_once[step-0]",
        "test_batches_can_be_accumulated[sharded]",
        "test_each_process_has_its_own_random_state_in_it",
        "test_each_process_holds_its_part",
        "test_it_equals_one_process_with_the_whole_batch[copies, sharded]",
        "test_it_equals_one_process_with_the_whole_batch[sharded, by name]",
        "test_it_equals_one_process_with_the_whole_batch[sharded]",
        "test_it_equals_one_process_with_the_whole_batch[split, copies]",
        "test_it_equals_one_process_with_the_whole_batch[split, sharded]",
        "test_it_equals_one_process_with_the_whole_batch[split]",
        "test_it_equals_one_process_with_the_whole_batch[uneven]",
        "test_modules_are_reset_in_the_order_of_their_constructors",
        "test_of_many_failures_all_processes_name_the_same_first_one",
        "test_processes_that_drift_apart_return_the_same_topics_at_the_same_points",
        "test_the_best_checkpoint_is_written_once_by_all[DDP]",
        "test_the_end_of_one_ends_all_and_is_told_once[SIGKILL--9-save-0]",
        "test_the_end_of_one_ends_all_and_is_told_once[SIGKILL--9-validation-1]",
        "test_the_norm_is_that_of_whole_gradients[0.1]",
        "test_the_norm_is_that_of_whole_gradients[100.0]",
        "test_their_batches_are_those_of_one_process_with_as_many_samples[2]",
        "test_their_batches_are_those_of_one_process_with_as_many_samples[3]",
        "test_their_batches_are_those_of_one_process_with_as_many_samples[4]",
        "test_where_parameters_may_be_unused_weights_are_one_number",
        "test_workers_load_the_same[2]",
    }
)


@pytest.hookimpl(tryfirst=True)  # before pytest looks for what was asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE and (item.name in _SLOW or _is_of_shards(item)):
            item.add_marker(pytest.mark.slow)


def _is_of_shards(item: pytest.Item) -> bool:
    """Whether a test needs all the runs of sharded models whose messages are counted."""
    return item.path.stem == "test_collectives" and "FSDP2" in item.name
