"""What the census tries: one small instance of every architecture of three libraries, found by rules and not picked by hand.

- transformers: every model type with a head for causal, masked or sequence-to-sequence language modelling, image or sequence
  classification or speech recognition, from its own config class with small sizes where the config has a field of that name; loss inside.
- timm: the smallest-sounding model of every file of `timm.models`.
- torchvision: the smallest-sounding model of every family, detection and segmentation heads too.

A name is `library:task:model`. `make(name)` gives (model, example, loss_fn, targets); a config that these rules cannot make small raises.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torchvision_ops import declare_missing_ops

Instance = tuple[nn.Module, Any, Callable[..., torch.Tensor] | None, tuple[Any, ...]]
WORDS, ROWS, LENGTH, CLASSES = 503, 4, 64, 10
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
_WIDTH, _WIDE, _LAYERS, _HEADS, _GROUPS, _HEAD = 64, 128, 2, 4, 2, 16
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "model_dim", "embedding_size"), _WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "encoder_hidden_size", "decoder_hidden_size", "projection_dim", "d_embed"), _WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "d_inner", "ffn_hidden_size", "feed_forward_size"), _WIDE
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "mamba_intermediate_size", "shared_expert_intermediate_size"), _WIDE),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size", "dense_intermediate_size"), _WIDTH),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), _LAYERS
    ),
    **dict.fromkeys(("num_encoder_layers", "encoder_num_layers", "decoder_num_layers"), _LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), _HEADS
    ),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads", "linear_num_value_heads"), _HEADS),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "num_query_groups", "linear_num_key_heads", "decoder_num_key_value_heads"), _GROUPS
    ),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "kv_channels", "linear_key_head_dim", "linear_value_head_dim"), _HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _HEAD),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 2 * LENGTH),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), WORDS),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    "max_source_positions": LENGTH,
    "num_mel_bins": 16,
    "image_size": 64,
    "state_size": 8,
    "rotary_dim": 8,
    "expand": 2,
}
_EQUAL_HEADS = dict.fromkeys(("num_key_value_heads", "num_kv_heads"), _HEADS)
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
ATTEMPTS: tuple[dict[str, int], ...] = ({}, _EQUAL_HEADS, *(_EQUAL_HEADS | dict.fromkeys(_DEPTHS, depth) for depth in (4, 6, 8, 12)))
"""Instead of the usual sizes, one after the other, until a plain model can be made and called: layers come in groups in some configs."""
SMALL = ("atto", "femto", "pico", "nano", "xxsmall", "xxs", "xsmall", "xs", "xt", "tiny", "mini", "small", "s", "t", "b0", "s0", "m0", "t0")
TORCHVISION = {
    "image": (
        *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3", "maxvit_t"),
        *(
            "mnasnet0_5",
            "mobilenet_v2",
            "mobilenet_v3_small",
            "regnet_x_400mf",
            "regnet_y_400mf",
            "resnet18",
            "resnet50",
            "resnext50_32x4d",
        ),
        *("shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_32", "wide_resnet50_2"),
    ),
    "segmentation": ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"),
    "video": ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "swin3d_t"),
    "detection": ("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "fcos_resnet50_fpn"),
}


def names() -> list[str]:
    """All, in the order of their libraries."""
    return [
        *_transformers_names(),
        *_timm_names(),
        *(f"torchvision:{task}:{name}" for task, found in TORCHVISION.items() for name in found),
    ]


def make(name: str) -> Instance:
    library, task, model = name.split(":")
    torch.manual_seed(0)
    if library == "transformers":
        return _make_transformers(task, model)
    return _make_timm(model) if library == "timm" else _make_torchvision(task, model)


# -- transformers -----------------------------------------------------------------------------------------------------


def _transformers_names() -> list[str]:
    found = {task: _mapping(task) for task in TASKS}
    return [f"transformers:{task}:{kind}" for task, models in found.items() for kind in models]


def _mapping(task: str) -> dict[str, Any]:
    declare_missing_ops()
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, TASKS[task]))


def _make_transformers(task: str, kind: str) -> Instance:
    import transformers
    from transformers.models.auto import configuration_auto

    name = _mapping(task)[kind]
    config_class = configuration_auto.CONFIG_MAPPING[kind]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    first: Exception | None = None
    for sizes in ATTEMPTS:
        try:
            torch.manual_seed(0)
            model = model_class(_small_config(config_class, SIZES | sizes)).train()
            example = _transformers_example(task, model)
            with torch.no_grad():
                model(**example)
        except Exception as error:  # these sizes do not go together in this config: other ones may
            first = first or error
            continue
        return model, example, None, ()
    assert first is not None
    raise first


def _small_config(config_class: Any, sizes: dict[str, int]) -> Any:
    """The config with every size that it has a field for made small; configs inside it too."""
    fields = dataclasses.fields(config_class) if dataclasses.is_dataclass(config_class) else ()
    given: dict[str, Any] = {f.name: sizes[f.name] for f in fields if f.name in sizes and isinstance(f.default, int | None)}
    for name, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        if dataclasses.is_dataclass(inner):
            given[name] = _small_config(inner, sizes)
    made = config_class(**given)
    for name in ("pad_token_id", "decoder_start_token_id"):
        if getattr(made, name, None) is None:
            setattr(made, name, 0)
    return made


def _transformers_example(task: str, model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    if task == "image":
        config: Any = model.config
        size = getattr(config, "image_size", 64)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        images = torch.randn(ROWS, getattr(config, "num_channels", 3), height, width, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, config.num_labels, (ROWS,), generator=generator)}
    if task == "ctc":
        main: Any = getattr(model, "main_input_name", "input_values")
        shape = (ROWS, 8000) if main == "input_values" else (ROWS, 2 * LENGTH, getattr(model.config, "num_mel_bins", None) or 80)
        return {main: torch.randn(shape, generator=generator), "labels": tokens[:, :8]}
    if task == "speech":
        return {"input_features": torch.randn(ROWS, 16, 2 * LENGTH, generator=generator), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


# -- timm and torchvision ------------------------------------------------------------------------------------------------


def _timm_names() -> list[str]:
    declare_missing_ops()
    import timm.models  # noqa: F401
    from timm.models import _registry

    chosen = [_smallest_sounding(sorted(models)) for _, models in sorted(_registry._module_to_models.items()) if models]
    return [f"timm:image:{name}" for name in chosen]


def _smallest_sounding(models: list[str]) -> str:
    """By the words of their names, then by the first number in them; among equals the shortest, then the first."""

    def key(name: str) -> tuple[int, int, int, str]:
        words, numbers = name.split("_"), re.findall(r"\d+", name.split("_", 1)[-1]) or re.findall(r"\d+", name)
        rank = min((SMALL.index(w) for w in words if w in SMALL), default=len(SMALL))
        return rank, int(numbers[0]) if numbers else 0, len(name), name

    return min([name for name in models if not name.startswith("test_")] or models, key=key)


def _make_timm(model: str) -> Instance:
    declare_missing_ops()
    import timm

    size = 64
    try:
        made = timm.create_model(model, num_classes=CLASSES, img_size=size)
    except Exception:  # sizes that a model cannot have raise all kinds of errors; then it is given its own
        made = timm.create_model(model, num_classes=CLASSES)
        fixed = made.pretrained_cfg.get("fixed_input_size") or hasattr(made, "img_size")
        size = made.pretrained_cfg["input_size"][-1] if fixed else 96
    return _classifier(made, torch.randn(ROWS, 3, size, size))


def _classifier(model: nn.Module, x: torch.Tensor) -> Instance:
    return model.train(), (x,), _first_cross_entropy, (torch.randint(0, CLASSES, (len(x),)),)


def _first_cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of models with more than one head, all that give classes."""
    outputs = list(output.values()) if isinstance(output, dict) else list(output) if isinstance(output, (tuple, list)) else [output]
    return torch.stack([functional.cross_entropy(y, target) for y in outputs if isinstance(y, torch.Tensor)]).sum()


