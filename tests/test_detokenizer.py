from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cbatch.engine.detokenizer import CompletionText, StopFinder
from tests.drive import make_engine, make_request, run
from tests.tiny import make_config, make_model, make_tokenizer

TOKENIZER = make_tokenizer()
TEXTS = [
    "the rain in the plain stays the same",
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467 and flag \U0001f1e9\U0001f1ea!",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \ud55c\uad6d\uc5b4 \u3053\u3093\u306b\u3061\u306f",
    "e\u0301 a\u0308 \u1e69\u0323\u0307 real \ufffd\ufffd one",
    "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd end",
]


def spaced_tokenizer() -> Tokenizer:
    words = ["\u2581", "a", "b", "\u2581a", "\u2581b", "ab", "\u2581ab"]
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in (10, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80)), *words]
    ids = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


SPACED = spaced_tokenizer()


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def byte_ids(text: str) -> list[int]:
    """One token for each byte of `text`, so that every character is split."""
    letters = TOKENIZER.backend_tokenizer.pre_tokenizer
    pieces = letters.pre_tokenize_str(text)
    return [TOKENIZER.convert_tokens_to_ids(letter) for piece, _ in pieces for letter in piece]


def stopped_at(ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> tuple[int | None, str | None]:
    """How many tokens were taken until a stop was found, and the text before it."""
    finder, taken = StopFinder(CompletionText(decode), stop, min_tokens), []
    for token in ids:
        taken.append(token)
        if finder.add(token):
            return len(taken), finder.cut(decode(taken))
    return None, finder.cut(decode(taken))


def first_stop(ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> int | None:
    """The fewest tokens whose whole text holds a stop text behind the first `min_tokens` tokens."""
    for count in range(min_tokens + 1, len(ids) + 1):
        text, start = decode(ids[:count]), len(decode(ids[:min_tokens]))
        if any(text.find(ending, start) >= 0 for ending in stop):
            return count
    return None


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("encode", [byte_ids, lambda text: TOKENIZER(text)["input_ids"]], ids=["bytes", "tokens"])
def test_every_part_of_a_text_is_found_at_its_first_token(text: str, encode: object) -> None:
    ids = encode(text)  # type: ignore[operator]
    assert decode(ids) == text
    for start in range(0, len(text), 3):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            count, before = stopped_at(ids, [stop])
            assert before == text[: text.find(stop)]
            if "\ufffd" not in stop:
                assert count == first_stop(ids, [stop])
            else:
                assert count is not None


def test_of_several_stop_texts_the_first_in_the_text_wins() -> None:
    ids = byte_ids("one two three")
    assert stopped_at(ids, ["three", "two", "wo"]) == (7, "one ")
    assert stopped_at(ids, ["o three", "two"]) == (7, "one ")
    assert stopped_at(ids, ["four"]) == (None, None)


def test_one_token_may_hold_a_stop_text_and_more() -> None:
    ids = TOKENIZER("the rain")["input_ids"]
    assert len(ids) < 8
    assert stopped_at(ids, ["he"])[1] == "t"


def test_an_incomplete_character_is_no_match_for_a_replacement_character() -> None:
    ids = byte_ids("ab\U0001f600cd")
    assert stopped_at(ids, ["\ufffd"]) == (None, None)
    assert decode(ids[:4]).endswith("\ufffd")


def test_what_comes_before_min_tokens_is_no_stop() -> None:
    ids = byte_ids("a. b. c. d.")
    assert stopped_at(ids, ["."]) == (2, "a")
    assert stopped_at(ids, ["."], min_tokens=2) == (5, "a. b")
    assert stopped_at(ids, ["."], min_tokens=4) == (5, "a. b")
    assert stopped_at(ids, [". "], min_tokens=2) == (6, "a. b")
    assert stopped_at(ids, [". "], min_tokens=5) == (9, "a. b. c")
    assert stopped_at(ids, ["."], min_tokens=50) == (None, None)


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, 299), max_size=40),
    stop=st.lists(st.sampled_from(["a", "th", "e ", " t", "\u00e9", "\ufffd", "the", "\x00"]), min_size=1, max_size=3),
    min_tokens=st.integers(0, 5),
)
@example(ids=[0xF0] * 12, stop=["a"], min_tokens=3)
def test_random_tokens_stop_with_the_text_that_one_decode_gives(
    ids: list[int], stop: list[str], min_tokens: int
) -> None:
    count, before = stopped_at(ids, stop, min_tokens)
    taken = ids if count is None else ids[:count]
    whole, start = decode(taken), len(decode(taken[:min_tokens]))
    places = [place for place in (whole.find(ending, start) for ending in stop) if place >= 0]
    assert before == (whole[: min(places)] if places else None)
    wanted = first_stop(ids, [ending for ending in stop if ending != "\ufffd"], min_tokens)
    if wanted is not None:
        assert count is not None
        assert count <= wanted + 3  # text is held back for no longer than a character can be


def spaced_decode(ids: Sequence[int]) -> str:
    return str(SPACED.decode(list(ids), skip_special_tokens=True))


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(1, SPACED.get_vocab_size() - 1), max_size=40),
    stop=st.lists(st.sampled_from(["a", " b", "b ", " ", "  ", "a b", "\u00e9", "\n"]), min_size=1, max_size=3),
)
def test_a_tokenizer_that_strips_the_first_space_of_a_text(ids: list[int], stop: list[str]) -> None:
    """Words begin with a space that is dropped at the beginning; unknown characters are spelled in bytes."""
    finder = StopFinder(CompletionText(spaced_decode), stop)
    taken = []
    for token in ids:
        taken.append(token)
        if finder.add(token):
            break
    whole = spaced_decode(taken)
    places = [whole.find(ending) for ending in stop if ending in whole]
    assert finder.cut(whole) == (whole[: min(places)] if places else None)
    complete = [n for n in range(1, len(ids) + 1) if any(ending in spaced_decode(ids[:n]) for ending in stop)]
    if complete:
        assert len(taken) <= complete[0] + 3


