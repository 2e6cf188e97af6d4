"""timm's NaFlexViT, plugged for images of one size."""

import pytest
import timm
import torch

from longseq import Softmax, TimmEncoder, Verma, plug
from longseq.encoders.naflex import at_one_size

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 0}


@pytest.mark.parametrize("name", timm.list_models("naflexvit*"))
def test_it_gives_the_features_of_the_naflexvit(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=(64, 96), **SMALL).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    expected = model(images)
    plain = plug(at_one_size(model, (64, 96)), Softmax())
    torch.testing.assert_close(plain(images), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.thorough
def test_an_encoder_of_it_is_rebuilt_with_its_weights() -> None:
    one, other = (
        TimmEncoder("naflexvit_base_patch16_gap", Verma(), (3, 32, 48), pretrained=False).eval() for _ in range(2)
    )
    other.load_state_dict(one.state_dict())
    images = torch.randint(256, (2, 3, 32, 48), dtype=torch.uint8)
    assert torch.equal(other(images), one(images))
    with pytest.raises(ValueError, match="shape must be filled by patches of .16, 16., got .32, 40."):
        TimmEncoder("naflexvit_base_patch16_gap", Verma(), (3, 32, 40), pretrained=False)
