"""Every command, flag and snippet of the README and of the site's pages is run, or at least parsed, here."""

import functools
import inspect
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import groupby, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen

import forked
import numpy as np
import pytest
import yaml
from pages import CITED, PAGES, ROOT, SMALL_MODEL, TINY, Block, blocks, commands, flags, snippets, unfounded
from small_sets import SMALL
from torch.distributed.run import get_args_parser

import datamodules
import longseq
from longseq import encoders, tasks, training
from longseq.cli import function_commands
from longseq.cli.before_torch import with_configurations
from longseq.cli.command_list import COMMANDS
from longseq.cli.errors import UserError
from longseq.cli.model_commands import Commands
from longseq.reports.equal_time import TRIAL, steps_within
from longseq.training.data import lacking

# their snippets have tests of their own, which say more
ELSEWHERE = {"docs/serve.md": "tests/deploy/test_serve.py", "docs/python.md": "tests/encoders/test_measured.py"}
OTHER_PROGRAMS = {".venv/bin/pip", "source", "export", "tensorboard", "curl"}
FIRST = [ROOT / "README.md", ROOT / "docs/commands.md"]  # make thorough runs the commands of the other pages too
GUIDES = [page for page in PAGES if page.parent.name == "guides" and snippets(page)]
# Words of the commands that are only parsed, and what they need.
ONLY_PARSED = {
    "--data.download": "a download",
    "gpu": "a GPU",
    "cuda": "a GPU",
    "ddp": "several processes or nodes; tests/training/test_ddp.py and tests/faults/test_nodes.py have them",
    "SequenceParallel": "several processes; tests/training/test_sequence_parallel.py has them",
    "FullySharded": "several processes; tests/training/test_fully_sharded.py has them",
    "vit_base_patch16_224": "a large model; docs/coming-from/timm.md has such a command with a smaller one",
    "ASTEncoder": "a checkpoint of transformers; tests/encoders/test_ast.py makes one and runs such a command",
    "embed": "the file of a network; tests/cli/test_embed.py makes small ones",
    "--format": "seconds each; tests/deploy/test_export.py and tests/deploy/test_shared.py run every format",
}
# Flags with which a command takes a second.
SHORTER = {
    "benchmark": ["--n", "16", "--k", "4", "--dim", "8", "--heads", "1", "--repeats", "1", "--mechanisms", "linformer"],
    "approximation": ["--n", "32", "--k", "4", "--steps", "2", "--draws", "1"],
    "spectrum": ["--num_inputs", "2"],
    "needle": ["--seconds", "2", "--trials", "2"],
}
# Flags that make a training quicker; the page's own values are parsed before them.
QUICK = ["--data.batch_size", "4", "--trainer.precision", "32-true"]
ids = functools.partial(map, lambda page: str(page.relative_to(ROOT)))


def is_record(page: Path) -> bool:
    """Whether a page says what was done, and not what to do."""
    return page.parent.name in ("results", "notebook")


class Parsed(BaseException):
    """A command line is right; what follows would run it."""


