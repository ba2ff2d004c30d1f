"""Pictures on a run's page."""

import base64

import numpy as np
import pytest
from matplotlib.figure import Figure

from anypo.report import plots
from anypo.report.figures import PNG, figures_html, pack

SVG = plots.image_grid([[np.zeros((4, 4))]])


def test_svg_png_and_figures_are_packed():
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([0, 1])
    svg, png, drawn = pack([("a", SVG), ("b", PNG + b"rest"), ("c", figure)])
    assert svg == {"title": "a", "svg": SVG}
    assert base64.b64decode(png["png"]) == PNG + b"rest" and base64.b64decode(drawn["png"]).startswith(PNG)


@pytest.mark.parametrize("picture", [3, "text", b"GIF89a", None])
def test_what_is_no_picture_is_refused(picture):
    with pytest.raises(TypeError, match="the figure 'x' is a"):
        pack([("x", picture)])


def test_titles_pair_up_and_lone_ones_have_the_full_width():
    before, after = pack([("grid", SVG)]), pack([("grid", SVG), ("curve <b>", SVG)])
    page = figures_html(before, after)
    assert page.count(SVG) == 3 and page.count('class="side"') == 2 and page.count('class="wide"') == 1
    assert "curve &lt;b&gt;" in page and "<b>" not in page


def test_damaged_entries_show_nothing_harmful():
    assert figures_html(None, "none") == ""
    page = figures_html([{"title": "t", "svg": "<script>alert(1)</script>"}, {"title": "u", "png": '"><script>'}], [3])
    assert "<script" not in page
