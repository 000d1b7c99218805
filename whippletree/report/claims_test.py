from __future__ import annotations

import io
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from whippletree.analysis.claims import summarised
from whippletree.report.claims import BEGIN, END, listed, markdown, number, page, picture, shown, spread


def record(
    name: str = "one", *, better: str = "higher", further: dict[str, list[float]] | None = None
) -> dict[str, Any]:
    """A claim whose method is 2 above its baseline on each of four seeds, of which the fourth is missing."""
    numbers = {"baseline": [1.0, 2.0, 3.0, 4.0], "method": [3.0, 4.0, 5.0], **(further or {})}
    runs: dict[str, dict[str, Any]] = {
        arm: {str(1000 + s): {"value": x, "seconds": 30.0} for s, x in enumerate(values)}
        for arm, values in numbers.items()
    }
    runs["method"]["1003"] = {"missing": "KeyError: 'a|b'", "seconds": 30.0}
    about = {"name": name, "says": "two <is> more", "better": better, "seeds": [1000, 1003]}
    return {**about, "commit": "c" * 40 + "+", "versions": {"torch": "2.7"}, **summarised(runs, better=better)}


def test_the_table_of_a_claim_by_hand() -> None:
    # 7 measurements of 30 s and one more that was missing: 240 s; sd of 1, 2, 3, 4 is 1.291, over sqrt(4): 0.645
    lines = markdown([record()]).splitlines()
    assert lines[2] == "| [one](#one) | **held** | +2.00 [2.00, 2.00] | 2.50 | 4.00 | 3 | 4.0 |"
    assert "**held**: higher is better; seeds 1000 to 1003, at commit ccccccc+ with torch 2.7." in lines
    assert "| baseline | 2.50 ± 0.645 | 4 |  |  |" in lines
    assert "| method | 4.00 ± 0.577 | 3 | +2.00 [2.00, 2.00] | better |" in lines
    assert "method: 1 missing, at seeds 1003; at 1003: KeyError: 'a|b'" in lines


def test_every_row_of_every_table_has_the_cells_of_its_head() -> None:
    made = markdown([record(), record("two", further={"a | b": [0.0] * 4})]).splitlines()
    widths = [line.replace("\\|", "").count("|") for line in made if line.startswith("|")]
    assert sorted(set(widths)) == [6, 8]
    assert "a \\| b" in "\n".join(made)


def test_a_claim_of_which_nothing_was_measured_has_dashes() -> None:
    empty = record()
    empty |= summarised({"baseline": {}, "method": {"1000": {"missing": "no", "seconds": 1.0}}}, better="higher")
    assert "| [one](#one) | **inconclusive** | – | – | – | 0 | 0.0 |" in markdown([empty])
    ElementTree.fromstring(picture(empty))


def test_only_what_stands_between_the_marks_is_written() -> None:
    text = f"# Claims\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    once = page(text, [record()])
    assert once.startswith(f"# Claims\n\n{BEGIN}\n\n| claim |") and once.endswith(f"{END}\n\nafter\n")
    assert "old" not in once and page(once, [record()]) == once
    with pytest.raises(ValueError, match="has not both"):
        page(f"{END} {BEGIN}", [])


@pytest.mark.parametrize(
    ("x", "text"), [(None, "–"), (0.0, "0.00"), (-0.01234, "−0.0123"), (123.4, "123"), (12345.0, "1.23e+04")]
)
def test_numbers_have_three_places(x: float | None, text: str) -> None:
    assert number(x) == text


def test_a_difference_has_its_sign() -> None:
    assert spread({"value": 0.5, "low": -1.0, "high": 2.0}) == "+0.500 [−1.00, 2.00]"
    assert spread({"value": -0.5, "low": -1.0, "high": 0.0}) == "−0.500 [−1.00, 0.00]"


def test_the_picture_has_a_dot_with_its_interval_for_each_arm_and_difference() -> None:
    drawn = ElementTree.fromstring(picture(record(further={"placebo": [1.0, 2.0, 3.0, 4.0]})))
    tag = "{http://www.w3.org/2000/svg}"
    dots = drawn.findall(f"{tag}circle")
    lines = [line for line in drawn.findall(f"{tag}line") if (line.get("class") or "").startswith("line")]
    assert len(dots) == len(lines) == 3 + 2  # three means, two differences
    for dot, line in zip(dots, lines, strict=True):
        assert float(line.get("x1") or 0) <= float(dot.get("cx") or 0) <= float(line.get("x2") or 0)
    # the placebo's difference is 0 in each seed: its dot stands on the line of 0
    [zero] = [line for line in drawn.findall(f"{tag}line") if line.get("class") == "axis"]
    assert dots[-1].get("cx") == zero.get("x1")
    assert [text.text for text in drawn.findall(f"{tag}text[@class='name']")] == ["baseline", "method", "placebo"]


def test_the_terminal_tells_arms_verdict_and_what_is_missing() -> None:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(*shown(record(better="lower")), listed([record()]), sep="\n")
    told = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    assert "lower is better; seeds 1000 to 1003, the same for all arms" in told
    assert "method: 1 missing, at seeds 1003" in told
    assert "not held, from 240 seconds of measuring" in told
    assert max(map(len, told.splitlines())) <= 100