@pytest.fixture
def parse(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], set[str]]:
    """Parse a command as the command line does, with its configurations and its checkpoint, stop before it runs, and
    return the names of its options."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("longseq.cli.settings.refuse_missing_devices", lambda *_: None)
    parsed: list[dict[str, Any]] = []

    def stop(command: Commands) -> None:
        parsed.append(command.settings.as_dict())
        raise Parsed

    class Parser(function_commands.OneLineParser):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            parsed.append(super().parse_args(*args, **kwargs).as_dict())
            raise Parsed

    monkeypatch.setattr(Commands, "instantiate_classes", stop)
    monkeypatch.setattr(function_commands, "OneLineParser", Parser)

    def run(words: list[str]) -> set[str]:
        words = with_configurations(in_place(words))
        is_function = bool(COMMANDS[words[0]].package)
        with pytest.raises(Parsed), ExitStack() as held:
            function_commands.run_function(words[0], words[1:]) if is_function else Commands(words, held)
        asked = parsed[-1]
        options = set(named(asked))
        if words[0] == "sweep":  # what it would train
            first = [f"--{key}={value}" for key, value in map(first_of, asked["grid"])]
            options |= run(["fit", *(f"--config={path}" for path in asked["config"]), *asked["flags"], *first])
        return options

    return run


def named(settings: Any, key: str = "") -> Iterator[str]:
    """The names of flags: the paths to all values of a configuration."""
    yield key
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from named(value, key if name == "init_args" else f"{key}.{name}".lstrip("."))


def first_of(entry: str) -> tuple[str, str]:
    """The first setting of an entry of a grid, key=value,value."""
    key, _, values = entry.partition("=")
    return key, values.split(",")[0]


def in_place(words: list[str]) -> list[str]:
    """The words of a command, with a run of the fixture for a run that the page only names; a training that starts from
    such a run starts from the fixture's of its configuration, or else from the newest."""
    stands_in = {"--ckpt_path": "runs/needles/0/best.ckpt", "--resume": "runs/digits/0"}
    newest = max(Path("runs").glob("*/*/best.ckpt"), key=lambda path: path.stat().st_mtime)
    of_the_fixture = [Path("runs", Path(name).stem, "0/best.ckpt") for name in configurations(words)]
    start = next((str(path) for path in of_the_fixture if path.exists()), str(newest))
    stands_in |= {"--model.init_from": start, "--model.teacher": start}
    return [
        stands_in[before] if before in stands_in and not word.startswith("--") and not Path(word).exists() else word
        for before, word in pairwise(["", *words])
    ]


def words_of_longseq(words: list[str]) -> list[str] | None:
    """The arguments, if a command is one of longseq; torchrun's own flags are parsed here."""
    if words[0] == "torchrun":
        asked = get_args_parser().parse_args(words[1:])
        words = ["python", asked.training_script, *asked.training_script_args]
    if words[:2] == ["python", "train.py"]:
        return words[2:]
    return words[1:] if Path(words[0]).name == "longseq" else None


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.thorough] * is_record(page)) for page in PAGES],
    ids=ids(PAGES),
)
def test_every_command_of_a_page_is_one_that_exists(page: Path, parse: Callable) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block, words in commands(page):
        arguments = words_of_longseq(words)
        if arguments in TRAINED:  # test_every_command_of_other_pages_runs parses it, too
            continue
        if arguments is not None and "pooled" not in " ".join(words):  # the guide that writes it runs it
            try:
                parse(arguments)
            except UserError as error:
                pytest.fail(f"{block}: {' '.join(words)}: {error}")
        elif words[0] == "make":
            assert set(words[1:]) <= set(targets), f"{block}: {words}"
        elif words[0] == "python":
            script = (ROOT / words[1]).read_text()
            assert all(word in script for word in words[2:] if word.startswith("--")), f"{block}: {words}"
        else:
            assert arguments is not None or words[0] in OTHER_PROGRAMS, f"{block}: {words[0]} is not checked"


