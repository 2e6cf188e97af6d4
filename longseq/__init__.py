"""longseq: classifiers of images and sound as very long sequences, at linear cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longseq.attention import *  # noqa: F403
    from longseq.deploy.predictor import load as load
    from longseq.encoders import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import what mechanisms and encoders export when it is first used, so that ``longseq --help`` does not wait for
    torch."""
    if name == "load":
        from longseq.deploy.predictor import load as value  # Lightning takes seconds to import
    elif name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        packages = import_module("longseq.attention"), import_module("longseq.encoders")
        exported = {public: getattr(package, public) for package in packages for public in package.__all__}
        exported["__all__"] = [*exported, "load"]
        if name not in exported:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = exported[name]
    globals()[name] = value
    return value
