"""The command board, and what a person sees on its page, in a real browser (Debian's package chromium).

With SCREENSHOTS=DIR the runs are trained for some minutes, and the browser's tests leave their pictures there:
docs/board.png and docs/board-images.png (of guides/reading-results.md) are two.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import forked
import pytest

ROOT = Path(__file__).parents[2]
RUNS = ["digits/0/Linformer-k16-seed0", "vowels/0/Verma-seed1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of images and a detector of sounds, trained for a few seconds."""
    from longseq.cli import main

    folder = tmp_path_factory.mktemp("board")
    common = ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(folder)]
    images = ["fit", "--config", "image/digits", *common]
    verma = ["--model.encoder.attention", "Verma", "--model.encoder.attention.k", "null", "--seed_everything", "1"]
    sounds = ["fit", "--config", "audio/vowels", "--model.task", "MultiLabel", *verma, *common]
    if "SCREENSHOTS" not in os.environ:
        small = ["--model.encoder.dim", "16", "--model.encoder.depth", "2"]
        images += [*small, "--trainer.max_epochs", "2"]
        sounds += [*small, "--trainer.max_epochs", "1", "--data.num_train", "300"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(forked.DRAWS, "1")
        main(images)
        main(sounds)
    return folder / "runs"


def tags_of(address: str) -> dict[str, Any]:
    """The curves that the page knows of each run."""
    with urlopen(address.replace("#custom_scalars", "data/plugin/scalars/tags")) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    process = forked.start(ROOT / "train.py", "board", "--logdir", runs, cwd=runs)
    try:
        while not process.said()[0].endswith("\n"):
            assert process.poll() is None, process.said()[1]
            time.sleep(0.05)
        address = process.said()[0].strip()
        while not all("test/loss" in tags_of(address).get(run, {}) for run in RUNS):  # it reads the runs by and by
            time.sleep(0.1)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture
def tab(address: str, browser: Any) -> Iterator[Callable[[str], Any]]:
    """Open a tab of the page, 1400 x 900, as the first that is opened."""
    pages = []

    def open_(name: str, dark: bool = False) -> Any:
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="dark" if dark else "light")
        page.set_default_timeout(120_000)  # a machine that does much else takes its time
        pages.append(page)
        page.goto(address.replace("custom_scalars", name))
        return page

    yield open_
    for page in pages:
        page.close()


def photographed(page: Any, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.wait_for_timeout(2000)
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_page_is_for_this_machine_alone(address: str) -> None:
    assert address.startswith("http://127.0.0.1:") and address.endswith("/#custom_scalars")
    with urlopen(address.partition("#")[0]) as answer:
        assert b"TensorBoard" in answer.read()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--logdir", "nowhere"], "logdir: nowhere is not a folder; give the one that holds the runs"),
        (["--logdir", ".", "--port", "70000"], "port: must be in 1..65535, got 70000; 6006 is usual"),
    ],
)
def test_a_wrong_flag_is_one_line(command: Callable, arguments: list[str], error: str) -> None:
    assert command("board", *arguments).error == f"error: {error}"


def test_a_port_that_is_taken_is_named(command: Callable) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command("board", "--logdir", ".", "--port", port)
    assert done.code == 2 and done.error.startswith(f"error: port: {port} cannot be opened")


