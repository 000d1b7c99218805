from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from whippletree.report.chart import Axis, Line, chart, smoothed, ticks, whisker

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # raises unless it is well formed


def words(text: str) -> list[str]:
    return [element.text or "" for element in parsed(text).iter(f"{SVG}text")]


def test_ticks_by_hand() -> None:
    # a quarter of the range is 0.1975, so ticks are 0.2 apart, from the one below to the one above
    assert ticks(0.13, 0.92) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    # a quarter of 100 is 25, and the next round number is 50
    assert ticks(0, 100) == [0, 50, 100]


@pytest.mark.parametrize(("low", "high"), [(3, 3), (0, 0), (-7, 12345), (1e-7, 3e-7), (-2, -1)])
def test_ticks_are_evenly_spaced_and_enclose_the_range(low: float, high: float) -> None:
    marks = ticks(low, high)
    gaps = [b - a for a, b in pairwise(marks)]
    assert marks[0] <= low and high <= marks[-1] and 2 <= len(marks) <= 7
    assert gaps == pytest.approx([gaps[0]] * len(gaps))


def test_a_line_runs_from_corner_to_corner_of_its_plot() -> None:
    # the plot is 52..406 by 12..184 inside 420 x 220, and the ticks of 0..1 end at 0 and 1
    picture = parsed(chart([Line("reward", ((0, 0.0), (10, 1.0)))], Axis(), label="l"))
    (line,) = picture.iter(f"{SVG}polyline")
    assert line.get("points") == "52.0,184.0 406.0,12.0"


def test_axes_have_numbers_and_units() -> None:
    text = chart([Line("reward", ((0, 0.0), (10, 1.0)))], Axis(form="{:.1f} s".format), label="l")
    assert words(text) == ["0.0 s", "0.5 s", "1.0 s", "0", "2", "4", "6", "8", "10", "step"]


def test_each_point_of_a_short_line_tells_its_number() -> None:
    text = chart([Line("kl & co", ((4, 0.25),))], Axis(), label='"<l>"')
    told = [title.text for title in parsed(text).iter(f"{SVG}title")]
    assert told == ["step 4: kl & co 0.25"]
    assert parsed(text).get("aria-label") == '"<l>"'


def test_several_lines_have_a_legend_and_a_single_one_none() -> None:
    one, two = Line("first", ((0, 1.0), (1, 2.0))), Line("second", ((0, 1.0), (1, 2.0)), colour=1)
    assert {"first", "second"} <= set(words(chart([one, two], Axis(), label="l")))
    assert "first" not in words(chart([one], Axis(), label="l"))


def test_a_band_is_drawn_between_its_ends_and_inside_the_plot() -> None:
    text = chart([Line("a", ((0, 0.5), (1, 0.5)), band=((0, 0.0, 1.0), (1, 0.0, 1.0)))], Axis(), label="l")
    (band,) = parsed(text).iter(f"{SVG}polygon")
    assert band.get("points") == "52.0,12.0 406.0,12.0 406.0,184.0 52.0,184.0"


def test_a_logarithmic_axis_spaces_decades_evenly_and_leaves_zero_out() -> None:
    text = chart([Line("drift", ((0, 0.0), (1, 0.001), (2, 0.01), (3, 0.1)))], Axis(log=True), label="l")
    (line,) = parsed(text).iter(f"{SVG}polyline")
    assert line.get("points") == "52.0,184.0 229.0,98.0 406.0,12.0"
    assert words(text)[:3] == ["0.001", "0.01", "0.1"]


def test_a_chart_of_nothing_is_nothing() -> None:
    assert chart([], Axis(), label="l") == chart([Line("a", ())], Axis(), label="l") == ""
    assert chart([Line("a", ((0, 0.0),))], Axis(log=True), label="l") == ""


def test_a_running_mean_reads_no_later_step() -> None:
    # over two: 1, (1 + 3)/2, (3 + 8)/2
    assert smoothed(((0, 1.0), (1, 3.0), (2, 8.0)), over=2) == ((0, 1.0), (1, 2.0), (2, 5.5))
    assert smoothed((), over=3) == ()


def test_a_whisker_places_value_and_interval_on_the_common_scale() -> None:
    # 0..1 lies on 12..198 of 210, so 0.5 is at 105 and 0.25 at 58.5
    drawn = whisker([(0.5, 0.25, 1.0)], Axis(ends=(0, 1)), label="l")
    assert 'x1="58.5" x2="198.0"' in drawn and 'cx="105.0"' in drawn
