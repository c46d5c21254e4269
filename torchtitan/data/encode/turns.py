"""Finding the turns of the assistant in the text of a conversation."""

import re
from collections.abc import Sequence


def any_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern of names, of which the longest counts; of nothing if there are none."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def end_of_turn(text: str, tokens: re.Pattern[str]) -> int:
    """Where a text ends, without blanks after a token at its end."""
    short = text.rstrip()
    ends = [match.end() for match in tokens.finditer(short)]
    return len(short if ends and ends[-1] == len(short) else text)


def turns_after_prompts(text: str, prompt: str, tokens: re.Pattern[str]) -> list[tuple[int, int]]:
    """First character of each of the assistant's turns, and the one after its last, in a text in
    which each begins with the same prompt.

    A turn ends with the token that ends the text, or before the token with which prompts begin.
    Turns that follow each other are one, such as a chain of thought and its answer.
    """
    found = list(tokens.finditer(text))
    if not found or not (first := tokens.match(prompt)):
        return []
    turns: list[tuple[int, int]] = []
    at = text.find(prompt)
    while at >= 0:
        begin = at + len(prompt)
        end = len(text)
        for token in found:
            if token.start() >= begin and token[0] in (first[0], found[-1][0]):
                end = token.start() if token[0] == first[0] else token.end()
                break
        end = begin + end_of_turn(text[begin:end], tokens)
        if turns and not text[turns[-1][1] : at].strip():
            turns[-1] = turns[-1][0], end
        else:
            turns.append((begin, end))
        at = text.find(prompt, end)
    return turns
