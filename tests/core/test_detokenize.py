"""Streamed text equals the whole text, whatever the tokenizer and however the tokens come."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jackfield.contracts import Accepted, Settings
from jackfield.engine.sequences import RunningSequence
from jackfield.requests.detokenize import Detokenizer, opening

CORPUS = [
    "the cat sat",
    "häßlich 😀😁 🤦🏽‍♀️",
    "日本語のテキスト",
    "  two  spaces",
    "the theatre",
] * 3
SPECIAL = "<|end|>"


@functools.cache
def byte_level() -> Tokenizer:
    """Tokens may end in the middle of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama's: words begin with a metaspace, rare characters are bytes, the first space goes."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdeht", "th", "the", "▁the"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@functools.cache
def gemma_like() -> Tokenizer:
    """Bytes and metaspaces as well, and no space goes."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@functools.cache
def unigram() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdeht", "▁the", "th"]
    model = models.Unigram([(p, -float(i)) for i, p in enumerate(pieces)], 0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@functools.cache
def wordpiece() -> Tokenizer:
    pieces = [
        "[UNK]",
        "the",
        "##at",
        "c",
        "##s",
        "é",
        "##é",
        ".",
        ",",
        "n't",
        "'",
        "##,",
        "日",
        "a",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@functools.cache
def joined_by_spaces() -> Tokenizer:
    """No decoder at all."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def opened(make, stops: list[str] | tuple[str, ...] = ()) -> Detokenizer:
    skipped = {make().token_to_id(SPECIAL)}
    return Detokenizer(make().decode, stops, opening(make().decode, make().token_to_id), skipped)


EVERY = pytest.mark.parametrize(
    "make",
    [byte_level, byte_fallback, gemma_like, unigram, wordpiece, joined_by_spaces],
    ids=lambda make: make.__name__,
)
MAKERS = pytest.mark.parametrize(
    "make", [byte_level, byte_fallback], ids=lambda make: make.__name__
)
ALPHABET = st.one_of(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"),
    st.sampled_from("abcdeht thé😀日🏽 "),
)
TEXTS = st.text(ALPHABET, max_size=30)


