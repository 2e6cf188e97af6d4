"""Objects as plain values and back, so that a checkpoint holds tensors and plain types and nothing else.

An object is described by its class path and its constructor's arguments.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from os import PathLike
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jsonargparse import set_parsing_settings

from longseq.arguments import ArgumentError, argument_hints, arguments_of
from longseq.training.storage import CheckpointError

# Packages whose classes a configuration or a checkpoint may name; nothing of another package is imported for them.
OURS = ("longseq", "datamodules")
# Of libraries, where an object of theirs is expected. None is torch: its classes run programs and write files.
LIBRARIES = (
    "torchvision.transforms.v2", "pytorch_lightning.accelerators", "pytorch_lightning.callbacks",
    "pytorch_lightning.loggers", "pytorch_lightning.plugins", "pytorch_lightning.profilers",
    "pytorch_lightning.strategies",
)  # fmt: skip
ALLOWED_PACKAGES: list[str] = []  # the user's own: --allow_class

Plan = Callable[[], Any]  # makes what was described


def allow_classes(packages: list[str]) -> None:
    """Let configurations and checkpoints name classes of these packages too, and configurations functions of them.

    Raises:
        ValueError: If one is no name of a package.
    """
    for package in packages:
        if not all(part.isidentifier() for part in package.split(".")) or package.partition(".")[0] == "jsonargparse":
            raise ArgumentError("allow_class", f"must be the name of a package, got {package!r}; such as my_encoders")
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*OURS, *LIBRARIES, *packages],
        instantiate_subclass_spec_in_any=False,  # where anything may stand, a class's description stays one
    )
    ALLOWED_PACKAGES.extend(packages)


def describe(value: Any) -> Any:
    """Turn an object into plain values: numbers, strings, lists, and dictionaries {class_path, init_args}."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        raise TypeError(f"{value!r} cannot be kept in a checkpoint; leave the default")
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    kind = type(value)
    return {
        "class_path": f"{kind.__module__}.{kind.__qualname__}",
        "init_args": {name: describe(argument) for name, argument in _given(value).items()},
    }


def _given(value: Any) -> dict[str, Any]:
    """The constructor arguments of an object. Of an object of torchvision, which keeps them in forms of its own, only
    those that differ from the defaults."""
    arguments, kind = arguments_of(value), type(value)
    if kind.__module__.partition(".")[0] != "torchvision":
        return arguments
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    required = {name: arguments[name] for name, default in defaults.items() if default is inspect.Parameter.empty}
    plain = arguments_of(kind(**required))
    given = required | {name: argument for name, argument in arguments.items() if argument != plain[name]}
    for name, argument in given.items():
        if isinstance(argument, list) and len(argument) == 1 and isinstance(defaults[name], int | float):
            given[name] = argument[0]  # RandomErasing keeps its value in a list
    return given


def build(description: Any, expected: Any) -> Any:
    """Make the object that ``describe`` described.

    Args:
        description: Plain values.
        expected: The class of the object, or a type hint.

    Raises:
        CheckpointError: If a class stands where it is not expected, and nothing has been called then; or if one refuses
            its arguments.
    """
    return planned(description, expected)()


def build_from(kind: type, arguments: Mapping[str, Any], **changes: Any) -> Any:
    """Make an object of a class from the description of its arguments; changes are given to it as they are."""
    plans = planned_arguments(kind, arguments, kind)
    return _called(kind, plans | {name: partial(_as_it_is, value) for name, value in changes.items()})


def planned(description: Any, expected: Any, key: str = "") -> Plan:
    """Check that a description names classes only where they are expected, and return what makes the object.

    At each place the type hint of the constructor's argument says which classes are expected, and a class that is named
    must be a subclass of one of them. Nothing is called before all of the description is checked, and nothing is
    imported but from a package that may be named.

    Raises:
        CheckpointError: If a class stands where it is not expected.
    """
    return _planned(description, expected, (), key)


def planned_arguments(
    kind: type, arguments: Mapping[str, Any], callables: type | tuple[type, ...], key: str = ""
) -> dict[str, Plan]:
    """The same for the arguments of a class.

    Args:
        kind: The class.
        arguments: Their descriptions.
        callables: What is expected where an argument may be anything that can be called: a transform is made of others.
        key: Where the class stands.
    """
    hints, defaults = argument_hints(kind), inspect.signature(kind).parameters
    return {
        name: partial(_as_it_is, value)
        if name in defaults and callable(value) and value is defaults[name].default  # the library's own choice
        else _planned(value, hints.get(name), callables, f"{key}.{name}".lstrip("."))
        for name, value in arguments.items()
    }


