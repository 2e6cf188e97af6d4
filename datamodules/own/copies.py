"""Files with the same content, byte for byte: where they are, and what must not be divided because of them."""

from collections.abc import Hashable, Iterator, Mapping, Sequence


def merged(names: Sequence[str], contents: Sequence[str]) -> list[str]:
    """The names, with one name for all that share a content, directly or through others.

    It is the first of them in the order of the alphabet, and a name that shares none stays as it is: so a split by the
    hashes of names is the same as before where there are no copies.

    Args:
        names: Of the group or the file of each sample.
        contents: The digest of each sample's file.
    """
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while name in above:
            name = above[name]
        return name

    first: dict[str, str] = {}
    for name, content in zip(names, contents, strict=True):
        one, other = sorted((top(name), top(first.setdefault(content, name))))
        if one != other:
            above[other] = one
    return [top(name) for name in names]


def several(contents: Mapping[str, str]) -> dict[str, list[str]]:
    """The paths of each content that several files have, by its digest.

    Args:
        contents: The digest of each file, by path.
    """
    paths: dict[str, list[str]] = {}
    for path, content in contents.items():
        paths.setdefault(content, []).append(path)
    return {content: of_content for content, of_content in paths.items() if len(of_content) > 1}


def told(copies: Sequence[Sequence[str]], split_of: Mapping[str, str]) -> Iterator[str]:
    """A line on copies in one split, and one on the copies in each two splits.

    Args:
        copies: The paths of each content that several files have.
        split_of: The split of each file, by path.
    """
    together = [paths for paths in copies if len({split_of[path] for path in paths}) == 1]
    if together:
        number = sum(len(paths) - 1 for paths in together)
        kept, copy = together[0][:2]
        yield f"copies of other files in the same split: {number}, such as {copy} of {kept}"
    for of_first, of_second in (("val", "train"), ("test", "train"), ("test", "val")):
        pairs = [
            (path, next(other for other in paths if split_of[other] == of_second))
            for paths in copies
            if any(split_of[other] == of_second for other in paths)
            for path in paths
            if split_of[path] == of_first
        ]
        if pairs:
            whole = sum(split == of_first for split in split_of.values())
            copy, other = pairs[0]
            what = f"{len(pairs)} of the {whole} files of {of_first}, such as {copy}, which is {other} too"
            yield f"in {of_second} too: {what}; the figures may be too good"


def contradictions(places: Mapping[str, tuple[Hashable, frozenset[str]]]) -> dict[str, str]:
    """What is wrong with samples that have the same content and other classes, by their names.

    Args:
        places: The content and the classes of each sample, by its name.
    """
    first: dict[Hashable, tuple[str, frozenset[str]]] = {}
    found: dict[str, str] = {}
    for name, (content, classes) in places.items():
        other, others = first.setdefault(content, (name, classes))
        if classes != others:
            for one, second, of_second in ((other, name, classes), (name, other, others)):
                is_of = f"is of {'class ' if len(of_second) == 1 else ''}{', '.join(sorted(of_second)) or 'no class'}"
                found.setdefault(one, f"the same content as {second}, which {is_of}; keep one of them")
    # further copies with the same classes as one of these contradict the other
    for name, (content, _) in places.items():
        other = first[content][0]
        if other in found and name not in found:
            found[name] = found[other]
    return found
