import json
import re

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.report import page as page_module
from modelzoo_trainer.tools.report.page import MARKER
from tests.tools.report.run_lines import losses

EVIL = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch):
    monkeypatch.setattr(page_module, "plotly_js", lambda: "/* plotly */")


def data_of(html):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1]
    )


def sections(html):
    return re.findall(r'<section id="([\w-]+)">', html)


def test_sections_without_content_are_left_out(write_run, page_of):
    assert sections(page_of(write_run(lines=losses(20)))) == [
        "overview",
        "loss",
        "validation",
        "lr",
        "time",
    ]


def test_a_report_has_all_that_a_run_has(write_run, page_of):
    run = write_run(
        lines=[
            {"step": 1, "time": 1.0, "loss": 1.0, "grad_norm": 2.0, "samples_per_sec": 3.0},
            {"step": 2, "time": 2.0, "other": 1.0, "text": "a sample that was logged"},
        ],
        events=[
            {"time": 1.0, "event": "start", "step": 0},
            {"time": 1.5, "event": "memory", "step": 1, "host_peak_bytes": 2**30},
        ],
        params="# git commit: abcdef\ntrainer: {init: {seed: 7}}\n",
        files={
            "checkpoint_2/manifest.json": "{}",
            "logs/20260101_000000/sample.txt": "once upon a time",
            "logs/20260101_000000/images/a.png": b"\x89PNG",
        },
    )
    html = page_of(run)
    assert sections(html) == [
        *("overview", "loss", "norm", "throughput", "memory", "other", "time"),
        *("configuration", "environment", "checkpoints", "samples"),
    ]
    words = (
        "abcdef",
        "trainer.<wbr>init.<wbr>seed",
        "once upon a time",
        "a sample that was logged",
    )
    assert [word in html for word in words] == [True] * 4
    assert "data:image/png;base64,iVBORw==" in html


def test_what_differs_between_runs_comes_first(write_run, page_of):
    params = "trainer: {{init: {{seed: 1, lr: {lr}, model_dir: ./{lr}}}}}\n"
    html = page_of(
        *(write_run(f"run_{lr}", losses(1), params=params.format(lr=lr)) for lr in ("0.1", "0.01"))
    )
    section = re.search(r'<section id="configuration">(.*?)</section>', html, re.DOTALL)[1]
    first, rest = section.split("<details>", 1)
    assert re.findall(r'<code title="(.*?)">(.*?)</code>', first) == [
        ("trainer.init.lr", "init.<wbr>lr")
    ]
    assert re.findall(r"<td>(0[.\d]+)", first) == ["0.1"]
    assert re.findall(r'<td><span class="differs">(0[.\d]+)', first) == ["0.01"]
    assert "(&times; 0.1)" in first
    assert "&times; = relative to it" in first
    assert re.findall(r"<code[^>]*>(.*?)</code>", rest) == ["trainer.<wbr>init.<wbr>seed"]
    assert "data itself and your own code are not compared" in first


def test_long_names_of_runs_break_only_after_separators(write_run, page_of):
    long = "a_name.of_more_than_20"
    html = page_of(*(write_run(f"runs/{name}", losses(2)) for name in (long, "x.1")))
    assert "<i></i><span>a_<wbr>name.<wbr>of_<wbr>more_<wbr>than_<wbr>20</span>" in html
    assert "<i></i><span>x.1</span>" in html


def configuration(html):
    found = re.search(r'<section id="configuration">(.*?)</section>', html, re.DOTALL)
    return found and found[1]


@pytest.mark.parametrize(("commit", "is_named"), [("abc", False), ("def", True)])
def test_that_no_setting_differs_is_said_and_what_else_differs(
    commit, is_named, write_run, page_of
):
    params = "# git commit: {}\ntrainer: {{init: {{seed: 1}}}}\n"
    runs = [
        write_run(name, losses(1), params=params.format(one))
        for name, one in (("a", "abc"), ("b", commit))
    ]
    text = configuration(page_of(*runs))
    assert "No setting differs." in text
    assert ("git commit" in text) == is_named


def test_nothing_is_said_of_settings_that_are_not_known_or_differ(write_run, page_of):
    params = "trainer: {{init: {{{}: 1}}}}\n"
    first, second = (write_run(one, losses(1), params=params.format(one)) for one in "ab")
    assert "No setting" not in configuration(page_of(first, second))
    assert "No setting" not in (configuration(page_of(first, write_run("c", losses(1)))) or "")
    assert "No setting" not in configuration(page_of(first))


