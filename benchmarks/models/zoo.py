"""Small instances of real architectures with synthetic inputs: what the model matrix, the tests and `memfit run` train.

    benchmarks/models/zoo.py:gpt2 a factory: () -> (model, example_inputs, loss_fn, example_targets)

Depth, wiring, dropout, masks and losses are the architecture's own; widths, images and sequences are small, so that
every step takes well under a second on two cores and activations still outweigh parameters where the original's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torchvision_ops import declare_missing_ops
from benchmarks.models.zoo_networks import (
    DiffusionUNet,
    InceptionNet,
    RecurrentClassifier,
    TiedLanguageModel,
    TwoTowers,
    UNet,
)

Instance = tuple[nn.Module, Any, Callable[..., torch.Tensor], tuple[Any, ...]]
_CLASSES, _WORDS = 10, 160


def _images(batch: int = 4, size: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def _labels(batch: int = 4) -> torch.Tensor:
    return torch.randint(0, _CLASSES, (batch,))


def _tokens(batch: int = 4, length: int = 48) -> torch.Tensor:
    return torch.randint(0, _WORDS, (batch, length))


def _mask(batch: int = 4, length: int = 48) -> torch.Tensor:
    """Right padding: the second half of the batch is shorter."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[batch // 2 :, length - length // 4 :] = 0
    return mask


def _vision(model: nn.Module, size: int = 64, batch: int = 4) -> Instance:
    return model.train(), (_images(batch, size),), functional.cross_entropy, (_labels(batch),)


def _torchvision(name: str, size: int = 64, batch: int = 4, **options: Any) -> Instance:
    declare_missing_ops()
    import torchvision

    return _vision(getattr(torchvision.models, name)(weights=None, num_classes=_CLASSES, **options), size, batch)


def _timm(name: str, size: int = 64, batch: int = 4, **options: Any) -> Instance:
    declare_missing_ops()
    import timm

    return _vision(timm.create_model(name, pretrained=False, num_classes=_CLASSES, **options), size, batch)


def _from_output(output: Any) -> torch.Tensor:
    """A HuggingFace model computes its own loss when given labels."""
    loss: torch.Tensor = output.loss
    return loss


def _huggingface(model: str, config: str, inputs: dict[str, torch.Tensor], **options: Any) -> Instance:
    declare_missing_ops()
    import transformers

    built = getattr(transformers, model)(getattr(transformers, config)(**options))
    return built.train(), inputs, _from_output, ()


def _language_inputs() -> dict[str, torch.Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "attention_mask": _mask(), "labels": tokens}


# -- images ------------------------------------------------------------------------------------------------------------


def resnet18() -> Instance:
    return _timm("resnet18d", batch=16, stem_width=8, channels=(16, 32, 64, 128), drop_rate=0.1)


def resnet50() -> Instance:
    return _timm("resnet50d", batch=2, stem_width=4, channels=(8, 16, 32, 64))


def googlenet() -> Instance:
    """Three outputs, weighted as in the paper; the hidden layer of the two auxiliary classifiers is 64 wide."""
    model, inputs, _, targets = _torchvision("googlenet", size=96, aux_logits=True, init_weights=False)
    for auxiliary in (model.aux1, model.aux2):
        auxiliary.fc1, auxiliary.fc2 = nn.Linear(2048, 64), nn.Linear(64, _CLASSES)

    def loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        main = functional.cross_entropy(output.logits, labels)
        return main + 0.3 * (functional.cross_entropy(output.aux_logits1, labels) + functional.cross_entropy(output.aux_logits2, labels))

    return model, inputs, loss, targets


