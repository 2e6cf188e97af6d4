"""Archives from the network: fetched completely or not at all, and unpacked completely or not at all."""

import os
import shutil
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tqdm import tqdm

from datamodules.archives.parquet_pages import SMALL, TIMES
from datamodules.cache import cache_folder, locked, sha256_of, sha256_of_text
from datamodules.errors import DataError


def fetch_and_unpack(
    url: str, root: Path, folder: str, is_whole: Callable[[], bool], sha256: str | None = None
) -> None:
    """Unpack an archive in root as root/folder, unless that is complete. The archive is fetched if it is missing.

    Args:
        url: The address of a .zip or .tar.gz.
        root: The folder for the archive and for its content. The archive is not deleted.
        folder: The name of the unpacked content. If all members are in one folder, that folder gets this name.
        is_whole: Returns whether the content is complete. Incomplete content is deleted and made again.
        sha256: The SHA-256 of the archive.

    Raises:
        DataError: If the archive cannot be fetched, is not the right one, or has a member outside the folder.
    """
    with locked(cache_folder() / f"fetch-{sha256_of_text(url)[:16]}"):
        if not is_whole():
            _make(url, root, folder, sha256)


def folder_with(root: str, folder: str, *contents: str) -> Path | None:
    """root/folder or else root, whichever has these files and folders; None if neither has them."""
    whole = Path(root).expanduser()
    return next((base for base in (whole / folder, whole) if all((base / name).exists() for name in contents)), None)


def _make(url: str, root: Path, folder: str, sha256: str | None) -> None:
    archive = root / url.rpartition("/")[2]
    temporary = root / f".{Path(folder).name}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not archive.is_file():
            _fetch(url, archive)
        if sha256 is not None:
            digest = sha256_of(archive)
            if digest != sha256:
                raise DataError(f"{archive}: not the original file (SHA-256 {digest[:12]}...); delete it and run again")
        shutil.rmtree(temporary, ignore_errors=True)
        unpack(archive, temporary)
        inner = list(temporary.iterdir())
        whole = inner[0] if len(inner) == 1 and inner[0].is_dir() else temporary
        if (root / folder).exists():  # left incomplete by a killed process
            shutil.rmtree(root / folder)
        (root / folder).parent.mkdir(parents=True, exist_ok=True)
        os.replace(whole, root / folder)
    except OSError as error:
        raise DataError(
            f"{url}: cannot be fetched or unpacked in {root} ({error.strerror or error}); check the network, "
            f"make room, or put {archive.name} there"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(url: str, archive: Path) -> None:
    part = archive.with_name(f".{archive.name}.part")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, open(part, "wb") as file:
            size = int(answer.headers.get("Content-Length") or 0)
            with tqdm(total=size or None, unit="B", unit_scale=True, desc=archive.name, disable=None) as bar:
                while block := answer.read(2**20):
                    file.write(block)
                    bar.update(len(block))
            if size and file.tell() != size:
                raise OSError(f"only {file.tell()} of {size} bytes arrived")
        os.replace(part, archive)
    finally:
        part.unlink(missing_ok=True)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the plain files of a .zip or tar archive; links and devices are skipped.

    Raises:
        DataError: If the archive is broken, unpacks to far more than its size, or has a member outside the folder.
    """
    folder.mkdir(parents=True)
    left = max(SMALL, TIMES * archive.stat().st_size)
    try:
        for name, source in _members(archive):
            path = PurePosixPath(name.replace("\\", "/"))
            if not path.parts or path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
                raise DataError(f"{archive}: member {name} is not inside its folder; do not trust this archive")
            target = folder.joinpath(*path.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, open(target, "wb") as file:
                while block := source.read(2**20):
                    left -= len(block)
                    if left < 0:
                        raise DataError(f"{archive}: becomes {TIMES} times its size or more; do not trust this archive")
                    file.write(block)
    # zipfile raises RuntimeError for a member that is encrypted or has an unknown compression
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{archive}: broken or cut off ({what}); delete it and run again") from error


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                if not member.is_dir():
                    yield member.filename, packed.open(member)
        return
    with tarfile.open(archive) as packed:
        for member in packed:
            source: Any = packed.extractfile(member) if member.isfile() else None
            if source is not None:
                yield member.name, source
