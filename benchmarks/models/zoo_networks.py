"""Networks of the zoo that no installed library ships, written plainly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Ronneberger et al. 2015 with BatchNorm: four levels, a skip connection at each."""

    def __init__(self, *, channels: int, classes: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(5)]
        self.down = nn.ModuleList([_double(a, b) for a, b in zip([channels, *widths[:3]], widths[:4], strict=True)])
        self.middle = _double(widths[3], widths[4])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[3::-1], widths[:0:-1], strict=True)])
        self.merge = nn.ModuleList([_double(2 * a, a) for a in widths[3::-1]])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips = []
        x = image
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


class _Residual(nn.Module):
    """GroupNorm, SiLU, convolution, twice, with the time embedding added between and dropout before the second."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(embedding, outputs))
        self.second = nn.Sequential(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv1d(width, 3 * width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2)
        parts = self.qkv(self.norm(flat)).unflatten(1, (3, self.heads, -1)).transpose(-1, -2)
        q, k, v = parts.unbind(1)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(-1, -2).flatten(1, 2)
        return x + self.out(mixed).unflatten(2, x.shape[2:])


class DiffusionUNet(nn.Module):
    """Ho et al. 2020: residual blocks with a sinusoidal time embedding, attention at the lowest two resolutions."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.width = width
        embedding = 4 * width
        widths = [width, 2 * width, 2 * width]
        self.embed = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([_Residual(a, b, embedding) for a, b in zip([width, *widths[:-1]], widths, strict=True)])
        self.smaller = nn.ModuleList([nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths])
        self.middle = nn.ModuleList(
            [_Residual(widths[-1], widths[-1], embedding), _Attention(widths[-1]), _Residual(widths[-1], widths[-1], embedding)]
        )
        self.up = nn.ModuleList(
            [_Residual(w + previous, w, embedding) for w, previous in zip(widths[::-1], [widths[-1], *widths[:0:-1]], strict=True)]
        )
        self.attend = _Attention(widths[-1])
        self.head = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, *, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        moment = self.embed(self._waves(time))
        x = self.stem(image)
        skips = []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            x = block(x, moment)
            skips.append(x)
            x = smaller(x)
        first, attention, second = self.middle
        x = second(attention(first(x, moment)), moment)
        for k, block in enumerate(self.up):
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), moment)
            x = self.attend(x) if k == 0 else x
        return self.head(x)

    def _waves(self, time: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, device=time.device) / half)
        angles = time[:, None].float() * rates[None]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class _Branches(nn.Module):
    """Four branches over one input, concatenated: the module of Szegedy et al. 2016."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = _conv(inputs, width, 1)
        self.three = nn.Sequential(_conv(inputs, width, 1), _conv(width, width, 3))
        self.five = nn.Sequential(_conv(inputs, width, 1), _conv(width, width, 3), _conv(width, width, 3))
        self.pool = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv(inputs, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


def _conv(inputs: int, outputs: int, size: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False), nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU())


class InceptionNet(nn.Module):
    """A stem and six Inception modules, dropout before the classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 16, 3), nn.MaxPool2d(2), _conv(16, 32, 3), nn.MaxPool2d(2))
        self.body = nn.Sequential(
            _Branches(32, 16),
            _Branches(64, 16),
            nn.MaxPool2d(2),
            _Branches(64, 24),
            _Branches(96, 24),
            _Branches(96, 32),
            _Branches(128, 32),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(128, classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(image)))


class RecurrentClassifier(nn.Module):
    """Two recurrent layers, both directions, dropout between them, classifying from the last step."""

    def __init__(self, kind: Any, words: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.recurrent = kind(width, width, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embed(tokens))
        return self.head(states[:, -1])


class TiedLanguageModel(nn.Module):
    """nn.TransformerEncoder with a causal mask; the head is the embedding's own weight."""

    def __init__(self, words: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))


class TwoTowers(nn.Module):
    """An image tower and a text tower with a learnt scale, as in CLIP (Radford et al. 2021)."""

    def __init__(self, words: int, width: int = 48) -> None:
        super().__init__()
        self.picture = nn.Sequential(_conv(3, 16, 3), nn.MaxPool2d(2), _conv(16, 32, 3), nn.MaxPool2d(2), _conv(32, width, 3))
        self.embed = nn.Embedding(words, width)
        self.text = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.1, batch_first=True)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, *, image: torch.Tensor, text: dict[str, torch.Tensor]) -> dict[str, Any]:
        seen = functional.normalize(self.picture(image).mean((2, 3)), dim=-1)
        read = self.text(self.embed(text["tokens"]), src_key_padding_mask=~text["mask"])
        weights = text["mask"].float()[:, :, None]
        pooled = functional.normalize((read * weights).sum(1) / weights.sum(1), dim=-1)
        return {"image": seen, "text": pooled, "scale": self.log_scale.exp(), "lengths": text["mask"].sum(1), "name": "two towers"}
