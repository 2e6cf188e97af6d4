"""Finds the key that caused an error when a class of the configuration is built or used in training."""

from collections.abc import Iterator, Mapping
from typing import Any

from longseq.cli.config_keys import items_of, locate, parts_of
from longseq.cli.errors import UserError
from longseq.cli.errors.machine import what_was_asked
from longseq.compat.jsonargparse import refusing_class
from longseq.compat.lightning import callback_behind, words_of_arguments
from longseq.compat.torch import is_out_of_memory
from longseq.files.description import OURS
from longseq.training.fitting import OutOfMemory


def user_error_in(error: BaseException) -> Any:
    """The first error in the chain of causes that has an exit code, such as a DataError that jsonargparse wrapped;
    None if there is none."""
    return next((cause for cause in _chain(error) if hasattr(cause, "exit_code")), None)


def refused_in_building(error: BaseException, config: Mapping[str, Any]) -> BaseException | None:
    """The error to raise if data, model or trainer refused a value when it was built. None for a bug of longseq."""
    if is_out_of_memory(error):
        what = f"{what_was_asked(error)}; lower model.encoder.dim, model.encoder.depth or k"
        return UserError(what, OutOfMemory.exit_code)
    wrong = _argument_error_in(error)
    if wrong is not None:
        return UserError(f"{locate(config, wrong.argument)}: {wrong.what}")
    return user_error_in(error) or _refused_part(error, config)


def _argument_error_in(error: BaseException) -> Any:
    """The ArgumentError of longseq or of a data module that caused an error; None if there is none."""
    causes = (cause for cause in _chain(error) if isinstance(cause, ValueError))
    return next((cause for cause in causes if hasattr(cause, "argument") and hasattr(cause, "what")), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, followed by its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def blamed(message: str, config: Mapping[str, Any], group: str) -> str:
    """The full key of the argument that a library's message is about, found by the argument's name or value in the
    message; the group's key if neither occurs.

    Args:
        message: The message; names in backquotes are tried first.
        config: The arguments of a group or of a class.
        group: The key of that group or class.
    """
    arguments = dict(items_of(config, group))
    names = {key.rpartition(".")[2]: key for key in reversed(arguments)}
    by_name = [names[word] for word in words_of_arguments(message) if word in names]
    by_value = [key for key, value in arguments.items() if isinstance(value, str) and repr(value) in message]
    return [*by_name, *by_value, group][0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".!")


def _refused_part(error: BaseException, config: Mapping[str, Any]) -> UserError | None:
    """The error to raise if a class of another package could not be built, with the class's key and message. None if a
    class of longseq failed, which is a bug."""
    for cause in _chain(error):
        kind = refusing_class(cause)
        if kind is not None and kind.__module__.partition(".")[0] not in OURS:
            return _refusal(kind.__name__, cause, config)
    return None


def refused_in_training(error: BaseException, config: Mapping[str, Any]) -> UserError | None:
    """The error to raise if a callback of the configuration failed because its arguments do not fit the training. None
    if no such callback was running, or if it called code of longseq that failed, which is a bug."""
    name = callback_behind(error, OURS)
    named = [part["class_path"].rpartition(".")[2] for _, part in parts_of(config)]
    return _refusal(name, error, config) if name is not None and name in named else None


def _refusal(name: str, error: BaseException, config: Mapping[str, Any]) -> UserError:
    parts = {key: part for key, part in parts_of(config) if part["class_path"].rpartition(".")[2] == name}
    key, part = next(iter(parts.items()), (name, {}))
    what = first_line(error)
    return UserError(f"{blamed(what, part.get('init_args') or {}, key)}: {name}: {what}; --debug shows where")
