"""Tokens in bfloat16 between the blocks, under bfloat16 autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import Linformer, Softmax, Verma
from longseq.arguments import ArgumentError
from longseq.encoders import Conv2d, ImageEncoder, forward_pass

IMAGES = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
FORMS = [{}, {"local": Conv2d(), "pool": "token"}, {"layer_scale": 0.1}, {"checkpointing": True}, {"drop_path": 0.2}]


def encoder_with(bf16_residual: bool, mechanism: Any = None, **options: Any) -> ImageEncoder:
    torch.manual_seed(0)
    encoder = ImageEncoder(
        (1, 8, 8), mechanism or Linformer(16), dim=32, depth=3, heads=4, bf16_residual=bf16_residual, **options
    )
    encoder.set_statistics(torch.full((1, 1, 1), 128.0), torch.full((1, 1, 1), 64.0))
    return encoder.train()


def features_and_gradients(encoder: ImageEncoder, autocasts: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        features = encoder(IMAGES)
    (features.float() * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
    return features.detach().float(), torch.cat([weight.grad.flatten() for weight in encoder.parameters()])


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("mechanism", [Linformer(16), Verma(), Softmax()], ids=repr)
def test_values_and_gradients_differ_by_bfloat16s_rounding(mechanism: Any, options: dict[str, Any]) -> None:
    """Half a unit in the last place of bfloat16 is 0.2 %."""
    pairs = zip(
        *(features_and_gradients(encoder_with(low, mechanism, **options), True) for low in (False, True)), strict=True
    )
    for exact, rounded in pairs:
        assert 0 < (rounded - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_tokens_between_blocks_are_bfloat16(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = forward_pass.run_block, []

    def noted(block: Any, tokens: Tensor, *rest: Any, **given: Any) -> Tensor:
        out = run(block, tokens, *rest, **given)
        seen.extend((tokens.dtype, out.dtype))
        return out

    monkeypatch.setattr(forward_pass, "run_block", noted)
    features_and_gradients(encoder_with(True, **options), True)
    assert len(seen) >= 6 and set(seen) == {torch.bfloat16}


def test_without_autocast_nothing_changes() -> None:
    pairs = zip(*(features_and_gradients(encoder_with(low), False) for low in (False, True)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_reversible_blocks_refuse_it() -> None:
    with pytest.raises(ArgumentError, match="^bf16_residual must be false with reversible blocks"):
        encoder_with(True, reversible=True)
