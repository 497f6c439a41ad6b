"""Pictures of plotly's figures in tutorials, where no browser draws them."""

import io
from base64 import b64decode

import pytest

from modelzoo_trainer.callbacks import RunHistory
from tests.docs.conftest import load_script

matplotlib = pytest.importorskip("matplotlib", reason="needs the extra docs")


@pytest.fixture
def picture():
    """A function from a figure to its picture."""
    module = load_script("_extensions/plotly_pictures.py")

    def draw(figure):
        image = io.BytesIO(b64decode(module.picture_of(figure.to_plotly_json())))
        return matplotlib.image.imread(image, format="png")

    return draw


def history():
    found = RunHistory()
    for step in range(1, 20):
        found.update_metric("loss", 1 / step, step=step)
        found.update_metric("accuracy", 1 - 1 / step, step=step)
    return found


def num_pixels(image, red, green, blue):
    return int((abs(image[..., :3] - (red, green, blue)).sum(-1) < 0.1).sum())


def test_each_curve_has_its_color(picture):
    figure = history().plot(["loss", "accuracy"])
    figure.data[0].line.color = "#ff0000"
    figure.data[1].line.color = "#0000ff"
    image = picture(figure)
    assert num_pixels(image, 1, 0, 0) > 100
    assert num_pixels(image, 0, 0, 1) > 100
    left = image[:, : image.shape[1] // 2]
    assert num_pixels(left, 1, 0, 0) > 100
    assert num_pixels(left, 0, 0, 1) == 0


def test_a_range_that_was_set_is_the_one_that_is_drawn(picture):
    figure = history().plot("loss").update_traces(line_color="#ff0000")
    assert num_pixels(picture(figure), 1, 0, 0) > 100
    figure.update_xaxes(range=[50, 90])
    assert num_pixels(picture(figure), 1, 0, 0) == 0