def vgg16() -> Instance:
    """VGG-16 with a quarter of the channels; the two layers behind the convolutions are 128 wide."""
    declare_missing_ops()
    from torchvision.models.vgg import VGG, cfgs, make_layers

    model = VGG(make_layers([c if c == "M" else c // 4 for c in cfgs["D"]]), init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier = nn.Sequential(nn.Linear(512, 128), nn.ReLU(True), nn.Dropout(), nn.Linear(128, _CLASSES))
    return _vision(model, batch=12)


def mobilenet_v2() -> Instance:
    return _torchvision("mobilenet_v2", width_mult=0.5)


def mobilenet_v3() -> Instance:
    return _torchvision("mobilenet_v3_small", width_mult=0.5)


def densenet() -> Instance:
    """DenseNet-BC with half the growth and a quarter of the layers of DenseNet-121."""
    declare_missing_ops()
    from torchvision.models import DenseNet

    return _vision(DenseNet(growth_rate=16, block_config=(2, 4, 6, 4), num_init_features=32, num_classes=_CLASSES))


def efficientnet_b0() -> Instance:
    """EfficientNet-B0 with half the channels and one block per stage where B0 has up to four."""
    declare_missing_ops()
    from torchvision.models.efficientnet import EfficientNet, _efficientnet_conf

    stages, last = _efficientnet_conf("efficientnet_b0", width_mult=0.5, depth_mult=0.5)
    return _vision(EfficientNet(stages, dropout=0.2, stochastic_depth_prob=0.2, last_channel=last or 256, num_classes=_CLASSES))


def convnext() -> Instance:
    return _timm("convnext_atto", dims=(16, 32, 64, 128), drop_path_rate=0.1)


def regnet() -> Instance:
    """RegNet with squeeze-and-excitation, narrow."""
    declare_missing_ops()
    from torchvision.models.regnet import BlockParams, RegNet

    stages = BlockParams.from_init_params(depth=8, w_0=16, w_a=10.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return _vision(RegNet(stages, num_classes=_CLASSES))


def inception() -> Instance:
    return _vision(InceptionNet(_CLASSES))


def unet() -> Instance:
    masks = torch.randint(0, 2, (2, 64, 64))
    return UNet(channels=3, classes=2, width=8), (_images(2),), functional.cross_entropy, (masks,)


def diffusion_unet() -> Instance:
    """One DDPM step: predict the noise that was added at time t."""
    noise = _images(2, 32)
    return DiffusionUNet(width=16), {"image": _images(2, 32), "time": torch.randint(0, 1000, (2,))}, functional.mse_loss, (noise,)


def vit() -> Instance:
    return _timm("vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=48, depth=4, drop_rate=0.1, attn_drop_rate=0.1)


def swin() -> Instance:
    declare_missing_ops()
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=[4, 4],
        dropout=0.1,
        stochastic_depth_prob=0.2,
        num_classes=_CLASSES,
    )
    return _vision(model)


def mlp_mixer() -> Instance:
    declare_missing_ops()
    from timm.models import MlpMixer

    return _vision(MlpMixer(num_classes=_CLASSES, img_size=64, patch_size=8, embed_dim=64, num_blocks=6, drop_rate=0.1, proj_drop_rate=0.1))


# -- language and sound -----------------------------------------------------------------------------------------------


def gpt2() -> Instance:
    options = {"vocab_size": _WORDS, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
    return _huggingface("GPT2LMHeadModel", "GPT2Config", _language_inputs(), use_cache=False, **options)


def bert() -> Instance:
    inputs = {**_language_inputs(), "token_type_ids": torch.zeros(4, 48, dtype=torch.long)}
    return _huggingface("BertForMaskedLM", "BertConfig", inputs, **_encoder())


def roberta() -> Instance:
    return _huggingface("RobertaForMaskedLM", "RobertaConfig", _language_inputs(), **{**_encoder(), "max_position_embeddings": 66})


def distilbert() -> Instance:
    inputs = {"input_ids": _tokens(), "attention_mask": _mask(), "labels": _labels()}
    options = {"vocab_size": _WORDS, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128, "num_labels": _CLASSES}
    return _huggingface("DistilBertForSequenceClassification", "DistilBertConfig", inputs, max_position_embeddings=64, **options)


def _encoder() -> dict[str, int]:
    return {
        "vocab_size": _WORDS,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
    }


def t5() -> Instance:
    inputs = {"input_ids": _tokens(), "attention_mask": _mask(), "labels": _tokens(4, 24)}
    options = {"vocab_size": _WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
    return _huggingface("T5ForConditionalGeneration", "T5Config", inputs, use_cache=False, **options)


def _decoder() -> dict[str, Any]:
    return {
        "vocab_size": _WORDS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }


def llama() -> Instance:
    return _huggingface("LlamaForCausalLM", "LlamaConfig", _language_inputs(), attention_dropout=0.1, **_decoder())


def qwen2() -> Instance:
    return _huggingface("Qwen2ForCausalLM", "Qwen2Config", _language_inputs(), **_decoder())


def qwen3() -> Instance:
    return _huggingface("Qwen3ForCausalLM", "Qwen3Config", _language_inputs(), head_dim=16, tie_word_embeddings=True, **_decoder())


def mixtral() -> Instance:
    """Mixture of experts. Which tokens an expert sees depends on the data, so experts are computed by the library's batched
    form, which gathers each token's expert weights; its loop over experts and its grouped form on the CPU branch on values."""
    options = {**_decoder(), "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    options["experts_implementation"] = "batched_mm"
    return _huggingface("MixtralForCausalLM", "MixtralConfig", _language_inputs(), **options)


def whisper() -> Instance:
    inputs = {"input_features": torch.randn(2, 16, 128), "labels": _tokens(2, 24)}
    options = {
        "vocab_size": _WORDS,
        "num_mel_bins": 16,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_source_positions": 64,
        "max_target_positions": 32,
        "dropout": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "use_cache": False,
    }
    return _huggingface("WhisperForConditionalGeneration", "WhisperConfig", inputs, **options)


def lstm() -> Instance:
    return RecurrentClassifier(nn.LSTM, _WORDS, _CLASSES), (_tokens(8, 10),), functional.cross_entropy, (_labels(8),)


def gru() -> Instance:
    return RecurrentClassifier(nn.GRU, _WORDS, _CLASSES), (_tokens(8, 10),), functional.cross_entropy, (_labels(8),)


def tied_language_model() -> Instance:
    return TiedLanguageModel(_WORDS), (_tokens(),), _token_loss, (_tokens(),)


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def two_towers() -> Instance:
    """Several inputs by keyword, nested; several outputs in a dict; one of them an integer."""
    inputs = {"image": _images(8, 32), "text": {"tokens": _tokens(8, 16), "mask": _mask(8, 16).bool()}}

    def loss(output: dict[str, Any]) -> torch.Tensor:
        logits = output["scale"] * output["image"] @ output["text"].T
        target = torch.arange(logits.shape[0])
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2

    return TwoTowers(_WORDS), inputs, loss, ()


ZOO: dict[str, Callable[[], Instance]] = {
    f.__name__: f
    for f in (
        resnet18,
        resnet50,
        googlenet,
        vgg16,
        mobilenet_v2,
        mobilenet_v3,
        densenet,
        efficientnet_b0,
        convnext,
        regnet,
        inception,
        unet,
        diffusion_unet,
        vit,
        swin,
        mlp_mixer,
        gpt2,
        bert,
        roberta,
        distilbert,
        t5,
        llama,
        qwen2,
        qwen3,
        mixtral,
        whisper,
        lstm,
        gru,
        tied_language_model,
        two_towers,
    )
}


def make(name: str, *, seed: int = 0) -> Instance:
    """The named instance, the same weights and inputs every time."""
    torch.manual_seed(seed)
    return ZOO[name]()
