"""Data sets with names: their official splits, and what happens if a data set is incomplete."""

import io
import shutil
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import small_sets
import torch
from PIL import Image
from scipy.ndimage import distance_transform_edt, label
from torchvision import datasets
from torchvision.transforms import v2

from datamodules import (
    CIFAR10,
    CIFAR100,
    ESC50,
    MNIST,
    DataError,
    FashionMNIST,
    ImageFolder,
    Pathfinder,
    SpeechCommands,
    TinyImageNet,
)  # fmt: skip
from datamodules.sets import esc50, pathfinder, speech_commands
from datamodules.sets.fetch import unpack

# Images


@pytest.fixture
def small_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of random images in the format of CIFAR-10; the checksums are replaced to match it."""
    small_sets.cifar10(tmp_path, monkeypatch)
    return tmp_path


def test_cifar_is_unpacked_without_a_network_also_when_half_of_it_is_there(small_cifar, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("opened a connection"))
    data = CIFAR10(str(small_cifar))
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [30, 10, 20]
    folder = small_cifar / "cifar-10-batches-py"
    (folder / "data_batch_2").write_bytes((folder / "data_batch_2").read_bytes()[:1000])
    again = CIFAR10(str(small_cifar))
    again.setup()
    assert torch.equal(again.train_set.inputs, data.train_set.inputs)


def test_grey_cifar_is_the_luminance_of_the_colours(small_cifar):
    colour, grey = CIFAR10(str(small_cifar)), CIFAR10(str(small_cifar), grayscale=True)
    colour.setup()
    grey.setup()
    assert grey.shape == (1, 32, 32)
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]  # luminance by ITU-R 601-2
    expected = (colour.test_set.inputs * weights).sum(1, keepdim=True)
    assert (grey.test_set.inputs - expected).abs().max() < 1.1


@pytest.mark.parametrize(("kind", "classes"), [(CIFAR10, 10), (CIFAR100, 100)])
def test_absent_cifar_says_which_archive_goes_where(kind, classes, tmp_path):
    data = kind(str(tmp_path))
    assert data.num_classes == len(set(data.class_names)) == classes
    with pytest.raises(
        DataError, match=r"no such folder; put cifar-10+-python.tar.gz in .* \(md5 .*\), or set data.downl"
    ):
        data.setup()


def test_fashion_mnist_reads_its_own_folder(real_data, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.FashionMNIST, "resources", datasets.MNIST.resources)  # MNIST's files stand in
    (tmp_path / "FashionMNIST").mkdir()
    (tmp_path / "FashionMNIST/raw").symlink_to(real_data / "MNIST/raw")
    data = FashionMNIST(str(tmp_path))
    data.setup()
    assert len(data.test_set) == 10_000
    assert data.class_names[9] == "Ankle boot"


def test_tiny_imagenet_has_its_official_test_and_the_names_of_its_classes(few_of_tiny_imagenet):
    data = TinyImageNet(str(few_of_tiny_imagenet))
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [90, 10, 500]
    assert all(name.startswith("tiny-imagenet-200/val/") for name in data.test_set.names)
    assert "goldfish" in data.class_names
    grey = ImageFolder(str(few_of_tiny_imagenet / "tiny-imagenet-200/train"), size=8, grayscale=True)
    grey.setup()
    assert grey.shape == (1, 8, 8) and len(grey.train_set) + len(grey.val_set) + len(grey.test_set) == 10 * 10


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100, MNIST, FashionMNIST])
def test_small_pictures_have_the_size_that_is_asked_for(kind, tmp_path, monkeypatch):
    whole = small_sets.SMALL[kind](tmp_path, monkeypatch)
    small = kind(str(tmp_path), size=12)
    whole.setup()
    small.setup()
    assert small.shape == (whole.shape[0], 12, 12) == tuple(small.test_set.inputs.shape[1:])
    of_whole, of_small = (data.test_set.inputs.float().mean((1, 2, 3)) for data in (whole, small))
    torch.testing.assert_close(of_small, of_whole, atol=3, rtol=0)  # in grey levels of noise: no part is cut off
    with pytest.raises(ValueError, match="^size must be in 1..1024, got 0"):
        kind(str(tmp_path), size=0)


def joined(image: np.ndarray) -> bool:
    """Whether both dots touch one path. It fills the gaps between dashes and follows the lines that result."""
    ink = image > 60
    scale = image.shape[0] / 32
    paths = distance_transform_edt(~ink) < 0.5 * scale
    dots = distance_transform_edt(ink) > 0.9 * scale
    parts, _ = label(paths, structure=np.ones((3, 3)))
    spots, count = label(dots, structure=np.ones((3, 3)))
    first, *others = (set(parts[spots == number]) for number in range(1, count + 1))
    return not others or bool(first & others[0])  # a single spot is two dots that touch: rarely on two paths


@pytest.mark.parametrize("dashes", [1, 6, 9])
def test_pathfinders_dots_are_joined_where_it_says_so(dashes, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path))
    data = Pathfinder(size=128, dashes=dashes, num_train=20, num_test=40)
    data.setup()
    images, labels = data.test_set.inputs, data.test_set.labels
    assert labels.bincount().tolist() == [20, 20]
    found = torch.tensor([joined(image.numpy()) for image in images[:, 0]])
    assert (found == (labels == 1)).float().mean() >= 0.95  # joined errs if a dot touches another path


def test_pathfinder_is_decided_by_its_seed_made_once_and_complete_or_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSEQ_CACHE", str(tmp_path))
    settings = {"num_train": 20, "num_test": 10}
    data, other = Pathfinder(**settings), Pathfinder(**settings, seed=1)
    data.setup()
    other.setup()
    assert not torch.equal(data.test_set.inputs, other.test_set.inputs)
    alone = pathfinder.draw_paths(32, 9, 5, True, [0, 21])
    assert np.array_equal(data.test_set.inputs[1, 0], alone)  # drawn alone, the image is the same

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        Pathfinder(num_train=40, num_test=10).setup()
    assert len(list((tmp_path / "pathfinder").glob("*.pt"))) == 2
    assert not list((tmp_path / "pathfinder").glob(".*.part"))
    again = Pathfinder(**settings)
    again.setup()
    assert torch.equal(again.train_set.inputs, data.train_set.inputs)


@pytest.mark.parametrize("size", [32, 64, 256])
def test_pathfinder_is_the_same_drawing_at_every_size(size):
    large, small = (pathfinder.draw_paths(s, 6, 3, False, [3]) / 255 for s in (256, size))
    side = 256 // size
    assert np.abs(large.reshape(size, side, size, side).mean((1, 3)) - small).mean() < 0.02


# Sound


def test_esc50_is_split_by_its_folds(real_data):
    data = ESC50(str(real_data), test_fold=2, val_fold=1)
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == [60, 20, 20]
    assert all(Path(name).name.startswith("2-") for name in data.test_set.names)
    assert all(Path(name).name.startswith("1-") for name in data.val_set.names)


def test_speech_commands_has_its_official_lists(real_data):
    data = SpeechCommands(str(real_data))
    data.setup()
    base = real_data / "SpeechCommands/speech_commands_v0.02"
    for split, name in (("val", "validation_list.txt"), ("test", "testing_list.txt")):
        listed = (base / name).read_text().split()
        assert sorted("/".join(path.split("/")[-2:]) for path in data.splits()[split].names) == sorted(listed)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_sets.speech_commands(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize(("task", "sizes"), [("35", [96, 12, 12]), ("10", [80, 10, 10]), ("12", [96, 12, 12])])
def test_the_tasks_of_speech_commands(task, sizes, words):
    data = SpeechCommands(str(words), task=task)
    data.setup()
    assert [len(samples) for samples in data.splits().values()] == sizes
    if task == "12":
        assert data.class_names == sorted([*speech_commands.TEN, "silence", "unknown"])
        counts = data.train_set.labels.bincount()
        assert [int(counts[data.class_names.index(name)]) for name in ("unknown", "silence", "yes")] == [8, 8, 8]
        noises = {name.split()[0] for name in data.test_set.names if "noise" in name}
        assert noises == {"SpeechCommands/speech_commands_v0.02/_background_noise_/hum.wav"}
        starts = [float(name.split()[1].split("-")[0]) for name in data.train_set.names if "noise" in name]
        assert max(starts) <= 23.0  # training must not use the last fifth of the recording


def test_a_listed_clip_that_is_not_there_is_named(words):
    (words / "SpeechCommands/speech_commands_v0.02/yes/9.wav").unlink()
    with pytest.raises(DataError, match=r"yes/9\.wav: no such file"):
        SpeechCommands(str(words)).setup()


@pytest.mark.parametrize("missing", ["validation_list.txt", "testing_list.txt"])
def test_speech_commands_without_a_list_of_a_split_says_what_to_unpack(words, missing):
    (words / "SpeechCommands/speech_commands_v0.02" / missing).unlink()
    lists = r"no SpeechCommands/speech_commands_v0\.02 with validation_list\.txt and testing_list\.txt; unpack http"
    with pytest.raises(DataError, match=lists):
        SpeechCommands(str(words)).setup()


@pytest.mark.parametrize("missing", ["train", "val"])
def test_tiny_imagenet_without_a_part_says_what_to_unpack(missing, tmp_path, monkeypatch):
    data = small_sets.tiny_imagenet(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "tiny-imagenet-200" / missing)
    with pytest.raises(DataError, match=r"no tiny-imagenet-200 with train and val/val_annotations\.txt; unpack http"):
        data.setup()


# Downloads


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small ESC-50 as an archive on a local server."""
    folder = tmp_path / "served"
    folder.mkdir()
    small_sets.esc50(tmp_path / "small", monkeypatch)
    shutil.make_archive(str(folder / "master"), "zip", tmp_path / "small", "ESC-50-master")
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self):
            requests.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setattr(esc50, "URL", f"http://127.0.0.1:{running.server_port}/master.zip")
        yield folder, requests
        running.shutdown()


