"""The page of predict --page, in a real browser too, and the command review.

With SCREENSHOTS=DIR the browser's tests leave their pictures there.
"""

import csv
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from tones import SMALL, rows, tone

from datamodules import ImageFolder
from longseq.cli.page.folder import read_page, write_index
from longseq.cli.page.known import RunTable, start_of
from longseq.cli.review import _Server

HOSTILE = "<img src=x onerror=\"document.title='broken'\">&amp;.png"
COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


def main(*arguments: object) -> None:
    from longseq.cli import main

    main(list(map(str, arguments)))


def train(folder: Path, *flags: object) -> Path:
    common = ["--data.root", folder / "data", "--trainer.default_root_dir", folder, "--experiment", "colours"]
    encoder = [
        "--model.encoder",
        "ImageEncoder",
        "--model.encoder.attention",
        "Verma",
        "--model.encoder.patch_size",
        "4",
    ]
    main("fit", "--data", "ImageFolder", *common, "--data.batch_size", "8", *encoder, *SMALL, *flags)
    return folder / "runs/colours/0/best.ckpt"


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that tells colours apart, its data, new images in a folder new, and their page."""
    folder = tmp_path_factory.mktemp("coloured")
    random = np.random.default_rng(0)
    for place, number in (("data", 12), ("new", 4)):
        for name, colour in COLOURS.items():
            (folder / place / name).mkdir(parents=True)
            for count in range(number):
                pixels = (np.array(colour) + random.integers(0, 55, (8, 8, 3))).astype(np.uint8)
                file = HOSTILE if (place, name, count) == ("new", "red", 0) else f"{count}.png"
                Image.fromarray(pixels).save(folder / place / name / file)
    checkpoint = train(folder, "--model.learning_rate", "1e-2", "--trainer.max_epochs", "4")
    make_page(folder, checkpoint, "--explained", "1", "--out", folder / "new.csv")
    return folder


def make_page(folder: Path, checkpoint: Path, *flags: object) -> Path:
    common = ["--page", folder / "page", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    main("predict", "--ckpt_path", checkpoint, "--input", folder / "new", *common, *flags)
    return folder / "page"


@pytest.fixture
def page(coloured: Path, tmp_path: Path) -> Path:
    """A copy of the page, to be changed."""
    return Path(shutil.copytree(coloured / "page", tmp_path / "page"))


def test_the_page_has_the_predictions_of_out_and_the_labels_of_the_folders(coloured: Path) -> None:
    data = read_page(coloured / "page", "folder")
    with open(coloured / "new.csv", newline="") as file:
        predicted = {row["path"]: (row["class"], row["probability"]) for row in csv.DictReader(file)}
    names = data["classes"]
    items = {data["files"][item[0]]["path"]: item for item in data["items"]}
    shown = {path: (names[answer[0]], f"{scores[0][1]:.4f}") for path, (_, _, _, answer, scores, _) in items.items()}
    assert shown == predicted and len(shown) == 12
    assert all(names[file["known"][0]] == Path(file["path"]).parent.name for file in data["files"])
    first = max(items.values(), key=lambda item: item[5])
    (explained,) = [number for number, file in enumerate(data["files"]) if file["explained"]]
    assert explained == first[0]
    assert all((coloured / "page/files" / file["picture"]).is_file() for file in data["files"])


def test_names_of_files_are_no_markup(coloured: Path) -> None:
    text = (coloured / "page/index.html").read_text()
    assert "<img src=x" not in text and "\\u003cimg src=x" in text


def test_a_new_row_of_a_file_has_its_group_and_the_split_of_the_group(coloured: Path, tmp_path: Path) -> None:
    """The images 0.png to 11.png of each colour are of 12 groups."""
    data = ImageFolder(str(coloured / "data"), groups=r"([0-9]+)\.png")
    (tmp_path / "splits.csv").write_text(
        "path,label,split,fold,group\nred/0.png,red,test,4,0\nblue/0.png,blue,test,4,0\nred/1.png,red,train,3,1\n"
    )
    table = RunTable(data, tmp_path, coloured / "new")
    of_run, other = coloured / "data/blue/0.png", coloured / "new/green/0.png"
    assert table.cells_of(str(of_run)) == {"split": "test", "fold": "4", "group": "0"}
    assert table.cells_of(str(other)) == {"split": "test", "fold": str(other), "group": "0"}
    unknown = coloured / "new/red/one.png"
    assert table.cells_of(str(unknown)) == {"split": "train", "fold": str(unknown), "group": str(unknown)}


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("20240229_010203.WAV", 1709168523),  # AudioMoth; by `date -u -d "2024-02-29 01:02:03" +%s`
        ("SM4-1_20240229_010203_000.wav", 1709168523),  # Song Meter
        ("site 2024-02-29T01-02-03.flac", 1709168523),
        ("20241399_999999.wav", None),
        ("rec001.wav", None),
    ],
)
def test_the_name_of_a_recording_says_when_it_began(name: str, seconds: int | None) -> None:
    assert start_of(f"/some/where/{name}") == seconds


def test_a_recording_has_a_spectrogram_curves_and_its_sound(
    command: Callable, free_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "week").mkdir()
    sound = np.concatenate([tone(300, 0.5), tone(2000, 0.5)])
    soundfile.write(tmp_path / "week/20240229_010203.wav", sound, 8000)
    flags = ["--page", "page", "--explained", "0", "--window", "0.5"]
    done = command("predict", "--ckpt_path", free_checkpoint, "--input", "week", *flags)
    assert len(rows(done)) == 2, done.err
    data = read_page(tmp_path / "page", "folder")
    (file,) = data["files"]
    assert (file["seconds"], file["began"]) == (1.0, 1709168523)
    assert [item[1:3] for item in data["items"]] == [[0.0, 0.5], [0.5, 1.0]]
    assert (tmp_path / "page" / file["sound"]).read_bytes() == (tmp_path / "week/20240229_010203.wav").read_bytes()
    low, high = (
        np.array([int(level, 36) for level in file["curves"][str(data["classes"].index(name))]])
        for name in ("low", "high")
    )
    half = len(low) // 2
    assert low[: half - 1].mean() > high[: half - 1].mean() and low[half + 1 :].mean() < high[half + 1 :].mean()
    with Image.open(tmp_path / "page/files" / file["picture"]) as picture:
        level = np.asarray(picture.convert("L"), dtype=float)
    left, right = (part.mean(1).argmax() for part in np.split(level[:, : level.shape[1] // 2 * 2], 2, axis=1))
    assert left > right  # a low tone is further down


def test_a_page_of_bags_shows_where_explain_looks(command: Callable, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for label in ("0", "1"):
        (tmp_path / "bags" / label).mkdir(parents=True)
        for number in range(4):
            coords = np.stack(np.meshgrid([0, 256], [0, 256]), axis=-1).reshape(-1, 2)
            np.savez(tmp_path / f"bags/{label}/{number}.npz", features=random.normal(size=(4, 3)), coords=coords)
    flags = ["--model.encoder", "FeatureEncoder", "--model.encoder.depth", "0", "--model.encoder.attention", "None"]
    sizes = ["--model.encoder.dim", "8", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
    done = command("fit", "--data", "FeatureFolder", "--data.root", "bags", *flags, *sizes, "--baseline", "false")
    assert done.code == 0, done.err
    done = command("predict", "--ckpt_path", "runs/bags/0/best.ckpt", "--input", "bags/0/0.npz", "--page", "page")
    assert done.code == 0, done.err
    files = read_page(tmp_path / "page", "folder")["files"]
    assert [(tmp_path / "page/files" / file["explained"]).is_file() for file in files] == [True]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["review", "."],
            "folder: . has no page that longseq made; give the folder that longseq predict --page has written",
        ),
        (
            ["review", "nowhere"],
            "folder: nowhere has no page that longseq made; give the folder that longseq predict --page has written",
        ),
        (["review", ".", "--port", "0"], "port: must be in 1..65535, got 0; 8400 is usual"),
    ],
)
def test_a_folder_without_a_page_is_one_line(command: Callable, arguments: list[str], error: str) -> None:
    done = command(*arguments)
    assert (done.code, done.error) == (2, f"error: {error}")


def test_a_port_in_use_is_one_line(command: Callable, page: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command("review", page, "--port", port)
    assert done.code == 2 and done.error.startswith(f"error: port: {port} cannot be opened")


def test_decisions_of_unknown_classes_are_one_line(command: Callable, page: Path, coloured: Path) -> None:
    (page / "decisions.json").write_text(json.dumps({"red/0.png": {"label": ["violet"], "at": 1}}))
    what = f"{page}/decisions.json has decisions of the class 'violet', which the model does not have"
    done = command("review", page)
    assert (done.code, done.error) == (2, f"error: folder: {what}; give another folder")
    checkpoint = coloured / "runs/colours/0/best.ckpt"
    done = command("predict", "--ckpt_path", checkpoint, "--input", coloured / "new", "--page", page)
    assert (done.code, done.error) == (2, f"error: page: {what}; give another folder")


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"label": "red"}}', "\xff"])
def test_damaged_decisions_are_one_line_and_stay(command: Callable, page: Path, content: str) -> None:
    (page / "decisions.json").write_bytes(content.encode("latin-1"))
    done = command("review", page)
    assert done.code == 2 and done.error.endswith("; move it out of the folder")
    assert (page / "decisions.json").read_bytes() == content.encode("latin-1")


def test_a_page_replaces_no_files_of_others_and_lies_outside_of_its_input(command: Callable, coloured: Path) -> None:
    asked = ["predict", "--ckpt_path", coloured / "runs/colours/0/best.ckpt", "--input", coloured / "new", "--page"]
    Path("thesis").mkdir()
    Path("thesis/index.html").write_text("mine")
    error = command(*asked, "thesis").error
    assert error == "error: page: thesis has no page that longseq made; give another folder"
    Path("thesis/index.html").rename("thesis/chapter.html")
    assert command(*asked, "thesis").error.startswith("error: page: thesis holds what longseq has not written")
    assert "lies in the input" in command(*asked, coloured / "new/page").error


@pytest.fixture
def served(page: Path) -> Iterator[tuple[Path, int]]:
    """A page that is served, and its port."""
    data = read_page(page, "folder")
    outside = page.parent / "outside.wav"
    outside.write_bytes(bytes(range(200)))
    data["files"][1]["sound"] = "../outside.wav"
    data["files"][2]["sound"] = "../../../../../../../../../../etc/passwd"
    with _Server(page, data, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield page, server.server_port
        server.shutdown()


def ask(port: int, path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, bytes, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


@pytest.mark.parametrize(
    ("asked", "code", "wanted", "content_range"),
    [
        (None, 200, bytes(range(200)), None),
        ("bytes=0-0", 206, b"\0", "bytes 0-0/200"),
        ("bytes=190-", 206, bytes(range(190, 200)), "bytes 190-199/200"),
        ("bytes=-3", 206, bytes(range(197, 200)), "bytes 197-199/200"),
        ("bytes=150-999", 206, bytes(range(150, 200)), "bytes 150-199/200"),
        ("bytes=200-", 416, b"", "bytes */200"),
    ],
)
def test_a_sound_is_read_by_ranges(
    served: Any, asked: str | None, code: int, wanted: bytes, content_range: str
) -> None:
    found, body, headers = ask(served[1], "/sound/1", **({} if asked is None else {"Range": asked}))
    assert (found, body, headers["Content-Range"]) == (code, wanted, content_range)


def test_only_the_page_is_served_and_only_to_itself(served: Any) -> None:
    page, port = served
    (page / "files/link.png").symlink_to("/etc/passwd")
    for path in (
        "/files/link.png",
        "/../outside.wav",
        "/files/../../outside.wav",
        "/files/%2e%2e%2foutside.wav",
        "/sound/0",
        "/sound/2",
        "/sound/99",
        "/etc/passwd",
    ):
        assert ask(port, path)[0] == 404, path
    assert ask(port, "/", Host="evil.example")[0] == 403  # another name of 127.0.0.1
    assert ask(port, "/decisions", "PUT", "{}", Origin="http://evil.example", Content_Type="application/json")[0] == 403
    assert ask(port, "/decisions", "PUT", "{}", Content_Type="text/plain")[0] == 400
    unknown = json.dumps({"decisions": {"a": {"label": ["violet"], "at": 1}}, "table": ""})
    found, body, _ = ask(port, "/decisions", "PUT", unknown, Content_Type="application/json")
    assert found == 400 and b"violet" in body
    assert not (page / "decisions.json").exists()
    known = json.dumps({"decisions": {"a": {"label": ["red"], "at": 1}}, "table": "path,label\n\udcff.png,red\n"})
    assert ask(port, "/decisions", "PUT", known, Content_Type="application/json")[0] == 200
    assert json.loads(ask(port, "/decisions")[1]) == {"a": {"label": ["red"], "at": 1}}
    assert (page / "labels.csv").read_bytes() == b"path,label\n\xff.png,red\n"  # a name that is no UTF-8


def test_a_new_page_keeps_the_figure_of_the_one_before(coloured: Path, page: Path, command: Callable) -> None:
    (page / "decisions.json").write_text(json.dumps({"x": {"label": ["red"], "at": 1}, "y": {"at": 1}}))
    data = read_page(page, "folder")
    figures = json.loads((coloured / "runs/colours/0/metrics.json").read_text())
    (before,) = data["figures"]
    assert (before["name"], before["value"]) == ("accuracy", pytest.approx(figures["val/accuracy"]))
    value = before["value"]
    data["figures"][0] |= {"value": 0.125, "model": "another"}
    write_index(page, "new", data)
    asked = ["--input", coloured / "new/red/1.png", "--page", page, "--explained", "0"]
    for _ in range(2):  # the same model twice is no change
        done = command("predict", "--ckpt_path", coloured / "runs/colours/0/best.ckpt", *asked)
        assert done.code == 0, done.err
    again = read_page(page, "folder")
    assert [figure["value"] for figure in again["figures"]] == [0.125, value]
    assert again["figures"][0]["split"] == again["figures"][1]["split"] != ""
    assert again["figures"][1]["decisions"] == 1 and again["id"] == data["id"]


def opened(browser: Any, address: str, **options: Any) -> Any:
    tab = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
    tab.set_default_timeout(60_000)
    tab.errors = []
    tab.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.on("console", lambda message: message.type == "error" and tab.errors.append(message.text))
    tab.goto(address)
    tab.locator(".card").first.wait_for()
    return tab


@pytest.mark.needs("chromium")
def test_a_prediction_is_corrected_by_keyboard_exported_and_trained_from(coloured: Path, browser: Any) -> None:
    data = read_page(coloured / "page", "folder")
    uncertain = sorted(data["items"], key=lambda item: -item[5])
    files = [data["files"][item[0]] for item in uncertain]
    tab = opened(browser, (coloured / "page/index.html").as_uri(), accept_downloads=True)
    cards = tab.locator(".card")
    assert cards.count() == 12 and tab.title() == "new · predictions"
    shown = [card.get_attribute("title") for card in tab.locator(".card .path").all()]
    assert shown == [file["path"] for file in files]  # the most uncertain first
    assert tab.evaluate("[...document.images].filter((image) => image.complete && !image.naturalWidth).length") == 0
    cards.first.click()
    explained = tab.locator("#item .explained img")
    explained.wait_for()
    assert explained.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 100
    tab.keyboard.press("3")  # the first item is red
    assert tab.locator("#item h3").inner_text() == files[1]["path"]
    tab.keyboard.press("c")
    tab.keyboard.press("w")
    # back to the gallery; the fourth item is blue; keys that come before the browser tells that the dialog is closed
    tab.evaluate("""["Enter", "1", "2"].forEach((key) =>
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })))""")
    assert tab.locator("#item").is_hidden()
    tab.wait_for_timeout(100)
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("u")
    assert tab.locator("#decided").inner_text() == "4 of 12 decided"
    tab.wait_for_timeout(400)
    tab.reload()
    tab.locator(".card").first.wait_for()
    assert tab.locator("#decided").inner_text() == "4 of 12 decided"  # the browser has kept them
    tab.locator("#show").select_option("wrong")
    assert 1 <= tab.locator(".card").count() < 12
    tab.locator("#show").select_option("all")
    tab.locator("#classes button", has_text="green").click()
    assert tab.locator(".card").count() == sum(data["classes"][item[3][0]] == "green" for item in uncertain)
    of_run = """(path) => {
        page.table.rows.push(page.table.columns.map((name) => ({ path, label: "red", split: "train" })[name] ?? ""));
        const text = table();
        page.table.rows.pop();
        return text;
    }"""
    assert files[2]["row"] not in tab.evaluate(of_run, files[2]["row"])  # a sample of the run that is marked as wrong
    assert "other.png,red,train" in tab.evaluate(of_run, "other.png")
    of_group = """() => {
        page.table.columns.push("group");
        items.forEach((item) => { item.file.cells = { split: "test", group: "site" }; });
        const text = table();
        page.table.columns.pop();
        items.forEach((item) => { item.file.cells = { split: "train" }; });
        return text;
    }"""
    assert f"{files[3]['row']},blue,test,site" in tab.evaluate(of_group)
    with tab.expect_download() as download:
        tab.locator("#export").click()
    download.value.save_as(coloured / "page/labels.csv")
    assert tab.errors == [] and tab.title() == "new · predictions"
    tab.close()
    with open(coloured / "page/labels.csv", newline="") as file:
        table = {row["path"]: row for row in csv.DictReader(file)}
    with open(coloured / "runs/colours/0/splits.csv", newline="") as file:
        before = {row["path"]: row for row in csv.DictReader(file)}
    new = {path: (row["label"], row["split"]) for path, row in table.items() if path not in before}
    answer = data["classes"][uncertain[1][3][0]]
    wanted = {files[0]["row"]: "red", files[1]["row"]: answer, files[3]["row"]: "blue"}
    assert new == {path: (label, "train") for path, label in wanted.items()}
    assert {path: row for path, row in table.items() if path in before} == before
    words = data["retrain"].split()
    assert words[words.index("--data.table") + 1] == str(coloured / "page/labels.csv")
    main(
        *words[1:],
        "--trainer.max_epochs",
        "1",
        "--trainer.default_root_dir",
        coloured,
        "--baseline",
        "false",
        *SMALL[6:],
    )
    with open(coloured / "runs/colours/1/splits.csv", newline="") as file:
        assert {row["path"]: row["split"] for row in csv.DictReader(file)} == {
            path: row["split"] for path, row in table.items()
        }


@pytest.mark.needs("chromium")
def test_what_is_decided_on_a_served_page_is_in_its_folder(served: Any, browser: Any) -> None:
    page, port = served
    tab = opened(browser, f"http://127.0.0.1:{port}/")
    with tab.expect_response(re.compile("decisions")):
        tab.keyboard.press("w")
    with tab.expect_response(re.compile("decisions")):
        tab.keyboard.press("2")
    tab.get_by_text("saved in the folder").wait_for()
    assert tab.errors == []
    tab.close()
    labels = [decision["label"] for decision in json.loads((page / "decisions.json").read_text()).values()]
    assert labels == [None, ["green"]]
    with open(page / "labels.csv", newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)].count("green") == 13  # those of the run, and one


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [1400, 390])
def test_five_thousand_items_are_loaded_while_scrolling(page: Path, browser: Any, width: int) -> None:
    data = read_page(page, "folder")
    files, given = data["files"], data["items"]
    data["files"] = [{**files[number % 12], "row": f"{number}.png"} for number in range(5000)]
    data["items"] = [[number, *given[number % 12][1:]] for number in range(5000)]
    write_index(page, "many", data)
    tab = opened(browser, (page / "index.html").as_uri())
    tab.set_viewport_size({"width": width, "height": 844})
    assert tab.locator("#count").inner_text() == "5000 items" and tab.locator(".card").count() < 400
    assert tab.evaluate("document.documentElement.scrollWidth") <= width  # nothing is cut off at the side
    tab.keyboard.press("ArrowRight")
    began = tab.evaluate("performance.now()")
    tab.locator("#order").select_option("score")
    assert tab.evaluate("performance.now()") - began < 5000  # a machine that does much else takes its time
    for _ in range(3):
        tab.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        tab.wait_for_timeout(100)
    assert 200 < tab.locator(".card").count() < 2000 and tab.errors == []
    if folder := os.environ.get("SCREENSHOTS"):
        tab.screenshot(path=Path(folder) / f"review-{width}.png")
    tab.close()