@pytest.mark.needs("chromium")
def test_the_first_screen_is_loss_accuracy_learning_rate_and_tokens_a_second_of_named_runs(tab: Callable) -> None:
    page = tab("custom_scalars")
    for run in RUNS:
        page.get_by_text(run).first.wait_for()
    for chart in ("loss", "accuracy", "learning rate", "tokens a second"):
        title = page.locator("tf-custom-scalar-multi-line-chart-card", has_text=chart).first
        title.locator("svg .line, svg path").first.wait_for(state="attached")
        assert title.bounding_box()["y"] < 900, chart
    assert page.get_by_text("gradient norm").count() == 1
    page.get_by_text("Ignore outliers in chart scaling").click()  # else the picture's curves leave their charts
    photographed(page, "board")


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_images_are_as_wide_as_their_cards_and_white_on_a_dark_page_too(tab: Callable, dark: bool) -> None:
    page = tab("images", dark)
    page.locator("tf-tag-filterer input").fill("val/(mistakes|confusion)")
    shown = page.locator("tf-category-paginated-view").first.locator("tf-image-loader img")
    shown.first.wait_for()
    page.wait_for_timeout(1000)
    boxes = [image.bounding_box() for image in shown.all()]
    assert len(boxes) == 3  # a detector has no confusion
    assert all(340 <= box["width"] <= 380 for box in boxes)
    corner = shown.first.evaluate(
        "i => { const c = document.createElement('canvas'); c.width = c.height = 1; const x = c.getContext('2d');"
        " x.drawImage(i, 0, 0, 1, 1, 0, 0, 1, 1); return Array.from(x.getImageData(0, 0, 1, 1).data) }"
    )
    assert corner == [255, 255, 255, 255]
    if not dark:
        photographed(page, "board-images")


@pytest.mark.needs("chromium")
def test_every_image_of_the_run_is_on_its_tab(tab: Callable) -> None:
    page = tab("images")
    wanted = ["attention", "by_class", "confusion", "decision", "mistakes", "summary_tokens"]
    for name in [*(f"val/{each}" for each in wanted), "test/confusion", "test/mistakes", "inputs/samples"]:
        page.locator("tf-tag-filterer input").fill(name)
        found = page.locator("tf-category-paginated-view").first
        found.get_by_text(name).first.wait_for()
        found.locator("tf-image-loader img").first.wait_for()


@pytest.mark.needs("chromium")
def test_the_hparams_tab_shows_what_a_person_compares_without_a_click(tab: Callable) -> None:
    page = tab("hparams")
    header = page.get_by_text("Trial ID").first
    header.wait_for()
    page.get_by_text("learning_rate").nth(1).wait_for()  # beside its checkbox, as a column too
    for name in ("attention", "batch_size", "data", "k", "learning_rate"):
        assert page.get_by_text(name, exact=True).count() >= 2, name
    for name in ("parameters", "precision", "seed", "tokens"):  # to tick
        page.get_by_text(name, exact=True).first.wait_for()
    for name in ("hp/val_best", "hp/test"):  # of both tasks
        page.get_by_text(name, exact=True).first.wait_for(state="attached")
    photographed(page, "board-hparams")


@pytest.mark.needs("chromium")
def test_the_use_of_processor_and_memory_is_a_curve(tab: Callable) -> None:
    page = tab("scalars")
    for name in ("processor_percent", "peak_memory_gib"):
        page.locator("tf-tag-filterer input").fill(name)
        card = page.locator("tf-scalar-card", has_text=name).first
        card.locator("svg .line, svg path").first.wait_for(state="attached")


@pytest.mark.needs("chromium")
def test_the_mistakes_of_the_test_can_be_heard(tab: Callable) -> None:
    page = tab("audio")
    page.get_by_text("_taken_for_").first.wait_for()
    page.locator("audio").first.wait_for(state="attached")


@pytest.mark.needs("chromium")
def test_command_configuration_and_model_are_text(tab: Callable) -> None:
    page = tab("text")
    for name, text in {
        "command": "longseq fit --config",
        "configuration": "class_path: longseq.ImageEncoder",
        "model": "attention   Linformer(k=16",
    }.items():
        page.locator("tf-tag-filterer input").fill(name)
        page.get_by_text(text).first.wait_for(state="attached")


@pytest.mark.thorough
@pytest.mark.needs("chromium")
def test_the_projector_holds_the_validation_split(tab: Callable) -> None:
    page = tab("projector")
    inside = page.frame_locator("iframe").frame_locator("iframe")
    inside.get_by_text("Points: 143").first.wait_for()
    inside.get_by_text("validation:").first.wait_for(state="attached")