def loaded(root: Path, **options) -> ESC50:
    data = ESC50(str(root), **options)
    data.setup()
    return data


def test_nothing_is_fetched_without_being_asked(server, tmp_path):
    (tmp_path / "root").mkdir()
    with pytest.raises(
        DataError, match=r"root: no ESC-50-master/meta/esc50.csv; unpack http.*, or set data.download to t"
    ):
        loaded(tmp_path / "root")
    assert server[1] == []


def test_a_data_set_is_fetched_once_and_half_of_one_is_made_anew(server, tmp_path):
    root = tmp_path / "root"
    assert len(loaded(root, download=True).train_set) == 18
    assert len(loaded(root, download=True).train_set) == 18
    assert server[1] == ["/master.zip"]
    (root / "ESC-50-master/audio/1-rain-0.wav").unlink()
    with pytest.raises(DataError, match=r"1-rain-0\.wav: no such file"):
        loaded(root)
    assert len(loaded(root, download=True).train_set) == 18
    assert server[1] == ["/master.zip"]  # no second download: the archive is still there
    assert not [path for path in root.iterdir() if path.name.endswith(".part")]


def test_an_archive_that_is_cut_off_is_named_and_nothing_is_left(server, tmp_path):
    whole = (server[0] / "master.zip").read_bytes()
    (server[0] / "master.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"master\.zip: broken or cut off \(.+\); delete it and run again"):
        loaded(tmp_path / "root", download=True)
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["master.zip"]


def test_without_a_network_the_message_says_which_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setattr(esc50, "URL", "http://127.0.0.1:9/master.zip")
    with pytest.raises(DataError, match=r"9/master\.zip: cannot be fetched .* or put master\.zip there") as error:
        loaded(tmp_path / "root", download=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["../evil.txt", "/tmp/evil.txt", "a/../../evil.txt", "..\\evil.txt", "C:/evil.txt", "."]
)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_whose_members_would_leave_their_folder_is_refused(kind, name, tmp_path):
    archive = tmp_path / f"bad.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("fine.txt", "fine")
            packed.writestr(name, "evil")
    else:
        with tarfile.open(archive, "w") as packed:
            member = tarfile.TarInfo(name)
            member.size = 4
            packed.addfile(member, io.BytesIO(b"evil"))
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"is not inside its folder; do not trust this archive"):
        unpack(archive, tmp_path / "inside/deep")
    assert not {path for path in set(tmp_path.rglob("*")) - before if "evil" in path.name}


