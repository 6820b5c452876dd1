"""Train the demo model and its draft from nothing but this repository, then measure both.

    python tools/train_demo.py                     # what made the weights in the package
    python tools/train_demo.py --steps 99 --second-steps 9 --draft-steps 9 --out /tmp/x  # rehearsal

Text comes from `jackfield.demo.tasks`, so nothing is downloaded. What a step reads depends on the
seed and the step alone; a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_tokenizer import (
    CONTEXT,
    END,
    PAD,
    ROLES,
    SPECIAL,
    save_tokenizer,
    train_tokenizer,
    write_json,
)
from measure_demo import accuracy, load, report, show
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import distributed, multiprocessing
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from jackfield.demo import DRAFT_PATH, MODEL_PATH, tasks

# Questions are mostly random words: learning to guess them would take the model's room from the
# answers. A little weight keeps the embeddings of the prompt in use.
WEIGHTS = {"user": 0.1, "system": 0.1, "assistant": 1.0, "text": 0.5}


@dataclass(frozen=True)
class Size:
    """What differs between the two models; deep and narrow is slow to run, so drafting pays."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


TARGET = Size(hidden=192, layers=8, heads=6, kv_heads=3, inner=512)
DRAFT = Size(hidden=128, layers=2, heads=4, kv_heads=2, inner=384)


@dataclass(frozen=True)
class Lesson:
    """One part of the training: how long, how fast, and on what."""

    name: str
    steps: int
    seed: int
    rate: float
    mixture: Mapping[str, float]


def rank() -> int:
    """Which of the processes this is."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    """How many processes share a step."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


