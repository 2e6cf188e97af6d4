"""Files that have no path, such as the members of a tar archive."""

import io
import os

from PIL import Image


class Packed(io.BytesIO):
    """A file inside a shard or in memory, which can be read like an open file.

    Args:
        name: Its name, with that of its shard, for messages.
        content: Its bytes.
    """

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = name

    def __str__(self) -> str:
        return self.name


class Decoded(Packed):
    """An image that is decoded already, in place of its file.

    Args:
        name: For messages.
        image: The image; it is not changed.
    """

    def __init__(self, name: str, image: Image.Image) -> None:
        super().__init__(name, b"")
        self.image = image


Source = str | os.PathLike[str] | Packed  # a file in a folder or in a shard
