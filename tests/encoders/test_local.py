"""Local mixing computes a convolution, and everything else stays as it is without local mixing."""

from pathlib import Path

import pytest
import test_every_encoder as contract
import timm
import torch
from torch import nn

from longseq import ImageEncoder, Linformer, Softmax, SpectrogramEncoder, Verma, resize
from longseq.attention.grid import TokenGrid
from longseq.attention.plug import carry
from longseq.encoders import Conv1d, Conv2d, LocalMixing, TimmEncoder
from longseq.encoders.local import LocalBlock, LocalLayer
from longseq.training import Classifier
from longseq.training.flops import flops_per_sample

ROOT = Path(__file__).parents[2]
SMALL = {"dim": 16, "depth": 1, "heads": 2}
EVERY = pytest.mark.parametrize("local", [*Conv2d.examples(), *Conv1d.examples()], ids=repr)


def learn(model: nn.Module) -> nn.Module:
    """Make the weights of local mixing nonzero, as a training would."""
    generator = torch.Generator().manual_seed(1)
    for part in model.modules():
        if isinstance(part, LocalLayer):
            for weight in part.parameters():
                nn.init.normal_(weight, std=0.2, generator=generator)
    return model


def naive(tokens, layer: LocalLayer, rows: int, columns: int, num_prefix: int):
    """For one sample: every token of the grid becomes a sum over its neighbours, channel by channel."""
    kernel, bias = layer.convolution.weight[:, 0], layer.convolution.bias
    up, left = kernel.shape[1] // 2, kernel.shape[2] // 2
    out = tokens.clone()
    for y in range(rows):
        for x in range(columns):
            total = bias.clone()
            for dy in range(-up, up + 1):
                for dx in range(-left, left + 1):
                    if 0 <= y + dy < rows and 0 <= x + dx < columns:
                        neighbour = tokens[num_prefix + (y + dy) * columns + x + dx]
                        total = total + kernel[:, dy + up, dx + left] * neighbour
            out[num_prefix + y * columns + x] += total
    return out


@EVERY
@pytest.mark.parametrize("prefix", [0, 2])
def test_it_adds_a_depthwise_convolution_over_the_grid(local: LocalMixing, prefix: int) -> None:
    layer = learn(local.build(3, TokenGrid((4, 5), prefix))).double()
    tokens = torch.randn(2, prefix + 20, 3, dtype=torch.float64)
    rows, columns = (4, 5) if isinstance(local, Conv2d) else (20, 1)
    expected = torch.stack([naive(sample, layer, rows, columns, prefix) for sample in tokens])
    torch.testing.assert_close(layer(tokens), expected, rtol=1e-10, atol=1e-10)


@EVERY
def test_a_frame_a_token_is_mixed_with_those_before_and_after_it(local: LocalMixing) -> None:
    layer = local.build(3, TokenGrid((30, 1)))
    assert layer.convolution.kernel_size == (local.kernel_size, 1)


@EVERY
@pytest.mark.parametrize("kind", contract.KINDS, ids=lambda kind: kind.__name__)
def test_at_its_start_nothing_changes_and_a_model_without_it_is_carried(kind, local: LocalMixing) -> None:
    torch.manual_seed(0)
    for (plain, inputs), (mixing, _) in zip(
        kind.examples(Linformer(7)), kind.examples(Linformer(7), local=local), strict=True
    ):
        fresh = carry(plain.trunk, mixing.trunk)
        places = 2 * len(mixing.trunk.blocks) - (mixing.trunk.global_pool == "token")
        assert len(fresh) == 2 * places and all(".local" in name for name in fresh)
        assert torch.equal(mixing.eval()(inputs), plain.eval()(inputs))


@EVERY
@pytest.mark.parametrize("kind", contract.KINDS, ids=lambda kind: kind.__name__)
def test_what_every_encoder_does_it_does_with_local_mixing(kind, local: LocalMixing) -> None:
    torch.manual_seed(0)
    for encoder, inputs in kind.examples(Verma(7), local=local):
        learn(encoder).double().eval()
        features = encoder(inputs)
        alone = torch.cat([encoder(sample) for sample in contract.every_one_of(inputs)])
        torch.testing.assert_close(alone, features, rtol=1e-9, atol=1e-9)
        features.square().sum().backward()
        assert [name for name, weight in encoder.named_parameters() if not weight.grad.abs().sum()] == []