class Batches:
    """Packed rows of documents; step n's rows depend on the seed and n alone."""

    def __init__(self, tokenizer: Tokenizer, lesson: Lesson, tokens: int, device: str) -> None:
        self.tokenizer = tokenizer
        self.mixture = lesson.mixture
        self.seed = lesson.seed
        self.tokens = tokens
        self.device = device
        self.ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and the weight of each as a target, both `[rows, length]`."""
        # One step in eight has rows of the whole context, so that far positions are learned too;
        # the others are just long enough for the longest document.
        length = CONTEXT if step % 8 == 7 else 192
        rows = self._pack(random.Random(f"{self.seed} {step}"), self.tokens // length, length)
        rows = rows[rank() :: world()]
        ids = torch.tensor([[token for token, _ in row] for row in rows], device=self.device)
        weights = torch.tensor([[weight for _, weight in row] for row in rows], device=self.device)
        return ids, weights

    def _pack(self, rng: random.Random, count: int, length: int) -> list[list[tuple[int, float]]]:
        rows: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        misses = 0
        for document in tasks.documents(rng, self.mixture):
            piece = self.encode(document)
            row = next((row for row in rows if len(row) + len(piece) <= length), None)
            if row is not None:
                row.extend(piece)
            else:
                misses += 1
            if misses > 5:
                break
        padding = (self.ids[PAD], 0.0)
        return [row + [padding] * (length - len(row)) for row in rows]

    def encode(self, document: tasks.Document) -> list[tuple[int, float]]:
        """The tokens of a document as the chat template writes it, each with its weight."""
        tokens: list[tuple[int, float]] = []
        for role, text in document:
            if role in ROLES:
                tokens.append((self.ids[f"<|{role}|>"], 0.0))
            weight = WEIGHTS[role]
            tokens.extend((token, weight) for token in self.tokenizer.encode(text).ids)
            tokens.append((self.ids[END], weight if role in ("assistant", "text") else 0.0))
        return tokens


def build(size: Size, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A fresh Llama model of this size."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    # On a CPU the backward pass of torch's fused attention takes longer than all the rest.
    model.set_attn_implementation("eager")
    return model


class Optimizer:
    """Muon for the matrices and AdamW for the rest, under one warm-up, plateau and decay.

    Muon reaches the same loss in clearly fewer steps at this size, and its steps are cheap.
    """

    def __init__(self, model: torch.nn.Module, steps: int, rate: float) -> None:
        matrices, rest = [], []
        for name, parameter in model.named_parameters():
            inner = parameter.ndim == 2 and "embed" not in name
            (matrices if inner else rest).append(parameter)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self.steps = steps
        self.rate = rate

    def factor(self, step: int) -> float:
        """The share of the learning rate at `step`: the last third falls to zero."""
        return min((step + 1) / 100, 1.0, (self.steps - step) / (self.steps * 0.35))

    def step(self, step: int) -> None:
        """Apply and clear the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.rate * self.factor(step)
            part.step()
            part.zero_grad(set_to_none=True)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def answer_loss(model: LlamaForCausalLM) -> Loss:
    """Cross entropy of the text itself, weighted by token."""

    def loss(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        wanted = ids[:, 1:].flatten()
        each = functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="none")
        return (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()

    return loss


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> Loss:
    """Cross entropy against the target's own probabilities: a draft should choose as it does."""

    def loss(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = target(input_ids=ids, use_cache=False).logits[:, :-1].float().softmax(-1)
        logits = draft(input_ids=ids, use_cache=False).logits[:, :-1].float()
        each = -(wanted * logits.log_softmax(-1)).sum(-1)
        return (each * weights[:, 1:]).sum() / weights[:, 1:].sum()

    return loss


def train(
    model: LlamaForCausalLM,
    loss_of: Loss,
    batches: Batches,
    optimizer: Optimizer,
    args: argparse.Namespace,
    checkpoint: Path | None,
    look: Callable[[], str],
) -> None:
    """Run all steps, printing the loss now and then; `look` measures on held-out items."""
    start, first = time.monotonic(), resume(checkpoint, model, optimizer)
    run = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    model.train()
    for step in range(first, optimizer.steps):
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = run(*batches(step))
        loss.backward()
        share_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(step)
        if rank() > 0:
            continue
        if step % 50 == 49:
            spent = (time.monotonic() - start) / 60
            progress = f"step {step + 1}/{optimizer.steps}"
            print(f"{progress} loss {loss.item():.3f} {spent:.1f} min", flush=True)
        if step % args.look_every == args.look_every - 1:
            keep(checkpoint, model, optimizer, step + 1)
            print(look(), flush=True)
    model.eval()


def share_gradients(model: torch.nn.Module) -> None:
    """Replace every gradient by its mean over the processes."""
    if world() == 1:
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= world()
    for gradient, part in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


def keep(path: Path | None, model: torch.nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write what is needed to go on from `step`, if a checkpoint was asked for."""
    if path is not None:
        parts = [part.state_dict() for part in optimizer.parts]
        torch.save({"step": step, "model": model.state_dict(), "parts": parts}, path)


def resume(path: Path | None, model: torch.nn.Module, optimizer: Optimizer) -> int:
    """Load the checkpoint, if there is one, and tell at which step to go on."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for part, saved in zip(optimizer.parts, state["parts"], strict=True):
        part.load_state_dict(saved)
    return int(state["step"])


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write one model folder: bfloat16 on the disk, float32 once it is loaded."""
    save_tokenizer(tokenizer, folder)
    weights = {
        name: value.detach().cpu().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    ids = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id}
    write_json(folder / "generation_config.json", ids)


def parse() -> argparse.Namespace:
    """The command line; the defaults are what made the weights in the package."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2350, help="steps of the first part")
    parser.add_argument("--second-steps", type=int, default=500, help="steps of the second part")
    parser.add_argument("--draft-steps", type=int, default=800, help="steps of the draft")
    parser.add_argument("--tokens", type=int, default=4224, help="tokens in a step")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=MODEL_PATH.parent)
    parser.add_argument(
        "--only", choices=("first", "second", "draft", "report"), help="do one part alone"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--checkpoints", type=Path, help="folder to go on from, and to write")
    parser.add_argument("--look-every", type=int, default=500, help="steps between measurements")
    parser.add_argument("--items", type=int, default=200, help="held-out items a task at the end")
    return parser.parse_args()


def first_part(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Train the demo model from nothing and write it."""
    model = build(TARGET, tokenizer).to(args.device)
    lesson = Lesson("first", args.steps, args.seed, 4e-3, tasks.FIRST_MIXTURE)
    teach(model, answer_loss(model), lesson, args.out / MODEL_PATH.name, args)


def second_part(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Go on from the written demo model with the tasks as they are asked."""
    model, _ = load(args.out / MODEL_PATH.name)
    model.set_attn_implementation("eager")
    lesson = Lesson("second", args.second_steps, args.seed + 1, 3e-3, tasks.LAST_MIXTURE)
    loss = answer_loss(model.to(args.device))
    teach(model, loss, lesson, args.out / MODEL_PATH.name, args)


def draft_part(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Train and write the draft, taught by the written demo model."""
    target, _ = load(args.out / MODEL_PATH.name)
    target.set_attn_implementation("eager")
    model = build(DRAFT, tokenizer).to(args.device)
    lesson = Lesson("draft", args.draft_steps, args.seed + 2, 4e-3, tasks.LAST_MIXTURE)
    loss = distillation_loss(model, target.to(args.device))
    teach(model, loss, lesson, args.out / DRAFT_PATH.name, args)


PARTS = {"first": first_part, "second": second_part, "draft": draft_part}


def teach(
    model: LlamaForCausalLM, loss: Loss, lesson: Lesson, folder: Path, args: argparse.Namespace
) -> None:
    """Train `model` and write it to `folder`."""
    fast = AutoTokenizer.from_pretrained(folder)
    batches = Batches(fast.backend_tokenizer, lesson, args.tokens, args.device)
    optimizer = Optimizer(model, lesson.steps, lesson.rate)
    checkpoint = args.checkpoints / f"{lesson.name}.pt" if args.checkpoints else None

    def look() -> str:
        return show(accuracy(model, fast, 16))

    train(model, loss, batches, optimizer, args, checkpoint, look)
    if rank() == 0:
        save(model, fast.backend_tokenizer, folder)


def work(index: int, part: str, args: argparse.Namespace, meeting: str) -> None:
    """One process of a training: each has one thread and its share of every step's rows.

    Two processes that meet once a step keep a busy machine busier than two threads that meet in
    every operation, and a sum over one thread is the same everywhere.
    """
    torch.set_num_threads(1)
    if args.workers > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=index, world_size=args.workers
        )
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / MODEL_PATH.name / "tokenizer.json"))
    PARTS[part](args, tokenizer)


def spread(part: str, args: argparse.Namespace) -> None:
    """Do one part in as many processes as were asked for."""
    tokenizer = train_tokenizer(args.seed)
    for folder in (MODEL_PATH.name, DRAFT_PATH.name):
        save_tokenizer(tokenizer, args.out / folder)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (part, args, f"{folder}/meeting"), nprocs=args.workers)


def main() -> None:
    """Do the parts that were asked for."""
    args = parse()
    for part in PARTS:
        if args.only in (None, part):
            spread(part, args)
    if args.only in (None, "report"):
        report(args.out, args.items)


if __name__ == "__main__":
    main()
