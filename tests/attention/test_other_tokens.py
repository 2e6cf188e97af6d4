"""A plugged model gets tokens it was not built for: it is right, or it refuses them and says what to do."""

import pytest
import torch
from small_vit import vit

from longseq import resize
from longseq.attention import Linformer, Mean, Softmax, Verma, plug
from longseq.encoders import ImageEncoder

BOUND = [Linformer(7), Linformer(7, sharing="none"), Verma(7)]
FREE = [Softmax(), Verma(), Linformer(7, projection=Mean())]
REMEDY = "carry the model to another size with longseq.resize"


def images(side=8):
    return torch.randn(2, 1, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mechanism", BOUND, ids=repr)
@pytest.mark.parametrize("way", ["patch_drop", "set_input_size smaller", "set_input_size larger", "dynamic_img_size"])
def test_a_learned_projection_refuses_tokens_of_other_places(mechanism, way):
    options = {"patch_drop": {"patch_drop_rate": 0.5}, "dynamic_img_size": {"dynamic_img_size": True}}.get(way, {})
    model = plug(vit(**options), mechanism).train()
    side = 8
    if way != "patch_drop":
        side = 12 if way.endswith("larger") else 4
        if way.startswith("set_input_size"):
            model.set_input_size((side, side))
    with pytest.raises(ValueError, match=f"tokens must be the 65 that E was built for, got .*{REMEDY}"):
        model(images(side))


@pytest.mark.parametrize("mechanism", FREE, ids=repr)
def test_what_is_free_of_n_takes_them_all(mechanism):
    dropping = plug(vit(patch_drop_rate=0.5), mechanism).train()
    assert dropping(images()).isfinite().all()
    model = plug(vit(dynamic_img_size=True), mechanism)
    for side in (4, 8, 12):
        assert model(images(side)).isfinite().all()


@pytest.mark.parametrize("mechanism", [Softmax(), *BOUND, Verma()], ids=repr)
@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 65, 65, dtype=torch.bool).tril(),
        torch.ones(65, 65, dtype=torch.bool),
        torch.zeros(2, 1, 1, 65),
        torch.ones(2, 4, 1, 65, dtype=torch.bool),
        torch.ones(2, 1, 1, 64, dtype=torch.bool),
    ],
    ids=["causal", "two dimensions", "added to scores", "of each head", "of other tokens"],
)
def test_a_mask_other_than_of_padding_is_refused(mechanism, mask):
    with pytest.raises(ValueError, match=r"attn_mask must be bool and of the shape \(batch, 1, 1, 65\)"):
        plug(vit(), mechanism)(images(), attn_mask=mask)


@pytest.mark.parametrize("mechanism", [*BOUND, *FREE], ids=repr)
def test_resize_carries_a_plugged_vit_as_it_carries_an_encoder(mechanism):
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), mechanism, dim=32, depth=2, heads=4).eval()
    larger = resize(encoder.trunk, (1, 12, 12))
    torch.testing.assert_close(larger(images(12)), resize(encoder, (1, 12, 12)).trunk(images(12)))
    assert encoder.trunk(images()).isfinite().all()  # resize left the old trunk unchanged
    with pytest.raises(ValueError, match="shape must keep 1 channels, got 3"):
        resize(encoder.trunk, (3, 12, 12))
    with pytest.raises(ValueError, match="model must hold a mechanism"):
        resize(vit(), (1, 12, 12))


def test_an_encoder_says_which_size_it_takes_and_what_to_do():
    encoder = ImageEncoder((1, 8, 8), Linformer(7), dim=32, depth=2, heads=4)
    for shape in ((1, 1, 16, 16), (1, 1, 4, 8), (1, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"inputs must be of the shape \(1, 8, 8\).*longseq.resize"):
            encoder(torch.zeros(shape))