FIT = ["fit", "--config"]
CONTEXTS = [
    [*FIT, "image/folder", "--trainer.callbacks+=EMAWeightAveraging"],  # takes nearly all
    [*FIT, "image/folder", "--trainer.callbacks+=QuantizationAwareTraining"],
    *([*FIT, name] for name in ("audio/folder", "audio/events", "audio/needles")),
    *([*FIT, "image/folder", f"--model.encoder.attention={name}"] for name in ("Verma", "Softmax")),
    *([*FIT, "image/folder", f"--data={name}"] for name in ("CIFAR10", "MNIST", "FSDD", "SpeechCommands", "ESC50")),
    [*FIT, "image/folder", "--data=ImageShards"],
    [*FIT, "image/folder", "--data=Pathfinder"],
    [*FIT, "image/folder", "--model.encoder.stem=Pretrained", "--model.encoder.stem.model=resnet18"],
    [*FIT, "image/folder", "--model.encoder=TimmEncoder", "--model.encoder.model=vit_tiny_patch16_224"],
    *([*FIT, name] for name in ("feature/bags", "feature/birdnet", "signal/folder")),
    ["predict", "--ckpt_path", "CKPT", "--input", "x"],
    ["sweep", "--config", "audio/fsdd", "--grid", "model.encoder.attention.k=8"],
    ["export", "--ckpt_path", "CKPT"],
    ["needle", "--ckpt_path", "CKPT"],
    [*FIT, "audio/folder", "--model.encoder=ASTEncoder", "--model.encoder.pretrained=x"],
    ["embed", "--network=BirdNET", "--input", "x", "--out", "x"],
    ["embed", "--network=Timm", "--network.model=x", "--input", "x", "--out", "x"],
    ["board"],
]


def test_every_flag_in_a_sentence_or_table_exists_and_takes_its_value(parse: Callable) -> None:
    """In one of the contexts at least; a flag without a value only has to exist."""
    reasons: dict[tuple[str, ...], str] = {}

    def refused(given: list[tuple[str, ...]], context: list[str]) -> list[tuple[str, ...]]:
        """Those of the flags with which the command line cannot be parsed: the one whose value the error names; if that
        is none or several, halves are tried."""
        try:
            parse([*context, *(word for words in given for word in words)])
            return []
        except UserError as error:
            named = [words for words in given if words[-1].rpartition("=")[2] in str(error)]
            if len(named) != 1 < len(given):
                middle = len(given) // 2
                return refused(given[:middle], context) + refused(given[middle:], context)
            (first,) = named if len(named) == 1 else given
            if "no such option" not in str(error):
                reasons.setdefault(first, str(error))
            return [first, *refused([words for words in given if words != first], context)]

    places = {tuple(words): f"{page.relative_to(ROOT)}: {code}" for page in PAGES for code, words in flags(page)}
    options = [parse(context) for context in CONTEXTS]
    everywhere = set().union(*options)
    bare = {words for words in places if len(words) == 1 and "=" not in words[0] and words != ("--resume",)}
    left = places.keys() - bare
    for context, known in zip(CONTEXTS, options, strict=True):
        may_fit = [words for words in left if option(words) in known or option(words) not in everywhere]
        left -= set(may_fit) - set(refused(sorted(may_fit), context) if may_fit else [])
    left |= {words for words in bare if option(words) not in everywhere}
    assert not left, "\n".join(f"{places[words]}: {reasons.get(words, words)}" for words in left)


def option(words: tuple[str, ...]) -> str:
    """The name of the option that a flag sets."""
    return words[0].partition("=")[0].strip("-+")


def test_every_command_that_a_sentence_names_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"`(?:longseq|python train\.py) (\w+)\b(?! \(no such)", page.read_text()):
            assert name in {*COMMANDS, "COMMAND"}, f"{page}: {name}"