@pytest.mark.parametrize(("num", "shown"), [(3, " open"), (20, " open"), (21, "")])
def test_a_few_settings_of_only_some_runs_are_shown_at_once(num, shown, write_run, page_of):
    params = "trainer: {seed: 1, schedule: {" + ", ".join(f"s{i}: 1" for i in range(num)) + "}}\n"
    html = page_of(
        write_run("a", losses(1), params=params),
        write_run("b", losses(1), params="trainer: {seed: 1}\n"),
    )
    assert f"<details{shown}><summary>Only in some runs ({num})</summary>" in html
    assert "<details><summary>The same in all runs (1)</summary>" in html


def test_a_run_from_a_file_and_one_from_python_are_compared_under_the_same_names(
    write_run, page_of
):
    def write(name, steps, params=None):
        settings = {"seed": 1, "loop": {"TrainingLoop": {"max_steps": steps}}}
        facts = json.dumps({"environment": {}, "settings": settings})
        path = "logs/20260101_000000/run.json"
        return write_run(name, losses(1), params=params, files={path: facts})

    params = "trainer: {init: {seed: 1, model: {width: 8}, loop: {max_steps: 5}}}\n"
    python, file = write("python", 7), write("file", 5, params)
    text = configuration(page_of(file, python)).replace("<wbr>", "")
    assert "trainer.init" not in text.replace("trainer.init.model.width", "")
    assert "(1)</summary>" in text.partition("Only in some runs")[2][:20]
    assert re.search(r"TrainingLoop.max_steps</code></td><td>5</td><td>(<[^>]*>)?7 ", text)
    both = page_of(file, write("other", 9, params.replace("5", "9")))
    of_files = configuration(both).replace("<wbr>", "")
    assert "trainer.init.loop.max_steps" in of_files
    assert "TrainingLoop" not in of_files


def test_a_learning_rate_that_a_schedule_replaces_is_not_compared(write_run, page_of):
    def write(name, lr):
        facts = {"environment": {}, "settings": {}, "overridden": ["optimizer.SGD.lr"]}
        params = (
            f"trainer: {{init: {{seed: 1, optimizer: {{SGD: {{lr: {lr}, momentum: {lr}}}}}}}}}\n"
        )
        files = {"logs/20260101_000000/run.json": json.dumps(facts)}
        return write_run(name, losses(1), params=params, files=files)

    runs = write("a", 0.1), write("b", 0.5)
    text = configuration(page_of(*runs)).replace("<wbr>", "")
    assert "SGD.momentum" in text
    assert "SGD.lr" not in text
    assert "SGD.lr" in configuration(page_of(runs[0])).replace("<wbr>", "")  # as it was given


def test_the_best_value_of_the_runs_is_marked(write_run, page_of):
    html = page_of(write_run("a", losses(10)), write_run("b", losses(10, scale=0.5)))
    row = re.search(r"<tr>(?:(?!</tr>).)*>b</span>.*?</tr>", html, re.DOTALL)[0]
    assert "<b>0.95</b>" in row
    assert "<b>0.9</b>" not in html
    assert "<b>0.05</b>" not in html  # the loss of one batch is best by chance


@pytest.mark.parametrize("place", ["name", "metric", "text", "setting", "sample", "event"])
def test_texts_from_files_cannot_become_markup(place, write_run, page_of):
    name = EVIL.replace("/", "") if place == "name" else "run"
    lines = [{"step": 1, "time": 1.0, EVIL if place == "metric" else "loss": 1.0}]
    lines += [{"step": 1, "note": EVIL if place == "text" else "x"}]
    cause = EVIL if place == "event" else "x"
    html = page_of(
        write_run(
            name,
            lines,
            params=f'trainer: {{a: "{EVIL if place == "setting" else 1}"}}\n',
            files={"logs/20260101_000000/sample.txt": EVIL if place == "sample" else "x"},
            events=[
                {"time": 1.0, "event": "start", "step": 0},
                {"time": 2.0, "event": "end", "step": 1, "outcome": cause, "cause": cause},
            ],
        )
    )
    assert "<script>alert" not in html
    assert "alert(1)" in html
    assert len(re.findall(r"<script\b", html)) == 3


def test_secrets_are_not_in_the_page(write_run, page_of):
    token = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
    html = page_of(
        write_run(
            lines=[{"step": 1, "loss": 1.0, "note": f"Bearer {token}"}],
            params=f"# command: run.py --hf_token={token}\ntrainer: {{hf_token: {token}}}\n",
            files={"logs/20260101_000000/sample.txt": f"token={token}"},
        )
    )
    assert token not in html


def test_the_page_may_load_nothing(write_run, page_of):
    html = page_of(write_run(lines=losses(1)))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)[1]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert not re.findall(r'(?:src|href)="(?!#|data:)', html)
    assert MARKER in html[:300]


