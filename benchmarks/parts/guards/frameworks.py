"""Situations inside a training framework: the same loop through accelerate, the Hugging Face Trainer or Lightning, plain and fitted.

Generated: each framework x network x precision x gradient accumulation x what happens in between (nothing, a schedule, evaluation, a last
short batch, a changed dropout rate, a frozen layer, a saved checkpoint). Parameters and buffers after six optimizer steps are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import memfit
from benchmarks.lib.results import provenance, write_results
from benchmarks.models.torchvision_ops import declare_missing_ops
from benchmarks.parts.guards.situations import Outcome, judge, read_rows, summarize

ROWS, BATCHES, SEED = 4, 12, 0
BUDGET = "64MiB"
EPS = 1e-2  # of Adam's: gradients that are nothing but rounding (biases of keys) would else move parameters as far as others
TEXT = """The same training through a framework, plain and fitted: parameters and buffers after six optimizer steps. Frameworks, networks,
precisions, accumulation and what happens in between are multiplied out; none is picked. SAME: equal bit for bit, or within the rounding of
the precision. Compiled: without dropout, whose numbers are others there. Verdicts as in the table of situations around `fit`."""


class Images(nn.Module):
    """Convolutions, batch norm, dropout, the loss inside. Smooth: a rounding error of bf16 turns no activation on or off."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.AvgPool2d(2), nn.Flatten())
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8 * 16, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.drop(self.body(pixels)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_images() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    rows = torch.Generator().manual_seed(SEED)
    data = [
        {"pixels": torch.randn(3, 8, 8, generator=rows), "labels": torch.randint(0, 10, (), generator=rows)} for _ in range(ROWS * BATCHES)
    ]
    return Images(), data


def make_words() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=50, bos_token_id=0, eos_token_id=0, use_cache=False)
    )
    tokens = torch.randint(0, 50, (ROWS * BATCHES, 16), generator=torch.Generator().manual_seed(SEED))
    return model, [{"input_ids": row, "labels": row} for row in tokens]