@pytest.mark.parametrize(
    "block",
    [block for page in PAGES if page not in GUIDES for block in snippets(page)
     if str(page.relative_to(ROOT)) not in ELSEWHERE],
    ids=str,
)  # fmt: skip
def test_every_snippet_of_a_page_runs(
    block: Block, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    if "optuna" in block.text:
        monkeypatch.setitem(sys.modules, "optuna", stand_in_for_optuna(monkeypatch))
    names: dict[str, Any] = {"__name__": "page"}
    exec(block.text, names)
    if "Flowers" in names:
        for name in ("train", "test"):
            images = np.zeros((30, 3, 32, 32), dtype=np.uint8)
            np.savez(tmp_path / f"{name}.npz", images=images, labels=np.arange(30) % 3)
        data = names["Flowers"](str(tmp_path), batch_size=4)
        data.setup()
        assert not lacking(data) and [len(split) for split in data.splits().values()] == [27, 3, 30]


def stand_in_for_optuna(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Optuna, as far as the page calls it: one trial, whose training is short."""
    from longseq.cli import main

    subprocess_run = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[1] != "train.py":
            return subprocess_run(command, **options)
        assert options == {"check": True}
        return main([*command[2:], *SMALL_MODEL, *TINY])

    def optimize(objective: Callable, n_trials: int) -> None:
        trial = SimpleNamespace(number=0, suggest_int=lambda *_, **__: 4, suggest_float=lambda *_, **__: 1e-3)
        assert 0 <= objective(trial) <= 1

    monkeypatch.setattr("subprocess.run", run)
    optuna: Any = ModuleType("optuna")
    optuna.Trial = SimpleNamespace
    optuna.create_study = lambda **_: SimpleNamespace(optimize=optimize)
    return optuna


def test_snippets_that_are_not_run_here_have_tests_of_their_own() -> None:
    for page, test in ELSEWHERE.items():
        assert f'"{page}"' in (ROOT / test).read_text()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.thorough] * (page.stem != "own-images")) for page in GUIDES],
    ids=ids(GUIDES),
)
@pytest.mark.usefixtures("forked_reports")
def test_a_guide_runs_from_its_first_line_to_its_last(
    page: Path, command: Callable, place: Path, tmp_path: Path
) -> None:
    """On the data that the guide writes itself, with few steps of a small model."""
    if page.stem in ("linear-vit", "reading-results"):  # they go on with what another guide has made
        exec(snippets(page.with_name("own-images.md"))[0].text, {})
        thin_out(tmp_path)
    if page.stem == "reading-results":
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs/digits").symlink_to(place / "runs/digits")
    saved = re.search(r"Save this as `(\w+\.py)`", page.read_text())
    for block in blocks(page):
        if block.language == "python" and saved:
            (tmp_path / saved[1]).write_text(block.text)
        elif block.language == "python":
            exec(quick(block.text), {"__name__": "page"})
            thin_out(tmp_path)
        elif not block.language:
            for _, words in (each for each in commands(page) if each[0] == block):
                arguments = words_of_longseq(words)
                if arguments is not None:
                    run(arguments, command, tmp_path)


NUMBER = re.compile(r"(?<![\w.-])-?\d+(\.\d+)?(e-?\d+)?(?![\w.])")


def form_of(arguments: Iterable[str]) -> tuple[str, ...]:
    """The words of a command without what only its run changes: # for numbers, and for the names of what it writes."""
    words = [NUMBER.sub("#", word.removeprefix("configs/").removesuffix(".yaml")) for word in arguments]
    named = ["#" if flag in ("--experiment", "--out") else word for flag, word in pairwise(["", *words])]
    return tuple(word for word, _ in groupby(named))


def words_and_parts(words: Iterable[str]) -> set[str]:
    """The words, and the parts of paths among them."""
    return {part for word in words for part in (word, *word.split("/"))}


def forms(pages: Iterable[Path]) -> dict[tuple[str, ...], tuple[Block, list[str]]]:
    """The first command of each form on some pages."""
    found: dict[tuple[str, ...], tuple[Block, list[str]]] = {}
    for page in pages:
        for block, words in commands(page):
            if (arguments := words_of_longseq(words)) is not None:
                found.setdefault(form_of(arguments), (block, arguments))
    return found


def is_run(form: tuple[str, ...]) -> bool:
    return not ONLY_PARSED.keys() & words_and_parts(form)


def exports(together: list[list[str]]) -> bool:
    return any(arguments[0] == "export" for arguments in together)


RESULTS = forms(filter(is_record, PAGES))


def shown_by(form: tuple[str, ...]) -> Iterator[str]:
    """The flags and values that a run of a command shows to work; of a sweep also those of its first setting and of its
    flags."""
    for word in form:
        if word.startswith('["'):
            yield from form_of(json.loads(word))
        elif "=" in word and not word.startswith("-"):
            key, value = first_of(word)
            yield from (f"--{key}", value.removesuffix(".yaml"))
        elif not word.startswith("runs/"):
            yield word


def covering(left: set[tuple[str, ...]], others: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """As few commands as show all that any of them would show, besides what others show."""
    shown = {word for form in others for word in shown_by(form)}
    while not all(shown.issuperset(shown_by(form)) for form in left):
        most = max(sorted(left), key=lambda form: len(set(shown_by(form)) - shown))
        shown.update(shown_by(most))
        yield most


def values_of(words: Iterable[str], flag: str) -> set[str]:
    """What a command gives to a flag."""
    return {value for name, value in pairwise(words) if name == flag}


OTHERS = forms(page for page in PAGES if page not in GUIDES and not is_record(page))
FORMS = [form for form in OTHERS if is_run(form)]
FORMS += covering({form for form in RESULTS if is_run(form)}, FORMS)
SWEPT = {folder for form in FORMS for folder in values_of(form, "--init_from")}  # sweeps that others go on from
FORMS += [form for form, (_, words) in RESULTS.items() if SWEPT & values_of(words, "--out")]
RUN = [each for form, each in (OTHERS | RESULTS).items() if form in FORMS]
TRAINED = [arguments for block, arguments in RUN if arguments[0] in ("fit", "sweep") and block.page in FIRST]
TOGETHER = [(block, [arguments for _, arguments in each]) for block, each in groupby(RUN, key=lambda each: each[0])]


@pytest.mark.parametrize(
    ("block", "together"),
    [
        pytest.param(
            block, each, id=str(block), marks=[pytest.mark.thorough] * (block.page not in FIRST or exports(each))
        )
        for block, each in TOGETHER
    ],
)
@pytest.mark.usefixtures("forked_reports")
def test_every_command_of_other_pages_runs(
    block: Block,
    together: list[list[str]],
    place: Path,
    command: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of those that differ in numbers alone. Those of a block may go on from each other."""
    for path in place.iterdir():
        if path.name == "runs":  # a resumed run changes
            shutil.copytree(path, tmp_path / "runs")
        else:
            (tmp_path / path.name).symlink_to(path)
    if block.page.stem == "choosing":  # this sweep measures the speed of its settings, and trains as long as it says
        monkeypatch.setattr("longseq.reports.sweep.TRIAL", [*TRIAL, "--trainer.max_steps", "8"])
        monkeypatch.setattr("longseq.reports.sweep.steps_within", lambda *speed: min(steps_within(*speed), 4))
    else:  # in a second the others would train for tens of epochs
        monkeypatch.setattr("longseq.reports.sweep._Runs.steps", lambda *_: defaultdict(lambda: 2))
    for number, arguments in enumerate(together):
        run(in_place(with_data(arguments, Path(f"data{number}"), monkeypatch)), command, tmp_path)


def test_what_is_only_parsed_stands_on_a_page() -> None:
    for word in ONLY_PARSED:
        assert any(word in words_and_parts(form) for form in (*OTHERS, *RESULTS)), word


def with_data(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a command, with a small data set in the place of the folder that the page names."""
    if words[0] == "sweep" and "--flags" in words:
        place = words.index("--flags") + 1
        fit = ["fit", *(part for name in configurations(words) for part in ("--config", name))]
        flags = with_data([*fit, *json.loads(words[place])], folder, monkeypatch)[len(fit) :]
        return [*words[:place], json.dumps(flags), *words[place + 1 :]]
    settings = dict(pairwise(words))
    if "--data.root" not in settings:
        return words
    kind = settings.get("--data")
    if kind is None:
        files = [path_of(name).read_text() for name in configurations(words)]
        (kind,) = {described["data"]["class_path"] for described in map(yaml.safe_load, files) if "data" in described}
    data: Any = SMALL[getattr(datamodules, kind)](folder, monkeypatch)
    if "--data.groups" in settings:
        for number, path in enumerate(sorted(folder.rglob("*.png"))):
            path.rename(path.with_name(f"patient{number % 5}-{number}.png"))
    if "--data.table" in settings:
        paths = [path.relative_to(data.root) for path in sorted(folder.rglob("*.wav"))]
        rows = "".join(f"{path},{path.parent}\n" for path in paths)
        Path(data.root, settings["--data.table"]).write_text(f"path,label\n{rows}")
    words = [data.root if before == "--data.root" else word for before, word in pairwise(["", *words])]
    few_tokens = ["--model.encoder.attention.k", "4"]  # the small set has less than the configuration's k
    small: list[str] = []
    if kind == "Needles":
        small = ["--data.num_train", "16", "--data.num_test", "10", "--data.seconds", "4", "--data.shortest", "3.4"]
    elif kind == "ESC50":
        small = ["--data.seconds", "0.7"]  # 71 tokens, k is 64
    elif "TimmEncoder" in words:
        small = ["--model.encoder.model", "test_vit", "--data.size", "32", *few_tokens]
    if "--folds" in words and kind != "ESC50":  # which has five of its own
        words[words.index("--folds") + 1] = "2"
    return [*words, *small]


def configurations(words: list[str]) -> Iterator[str]:
    """The configurations that a command names."""
    flag = ""
    for word in words:
        if flag == "--config" and not word.startswith("--"):
            yield word
        flag = word if word.startswith("--") else flag


def path_of(name: str) -> Path:
    """The file of a configuration: image/digits is configs/image/digits.yaml."""
    return ROOT / (name if name.endswith(".yaml") else f"configs/{name}.yaml")


def run(arguments: list[str], command: Callable, folder: Path) -> None:
    """Run a command of a page in a folder, with few steps of a small model."""
    if arguments[0] in ("board", "review"):
        look_at_page(arguments, folder)
        return
    if arguments[0] == "export":  # in its own process: traced lengths are torch.SymInt, which beartype refuses for int
        exported = forked.run(ROOT / "train.py", *arguments, cwd=folder)
        assert exported.returncode == 0, f"{' '.join(arguments)}: {exported.stderr}"
        return
    done = command(*shortened(arguments))
    assert done.code == 0, f"{' '.join(arguments)}: {done.err}"


def look_at_page(arguments: list[str], folder: Path) -> None:
    """Start a server in a process of its own, open its page, and stop it."""
    process = forked.start(ROOT / "train.py", *arguments, cwd=folder)
    try:
        while not process.said()[0].endswith("\n"):
            assert process.poll() is None, process.said()[1]
            time.sleep(0.2)
        with urlopen(process.said()[0].partition("#")[0]) as answer:
            assert {"board": b"TensorBoard", "review": b"predictions"}[arguments[0]] in answer.read()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def quick(text: str) -> str:
    """A snippet without the download of weights, and with fewer vowels."""
    return text.replace("pretrained=True", "pretrained=False").replace("Vowels()", "Vowels(num_train=120, num_test=60)")


def thin_out(folder: Path) -> None:
    """Leave ten files in every folder of a class: the guides write thousands."""
    for name in folder.glob("*/*/"):
        for path in sorted(name.iterdir(), key=lambda path: int(path.stem))[10:] if name.parent.name != "runs" else ():
            path.unlink()


def shortened(arguments: list[str]) -> list[str]:
    """A command with few steps of a small model; of a sweep the first setting of each entry, with one seed."""
    if arguments[0] == "sweep":
        words = ["=".join(first_of(word)) if "=" in word else word for word in arguments]
        flags = json.loads(words[words.index("--flags") + 1]) if "--flags" in words else []
        seconds = ["--seconds", "1"] if "--seconds" in words else []
        return [*words, "--seeds", "1", *seconds, "--flags", json.dumps([*flags, *TINY, *QUICK, *SMALL_MODEL])]
    if arguments[0] != "fit":
        shorter, flag, kept = SHORTER.get(arguments[0], []), "", []
        for word in arguments:
            flag = word if word.startswith("--") else flag
            kept += [] if flag in shorter else [word]
        return [*kept, *shorter, *(["--explained", "1"] if "--page" in kept else [])]
    of_timm = ["--model.encoder.pretrained", "false", "--data.batch_size", "4"]  # with the page's precision, bf16-mixed
    words = [re.sub(r"(x\d+):\d+", r"\1:1", word) for word in arguments]  # of --grow 8x8:20,16x16:5 the epochs
    if "--minutes" in words:
        words[words.index("--minutes") + 1] = "0.02"
    return [*words, *TINY, *(of_timm if "TimmEncoder" in arguments else [*QUICK, *SMALL_MODEL])]


def test_the_reference_has_every_public_name() -> None:
    expanded = runpy.run_path(str(ROOT / "docs/reference.py"))["expanded"]
    page = expanded((ROOT / "docs/reference.md").read_text())
    assert not re.search(r"^::: .* all", page, re.MULTILINE)
    listed = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    short = {name.rpartition(".")[2] for name in listed}
    assert len(listed) == len(set(listed))
    for package in (longseq, longseq.attention, encoders, tasks, training, datamodules):
        assert set(package.__all__) <= short, f"{package.__name__}: {set(package.__all__) - short}"
    for name in listed:
        holder, _, last = name.rpartition(".")
        assert inspect.getdoc(getattr(__import__(holder, fromlist=[last]), last)), f"{name}: no docstring"


def test_the_choices_by_task_quote_figures_of_claims_only() -> None:
    choices, claims = ((ROOT / "docs" / name).read_text() for name in ("guides/choosing.md", "results/README.md"))
    rows = [line for line in choices.split("## Which one")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 8
    for row in rows:
        *_, why, evidence, _ = row.split("|")
        figures = re.findall(r"0\.\d{3}|\b\d+ of \d+\b", why)
        assert figures, row
        tested = evidence.split(";")[0].strip()
        places = [line for line in claims.splitlines() if line.startswith("|") and f"| {tested}" in line]
        for figure in figures:
            short = figure.removesuffix(" of 100")  # which a table of claims says once in a row
            assert any(short in line for line in places), f"{row}: {figure} is in no claim of n = {tested}"


MEASURED = re.compile(r"^# Measured: .*\n(?:# {8,}.*\n)*", re.MULTILINE)
HEADERS = {
    path: found[0] for path in (ROOT / "configs").rglob("*.yaml") if (found := MEASURED.search(path.read_text()))
}
QUOTING = [page for page in PAGES if page.parent.name == "guides"] + [
    ROOT / "docs" / name for name in ("attention.md", "encoders.md", "pretrained.md", "resize.md", "training.md")
]


def lines_of(header: str) -> str:
    return header.replace("\n#", " ")


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_accuracies_of_a_configuration_stand_in_the_results_that_its_header_names(path: Path) -> None:
    assert unfounded(lines_of(HEADERS[path])) == []
    assert HEADERS[path].count("\n") <= 3


def test_another_accuracy_than_the_measured_one_is_noticed() -> None:
    header = lines_of(HEADERS[ROOT / "configs/image/digits.yaml"])
    for change in (("0.974 (0.967", "0.975 (0.967"), ("0.955 to", "0.956 to"), ("0.325", "0.326")):
        assert change[0] in header
        assert len(unfounded(header.replace(*change))) == 1


@pytest.mark.parametrize("page", QUOTING, ids=ids(QUOTING))
def test_the_accuracies_beside_a_link_to_results_and_in_tables_of_guides_stand_there(page: Path) -> None:
    """A table may have its link in the sentence before it."""
    parts = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split("\n\n")
    for before, part in pairwise(["", *parts]):
        is_table = part.startswith("|")
        if CITED.search(part) or (is_table and (page.parent.name == "guides" or CITED.search(before))):
            assert unfounded(part, before if is_table else "") == []
