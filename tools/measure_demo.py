"""Measure the demo model and its draft as any user of the two folders gets them.

python tools/measure_demo.py                   # prints the tables of docs/demo-model.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import PreTrainedTokenizerBase as TokenizerBase

from jackfield.demo import DRAFT_PATH, MODEL_PATH, stories, tasks


def load(folder: Path) -> tuple[LlamaForCausalLM, TokenizerBase]:
    """What any user of the folder gets."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM, tokenizer: TokenizerBase, prompts: list[str], limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy answers to chat prompts: left-padded prompts, and the new tokens."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    whole = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
    return inputs["input_ids"], whole[:, inputs["input_ids"].shape[1] :]


def accuracy(
    model: LlamaForCausalLM, tokenizer: TokenizerBase, count: int, wrong: int = 0
) -> dict[str, float]:
    """Exact match per task on held-out items, showing up to `wrong` mistakes each."""
    table = {}
    for task in tasks.TASKS:
        items = tasks.heldout(task, count)
        limit = 4 + max(len(tokenizer(item.answer)["input_ids"]) for item in items)
        _, new = answers(model, tokenizer, [item.prompt for item in items], limit)
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        pairs = list(zip(items, texts, strict=True))
        table[task] = sum(item.matches(text) for item, text in pairs) / count
        for item, text in [pair for pair in pairs if not pair[0].matches(pair[1])][:wrong]:
            print(f"  wrong: {item.prompt!r} -> {text!r}, not {item.answer!r}")
    table["overall"] = sum(table.values()) / len(table)
    return table


def agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: TokenizerBase, prompts: list[str]
) -> float:
    """How often the draft's next choice is the target's, along the target's own greedy text."""
    before, new = answers(target, tokenizer, prompts, 160)
    ids = torch.cat([before, new], dim=1)
    with torch.inference_mode():
        mask = (ids != tokenizer.pad_token_id).long()
        chosen = draft(input_ids=ids, attention_mask=mask).logits[:, before.shape[1] - 1 : -1]
    real = new != tokenizer.pad_token_id
    return ((chosen.argmax(-1) == new) & real).sum().item() / real.sum().item()


def show(table: dict[str, float]) -> str:
    """One line a task."""
    return "\n".join(f"  {name:<16} {value:6.1%}" for name, value in table.items())


def report(out: Path, count: int) -> None:
    """Load what was written and print the figures for the documentation."""
    target, tokenizer = load(out / MODEL_PATH.name)
    draft, _ = load(out / DRAFT_PATH.name)
    print(f"target, exact match on {count} held-out items a task, float32, greedy:")
    print(show(accuracy(target, tokenizer, count, wrong=2)))
    print("draft on its own:\n" + show(accuracy(draft, tokenizer, count)))
    for task in tasks.TASKS:
        prompts = [item.prompt for item in tasks.heldout(task, 50)]
        print(f"agreement on {task}: {agreement(target, draft, tokenizer, prompts):.1%}")
    told = [f"Tell me a story about a {animal}." for animal in stories.ANIMALS]
    print(f"agreement on stories: {agreement(target, draft, tokenizer, told):.1%}")
    for folder in (MODEL_PATH.name, DRAFT_PATH.name):
        print(f"{folder}: {(out / folder / 'model.safetensors').stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Measure the folders of the package, or those of another place."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_PATH.parent)
    parser.add_argument("--items", type=int, default=200, help="held-out items a task")
    args = parser.parse_args()
    report(args.folder, args.items)


if __name__ == "__main__":
    main()