@EVERY
@pytest.mark.parametrize("pool", ["avg", "token"])
def test_the_shorter_path_gives_what_the_blocks_own_forward_pass_gives(local: LocalMixing, pool: str) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 8, 8), Linformer(7), dim=16, depth=2, heads=4, pool=pool, local=local).double().eval()
    learn(encoder)
    images = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    short = encoder(images)
    called: list[object] = []
    for block in encoder.trunk.blocks:
        block.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(encoder(images), short, rtol=1e-10, atol=1e-10)
    assert len(called) == 2
    hooked = encoder.trunk.blocks[0].local2.convolution.register_forward_hook(lambda *_: called.append(2))
    encoder(images)
    assert 2 in called
    hooked.remove()


def test_gradients_pass_a_convolution_that_starts_at_zero() -> None:
    encoder = ImageEncoder((1, 8, 8), Softmax(), dim=16, depth=1, heads=2, local=Conv2d())
    encoder(torch.rand(2, 1, 8, 8)).square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in encoder.parameters())


def test_of_an_encoder_for_one_column_it_mixes_rows_of_wider_images_too() -> None:
    encoder = learn(ImageEncoder((1, 8, 1), Verma(), any_length=True, positions="none", local=Conv2d(), **SMALL)).eval()
    image = torch.rand(1, 1, 8, 8)
    torch.testing.assert_close(encoder(image.roll(3, dims=3)), encoder(image), rtol=1e-4, atol=1e-5)
    assert (encoder(image.roll(3, dims=2)) - encoder(image)).abs().max() > 1e-3


@EVERY
def test_its_weights_know_no_length_and_go_on_at_another(local: LocalMixing) -> None:
    encoder = learn(ImageEncoder((1, 8, 8), Verma(), dim=16, depth=1, heads=2, local=local))
    larger = resize(encoder, (1, 12, 12))
    for name, weight in encoder.trunk.blocks.state_dict().items():
        assert torch.equal(larger.trunk.blocks.state_dict()[name], weight), name
    assert larger.trunk.blocks[0].local1.columns == (12 if isinstance(local, Conv2d) else None)
    sounds = SpectrogramEncoder(8000, 0.5, Verma(), num_mels=16, dim=16, depth=1, heads=2, local=local)
    assert resize(sounds, seconds=1.0)(torch.randn(2, 8000)).shape == (2, 16)


def test_its_cost_is_counted() -> None:
    def flops(local: LocalMixing | None) -> tuple[int, ...]:
        return flops_per_sample(Classifier(ImageEncoder((1, 8, 8), Verma(), dim=16, depth=3, heads=2, local=local), 10))

    plain, mixing = flops(None), flops(Conv2d(5))
    cost = 3 * 2 * 2 * 64 * 16 * 25  # blocks, places, a product and a sum, tokens, channels, kernel
    assert mixing[0] - plain[0] == cost
    assert mixing[1] - plain[1] == 3 * cost


def test_autocast_leaves_its_float32_as_it_is_on_a_processor() -> None:
    layer = learn(Conv2d().build(8, TokenGrid((6, 6))))
    tokens = torch.randn(2, 36, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(tokens), layer(tokens.float()))
        mixed = layer(tokens)
    assert mixed.dtype == torch.float32 and torch.equal(mixed, layer(tokens))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel_size must be odd and positive, got 4"):
        Conv2d(4)
    with pytest.raises(ValueError, match="local must be left out for block 0, a ResPostBlock"):
        TimmEncoder("vit_base_patch16_rpn_224", Verma(), (3, 32, 32), pretrained=False, local=Conv1d())


def test_a_pretrained_vit_takes_it_and_keeps_the_names_of_its_weights() -> None:
    names = set(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict())
    encoder = TimmEncoder("vit_tiny_patch16_224", Verma(), (3, 32, 32), pretrained=False, local=Conv2d())
    assert all(type(block) is LocalBlock for block in encoder.trunk.blocks)
    assert names <= set(encoder.trunk.state_dict())


def test_it_is_chosen_on_the_command_line_and_a_checkpoint_names_it(command, tmp_path: Path) -> None:
    short = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]
    fit = ["fit", "--config", ROOT / "configs/image/digits.yaml", "--model.encoder.dim", "16", *short]
    fit += ["--model.encoder.depth", "1", "--trainer.enable_progress_bar", "false"]
    assert command(*fit, "--experiment", "plain").code == 0
    local = ["--model.encoder.local", "Conv2d", "--model.encoder.local.kernel_size", "5"]
    done = command(*fit, *local, "--model.init_from", "runs/plain/0/last.ckpt", "--experiment", "local")
    assert done.code == 0, done.err
    assert "new weights, because the checkpoint has none like them: 4" in done.out
    model = Classifier.load_from_checkpoint("runs/local/0/last.ckpt")
    assert model.encoder.local == Conv2d(5)
    assert command("test", "--ckpt_path", "runs/local/0/last.ckpt", "--trainer.limit_test_batches", "1").code == 0
