"""Language models of transformers with their loss inside: the least budget with and without the outputs beside the loss, gradients at a third.

Small configurations on the CPU, eager engine, dropout off; the list was made before the first run, and what fails stays in the table.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import memfit
from benchmarks.lib.results import Row, provenance, write_results

WORDS, ROWS, LENGTH, SEED = 8_003, 8, 128, 0
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
DECODER = SIZE | {"num_key_value_heads": 2}
TEXT = f"""transformers models given labels, so with their loss inside: {ROWS} x {LENGTH} tokens, {WORDS:,} words, two layers 64 wide, on two cores.
*All outputs* and *least* are the smallest budgets that are not proven impossible, as shares of the plain step's peak: with everything the model
returns, and with logits, caches and states left out where the budget does not hold them. *A third*: whether `fit` has a plan in a third of the peak.
*Worst*: the largest difference of a gradient there, against the model's largest gradient; *loss*: the difference of the loss."""

Make = Callable[[Any], tuple[Any, dict[str, torch.Tensor]]]


def tokens() -> torch.Tensor:
    return torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(SEED))


def language(model: str, config: str, **options: Any) -> Make:
    """A decoder or a masked model: labels are the tokens."""

    def make(library: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        made = getattr(library, model)(getattr(library, config)(**options))
        return made, {"input_ids": tokens(), "labels": tokens()}

    return make


def make_whisper(library: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    config = library.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, vocab_size=WORDS, max_source_positions=64, max_target_positions=LENGTH, num_mel_bins=16, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return library.WhisperForConditionalGeneration(config), {"input_features": torch.randn(ROWS, 16, 128), "labels": tokens()}


BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": WORDS, "max_position_embeddings": LENGTH,
}  # fmt: skip
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS, "decoder_start_token_id": 0}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": LENGTH, "vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
OPT = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS, "word_embed_proj_dim": 64}
MAMBA = {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "vocab_size": WORDS}
MODELS: dict[str, Make] = {
    "GPT-2": language("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "GPT-NeoX": language("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZE),
    "OPT": language("OPTForCausalLM", "OPTConfig", **OPT),
    "Bloom": language("BloomForCausalLM", "BloomConfig", hidden_size=64, n_layer=2, n_head=4, vocab_size=WORDS),
    "Llama": language("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "Mistral": language("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=64),
    "Qwen2": language("Qwen2ForCausalLM", "Qwen2Config", **DECODER),
    "Qwen3": language("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=16),
    "OLMo2": language("Olmo2ForCausalLM", "Olmo2Config", **DECODER),
    "Gemma2": language("Gemma2ForCausalLM", "Gemma2Config", **DECODER, head_dim=16),
    "Gemma3": language("Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, head_dim=16),
    "Phi": language("PhiForCausalLM", "PhiConfig", **SIZE),
    "StableLM": language("StableLmForCausalLM", "StableLmConfig", **DECODER),
    "Granite": language("GraniteForCausalLM", "GraniteConfig", **DECODER),
    "Cohere": language("CohereForCausalLM", "CohereConfig", **DECODER),
    "Falcon": language("FalconForCausalLM", "FalconConfig", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=WORDS),
    "Mixtral": language("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4),
    "Mamba": language("MambaForCausalLM", "MambaConfig", **MAMBA),
    "BERT": language("BertForMaskedLM", "BertConfig", **SIZE),
    "RoBERTa": language("RobertaForMaskedLM", "RobertaConfig", **SIZE),
    "DistilBERT": language("DistilBertForMaskedLM", "DistilBertConfig", dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=WORDS),
    "ELECTRA": language("ElectraForMaskedLM", "ElectraConfig", **SIZE, embedding_size=64),
    "DeBERTa-v2": language("DebertaV2ForMaskedLM", "DebertaV2Config", **SIZE),
    "ModernBERT": language("ModernBertForMaskedLM", "ModernBertConfig", **SIZE),
    "T5": language("T5ForConditionalGeneration", "T5Config", **T5),
    "BART": language("BartForConditionalGeneration", "BartConfig", **BART),
    "Whisper": make_whisper,
}


def measure(name: str) -> Row:
    began = time.perf_counter()
    try:
        row = _measure(MODELS[name])
    except Exception as error:
        row = {"why": f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"}
    return {"model": name, **row, "seconds": round(time.perf_counter() - began, 1)}


def _measure(make: Make) -> Row:
    import transformers

    torch.manual_seed(SEED)
    plain, example = make(transformers)
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for key in ("attention_dropout", "dropout", "activation_dropout", "attention_probs_dropout_prob"):
        if hasattr(plain.config, key):
            setattr(plain.config, key, 0.0)
    for module in plain.modules():
        for key in ("attention_dropout", "dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    options: dict[str, Any] = {"engine": "eager", "time_limit_s": 10}
    free = memfit.fit(copy.deepcopy(plain), example, budget="1TiB", planner="keep_all", **options)
    peak = free.report().keep_all_peak_bytes
    row: Row = {
        "peak MiB": round(peak / 2**20, 1),
        "all outputs": _least(plain, example, peak, keep_outputs=True),
        "least": _least(plain, example, peak),
    }
    model = copy.deepcopy(plain)
    try:
        fitted = memfit.fit(model, example, budget=peak // 3, **options)
    except memfit.InfeasibleBudget as refusal:
        return row | {"a third": "no", "why": str(refusal).splitlines()[0][:150]}
    for _ in range(2):
        model.zero_grad()
        output = fitted(**example)
        output.loss.backward()
    plain.train()
    expected = plain(**example)
    expected.loss.backward()
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    if any((a is None) != (b is None) for a, b in pairs):
        return row | {"a third": "WRONG", "why": "a gradient that is there in one and not in the other"}
    worst = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None) / scale
    report = fitted.report()
    inside = report.measured_peak_bytes is not None and report.measured_peak_bytes <= peak // 3
    return row | {
        "a third": "yes" if inside and worst < 1e-4 else "WRONG",
        "worst": f"{worst:.0e}",
        "loss": f"{abs(float(output.loss - expected.loss)):.0e}",
        "why": "; ".join(note.split(":")[0].split(",")[0] for note in report.notes),
    }


def _least(model: Any, example: dict[str, torch.Tensor], peak: int, **options: Any) -> float:
    try:
        memfit.fit(copy.deepcopy(model), example, budget=1, engine="eager", time_limit_s=5, **options)
    except memfit.InfeasibleBudget as refusal:
        return round((refusal.minimum_bytes or 0) / peak, 3)
    raise AssertionError("a plan in one byte")


COLUMNS = ("model", "peak MiB", "all outputs", "least", "a third", "worst", "loss", "why", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="all without")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models:
        rows.append(dict.fromkeys(COLUMNS, "") | measure(name))
        print(rows[-1], file=sys.stderr, flush=True)
    found = sum(row["a third"] == "yes" for row in rows)
    text = f"{TEXT}\n\n**{len(rows)} models: {found} in a third of the peak.**"
    run = provenance(SEED, ("torch", "transformers"))
    write_results("losses_inside", title="Losses inside transformers models", text=text, columns=COLUMNS, rows=rows, run=run)


if __name__ == "__main__":
    main()
