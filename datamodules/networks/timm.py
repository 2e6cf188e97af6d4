"""Networks of timm, with weights from a file or as timm downloads them."""

import hashlib
from copy import deepcopy
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from datamodules.errors import DataError, say
from datamodules.networks._session import Session, SettingError
from datamodules.networks.network import Network


class Timm(Network):
    """A model of timm for images, without its classifier: a CNN, a ViT or any other.

    Args:
        model: The name of the model, such as efficientnet_lite0.
        weights: A file of its weights; if absent, timm downloads those of the name, or takes them from its cache.
        tokens: "map" gives the whole image to the network, at its own size; each place of the last feature map is a
            token. "tiles" gives tiles of `size` to the network; the pooled features of each are a token.
        size: Height and width of a tile; if absent, those of the model's training.
        sha256: See Network.
    """

    _file_argument = "weights"

    def __init__(
        self,
        model: str,
        weights: str | None = None,
        tokens: Literal["map", "tiles"] = "map",
        size: list[int] | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__(size=size, sha256=sha256)
        self.model, self.tokens = model, tokens
        self.weights = self.file = weights

    def num_tokens(self, size: Any) -> int:
        if self.tokens == "tiles":
            return super().num_tokens(size)
        rows, columns, _ = self._shape_of_map(tuple(size))
        return rows * columns

    def _of_image(self, image: UInt8[Tensor, "c h w"]) -> Float[Tensor, "n f_and_2"]:
        if self.tokens == "tiles":
            return super()._of_image(image)
        session: Any = self._session()
        height, width = image.shape[1:]
        with self._lock, self._naming():
            features = session.map_of(self._values(image[None]))
        rows, columns, _ = features.shape
        y = (torch.arange(rows) + 0.5) * height / rows
        x = (torch.arange(columns) + 0.5) * width / columns
        centres = torch.stack([x.repeat(rows), y.repeat_interleave(columns)], dim=1)
        return torch.cat([features.flatten(0, 1), centres], dim=1)

    def _shape_of_map(self, size: tuple[int, int]) -> tuple[int, int, int]:
        session: Any = self._session()
        with self._lock, self._naming():
            return session.shape_of_map(size)

    @cached_property
    def _num_features(self) -> int:  # type: ignore[override]
        return super()._num_features if self.tokens == "tiles" else self._shape_of_map(self.size)[2]

    @property
    def _name(self) -> str:
        return self.model

    def _digest(self) -> str:
        if self.weights is not None:
            return super()._digest()
        hashing = hashlib.sha256()
        for name, tensor in self._made().state_dict().items():
            hashing.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hashing.hexdigest()

    def _open(self) -> Session:
        return _TimmSession(self._made(), self._size)

    def _made(self) -> Any:
        import timm

        if not timm.is_model(self.model.partition(":")[2] or self.model.partition(".")[0]) and ":" not in self.model:
            raise SettingError("model", f"timm has none called {self.model}; timm.list_models() lists them")
        options: dict[str, Any] = {"num_classes": 0, "pretrained": self.weights is None}
        with torch.random.fork_rng(devices=[]):  # the weights that are drawn first must not change a training
            try:
                if hasattr(getattr(_plain(self.model), "patch_embed", None), "dynamic_img_pad"):
                    options |= {"dynamic_img_size": True, "dynamic_img_pad": True}
                model = timm.create_model(self.model, **options)
            except Exception as error:  # a download may fail in many ways
                what = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
                raise SettingError(
                    "weights", f"timm cannot make {self.model} ({what}); give a file of its weights"
                ) from error
        if self.weights is not None:
            self._load(model)
        return model.eval().requires_grad_(False)

    def _load(self, model: Any) -> None:
        """Give a model the weights of the file, by their names. If the names are those of another program, they are
        taken in their order, where all their shapes fit."""
        from timm.models import load_state_dict

        path = self._path()
        try:
            state = load_state_dict(str(path), use_ema=True, weights_only=True)
        except Exception as error:  # of broken bytes, anything
            raise DataError(f"{path}: not a file of weights ({type(error).__name__}); give another") from error
        own = model.state_dict()
        classifier = model.pretrained_cfg.get("classifier") or ()
        heads = tuple(f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier))
        weights = {name: value for name, value in state.items() if not name.startswith(heads)}
        if not {*own} & {*weights}:
            weights = dict(zip(own, state.values(), strict=False))
            say(f"{path}: its weights have other names than those of timm's {self.model}; they are taken in order")
        wrong = [name for name in {**own, **weights} if _shape(own.get(name)) != _shape(weights.get(name))]
        if wrong:
            what = f"{path} holds the weights of another model than {self.model} ({sorted(wrong)[0]})"
            raise SettingError("weights", f"{what}; give data.network.model the name of that model")
        model.load_state_dict(weights)


class _TimmSession(Session):
    dtype = torch.float32

    def __init__(self, model: Any, size: list[int] | None) -> None:
        self._model, self._on_meta = model, deepcopy(model).to("meta")
        self._shapes: dict[tuple[int, int], tuple[int, int, int]] = {}
        settings = model.pretrained_cfg
        channels, *sides = settings["input_size"]
        self.input_shape = (None, channels, *(size or sides))
        self.output_shape = tuple(self._on_meta(torch.zeros(1, *self.input_shape[1:], device="meta")).shape)  # type: ignore[arg-type]
        self.stated = {"mean": [*settings["mean"]], "std": [*settings["std"]], "value_range": [0.0, 1.0]}

    def run(self, inputs: Tensor) -> Tensor:
        return self._model(inputs)

    @torch.inference_mode()
    def map_of(self, image: Float[Tensor, "1 c h w"]) -> Float[Tensor, "rows columns f"]:
        """The last feature map for one image."""
        return _map(self._model, image)

    def shape_of_map(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Rows, columns and features of the map for an image of this height and width."""
        if size not in self._shapes:
            image = torch.zeros(1, self.input_shape[1] or 3, *size, device="meta")
            self._shapes[size] = tuple(_map(self._on_meta, image).shape)  # type: ignore[assignment]
        return self._shapes[size]


def _map(model: Any, image: Tensor) -> Tensor:
    height, width = image.shape[2:]
    try:
        features = model.forward_features(image)
    except (AssertionError, RuntimeError, ValueError) as error:
        what = f"takes no image of {height} x {width} ({str(error).strip().splitlines()[0].rstrip('.')})"
        raise SettingError("tokens", f"{what}; give tiles") from error
    if features.ndim == 4:
        return (features if features.shape[-1] == model.num_features else features.movedim(1, -1))[0]
    patches = getattr(model, "patch_embed", None)
    if features.ndim != 3 or patches is None:
        raise SettingError("tokens", f"the last features are {tuple(features.shape)}, no map; give tiles")
    rows, columns = patches.dynamic_feat_size((height, width))
    return features[0, getattr(model, "num_prefix_tokens", 0) :].reshape(rows, columns, -1)


def _plain(name: str) -> Any:
    """The model on torch's meta device, without its weights."""
    import timm

    with torch.device("meta"):
        return timm.create_model(name, num_classes=0)


def _shape(weight: Tensor | None) -> Any:
    return None if weight is None else weight.shape
