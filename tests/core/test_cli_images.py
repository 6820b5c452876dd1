"""`jackfield generate --image`: files before the prompt, of a model that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import extras

import jackfield

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Cli

with extras.imports():
    from seeing import build, chat, picture


def test_images_stand_before_the_prompt(cli: Cli, tmp_path: Path) -> None:
    model, processor = build("llava")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for number, file in enumerate(files):
        picture(number).save(file)
    flags = ["--model", str(tmp_path / "model"), "--temperature", "0", "--max-new-tokens", "9"]
    images = [part for file in files for part in ("--image", str(file))]
    with jackfield.load(tmp_path / "model") as engine:
        asked = [chat(picture(0), picture(1), "what"), chat("what")]
        both, none = engine.generate(asked, max_new_tokens=9, do_sample=False)
    assert both.text != none.text
    done = cli("generate", "--chat", "--json", "what", *images, *flags)
    assert done.code == 0, done.err
    assert done.json["text"] == both.text
    assert cli("generate", "--chat", "--json", "what", *flags).json["text"] == none.text
    gone = cli("generate", "--chat", "what", "--image", str(tmp_path / "c.png"), *flags)
    assert (gone.code, gone.out) == (2, "")
    assert "message 0, part 0: there is no file" in gone.err


def test_what_images_need_is_said(cli: Cli) -> None:
    plain = cli("generate", "what", "--image", "a.png")
    assert (plain.code, plain.out) == (2, "")
    assert "--image is a part of a message; add --chat" in plain.err
    blind = cli("generate", "--chat", "what", "--image", "a.png")
    assert blind.code == 2
    assert "nothing here reads a part of type 'image'; drop it" in blind.err
