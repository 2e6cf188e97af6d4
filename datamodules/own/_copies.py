"""Files with the same content, byte for byte: they must stay in one split, and have the same classes."""

from collections.abc import Hashable, Iterator, Mapping, Sequence


def merged(names: Sequence[str], contents: Sequence[str]) -> list[str]:
    """The names, with one name for all names that share content, directly or through other names.

    This name is their first one in alphabetical order. A name that shares no content does not change, so copies do not
    move other files in a split that hashes of names decide.

    Args:
        names: The name of each sample's group or file.
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


def lines_on(copies: Sequence[Sequence[str]], split_of: Mapping[str, str]) -> Iterator[str]:
    """A line on copies in the same split, and a line on copies in each pair of splits.

    Args:
        copies: Lists of paths with the same content.
        split_of: The split of each file, by path.
    """
    together = [paths for paths in copies if len({split_of[path] for path in paths}) == 1]
    if together:
        number = sum(len(paths) - 1 for paths in together)
        original, copy = together[0][:2]
        yield f"copies of other files in the same split: {number}, such as {copy} of {original}"
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
    """The errors of samples with the same content and different classes, by their names.

    Args:
        places: The content and the classes of each sample, by its name.
    """
    first: dict[Hashable, tuple[str, frozenset[str]]] = {}
    errors: dict[str, str] = {}
    for name, (content, classes) in places.items():
        other, others = first.setdefault(content, (name, classes))
        if classes != others:
            for one, second, of_second in ((other, name, classes), (name, other, others)):
                is_of = f"is of {'class ' if len(of_second) == 1 else ''}{', '.join(sorted(of_second)) or 'no class'}"
                errors.setdefault(one, f"the same content as {second}, which {is_of}; keep one of them")
    # a further copy with the classes of one of two contradicting samples contradicts the other one
    for name, (content, _) in places.items():
        other = first[content][0]
        if other in errors and name not in errors:
            errors[name] = errors[other]
    return errors