def _make_torchvision(task: str, model: str) -> Instance:
    declare_missing_ops()
    import torchvision

    if task == "image":
        size = 96 if model == "inception_v3" else 224 if model in ("maxvit_t", "vit_b_32") else 64
        made = torchvision.models.get_model(model, weights=None, num_classes=CLASSES)
        return _classifier(made, torch.randn(ROWS, 3, size, size))
    if task == "video":
        frames = 16 if model == "mvit_v1_b" else 14 if model == "s3d" else 4
        size = 224 if model in ("mvit_v1_b", "s3d") else 64
        rows = 1 if size == 224 else 2
        return _classifier(torchvision.models.get_model(model, weights=None, num_classes=CLASSES), torch.randn(rows, 3, frames, size, size))
    made = torchvision.models.get_model(model, weights=None, weights_backbone=None, num_classes=CLASSES)
    if task == "segmentation":
        return made.train(), (torch.randn(2, 3, 64, 64),), _pixel_loss, (torch.randint(0, CLASSES, (2, 64, 64)),)
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [10.0, 20.0, 50.0, 60.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(2)]
    return made.train(), ([torch.rand(3, 64, 64) for _ in range(2)], targets), _sum_of_losses, ()


def _pixel_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return torch.stack([functional.cross_entropy(y, target) for y in output.values()]).sum()


def _sum_of_losses(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(output.values())).sum()