def _planned(value: Any, hint: Any, callables: type | tuple[type, ...], key: str) -> Plan:
    expected = _classes_in(hint, callables)
    if isinstance(value, list | tuple):
        items = [_planned(item, hint, callables, key) for item in value]
        return lambda: [item() for item in items]
    if isinstance(value, Mapping) and "class_path" in value:
        path, arguments = value["class_path"], value.get("init_args")
        if set(value) != {"class_path", "init_args"} or not isinstance(arguments, Mapping):
            raise CheckpointError(f"{key}: not the description of an object; another program has written it")
        kind = _class_named(path, expected, key)
        return partial(_called, kind, planned_arguments(kind, arguments, expected, key))
    is_object = all(argument in (NoneType, *expected) for argument in get_args(hint))
    if expected and is_object and not isinstance(value, (NoneType, *expected)):
        raise CheckpointError(f"{key}: {type(value).__name__} where {_names(expected)} is expected; name a class")
    if callable(value) and not isinstance(value, (type, *expected)):
        _refuse_function(value, key)
    if isinstance(value, Mapping):
        parts = {name: _planned(item, hint, callables, f"{key}.{name}") for name, item in value.items()}
        return lambda: {name: part() for name, part in parts.items()}
    return partial(_as_it_is, value)


def _as_it_is(value: Any) -> Any:
    return value


def _classes_in(hint: Any, callables: type | tuple[type, ...]) -> tuple[type, ...]:
    """The classes of which a type hint wants objects; plain types and containers are none."""
    origin = get_origin(hint)
    if Callable in (hint, origin):
        return callables if isinstance(callables, tuple) else (callables,)
    if origin in (type, Literal):
        return ()
    found = tuple(kind for argument in get_args(hint) for kind in _classes_in(argument, callables))
    kind = hint if origin is None else origin
    is_plain = not isinstance(kind, type) or kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return found if is_plain else (*found, kind)


def _class_named(path: Any, expected: tuple[type, ...], key: str) -> type:
    """The class of this path, if an object of it is expected."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise CheckpointError(f"{key}: {path!r} is no class path; another program has written it")
    if not expected:
        raise CheckpointError(f"{key}: no object is expected here, got one of {path}; leave it out")
    libraries = [package for package in LIBRARIES if any(_is_of(kind.__module__, [package]) for kind in expected)]
    if not _is_of(path, [*OURS, *libraries, *ALLOWED_PACKAGES]):
        package = path.partition(".")[0]
        raise CheckpointError(f"{key}: {path} may not be named; --allow_class {package} if you trust it")
    module, _, name = path.rpartition(".")
    kind = None
    with suppress(ImportError):
        kind = vars(importlib.import_module(module)).get(name)
    # a function may do more than make an object
    if not isinstance(kind, type) or not issubclass(kind, expected):
        raise CheckpointError(f"{key}: {path} is no {_names(expected)}; name one")
    return kind


def _refuse_function(value: Any, key: str) -> None:
    """A function may do anything, so a configuration may name those of the user's own packages alone."""
    path = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if not _is_of(path, ALLOWED_PACKAGES):
        package = path.partition(".")[0]
        raise CheckpointError(f"{key}: {path} may not be named; --allow_class {package} if you trust it")


def _is_of(path: str, packages: list[str]) -> bool:
    return any(path.startswith(f"{package}.") for package in packages)


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


def _called(kind: type, plans: Mapping[str, Plan]) -> Any:
    arguments = {name: plan() for name, plan in plans.items()}
    try:
        return kind(**arguments)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError) as error:
        said = " ".join(str(error).split())
        raise CheckpointError(f"{kind.__name__} cannot be made: {said}; another version has written it") from error


@contextmanager
def naming(path: str | PathLike) -> Iterator[None]:
    """Name the file in what is said of the descriptions that it holds."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values of a description by their path, ("encoder.attention.k", 16); an object's class, without its
    package, by its own."""
    if isinstance(value, Mapping) and set(value) == {"class_path", "init_args"}:
        yield key, value["class_path"].rpartition(".")[2]
        value = value["init_args"]
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flatten(item, f"{key}.{name}".lstrip("."))
    else:
        yield key, value
