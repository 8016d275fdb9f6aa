"""The six models of the published comparisons, at their batch sizes, with per-block checkpointing as practitioners place it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models.torchvision_ops import declare_missing_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`blocks` names the module classes that a practitioner would checkpoint one by one."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[str, float], tuple[torch.Tensor, ...]]
    targets: Callable[[str, float], tuple[torch.Tensor, ...]]
    loss: Callable[..., Any]
    blocks: tuple[str, ...]
    autocast: bool = False
    channels_last: bool = False  # what a practitioner would do with a convolutional network on this hardware
    dtype: torch.dtype = torch.float32

    def model(self, device: str) -> nn.Module:
        """On the device, in training mode, as fast as eager PyTorch runs it."""
        built = self.build().to(device=device, dtype=self.dtype).train()
        return built.to(memory_format=torch.channels_last) if self.channels_last else built  # type: ignore[call-overload,no-any-return]

    def data(self, device: str, scale: float) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        inputs = self.inputs(device, scale)
        if self.channels_last:
            inputs = tuple(t.contiguous(memory_format=torch.channels_last) for t in inputs)
        return inputs, self.targets(device, scale) or inputs


def batch_of(size: int, scale: float) -> int:
    return max(1, round(size * scale))


def _images(batch: int, height: int = 224, width: int = 224) -> Callable[[str, float], tuple[torch.Tensor, ...]]:
    return lambda device, scale: (torch.randn(batch_of(batch, scale), 3, height, width, device=device),)


def _classes(batch: int) -> Callable[[str, float], tuple[torch.Tensor, ...]]:
    return lambda device, scale: (torch.randint(0, 1000, (batch_of(batch, scale),), device=device),)


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[str, float], tuple[torch.Tensor, ...]]:
    return lambda device, scale: (torch.randint(0, vocabulary, (batch_of(batch, scale), length), device=device),)


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        declare_missing_ops()
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(weights=None, **options)
        return model

    return build


class DoubleConv(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """The usual four-level UNet with skip connections: 64 to 1024 channels, transposed convolutions on the way up."""

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(5)]
        self.down = nn.ModuleList([DoubleConv(channels, widths[0]), *(DoubleConv(a, b) for a, b in itertools.pairwise(widths))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths)])
        self.merge = nn.ModuleList([DoubleConv(2 * a, a) for a in widths[:4]])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for i in (3, 2, 1, 0):
            x = self.merge[i](torch.cat([skips[i], self.up[i](x)], dim=1))
        head: torch.Tensor = self.head(x)
        return head


def _unet_targets(device: str, scale: float) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 2, (batch_of(11, scale), 416, 608), device=device),)


class CausalLM(nn.Module):
    """A Hugging Face causal language model that returns its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


def _gpt2(**options: Any) -> nn.Module:
    declare_missing_ops()
    import transformers

    return CausalLM(transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **options)))


def _llama() -> nn.Module:
    """The shape of Llama 3.2 1B: 16 layers of 2048, grouped attention, tied vocabulary of 128,256."""
    declare_missing_ops()
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return CausalLM(transformers.LlamaForCausalLM(config))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Shifts the labels, not the logits: a shifted copy of the logits alone would be gigabytes."""
    labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


PEERS = {
    p.name: p
    for p in (
        Peer(
            name="resnet50",
            build=_torchvision("resnet50"),
            inputs=_images(184),
            targets=_classes(184),
            loss=nn.functional.cross_entropy,
            channels_last=True,
            blocks=("Bottleneck",),
        ),
        Peer(
            name="googlenet",
            build=_torchvision("googlenet", aux_logits=False, init_weights=False),
            inputs=_images(320),
            targets=_classes(320),
            loss=nn.functional.cross_entropy,
            channels_last=True,
            blocks=("Inception", "BasicConv2d:top"),
        ),
        Peer(
            name="unet",
            build=UNet,
            inputs=_images(11, 416, 608),
            targets=_unet_targets,
            loss=nn.functional.cross_entropy,
            channels_last=True,
            blocks=("DoubleConv",),
        ),
        Peer(
            name="vgg16",
            build=_torchvision("vgg16"),
            inputs=_images(176),
            targets=_classes(176),
            loss=nn.functional.cross_entropy,
            channels_last=True,
            blocks=("pool-blocks",),
        ),
        Peer(
            name="mobilenet_v2",
            build=_torchvision("mobilenet_v2"),
            inputs=_images(272),
            targets=_classes(272),
            loss=nn.functional.cross_entropy,
            channels_last=True,
            blocks=("InvertedResidual",),
        ),
        Peer(
            name="gpt2",
            build=_gpt2,
            inputs=_tokens(16, 1024, 50257),
            targets=lambda device, scale: (),
            loss=next_token_loss,
            blocks=("GPT2Block",),
            autocast=True,
        ),
        Peer(
            name="llama1b",
            build=_llama,
            inputs=_tokens(4, 2048, 128256),
            targets=lambda device, scale: (),
            loss=next_token_loss,
            blocks=("LlamaDecoderLayer",),
            dtype=torch.bfloat16,
        ),
        Peer(
            name="vit_l",
            build=_torchvision("vit_l_16"),
            inputs=_images(128),
            targets=_classes(128),
            loss=nn.functional.cross_entropy,
            blocks=("EncoderBlock",),
            autocast=True,
        ),
    )
}


def checkpoint_blocks(model: nn.Module, blocks: tuple[str, ...]) -> int:
    """Wrap every block in torch.utils.checkpoint, in place; returns how many."""
    if blocks == ("pool-blocks",):
        return _checkpoint_until_pools(model)
    found = [m for name, m in model.named_modules() if _is_block(name, m, blocks)]
    for module in found:
        _wrap(module)
    return len(found)


def _is_block(name: str, module: nn.Module, blocks: tuple[str, ...]) -> bool:
    kind = type(module).__name__
    return kind in blocks or (f"{kind}:top" in blocks and "." not in name)


def _wrap(module: nn.Module) -> None:
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def _checkpoint_until_pools(model: nn.Module) -> int:
    """VGG has no block modules: its feature list is cut after each pooling layer."""
    features: Any = model.features
    groups: list[list[nn.Module]] = [[]]
    for layer in features:
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    sequences = [nn.Sequential(*g) for g in groups if g]
    for sequence in sequences:
        _wrap(sequence)
    model.features = nn.Sequential(*sequences)
    return len(sequences)