SPACED_PROMPTS: tuple[list[str], ...] = (
    [],
    ["a"],
    ["<0xC3>"],
    ["\u2581a", "b", "<0x0A>"],
    ["\u2581"],
    ["\u2581b"] * 12,
)


def spaced_ids(words: Sequence[str]) -> list[int]:
    return [SPACED.get_vocab()[word] for word in words]


@settings(deadline=None, max_examples=200)
@given(
    prompt=st.sampled_from(SPACED_PROMPTS),
    ids=st.lists(st.integers(1, SPACED.get_vocab_size() - 1), max_size=20),
    stop=st.lists(st.sampled_from(["a", " b", "b ", " ", "  ", "\u00e9", "\n"]), max_size=2),
)
@example(prompt=["a"], ids=spaced_ids(["\u2581a", "b"]), stop=[" a"])
def test_a_completions_text_is_what_it_adds_to_the_prompts(prompt: list[str], ids: list[int], stop: list[str]) -> None:
    before = spaced_ids(prompt)
    text_of = CompletionText(spaced_decode, before)
    finder, taken = StopFinder(text_of, stop) if stop else None, []
    for token in ids:
        taken.append(token)
        if finder and finder.add(token):
            break
    whole = text_of(taken)
    if "\ufffd" not in spaced_decode(before) + whole:  # bytes that are no character change those before them
        assert spaced_decode(before) + whole == spaced_decode(before + taken)
    assert whole in (spaced_decode(taken), " " + spaced_decode(taken))
    places = [place for place in map(whole.find, stop) if place >= 0]
    cut = finder.cut(whole) if finder else None
    assert cut == (whole[: min(places)] if places else None)
    if cut is not None:
        kept = list(text_of.fewest(taken, cut))
        assert text_of(kept).startswith(cut)
        assert not any(text_of(taken[:n]).startswith(cut) for n in range(len(kept)))


def test_a_prompts_last_space_is_not_lost_nor_doubled() -> None:
    a, space_b = spaced_ids(["\u2581a"]), spaced_ids(["\u2581b", "\u2581a"])
    assert CompletionText(spaced_decode, a)(space_b) == " b a"
    assert CompletionText(spaced_decode)(space_b) == "b a"
    assert CompletionText(spaced_decode, a)([]) == ""
    half = spaced_ids(["a", "<0xC3>"])
    assert CompletionText(spaced_decode, half)(space_b) == " b a"
    assert CompletionText(spaced_decode, half)(spaced_ids(["<0xA9>", "b"])) == spaced_decode(
        spaced_ids(["<0xA9>", "b"])
    )


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 299), max_size=12), st.lists(st.integers(0, 299), max_size=12))
def test_the_prompt_changes_nothing_where_bytes_are_decoded(prompt: list[int], ids: list[int]) -> None:
    assert CompletionText(decode, prompt)(ids) == decode(ids)


class CountingDecode:
    def __init__(self, text_of_token: str = "\ufffd") -> None:
        self.tokens, self.calls, self.text_of_token = 0, 0, text_of_token

    def __call__(self, ids: Sequence[int]) -> str:
        self.tokens += len(ids)
        self.calls += 1
        return self.text_of_token * len(ids)


@pytest.mark.parametrize("text", ["\ufffd", "x", "", "ab"])
@pytest.mark.parametrize("num_tokens", [2_000, 20_000])
def test_the_number_of_decoded_tokens_is_linear(text: str, num_tokens: int) -> None:
    counting = CountingDecode(text)
    finder = StopFinder(CompletionText(counting), ["never"])
    assert not any(finder.add(1) for _ in range(num_tokens))
    assert counting.tokens <= 12 * num_tokens
    assert counting.calls <= 2 * num_tokens


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_completion_cut_inside_a_character_is_one_decode_of_its_tokens(max_tokens: int) -> None:
    model = make_model(make_config(), "cbatch", seed=3)
    for stop in ((), ("\ufffd\ufffd\ufffd\ufffd\ufffd",), ("unlikely",)):
        requests = [make_request(n, [n + 3, 4, 5], max_tokens=max_tokens, stop=stop) for n in range(6)]
        for completion in run(make_engine(model, decode=decode), requests):
            assert completion.text == decode(completion.token_ids)
            assert completion.finish_reason == "length"


def test_the_tokens_of_a_completion_are_the_fewest_that_hold_its_text() -> None:
    model = make_model(make_config(), "cbatch", seed=3)
    plain = [make_request(n, [n + 3, 4, 5], max_tokens=20) for n in range(8)]
    num_cut = 0
    for free in run(make_engine(model, decode=decode), plain):
        whole = free.text or ""
        for stop in {whole[5:7], whole[:1], whole[9:10]} - {""}:
            request = make_request(0, [free.row.index + 3, 4, 5], max_tokens=20, stop=[stop])
            [cut] = run(make_engine(model, decode=decode), [request])
            before = whole.split(stop)[0]
            assert cut.text == before
            assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
            assert decode(cut.token_ids).startswith(before)
            assert not cut.token_ids or not decode(cut.token_ids[:-1]).startswith(before)
            num_cut += len(cut.token_ids) < len(free.token_ids)
    assert num_cut > 8