@pytest.mark.parametrize("damage", ["encrypted", "corrupt", "unknown method"])
def test_a_zip_that_cannot_be_unpacked_is_named(damage, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.txt", "a" * 1000)
    content = bytearray((tmp_path / "x.zip").read_bytes())
    central = content.index(b"PK\1\2")
    if damage == "encrypted":
        content[6] |= 1
        content[central + 8] |= 1
    elif damage == "unknown method":
        content[8] = content[central + 10] = 97
    else:
        content[35:40] = b"\xff" * 5  # compressed bytes start at 35, after a header of 30 and a name of 5
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.zip: broken or cut off \(.+\); delete it and run again"):
        unpack(tmp_path / "x.zip", tmp_path / "out")


def test_links_in_an_archive_are_left_out(tmp_path):
    with tarfile.open(tmp_path / "links.tar", "w") as packed:
        link = tarfile.TarInfo("passwords")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(link)
        Image.new("L", (2, 2)).save(tmp_path / "a.png")
        packed.add(tmp_path / "a.png", "a.png")
    unpack(tmp_path / "links.tar", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.png"]


def test_permuted_mnist_has_the_same_new_order_of_pixels_in_every_image(tmp_path, monkeypatch):
    plain = small_sets.mnist(tmp_path, monkeypatch)
    permuted, again, other = (MNIST(str(tmp_path), permutation=seed) for seed in (0, 0, 1))
    for data in (plain, permuted, again, other):
        data.setup()
    before, after = (torch.cat([part.inputs for part in data.splits().values()]) for data in (plain, permuted))
    assert before.shape == after.shape
    # a pixel is known by its values in all images
    places = {tuple(values): place for place, values in enumerate(before.flatten(1).T.tolist())}
    order = [places[tuple(values)] for values in after.flatten(1).T.tolist()]
    assert sorted(order) == list(range(28 * 28)) != order
    assert torch.equal(permuted.test_set.inputs, again.test_set.inputs)
    assert not torch.equal(permuted.test_set.inputs, other.test_set.inputs)

    image = plain.test_set.inputs[3]
    Image.fromarray(image[0].numpy()).save(tmp_path / "three.png")
    assert torch.equal(permuted.read(tmp_path / "three.png"), permuted.test_set.inputs[3])


def test_permuted_mnist_takes_no_transforms(tmp_path):
    with pytest.raises(ValueError, match=r"augment must be empty with permutation"):
        MNIST(str(tmp_path), permutation=0, augment=[v2.RandomHorizontalFlip()])
    with pytest.raises(ValueError, match="permutation must be 0 or more, or null, got -1"):
        MNIST(str(tmp_path), permutation=-1)
