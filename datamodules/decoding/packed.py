"""Files inside other files, such as the members of a tar archive."""

import io
import os


class Packed(io.BytesIO):
    """A file inside a shard, which can be read like an open file.

    Args:
        name: Its shard and its name, for messages.
        content: Its bytes.
    """

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = name

    def __str__(self) -> str:
        return self.name


Source = str | os.PathLike[str] | Packed  # a file in a folder or in a shard
