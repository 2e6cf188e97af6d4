"""Features as sequences: one token per output of a trained network, such as a window of sound or a tile of a slide."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from longseq.arguments import require, require_positive
from longseq.attention import Mechanism
from longseq.compat.torch import at_least_float32
from longseq.encoders.encoder import Encoder
from longseq.encoders.patches import is_present
from longseq.encoders.positions import Positions
from longseq.encoders.trunk import Sizes, make_trunk

_WAVELENGTHS = 16  # of each coordinate: each has a sine and a cosine
_SHORTEST, _LONGEST = 4.0, 4096.0  # in distances from one token to the next


@dataclass(frozen=True)
class FeatureSizes(Sizes):
    """The sizes of a FeatureEncoder, which has no stem, and whose tokens mean something without blocks too."""

    has_own_tokens: ClassVar[bool] = True

    depth: int = 2
    mlp_ratio: float = 2.0
    positions: Positions = "none"
    any_length: bool = True
    stem: None = field(default=None, init=False)


class FeatureEncoder(Encoder):
    """A vision transformer over features: {"features": (b, n, f + p), "lengths": (b,)} -> (b, dim).

    A token is f numbers, such as the output of a frozen network for 3 s of sound or for a tile of a slide, and p
    coordinates. A linear map makes a vector of dim numbers of it. Tokens in time are in their order: local mixing, or
    position embeddings, tell the model which one comes first. Tokens with coordinates need no order. A bag in a padded
    batch has the same features as alone.

    Coordinates become sines and cosines of the distance from the corner of their bag, which follow the f numbers. Their
    16 wavelengths go from 4 to 4,096 times the typical distance from one token to the next in the training set.

    Args:
        num_features: f.
        most_tokens: The number of tokens of the largest input; with any_length that of a typical one.
        attention: The mechanism of every block.
        num_coordinates: p, the last numbers of a token: 2, or 0 if tokens have no coordinates.
        token_seconds: Seconds from one token to the next; None if tokens are not moments.
        sizes: Arguments of ``Sizes`` except ``stem``, with other defaults. The depth may be 0: the tokens are then
            pooled as they are.

    Raises:
        ValueError: If a number is not positive, the heads do not divide dim, or the mechanism does not fit.
    """

    kind, varying = "features", ("features", 1)
    measured_by = ("num_coordinates",)

    def __init__(
        self,
        num_features: int,
        most_tokens: int,
        attention: Mechanism,
        num_coordinates: int = 0,
        token_seconds: float | None = None,
        **sizes: Annotated[Any, FeatureSizes],
    ) -> None:
        what = "must be given: FeatureFolder has features, and raw data has them with a frozen network (data.network)"
        require(num_features is not None, "num_features", what)  # the data had none to pass on
        what = f"must be 0 or 2, got {num_coordinates}; 2 are x and y"
        require(num_coordinates in (0, 2), "num_coordinates", what)
        require_positive(num_features=num_features, most_tokens=most_tokens)
        if token_seconds is not None:
            require_positive(token_seconds=token_seconds)
        picture = num_features + 2 * _WAVELENGTHS * num_coordinates, most_tokens, 1
        statistics, described = (num_features + num_coordinates, 1, 1), FeatureSizes(**sizes)
        trunk = make_trunk(picture, (1, 1), described, token_seconds)
        super().__init__(trunk, attention, picture, statistics, described)
        self.num_features, self.most_tokens = num_features, most_tokens
        self.num_coordinates, self.token_seconds = num_coordinates, token_seconds

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        small = {"dim": 16, "depth": 2, "heads": 4, "any_length": False, **options}
        lengths = torch.tensor([20, 7, 1])
        there = is_present(lengths, 20)[..., None]
        in_time = {"features": torch.randn(3, 20, 5) * there, "lengths": lengths}
        in_space = {"features": torch.cat([torch.randn(3, 20, 5), 900 * torch.rand(3, 20, 2)], 2) * there}
        return [
            (cls(5, 20, attention, **small), in_time),
            (cls(5, 20, attention, token_seconds=3.0, pool="token", **small), torch.randn(3, 20, 5)),
            (cls(5, 20, attention, num_coordinates=2, **small), {**in_space, "lengths": lengths}),
        ]

    @property
    def longest(self) -> int:
        return self.most_tokens

    @property
    def row_seconds(self) -> float | None:
        return self.token_seconds

    def features_of(self, inputs: Float[Tensor, "b n f+p"] | Mapping[str, Tensor]) -> Float[Tensor, "b n f+p"]:
        """The tokens of a batch, with zeros after the smaller bags.

        Raises:
            ValueError: If there are more than ``most_tokens``, and any_length is False, or if they have another width.
        """
        features = inputs["features"] if isinstance(inputs, Mapping) else inputs
        most, width = self.most_tokens, self.num_features + self.num_coordinates
        what = f"must have {width} numbers a token, got {features.shape[-1]}; give features of the same network"
        require(features.shape[-1] == width, "inputs", what)
        what = f"must have at most {most} tokens, got {features.shape[1]}; give --model.encoder.any_length true"
        require(self.any_length or features.shape[1] <= most, "inputs", what)
        return features

    def rows(self, inputs: Float[Tensor, "b n f+p"] | Mapping[str, Tensor]) -> Int64[Tensor, " b"] | None:
        """The number of tokens of each bag."""
        if isinstance(inputs, Mapping):
            return inputs["lengths"]
        if inputs.shape[1] == self.most_tokens and not self.any_length:
            return None
        return torch.full((len(inputs),), inputs.shape[1], device=inputs.device)

    def front_end(self, inputs: Float[Tensor, "b n f+p"] | Mapping[str, Tensor]) -> Float[Tensor, "b f+p n 1"]:
        return at_least_float32(self.features_of(inputs)).mT[..., None]

    def finished(
        self, picture: Float[Tensor, "b f+p n 1"], rows: Int64[Tensor, " b"] | None
    ) -> Float[Tensor, "b _ n 1"]:
        """The inputs of the trunk: waves take the place of the coordinates."""
        if not self.num_coordinates:
            return picture
        features, places = picture.split([self.num_features, self.num_coordinates], dim=1)
        return torch.cat([features, _waves(places, rows)], dim=1)

    def _refuse_other_sizes(self, picture: Tensor, may_be_lower: bool) -> None:
        """``features_of`` has checked them."""

    @torch.no_grad()
    def measure(self, batches: Iterable[Any]) -> None:
        """Set mean and standard deviation of the features. The deviation of the coordinates is the typical distance
        from one token to the next: half of the bags have a larger one."""
        distances: list[Tensor] = []
        super().measure(self._with_distances(batches, distances) if self.num_coordinates else batches)
        if self.num_coordinates:
            self.mean[self.num_features :] = 0
            self.std[self.num_features :] = torch.stack(distances).median() if distances else 1

    def _with_distances(self, batches: Iterable[Any], distances: list[Tensor]) -> Iterable[Any]:
        """The batches. The typical distance in each of their bags is added to the list."""
        for inputs in batches:
            rows = self.rows(inputs)
            for number, places in enumerate(self.features_of(inputs)[..., self.num_features :].double()):
                places = places if rows is None else places[: int(rows[number])]
                sides = places.amax(0) - places.amin(0)
                if sides.max() > 0:
                    # a line of tokens is as high as one token
                    area = sides.clamp(min=float(sides.max()) / len(places)).prod()
                    distances.append((area / len(places)).sqrt())
            yield inputs

    def draw(self, pictures: Sequence[Float[Tensor, "_ n 1"]], names: Sequence[str], limits: Any = None) -> Any:
        from longseq.encoders.drawing import draw_features  # matplotlib takes half a second to import

        return draw_features([picture[: self.num_features, :, 0] for picture in pictures], names, self.token_seconds)


def _waves(places: Float[Tensor, "b p n 1"], rows: Int64[Tensor, " b"] | None) -> Float[Tensor, "b _ n 1"]:
    """Sines and cosines of the distances from the corner of each bag, in typical distances."""
    inside = places
    if rows is not None:
        inside = places.masked_fill(~is_present(rows, places.shape[2])[:, None, :, None], math.inf)
    steps = torch.linspace(0, 1, _WAVELENGTHS, dtype=torch.float64, device=places.device)
    frequencies = 2 * math.pi / (_SHORTEST * (_LONGEST / _SHORTEST) ** steps)
    angles = (places - inside.amin(2, keepdim=True))[:, None] * frequencies.to(places.dtype)[:, None, None, None]
    return torch.cat([angles.sin(), angles.cos()], dim=1).flatten(1, 2)
