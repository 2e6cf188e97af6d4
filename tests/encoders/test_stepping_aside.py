"""If an encoder's shorter path could differ from timm's modules, the encoder uses the modules."""

import copy

import pytest
import torch
from torch import nn

from longseq import resize
from longseq.attention import Linformer, Softmax, Verma, plug
from longseq.encoders import Conv2d, ImageEncoder
from longseq.encoders.forward_pass import encode

MECHANISMS = pytest.mark.parametrize("mechanism", [Softmax(), Linformer(5), Verma(), Verma(5)], ids=repr)


def trunk(mechanism, **options):
    torch.manual_seed(0)
    options = {"dim": 16, "depth": 2, "heads": 2, "pool": "token"} | options
    return ImageEncoder((1, 4, 4), mechanism, **options).trunk.double().eval()


def pictures():
    return torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)).double()


class Tripled(nn.LayerNorm):
    def forward(self, x):
        return 3 * super().forward(x)


class Halved(nn.GELU):
    def forward(self, x):
        return super().forward(x) / 2


def replace_forward(module):
    before = module.forward
    module.forward = lambda *args, **options: before(*args, **options) + 1


CHANGES = {
    **{
        f"another forward of {name}": lambda block, name=name: replace_forward(block.get_submodule(name))
        for name in ("attn.qkv", "attn.proj", "norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.fc2")
    },
    "another forward of the block": replace_forward,
    "a subclass of LayerNorm": lambda block: setattr(block, "norm2", Tripled(16).double()),
    "a subclass of GELU": lambda block: setattr(block.mlp, "act", Halved()),
    "dropout taken out": lambda block: setattr(block.mlp, "drop1", nn.Identity()),
}


@MECHANISMS
@pytest.mark.parametrize("change", CHANGES)
def test_what_someone_has_changed_in_a_block_counts(mechanism, change):
    model = trunk(mechanism)
    plain = encode(model, pictures())
    for block in model.blocks:
        CHANGES[change](block)
    features = encode(model, pictures())
    torch.testing.assert_close(features, model(pictures()))
    assert change == "dropout taken out" or not torch.equal(features, plain)


def test_dropout_that_is_in_training_alone_draws_anew():
    model = trunk(Verma(), dropout=0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    model.blocks[0].drop_path1 = nn.Identity()
    for block in model.blocks:  # only the dropout of the MLP stays in training
        block.attn.proj_drop.eval()
    model.pos_drop.eval()
    assert not torch.equal(encode(model, pictures()), encode(model, pictures()))


@pytest.mark.parametrize("part", ["", "blocks"])
def test_a_hook_on_the_trunk_is_called(part):
    model = trunk(Verma())
    called = []
    model.get_submodule(part).register_forward_hook(lambda *_: called.append(part))
    torch.testing.assert_close(encode(model, pictures()), trunk(Verma())(pictures()))
    assert called == [part]
    with pytest.raises(ValueError, match="trunk must have no hooks for inputs of unlike lengths"):
        encode(model, pictures(), torch.tensor([4, 3, 2]))


@pytest.mark.parametrize("part", ["", "blocks"])
def test_a_hook_on_the_trunk_that_would_mix_over_wrong_rows_is_refused(part):
    free = {"any_length": True, "positions": "none", "local": Conv2d()}
    encoder = ImageEncoder((1, 8, 8), Verma(), dim=16, depth=2, heads=2, **free).double().eval()
    for weight in encoder.parameters():
        nn.init.normal_(weight, std=0.3)
    same, narrow = 255 * torch.rand(2, 1, 12, 8).double(), 255 * torch.rand(2, 1, 8, 6).double()
    expected = encoder(same)
    encoder.trunk.get_submodule(part).register_forward_hook(lambda *_: None)
    torch.testing.assert_close(encoder(same), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="^trunk must have no hooks for local mixing in images of another width; "):
        encoder(narrow)


@MECHANISMS
def test_a_block_that_stands_in_a_trunk_twice_is_run_whole_twice(mechanism):
    model = trunk(mechanism)
    model.blocks = nn.Sequential(model.blocks[0], model.blocks[0])
    torch.testing.assert_close(encode(model, pictures()), model(pictures()))


def test_a_block_that_stands_in_a_graph_twice_has_the_derivatives_of_timms():
    model = trunk(Verma())
    model.blocks = nn.Sequential(model.blocks[0], model.blocks[0])
    weight = model.blocks[0].mlp.fc1.weight

    def derivatives(forward):
        (first,) = torch.autograd.grad(forward(pictures()).square().sum(), weight, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), weight)

    for ours, theirs in zip(derivatives(lambda x: encode(model, x)), derivatives(model), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_timms_attention_put_back_is_run():
    model = trunk(Verma())
    other = copy.deepcopy(trunk(Softmax()))
    model.blocks[1].attn = timms_attention(other.blocks[1].attn)
    torch.testing.assert_close(encode(model, pictures()), model(pictures()))


def timms_attention(layer):
    from timm.layers.attention import Attention

    attention = Attention(16, num_heads=2, qkv_bias=True).double()
    attention.load_state_dict(layer.state_dict())
    return attention


def test_plugging_and_resizing_leave_a_model_in_eval_mode():
    model = trunk(Softmax())
    assert not any(module.training for module in plug(model, Linformer(5)).modules())
    assert not any(module.training for module in resize(model, (1, 8, 8)).modules())