def test_if_all_learning_rates_are_equal_the_chart_says_so(write_run, page_of):
    lines = [{"step": s, "lr/0": 0.1 / s, "lr/1": 0.1 / s} for s in range(1, 5)]
    html = page_of(write_run(lines=lines))
    assert [chart["title"] for chart in data_of(html)["charts"]] == ["lr"]
    assert "(parameter groups 0 and 1 are identical)" in html


def test_runs_with_identical_curves_are_named(write_run, page_of):
    runs = [
        write_run(name, losses(20, scale=scale)) for name, scale in (("a", 1), ("b", 1), ("c", 5))
    ]
    html = page_of(*runs)
    charts = {chart["title"]: chart for chart in data_of(html)["charts"]}
    assert charts["loss"]["equal"] == [[0, 1]]
    assert html.count('<small class="equal">a = b</small>') == 2  # loss, accuracy
    assert '<small class="equal">a = b = c</small>' in html  # the learning rate


@pytest.mark.parametrize("num", [1, 3])
def test_norms_of_gradients_are_said_to_be_before_clipping(num, write_run, page_of):
    names = ["model_wise_grad_norm", "model_wise_params_norm"]
    names += [f"per_layer_grad_norm/layer_{idx}" for idx in range(num)]
    html = page_of(write_run(lines=[{"step": 1, **dict.fromkeys(names, 1.0)}]))
    said = re.findall(r"<code>([\w/]+)</code><small>\(before clipping\)", html)
    assert len(said) == 2
    assert not any("params" in name for name in said)


def session_files(**files):
    return {f"logs/20260101_000000/{name}": text for name, text in files.items()}


def test_hints_and_warnings_come_first(write_run, page_of):
    facts = '{"environment": {}, "hints": ["LinearLR: ends at step 87"]}'
    log = "2026-01-01 00:00:00,001 {}: {}\n"
    lines = [("INFO", "fine"), ("WARNING", "LinearLR: ends at step 87"), ("ERROR", "disk <full>")]
    lines += [("WARNING", f"number {idx}") for idx in range(30)] + [("ERROR", "disk <full>")]
    files = {"run.json": facts, "run.log": "".join(log.format(*line) for line in lines)}
    html = page_of(
        write_run(
            lines=[{"step": 1, "loss": 1.0, "lr/0": 0.1}],
            files=session_files(**files),
            events=[{"time": 1.0, "event": "train_start", "step": 0}],
        )
    )
    assert next(iter(sections(html))) == "warnings"
    section = re.search(r'<section id="warnings">(.*?)</section>', html, re.DOTALL)[1]
    assert section.count("ends at step 87") == 1
    assert "disk &lt;full&gt; <small>2 times</small>" in section
    assert "fine" not in section
    assert section.count("<li") == 21
    assert "12 more" in section
    assert "ends at step 87" in re.search(r'<section id="lr">(.*?)<figure', html, re.DOTALL)[1]


def test_the_reason_for_an_early_end_is_shown(write_run, page_of):
    end = {"time": 9.0, "event": "end", "step": 7, "outcome": "finished"}
    start = {"time": 1.0, "event": "train_start", "step": 0, "total_steps": 90}
    old = write_run(
        "old",
        losses(7),
        events=[start, end],
        files=session_files(
            **{"run.log": "2026-01-01 00:00:00,001 INFO: Stopped (lazy) at step 7\n"}
        ),
    )
    new = write_run("new", losses(7), events=[start, end | {"stopped_by": "EarlyStopping: x"}])
    html = page_of(old, new)
    assert re.findall(r'class="state (\w+)" title="(.*?)"', html) == [
        ("stopped", "lazy"),
        ("stopped", "EarlyStopping: x"),
    ]
    assert html.count("<td>7 of 90</td>") == 2


def resumed():
    return [
        {"time": 0.0, "event": "start", "step": 0},
        {"time": 0.1, "event": "train_start", "step": 0, "total_steps": 90},
        {"time": 49.9, "event": "save", "step": 7, "seconds": 0.1},
        {"time": 50.0, "event": "end", "step": 7, "outcome": "stopped", "cause": "SIGINT"},
        {"time": 50.0, "event": "start", "step": 7},
        {"time": 50.1, "event": "train_start", "step": 7, "total_steps": 90},
        {"time": 99.9, "event": "end", "step": 20, "outcome": "stopped", "cause": "SIGINT"},
    ]


def overview_of(html):
    return re.search(r'<section id="overview">(.*?)</section>', html, re.DOTALL)[1]


def test_restarts_are_in_the_overview_of_one_run_and_of_several(write_run, page_of):
    one = write_run("one", losses(20), events=resumed())
    two = write_run("two", losses(20), events=resumed()[:4])
    assert "<span>Restarts</span><b>1</b>" in overview_of(page_of(one))
    assert "<span>Restarts</span><b>0</b>" in overview_of(page_of(two))
    html = page_of(one, two)
    assert ">Restarts</span>" in overview_of(html)
    three = write_run("three", losses(20))  # without events
    for row in re.findall(r"<tr>.*three</span>.*</tr>", page_of(one, three)):
        assert "<td>0</td>" not in row


