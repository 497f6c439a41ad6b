import math

import pytest

from modelzoo_trainer.tools.report.metrics_file import MAX_METRICS, read_metrics


def read(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_metrics(path)


def points(found, name="loss"):
    series = found.series[name]
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_each_number_becomes_a_point_of_its_metric(tmp_path):
    found = read(
        tmp_path,
        '{"step": 1, "time": 5.0, "loss": 2, "lr": 0.1}\n{"step": 2, "time": 7.5, "loss": 1.5}\n',
    )
    assert points(found) == [(1, 2), (2, 1.5)]
    assert points(found, "lr") == [(1, 0.1)]
    assert found.series["loss"].times.tolist() == [5, 7.5]
    assert (found.first_time, found.last_time, found.last_step) == (5, 7.5, 2)
    assert (found.num_lines, found.num_broken, found.is_cut) == (2, 0, False)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "lo',
        "[1, 2]",
        "text",
        '{"loss": 1.5}',
        '{"step": "two", "loss": 1.5}',
        '{"step": true, "loss": 1.5}',
        '{"step": "nan", "loss": 1.5}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:20],
)
def test_a_broken_line_in_the_middle_is_counted_and_skipped(line, tmp_path):
    found = read(tmp_path, f'{{"step": 1, "loss": 2}}\n{line}\n{{"step": 3, "loss": 1}}\n')
    assert points(found) == [(1, 2), (3, 1)]
    assert (found.num_lines, found.num_broken, found.is_cut) == (3, 1, False)


def test_a_line_that_is_no_text_is_counted(tmp_path):
    found = read(tmp_path, b'\xff\xfe\x00\n{"step": 3, "loss": 1}\n')
    assert (points(found), found.num_broken) == ([(3, 1)], 1)


def test_a_last_line_that_is_being_written_is_not_counted_as_broken(tmp_path):
    found = read(tmp_path, '{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert points(found) == [(1, 2)]
    assert (found.num_broken, found.is_cut) == (0, True)


def test_a_whole_last_line_without_its_end_counts(tmp_path):
    found = read(tmp_path, '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}')
    assert (points(found), found.is_cut) == ([(1, 2), (2, 1)], False)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"nan"', math.nan),
        ('"inf"', math.inf),
        ('"-inf"', -math.inf),
        ("NaN", math.nan),
        ("-Infinity", -math.inf),
    ],
)
def test_numbers_that_are_not_finite_are_points(written, expected, tmp_path):
    found = read(tmp_path, f'{{"step": 1, "loss": {written}}}\n')
    assert found.series["loss"].values.tolist() == pytest.approx([expected], nan_ok=True)


def test_what_is_no_number_is_left_out_and_named(tmp_path):
    found = read(
        tmp_path,
        '{"step": 1, "weights": [1, 2], "is_last": true, "none": null, "huge": '
        + "9" * 400
        + ', "sample": "a text"}\n',
    )
    assert found.series == {}
    assert found.left_out == {"weights", "huge"}
    assert [(text.name, text.step, text.text) for text in found.texts] == [("sample", 1, "a text")]


@pytest.mark.parametrize(
    "line",
    [
        '{"_step": 4, "_timestamp": 9.0, "loss": 2}',
        '{"global_step": 4, "timestamp": "1970-01-01T00:00:09+00:00", "loss": 2}',
        '{"iteration": 4, "wall_time": 9, "loss": 2}',
    ],
)
def test_lines_of_other_tools_are_read(line, tmp_path):
    found = read(tmp_path, f"{line}\n")
    assert points(found) == [(4, 2)]
    assert (list(found.series), found.first_time) == (["loss"], 9)


def test_of_several_values_of_a_step_the_last_counts(tmp_path):
    steps = [(1, 5), (2, 4), (3, 3), (2, 9), (3, 8), (4, 7)]
    found = read(tmp_path, "".join(f'{{"step": {s}, "loss": {v}}}\n' for s, v in steps))
    assert points(found) == [(1, 5), (2, 9), (3, 8), (4, 7)]
    assert found.num_repeated == 2


def test_metrics_without_end_are_bounded(tmp_path):
    record = ", ".join(f'"m{idx}": 1' for idx in range(MAX_METRICS + 5))
    found = read(tmp_path, f'{{"step": 1, {record}}}\n')
    assert len(found.series) == MAX_METRICS
    assert len(found.left_out) == 5


def test_a_very_long_name_is_cut(tmp_path):
    found = read(tmp_path, f'{{"step": 1, "{"n" * 5000}": 1}}\n{{"step": 2, "{"n" * 5000}": 2}}\n')
    assert points(found, "n" * 200) == [(1, 1), (2, 2)]