NETWORKS = {"images": make_images, "words": make_words}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training loop."""

    framework: str
    network: str
    bf16: bool
    accumulates: int
    event: str

    @property
    def name(self) -> str:
        precision = "bf16" if self.bf16 else "fp32"
        return f"{self.framework} | {self.network}, {precision}, {self.accumulates} batches a step | {self.event}"


EVENTS = ("nothing", "a schedule", "evaluation", "a short batch", "dropout changed", "a layer frozen", "a checkpoint saved")


def cases() -> Iterator[Case]:
    for framework, network, bf16, accumulates, event in itertools.product(FRAMEWORKS, NETWORKS, (False, True), (1, 2), EVENTS):
        yield Case(framework=framework, network=network, bf16=bf16, accumulates=accumulates, event=event)


def disturb(case: Case, model: nn.Module, step: int) -> None:
    """What happens before the third optimizer step."""
    if step != 2:
        return
    if case.event == "dropout changed":
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.4
    if case.event == "a layer frozen":
        next(model.parameters()).requires_grad_(False)
    if case.event == "a checkpoint saved":
        with tempfile.TemporaryFile() as file:
            torch.save(model.state_dict(), file)


def batches(case: Case, data: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    made = [{k: torch.stack([row[k] for row in data[i : i + ROWS]]) for k in data[0]} for i in range(0, len(data), ROWS)]
    if case.event == "a short batch":
        made[-1] = {k: v[:-1] for k, v in made[-1].items()}
    return made[: 6 * case.accumulates]


def fit(engine: str) -> Callable[[nn.Module, dict[str, Tensor], torch.optim.Optimizer], nn.Module]:
    return lambda model, example, optimizer: memfit.fit(
        model,
        example,
        budget=BUDGET,
        optimizer=optimizer,
        engine=engine,  # type: ignore[arg-type]
        time_limit_s=3,
    )


def run_accelerate(case: Case, model: nn.Module, data: list[dict[str, Tensor]], fitted: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # each case chooses its precision
    accelerator = Accelerator(mixed_precision="bf16" if case.bf16 else "no", gradient_accumulation_steps=case.accumulates, cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    loader = batches(case, data)
    root = model if fitted is None else fitted(model, loader[0], optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if case.event == "a schedule" else None
    root, optimizer = accelerator.prepare(root, optimizer)
    for number, batch in enumerate(loader):
        disturb(case, model, number // case.accumulates)
        with accelerator.accumulate(root):
            loss = root(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            if scheduler is not None and accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        if case.event == "evaluation":
            root.eval()
            with torch.no_grad():
                root(**batch)
            root.train()


def run_trainer(case: Case, model: nn.Module, data: list[dict[str, Tensor]], fitted: Any) -> None:
    from accelerate.state import AcceleratorState
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    AcceleratorState._reset_state(reset_partial_state=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    loader = batches(case, data)
    root = model if fitted is None else fitted(model, loader[0], optimizer)

    class Disturb(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            disturb(case, model, state.global_step)

    rows = data[: sum(len(next(iter(b.values()))) for b in loader)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=case.accumulates,
            num_train_epochs=1,
            bf16=case.bf16,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="steps" if case.event == "a checkpoint saved" else "no",
            save_steps=3,
            eval_strategy="steps" if case.event == "evaluation" else "no",
            eval_steps=2,
            remove_unused_columns=False,
            seed=SEED,
            lr_scheduler_type="cosine" if case.event == "a schedule" else "constant",
            logging_strategy="no",
            max_grad_norm=1.0,
        )
        trainer = Trainer(
            model=root,
            args=arguments,
            train_dataset=rows,
            eval_dataset=data[:ROWS],
            optimizers=(optimizer, None),
            callbacks=[Disturb()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def run_lightning(case: Case, model: nn.Module, data: list[dict[str, Tensor]], fitted: Any) -> None:
    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    loader = batches(case, data)
    counted = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    root = model if fitted is None else fitted(model, loader[0], counted)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = root

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            disturb(case, model, self.global_step)
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
            if case.event != "a schedule":
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed" if case.bf16 else "32-true",
        accumulate_grad_batches=case.accumulates,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=2 if case.event == "evaluation" else None,
        limit_val_batches=1 if case.event == "evaluation" else 0,
        gradient_clip_val=1.0,
    )
    trainer.fit(Module(), DataLoader(loader, batch_size=None), DataLoader(loader[:1], batch_size=None))


FRAMEWORKS = {"accelerate": run_accelerate, "Trainer": run_trainer, "Lightning": run_lightning}


def train(case: Case, fitted: Any, *, drops: bool) -> Outcome:
    """Plain training where `fitted` is None. `drops`: with dropout."""
    torch.manual_seed(SEED)
    model, data = NETWORKS[case.network]()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not drops:
            module.p = 0.0
    try:
        torch.manual_seed(1)
        FRAMEWORKS[case.framework](case, model, data, fitted)
        error = None
    except Exception as raised:
        error = raised
    values = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return Outcome(records=[values], error=error)


def run(case: Case, engine: str) -> dict[str, Any]:
    declare_missing_ops()  # the frameworks import torchvision where it is installed
    began = time.perf_counter()
    tolerance = 2e-2 if case.bf16 else 1e-4 if engine == "inductor" else 1e-6
    drops = engine == "eager"  # compiled kernels draw other numbers
    plain = train(case, None, drops=drops)
    if plain.error is not None:
        raise plain.error
    verdict, why = judge(plain, train(case, fit(engine), drops=drops), tolerance)
    return {
        "framework": case.framework,
        "network": case.network,
        "precision": "bf16" if case.bf16 else "fp32",
        "batches a step": case.accumulates,
        "event": case.event,
        "engine": engine,
        "verdict": verdict,
        "why": why.replace(", after fit", ""),
        "seconds": round(time.perf_counter() - began, 2),
    }


COLUMNS = ("framework", "network", "precision", "batches a step", "event", "engine", "verdict", "why")


def write_page(rows: list[dict[str, Any]]) -> None:
    write_results(
        "frameworks",
        title="Situations inside training frameworks",
        text=f"{TEXT}\n\n**{len(rows)} situations: {summarize(rows)}.**",
        columns=COLUMNS,
        rows=rows,
        run=provenance(SEED, ("torch", "accelerate", "transformers", "pytorch-lightning")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=list(FRAMEWORKS), help="one only")
    parser.add_argument("--event", default="", help="only events whose name has this in it")
    parser.add_argument("--every", type=int, default=1, help="each n-th case only")
    parser.add_argument(
        "--engine", choices=["eager", "inductor"], default="eager", help="compiled: without dropout, whose numbers are others"
    )
    parser.add_argument("--rows", help="add rows to this file as they come, and write no page")
    parser.add_argument("--page", help="run nothing: write the page from a file of rows")
    arguments = parser.parse_args()
    if arguments.page:
        write_page(read_rows(arguments.page))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [c for c in cases() if arguments.framework in (None, c.framework) and arguments.event in c.event][:: arguments.every]
    rows: list[dict[str, Any]] = []
    if arguments.engine == "inductor":
        chosen = [c for c in chosen if c.event != "dropout changed"]
    for number, case in enumerate(chosen):
        rows.append(row := run(case, arguments.engine))
        print(f"{number + 1}/{len(chosen)} {row['verdict']:8}{case.name} {row['why'][:140]}", file=sys.stderr, flush=True)
        if arguments.rows:
            with open(arguments.rows, "a") as file:
                file.write(json.dumps(row) + "\n")
    print(summarize(rows), file=sys.stderr)
    if not arguments.rows:
        write_page(rows)


if __name__ == "__main__":
    main()