def test_a_share_is_rounded_alike_everywhere(write_run, page_of):
    html = page_of(write_run("one", losses(20), events=resumed()))
    (share,) = re.findall(r"<span>Goodput</span><b>([\d.]+ %)</b>", html)
    assert f"<small>{share}</small>" in html
    assert share == "99.7 %"


def test_a_run_that_was_stopped_says_by_what(write_run, page_of):
    one, two = (write_run(name, losses(20), events=resumed()) for name in ("one", "two"))
    assert re.search(r'<p class="cause stopped">stopped by SIGINT</p>', page_of(one))
    assert page_of(one, two).count(">stopped</span><small class='why'>by SIGINT</small>") == 2


def test_the_table_of_runs_explains_its_numbers(write_run, page_of):
    html = page_of(*(write_run(name, losses(20, scale=n)) for n, name in enumerate("ab", 1)))
    overview = re.search(r'<section id="overview">(.*?)</section>', html, re.DOTALL)[1]
    assert overview.index("validate_0/accuracy") < overview.index("<code>loss</code>")
    assert "Bold: the best" in overview
    assert "<td><b>" not in overview
    assert re.search(r"<b>0.95</b></td><td>20</td>", overview)
    assert re.findall(r"<th>.*</th>", overview)[0].index("accuracy") < overview.index(">Steps<")
    assert re.search(r'title="[^"]*without validation[^"]*">Throughput', overview)


def test_the_time_left_is_put_away(write_run, page_of):
    lines = [{"step": s, "loss": 1.0, "time_remaining": 9.0 - s} for s in range(1, 5)]
    html = page_of(write_run(lines=lines))
    rest = re.search(r'<details class="more">(.*?)</details>', html, re.DOTALL)[1]
    assert "<code>time_remaining</code>" in rest
    assert list(sections(html)).index("other") > list(sections(html)).index("loss")


def test_equal_learning_rates_are_drawn_once(write_run, page_of):
    lines = [{"step": s, "lr/0": 0.1 / s, "lr/1": 0.1 / s, "lr/2": 0.2 / s} for s in range(1, 5)]
    html = page_of(write_run(lines=lines))
    assert [chart["title"] for chart in data_of(html)["charts"]] == ["lr/0", "lr/2"]
    assert 'title="lr/1"' in html


def test_many_metrics_of_a_kind_share_a_chart(write_run, page_of):
    lines = [{"step": 1, **{f"norm/layer_{idx}": 1.0 for idx in (2, 10, 1)}}]
    one = data_of(page_of(write_run("a", lines)))["charts"]
    assert [curve["variant"] for curve in one[0]["curves"]] == ["layer_1", "layer_2", "layer_10"]
    two = data_of(page_of(*(write_run(name, lines) for name in "bc")))["charts"]
    assert [chart["members"] for chart in two] == [["layer_1", "layer_2", "layer_10"]]


def test_values_that_are_not_finite_are_marked(write_run, page_of):
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": "inf"}]
    curve = data_of(page_of(write_run(lines=lines)))["charts"][0]["curves"][0]
    assert (curve["bad"]["kind"], curve["bad"]["n"]) == (["nan", "inf"], 2)


def test_long_curves_are_thinned_and_that_is_said(write_run, page_of):
    lines = [{"step": step, "loss": 1.0} for step in range(1, 5001)]
    html = page_of(write_run(lines=lines))
    curve = data_of(html)["charts"][0]["curves"][0]
    assert (curve["n"], "mean" in curve) == (5000, True)
    assert "thinned" in html


@pytest.mark.slow
def test_a_million_points_of_two_runs_and_large_samples_stay_under_10_mb(
    write_run, page_of, monkeypatch
):
    monkeypatch.undo()
    names = [f"norm/layer_{idx}" for idx in range(100)]
    lines = [
        {"step": step, "time": 1.7e9 + step, **dict.fromkeys(names, step % 97 + 0.1)}
        for step in range(5000)
    ]
    session = "logs/20260101_000000"
    files = {f"{session}/{idx}.txt": "text " * 4000 for idx in range(30)}
    files |= {f"{session}/{idx}.png": b"x" * 400_000 for idx in range(9)}
    runs = [write_run(name, lines, files=files) for name in "ab"]
    html = page_of(*runs)
    assert 5_000_000 < len(html.encode()) < 10_000_000


def test_without_plotly_the_remedy_is_named(monkeypatch):
    monkeypatch.undo()
    page_module.plotly_js.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install plotly .*modelzoo-trainer\[report\]"):
        page_module.plotly_js()
