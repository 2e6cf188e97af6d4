"""Text in figures: what is written lies in its place, in any script, and without boxes for missing characters."""

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.font_manager as fonts
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from longseq.encoders.drawing import draw_features, draw_images, draw_spectrograms, draw_waveforms
from longseq.encoders.lettering import cut, drawable, families, fitted, key_of, legible, width_of
from longseq.training.board.class_axes import MOST_IN_KEY
from longseq.training.board.pictures import draw_by_class, draw_confusions

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of a character that it draws as a box

CAT = "\U0010fff0\U0010fff1"  # private letters, which no font of a test machine has
NAMES = [
    "Great spotted woodpecker (Dendrocopos major)",
    "Lesser_spotted_woodpecker_(Dryobates_minor)_juvenile_of_the_first_year_in_winter",
    "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichen",
    "Кошка домашняя обыкновенная", "قطة منزلية", "חתול", "$a$", CAT,
]  # fmt: skip


@pytest.fixture
def font(tmp_path: Path) -> Iterator[str]:
    """A font with the letters of CAT, which is installed for a test: each is a black square."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 800), (800, 800), (800, 0)):
        pen.lineTo(point)
    pen.closePath()
    names = [".notdef", "first", "second"]
    made = FontBuilder(1000, isTTF=True)
    made.setupGlyphOrder(names)
    made.setupCharacterMap({ord(letter): name for letter, name in zip(CAT, names[1:], strict=True)})
    made.setupGlyf(dict.fromkeys(names, pen.glyph()))
    made.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    made.setupHorizontalHeader(ascent=800, descent=-200)
    made.setupNameTable({"familyName": "Cats Sans", "styleName": "Regular"})
    made.setupOS2(usWeightClass=400)
    made.setupPost()
    made.save(tmp_path / "cats.ttf")
    before = list(fonts.fontManager.ttflist)
    fonts.fontManager.addfont(tmp_path / "cats.ttf")
    yield "Cats Sans"
    fonts.fontManager.ttflist[:] = before


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """The texts of a figure that lie on each other, or reach out of it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in figure.findobj(Text) if re.search(r"[^\W\d]", text.get_text())]  # no numbers of ticks
    texts = [text for text in texts if text.get_visible()]
    texts += [text for part in figure.subfigs for text in part.texts if text not in texts]  # but those of the key
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    pairs = [(one, two) for n, (one, box) in enumerate(boxes) for two, other in boxes[:n] if box.overlaps(other)]
    width, height = canvas.get_width_height()
    outside = [(name, "edge") for name, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    return pairs + outside


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["images", "spectrograms", "waveforms", "features"])
@pytest.mark.parametrize("written", ["{}", "{} →\n{} 0.92"])
def test_titles_have_two_lines_at_most_and_do_not_overlap(kind: str, count: int, written: str) -> None:
    names = [written.format(name, name) for name in drawable(NAMES)[-count:]]
    figure = {
        "images": lambda: draw_images(list(torch.rand(count, 3, 8, 8)), names),
        "spectrograms": lambda: draw_spectrograms(list(torch.rand(count, 1, 9, 16)), names, 8000, 10.0),
        "waveforms": lambda: draw_waveforms(list(torch.rand(count, 1, 80)), names, 8000),
        "features": lambda: draw_features(list(torch.rand(count, 4, 9)), names, 0.5),
    }[kind]()
    titles = [axes.get_title() for axes in figure.axes]
    assert all(title.count("\n") <= 1 for title in titles) and "class 7" in titles[-1]
    assert overlapping(figure) == []


def test_short_names_stand_four_in_a_row_and_are_whole() -> None:
    names = ["cat", "dog", "70% cat + 30% dog", "automobile"]
    figure = draw_images(list(torch.rand(4, 3, 8, 8)), names)
    assert [" ".join(axes.get_title().split()) for axes in figure.axes] == names
    assert len({round(axes.get_position().y0, 3) for axes in figure.axes}) == 1


def test_a_name_that_no_font_can_write_is_a_number_with_a_key() -> None:
    names = ["cat", CAT, "two\nlines", "\udcff"]
    assert drawable(names) == ["cat", "class 1", "two lines", "class 3"]
    assert key_of(names) == {1: CAT, 3: "\udcff"}
    assert legible(f"a {CAT}") == "a ??"


def test_a_name_is_written_with_the_font_of_the_machine_that_has_its_characters(font: str) -> None:
    assert families(f"cat {CAT}") == ["DejaVu Sans", font] and drawable([CAT]) == [CAT]
    figure = draw_images(list(torch.full((1, 3, 8, 8), 255.0)), [CAT])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.axes[0].title.get_window_extent(canvas.get_renderer())
    pixels = torch.tensor(memoryview(canvas.buffer_rgba()).tolist())[..., 0]
    height = len(pixels)
    inside = pixels[height - int(box.y1) : height - int(box.y0), int(box.x0) : int(box.x1)]
    assert (inside < 50).float().mean() > 0.5  # black squares, and not the outline of a box


def test_a_long_line_loses_its_middle_and_keeps_both_ends() -> None:
    line = cut(NAMES[0], 90.0, 7.0)
    assert re.fullmatch("Great.*….*major\\)", line) and 75 < width_of(line, 7.0) <= 90
    assert cut("cat", 90.0, 7.0) == "cat"


def test_lines_are_broken_between_words_where_they_can_be() -> None:
    assert fitted("golden retriever puppy", 80.0, 7.0) == "golden retriever\npuppy"
    first, second = fitted(NAMES[2], 100.0, 7.0).split("\n")
    assert NAMES[2].startswith(first) and "…" in second and width_of(first, 7.0) > 90


@pytest.mark.parametrize("count", [26, 46, MOST_IN_KEY])
def test_a_confusion_matrix_of_many_classes_has_a_key_with_all_names(count: int) -> None:
    names = [f"kind {label:x}" for label in range(count)]
    figure = draw_confusions(torch.eye(count, dtype=torch.int64), names)
    shown = [text.get_text() for text in figure.findobj(Text)]
    assert set(names) <= set(shown) and "0" in [text.get_text() for text in figure.axes[0].get_xticklabels()]
    rows = {text.get_text(): text.get_position() for text in figure.findobj(Text) if text.get_text() in names}
    numbers = {text.get_position()[1]: text.get_text() for text in figure.findobj(Text) if text.get_text() == "17"}
    assert rows[names[17]][1] in numbers  # the number stands in the line of its name
    assert overlapping(figure) == []


def test_long_names_are_numbers_at_the_axes_and_stand_below() -> None:
    figure = draw_confusions(torch.eye(len(NAMES), dtype=torch.int64), NAMES)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [str(n) for n in range(len(NAMES))]
    shown = [text.get_text() for text in figure.findobj(Text)]
    assert "Кошка домашняя обыкновенная" in shown and "(no font: see the text)" in shown
    assert overlapping(figure) == []


def test_long_names_leave_half_of_the_width_to_figures_of_classes() -> None:
    figure = draw_by_class({"f1": [0.5] * len(NAMES)}, NAMES)
    assert overlapping(figure) == [] and figure.axes[0].get_position().width > 0.35