def groups(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` in pieces of these sizes, again and again."""
    found, at = [], 0
    while at < len(ids):
        size = cuts[len(found) % len(cuts)]
        found.append(ids[at : at + size])
        at += size
    return found


CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@MAKERS
@given(text=TEXTS, cuts=CUTS)
def test_the_stream_is_the_whole_text(make, text: str, cuts: list[int]) -> None:
    ids = make().encode(text).ids
    detokenizer = opened(make)
    deltas = [detokenizer.push(group) for group in groups(ids, cuts)]
    assert not any("\ufffd" in delta for delta in deltas)
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == make().decode(ids) == text
    assert detokenizer.text == text
    assert not detokenizer.stopped


#: Bytes and pieces by chance would hardly ever be a character, so some of them are.
PIECES = [
    "<0x0A>",
    "<0xE4>",
    "<0xBD>",
    "<0xA0>",
    "<0xFF>",
    "▁",
    "▁the",
    "a",
    SPECIAL,
    "Ċ",
    "ä",
    "½",
]


def any_tokens(make, data: st.DataObject) -> list[int]:
    """Tokens of all kinds: bytes of no character, special ones, and ids that mean nothing."""
    known = [token for piece in PIECES if (token := make().token_to_id(piece)) is not None]
    token = st.one_of(st.sampled_from(known or [0]), st.integers(0, make().get_vocab_size() + 3))
    return data.draw(st.lists(token, max_size=30))


@EVERY
@given(data=st.data(), cuts=CUTS)
def test_joined_deltas_are_the_decoding_of_all_tokens(make, data, cuts: list[int]) -> None:
    ids = any_tokens(make, data)
    detokenizer = opened(make)
    deltas = [detokenizer.push(group) for group in groups(ids, cuts)]
    assert not any(delta.endswith("\ufffd") for delta in deltas)
    assert "".join(deltas) + detokenizer.finish() == make().decode(ids) == detokenizer.text


@EVERY
@given(data=st.data())
def test_a_text_ends_before_the_first_stop_string_or_is_whole(make, data) -> None:
    """Stop strings are cut out of the text itself, so that they lie across tokens everywhere."""
    ids = any_tokens(make, data)
    whole = make().decode(ids)
    at = st.integers(0, max(0, len(whole) - 1))
    spans = data.draw(st.lists(st.tuples(at, st.integers(1, 4)), max_size=3))
    never = ["no such text"]
    stops = never + [stop for a, n in spans if (stop := whole[a : a + n].strip("\ufffd"))]
    detokenizer, fed = opened(make, stops), []
    for token in ids:
        fed.append(token)
        detokenizer.push([token])
        if detokenizer.stopped:
            break
    detokenizer.finish()
    said = make().decode(fed)
    expected = ends_at(said, stops)
    assert detokenizer.text == (said if expected is None else expected)
    assert detokenizer.stopped == (expected is not None)
    if stops == never:
        assert detokenizer.text == whole


def test_a_line_break_of_bytes_is_a_stop_string_at_once() -> None:
    """Llama 2 says it as a byte, which is certain only when the next token is none."""
    newline, letter = (byte_fallback().token_to_id(piece) for piece in ("<0x0A>", "a"))
    detokenizer = opened(byte_fallback, ["\n"])
    detokenizer.push([letter])
    assert detokenizer.push([newline]) == ""
    assert detokenizer.stopped


def test_a_decoder_that_takes_back_what_was_shown_is_told() -> None:
    detokenizer = Detokenizer(lambda ids: "".join(map(chr, ids)).replace("ab", "x"))
    assert [detokenizer.push([ord(c)]) for c in "ab"] == ["a", ""]
    with pytest.raises(ValueError, match="another text of the first tokens"):
        detokenizer.finish()


@MAKERS
@given(text=TEXTS, data=st.data())
def test_a_text_that_is_cut_inside_a_character_shows_what_is_whole(make, text: str, data) -> None:
    ids = make().encode(text).ids
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    detokenizer = opened(make)
    shown = "".join(detokenizer.push([token]) for token in ids)
    assert text.startswith(shown)
    rest = detokenizer.finish()
    assert text.startswith((shown + rest).rstrip("\ufffd"))
    assert len(shown + rest.rstrip("\ufffd")) >= len(make().decode(ids).rstrip("\ufffd"))


@MAKERS
@given(text=TEXTS, at=st.lists(st.integers(0, 60), max_size=5))
def test_special_tokens_leave_no_trace(make, text: str, at: list[int]) -> None:
    ids = make().encode(text).ids
    special = make().token_to_id(SPECIAL)
    if make() is byte_level():
        at = []  # a special token between the bytes of one character breaks it in the whole too
    for index in at:
        ids.insert(min(index, len(ids)), special)
    detokenizer = opened(make)
    shown = "".join(detokenizer.push([token]) for token in [*ids, special])
    assert shown + detokenizer.finish() == make().decode([*ids, special])


def ends_at(text: str, stops: list[str]) -> str | None:
    """By definition: reading on character by character, what stands before the first whole stop."""
    for end in range(len(text) + 1):
        hits = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: min(hits)]
    return None


@MAKERS
@given(
    text=st.text(st.sampled_from("ab é😀"), max_size=25),
    stops=st.lists(st.text(st.sampled_from("ab é😀"), min_size=1, max_size=4), max_size=4),
    cuts=CUTS,
)
def test_stop_strings_never_leak_however_the_tokens_come(
    make, text: str, stops: list[str], cuts: list[int]
) -> None:
    expected = ends_at(text, stops)
    detokenizer = opened(make, stops)
    for group in groups(make().encode(text).ids, cuts):
        detokenizer.push(group)
        assert (text if expected is None else expected).startswith(detokenizer.text)
        if detokenizer.stopped:
            break
    detokenizer.finish()
    assert detokenizer.text == (text if expected is None else expected)
    assert detokenizer.stopped == (expected is not None)


@pytest.mark.parametrize("cuts", [[1], [2], [3], [100]])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one END two END", ["END", "two"], "one "),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("xabcx", ["abc", "b"], "xa"),
        ("xabcx", ["abc", "bc"], "x"),
        ("EN", ["END"], "EN"),
        ("END", ["END"], ""),
        ("a😀b", ["😀"], "a"),
    ],
)
def test_overlapping_stops(text: str, stops: list[str], expected: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer(byte_level().decode, stops)
    for group in groups([byte_level().token_to_id(c) or 0 for c in visible_bytes(text)], cuts):
        detokenizer.push(group)
        if detokenizer.stopped:
            break
    detokenizer.finish()
    assert detokenizer.text == expected


def visible_bytes(text: str) -> list[str]:
    """The byte-level alphabet's character for each byte of `text`."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((pieces, _),) = pre.pre_tokenize_str(text)
    return list(pieces)


def test_what_may_become_a_stop_is_held_back_and_shown_at_the_end() -> None:
    detokenizer = Detokenizer(lambda ids: "".join(map(chr, ids)), ["END"])
    assert [detokenizer.push([ord(c)]) for c in "a E N E"] == ["a", " ", "", "E ", "N", " ", ""]
    assert detokenizer.finish() == "E"
    assert detokenizer.finish() == ""


def running(stop: str, max_new_tokens: int = 50) -> RunningSequence:
    detokenizer = Detokenizer(lambda ids: "".join(map(chr, ids)), [stop])
    return RunningSequence(
        0, [1], Settings(max_new_tokens=max_new_tokens, eos_token_ids=(0,)), detokenizer
    )


def test_a_sequence_takes_no_token_after_its_stop_string() -> None:
    sequence = running("ND")
    assert sequence.extend(Accepted([ord(c) for c in "xENDyz"])) == ([ord(c) for c in "xEND"], "xE")
    assert sequence.finish_reason == "stop"
    assert sequence.new_tokens == [ord(c) for c in "xEND"]


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    sequence = running("D", max_new_tokens=3)
    assert sequence.extend(Accepted([ord(c) for c in "END"]))[1] == "EN"
    assert sequence.finish_reason == "stop"


def test_a_stop_string_that_is_whole_only_when_all_is_flushed_is_a_stop() -> None:
    sequence = running("D\ufffd", max_new_tokens=4)
    _, text = sequence.extend(Accepted([ord(c) for c in "END\ufffd"]))
    assert text == "EN"
    assert sequence.finish_reason == "stop"


def test_held_back_text_comes_with_the_end_token() -> None:
    sequence = running("END")
    assert sequence.extend(Accepted([ord("E")]))[1] == ""
    assert sequence.extend(Accepted([0]))[1].startswith("E")
    assert sequence.finish_reason == "stop"


@EVERY
@given(data=st.data())
def test_runs_of_tokens_without_text_change_nothing(make, data: st.DataObject) -> None:
    """Also where they are longer than what is decoded again."""
    special = make().token_to_id(SPECIAL)
    known = [token for token in any_tokens(make, data) if token != special]
    ids: list[int] = []
    for token in known:
        ids += [special] * data.draw(st.sampled_from((0, 0, 1, 31, 32, 70)))
        ids.append(token)
    plain, silent = opened(make), opened(make)
    for token in known:
        plain.push([token])
    said = "".join(silent.push([token]) for token in ids)
    assert said == silent.text == plain.text


def test_tokens_without_text_cost_no_more_as_they_become_many() -> None:
    decoded = 0
    tokenizer = byte_level()

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return str(tokenizer.decode(ids))

    special = tokenizer.token_to_id(SPECIAL)
    made = Detokenizer(decode, skipped={special})
    assert made.push(tokenizer.encode("the").ids) == "the"
    for _ in range(2000):
        assert made.push([special]) == ""
    assert decoded < 50 * 2000
    assert made.push(tokenizer.encode(" cat").ids) == " cat"
    assert made.finish() == ""
